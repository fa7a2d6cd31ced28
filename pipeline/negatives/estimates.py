"""Estimates over pairs of anchors, with intervals that know that an anchor's pairs go together."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

DRAWS = 400  # of the bootstrap
CELLS = 2**20  # anchors times draws that are in memory at a time


@dataclass(frozen=True)
class Estimate:
    """Numbers with the ends of their 95 % intervals; all of one shape, NaN where undefined."""

    value: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]


def bootstrap(top: NDArray[Any], bottom: NDArray[Any], seed: int) -> Estimate:
    """The sum of `top` over the sum of `bottom`, with an interval over anchors drawn again.

    Pairs of one anchor are not independent, so anchors are drawn, and pairs are not.

    Args:
        top: [anchors, ...].
        bottom: the same shape; where an anchor has nothing to say both are 0.
        seed: of the draws.
    """
    shape, count = top.shape[1:], len(top)
    both = np.concatenate([top.reshape(count, -1), bottom.reshape(count, -1)], 1, dtype=np.float64)
    value, draws = _ratio(both.sum(0)), _ratio(resampled(both, seed))
    low, high = (np.full(value.shape, np.nan) for _ in range(2))
    if (defined := np.isfinite(draws).any(0)).any():
        low[defined], high[defined] = np.nanquantile(draws[:, defined], [0.025, 0.975], axis=0)
    return Estimate(value.reshape(shape), low.reshape(shape), high.reshape(shape))


def resampled(values: NDArray[Any], seed: int) -> NDArray[np.float64]:
    """Sums of values [anchors, columns] over as many anchors drawn again: [draws, columns]."""
    generator, count = np.random.default_rng(seed), len(values)
    found = np.empty((DRAWS, values.shape[1]))
    size = max(1, CELLS // count)
    for first in range(0, DRAWS, size):
        rows = min(size, DRAWS - first)
        drawn = generator.integers(count, size=(rows, count)) + count * np.arange(rows)[:, None]
        times = np.bincount(drawn.reshape(-1), minlength=rows * count).reshape(rows, count)
        found[first : first + rows] = times.astype(np.float64) @ values
    return found


def _ratio(both: NDArray[np.float64]) -> NDArray[np.float64]:
    top, bottom = np.split(both, 2, axis=-1)
    out = np.full(top.shape, np.nan)
    np.divide(top, bottom, out=out, where=bottom != 0)
    return out


def rank_correlation(x: NDArray[Any], y: NDArray[Any], seed: int) -> Estimate:
    """Spearman's rank correlation over all pairs, with an interval over anchors; NaN if constant.

    The ranks are those of all pairs, and are not made again for the anchors of a draw.

    Args:
        x: [anchors, pairs of each].
        y: the same shape.
        seed: of the draws.
    """
    a, b = (rankdata(v).reshape(v.shape) / v.size - 0.5 for v in (x, y))
    parts = [v.sum(1) for v in (np.ones(a.shape), a, b, a * a, b * b, a * b)]
    drawn = np.vstack([np.sum(parts, 1), resampled(np.stack(parts, 1), seed)])
    n, ma, mb, aa, bb, ab = drawn.T / drawn[:, 0]
    spread = np.sqrt(np.maximum((aa - ma**2) * (bb - mb**2), 0))
    some = spread > 1e-12  # below, it is rounding
    found = np.divide(ab - ma * mb, spread, out=np.full(len(n), np.nan), where=some)
    ends = np.quantile(found[1:][some[1:]], [0.025, 0.975]) if some[0] else [np.nan, np.nan]
    return Estimate(*(np.array(value) for value in (found[0], *ends)))


def own_rank_correlation(x: NDArray[Any], y: NDArray[Any], seed: int) -> Estimate:
    """The mean over anchors of the rank correlation of each one's pairs; see `rank_correlation`.

    What all pairs of an anchor share cancels in its loss, and here too.
    """
    a, b = (rankdata(v, axis=1) - (v.shape[1] + 1) / 2 for v in (x, y))
    spread = np.sqrt((a**2).sum(1) * (b**2).sum(1))
    some = spread > 0
    found = np.divide((a * b).sum(1), spread, out=np.zeros(len(a)), where=some)
    return bootstrap(found, some.astype(np.float64), seed)
