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

    One product of anchors and keys makes the sums, two more the gradient of either side, since the
    logits are computed once more. There is no running maximum: |m_r l| must stay below 80.

    Args:
        anchors: with 1 / tau already inside.
        keys: vectors of the same width.
        moments: one or two factors m_r >= 0 of the logit; 0 counts the pairs. A first that is twice
            the second costs no exponential of its own.
        floor: pairs with smaller logits are left out; it gets no gradient.
        anchor_tag: with key_tag, leaves out the pairs of equal tag: a sample's own views, its
            class.
        key_tag: see anchor_tag.
        anchor_weight: with key_weight, weighs each pair by an inner product of at most 128
            columns, none of them negative; no gradient.
        key_weight: see anchor_weight.
        precision: of the products: `fp16` (11 bits, scaled by a power of two; see
            `layout.operands`), `bf16` (8 bits) or `ieee` (float32, slow); by default `bf16` for
            bfloat16 vectors, else `layout.prefer`'s. Sums are float32 always.

    Returns:
        float32, differentiable once with respect to anchors and keys; no keys make zeros.

    Raises:
        ValueError: widths that do not agree or above 512, a tag or weight without its partner, more
            than two moments or negative ones, or more than 128 columns of weights.
        TypeError: float64 vectors.
        TrainingError: no GPU, or no Triton.
    """
    layout.check(anchors, keys)
    precision = layout.choose(precision, anchors, keys)
    if len(moments) not in (1, 2) or min(moments) < 0 or moments == (0, 0):
        raise ValueError(f"moments are {moments}; expected one or two, above 0 but for one")
    if moments[0] == 0:  # the kernels take the exponential first
        other = moments[1:] or (1.0,)
        counted = exponential_sums(
            anchors, keys, moments=(*other, 0.0), floor=floor, precision=precision,
            anchor_tag=anchor_tag, key_tag=key_tag,
            anchor_weight=anchor_weight, key_weight=key_weight,
        ).flip(1)  # fmt: skip
        return counted[:, : len(moments)]
    pairing = _Pairing(
        moments,
        floor,
        _both("tag", anchor_tag, key_tag),
        _weights(anchor_weight, key_weight, precision),
        precision,
    )
    sums: Tensor = _ExponentialSums.apply(anchors, keys, pairing)  # type: ignore[no-untyped-call]
    return sums


def mutual_gradient(
    anchors: Float[Tensor, "anchors dim"],
    keys: Float[Tensor, "keys dim"],
    own: Float[Tensor, "anchors moments"],
    of_keys: Float[Tensor, "keys moments"],
    *,
    moments: tuple[float, ...] = (1.0,),
    floor: float = -math.inf,
    anchor_tag: Int32[Tensor, " anchors"] | None = None,
    key_tag: Int32[Tensor, " keys"] | None = None,
    bound: Float[Tensor, ""] | None = None,
    precision: Precision | None = None,
) -> Float[Tensor, "anchors dim"]:
    r"""What all pairs of a row owe it, where it is an anchor and a key of all others.

    .. math:: g_i = \sum_k 1[t_i \ne t_k]\, 1[l_{ik} \ge floor]\,
              \sum_r (own_{ir} + of\_keys_{kr}) \exp(m_r l_{ik})\, k_k

    It takes two products, and in `fp16` a third unless `bound` is given.

    Args:
        anchors: with 1 / tau already inside.
        keys: vectors of the same width.
        own: the derivative of the loss by the anchors' sums, times the moments.
        of_keys: the same of the keys as anchors.
        moments: one or two factors of the logit, of which the first is above 0.
        floor: pairs with smaller logits are left out.
        anchor_tag: with key_tag, leaves out the pairs of equal tag.
        key_tag: see anchor_tag.
        bound: what no |own_ir + of_keys_kr| exp(m_r l_ik) exceeds, such as twice the largest
            |own_ir| S_ir of all rows; keeps these numbers in fp16's range.
        precision: see `exponential_sums`.

    Returns:
        float32, not differentiable.

    Raises:
        ValueError, TypeError, TrainingError: see `exponential_sums`.
    """
    layout.check(anchors, keys)
    precision = layout.choose(precision, anchors, keys)
    if len(moments) not in (1, 2) or not moments[0] > 0:
        raise ValueError(f"moments are {moments}; expected one or two, the first above 0")
    pairing = _Pairing(moments, floor, _both("tag", anchor_tag, key_tag), None, precision)
    a, k, power = layout.operands(anchors, keys, precision, moments[0] * layout.LOG2E)
    sizes = len(anchors), len(keys)
    if bound is None and precision == "fp16" and min(sizes):
        most = [x.detach().float().abs().amax(1, keepdim=True) for x in (own, of_keys)]
        top = torch.maximum(*(x.amax() for x in most)).clamp(min=torch.finfo(torch.float32).tiny)
        ours, theirs = (x / top for x in most)
        left = torch.cat([ours, torch.ones_like(ours)], 1)
        pair = _weights(left, torch.cat([torch.ones_like(theirs), theirs], 1), precision)
        bound = _sums(a, k, sizes, replace(pairing, weights=pair)).sum(0).amax() * top
    room = power if bound is None else layout.headroom(bound)
    if pairing.second == "count":  # which has no gradient
        pairing = replace(pairing, moments=moments[:1])
    heads = len(pairing.moments)
    of_x, of_y = ((x[:, :heads].T.float() * room).contiguous() for x in (own, of_keys))
    pulls = _pulls(a, k, sizes, pairing, of_x=of_x, of_y=of_y)
    return (pulls * (power / room))[:, : anchors.shape[1]]


@dataclass(frozen=True)
class _Pairing:
    """Which pairs count, and for how much; the pair's first is of the rows."""

    moments: tuple[float, ...]
    floor: float
    tags: Pair | None
    weights: Pair | None
    precision: Precision

    @property
    def second(self) -> Literal["none", "count", "root", "free"]:
        """What the second sum is made of: a count, the root of the first's exponential, its own."""
        if len(self.moments) == 1:
            return "none"
        if self.moments[1] == 0:
            return "count"
        return "root" if self.moments[0] == 2 * self.moments[1] else "free"

    def swapped(self) -> "_Pairing":
        """With the keys on the rows."""
        return replace(
            self,
            tags=self.tags and (self.tags[1], self.tags[0]),
            weights=self.weights and (self.weights[1], self.weights[0]),
        )

    def tensors(self, cut: layout.Tiling) -> tuple[Tensor | None, ...]:
        """The kernels' arguments for rows and columns."""
        tags: tuple[Tensor | None, ...] = (None,) * 4
        if self.tags is not None:
            sizes = (cut.rows, cut.columns)
            tags = *self.tags, *(layout.ranges(t, s) for t, s in zip(self.tags, sizes, strict=True))
        return *tags, *(self.weights or (None, None))

    def numbers(self) -> tuple[float, float]:
        """The second moment by the first, which is inside the logits, and the floor of these."""
        return self.moments[-1] / self.moments[0], self.floor * self.moments[0] * layout.LOG2E

    def constants(self) -> dict[str, object]:
        return {
            "WIDTH": 0 if self.weights is None else self.weights[0].shape[1],
            "TAGS": self.tags is not None,
            "WEIGHTS": self.weights is not None,
            "FLOOR": self.floor > -math.inf,
            "SECOND": self.second,
        }


