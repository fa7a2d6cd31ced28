"""Pairs by their cosine, counted in bins, since there are too many to keep."""

import math

import numpy as np
from numpy.typing import NDArray

BINS = 2000  # from -1 to 1, each 0.001 wide
MIDDLES = (np.arange(BINS) + 0.5) * (2 / BINS) - 1


def bins(cosine: NDArray[np.float32]) -> NDArray[np.int64]:
    """The bin of each cosine; rounding may carry one past the ends."""
    return np.clip(((cosine + 1) * (BINS / 2)).astype(np.int64), 0, BINS - 1)


def quantiles(histogram: NDArray[np.int64], shares: NDArray[np.float64]) -> NDArray[np.float64]:
    """Quantiles of a cosine out of its histogram, to the width of a bin; NaN where it is empty."""
    counted = np.cumsum(histogram)
    if not counted[-1]:
        return np.full(len(shares), np.nan)
    at = np.searchsorted(counted, np.maximum(shares * counted[-1], 1))
    return np.asarray(MIDDLES[at])


def mean(histogram: NDArray[np.int64]) -> float:
    """The mean cosine, to the width of a bin; NaN where the histogram is empty."""
    total = int(histogram.sum())
    return float(histogram @ MIDDLES) / total if total else math.nan


def more_similar(near: NDArray[np.int64], others: NDArray[np.int64]) -> float:
    """How often a pair of the one is more similar than one of the other; ties count half.

    The area under the ROC curve of telling the two apart by cosine; NaN where one is empty.
    """
    total = float(near.sum()) * float(others.sum())
    below = np.cumsum(others) - others / 2
    return float((near * below).sum() / total) if total else math.nan
