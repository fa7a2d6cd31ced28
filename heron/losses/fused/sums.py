"""Sums of exponentials over an anchor's keys: the denominators of contrastive terms."""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float, Int32
from torch import Tensor
from torch.autograd.function import FunctionCtx

from heron.distributed.derivatives import first_derivative
from heron.losses.fused import layout
from heron.losses.fused.layout import Precision

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
    r"""Sums powers of f = exp(logit) over the keys, without a matrix of anchors by keys.

    .. math:: S_{ir} = \sum_k 1[t_i \ne t_k]\, (w_i \cdot w_k)\, 1[l_{ik} \ge floor]\,
              \exp(m_r l_{ik}), \qquad l_{ik} = a_i \cdot k_k

    The sums take one product of anchors and keys, the gradient of either side two more, since the
    logits are computed again. There is no running maximum: |m_r l| must stay below 80. Sums are
    float32, differentiable once with respect to anchors and keys, and 0 without keys.

    Args:
        anchors: vectors with 1 / tau already inside.
        keys: vectors of the same width.
        moments: one or two factors m_r >= 0 of the logit; 0 counts the pairs. If the first is twice
            the second, it costs no exponential of its own.
        floor: pairs with smaller logits are left out; no gradient.
        anchor_tag: with key_tag, leaves out the pairs of equal tag, such as a sample's own views or
            its class.
        key_tag: the tags of the keys.
        anchor_weight: with key_weight, weights each pair by an inner product of at most 128
            nonnegative columns; no gradient.
        key_weight: the weights of the keys.
        precision: precision of the products: `fp16` (11 bits, scaled by a power of two; see
            `layout.operands`), `bf16` (8 bits) or `ieee` (float32, slow); by default `bf16` for
            bfloat16 vectors, else that of `layout.set_default_precision`.

    Raises:
        ValueError: widths differ or exceed 512, a tag or weight lacks its partner, there are more
            than two moments or negative ones, or more than 128 columns of weights.
        TypeError: the vectors are float64.
        TrainingError: there is no suitable GPU, or no Triton.
    """
    layout.check_vectors(anchors, keys)
    precision = layout.choose_precision(precision, anchors, keys)
    if len(moments) not in (1, 2) or min(moments) < 0 or moments == (0, 0):
        raise ValueError(f"moments must be one, or two with only one of 0, got {moments}")
    if moments[0] == 0:  # the kernels take the count as the second moment
        other = moments[1:] or (1.0,)
        swapped = exponential_sums(
            anchors, keys, moments=(*other, 0.0), floor=floor, precision=precision,
            anchor_tag=anchor_tag, key_tag=key_tag,
            anchor_weight=anchor_weight, key_weight=key_weight,
        ).flip(1)  # fmt: skip
        return swapped[:, : len(moments)]
    pairing = _Pairing(
        moments,
        floor,
        _require_both("tag", anchor_tag, key_tag),
        _weights(anchor_weight, key_weight, precision),
        precision,
    )
    sums: Tensor = _ExponentialSums.apply(anchors, keys, pairing)  # type: ignore[no-untyped-call]
    return sums


def mutual_operands(
    anchors: Float[Tensor, "anchors dim"],
    keys: Float[Tensor, "keys dim"],
    *,
    moments: tuple[float, ...] = (1.0,),
    floor: float = -math.inf,
    anchor_tag: Int32[Tensor, " anchors"] | None = None,
    key_tag: Int32[Tensor, " keys"] | None = None,
    precision: Precision | None = None,
) -> "Operands":
    """Casts rows that are each other's keys once, for their sums and for their whole gradient.

    The first moment must be above 0. See `exponential_sums` for the arguments and the errors.
    """
    layout.check_vectors(anchors, keys)
    precision = layout.choose_precision(precision, anchors, keys)
    if len(moments) not in (1, 2) or not moments[0] > 0:
        raise ValueError(f"moments must be one or two, the first above 0, got {moments}")
    tags = _require_both("tag", anchor_tag, key_tag)
    a, k, power = layout.operands(anchors, keys, precision, moments[0] * layout.LOG2E)
    pairing = _Pairing(moments, floor, tags, None, precision)
    return Operands(a, k, power, (len(anchors), len(keys), anchors.shape[1]), pairing)


