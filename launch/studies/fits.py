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
DEGREES = {"power": 1, "linear": 1, "quadratic": 2}
NAMES = {"power": "power law", "linear": "line", "quadratic": "quadratic"}


@dataclass(frozen=True)
class Law:
    """A law that was fitted by least squares.

    `coefficients` are of y = c_0 + c_1 x + ..., c_0 first; of a power log y = c_0 + c_1 log x.
    """

    name: str  # for a figure's legend
    says: str  # the law, its intervals, and how it was made, as a sentence
    at: Callable[[Values], Values]  # returns its values at some x
    coefficients: Values
    reach: Values  # half of each one's interval


def fit(kind: str, curve: pd.Series) -> Law | str:
    """Fits y = a x^b on logarithms, a line, or a quadratic; says in words why there is none.

    A value of x counts once, by the mean of its repeats (of a power the geometric one): those share
    what the law does not say, so counting each would make the interval too narrow.
    """
    degree, power = DEGREES[kind], kind == "power"
    if why := _why_not(curve, degree + 1, power):
        return f"No {NAMES[kind]}: {why}."
    means = (np.log(curve) if power else curve).groupby(level=0).mean()
    x, y = means.index.to_numpy(), means.to_numpy()
    if power:
        x = np.log(x)
    found, covariance = np.polyfit(x, y, degree, cov=True)
    freedom = len(x) - degree - 1
    spread = stats.t.ppf((1 + LEVEL) / 2, freedom) * np.sqrt(np.diag(covariance))
    r2 = float(1 - np.var(y - np.polyval(found, x)) / np.var(y)) if np.var(y) else 1.0
    how = (
        f"least squares on the {'logarithms of the geometric ' if power else ''}means at {len(x)} "
        f"values of x, Student's t with {freedom} degree{'' if freedom == 1 else 's'} of freedom, "
        f"R² {r2:.4f}"
    )
    coefficients, reach = found[::-1], spread[::-1]
    if power:
        a, b, last = float(np.exp(coefficients[0])), coefficients[1], np.diff(y) / np.diff(x)
        says = (
            f"{number(a, 3)} · x^{b:.3f}; {LEVEL:.0%} interval of the exponent {b - reach[1]:.3f} "
            f"to {b + reach[1]:.3f} ({how}); between the last two points the exponent is "
            f"{last[-1]:.3f}"
        )
        return Law(f"x^{b:.2f}", says, lambda x: a * x**b, coefficients, reach)
    terms = zip(coefficients, reach, ("", " x", " x²")[: degree + 1], strict=True)
    law = " + ".join(f"({number(c, 3)} ± {number(r, 2)}){unit}" for c, r, unit in terms)
    says = f"{law}; ± is half of a {LEVEL:.0%} interval ({how})"
    return Law(NAMES[kind], says, np.poly1d(found), coefficients, reach)


def _why_not(curve: pd.Series, constants: int, power: bool) -> str:
    """Returns why so many constants cannot be fitted, in words; empty where they can."""
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
