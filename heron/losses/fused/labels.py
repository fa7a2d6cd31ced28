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
) -> Float[Tensor, "anchors labels"]:
    r"""Computes the repulsion in HeroCon's L_s (KDD 2022, Eq. 7), for each anchor and label.

    .. math:: D_{ia} = \sum_k dist(y_i, y_k) \exp(l_{ik}) (1 - y_{ka})

    A pair takes one product of vectors and two of labels (three in `fp16`), and in each gradient
    two of each (two and three). Sums are float32, differentiable once with respect to anchors and
    keys, and 0 where an anchor has no negative: take their logarithm by `log_sums`.

    Anchors have 1 / tau inside, and |logits| < 80. Labels are 0 or 1. The distance `indicator` is 0
    where the label vectors agree, else 1; distances are exact in every `precision`, for which see
    `exponential_sums`.

    Raises:
        ValueError: widths differ or exceed 512, an unknown distance, or more than 128 labels.
        TypeError: the vectors are float64.
        TrainingError: there is no suitable GPU, or no Triton.
    """
    layout.check_vectors(anchors, keys)
    precision = layout.choose_precision(precision, anchors, keys)
    if distance not in ("hamming", "indicator"):
        raise ValueError(f"distance must be hamming or indicator, got {distance!r}")
    sides = Sides.of(anchor_y, key_y, precision)
    sums: Tensor = _LabelSums.apply(  # type: ignore[no-untyped-call]
        anchors, keys, sides, distance == "indicator", precision
    )
    return sums[:, : anchor_y.shape[1]]


def log_sums(sums: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Returns the logarithm, which is -inf at 0 with gradient 0 (torch's own would be NaN)."""
    positive = sums > 0
    return torch.where(positive, torch.where(positive, sums, 1.0).log(), -torch.inf)


@dataclass(frozen=True)
class Sides:
    """The label vectors of both sides of the pairs, and their sizes; see `label_kernels`.

    `anchor` is y, padded, and `key` is 1 - y, padded with zeros; `anchor_size` is -|y| and
    `key_size` is |y|.
    """

    anchor: Tensor
    key: Tensor
    anchor_size: Tensor
    key_size: Tensor

    @classmethod
    def of(cls, anchor_y: Tensor, key_y: Tensor, precision: Precision) -> "Sides":
        """Prepares labels of 0 and 1."""
        labels = anchor_y.shape[1]
        if labels != key_y.shape[1] or labels > layout.WIDEST_SIDE:
            raise ValueError(
                "anchor_y and key_y must have the same number of labels, at most "
                f"{layout.WIDEST_SIDE}, got {labels} and {key_y.shape[1]}: for classes of which a "
                "row has one, use tags"
            )
        anchor_y, key_y = anchor_y.detach().float(), key_y.detach().float()
        kind: Precision = "ieee" if precision == "ieee" else "bf16"
        a, k, _ = layout.operands(anchor_y, 1 - key_y, kind)
        return cls(a, k, -anchor_y.sum(1), key_y.sum(1))


class _LabelSums(torch.autograd.Function):
    """Backward computes the logits again, once for the anchors and once for the keys."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        anchors: Tensor,
        keys: Tensor,
        sides: Sides,
        indicator: bool,
        precision: Precision,
    ) -> Tensor:
        from heron.losses.fused.label_kernels import label_sum_kernel

        a, k, power = layout.operands(anchors, keys, precision, layout.LOG2E)
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
            return sums.sum(0)

        if n and m:
            sums = layout.sum_in_place(chain(*keys) for keys in layout.chains(m))
        else:
            sums = a.new_zeros(n, labels, dtype=torch.float32)
        ctx.save_for_backward(a, k, power, sums)
        ctx.options = sides, indicator, precision  # type: ignore[attr-defined]
        ctx.types = anchors.dtype, keys.dtype, keys.shape  # type: ignore[attr-defined]
        return sums

    @staticmethod
    @first_derivative
    def backward(ctx: FunctionCtx, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        a, k, power, sums = ctx.saved_tensors  # type: ignore[attr-defined]
        sides, indicator, precision = ctx.options  # type: ignore[attr-defined]
        anchor_type, key_type, (m, d) = ctx.types  # type: ignore[attr-defined]
        anchors_need_grad, keys_need_grad, *_ = ctx.needs_input_grad  # type: ignore[attr-defined]
        grad, n = grad_outputs[0], len(grad_outputs[0])
        bound = (grad.abs() * sums).sum(1)  # of an anchor's effect on any key
        d_anchors = d_keys = None
        if anchors_need_grad:
            labels = sides.anchor, sides.key, sides.anchor_size, sides.key_size
            room = layout.headroom(bound)[:, None]
            d_anchors = _gradient(
                a, k, (n, m), labels, grad * room, indicator, precision, of_anchors=True
            )
            d_anchors = (d_anchors * (power / room))[:, :d].to(anchor_type)
        if keys_need_grad:
            labels = sides.key, sides.anchor, sides.key_size, sides.anchor_size
            room = layout.headroom(bound.amax()) if n else power
            d_keys = _gradient(
                k, a, (m, n), labels, grad * room, indicator, precision, of_anchors=False
            )
            d_keys = (d_keys * (1 / (layout.LOG2E * power * room)))[:, :d].to(key_type)
        return d_anchors, d_keys, None, None, None


def _gradient(
    x: Tensor,
    y: Tensor,
    sizes: tuple[int, int],
    labels: tuple[Tensor, Tensor, Tensor, Tensor],
    grad: Tensor,
    indicator: bool,
    precision: Precision,
    *,
    of_anchors: bool,
) -> Tensor:
    """Returns the gradient of x, [n, d]; `of_anchors`: x are the anchors and y the keys."""
    from heron.losses.fused.label_kernels import label_gradient_kernel

    (n, m), d = sizes, x.shape[1]
    if n == 0 or m == 0:
        return x.new_zeros(n, d, dtype=torch.float32)
    kind: Precision = "ieee" if precision == "ieee" else "bf16"
    high = layout.cast_and_pad(grad, kind)
    rest = (
        layout.cast_and_pad(grad - grad.bfloat16().float(), kind) if precision == "fp16" else None
    )
    tile, out = layout.choose_tile("label_gradient", precision, d), min(d, layout.WIDEST_SLICE)

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

    return layout.sum_in_place(chain(*keys) for keys in layout.chains(m))
