"""Sums over pairs of rows that are each other's anchor and key, with a row's whole gradient.

Every row of such a term is an anchor, and a key of all others. Where the logits of head h are those
of its mirror h' turned over, l_ik = l'_ki (of one head that is symmetric, h' = h), and s_i is the
derivative of the loss by anchor i's sum,

    d loss / d a_i = sum_k (s_i + s'_k) e_ik b_k

is all that row i is owed, as an anchor and as a key. It takes one's own rows, all vectors and all
s: so on several processes no gradient of another's row is found or sent, only a number an anchor.
A pass makes the sums, a second the gradient: three products. On one process either pass visits each
pair once for both of its rows: two products of a symmetric head, four of a head and its mirror.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from heron.pipeline.objectives import fused
from heron.pipeline.objectives.engine import strips, triangle
from heron.pipeline.objectives.pairs import Pairs, is_fused, summands
from heron.pipeline.objectives.present import OwnRows, Present, Rows, spread
from heron.pipeline.objectives.ring import Block, blocks, ring_of, within


@dataclass(frozen=True)
class Mirroring:
    """How the pairs of a `Pairs` mirror each other; see this file.

    The anchors of a head are the own rows; its keys begin with all rows that are anchors of its
    mirror, in order, and those that follow take no gradient. Which pairs count, and how much, is
    the same seen from either row; no row is compared with itself where a head is its own mirror.

    Attributes:
        mirror: of each head.
        way: of each head, numbers from 0 on; the sums of heads of one way are added.
        spread: numbers of the own anchors, a tensor a way, to those of all anchors; None: these
            are all.
        around: begins a round of the keys, of which own rows' alone are here; None: all are.
    """

    mirror: Sequence[int]
    way: Sequence[int]
    spread: Callable[[Sequence[Tensor]], list[Tensor]] | None
    around: Callable[[Sequence[Tensor]], Iterator[Block]] | None = None

    @classmethod
    def of(
        cls,
        rows: Rows,
        batch: int,
        mirror: Sequence[int],
        way: Sequence[int],
        among: Sequence[Sequence[int]],
        present: Present = None,
    ) -> "Mirroring | None":
        """Of ways whose anchors are the views `among` of some rows, as `join_views` has them.

        None where the rows are a part of the batch, and what others find is not told: then the
        gradient of their share is wanted with respect to all rows.
        """
        if isinstance(rows, OwnRows):
            tell, around = partial(spread, rows=rows, present=present, among=among), None
            if ring_of(rows) is not None:  # a head's keys are the anchors of its mirror
                views = [among[way[m]] for m in mirror]
                around = partial(blocks, rows=rows, among=views, present=present)
            return cls(mirror, way, tell, around)
        return cls(mirror, way, None) if rows.indices(batch) == (0, batch, 1) else None


def everyone(mirroring: Mirroring | None, numbers: Tensor) -> Tensor | None:
    """Numbers of the own anchors of one way, [anchors], of all anchors; without gradient.

    None without `mirroring`. Every process must take part.
    """
    if mirroring is None or mirroring.spread is None:
        return None if mirroring is None else numbers.detach()
    return mirroring.spread([numbers.detach()[:, None]])[0][:, 0]


def mirrored_sums(pairs: Pairs, mirroring: Mirroring | None) -> list[Float[Tensor, "_ _"]]:
    """The sums of each way's own anchors, differentiable once.

    With `mirroring` their gradient with respect to the anchors is all that is owed to the rows, and
    keys take none; in backward every process must take part. Without, heads are of one way, and
    the gradient of the sums is taken with respect to anchors and keys.
    """
    count = len(pairs.anchors)
    keys = pairs.keys if mirroring is None else [k.detach() for k in pairs.keys]
    sums: tuple[Tensor, ...] = _Sums.apply(  # type: ignore[no-untyped-call]
        replace(pairs, anchors=[], keys=[]), mirroring, count, *pairs.anchors, *keys
    )
    return list(sums)


class _Sums(torch.autograd.Function):
    """The sums, then in backward the gradient: logits are computed twice and never kept."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, pairs: Pairs, mirroring: Mirroring | None, heads: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*tensors)
        ctx.given = pairs, mirroring  # type: ignore[attr-defined]
        anchors, keys = tensors[:heads], tensors[heads:]
        sums = [a.new_zeros(len(a), len(pairs.moments)) for a in anchors]
        for some, here, _ in _around(pairs, mirroring, keys):
            if mirroring is not None and is_fused(anchors[0]):
                for total, a, k in zip(sums, anchors, here, strict=True):
                    total += _fused(some, a, k)
                continue
            for strip in _visits(mirroring, anchors, here):
                h, rows, first = strip.head, strip.rows, strip.first
                for r, part in enumerate(summands(some, rows, strip.logits, first)):
                    sums[h][rows, r] += part.sum(1)
                    if strip.turned is not None:
                        served, columns = strip.turned
                        sums[strip.mirror][served, r] += part[:, columns].sum(0)
        return _by_way(sums, mirroring)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *d_sums: Tensor) -> tuple[Tensor | None, ...]:
        pairs, mirroring = ctx.given  # type: ignore[attr-defined]
        tensors: tuple[Tensor, ...] = ctx.saved_tensors  # type: ignore[attr-defined]
        heads = len(tensors) // 2
        anchors, keys = tensors[:heads], tensors[heads:]
        slopes = torch.tensor(pairs.slopes or pairs.moments, dtype=torch.float64)
        of_ways = [d * slopes.to(d) for d in d_sums]
        own = [of_ways[0]] * heads if mirroring is None else [of_ways[way] for way in mirroring.way]
        turned: list[Tensor] = []
        if mirroring is not None:
            everyone = of_ways if mirroring.spread is None else mirroring.spread(of_ways)
            turned = [everyone[mirroring.way[m]] for m in mirroring.mirror]
        d_anchors = [torch.zeros_like(a) for a in anchors]
        d_keys = [torch.zeros_like(k) if mirroring is None else None for k in keys]
        for some, here, places in _around(pairs, mirroring, keys):
            of_keys = (
                turned if places is None else [x[p] for x, p in zip(turned, places, strict=True)]
            )
            of_keys = [_padded(x, len(k)) for x, k in zip(of_keys, here, strict=False)]
            if of_keys and is_fused(anchors[0]):
                for total, *head in zip(d_anchors, anchors, here, own, of_keys, strict=True):
                    total += _fused_gradient(some, *head)
            else:
                _add_gradients(
                    some, mirroring, (anchors, here), (own, of_keys), (d_anchors, d_keys)
                )
        return None, None, None, *d_anchors, *d_keys


