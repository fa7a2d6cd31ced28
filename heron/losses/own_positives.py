"""Losses whose positives are the other views of the anchor's own sample."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from heron.losses.contrast import contrast
from heron.losses.engine import mean_over, sum_of, unit_and_scaled, working_dtype
from heron.losses.inputs import refuse_one_view
from heron.losses.mirroring import Mirroring, mirrored_sums
from heron.losses.pairs import (
    OwnRows,
    Pairs,
    Present,
    Rows,
    as_slice,
    join_views,
    numbers_of,
    pair_count,
    rows_of,
    rows_of_views,
)

# A head's vectors of each view on the anchors' side, and on the keys' side, [views, batch, dim].
# With the sides swapped, the first of several heads is the last, the second the last but one; a
# single head is symmetric.
Head = tuple[Tensor, Tensor]


def all_views_loss(
    vectors: Float[Tensor, "views batch dim"],
    heads: Sequence[Head],
    anchor_views: range,
    tau: float,
    scale: float,
    rows: Rows,
    present: Present = None,
) -> Tensor:
    """Returns the mean over the anchor views, from one on, of log1p(scale D / f+).

    D is the sum over the heads and over all views of the other samples.
    """
    count, batch, own = len(vectors), vectors.shape[1], as_slice(rows)
    of_pairs = pair_count(present, batch, count, anchor_views)
    counted, all_views = anchor_views, range(count)
    if isinstance(rows, OwnRows):  # views that are only keys: anchors of weight 0
        anchor_views = all_views
    mirroring = None
    if anchor_views == all_views:
        mirror = range(len(heads))[::-1]
        mirroring = Mirroring.of(rows, batch, mirror, [0] * len(heads), [all_views], present)
    per_anchor = cosines(vectors, anchor_views, own, present)
    if len(counted) < len(anchor_views):
        is_counted = [x.new_full((len(x),), float(u in counted)) for u, x in enumerate(vectors)]
        weight = join_views(is_counted, present, own, anchor_views)[:, None]
        logit, *exists = per_anchor
        per_anchor = [logit, weight * (exists[0] if exists else torch.ones_like(logit))]

    def finish(sums: Tensor, per_anchor: Sequence[Tensor]) -> Tensor:
        scaled = sums if scale == 1 else scale * sums
        loss = torch.log1p(scaled * torch.exp(per_anchor[0] * (-1 / tau)))
        return mean_over(loss * per_anchor[1] if len(per_anchor) > 1 else loss, of_pairs)

    pairs = Pairs(
        [join_views(anchors, present, own, anchor_views) for anchors, _ in heads],
        [join_views(keys, present) for _, keys in heads],
        **own_views(batch, count, anchor_views, own, present, vectors.device),
    )
    return contrast(pairs, finish, per_anchor, mirroring=mirroring)


def own_views(
    batch: int, count: int, anchor_views: range, own: slice, present: Present, device: torch.device
) -> dict[str, Any]:
    """Returns what of `Pairs` leaves out the pairs of an anchor and a view of its own row."""
    if present is None and anchor_views.start == 0:
        numbers = numbers_of(batch, count, own, device, len(anchor_views))
        tags = {"anchor_tag": numbers.anchors, "key_tag": numbers.keys}
        return {**tags, "exclude": numbers.own_keys}
    samples = [torch.arange(batch, device=device)] * count
    return {
        "anchor_tag": join_views(samples, present, own, anchor_views),
        "key_tag": join_views(samples, present),
    }


def cross_view_loss(
    attraction: Head,
    heads: Sequence[Head],
    anchor_views: range,
    scale: float,
    rows: Rows,
    present: Present = None,
    mirrored: bool = True,
) -> Tensor:
    """Returns the mean over the anchor views of log(scale D) - log f+, one loss per other view v.

    D is the sum over the heads and over view v of all samples, the positive included; log f+ is the
    inner product of a row's own views in `attraction`. `mirrored` says that swapping the sides of
    the heads acts as `Head` describes.
    """
    near, far = attraction
    count, batch, own = len(near), near.shape[1], as_slice(rows)
    of_pairs = pair_count(present, batch, count, anchor_views)
    sides = {id(x): x.unbind(0) for head in (attraction, *heads) for x in head}  # each once
    near_views, far_views = (sides[id(x)] for x in attraction)
    head_views = [(sides[id(x)], sides[id(y)]) for x, y in heads]

    def finish(sums: Tensor, per_anchor: Sequence[Tensor]) -> Tensor:
        positive, *exists = (x[:, None] for x in per_anchor)
        if exists:
            sums = torch.where(exists[0] > 0, sums, 1 / scale)
        loss = torch.log(sums if scale == 1 else scale * sums) - positive
        return mean_over(loss * exists[0] if exists else loss, of_pairs)

    def pairs(directions: Sequence[tuple[int, int]]) -> Pairs:
        return Pairs(
            [join_views(x, present, own, [u]) for u, _ in directions for x, _ in head_views],
            [
                join_views(x, present, view_numbers=[v])
                for _, v in directions
                for _, x in head_views
            ],
        )

    def per_anchor(u: int, v: int) -> list[Tensor]:  # the positive's logit, and whether it exists
        positive = (rows_of(near_views[u], own) * rows_of(far_views[v], own)).sum(1)
        if present is None:
            return [positive]
        has_anchor = present[own, u]
        return [positive[has_anchor], present[own, v][has_anchor].to(positive)]

    shares = []
    for couple in itertools.combinations(range(count), 2):
        directions = [d for d in (couple, couple[::-1]) if d[0] in anchor_views]
        mirroring = None
        if not directions:
            continue
        if mirrored:
            mirror, sum_index = range(2 * len(heads))[::-1], [0] * len(heads) + [1] * len(heads)
            views = [[u] for u in couple]
            mirroring = Mirroring.of(rows, batch, mirror, sum_index, views, present)
        if mirroring is None:
            shares += [contrast(pairs([d]), finish, per_anchor(*d)) for d in directions]
            continue
        sums = mirrored_sums(pairs([couple, couple[::-1]]), mirroring)[: len(directions)]
        if near is far and present is None:  # the same logit either way
            joined = [per_anchor(*couple)[0].repeat(len(directions))]
        else:
            by_direction = zip(*(per_anchor(*d) for d in directions), strict=True)
            joined = [torch.cat(x) for x in by_direction]
        shares.append(finish(torch.cat(sums), joined))
    return sum_of(shares)


def unit_head(z: Sequence[Tensor], tau: float, term: str, least_tau: float | None = None) -> Head:
    """Returns the projections as unit vectors over tau, and as such, in the working type.

    That is the type of `least_tau`, if it is given. Errors are those of `nt_xent`.
    """
    dtype = working_dtype(z[0].dtype, least_tau or tau)
    refuse_one_view(z, term)
    vectors, scaled = unit_and_scaled(z, tau, dtype)
    return scaled, vectors


def positives(
    vectors: Float[Tensor, "views batch dim"],
    anchor_views: range,
    tau: float,
    rows: slice,
    present: Present = None,
) -> list[Tensor]:
    """Returns the logits, cos / tau, of anchors with their samples' other views: see `cosines`."""
    of_pairs, *exists = cosines(vectors, anchor_views, rows, present)
    return [of_pairs / tau, *exists]


def cosines(
    vectors: Float[Tensor, "views batch dim"],
    anchor_views: range,
    rows: slice,
    present: Present = None,
) -> list[Tensor]:
    """Returns the cosines of anchors with their samples' other views.

    The shape is [anchors, views - 1]; view u's k-th other view is u + k, counted around. Where
    samples lack views, a tensor of that shape follows, 1 for pairs that exist, else 0.
    """
    own, shifts = rows_of_views(vectors, rows), range(1, len(vectors))
    by_shift = [(own * own.roll(-k, 0)).sum(-1, keepdim=True) for k in shifts]
    by_view = by_shift[0] if len(by_shift) == 1 else torch.cat(by_shift, -1)
    if present is None:
        return [join_views(by_view, None, view_numbers=anchor_views)]
    others = torch.stack([present[rows].T.roll(-k, 0) for k in shifts], -1).to(vectors.dtype)
    return [join_views(x, present[rows], view_numbers=anchor_views) for x in (by_view, others)]
