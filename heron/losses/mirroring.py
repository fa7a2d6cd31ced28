"""Sums over pairs of rows that are each other's anchor and key, with the full gradient of a row.

In such a term every row is an anchor, and a key of all others. Let the logits of head h be the
transpose of those of its mirror h', l_ik = l'_ki (a symmetric head is its own mirror, h' = h), let
e_ik be the exponentials, and s_i the derivative of the loss with respect to anchor i's sum. Then

    d loss / d a_i = sum_k (s_i + s'_k) e_ik b_k

is the full gradient of row i, as an anchor and as a key. It needs the own rows, all vectors and all
s: no process computes or sends a gradient of another's row, only one number per anchor. One pass
computes the sums, a second the gradient: three products. On one process each pass visits a pair
once for both of its rows: two products for a symmetric head, four for a head and its mirror.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn.functional import pad

from heron.distributed.derivatives import first_derivative
from heron.losses import fused
from heron.losses.engine import strips, triangular_strips
from heron.losses.pairs import OwnRows, Pairs, Present, Rows, gather_head_values, is_fused, summands
from heron.losses.products import (
    Factor,
    add_product,
    coefficients,
    factors,
    logits,
    strip_precision,
)


@dataclass(frozen=True)
class Mirroring:
    """How the heads of a `Pairs` mirror each other, as this file describes.

    The anchors of a head are the own rows. Its keys begin with all rows that are anchors of its
    mirror, in order; keys after these take no gradient. Which pairs count, and with what weight, is
    symmetric in the two rows; a head that is its own mirror compares no row with itself.

    Attributes:
        mirror: for each head, the number of its mirror.
        sum_index: for each head, the number of the sums that it adds to.
        gather: takes values of the own anchors, one tensor per sum, to those of all anchors; None:
            the own anchors are all.
    """

    mirror: Sequence[int]
    sum_index: Sequence[int]
    gather: Callable[[Sequence[Tensor]], list[Tensor]] | None

    @classmethod
    def of(
        cls,
        rows: Rows,
        batch: int,
        mirror: Sequence[int],
        sum_index: Sequence[int],
        views: Sequence[Sequence[int]],
        present: Present = None,
    ) -> "Mirroring | None":
        """Returns the mirroring of sums whose anchors are these `views` of `rows`, joined.

        It is None for a mere slice of the batch, whose share has a gradient with respect to all
        rows. Anchors are in the order of `join_views`.
        """
        if isinstance(rows, OwnRows):
            gather = partial(gather_head_values, rows=rows, present=present, views_of_heads=views)
            return cls(mirror, sum_index, gather)
        return cls(mirror, sum_index, None) if rows.indices(batch) == (0, batch, 1) else None


def gather_anchor_values(mirroring: Mirroring | None, values: Tensor) -> Tensor | None:
    """Gathers values of the own anchors, [anchors], to those of all anchors, without gradient.

    Every process must take part. Returns None without `mirroring`.
    """
    if mirroring is None or mirroring.gather is None:
        return None if mirroring is None else values.detach()
    return mirroring.gather([values.detach()[:, None]])[0][:, 0]


def mirrored_sums(pairs: Pairs, mirroring: Mirroring | None) -> list[Float[Tensor, "_ _"]]:
    """Returns the own anchors' sums, a tensor per number in `sum_index`, differentiable once.

    With `mirroring` the anchors get the full gradient of their rows, and keys none; every process
    must take part in backward. Without it all heads add to one sum, differentiable in anchors and
    keys.
    """
    count = len(pairs.anchors)
    keys = pairs.keys if mirroring is None else [k.detach() for k in pairs.keys]
    sums: tuple[Tensor, ...] = _Sums.apply(  # type: ignore[no-untyped-call]
        replace(pairs, anchors=[], keys=[]), mirroring, count, *pairs.anchors, *keys
    )
    return list(sums)


class _Sums(torch.autograd.Function):
    """Sums in forward, gradient in backward: logits are computed twice and never stored."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, pairs: Pairs, mirroring: Mirroring | None, heads: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*tensors)
        ctx.pairs, ctx.mirroring = pairs, mirroring  # type: ignore[attr-defined]
        anchors, keys = tensors[:heads], tensors[heads:]
        if mirroring is not None and is_fused(anchors[0], "sums", "mutual"):
            heads_of_kernel = zip(anchors, keys, strict=True)
            options = pairs.of_kernels()
            return _add_heads(
                [fused.exponential_sums(a, k, **options) for a, k in heads_of_kernel], mirroring
            )
        sums = [a.new_zeros(len(a), len(pairs.moments)) for a in anchors]
        ctx.precision = precision = strip_precision(anchors[0])  # type: ignore[attr-defined]
        for strip in _strips(mirroring, _sides(anchors, keys, precision), anchors):
            h, rows, first = strip.head, strip.rows, strip.first
            for r, summand in enumerate(summands(pairs, rows, strip.logits, first)):
                sums[h][rows, r] += summand.sum(1)
                if strip.transposed is not None:
                    mirror_rows, columns = strip.transposed
                    sums[strip.mirror][mirror_rows, r] += summand[:, columns].sum(0)
        return _add_heads(sums, mirroring)

    @staticmethod
    @first_derivative
    def backward(ctx: FunctionCtx, *d_sums: Tensor) -> tuple[Tensor | None, ...]:
        pairs, mirroring = ctx.pairs, ctx.mirroring  # type: ignore[attr-defined]
        tensors: tuple[Tensor, ...] = ctx.saved_tensors  # type: ignore[attr-defined]
        heads = len(tensors) // 2
        anchors, keys = tensors[:heads], tensors[heads:]
        slopes = pairs.slopes or pairs.moments
        d_sums = tuple(
            torch.stack([d[:, r] * slope for r, slope in enumerate(slopes)], 1) for d in d_sums
        )
        sum_index = [0] * heads if mirroring is None else mirroring.sum_index
        # Per head: d loss / d sum of its anchors, and of its keys as the anchors of its mirror.
        d_own = [d_sums[i] for i in sum_index]
        d_mirror: list[Tensor] = []
        if mirroring is not None:
            d_all = d_sums if mirroring.gather is None else mirroring.gather(d_sums)
            of_keys = zip((d_all[sum_index[m]] for m in mirroring.mirror), keys, strict=True)
            d_mirror = [pad(x, (0, 0, 0, len(k) - len(x))) for x, k in of_keys]  # rows of zeros
        d_keys = [torch.zeros_like(k) if mirroring is None else None for k in keys]
        if mirroring is not None and is_fused(anchors[0], "sums", "mutual"):
            by_head, options = zip(anchors, keys, d_own, d_mirror, strict=True), pairs.of_kernels()
            gradients = (fused.mutual_gradient(*head, **options) for head in by_head)
            return None, None, None, *gradients, *d_keys
        d_anchors = [torch.zeros_like(a) for a in anchors]
        sides, d_pair = _sides(anchors, keys, ctx.precision), (d_own, d_mirror)  # type: ignore[attr-defined]
        _add_gradients(pairs, mirroring, sides, d_pair, (d_anchors, d_keys))
        return None, None, None, *d_anchors, *d_keys


