"""Statistics over many pairs: estimates with intervals over anchors, histograms of cosines."""

import math
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

DRAWS = 400  # of the bootstrap
BLOCK_CELLS = 2**20  # anchors times draws in memory at a time
BINS = 2000  # of a histogram of cosines, from -1 to 1, each 0.001 wide
BIN_CENTERS = (np.arange(BINS) + 0.5) * (2 / BINS) - 1

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Estimate:
    """Numbers with the ends of their 95 % intervals; of the same shape, NaN where undefined."""

    value: Floats
    low: Floats
    high: Floats

    def __getitem__(self, index: Any) -> Self:
        """Indexes all three as NumPy does."""
        return type(self)(self.value[index], self.low[index], self.high[index])


def bootstrap(top: NDArray[Any], bottom: NDArray[Any], seed: int) -> Estimate:
    """Returns the sum of `top` over the sum of `bottom`, both [anchors, ...], with its interval.

    Pairs of one anchor are not independent, so anchors are resampled rather than pairs. An anchor
    that does not contribute has 0 in both.
    """
    shape, count = top.shape[1:], len(top)
    columns = [top.reshape(count, -1), bottom.reshape(count, -1)]
    values = np.concatenate(columns, 1, dtype=np.float64)
    value, draws = _ratio(values.sum(0)), _ratio(_resample(values, seed))
    low, high = (np.full(value.shape, np.nan) for _ in range(2))
    if (defined := np.isfinite(draws).any(0)).any():
        low[defined], high[defined] = np.nanquantile(draws[:, defined], [0.025, 0.975], axis=0)
    return Estimate(value.reshape(shape), low.reshape(shape), high.reshape(shape))


def _resample(values: NDArray[Any], seed: int) -> Floats:
    """Returns sums of values [anchors, columns] over resampled anchors, [draws, columns]."""
    generator, count = np.random.default_rng(seed), len(values)
    sums = np.empty((DRAWS, values.shape[1]))
    size = max(1, BLOCK_CELLS // count)
    for start in range(0, DRAWS, size):
        draws = min(size, DRAWS - start)
        drawn = generator.integers(count, size=(draws, count)) + count * np.arange(draws)[:, None]
        multiplicity = np.bincount(drawn.reshape(-1), minlength=draws * count).reshape(draws, count)
        sums[start : start + draws] = multiplicity.astype(np.float64) @ values
    return sums


def _ratio(values: Floats) -> Floats:
    top, bottom = np.split(values, 2, axis=-1)
    ratio = np.full(top.shape, np.nan)
    np.divide(top, bottom, out=ratio, where=bottom != 0)
    return ratio


def rank_correlation(x: NDArray[Any], y: NDArray[Any], seed: int) -> Estimate:
    """Returns Spearman's rank correlation over all pairs [anchors, pairs of each]; NaN if constant.

    Ranks are computed once over all pairs, and not anew for each draw of anchors.
    """
    a, b = (rankdata(v).reshape(v.shape) / v.size - 0.5 for v in (x, y))
    moments = np.stack([v.sum(1) for v in (np.ones(a.shape), a, b, a * a, b * b, a * b)], 1)
    sums = np.vstack([moments.sum(0), _resample(moments, seed)])
    n, mean_a, mean_b, aa, bb, ab = sums.T / sums[:, 0]
    spread = np.sqrt(np.maximum((aa - mean_a**2) * (bb - mean_b**2), 0))
    varies = spread > 1e-12  # smaller values are rounding
    blank = np.full(len(n), np.nan)
    correlation = np.divide(ab - mean_a * mean_b, spread, out=blank, where=varies)
    ends = [np.nan, np.nan]
    if varies[0]:
        ends = np.quantile(correlation[1:][varies[1:]], [0.025, 0.975]).tolist()
    return Estimate(*(np.array(value) for value in (correlation[0], *ends)))


def own_rank_correlation(x: NDArray[Any], y: NDArray[Any], seed: int) -> Estimate:
    """Returns the mean over anchors of the rank correlation among each anchor's own pairs.

    Whatever all pairs of an anchor have in common cancels, as it does in its loss.
    """
    a, b = (rankdata(v, axis=1) - (v.shape[1] + 1) / 2 for v in (x, y))
    spread = np.sqrt((a**2).sum(1) * (b**2).sum(1))
    varies = spread > 0
    own = np.divide((a * b).sum(1), spread, out=np.zeros(len(a)), where=varies)
    return bootstrap(own, varies.astype(np.float64), seed)


def bins(cosine: NDArray[np.float32]) -> Counts:
    """Returns the bin of each cosine, clipped, as rounding may exceed the range."""
    return np.clip(((cosine + 1) * (BINS / 2)).astype(np.int64), 0, BINS - 1)


def quantiles(histogram: Counts, shares: Floats) -> Floats:
    """Returns quantiles of a cosine, to the width of a bin; NaN if the histogram is empty."""
    if not histogram.any():
        return np.full(len(shares), np.nan)
    return np.asarray(np.quantile(BIN_CENTERS, shares, weights=histogram, method="inverted_cdf"))


def more_similar(near: Counts, others: Counts) -> float:
    """Returns how often a pair of `near` is more similar than one of `others`; ties count half.

    It is the area under the ROC curve of the cosine as a classifier; NaN if either is empty.
    """
    total = float(near.sum()) * float(others.sum())
    below = np.cumsum(others) - others / 2
    return float((near * below).sum() / total) if total else math.nan
