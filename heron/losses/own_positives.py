"""Losses whose positives are the other views of the anchor's own sample."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from heron.losses.contrast import contrast
from heron.losses.engine import unit, working_dtype
from heron.losses.mirroring import Mirroring, mirrored_sums
from heron.losses.pairs import OwnRows, Pairs, Present, Rows, as_slice, join_views, pair_count

# A head's vectors of each view on the anchors' side, and on the keys' side. With the sides swapped,
# the first of several heads is the last, the second the last but one; a single head is symmetric.
Head = tuple[Sequence[Tensor], Sequence[Tensor]]


def all_views_loss(
    vectors: Sequence[Tensor],
    heads: Sequence[Head],
    anchor_views: Sequence[int],
    tau: float,
    scale: float,
    rows: Rows,
    present: Present = None,
) -> Tensor:
    """Sums over the anchor views the mean of log1p(scale D / f+).

    D is the sum over the heads and over all views of the other samples.
    """
    count, batch, own = len(vectors), len(vectors[0]), as_slice(rows)
    samples = torch.arange(batch, device=vectors[0].device)
    mean = 1 / ((count - 1) * max(batch, 1))
    if present is not None:
        mean = len(anchor_views) / pair_count(present, anchor_views)
    counted, all_views = anchor_views, list(range(count))
    if isinstance(rows, OwnRows):  # views that are only keys: anchors of weight 0
        anchor_views = all_views
    mirroring = None
    if list(anchor_views) == all_views:
        mirror = range(len(heads))[::-1]
        mirroring = Mirroring.of(rows, batch, mirror, [0] * len(heads), [all_views], present)
    per_anchor = positives(vectors, anchor_views, tau, own, present)
    if len(counted) < len(anchor_views):
        is_counted = [x.new_full((len(x),), float(u in counted)) for u, x in enumerate(vectors)]
        weight = join_views(is_counted, present, own, anchor_views)[:, None]
        logit, *exists = per_anchor
        per_anchor = [logit, weight * (exists[0] if exists else torch.ones_like(logit))]

    def finish(sums: Tensor, per_anchor: Sequence[Tensor]) -> Tensor:
        loss = torch.log1p(scale * sums * torch.exp(-per_anchor[0]))
        return (loss * per_anchor[1] if len(per_anchor) > 1 else loss).sum() * mean

    exclude = None
    if present is None:
        exclude = own_keys(samples[own], batch, count).repeat(len(anchor_views), 1)
    pairs = Pairs(
        [join_views(anchors, present, own, anchor_views) for anchors, _ in heads],
        [join_views(keys, present) for _, keys in heads],
        anchor_tag=join_views([samples] * count, present, own, anchor_views),
        key_tag=join_views([samples] * count, present),
        exclude=exclude,
    )
    return contrast(pairs, finish, per_anchor, mirroring=mirroring)


def cross_view_loss(
    attraction: Head,
    heads: Sequence[Head],
    anchor_views: Sequence[int],
    scale: float,
    rows: Rows,
    present: Present = None,
    mirrored: bool = True,
) -> Tensor:
    """Sums over the anchor views the mean of log(scale D) - log f+, one loss per other view v.

    D is the sum over the heads and over view v of all samples, the positive included; log f+ is the
    inner product of a row's own views in `attraction`. `mirrored` says that swapping the sides of
    the heads acts as `Head` describes.
    """
    near, far = attraction
    count, batch, own = len(near), len(near[0]), as_slice(rows)
    mean = 1 / ((count - 1) * max(batch, 1))
    if present is not None:
        mean = len(anchor_views) / pair_count(present, anchor_views)

    def finish(sums: Tensor, per_anchor: Sequence[Tensor]) -> Tensor:
        positive, *exists = (x[:, None] for x in per_anchor)
        if exists:
            sums = torch.where(exists[0] > 0, sums, 1 / scale)
        loss = torch.log(scale * sums) - positive
        return (loss * exists[0] if exists else loss).sum() * mean

    def pairs(directions: Sequence[tuple[int, int]]) -> Pairs:
        return Pairs(
            [join_views(x, present, own, [u]) for u, _ in directions for x, _ in heads],
            [join_views(x, present, view_numbers=[v]) for _, v in directions for _, x in heads],
        )

    def per_anchor(u: int, v: int) -> list[Tensor]:  # the positive's logit, and whether it exists
        positive = (near[u][own] * far[v][own]).sum(1)
        if present is None:
            return [positive]
        has_anchor = present[own, u]
        return [positive[has_anchor], present[own, v][has_anchor].to(positive)]

    shares = []
    for couple in itertools.combinations(range(count), 2):
        directions = [couple, couple[::-1]]
        mirroring = None
        if mirrored:
            mirror, sum_index = range(2 * len(heads))[::-1], [0] * len(heads) + [1] * len(heads)
            views = [[u] for u in couple]
            mirroring = Mirroring.of(rows, batch, mirror, sum_index, views, present)
        sums = [] if mirroring is None else mirrored_sums(pairs(directions), mirroring)
        for direction, (u, v) in enumerate(directions):
            if u not in anchor_views:
                continue
            if mirroring is None:
                shares.append(contrast(pairs([(u, v)]), finish, per_anchor(u, v)))
            else:
                shares.append(finish(sums[direction], per_anchor(u, v)))
    return torch.stack(shares).sum()


def unit_views(z: Sequence[Tensor], tau: float, term: str) -> list[Tensor]:
    """Returns the projections as unit vectors in the working type; errors as in `nt_xent`."""
    dtype = working_dtype(z[0].dtype, tau)
    if len(z) < 2:
        raise ValueError(
            f"{term} needs at least 2 views, got {len(z)}; a single-view data set needs two "
            "augmentations of its view"
        )
    return [unit(view).to(dtype) for view in z]


def own_keys(samples: Tensor, batch: int, count: int) -> Tensor:
    """Returns the keys that are views of each sample, [samples, views]; keys lie view by view."""
    return samples[:, None] + batch * torch.arange(count, device=samples.device)


def positives(
    vectors: Sequence[Tensor],
    anchor_views: Sequence[int],
    tau: float,
    rows: slice,
    present: Present = None,
) -> list[Tensor]:
    """Returns the logits, cos / tau, of anchors with their samples' other views.

    The shape is [anchors, views - 1]. Where samples lack views, a tensor of that shape follows, 1
    for pairs that exist, else 0.
    """
    others = {u: [v for v in range(len(vectors)) if v != u] for u in anchor_views}
    cosines = [
        torch.stack([(vectors[u][rows] * vectors[v][rows]).sum(1) for v in others[u]], 1)
        for u in anchor_views
    ]
    if present is None:
        return [torch.cat(cosines) / tau]
    own, dtype = present[rows], vectors[0].dtype
    exists = [own[:, others[u]].to(dtype) for u in anchor_views]
    return [
        torch.cat([x[own[:, u]] for u, x in zip(anchor_views, by_view, strict=True)]) / divisor
        for by_view, divisor in ((cosines, tau), (exists, 1.0))
    ]