class _ExponentialSums(torch.autograd.Function):
    """Forward makes the sums; backward makes the exponentials again, once for either side."""

    @staticmethod
    def forward(ctx: FunctionCtx, anchors: Tensor, keys: Tensor, pairing: _Pairing) -> Tensor:
        fold = pairing.moments[0] * layout.LOG2E
        a, k, power = layout.operands(anchors, keys, pairing.precision, fold)
        sums = _sums(a, k, (len(anchors), len(keys)), pairing)
        ctx.save_for_backward(a, k, power, sums)
        ctx.pairing = pairing  # type: ignore[attr-defined]
        ctx.types = anchors.dtype, keys.dtype, keys.shape  # type: ignore[attr-defined]
        return sums.T

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        a, k, power, sums = ctx.saved_tensors  # type: ignore[attr-defined]
        pairing: _Pairing = ctx.pairing  # type: ignore[attr-defined]
        anchor_type, key_type, (m, d) = ctx.types  # type: ignore[attr-defined]
        for_anchors, for_keys, *_ = ctx.needs_input_grad  # type: ignore[attr-defined]
        scale = torch.stack([grad_outputs[0][:, r] * m for r, m in enumerate(pairing.moments)])
        if pairing.second == "count":  # which has no gradient
            pairing, scale, sums = (
                replace(pairing, moments=pairing.moments[:1]),
                scale[:1],
                sums[:1],
            )
        n = scale.shape[1]
        bound = (scale.abs() * sums).sum(0)  # of what an anchor does to any key
        d_anchors = d_keys = None
        if for_anchors:
            room = layout.headroom(bound)
            d_anchors = _pulls(a, k, (n, m), pairing, of_x=scale * room)
            d_anchors = (d_anchors * (power / room)[:, None])[:, :d].to(anchor_type)
        if for_keys:
            room = layout.headroom(bound.amax()) if n else power
            d_keys = _pulls(k, a, (m, n), pairing.swapped(), of_y=scale * room)
            fold = pairing.moments[0] * layout.LOG2E
            d_keys = (d_keys * (1 / (fold * power * room)))[:, :d].to(key_type)
        return d_anchors, d_keys, None