Heads = Sequence[Tensor]


def _add_gradients(
    pairs: Pairs,
    mirroring: Mirroring | None,
    sides: Sequence[tuple[Factor, Factor]],
    d_sums: tuple[Heads, Heads],
    gradients: tuple[Heads, Sequence[Tensor | None]],
) -> None:
    """Adds the gradients of anchors and keys strip by strip; pairs are (anchors', keys')."""
    (d_own, d_mirror), (d_anchors, d_keys) = d_sums, gradients
    buffer = d_anchors[0].new_empty(0)
    for strip in _strips(mirroring, sides, d_anchors):
        h, rows, first, tile = strip.head, strip.rows, strip.first, strip.logits
        if d_mirror and len(buffer) < tile.numel():
            buffer = tile.new_empty(tile.numel())
        terms = summands(pairs, rows, tile, first)
        for r, term in enumerate(terms):
            if not d_mirror:
                term.mul_(d_own[h][rows, r, None])
                continue
            d_pair = buffer[: tile.numel()].view_as(tile)
            term.mul_(torch.add(d_own[h][rows, r, None], d_mirror[h][None, first:, r], out=d_pair))
        for term in terms[1:]:
            terms[0].add_(term)
        d = coefficients(terms[0], sides[h][1])
        add_product(d_anchors[h][rows], d, sides[h][1][first:])
        if (d_key := d_keys[h]) is not None:
            add_product(d_key, d.T, sides[h][0][rows])
        if strip.transposed is not None:
            m, (mirror_rows, columns) = strip.mirror, strip.transposed
            add_product(d_anchors[m][mirror_rows], d.T[columns], sides[m][1][rows])


def _add_heads(sums: Sequence[Tensor], mirroring: Mirroring | None) -> tuple[Tensor, ...]:
    """Adds the sums of the heads that share a `sum_index`."""
    totals: list[Tensor] = []
    sum_index = [0] * len(sums) if mirroring is None else mirroring.sum_index
    for head_sums, i in zip(sums, sum_index, strict=True):
        totals[i:] = [totals[i] + head_sums if i < len(totals) else head_sums]
    return tuple(totals)


@dataclass(frozen=True)
class _Strip:
    """Logits of some anchors of a head with its keys from `first` on, in the last strip's memory.

    A strip that serves both rows of its pairs has `transposed`: the anchors of the mirror, and the
    columns that belong to them.
    """

    head: int
    rows: slice
    first: int
    logits: Tensor
    mirror: int = 0
    transposed: tuple[slice, slice] | None = None


def _sides(anchors: Heads, keys: Heads, precision: fused.Precision) -> list[tuple[Factor, Factor]]:
    """Returns the anchors and the keys of each head, as factors of products."""
    return [factors(a, k, precision) for a, k in zip(anchors, keys, strict=True)]


def _strips(
    mirroring: Mirroring | None, sides: Sequence[tuple[Factor, Factor]], anchors: Heads
) -> Iterator[_Strip]:
    """Yields all strips of all heads.

    On one process a head and its mirror are visited once, and a symmetric head only with the keys
    from the strip's first anchor on.
    """
    one_process = mirroring is not None and mirroring.gather is None
    for h, (x, y) in enumerate(sides):
        a, k = anchors[h], y.values
        m = mirroring.mirror[h] if mirroring is not None else h
        if one_process and m < h:
            continue
        symmetric = one_process and m == h
        buffer = a.new_empty(0)
        size = len(a), len(k), a.device
        for rows in triangular_strips(*size) if symmetric else strips(*size):
            first = rows.start if symmetric else 0
            count = (rows.stop - rows.start) * (len(k) - first)
            if len(buffer) < count:
                buffer = a.new_empty(count)
            tile = buffer[:count].view(rows.stop - rows.start, len(k) - first)
            logits(x[rows], y[first:], out=tile)
            start, stop = rows.stop if symmetric else 0, len(anchors[m])
            if one_process and start < stop:
                transposed = slice(start, stop), slice(start - first, stop - first)
                yield _Strip(h, rows, first, tile, m, transposed)
            else:
                yield _Strip(h, rows, first, tile)
