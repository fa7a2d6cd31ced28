"""Laws through measured points: powers and polynomials, with intervals for what they say."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from launch.studies.text import number

Values = NDArray[np.float64]
LEVEL = 0.95


@dataclass(frozen=True)
class Polynomial:
    """y = c_0 + c_1 x + ..., by least squares.

    Attributes:
        coefficients: c_0 first.
        reach: half of each one's interval.
        freedom: degrees of freedom: points less coefficients.
        r2: share of the variance of y that is explained.
    """

    coefficients: Values
    reach: Values
    freedom: int
    r2: float

    @classmethod
    def through(cls, x: Any, y: Any, degree: int, **more: float) -> Any:
        """Fits one to points; the intervals are Student's t of the coefficients' deviations."""
        coefficients, covariance = np.polyfit(x, y, degree, cov=True)
        freedom = len(x) - degree - 1
        reach = stats.t.ppf((1 + LEVEL) / 2, freedom) * np.sqrt(np.diag(covariance))
        rest = np.var(y - np.polyval(coefficients, x))
        r2 = float(1 - rest / np.var(y)) if np.var(y) else 1.0
        return cls(coefficients[::-1], reach[::-1], freedom, r2, **more)

    @property
    def name(self) -> str:
        """For a figure's legend."""
        return "line" if len(self.coefficients) == 2 else "quadratic"

    def at(self, x: Values) -> Values:
        """Returns the law's values."""
        return np.asarray(np.polyval(self.coefficients[::-1], x))

    def says(self) -> str:
        """Returns the law, its intervals, and how it was made, as a sentence."""
        terms = [
            f"({number(c, 3)} ± {number(r, 2)}){unit}"
            for c, r, unit in zip(self.coefficients, self.reach, ("", " x", " x²"), strict=False)
        ]
        return (
            f"{' + '.join(terms)}; ± is half of a {LEVEL:.0%} interval ({self._how('means')}, "
            f"R² {self.r2:.4f})"
        )

    def _how(self, what: str) -> str:
        n, degrees = self.freedom + len(self.coefficients), "degree" + "s" * (self.freedom != 1)
        return (
            f"least squares on the {what} at {n} values of x, Student's t with {self.freedom} "
            f"{degrees} of freedom"
        )


@dataclass(frozen=True)
class Power(Polynomial):
    """y = a x^b, as a line through logarithms: log y = log a + b log x.

    Attributes:
        last: the exponent between the last two points alone.
    """

    last: float

    @property
    def b(self) -> float:
        """The exponent."""
        return float(self.coefficients[1])

    @property
    def interval(self) -> tuple[float, float]:
        """The ends of the exponent's interval."""
        return self.b - float(self.reach[1]), self.b + float(self.reach[1])

    @property
    def name(self) -> str:
        """For a figure's legend."""
        return f"x^{self.b:.2f}"

    def at(self, x: Values) -> Values:
        """Returns the law's values."""
        return np.exp(super().at(np.log(x)))

    def says(self) -> str:
        """Returns the law, its interval, and how it was made, as a sentence."""
        low, high = self.interval
        return (
            f"{number(float(np.exp(self.coefficients[0])), 3)} · x^{self.b:.3f}; {LEVEL:.0%} "
            f"interval of the exponent {low:.3f} to {high:.3f} "
            f"({self._how('logarithms of the geometric means')}, R² {self.r2:.4f}); between the "
            f"last two points the exponent is {self.last:.3f}"
        )


def power(values: pd.Series) -> Power | str:
    """Fits y = a x^b by least squares on logarithms.

    A value of x counts once, by the geometric mean of its repeats: those share what the law does
    not say, so counting each would make the interval too narrow.

    Args:
        values: of y, indexed by x, a line for each repeat.

    Returns:
        The law; or, in words, why there is none.
    """
    if why := _refused(values, 2):
        return f"No power law: {why}."
    if (values <= 0).any() or (values.index <= 0).any():
        return "No power law: x and y are not above 0 at every point."
    means = np.log(values).groupby(level=0).mean()
    x, y = np.log(means.index.to_numpy()), means.to_numpy()
    law: Power = Power.through(x, y, 1, last=float((y[-1] - y[-2]) / (x[-1] - x[-2])))
    return law


def polynomial(values: pd.Series, degree: int) -> Polynomial | str:
    """Fits a polynomial by least squares on the means; see `power` for values and result."""
    if why := _refused(values, degree + 1):
        return f"No {'line' if degree == 1 else 'quadratic'}: {why}."
    means = values.groupby(level=0).mean()
    law: Polynomial = Polynomial.through(means.index.to_numpy(), means.to_numpy(), degree)
    return law


FITS: dict[str, Callable[[pd.Series], Polynomial | str]] = {
    "power": power,
    "linear": lambda values: polynomial(values, 1),
    "quadratic": lambda values: polynomial(values, 2),
}


def _refused(values: pd.Series, constants: int) -> str:
    """Returns why so many constants cannot be fitted, in words; empty where they can."""
    if not pd.api.types.is_numeric_dtype(values.index):
        return "x is not a number at every point"
    if (found := values.index.nunique()) > constants:
        return ""
    return (
        f"x has {found} value{'' if found == 1 else 's'}; expected {constants + 1} or more, as "
        f"{constants} constants leave fewer nothing to be judged by"
    )
