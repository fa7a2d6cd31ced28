"""Whether embeddings collapse: alignment, uniformity and effective rank of a whole batch.

A contrastive loss that falls may hide a collapse, of two kinds: all rows at one point, which
uniformity shows, or all rows in a few dimensions, which the effective rank shows. Alignment is the
counterpart: it is at its best, 0, in a collapse, and is read beside the two.
"""

import itertools
import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

ROWS = 2048  # at most this many rows are compared with each other
UNIFORMITY_LIMIT = -0.1  # a mean squared distance of about 0.05, a mean cosine of 0.975
RANK_LIMIT = 1.5  # halfway between a line and a plane


@torch.no_grad()
def measure(
    views: Sequence[Float[Tensor, "rows dim"]], present: Bool[Tensor, "rows views"] | None = None
) -> dict[str, float]:
    """Measures a batch's embeddings after L2 normalisation, which is all that a cosine loss sees.

    Each view is measured by itself: the encoders of two views may each map all rows to a point of
    their own, and pooled these would look spread out. The worst view counts: the largest uniformity
    and the smallest effective rank. These two use at most `ROWS` evenly spaced rows; alignment uses
    all rows.

    Args:
        views: the projections z of every view, of all processes; any floating type.
        present: which views each row has; a view is measured on the rows that have it, and a pair
            on those with both. None: all rows have all.

    Returns:
        `alignment` (of the mean pair of views; left out with one view), `uniformity` and
        `effective_rank`, without units. All are NaN where a value of a view is not finite.

    Raises:
        ValueError: there is no view, no row or no column, or the views differ in shape.
    """
    shapes = [tuple(z.shape) for z in views]
    if not shapes or len(set(shapes)) > 1 or len(shapes[0]) != 2 or 0 in shapes[0]:
        raise ValueError(f"views must all have the same shape [rows, dim], got {shapes}")
    finite = all(bool(z.isfinite().all()) for z in views)
    units = [_unit(z) for z in views]
    has_view = views[0].new_ones(len(views[0]), len(views)) > 0 if present is None else present
    present_rows = [x[in_view] for x, in_view in zip(units, has_view.T, strict=True)]
    sampled = [x[_evenly(len(x), x.device)].double() for x in present_rows if len(x)]
    values = {}
    pairs = [
        alignment(units[u][both], units[v][both])
        for u, v in itertools.combinations(range(len(units)), 2)
        if (both := has_view[:, u] & has_view[:, v]).any()
    ]
    if pairs:
        values["alignment"] = math.fsum(pairs) / len(pairs) if finite else math.nan
    values["uniformity"] = max(map(uniformity, sampled)) if finite else math.nan
    values["effective_rank"] = min(map(effective_rank, sampled)) if finite else math.nan
    return values


def collapsed(measures: dict[str, float]) -> str:
    """Says why the measured embeddings have collapsed; empty if they have not.

    Uniformity above -0.1 means that nearly all rows are at one point (a circle has -1.6, a sphere
    in many dimensions nearly -4, two opposite points -0.7). Effective rank below 1.5 means that the
    rows lie on one line through the origin (random directions in a plane have 2). Both limits are
    loose, to spare a run that has only begun. A single row, or two classes at opposite points, as a
    supervised run may end, also count as collapsed. NaN does not: it stops the run elsewhere.
    """
    reasons = []
    if (value := measures["uniformity"]) > UNIFORMITY_LIMIT:
        reasons.append(
            f"uniformity is {value:.3f}, above {UNIFORMITY_LIMIT}: rows are at one point"
        )
    if (value := measures["effective_rank"]) < RANK_LIMIT:
        reasons.append(f"effective rank is {value:.3f}, below {RANK_LIMIT}: rows are on one line")
    return "; ".join(reasons)


def alignment(x: Float[Tensor, "rows dim"], y: Float[Tensor, "rows dim"]) -> float:
    """Returns the mean squared distance of two views' unit vectors of a row, from 0 to 4.

    Wang and Isola (2020), "Understanding contrastive representation learning through alignment and
    uniformity on the hypersphere", L_align with alpha = 2.
    """
    return float((x - y).square().sum(1).mean(dtype=torch.float64))


def uniformity(x: Float[Tensor, "rows dim"], strip: int = 256) -> float:
    """Returns log mean exp(-2 |x_i - x_j|^2) over pairs i < j: 0 at one point, down to -8.

    Wang and Isola (2020), L_uniform with t = 2. Pairs are visited in strips: memory is linear.

    Args:
        x: unit vectors, in float64.
        strip: rows that are compared with all others at a time.

    Returns:
        The measure; 0 for one row, which has no pairs.
    """
    rows = len(x)
    if rows == 1:
        return 0.0
    norms, total = x.square().sum(1), x.new_zeros(())
    for start in range(0, rows, strip):
        block = slice(start, start + strip)
        squares = norms[block, None] + norms[start:] - 2 * x[block] @ x[start:].T
        total += torch.exp(-2 * squares.clamp_min(0)).triu(1).sum()
    return float((total / (rows * (rows - 1) / 2)).log())


def effective_rank(x: Float[Tensor, "rows dim"]) -> float:
    """Returns exp of the entropy of the singular values over their sum, from 1 to min(rows, dim).

    Roy and Vetterli (2007), "The effective rank: a measure of effective dimensionality", section 2.
    It is RankMe (Garrido et al. 2023, Eq. 1) but for the 1e-7 that RankMe adds to every share to
    keep its logarithm finite; here 0 log 0 = 0. RankMe is taken of vectors as they are, not of unit
    vectors: an evaluation's `rankme` is this function of the test rows' hidden features.

    The rows are not centred. With rows at one point but for rounding, what centring leaves is
    noise, of full rank: the worst collapse would have the best value. Uncentred it is near 1, and
    moves continuously from there; nor do two rows lose a dimension of their two. The price is
    that a common mean counts as a dimension, and that a line beside the origin, which
    normalisation bends to an arc, has up to 2.

    Args:
        x: vectors, in float64; a row may be zero.

    Returns:
        The measure; 1 for a matrix of zeros, which has no positive singular value.
    """
    gram = x.T @ x if x.shape[1] <= len(x) else x @ x.T
    values = torch.linalg.eigvalsh(gram).clamp_min(0).sqrt()
    shares = values / values.sum().clamp_min(torch.finfo(values.dtype).tiny)
    return float(torch.special.entr(shares).sum().exp())


def _unit(z: Tensor) -> Tensor:
    """Returns rows of length one in float32; a row of zeros stays zero."""
    z = z.float()
    # Divide by the largest entry first, so that squares neither over- nor underflow.
    z = z / z.abs().amax(1, keepdim=True).clamp_min(torch.finfo(z.dtype).tiny)
    return torch.nn.functional.normalize(z, dim=1)


def _evenly(rows: int, device: torch.device) -> Tensor:
    count = min(rows, ROWS)
    return torch.arange(count, device=device) * rows // count
