"""Sums of exponentials over an anchor's keys: the denominators of contrastive terms."""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float, Int32
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from heron.pipeline.objectives.fused import layout
from heron.pipeline.objectives.fused.layout import Precision

Pair = tuple[Tensor, Tensor]  # of the rows and of the columns of a tile


def exponential_sums(
    anchors: Float[Tensor, "anchors dim"],
    keys: Float[Tensor, "keys dim"],
    *,
    moments: tuple[float, ...] = (1.0,),
    floor: float = -math.inf,
    anchor_tag: Int32[Tensor, " anchors"] | None = None,
    key_tag: Int32[Tensor, " keys"] | None = None,
    anchor_weight: Float[Tensor, "anchors width"] | None = None,
    key_weight: Float[Tensor, "keys width"] | None = None,
    precision: Precision | None = None,
) -> Float[Tensor, "anchors moments"]:
    r"""Sum powers of f = exp(logit) over the keys, without a matrix of anchors by keys.

    .. math:: S_{ir} = \sum_k 1[t_i \ne t_k]\, (w_i \cdot w_k)\, 1[l_{ik} \ge floor]\,
              \exp(m_r l_{ik}), \qquad l_{ik} = a_i \cdot k_k

    One product of anchors and keys makes the sums, two more the gradient of the keys, and one that
    of the anchors: with a single exponential, d S_i / d a_i = m sum_k (summand) k_k is summed along
    with S, else the logits are computed once more. There is no running maximum: |m_r l| must stay
    below 80.

    Args:
        anchors: with 1 / tau already inside.
        keys: vectors of the same width.
        moments: one or two factors m_r of the logit; 0 counts the pairs. A first that is twice the
            second costs no exponential of its own.
        floor: pairs with smaller logits are left out; it gets no gradient.
        anchor_tag: with key_tag, leaves out the pairs of equal tag: a sample's own views, its
            class.
        key_tag: see anchor_tag.
        anchor_weight: with key_weight, weighs each pair by an inner product of at most 128
            columns; no gradient.
        key_weight: see anchor_weight.
        precision: of the products: `tf32`, `bf16` or `ieee` (float32, slow); by default `bf16` for
            bfloat16 vectors, else `tf32`. Sums are float32 always.

    Returns:
        float32, differentiable once with respect to anchors and keys; no keys make zeros.

    Raises:
        ValueError: widths that do not agree, a tag or weight without its partner, more than two
            moments, or more than 128 columns of weights.
        TypeError: float64 vectors.
        TrainingError: no GPU, or no Triton.
    """
    layout.check(anchors, keys)
    precision = layout.choose(precision, anchors, keys)
    if len(moments) not in (1, 2):
        raise ValueError(f"moments are {moments}; expected one or two numbers")
    tags = _both("tag", anchor_tag, key_tag)
    weights = _both("weight", anchor_weight, key_weight)
    if weights is not None:
        width = weights[0].shape[1]
        if width != weights[1].shape[1] or width > layout.WIDEST_SIDE:
            raise ValueError(
                f"anchor_weight has {width} columns and key_weight {weights[1].shape[1]}; expected "
                f"as many, at most {layout.WIDEST_SIDE}"
            )
        weights = (layout.operand(weights[0], precision), layout.operand(weights[1], precision))
    if tags is not None:
        tags = (tags[0].contiguous(), tags[1].contiguous())
    pairing = _Pairing(moments, floor, tags, weights, precision, _second(moments))
    gradient = torch.is_grad_enabled() and anchors.requires_grad
    sums: Tensor = _ExponentialSums.apply(  # type: ignore[no-untyped-call]
        anchors, keys, pairing, gradient
    )
    return sums


@dataclass(frozen=True)
class _Pairing:
    """Which pairs count, and for how much.

    Attributes:
        second: what the second sum is made of: `none` wanted, a `count`, the `root` of the first's
            exponential, or a `free` exponential.
    """

    moments: tuple[float, ...]
    floor: float
    tags: Pair | None
    weights: Pair | None
    precision: Precision
    second: Literal["none", "count", "root", "free"]

    @property
    def width(self) -> int:
        """Columns of the weights."""
        return 0 if self.weights is None else self.weights[0].shape[1]

    def swapped(self) -> "_Pairing":
        """With the keys on the rows."""
        return replace(
            self,
            tags=self.tags and (self.tags[1], self.tags[0]),
            weights=self.weights and (self.weights[1], self.weights[0]),
        )

    def tensors(self) -> tuple[Tensor | None, ...]:
        """The kernels' arguments for rows and columns."""
        return *(self.tags or (None, None)), *(self.weights or (None, None))

    def numbers(self) -> tuple[float, float, float]:
        return self.moments[0], self.moments[-1], self.floor

    def constants(self) -> dict[str, object]:
        return {
            "WIDTH": self.width,
            "TAGS": self.tags is not None,
            "WEIGHTS": self.weights is not None,
            "FLOOR": self.floor > -math.inf,
            "PRECISION": self.precision,
        }


