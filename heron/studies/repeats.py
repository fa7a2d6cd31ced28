"""Statistics over repeats: folds or seeds that methods have in common."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import t as t_distribution
from scipy.stats import ttest_rel

TOLERANCE = 1e-12  # relative to the scores: differences that vary by less count as constant


def mean_std_count(scores: Any) -> Any:
    """Returns mean, standard deviation (n - 1 below; NaN of one) and count, without NaN.

    `scores` is a Series, a DataFrame, or groups of one.
    """
    return scores.agg(["mean", "std", "count"])


def mean_std(mean: float, std: float | None) -> str:
    """Returns `0.8123 ± 0.0040`; without a deviation the mean alone, "–" where that is NaN."""
    if math.isnan(mean):
        return "–"
    return f"{mean:.4f}" + ("" if std is None or math.isnan(std) else f" ± {std:.4f}")


@dataclass(frozen=True)
class PairedTest:
    """Student's paired t-test of one method minus another over the `n` repeats of both.

    `difference` is the mean of the differences and `std` (n - 1 below) their deviation; `t` has
    n - 1 degrees of freedom and `p` is two-sided, both NaN if the differences are constant.
    """

    n: int
    difference: float
    std: float
    t: float
    p: float

    def cells(self) -> list[str]:
        """Returns the difference, t and p as cells of a table."""
        test = ["–", "–"] if math.isnan(self.t) else [f"{self.t:.2f}", f"{self.p:.2g}"]
        return [f"{self.difference:+.4f}", *test]


def paired_test(a: pd.Series, b: pd.Series) -> PairedTest | None:
    """Returns the test of a minus b, scores indexed by repeat; None for fewer than two in common.

    A repeat that is missing or NaN in either is left out.
    """
    scores = pd.concat([a, b], axis=1, join="inner").dropna().to_numpy(float)
    if len(scores) < 2:
        return None
    differences = scores[:, 0] - scores[:, 1]
    t = p = math.nan
    if np.ptp(differences) > TOLERANCE * np.abs(scores).max():
        t, p = map(float, ttest_rel(scores[:, 0], scores[:, 1]))
    mean, std = float(differences.mean()), float(differences.std(ddof=1))
    return PairedTest(len(scores), mean, std, t, p)


@dataclass(frozen=True)
class Interval:
    """A mean difference over `n` folds with its 95 % interval, NaN for fewer than two folds."""

    n: int
    mean: float
    low: float
    high: float

    @property
    def sign(self) -> int:
        """1 or -1 if the whole interval lies above or below 0, else 0."""
        return int(self.low > 0) - int(self.high < 0)

    @property
    def description(self) -> str:
        """The difference and its interval, as text."""
        if self.n == 0:
            return "not known (no fold has both scores)"
        if self.n == 1:
            return f"{self.mean:+.4f} (one fold: no interval)"
        return f"{self.mean:+.4f} ({self.low:+.4f} to {self.high:+.4f})"


def corrected_interval(differences: Any, shared: float) -> Interval:
    """Returns the mean of paired differences over folds that share rows, and its interval.

    It is the corrected resampled t of Nadeau and Bengio ("Inference for the generalization error",
    Machine Learning 52, 2003): differences of folds that are correlated by `shared` have a mean of
    variance s² (1 / n + shared / (1 - shared)), with Student's t of n - 1 degrees of freedom. With
    `shared` = test / (test + labelled) rows that is their 1 / n + test / labelled. `shared` lies
    from 0, for disjoint folds, to below 1. A fold whose difference is NaN is left out.
    """
    values = np.asarray(differences, float)
    values = values[~np.isnan(values)]
    n, mean = len(values), float(values.mean()) if len(values) else math.nan
    if n < 2:
        return Interval(n, mean, math.nan, math.nan)
    factor = 1 / n + shared / (1 - shared) if shared < 1 else math.inf
    half = float(t_distribution.ppf(0.975, n - 1) * math.sqrt(values.var(ddof=1) * factor))
    return Interval(n, mean, mean - half, mean + half)