Heads = Sequence[Tensor]


def _around(
    pairs: Pairs, mirroring: Mirroring | None, keys: Heads
) -> Iterator[tuple[Pairs, Heads, Heads | None]]:
    """Pairs with keys that are here, the keys, and their places among all; None: these are all."""
    if mirroring is None or mirroring.around is None:
        yield pairs, keys, None
        return
    for block in mirroring.around(keys):
        yield within(pairs, block), block.keys, block.places


def _add_gradients(
    pairs: Pairs,
    mirroring: Mirroring | None,
    vectors: tuple[Heads, Heads],
    slopes: tuple[Heads, Heads],
    gradients: tuple[Heads, Sequence[Tensor | None]],
) -> None:
    """Adds what anchors, and keys, are owed by their pairs, strip by strip."""
    (anchors, keys), (own, of_keys), (d_anchors, d_keys) = vectors, slopes, gradients
    buffer = anchors[0].new_empty(0)
    for strip in _visits(mirroring, anchors, keys):
        h, rows, first, logits = strip.head, strip.rows, strip.first, strip.logits
        if of_keys and len(buffer) < logits.numel():
            buffer = logits.new_empty(logits.numel())
        parts = summands(pairs, rows, logits, first)
        for r, part in enumerate(parts):
            if not of_keys:
                part.mul_(own[h][rows, r, None])
                continue
            slope = buffer[: logits.numel()].view_as(logits)
            part.mul_(torch.add(own[h][rows, r, None], of_keys[h][None, first:, r], out=slope))
        for part in parts[1:]:
            parts[0].add_(part)
        d_anchors[h][rows].addmm_(parts[0], keys[h][first:])
        if (of_key := d_keys[h]) is not None:
            of_key.addmm_(parts[0].T, anchors[h][rows])
        if strip.turned is not None:
            m, (served, columns) = strip.mirror, strip.turned
            d_anchors[m][served].addmm_(parts[0][:, columns].T, keys[m][rows])