class _ExponentialSums(torch.autograd.Function):
    """Forward makes the sums, and what the anchors' gradient needs if it can; see above."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, anchors: Tensor, keys: Tensor, pairing: _Pairing, gradient: bool
    ) -> Tensor:
        width = layout.widths(anchors.shape[1], pairing.precision).padded
        a, k = (layout.operand(x, pairing.precision, width) for x in (anchors, keys))
        pull = gradient and pairing.second in ("none", "count")
        sums, pulled = _sums(a, k, pairing, pull)
        ctx.save_for_backward(a, k, *(() if pulled is None else (pulled,)))
        ctx.pairing = pairing  # type: ignore[attr-defined]
        ctx.types = anchors.dtype, keys.dtype, anchors.shape[1]  # type: ignore[attr-defined]
        return sums.T

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        a, k, *pulled = ctx.saved_tensors  # type: ignore[attr-defined]
        pairing: _Pairing = ctx.pairing  # type: ignore[attr-defined]
        anchor_type, key_type, d = ctx.types  # type: ignore[attr-defined]
        for_anchors, for_keys, *_ = ctx.needs_input_grad  # type: ignore[attr-defined]
        scale = torch.stack([grad_outputs[0][:, r] * m for r, m in enumerate(pairing.moments)])
        if pairing.second == "count":  # of moment 0, which has no gradient
            pairing = replace(pairing, second="none")
        d_anchors = d_keys = None
        if for_anchors:
            if pulled:
                d_anchors = pulled[0] * scale[0, :, None]
            else:
                d_anchors = _gradient(a, k, pairing, scale, rows_are_anchors=True)
            d_anchors = d_anchors[:, :d].to(anchor_type)
        if for_keys:
            d_keys = _gradient(k, a, pairing.swapped(), scale, rows_are_anchors=False)
            d_keys = d_keys[:, :d].to(key_type)
        return d_anchors, d_keys, None, None


def _sums(a: Tensor, k: Tensor, pairing: _Pairing, pull: bool) -> tuple[Tensor, Tensor | None]:
    from heron.pipeline.objectives.fused.sum_kernels import sum_kernel

    n, m = len(a), len(k)
    heads = len(pairing.moments)
    if n == 0 or m == 0:
        return a.new_zeros(heads, n, dtype=torch.float32), a.new_zeros(a.shape) if pull else None
    width = layout.widths(a.shape[1], pairing.precision)
    cut = layout.blocks("gradient" if pull else "sum", pairing.precision, width.out + pairing.width)
    parts, per_part = layout.splits(n, m, cut)
    sums = a.new_empty(parts, heads, n, dtype=torch.float32)
    pulls = a.new_empty(parts, *a.shape, dtype=torch.float32) if pull else None
    grid = (-(-n // cut.rows), parts, a.shape[1] // width.out if pull else 1)
    layout.launch(
        sum_kernel, grid, cut, a,
        a, k, *pairing.tensors(), sums, pulls, n, m, per_part, *pairing.numbers(),
        D=width.padded, CHUNK=width.chunk, OUT=width.out, ROWS=cut.rows, COLUMNS=cut.columns,
        SECOND=pairing.second, PULL=pull, **pairing.constants(),
    )  # fmt: skip
    return sums.sum(0), None if pulls is None else pulls.sum(0)


def _gradient(
    x: Tensor, y: Tensor, pairing: _Pairing, scale: Tensor, *, rows_are_anchors: bool
) -> Tensor:
    from heron.pipeline.objectives.fused.sum_kernels import sum_gradient_kernel

    n, m = len(x), len(y)
    if n == 0 or m == 0:
        return x.new_zeros(x.shape, dtype=torch.float32)
    width = layout.widths(x.shape[1], pairing.precision)
    cut = layout.blocks("gradient", pairing.precision, width.out + pairing.width)
    parts, per_part = layout.splits(n, m, cut)
    gradient = x.new_empty(parts, *x.shape, dtype=torch.float32)
    layout.launch(
        sum_gradient_kernel, (-(-n // cut.rows), parts, x.shape[1] // width.out), cut, x,
        x, y, *pairing.tensors(), scale, gradient, n, m, per_part, *pairing.numbers(),
        D=width.padded, CHUNK=width.chunk, OUT=width.out, ROWS=cut.rows, COLUMNS=cut.columns,
        SECOND=pairing.second, ROWS_ARE_ANCHORS=rows_are_anchors, **pairing.constants(),
    )  # fmt: skip
    return gradient.sum(0)


def _both(what: str, of_anchors: Tensor | None, of_keys: Tensor | None) -> Pair | None:
    if of_anchors is None and of_keys is None:
        return None
    if of_anchors is None or of_keys is None:
        given, lacking = ("key", "anchor") if of_anchors is None else ("anchor", "key")
        raise ValueError(f"{given}_{what} is given without {lacking}_{what}; expected both")
    return of_anchors, of_keys


def _second(moments: tuple[float, ...]) -> Literal["none", "count", "root", "free"]:
    if len(moments) == 1:
        return "none"
    if moments[1] == 0:
        return "count"
    return "root" if moments[0] == 2 * moments[1] else "free"
