"""Laws fitted to measured points: powers and polynomials, with intervals of their constants."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from heron.studies.text import number

Values = NDArray[np.float64]
LEVEL = 0.95
DEGREES = {"power": 1, "linear": 1, "quadratic": 2}
NAMES = {"power": "power law", "linear": "line", "quadratic": "quadratic"}


@dataclass(frozen=True)
class Law:
    """A law that was fitted by least squares.

    `coefficients` are of y = c_0 + c_1 x + ..., c_0 first; of a power log y = c_0 + c_1 log x.
    """

    name: str  # for a figure's legend
    description: str  # the law, its intervals, and how it was fitted
    predict: Callable[[Values], Values]  # returns y at some x
    coefficients: Values
    half_widths: Values  # of the intervals of the coefficients


def fit(kind: str, curve: pd.Series) -> Law | str:
    """Fits y = a x^b on logarithms, a line, or a quadratic; or returns why it cannot.

    Each value of x counts once, by the mean of its repeats (for a power the geometric mean):
    repeats share the law's error, so that counting each would make the interval too narrow.
    """
    degree, power = DEGREES[kind], kind == "power"
    if fault := _why_not_fitted(curve, degree + 1, power):
        return f"No {NAMES[kind]}: {fault}."
    means = (np.log(curve) if power else curve).groupby(level=0).mean()
    x, y = means.index.to_numpy(), means.to_numpy()
    if power:
        x = np.log(x)
    polynomial, covariance = np.polyfit(x, y, degree, cov=True)
    freedom = len(x) - degree - 1
    widths = stats.t.ppf((1 + LEVEL) / 2, freedom) * np.sqrt(np.diag(covariance))
    r2 = float(1 - np.var(y - np.polyval(polynomial, x)) / np.var(y)) if np.var(y) else 1.0
    method = (
        f"least squares on the {'logarithms of the geometric ' if power else ''}means at {len(x)} "
        f"values of x, Student's t with {freedom} degree{'' if freedom == 1 else 's'} of freedom, "
        f"R² {r2:.4f}"
    )
    coefficients, half_widths = polynomial[::-1], widths[::-1]
    if power:
        a, b, slopes = float(np.exp(coefficients[0])), coefficients[1], np.diff(y) / np.diff(x)
        description = (
            f"{number(a, 3)} · x^{b:.3f}; {LEVEL:.0%} interval of the exponent "
            f"{b - half_widths[1]:.3f} to {b + half_widths[1]:.3f} ({method}); between the last "
            f"two points the exponent is {slopes[-1]:.3f}"
        )
        return Law(f"x^{b:.2f}", description, lambda x: a * x**b, coefficients, half_widths)
    terms = zip(coefficients, half_widths, ("", " x", " x²")[: degree + 1], strict=True)
    law = " + ".join(f"({number(c, 3)} ± {number(r, 2)}){unit}" for c, r, unit in terms)
    description = f"{law}; ± is half of a {LEVEL:.0%} interval ({method})"
    return Law(NAMES[kind], description, np.poly1d(polynomial), coefficients, half_widths)


def _why_not_fitted(curve: pd.Series, constants: int, power: bool) -> str:
    """Returns why so many constants cannot be fitted to a curve; empty if they can."""
    if not pd.api.types.is_numeric_dtype(curve.index):
        return "x is not a number at every point"
    if (count := curve.index.nunique()) <= constants:
        return (
            f"x has {count} value{'' if count == 1 else 's'}; expected {constants + 1} or more, as "
            f"{constants} constants leave fewer nothing to be judged by"
        )
    if power and ((curve <= 0).any() or (curve.index <= 0).any()):
        return "x and y are not above 0 at every point"
    return ""
