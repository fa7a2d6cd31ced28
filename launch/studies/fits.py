"""Laws through measured points: powers and polynomials, with intervals for what they say."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from heron.launch.studies.text import number

Values = NDArray[np.float64]
LEVEL = 0.95


@dataclass(frozen=True)
class Law:
    """A law that was fitted by least squares.

    Attributes:
        name: for a figure's legend.
        says: the law, its intervals, and how it was made, as a sentence.
        at: returns its values at some x.
        coefficients: of y = c_0 + c_1 x + ..., c_0 first; of a power log y = c_0 + c_1 log x.
        reach: half of each one's interval.
        r2: share of the variance of y, or of log y, that is explained.
    """

    name: str
    says: str
    at: Callable[[Values], Values]
    coefficients: Values
    reach: Values
    r2: float


def power(values: pd.Series) -> Law | str:
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
    constants, reach, r2 = _least_squares(x, y, 1)
    a, b, last = float(np.exp(constants[0])), constants[1], (y[-1] - y[-2]) / (x[-1] - x[-2])
    says = (
        f"{number(a, 3)} · x^{b:.3f}; {LEVEL:.0%} interval of the exponent {b - reach[1]:.3f} to "
        f"{b + reach[1]:.3f} ({_how('logarithms of the geometric means', len(x), 2)}, R² {r2:.4f})"
        f"; between the last two points the exponent is {last:.3f}"
    )
    return Law(f"x^{b:.2f}", says, lambda x: a * x**b, constants, reach, r2)


def polynomial(values: pd.Series, degree: int) -> Law | str:
    """Fits a polynomial by least squares on the means; see `power` for values and result."""
    name = "line" if degree == 1 else "quadratic"
    if why := _refused(values, degree + 1):
        return f"No {name}: {why}."
    means = values.groupby(level=0).mean()
    constants, reach, r2 = _least_squares(means.index.to_numpy(), means.to_numpy(), degree)
    terms = zip(constants, reach, ("", " x", " x²")[: degree + 1], strict=True)
    says = (
        " + ".join(f"({number(c, 3)} ± {number(r, 2)}){unit}" for c, r, unit in terms)
        + f"; ± is half of a {LEVEL:.0%} interval ({_how('means', len(means), degree + 1)}, "
        f"R² {r2:.4f})"
    )
    return Law(
        name,
        says,
        lambda x: np.asarray(np.polyval(constants[::-1], x), float),
        constants,
        reach,
        r2,
    )


FITS: dict[str, Callable[[pd.Series], Law | str]] = {
    "power": power,
    "linear": lambda values: polynomial(values, 1),
    "quadratic": lambda values: polynomial(values, 2),
}


def _least_squares(x: Values, y: Values, degree: int) -> tuple[Values, Values, float]:
    """Returns c_0, c_1, ..., half of the interval of each by Student's t, and R²."""
    constants, covariance = np.polyfit(x, y, degree, cov=True)
    quantile = stats.t.ppf((1 + LEVEL) / 2, len(x) - degree - 1)
    rest = np.var(y - np.polyval(constants, x))
    r2 = float(1 - rest / np.var(y)) if np.var(y) else 1.0
    return constants[::-1], quantile * np.sqrt(np.diag(covariance))[::-1], r2


def _refused(values: pd.Series, constants: int) -> str:
    """Returns why so many constants cannot be fitted, in words; empty where they can."""
    if not pd.api.types.is_numeric_dtype(values.index):
        return "x is not a number at every point"
    if (count := values.index.nunique()) > constants:
        return ""
    return (
        f"x has {count} value{'' if count == 1 else 's'}; expected {constants + 1} or more, as "
        f"{constants} constants leave fewer nothing to be judged by"
    )


def _how(what: str, points: int, constants: int) -> str:
    freedom = points - constants
    degrees = f"{freedom} degree{'' if freedom == 1 else 's'} of freedom"
    return f"least squares on the {what} at {points} values of x, Student's t with {degrees}"
