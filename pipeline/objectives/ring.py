"""Keys that come block by block: each process holds its own rows, and passes on what it is given.

Sums over keys add up block by block, and so does a row's gradient, for which the vectors go round
again. Vectors alone travel: what is a number a row (labels, slopes by sums) every process has.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from heron.pipeline.objectives.pairs import Pairs
from heron.pipeline.objectives.present import OwnRows, Present, Ring, Rows, as_slice


@dataclass(frozen=True)
class Block:
    """The keys of one process's rows; valid until the next block is asked for.

    Attributes:
        rows: the process's, among all rows.
        own: whether they are this process's.
        keys: a tensor a head.
        places: of the keys of each head among those of all processes, ascending.
    """

    rows: slice
    own: bool
    keys: Sequence[Float[Tensor, "_ _"]]
    places: Sequence[Int[Tensor, " _"]]


def ring_of(rows: Rows) -> Ring | None:
    """How keys come round; None: all are here."""
    return rows.ring if isinstance(rows, OwnRows) else None


def held_rows(
    rows: Rows, present: Present = None
) -> tuple[slice, Bool[Tensor, "held views"] | None]:
    """Where own rows lie among those whose vectors are here, and the views that these have."""
    if ring_of(rows) is None:
        return as_slice(rows), present
    return slice(None), None if present is None else present[as_slice(rows)]


def row_count(rows: Rows, vectors: Tensor) -> int:
    """Rows of the whole batch, of vectors that are here."""
    ring = ring_of(rows)
    return len(vectors) if ring is None else ring.shares[-1].stop


def blocks(
    keys: Sequence[Float[Tensor, "_ _"]],
    rows: OwnRows,
    among: Sequence[Sequence[int]],
    present: Present = None,
) -> Iterator[Block]:
    """The keys of every process's rows, own ones first; every process must take all of them.

    Args:
        keys: of own rows, a tensor a head, as `join_views` has them; without gradient.
        rows: the own rows, which go round.
        among: the views of each head's keys.
        present: which views each of all rows has.
    """
    ring = rows.ring
    assert ring is not None
    edges = [0, *(share.stop for share in ring.shares)]
    counts = [edges] * (1 + max(v for views in among for v in views))  # rows with a view, so far
    if present is not None:
        so_far = torch.cat([present.new_zeros(1, present.shape[1]), present]).cumsum(0)
        counts = so_far[edges].T.tolist()
    # Where the keys of a head's view begin, and how many each process has.
    sizes = [
        [sum(counts[v][p + 1] - counts[v][p] for v in views) for p in range(len(ring.shares))]
        for views in among
    ]
    device = keys[0].device
    for process, found in ring.turn([x.detach() for x in keys], sizes):
        places = []
        for views in among:
            starts = itertools.accumulate((counts[v][-1] for v in views), initial=0)
            spans = [
                torch.arange(start + counts[v][process], start + counts[v][process + 1])
                for start, v in zip(starts, views, strict=False)
            ]
            places.append(torch.cat(spans).to(device))
        share = ring.shares[process]
        yield Block(share, share == rows.slice, found, places)


def within(pairs: Pairs, block: Block) -> Pairs:
    """The pairs of the anchors with a block's keys; a pair that `exclude` names is of own rows."""
    (places, *_), found = block.places, pairs
    if pairs.key_weight is not None:
        found = replace(found, key_weight=pairs.key_weight[places])
    if pairs.key_tag is None:
        return found
    if pairs.exclude is None:
        return replace(found, key_tag=pairs.key_tag[places])
    if not block.own:
        return replace(found, anchor_tag=None, key_tag=None, exclude=None)
    exclude = torch.searchsorted(places, pairs.exclude)
    return replace(found, key_tag=pairs.key_tag[places], exclude=exclude)


def over_blocks(
    share: Callable[[Sequence[Tensor], Block], Tensor],
    own: Sequence[Tensor],
    around: Callable[[], Iterator[Block]],
) -> Float[Tensor, ""]:
    """The sum over blocks of a loss, whose gradient is taken while the block is here.

    Args:
        share: the loss of a block, of leaves that stand for `own`.
        own: what it is differentiable in.
        around: begins a round.
    """
    result: Tensor = _OverBlocks.apply(share, around, *own)  # type: ignore[no-untyped-call]
    return result


class _OverBlocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        share: Callable[[Sequence[Tensor], Block], Tensor],
        around: Callable[[], Iterator[Block]],
        *own: Tensor,
    ) -> Tensor:
        total, grads = own[0].new_zeros(()), [torch.zeros_like(x) for x in own]
        for block in around():
            with torch.enable_grad():
                leaves = [x.detach().requires_grad_() for x in own]
                loss = share(leaves, block)
                found = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
            total += loss.detach()
            for gradient, part in zip(grads, found, strict=True):
                gradient += part
        ctx.save_for_backward(*grads)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        saved: tuple[Tensor, ...] = ctx.saved_tensors  # type: ignore[attr-defined]
        return None, None, *(grad_outputs[0] * x for x in saved)