@dataclass(frozen=True)
class Operands:
    """Anchors and keys that are each other's, cast for products, and their pairs.

    Attributes:
        anchors: in the type of products, padded.
        keys: the same.
        power: see `layout.operands`.
        sizes: the numbers of anchors, keys and columns.
        pairing: which pairs count.
    """

    anchors: Tensor
    keys: Tensor
    power: Tensor
    sizes: tuple[int, int, int]
    pairing: "_Pairing"

    def sums(self) -> Float[Tensor, "anchors moments"]:
        """Returns what `exponential_sums` does, without a gradient."""
        return _sums(self.anchors, self.keys, self.sizes[:2], self.pairing).T

    def gradient(
        self, slopes: Pair, sums: Pair | None = None, bound: Tensor | None = None
    ) -> Float[Tensor, "anchors dim"]:
        r"""Computes a row's whole gradient, as an anchor and as a key of all other rows.

        .. math:: g_i = \sum_k 1[t_i \ne t_k]\, 1[l_{ik} \ge floor]\,
                  \sum_r (s_{ir} + s'_{kr}) \exp(m_r l_{ik})\, k_k

        The slopes s, [anchors, moments], are the derivative of the loss by the anchors' sums, times
        the moments, and s' the same of the keys as anchors. The sums of all anchors, and of the
        keys that are anchors, keep |s_ir + s'_kr| exp(m_r l_ik) in fp16's range; so does `bound`,
        an upper bound of it. The gradient is float32 and not differentiable. It takes two products,
        and in `fp16` a third if neither is known.
        """
        a, k, power, pairing = self.anchors, self.keys, self.power, self.pairing
        sizes = self.sizes[:2]
        if pairing.second == "count":  # which has no gradient
            pairing = replace(pairing, moments=pairing.moments[:1])
        heads = len(pairing.moments)
        if sums is not None and min(sizes):
            x_scale, y_scale, factor = layout.scale_slopes(slopes, sums, power, heads)
        else:
            if bound is None and pairing.precision == "fp16" and min(sizes):
                bound = self._bound(slopes)
            room = power if bound is None else layout.headroom(bound)
            x_scale, y_scale = ((x[:, :heads].T.float() * room).contiguous() for x in slopes)
            factor = power / room
        scales = {"x_scale": x_scale, "y_scale": y_scale, "factor": factor}
        return _pulls(a, k, sizes, pairing, **scales)[:, : self.sizes[2]]

    def _bound(self, slopes: Pair) -> Tensor:
        """Returns the largest sum of |s_i| + |s'_k| times exponentials, by two-column weights."""
        largest = [x.detach().float().abs().amax(1, keepdim=True) for x in slopes]
        top = torch.maximum(*(x.amax() for x in largest)).clamp(min=torch.finfo(torch.float32).tiny)
        s, t = (x / top for x in largest)
        left, right = torch.cat([s, torch.ones_like(s)], 1), torch.cat([torch.ones_like(t), t], 1)
        weights = _weights(left, right, self.pairing.precision)
        weighted = replace(self.pairing, weights=weights)
        return _sums(self.anchors, self.keys, self.sizes[:2], weighted).sum(0).amax() * top


