"""HeroCon's sums over the negatives of every label, and the layout of labels for the kernels."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Num
from torch import Tensor
from torch.autograd.function import FunctionCtx

from heron.distributed.derivatives import first_derivative
from heron.losses.fused import layout
from heron.losses.fused.layout import Precision


def label_sums(
    anchors: Float[Tensor, "anchors dim"],
    keys: Float[Tensor, "keys dim"],
    anchor_y: Num[Tensor, "anchors labels"],
    key_y: Num[Tensor, "keys labels"],
    distance: Literal["hamming", "indicator"],
    precision: Precision | None = None,
    sides: "Sides | None" = None,
) -> Float[Tensor, "anchors labels"]:
    r"""Computes the repulsion in HeroCon's L_s (KDD 2022, Eq. 7), for each anchor and label.

    .. math:: D_{ia} = \sum_k dist(y_i, y_k) \exp(l_{ik}) (1 - y_{ka})

    A pair takes one product of vectors and two of labels (three in `fp16`), and in each gradient
    two of each (two and three). Sums are float32, differentiable once with respect to anchors and
    keys, and 0 where an anchor has no negative.

    Anchors have 1 / tau inside, and |logits| < 80. Labels are 0 or 1. The distance `indicator` is 0
    where the label vectors agree, else 1; distances are exact in every `precision`, for which see
    `exponential_sums`. `sides` are both sides' if they have been cast before.

    Raises:
        ValueError: widths differ or exceed 512, an unknown distance, or more than 128 labels.
        TypeError: the vectors are float64.
        TrainingError: there is no suitable GPU, or no Triton.
    """
    if distance not in ("hamming", "indicator"):
        raise ValueError(f"distance must be hamming or indicator, got {distance!r}")
    sides = sides or Sides.of(anchors, keys, anchor_y, key_y, precision)
    indicator, labels = distance == "indicator", anchor_y.shape[1]
    sums: Tensor = _LabelSums.apply(anchors, keys, sides, indicator, labels)  # type: ignore[no-untyped-call]
    return sums


@dataclass(frozen=True)
class Sides:
    """Vectors and label vectors of both sides of the pairs, cast; see `label_kernels`.

    `x` and `y` are anchors and keys with their `power` (see `layout.operands`). Of labels `anchor`
    is y, padded, and `key` is 1 - y, padded with zeros; `anchor_size` is -|y| and `key_size` |y|.
    """

    x: Tensor
    y: Tensor
    power: Tensor
    anchor: Tensor
    key: Tensor
    anchor_size: Tensor
    key_size: Tensor
    precision: Precision

    @classmethod
    def of(
        cls,
        anchors: Tensor,
        keys: Tensor,
        anchor_y: Tensor,
        key_y: Tensor,
        precision: Precision | None = None,
    ) -> "Sides":
        """Prepares vectors, and labels of 0 and 1."""
        layout.check_vectors(anchors, keys)
        precision = layout.choose_precision(precision, anchors, keys)
        labels = anchor_y.shape[1]
        if labels != key_y.shape[1] or labels > layout.WIDEST_SIDE:
            raise ValueError(
                "anchor_y and key_y must have the same number of labels, at most "
                f"{layout.WIDEST_SIDE}, got {labels} and {key_y.shape[1]}: for classes of which a "
                "row has one, use tags"
            )
        size = key_y.float().sum(1)
        anchor_size = size if anchor_y is key_y else anchor_y.float().sum(1)
        kind: Precision = "ieee" if precision == "ieee" else "bf16"
        of_labels = layout.operands(anchor_y, 1 - key_y.float(), kind)[:2]
        vectors = layout.operands(anchors, keys, precision, layout.LOG2E)
        return cls(*vectors, *of_labels, -anchor_size, size, precision)

    def label_vectors(self, of_anchors: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns label vectors and sizes, the anchors' or else the keys' first."""
        if of_anchors:
            return self.anchor, self.key, self.anchor_size, self.key_size
        return self.key, self.anchor, self.key_size, self.anchor_size

    def gradient(
        self, grad: Tensor, bound: Tensor, n: int, m: int, indicator: bool, *, of_anchors: bool
    ) -> Tensor:
        """Returns the gradient of the n anchors or keys, [n, d], of the other m.

        `grad` is that of the sums, and `bound` of each anchor's effect on any key.
        """
        from heron.losses.fused.label_kernels import label_gradient_kernel, label_slope_kernel

        x, y = (self.x, self.y) if of_anchors else (self.y, self.x)
        labels, d = self.label_vectors(of_anchors), x.shape[1]
        if n == 0 or m == 0:
            return x.new_zeros(n, d, dtype=torch.float32)
        anchors, grad = len(bound), grad.contiguous()
        high = torch.empty_like(self.anchor)
        rest = torch.empty_like(high) if self.precision == "fp16" else None
        factor = bound.new_empty(n if of_anchors else 1, 1)
        tile = layout.PREPARE
        layout.launch(
            label_slope_kernel, (len(high) // tile.rows,), tile, x,
            grad, bound if of_anchors else bound.amax(), self.power, high, rest, factor,
            anchors, grad.shape[1], layout.LOG2E,
            WIDTH=high.shape[1], OF_ANCHORS=of_anchors, TWICE=rest is not None,
            TOP=layout.TOP, ROWS=tile.rows,
        )  # fmt: skip
        tile = layout.choose_tile("label_gradient", self.precision, d)
        out = min(d, layout.WIDEST_SLICE)

        def chain(begin: int, end: int) -> Tensor:
            n_splits, per_split = layout.splits(n, end - begin, tile)
            gradient = x.new_empty(n_splits, n, d, dtype=torch.float32)
            layout.launch(
                label_gradient_kernel, (-(-n // tile.rows), n_splits, d // out), tile, x,
                x, y, *labels, high, rest, gradient, n, begin, end, per_split,
                D=d, OUT=out, WIDTH=high.shape[1], INDICATOR=indicator, ROWS_ARE_ANCHORS=of_anchors,
                TWICE=rest is not None, ROWS=tile.rows, COLUMNS=tile.columns,
            )  # fmt: skip
            return gradient.sum(0) if n_splits > 1 else gradient[0]

        return layout.sum_in_place(chain(*keys) for keys in layout.chains(m)).mul_(factor)


class _LabelSums(torch.autograd.Function):
    """Backward computes the logits again, once for the anchors and once for the keys."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, anchors: Tensor, keys: Tensor, sides: Sides, indicator: bool, count: int
    ) -> Tensor:
        from heron.losses.fused.label_kernels import label_sum_kernel

        a, k, precision = sides.x, sides.y, sides.precision
        n, m, labels = len(anchors), len(keys), sides.anchor.shape[1]
        tile = layout.choose_tile("label", precision, a.shape[1])

        def chain(begin: int, end: int) -> Tensor:
            n_splits, per_split = layout.splits(n, end - begin, tile)
            sums = a.new_empty(n_splits, n, labels, dtype=torch.float32)
            layout.launch(
                label_sum_kernel, (-(-n // tile.rows), n_splits), tile, a,
                a, k, sides.anchor, sides.key, sides.anchor_size, sides.key_size, sums,
                n, begin, end, per_split,
                D=a.shape[1], WIDTH=labels, INDICATOR=indicator, TWICE=precision == "fp16",
                ROWS=tile.rows, COLUMNS=tile.columns,
            )  # fmt: skip
            return sums.sum(0) if n_splits > 1 else sums[0]

        if n and m:
            sums = layout.sum_in_place(chain(*keys) for keys in layout.chains(m))
        else:
            sums = a.new_zeros(n, labels, dtype=torch.float32)
        sums = sums[:, :count]
        ctx.save_for_backward(sums)
        ctx.options = sides, indicator  # type: ignore[attr-defined]
        ctx.types = anchors.dtype, keys.dtype, n, keys.shape  # type: ignore[attr-defined]
        return sums

    @staticmethod
    @first_derivative
    def backward(ctx: FunctionCtx, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (sums,) = ctx.saved_tensors  # type: ignore[attr-defined]
        sides, indicator = ctx.options  # type: ignore[attr-defined]
        anchor_type, key_type, n, (m, d) = ctx.types  # type: ignore[attr-defined]
        anchors_need_grad, keys_need_grad, *_ = ctx.needs_input_grad  # type: ignore[attr-defined]
        bound = torch.linalg.vector_norm(grad_outputs[0] * sums, 1, dim=1)  # effect on any key
        d_anchors = d_keys = None
        if anchors_need_grad:
            d_anchors = sides.gradient(grad_outputs[0], bound, n, m, indicator, of_anchors=True)
            d_anchors = d_anchors[:, :d].to(anchor_type)
        if keys_need_grad:
            d_keys = sides.gradient(grad_outputs[0], bound, m, n, indicator, of_anchors=False)
            d_keys = d_keys[:, :d].to(key_type)
        return d_anchors, d_keys, None, None, None
