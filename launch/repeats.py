"""Statistics over repeats: folds or seeds that several methods have in common."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import ttest_rel

SAME = 1e-12  # of the scores: differences that vary by less do not vary


def describe(scores: Any) -> Any:
    """Returns mean, standard deviation (n - 1 below; NaN of one) and count, without NaN.

    `scores` is a Series, a DataFrame, or groups of one.
    """
    return scores.agg(["mean", "std", "count"])


@dataclass(frozen=True)
class Paired:
    """One method less another over `n` repeats that both have: Student's paired t-test.

    `difference` and `std` (n - 1 below) are of the differences; `t` has n - 1 degrees of freedom,
    `p` is two-sided, and both are NaN where no difference varies.
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


def paired(ours: pd.Series, theirs: pd.Series) -> Paired | None:
    """Returns ours less theirs, scores indexed by repeat; None of fewer than two in common.

    A repeat that either lacks, or has NaN of, is left out.
    """
    both = pd.concat([ours, theirs], axis=1, join="inner").dropna().to_numpy(float)
    if len(both) < 2:
        return None
    differences = both[:, 0] - both[:, 1]
    t = p = math.nan
    if np.ptp(differences) > SAME * np.abs(both).max():
        t, p = map(float, ttest_rel(both[:, 0], both[:, 1]))
    mean, std = float(differences.mean()), float(differences.std(ddof=1))
    return Paired(len(both), mean, std, t, p)
