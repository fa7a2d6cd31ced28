"""Losses whose positives are the other views of the anchor's own sample."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from heron.pipeline.objectives.contrast import contrast
from heron.pipeline.objectives.engine import unit, working_dtype
from heron.pipeline.objectives.mirroring import Mirroring, mirrored_sums
from heron.pipeline.objectives.pairs import Pairs
from heron.pipeline.objectives.present import (
    OwnRows,
    Present,
    Rows,
    as_slice,
    join_views,
    pair_count,
)
from heron.pipeline.objectives.ring import held_rows, row_count

# The vectors of each view that stand on the anchors' side and on the keys' side of a head. Turned
# over (keys on the anchors' side), the first of several heads is the last, the second the last but
# one; a head alone is symmetric.
Head = tuple[Sequence[Tensor], Sequence[Tensor]]


def own_excluded(
    vectors: Sequence[Tensor],
    heads: Sequence[Head],
    among: Sequence[int],
    tau: float,
    scale: float,
    rows: Rows,
    present: Present = None,
) -> Tensor:
    """Sum over the anchor views `among` of the mean of log1p(scale D / f+).

    D is the sum over the heads and over all views of the other samples.
    """
    count, batch, own = len(vectors), row_count(rows, vectors[0]), as_slice(rows)
    here, seen = held_rows(rows, present)
    samples = torch.arange(batch, device=vectors[0].device)
    mean = 1 / ((count - 1) * max(batch, 1))
    if present is not None:
        mean = len(among) / pair_count(present, among)
    counted, every = among, list(range(count))
    if isinstance(rows, OwnRows):
        among = (
            every  # a view that is no anchor is a key, of which its own row is told the gradient
        )
    mirroring = None
    if list(among) == every:
        mirror = range(len(heads))[::-1]
        mirroring = Mirroring.of(rows, batch, mirror, [0] * len(heads), [every], present)
    known = positives(vectors, among, tau, here, seen)
    if len(counted) < len(among):
        weigh = [x.new_full((len(x),), float(u in counted)) for u, x in enumerate(vectors)]
        anchor = join_views(weigh, seen, here, among)[:, None]
        known = [known[0], anchor * (known[1] if len(known) > 1 else torch.ones_like(known[0]))]

    def finish(sums: Tensor, per_anchor: Sequence[Tensor]) -> Tensor:
        loss = torch.log1p(scale * sums * torch.exp(-per_anchor[0]))
        return (loss * per_anchor[1] if len(per_anchor) > 1 else loss).sum() * mean

    few = own_views(samples[own], batch, count).repeat(len(among), 1) if present is None else None
    pairs = Pairs(
        [join_views(near, seen, here, among) for near, _ in heads],
        [join_views(far, seen) for _, far in heads],
        anchor_tag=join_views([samples] * count, present, own, among),
        key_tag=join_views([samples] * count, present),
        exclude=few,
    )
    return contrast(pairs, finish, known, mirroring=mirroring)


def cross_view(
    attraction: Head,
    heads: Sequence[Head],
    among: Sequence[int],
    scale: float,
    rows: Rows,
    present: Present = None,
    mirrored: bool = True,
) -> Tensor:
    """Sum over the anchor views `among` of the mean of log(scale D) - log f+.

    D is the sum over the heads and over the samples' other view v, the positive among them; every
    v makes a loss of its own. `attraction` makes log f+, of a row's own views. `mirrored`: heads
    turned over are as `Head` says.
    """
    near, far = attraction
    count, batch, (own, seen) = len(near), row_count(rows, near[0]), held_rows(rows, present)
    mean = 1 / ((count - 1) * max(batch, 1))
    if present is not None:
        mean = len(among) / pair_count(present, among)

    def finish(sums: Tensor, per_anchor: Sequence[Tensor]) -> Tensor:
        positive, *there = (x[:, None] for x in per_anchor)
        if there:
            sums = torch.where(there[0] > 0, sums, 1 / scale)
        loss = torch.log(scale * sums) - positive
        return (loss * there[0] if there else loss).sum() * mean

    def pairs(ways: Sequence[tuple[int, int]]) -> Pairs:
        return Pairs(
            [join_views(vectors, seen, own, [u]) for u, _ in ways for vectors, _ in heads],
            [join_views(vectors, seen, among=[v]) for _, v in ways for _, vectors in heads],
        )

    def known(u: int, v: int) -> list[Tensor]:  # the positive's logit, and whether there is one
        positive = (near[u][own] * far[v][own]).sum(1)
        if seen is None:
            return [positive]
        here = seen[own, u]
        return [positive[here], seen[own, v][here].to(positive)]

    shares = []
    for couple in itertools.combinations(range(count), 2):
        ways = [couple, couple[::-1]]
        mirror, way = range(2 * len(heads))[::-1], [0] * len(heads) + [1] * len(heads)
        views = [[u] for u in couple]
        mirroring = Mirroring.of(rows, batch, mirror, way, views, present) if mirrored else None
        sums = [] if mirroring is None else mirrored_sums(pairs(ways), mirroring)
        for at, (u, v) in enumerate(ways):
            if u not in among:
                continue
            if mirroring is None:
                shares.append(contrast(pairs([(u, v)]), finish, known(u, v)))
            else:
                shares.append(finish(sums[at], known(u, v)))
    return torch.stack(shares).sum()


def unit_views(z: Sequence[Tensor], tau: float, term: str) -> list[Tensor]:
    """The views' projections as unit vectors in the working type; see `nt_xent` for the errors."""
    dtype = working_dtype(z[0].dtype, tau)
    if len(z) < 2:
        raise ValueError(
            f"{term} has {len(z)} view; expected at least 2: a single-view data set needs two "
            "augmentations of it"
        )
    return [unit(view).to(dtype) for view in z]


def other_views(u: int, count: int) -> list[int]:
    """The views that are positives of view u."""
    return [v for v in range(count) if v != u]


def own_views(samples: Tensor, batch: int, count: int) -> Tensor:
    """The keys that are views of some samples, [samples, views]; keys lie view by view."""
    return samples[:, None] + batch * torch.arange(count, device=samples.device)


def positives(
    vectors: Sequence[Tensor],
    among: Sequence[int],
    tau: float,
    rows: slice,
    present: Present = None,
) -> list[Tensor]:
    """The logit, cos / tau, of every anchor with its sample's other views, [anchors, views - 1].

    Where samples lack views, a tensor of that shape follows: 1 for pairs that there are, or 0.
    """
    count = len(vectors)
    columns = [
        torch.stack(
            [(vectors[u][rows] * vectors[v][rows]).sum(1) for v in other_views(u, count)], 1
        )
        for u in among
    ]
    if present is None:
        return [torch.cat(columns) / tau]
    own, dtype = present[rows], vectors[0].dtype
    there = [own[:, other_views(u, count)].to(dtype) for u in among]
    return [
        torch.cat([x[own[:, u]] for u, x in zip(among, parts, strict=True)]) / divisor
        for parts, divisor in ((columns, tau), (there, 1.0))
    ]
