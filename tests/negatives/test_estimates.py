"""Estimates with their intervals, against SciPy's and by formula."""

import math

import numpy as np
import pytest
from scipy.stats import spearmanr

from heron.negatives.estimates import (
    BINS,
    bins,
    bootstrap,
    own_rank_correlation,
    quantiles,
    rank_correlation,
)


def test_rank_correlations_are_spearmans() -> None:
    random = np.random.default_rng(3)
    x = random.integers(0, 5, (30, 20)).astype(float)
    y = x + random.normal(size=x.shape) * 2 + random.normal(size=(30, 1))
    pooled, own = rank_correlation(x, y, 0), own_rank_correlation(x, y, 0)
    assert pooled.value == pytest.approx(spearmanr(x.ravel(), y.ravel()).statistic)
    each = [spearmanr(a, b).statistic for a, b in zip(x, y, strict=True)]
    assert own.value == pytest.approx(np.mean(each))
    for estimate in (pooled, own):
        assert estimate.low < estimate.value < estimate.high
        assert 0.02 < estimate.high - estimate.low < 0.3
    assert np.isnan(rank_correlation(x, np.ones_like(x), 0).value)
    assert np.isnan(own_rank_correlation(x, np.ones_like(x), 0).value)


def test_intervals_are_those_of_a_mean() -> None:
    random = np.random.default_rng(4)
    values = random.normal(3, 2, 500)
    found = bootstrap(values, np.ones(500), 0)
    half = 1.96 * values.std() / math.sqrt(500)
    assert found.value == pytest.approx(values.mean())
    assert found.high - found.value == pytest.approx(half, rel=0.2)
    assert found.value - found.low == pytest.approx(half, rel=0.2)
    nothing = bootstrap(np.zeros((9, 2)), np.array([[1, 0]] * 9), 0)
    assert nothing.value[0] == nothing.high[0] == 0 and np.isnan(nothing.value[1])
    assert np.isnan(nothing.low[1])


def test_bins_hold_what_rounding_carries_past_the_ends() -> None:
    assert bins(np.array([-1.0000002, 1.0000002], np.float32)).tolist() == [0, BINS - 1]
    assert np.isnan(quantiles(np.zeros(BINS, np.int64), np.array([0.05, 0.5, 0.95]))).all()
