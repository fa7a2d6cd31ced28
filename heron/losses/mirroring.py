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

import itertools
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
from heron.losses.engine import strip_elements, strips
from heron.losses.pairs import OwnRows, Pairs, Present, Rows, gather_head_values, is_fused, summands
from heron.losses.products import (
    Factor,
    accumulated,
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
    """Gathers the values of this process's anchors into those of all anchors, without gradient.

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


# Exponentials of a head that wait for backward, 1 MiB of float32 on a CPU; more are computed again.
KEPT = {"cpu": 1 << 18, "cuda": 1 << 22}


class _Sums(torch.autograd.Function):
    """Sums in forward, gradient in backward; more than `KEPT` is computed twice."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, pairs: Pairs, mirroring: Mirroring | None, heads: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.pairs, ctx.mirroring, ctx.heads = pairs, mirroring, heads  # type: ignore[attr-defined]
        anchors, keys = tensors[:heads], tensors[heads:]
        if mirroring is not None and is_fused(anchors[0], "sums", "mutual"):
            options, by_head = pairs.of_kernels(), zip(anchors, keys, strict=True)
            operands = [fused.mutual_operands(a, k, **options) for a, k in by_head]
            totals = _add_heads([of_head.sums() for of_head in operands], mirroring)
            by_operand = ([o.anchors, o.keys, o.power] for o in operands)
            ctx.save_for_backward(*itertools.chain(*by_operand), *totals)
            ctx.shapes = [(o.sizes, o.pairing) for o in operands]  # type: ignore[attr-defined]
            return totals
        ctx.shapes = []  # type: ignore[attr-defined]
        ctx.precision = precision = strip_precision(anchors[0])  # type: ignore[attr-defined]
        device = anchors[0].device
        most = min(KEPT.get(device.type, KEPT["cuda"]), strip_elements(device))
        keeps = all(len(a) * len(k) <= most for a, k in zip(anchors, keys, strict=True))
        parts: list[list[tuple[slice, Tensor]]] = [[] for _ in anchors]
        kept: list[Tensor] = []
        for strip in _strips(mirroring, _sides(anchors, keys, precision), anchors):
            terms = summands(pairs, strip.rows, strip.logits, strip.first)
            of_anchors = [term.sum(1, keepdim=True) for term in terms]
            parts[strip.head].append((strip.rows, _columns(of_anchors)))
            if strip.transposed is not None:
                rows, columns = strip.transposed
                of_mirror = [term[:, columns].sum(0)[:, None] for term in terms]
                parts[strip.mirror].append((rows, _columns(of_mirror)))
            kept += terms if keeps else []
        ctx.save_for_backward(*tensors, *kept)
        of_heads = zip(anchors, parts, strict=True)
        return _add_heads([_join(a, len(pairs.moments), x) for a, x in of_heads], mirroring)

    @staticmethod
    @first_derivative
    def backward(ctx: FunctionCtx, *d_sums: Tensor) -> tuple[Tensor | None, ...]:
        pairs, mirroring = ctx.pairs, ctx.mirroring  # type: ignore[attr-defined]
        heads: int = ctx.heads  # type: ignore[attr-defined]
        tensors: tuple[Tensor, ...] = ctx.saved_tensors  # type: ignore[attr-defined]
        slopes = pairs.slopes or pairs.moments
        if set(slopes) != {1.0}:
            d_sums = tuple(
                torch.stack([d[:, r] * slope for r, slope in enumerate(slopes)], 1) for d in d_sums
            )
        sum_index = [0] * heads if mirroring is None else mirroring.sum_index
        # Per head: d loss / d sum of its anchors, and of its keys as the anchors of its mirror.
        d_own = [d_sums[i] for i in sum_index]
        d_mirror: list[Tensor] = []
        if mirroring is not None:
            d_all = d_sums if mirroring.gather is None else mirroring.gather(d_sums)
            counts = [sizes[1] for sizes, _ in ctx.shapes] or [len(k) for k in tensors[heads:]]  # type: ignore[attr-defined]
            of_keys = zip((d_all[sum_index[m]] for m in mirroring.mirror), counts, strict=False)
            # Rows of zeros for keys that are no anchors.
            d_mirror = [
                x if len(x) == count else pad(x, (0, 0, 0, count - len(x))) for x, count in of_keys
            ]
        if mirroring is not None and ctx.shapes:  # type: ignore[attr-defined]
            gradients = []
            for h, shape in enumerate(ctx.shapes):  # type: ignore[attr-defined]
                known = None
                if mirroring.gather is None:  # all anchors' sums, which bound the coefficients
                    of_sums = tensors[3 * heads :]
                    known = of_sums[sum_index[h]], of_sums[sum_index[mirroring.mirror[h]]]
                a, k, power = tensors[3 * h : 3 * h + 3]
                operands = fused.Operands(a, k, power, *shape)
                gradients.append(operands.gradient((d_own[h], d_mirror[h]), known))
            return None, None, None, *gradients, *[None] * heads
        anchors, keys, kept = tensors[:heads], tensors[heads : 2 * heads], tensors[2 * heads :]
        sides, d_pair = _sides(anchors, keys, ctx.precision), (d_own, d_mirror)  # type: ignore[attr-defined]
        d_anchors, d_keys = _gradients(pairs, mirroring, sides, anchors, d_pair, kept)
        return None, None, None, *d_anchors, *d_keys


def _columns(values: Sequence[Tensor]) -> Tensor:
    return values[0] if len(values) == 1 else torch.cat(list(values), 1)


def _join(anchors: Tensor, moments: int, parts: Sequence[tuple[slice, Tensor]]) -> Tensor:
    """Returns a head's sums, [anchors, moments], from those of its strips."""
    if len(parts) == 1 and len(parts[0][1]) == len(anchors):
        return parts[0][1]
    sums = anchors.new_zeros(len(anchors), moments)
    for rows, part in parts:
        sums[rows] += part
    return sums


Heads = Sequence[Tensor]
Gradients = list[Tensor | None]  # None: no strip has added to it


def _gradients(
    pairs: Pairs,
    mirroring: Mirroring | None,
    sides: Sequence[tuple[Factor, Factor]],
    anchors: Heads,
    d_sums: tuple[Heads, Heads],
    kept: Heads,
) -> tuple[Gradients, Gradients]:
    """Returns the gradients of anchors and keys, which strips add to; `d_sums` are of both.

    Without mirrors keys have one. `kept` are all exponentials, or none.
    """
    d_own, d_mirror = d_sums
    d_anchors: Gradients = [None] * len(sides)
    d_keys: Gradients = [None] * len(sides)
    buffer, moments, remaining = anchors[0].new_empty(0), len(pairs.moments), list(kept)
    for strip in _strips(mirroring, sides, anchors, known=bool(kept)):
        h, rows, first = strip.head, strip.rows, strip.first
        if kept:
            terms, remaining = remaining[:moments], remaining[moments:]
        else:
            terms = summands(pairs, rows, strip.logits, first)
        if d_mirror and len(buffer) < terms[0].numel():
            buffer = terms[0].new_empty(terms[0].numel())
        for r, term in enumerate(terms):
            d_pair = d_own[h][rows, r, None]
            if d_mirror:
                out = buffer[: term.numel()].view_as(term)
                d_pair = torch.add(d_pair, d_mirror[h][None, first:, r], out=out)
            terms[r] = term * d_pair if kept else term.mul_(d_pair)
        for term in terms[1:]:
            terms[0].add_(term)
        d = coefficients(terms[0], sides[h][1])
        d_anchors[h] = accumulated(d_anchors[h], anchors[h], rows, d, sides[h][1][first:])
        if mirroring is None:
            keys = sides[h][1].values
            d_keys[h] = accumulated(d_keys[h], keys, slice(len(keys)), d.T, sides[h][0][rows])
        if strip.transposed is not None:
            m, (mirror_rows, columns) = strip.mirror, strip.transposed
            product = d.T[columns], sides[m][1][rows]
            d_anchors[m] = accumulated(d_anchors[m], anchors[m], mirror_rows, *product)
    empty = zip(d_anchors, anchors, strict=True)
    return [torch.zeros_like(a) if d is None else d for d, a in empty], d_keys


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
    mirroring: Mirroring | None,
    sides: Sequence[tuple[Factor, Factor]],
    anchors: Heads,
    known: bool = False,
) -> Iterator[_Strip]:
    """Yields all strips of all heads, without logits where their exponentials are known.

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
        for rows in strips(len(a), len(k), a.device, triangular=symmetric):
            first = rows.start if symmetric else 0
            count = (rows.stop - rows.start) * (len(k) - first)
            if not known and len(buffer) < count:
                buffer = a.new_empty(count)
            tile = buffer if known else buffer[:count].view(rows.stop - rows.start, len(k) - first)
            if not known:
                logits(x[rows], y[first:], out=tile)
            start, stop = rows.stop if symmetric else 0, len(anchors[m])
            if one_process and start < stop:
                transposed = slice(start, stop), slice(start - first, stop - first)
                yield _Strip(h, rows, first, tile, m, transposed)
            else:
                yield _Strip(h, rows, first, tile)
