"""Anchors and keys laid end to end, of rows that may lack views."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Present = Bool[Tensor, "batch views"] | None  # which views each row has; None: all of them


def join_views(
    views: Sequence[Tensor],
    present: Present,
    rows: slice = slice(None),
    among: Sequence[int] | None = None,
) -> Tensor:
    """The rows of each view end to end, view by view, without those that lack it.

    Args:
        views: a tensor [batch, ...] a view.
        present: which views each row has.
        rows: of the batch, those that are wanted.
        among: the views that are wanted; None: all.
    """
    wanted = range(len(views)) if among is None else among
    if present is None:
        return torch.cat([views[v][rows] for v in wanted])
    return torch.cat([views[v][rows][present[rows, v]] for v in wanted])


def own_places(
    batch: int, views: int, present: Present, rows: slice, device: torch.device
) -> Int[Tensor, " anchors"]:
    """Where the views of some rows lie among all keys, both as `join_views` has them."""
    own = torch.zeros(batch, dtype=torch.bool, device=device)
    own[rows] = True
    return join_views([own] * views, present).nonzero()[:, 0]


def pair_count(present: Bool[Tensor, "batch views"], among: Sequence[int]) -> int:
    """Pairs of an anchor in the views `among` and another view of its row, at least 1."""
    others = present.sum(1) - 1
    return max(int(sum((others * present[:, u]).sum() for u in among)), 1)


@dataclass(frozen=True)
class Ring:
    """How rows go round the processes, each of which holds the vectors of its own alone.

    Attributes:
        shares: the rows of each process among all rows.
        turn: own tensors, and how many rows of each there are of every process, to the number of a
            process and its tensors, own ones first; see `objectives.ring`.
    """

    shares: Sequence[slice]
    turn: Callable[[Sequence[Tensor], Sequence[Sequence[int]]], Iterator[tuple[int, list[Tensor]]]]


@dataclass(frozen=True)
class OwnRows:
    """One process's rows of a batch whose vectors it sees without the others' gradient.

    A row is an anchor where it lives and a key of every process's anchors. With what these found
    for their sums (a few numbers an anchor) its whole gradient is taken where it lives, so no
    process finds, or sends, that of another's rows.

    Attributes:
        slice: the own rows among all rows.
        gather: numbers of the own rows, [own rows, ...], to those of all rows; without gradient.
            Every process must call it.
        ring: where vectors of own rows alone are here, and the others' come one after another.
    """

    slice: slice
    gather: Callable[[Tensor], Tensor]
    ring: Ring | None = None


Rows = slice | OwnRows


def as_slice(rows: Rows) -> slice:
    """The rows whose anchors are summed here."""
    return rows.slice if isinstance(rows, OwnRows) else rows


def spread(
    own: Sequence[Float[Tensor, "_ _"]],
    rows: OwnRows,
    present: Present,
    among: Sequence[Sequence[int]],
) -> list[Float[Tensor, "_ _"]]:
    """Numbers of the own anchors of some heads to those of all anchors, in one collective.

    Args:
        own: a tensor a head; its anchors are as `join_views` has them.
        rows: the own rows.
        present: which views each row has.
        among: the views of each head's anchors.
    """
    by_row, count = [], rows.slice.stop - rows.slice.start
    for numbers, views in zip(own, among, strict=True):
        if present is None:
            by_view = numbers.view(len(views), count, numbers.shape[1])
        else:
            there = present[rows.slice][:, list(views)].T
            by_view = numbers.new_zeros(*there.shape, numbers.shape[1])
            by_view[there] = numbers
        by_row.append(by_view.transpose(0, 1).flatten(1))
    whole = rows.gather(torch.cat(by_row, 1))
    found = torch.split(whole, [x.shape[1] for x in by_row], 1)
    return [
        join_views(
            torch.chunk(part, len(views), 1),
            None if present is None else present[:, list(views)],
        )
        for part, views in zip(found, among, strict=True)
    ]