@dataclass(frozen=True)
class _Pairing:
    """Which pairs count, and their weights; the first of each `Pair` belongs to the tile's rows."""

    moments: tuple[float, ...]
    floor: float
    tags: Pair | None
    weights: Pair | None
    precision: Precision

    @property
    def second(self) -> Literal["none", "count", "root", "free"]:
        """How the second sum is computed: by counting, the first's square root, or on its own."""
        if len(self.moments) == 1:
            return "none"
        if self.moments[1] == 0:
            return "count"
        return "root" if self.moments[0] == 2 * self.moments[1] else "free"

    def kind(self, kernel: Literal["sum", "pull"]) -> layout.Kind:
        """Returns the kind of tile that a kernel has, which is smaller beside weights."""
        if kernel == "sum":
            return "sum" if self.weights is None else "weighted_sum"
        return "pull" if self.weights is None else "weighted_pull"

    def swapped(self) -> "_Pairing":
        """Returns the pairing with the keys on the rows of the tile."""
        return replace(
            self,
            tags=self.tags and (self.tags[1], self.tags[0]),
            weights=self.weights and (self.weights[1], self.weights[0]),
        )

    def tensors(self, tile: layout.Tiling) -> tuple[Tensor | None, ...]:
        """Returns the kernels' arguments for tags and weights."""
        tags: tuple[Tensor | None, ...] = (None,) * 4
        if self.tags is not None:
            by_side = zip(self.tags, (tile.rows, tile.columns), strict=True)
            tags = *self.tags, *(layout.tile_ranges(t, size) for t, size in by_side)
        return *tags, *(self.weights or (None, None))

    def numbers(self) -> tuple[float, float]:
        """Returns the ratio of second and first moment, and the floor of the scaled logits."""
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
    """Forward computes the sums; backward the exponentials again, once for each side."""

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
    @first_derivative
    def backward(ctx: FunctionCtx, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        a, k, power, sums = ctx.saved_tensors  # type: ignore[attr-defined]
        pairing: _Pairing = ctx.pairing  # type: ignore[attr-defined]
        anchor_type, key_type, (m, d) = ctx.types  # type: ignore[attr-defined]
        anchors_need_grad, keys_need_grad, *_ = ctx.needs_input_grad  # type: ignore[attr-defined]
        scale = torch.stack([grad_outputs[0][:, r] * m for r, m in enumerate(pairing.moments)])
        if pairing.second == "count":  # which has no gradient
            pairing = replace(pairing, moments=pairing.moments[:1])
            scale, sums = scale[:1], sums[:1]
        n = scale.shape[1]
        bound = (scale.abs() * sums).sum(0)  # of an anchor's effect on any key
        d_anchors = d_keys = None
        if anchors_need_grad:
            room = layout.headroom(bound)
            d_anchors = _pulls(a, k, (n, m), pairing, x_scale=scale * room)
            d_anchors = (d_anchors * (power / room)[:, None])[:, :d].to(anchor_type)
        if keys_need_grad:
            room = layout.headroom(bound.amax()) if n else power
            d_keys = _pulls(k, a, (m, n), pairing.swapped(), y_scale=scale * room)
            fold = pairing.moments[0] * layout.LOG2E
            d_keys = (d_keys * (1 / (fold * power * room)))[:, :d].to(key_type)
        return d_anchors, d_keys, None


def _sums(a: Tensor, k: Tensor, sizes: tuple[int, int], pairing: _Pairing) -> Tensor:
    from heron.losses.fused.sum_kernels import sum_kernel

    (n, m), d = sizes, a.shape[1]
    heads = len(pairing.moments)
    if n == 0 or m == 0:
        return a.new_zeros(heads, n, dtype=torch.float32)
    tile = layout.choose_tile(pairing.kind("sum"), pairing.precision, d)
    n_splits, per_split = layout.splits(n, m, tile)
    sums = a.new_empty(n_splits, heads, n, dtype=torch.float32)
    layout.launch(
        sum_kernel, (-(-n // tile.rows), n_splits), tile, a,
        a, k, *pairing.tensors(tile), sums, n, m, per_split, *pairing.numbers(),
        D=d, ROWS=tile.rows, COLUMNS=tile.columns, **pairing.constants(),
    )  # fmt: skip
    return sums.sum(0) if n_splits > 1 else sums[0]


def _pulls(
    x: Tensor,
    y: Tensor,
    sizes: tuple[int, int],
    pairing: _Pairing,
    *,
    x_scale: Tensor | None = None,
    y_scale: Tensor | None = None,
    factor: Tensor | None = None,
) -> Tensor:
    """Returns `factor` sum_k (s_i + s_k) e_ik y_k, [n, d]: s_i in `x_scale`, s_k in `y_scale`."""
    from heron.losses.fused.sum_kernels import pull_kernel

    (n, m), d = sizes, x.shape[1]
    if n == 0 or m == 0:
        return x.new_zeros(n, d, dtype=torch.float32)
    tile = layout.choose_tile(pairing.kind("pull"), pairing.precision, d)
    tensors = pairing.tensors(tile)

    def chain(begin: int, end: int) -> Tensor:
        n_splits, per_split = layout.splits(n, end - begin, tile)
        pulls = x.new_empty(n_splits, n, d, dtype=torch.float32)
        layout.launch(
            pull_kernel, (-(-n // tile.rows), n_splits), tile, x,
            x, y, *tensors, x_scale, y_scale, factor, pulls, n, m, begin, end, per_split,
            *pairing.numbers(),
            D=d, ROWS=tile.rows, COLUMNS=tile.columns,
            OF_X=x_scale is not None, OF_Y=y_scale is not None, SCALED=factor is not None,
            **pairing.constants(),
        )  # fmt: skip
        return pulls.sum(0) if n_splits > 1 else pulls[0]

    return layout.sum_in_place(chain(*keys) for keys in layout.chains(m))


def _require_both(name: str, of_anchors: Tensor | None, of_keys: Tensor | None) -> Pair | None:
    if of_anchors is None and of_keys is None:
        return None
    if of_anchors is None or of_keys is None:
        given, missing = ("key", "anchor") if of_anchors is None else ("anchor", "key")
        raise ValueError(f"{given}_{name} needs {missing}_{name} too")
    return of_anchors.contiguous(), of_keys.contiguous()


def _weights(
    of_anchors: Tensor | None, of_keys: Tensor | None, precision: Precision
) -> Pair | None:
    weights = _require_both("weight", of_anchors, of_keys)
    if weights is None:
        return None
    width = weights[0].shape[1]
    if width != weights[1].shape[1] or width > layout.WIDEST_SIDE:
        raise ValueError(
            "anchor_weight and key_weight must have the same number of columns, at most "
            f"{layout.WIDEST_SIDE}, got {width} and {weights[1].shape[1]}"
        )
    return layout.operands(*weights, precision)[:2]
