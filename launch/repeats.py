"""Statistics over repeats: folds or seeds that several methods have in common."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

SAME = 1e-12  # of the values: differences that vary by less do not vary


@dataclass(frozen=True)
class Paired:
    """One method less another, over the repeats that both have.

    Attributes:
        n: how many repeats there are.
        difference: the mean of the differences.
        std: their standard deviation, n - 1 below.
        t: of Student's paired test with n - 1 degrees of freedom; NaN where no difference varies.
        p: that it is as large by chance, on both sides; NaN as t.
    """

    n: int
    difference: float
    std: float
    t: float
    p: float

    def cells(self) -> list[str]:
        """Returns the difference, t and p as cells of a table."""
        if math.isnan(self.t):
            return [f"{self.difference:+.4f}", "–", "–"]
        return [f"{self.difference:+.4f}", f"{self.t:.2f}", f"{self.p:.2g}"]

    def plain(self) -> dict[str, Any]:
        """Returns the values for JSON, null in place of NaN."""
        return {k: None if math.isnan(v) else v for k, v in asdict(self).items()}


def paired(ours: pd.Series, theirs: pd.Series) -> Paired | None:
    """Compares two methods by their scores over the same repeats: Student's paired t-test.

    Args:
        ours: scores, indexed by repeat.
        theirs: the same of the other method; a repeat that either lacks, or has NaN of, is left
            out.

    Returns:
        Ours less theirs; None where they have fewer than two repeats in common.
    """
    from scipy.stats import ttest_rel

    both = pd.concat([ours, theirs], axis=1, join="inner").dropna().astype(float)
    if len(both) < 2:
        return None
    one, other = both.to_numpy().T
    found = one - other
    t = p = math.nan
    if np.ptp(found) > SAME * np.abs(both.to_numpy()).max():
        t, p = map(float, ttest_rel(one, other))
    return Paired(len(found), float(found.mean()), float(found.std(ddof=1)), t, p)
