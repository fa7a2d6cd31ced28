"""Anchors and keys, view by view of rows that may lack views, and sums over their pairs."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Int32, Shaped
from torch import Tensor

from heron.losses import fused
from heron.losses.fused import layout
from heron.losses.products import note

Present = Bool[Tensor, "batch views"] | None  # which views each row has; None: all of them


def join_views(
    views: Sequence[Tensor] | Tensor,
    present: Present,
    rows: slice = slice(None),
    view_numbers: Sequence[int] | None = None,
) -> Tensor:
    """Concatenates the rows of each view, without the rows that lack it.

    `view_numbers` are the views to take; None takes all. Views in one tensor are not copied where
    all rows are taken.
    """
    numbers = range(len(views)) if view_numbers is None else view_numbers
    if present is None and isinstance(views, Tensor) and numbers == range(len(views)):
        return rows_of_views(views, rows).flatten(0, 1)
    if present is None and len(numbers) == 1:
        return rows_of(views[numbers[0]], rows)
    if present is None:
        return torch.cat([views[v][rows] for v in numbers])
    return torch.cat([views[v][rows][present[rows, v]] for v in numbers])


def rows_of(view: Shaped[Tensor, "batch ..."], rows: slice) -> Tensor:
    """Returns some rows; all of them are the tensor itself, whose gradient is not copied."""
    return view if rows.indices(view.shape[0]) == (0, view.shape[0], 1) else view[rows]


def rows_of_views(views: Shaped[Tensor, "views batch ..."], rows: slice) -> Tensor:
    """Returns some rows of every view, as `rows_of`."""
    return views if rows.indices(views.shape[1]) == (0, views.shape[1], 1) else views[:, rows]


class Numbers(NamedTuple):
    """Numbers of anchors and keys that follow from sizes alone, in the order of `join_views`.

    Attributes:
        anchors: the row of each anchor.
        keys: the row of each key.
        positions: where each anchor lies among the keys.
        own_keys: the keys that are views of each anchor's row, [anchors, views].
    """

    anchors: Int32[Tensor, " anchors"]
    keys: Int32[Tensor, " keys"]
    positions: Int[Tensor, " anchors"]
    own_keys: Int[Tensor, "anchors views"]


def numbers_of(
    batch: int, views: int, rows: slice, device: torch.device, anchor_views: int | None = None
) -> Numbers:
    """Returns the numbers of a batch all of whose rows have all views; the first are anchors."""
    start, stop, _ = rows.indices(batch)
    return _numbers(
        batch, views, start, stop, device, views if anchor_views is None else anchor_views
    )


@lru_cache(maxsize=32)  # made once, not in every step
def _numbers(
    batch: int, views: int, start: int, stop: int, device: torch.device, anchor_views: int
) -> Numbers:
    with torch.inference_mode(False):
        places = torch.arange(batch * views, device=device).view(views, batch)
        row = places % max(batch, 1)
        return Numbers(
            layout.constant(row[:anchor_views, start:stop].flatten().int()),
            layout.constant(row.flatten().int()),
            places[:anchor_views, start:stop].flatten(),
            places[:, start:stop].T.repeat(anchor_views, 1),
        )


def key_numbers(count: int, device: torch.device) -> Int32[Tensor, " keys"]:
    """Returns the numbers from 0 on, made once."""
    return numbers_of(count, 1, slice(None), device).keys


def own_row_positions(
    batch: int, views: int, present: Present, rows: slice, device: torch.device
) -> Int[Tensor, " anchors"]:
    """Returns the positions of some rows' views among all keys, in the order of `join_views`."""
    if present is None:  # known without the device, for which the host would wait
        return numbers_of(batch, views, rows, device).positions
    own = torch.zeros(batch, dtype=torch.bool, device=device)
    own[rows] = True
    return join_views([own] * views, present).nonzero()[:, 0]


def pair_count(present: Present, batch: int, views: int, anchor_views: Sequence[int]) -> int:
    """Counts pairs of an anchor in `anchor_views` and another view of its row; at least 1."""
    if present is None:
        return (views - 1) * max(batch, 1) * len(anchor_views)
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


