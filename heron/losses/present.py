"""Anchors and keys concatenated view by view, of rows that may lack views."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Present = Bool[Tensor, "batch views"] | None  # which views each row has; None: all of them


def join_views(
    views: Sequence[Tensor],
    present: Present,
    rows: slice = slice(None),
    view_numbers: Sequence[int] | None = None,
) -> Tensor:
    """Concatenates the rows of each view, without the rows that lack it.

    `view_numbers` are the views to take; None takes all.
    """
    numbers = range(len(views)) if view_numbers is None else view_numbers
    if present is None:
        return torch.cat([views[v][rows] for v in numbers])
    return torch.cat([views[v][rows][present[rows, v]] for v in numbers])


def own_row_positions(
    batch: int, views: int, present: Present, rows: slice, device: torch.device
) -> Int[Tensor, " anchors"]:
    """Returns the positions of some rows' views among all keys, in the order of `join_views`."""
    if present is None:  # known without the device, for which the host would wait
        positions = torch.arange(batch * views, device=device)
        return positions.view(views, batch)[:, rows].reshape(-1)
    own = torch.zeros(batch, dtype=torch.bool, device=device)
    own[rows] = True
    return join_views([own] * views, present).nonzero()[:, 0]


def pair_count(present: Bool[Tensor, "batch views"], anchor_views: Sequence[int]) -> int:
    """Counts pairs of an anchor in `anchor_views` and another view of its row; at least 1."""
    partners = present.sum(1) - 1
    return max(int(sum((partners * present[:, u]).sum() for u in anchor_views)), 1)


@dataclass(frozen=True)
class OwnRows:
    """One process's rows of a batch, of whose vectors these alone have a gradient.

    A row is an anchor on its own process and a key of every process's anchors. Processes exchange a
    few numbers per anchor, from which each takes the whole gradient of its own rows; see
    `losses.mirroring`.

    Attributes:
        slice: the own rows among all rows.
        gather: maps numbers of the own rows, [own rows, ...], to those of all rows, without
            gradient. Every process must call it.
    """

    slice: slice
    gather: Callable[[Tensor], Tensor]


Rows = slice | OwnRows


def as_slice(rows: Rows) -> slice:
    """Returns the rows whose anchors are summed on this process."""
    return rows.slice if isinstance(rows, OwnRows) else rows


def gather_head_values(
    own: Sequence[Float[Tensor, "_ _"]],
    rows: OwnRows,
    present: Present,
    views_of_heads: Sequence[Sequence[int]],
) -> list[Float[Tensor, "_ _"]]:
    """Gathers numbers of the own anchors of each head from all processes, in one collective.

    `own` has a tensor [own anchors, numbers] per head, in the order of `join_views`.
    """
    by_row, count = [], rows.slice.stop - rows.slice.start
    for numbers, views in zip(own, views_of_heads, strict=True):
        if present is None:
            by_view = numbers.view(len(views), count, numbers.shape[1])
        else:
            has_view = present[rows.slice][:, list(views)].T
            by_view = numbers.new_zeros(*has_view.shape, numbers.shape[1])
            by_view[has_view] = numbers
        by_row.append(by_view.transpose(0, 1).flatten(1))
    gathered = rows.gather(torch.cat(by_row, 1))
    of_heads = torch.split(gathered, [x.shape[1] for x in by_row], 1)
    return [
        join_views(
            torch.chunk(columns, len(views), 1),
            None if present is None else present[:, list(views)],
        )
        for columns, views in zip(of_heads, views_of_heads, strict=True)
    ]