def _sums(a: Tensor, k: Tensor, sizes: tuple[int, int], pairing: _Pairing) -> Tensor:
    from heron.pipeline.objectives.fused.sum_kernels import sum_kernel

    (n, m), d = sizes, a.shape[1]
    heads = len(pairing.moments)
    if n == 0 or m == 0:
        return a.new_zeros(heads, n, dtype=torch.float32)
    cut = layout.blocks("sum", pairing.precision, d)
    parts, per_part = layout.splits(n, m, cut)
    sums = a.new_empty(parts, heads, n, dtype=torch.float32)
    layout.launch(
        sum_kernel, (-(-n // cut.rows), parts), cut, a,
        a, k, *pairing.tensors(cut), sums, n, m, per_part, *pairing.numbers(),
        D=d, ROWS=cut.rows, COLUMNS=cut.columns, **pairing.constants(),
    )  # fmt: skip
    return sums.sum(0) if parts > 1 else sums[0]


def _pulls(
    x: Tensor,
    y: Tensor,
    sizes: tuple[int, int],
    pairing: _Pairing,
    *,
    of_x: Tensor | None = None,
    of_y: Tensor | None = None,
) -> Tensor:
    """sum_k (s_i + s_k) e_ik y_k, [n, d]; `of_x` are the s of x as anchors, `of_y` those of y."""
    from heron.pipeline.objectives.fused.sum_kernels import pull_kernel

    (n, m), d = sizes, x.shape[1]
    if n == 0 or m == 0:
        return x.new_zeros(n, d, dtype=torch.float32)
    cut = layout.blocks("pull", pairing.precision, d)
    tensors = pairing.tensors(cut)

    def chain(begin: int, end: int) -> Tensor:
        parts, per_part = layout.splits(n, end - begin, cut)
        pulls = x.new_empty(parts, n, d, dtype=torch.float32)
        layout.launch(
            pull_kernel, (-(-n // cut.rows), parts), cut, x,
            x, y, *tensors, of_x, of_y, pulls, n, m, begin, end, per_part, *pairing.numbers(),
            D=d, ROWS=cut.rows, COLUMNS=cut.columns,
            OF_X=of_x is not None, OF_Y=of_y is not None, **pairing.constants(),
        )  # fmt: skip
        return pulls.sum(0) if parts > 1 else pulls[0]

    return layout.total(chain(*keys) for keys in layout.chains(m))


def _both(what: str, of_anchors: Tensor | None, of_keys: Tensor | None) -> Pair | None:
    if of_anchors is None and of_keys is None:
        return None
    if of_anchors is None or of_keys is None:
        given, lacking = ("key", "anchor") if of_anchors is None else ("anchor", "key")
        raise ValueError(f"{given}_{what} is given without {lacking}_{what}; expected both")
    return of_anchors.contiguous(), of_keys.contiguous()


def _weights(
    of_anchors: Tensor | None, of_keys: Tensor | None, precision: Precision
) -> Pair | None:
    weights = _both("weight", of_anchors, of_keys)
    if weights is None:
        return None
    width = weights[0].shape[1]
    if width != weights[1].shape[1] or width > layout.WIDEST_SIDE:
        raise ValueError(
            f"anchor_weight has {width} columns and key_weight {weights[1].shape[1]}; expected as "
            f"many, at most {layout.WIDEST_SIDE}"
        )
    return layout.operands(*weights, precision)[:2]