@dataclass(frozen=True)
class Pairs:
    """Anchors, keys, and the weight of each of their pairs.

    With l_ik = anchors_i . keys_k (1 / tau is inside the anchors), an anchor's sum of moment m is

        sum_k w_ik 1[anchor_tag_i != key_tag_k] 1[l_ik >= floor] exp(m l_ik)

    where w_ik = anchor_weight_i . key_weight_k. The sums of several heads (other vectors for the
    same pairs) are added.

    Attributes:
        anchors: [anchors, dim] for each head, in the working dtype; heads may differ in dim.
        keys: [keys, dim] for each head.
        anchor_tag: whole numbers; pairs with equal tags are left out.
        key_tag: the tags of the keys; None leaves no pair out.
        exclude: where the tags leave few pairs out, the key columns of these pairs for each anchor:
            strips mask these columns and compare no tags.
        anchor_weight: [anchors, width]; its product with `key_weight` weighs a pair; not
            differentiated.
        key_weight: [keys, width], or None for weights of 1.
        moments: the factors m of the exponents; 0 counts the pairs.
        slopes: d / d logit of e^(m l) is taken as slope * e^(m l); None: the moments themselves.
        floor: pairs with a smaller logit are left out.
    """

    anchors: Sequence[Float[Tensor, "_ _"]]
    keys: Sequence[Float[Tensor, "_ _"]]
    anchor_tag: Int[Tensor, " anchors"] | None = None
    key_tag: Int[Tensor, " keys"] | None = None
    exclude: Int[Tensor, "anchors excluded"] | None = None
    anchor_weight: Float[Tensor, "anchors width"] | None = None
    key_weight: Float[Tensor, "keys width"] | None = None
    moments: tuple[float, ...] = (1.0,)
    slopes: tuple[float, ...] | None = None
    floor: float = -math.inf

    def of_kernels(self) -> dict[str, Any]:
        """Returns what the fused kernels take of it beside vectors and weights."""
        tags = {"anchor_tag": self.anchor_tag, "key_tag": self.key_tag}
        int_tags = {side: None if tag is None else tag.int() for side, tag in tags.items()}
        return {"moments": self.moments, "floor": self.floor, **int_tags}


def is_fused(vectors: Tensor, *kernels: fused.Kernel) -> bool:
    """Whether fused kernels compute the terms of these vectors: `fused.enabled`, `fused.trusted`.

    Vectors above `fused.WIDEST` take strips, which need three products and keep their coefficients;
    a kernel would compute the logits again for each slice of a gradient. Strips have the same
    precision (see `losses.products`), and are noted where they are computed.
    """
    narrow = vectors.shape[1] <= fused.WIDEST
    possible = narrow and vectors.dtype == torch.float32 and fused.enabled(vectors.device)
    if not possible or not all(fused.trusted(kernel, vectors.device) for kernel in kernels):
        return False
    note(f"fused kernels, {fused.choose_precision(None, vectors)}")
    return True


def summands(pairs: Pairs, rows: slice, strip: Tensor, first: int = 0) -> list[Tensor]:
    """Returns the weighted exponentials of a strip, one tensor per moment.

    The memory of the logits, `strip`, is reused for the last moment. `first` is the strip's first
    key, where earlier keys are left out; it is at most the number of its first anchor, which has
    the same number as a key and is excluded as such.
    """
    masked = None
    if pairs.exclude is None and pairs.anchor_tag is not None and pairs.key_tag is not None:
        masked = pairs.anchor_tag[rows, None] == pairs.key_tag[first:]
    if pairs.floor > -math.inf:
        below = strip < pairs.floor
        masked = below if masked is None else masked | below
    weight = None
    if pairs.anchor_weight is not None and pairs.key_weight is not None:
        weight = pairs.anchor_weight[rows] @ pairs.key_weight[first:].T
    exclude = None
    if pairs.exclude is not None:
        exclude = pairs.exclude[rows]
        if first:  # keys before the strip become the anchor itself
            own_columns = torch.arange(rows.start, rows.stop, device=strip.device)
            exclude = torch.where(exclude < first, own_columns[:, None], exclude) - first
    exponentials = [torch.exp(strip * moment) for moment in pairs.moments[:-1]]
    last = strip if pairs.moments[-1] == 1 else strip.mul_(pairs.moments[-1])
    exponentials.append(last.exp_())
    for values in exponentials:
        if masked is not None:
            values.masked_fill_(masked, 0.0)
        if exclude is not None:
            values.scatter_(1, exclude, 0.0)
        if weight is not None:
            values.mul_(weight)
    return exponentials
