"""Keys that arrive block by block: processes pass the vectors of their rows round a ring.

Sums over keys add up block by block, and so do gradients, for which the vectors go round again.
Only vectors travel: labels, slopes and other single numbers of rows are on every process.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import FunctionCtx

from heron.distributed.derivatives import first_derivative
from heron.objectives.pairs import Pairs
from heron.objectives.present import OwnRows, Present, Ring, Rows, as_slice


@dataclass(frozen=True)
class Block:
    """The keys of one process's rows; valid until the next block is requested.

    Attributes:
        rows: the process's rows among all rows.
        is_own: whether the rows are this process's own.
        keys: a tensor for each head.
        positions: positions of each head's keys among those of all processes, ascending.
    """

    rows: slice
    is_own: bool
    keys: Sequence[Float[Tensor, "_ _"]]
    positions: Sequence[Int[Tensor, " _"]]


def ring_of(rows: Rows) -> Ring | None:
    """Returns the ring by which keys arrive; None: this process has all of them."""
    return rows.ring if isinstance(rows, OwnRows) else None


def held_rows(
    rows: Rows, present: Present = None
) -> tuple[slice, Bool[Tensor, "held views"] | None]:
    """Returns the own rows among those whose vectors this process has, and the views of these."""
    if ring_of(rows) is None:
        return as_slice(rows), present
    return slice(None), None if present is None else present[as_slice(rows)]


def row_count(rows: Rows, vectors: Tensor) -> int:
    """Returns the number of rows of the whole batch; `vectors` are those that this process has."""
    ring = ring_of(rows)
    return len(vectors) if ring is None else ring.shares[-1].stop


def blocks(
    keys: Sequence[Float[Tensor, "_ _"]],
    rows: OwnRows,
    views_of_heads: Sequence[Sequence[int]],
    present: Present = None,
) -> Iterator[Block]:
    """Yields the keys of every process's rows, own ones first; every process must take them all.

    `keys` has the own rows' keys, a tensor for each head, in the order of `join_views`; they are
    sent without gradient. `rows` must have a ring.
    """
    ring = rows.ring
    assert ring is not None
    edges = [0, *(share.stop for share in ring.shares)]
    # counts[v][p]: the number of rows with view v before the share of process p.
    counts = [edges] * (1 + max(v for views in views_of_heads for v in views))
    if present is not None:
        cumulative = torch.cat([present.new_zeros(1, present.shape[1]), present]).cumsum(0)
        counts = cumulative[edges].T.tolist()
    # sizes[h][p]: the number of keys of head h on process p.
    sizes = [
        [sum(counts[v][p + 1] - counts[v][p] for v in views) for p in range(len(ring.shares))]
        for views in views_of_heads
    ]
    device = keys[0].device
    for process, of_process in ring.rotate([x.detach() for x in keys], sizes):
        positions = []
        for views in views_of_heads:
            starts = itertools.accumulate((counts[v][-1] for v in views), initial=0)
            spans = [
                torch.arange(start + counts[v][process], start + counts[v][process + 1])
                for start, v in zip(starts, views, strict=False)
            ]
            positions.append(torch.cat(spans).to(device))
        share = ring.shares[process]
        yield Block(share, share == rows.slice, of_process, positions)


def restrict_to_block(pairs: Pairs, block: Block) -> Pairs:
    """Restricts pairs to a block's keys; excluded pairs must lie within a process's own rows."""
    positions = block.positions[0]
    if pairs.key_weight is not None:
        pairs = replace(pairs, key_weight=pairs.key_weight[positions])
    if pairs.key_tag is None:
        return pairs
    if pairs.exclude is None:
        return replace(pairs, key_tag=pairs.key_tag[positions])
    if not block.is_own:
        return replace(pairs, anchor_tag=None, key_tag=None, exclude=None)
    exclude = torch.searchsorted(positions, pairs.exclude)
    return replace(pairs, key_tag=pairs.key_tag[positions], exclude=exclude)


def sum_over_blocks(
    share: Callable[[Sequence[Tensor], Block], Tensor],
    own: Sequence[Tensor],
    key_blocks: Callable[[], Iterator[Block]],
) -> Float[Tensor, ""]:
    """Returns the sum of a loss over blocks; each block's gradient is taken with its loss.

    `share` is a block's loss as a function of detached copies of `own`, the tensors that the result
    is differentiable in; `key_blocks` starts a round of the blocks.
    """
    result: Tensor = _OverBlocks.apply(share, key_blocks, *own)  # type: ignore[no-untyped-call]
    return result


class _OverBlocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        share: Callable[[Sequence[Tensor], Block], Tensor],
        key_blocks: Callable[[], Iterator[Block]],
        *own: Tensor,
    ) -> Tensor:
        total, grads = own[0].new_zeros(()), [torch.zeros_like(x) for x in own]
        for block in key_blocks():
            with torch.enable_grad():
                leaves = [x.detach().requires_grad_() for x in own]
                loss = share(leaves, block)
                block_grads = torch.autograd.grad(
                    loss, leaves, allow_unused=True, materialize_grads=True
                )
            total += loss.detach()
            for grad, block_grad in zip(grads, block_grads, strict=True):
                grad += block_grad
        ctx.save_for_backward(*grads)
        return total

    @staticmethod
    @first_derivative
    def backward(ctx: FunctionCtx, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        saved: tuple[Tensor, ...] = ctx.saved_tensors  # type: ignore[attr-defined]
        return None, None, *(grad_outputs[0] * x for x in saved)
