"""Anchors and keys laid end to end, of rows that may lack views."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor

Present = Bool[Tensor, "batch views"] | None  # which views each row has; None: all of them


def lay(
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
    """Where the views of some rows lie among all keys, both as `lay` has them."""
    own = torch.zeros(batch, dtype=torch.bool, device=device)
    own[rows] = True
    return lay([own] * views, present).nonzero()[:, 0]


def pair_count(present: Bool[Tensor, "batch views"], among: Sequence[int]) -> int:
    """Pairs of an anchor in the views `among` and another view of its row, at least 1."""
    others = present.sum(1) - 1
    return max(int(sum((others * present[:, u]).sum() for u in among)), 1)