def _by_way(sums: Sequence[Tensor], mirroring: Mirroring | None) -> tuple[Tensor, ...]:
    found: list[Tensor] = []
    ways = [0] * len(sums) if mirroring is None else mirroring.way
    for part, way in zip(sums, ways, strict=True):
        found[way:] = [found[way] + part if way < len(found) else part]
    return tuple(found)


@dataclass(frozen=True)
class _Strip:
    """Logits of some anchors of a head with its keys from `first` on, in the last strip's memory.

    Where it is visited for both rows of a pair, `turned` are the anchors of the mirror that are
    served, and their columns.
    """

    head: int
    rows: slice
    first: int
    logits: Tensor
    mirror: int = 0
    turned: tuple[slice, slice] | None = None


def _visits(
    mirroring: Mirroring | None, anchors: Sequence[Tensor], keys: Sequence[Tensor]
) -> Iterator[_Strip]:
    """All strips of all heads.

    On one process a head and its mirror are visited once, and of a symmetric head the keys from
    the strip's first anchor on.
    """
    alone = mirroring is not None and mirroring.spread is None
    for h, (a, k) in enumerate(zip(anchors, keys, strict=True)):
        m = mirroring.mirror[h] if mirroring is not None else h
        if alone and m < h:
            continue
        half = alone and m == h
        buffer = a.new_empty(0)
        for rows in (
            triangle(len(a), len(k), a.device) if half else strips(len(a), len(k), a.device)
        ):
            first = rows.start if half else 0
            count = (rows.stop - rows.start) * (len(k) - first)
            if len(buffer) < count:
                buffer = a.new_empty(count)
            strip = buffer[:count].view(rows.stop - rows.start, len(k) - first)
            torch.mm(a[rows], k[first:].T, out=strip)
            end, last = rows.stop if half else 0, len(anchors[m])
            if alone and end < last:
                turned = slice(end, last), slice(end - first, last - first)
                yield _Strip(h, rows, first, strip, m, turned)
            else:
                yield _Strip(h, rows, first, strip)


def _padded(x: Tensor, rows: int) -> Tensor:
    return x if len(x) == rows else torch.cat([x, x.new_zeros(rows - len(x), x.shape[1])])


def _int_tags(pairs: Pairs) -> dict[str, Any]:
    tags = {"anchor_tag": pairs.anchor_tag, "key_tag": pairs.key_tag}
    return {side: None if tag is None else tag.int() for side, tag in tags.items()}


def _fused(pairs: Pairs, anchors: Tensor, keys: Tensor) -> Tensor:
    """The sums by kernels."""
    return fused.exponential_sums(
        anchors, keys, moments=pairs.moments, floor=pairs.floor, **_int_tags(pairs)
    )


def _fused_gradient(
    pairs: Pairs, anchors: Tensor, keys: Tensor, own: Tensor, of_keys: Tensor
) -> Tensor:
    """sum_k (own_i + of_keys_k) e_ik b_k by a kernel, for the anchors; a moment has a column each.

    `own` and `of_keys` have the slopes inside.
    """
    return fused.mutual_gradient(
        anchors,
        keys,
        own,
        of_keys,
        moments=pairs.moments,
        floor=pairs.floor,
        **_int_tags(pairs),
    )
