"""Fits against laws that are known, and against textbook formulas."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from heron.studies.figures import Law, fit


def points(x: list[float], *repeats: list[float]) -> pd.Series:
    """Values of y, indexed by x, a line for each repeat."""
    return pd.concat([pd.Series(values, x) for values in repeats]).sort_index()


X = [100.0, 250.0, 500.0, 1000.0, 2000.0]


def test_a_power_law_is_found() -> None:
    law = fit("power", points(X, [3 * x**1.7 for x in X]))
    assert isinstance(law, Law)
    assert law.coefficients == pytest.approx([math.log(3), 1.7])
    assert law.description.endswith("R² 1.0000); between the last two points the exponent is 1.700")
    assert law.predict(np.array([10.0]))[0] == pytest.approx(3 * 10**1.7)
    assert law.name == "x^1.70"


def test_the_interval_is_the_textbooks() -> None:
    """By hand: s² = RSS / (n - 2), se(b) = s / sqrt(Sxx), t of n - 2 degrees of freedom."""
    noise = [0.1, -0.2, 0.05, 0.15, -0.1]
    y = [x**1.5 * math.exp(e) for x, e in zip(X, noise, strict=True)]
    law = fit("power", points(X, y))
    assert isinstance(law, Law)
    u, v = np.log(X), np.log(y)
    sxx = ((u - u.mean()) ** 2).sum()
    b = ((u - u.mean()) * (v - v.mean())).sum() / sxx
    rest = ((v - v.mean() - b * (u - u.mean())) ** 2).sum()
    reach = stats.t.ppf(0.975, 3) * math.sqrt(rest / 3 / sxx)
    assert (law.coefficients[1], law.half_widths[1]) == pytest.approx((b, reach))
    assert f"95% interval of the exponent {b - reach:.3f} to {b + reach:.3f}" in law.description
    assert (
        "geometric means at 5 values of x, Student's t with 3 degrees of freedom" in law.description
    )


def test_repeats_make_no_interval_narrower() -> None:
    y = [x**1.5 * (1.3 if i % 2 else 1.0) for i, x in enumerate(X)]
    one, many = fit("power", points(X, y)), fit("power", points(X, *[y] * 9))
    assert isinstance(one, Law) and isinstance(many, Law)
    assert many.coefficients == pytest.approx(one.coefficients)
    assert many.half_widths == pytest.approx(one.half_widths)


def test_intervals_hold_what_they_say() -> None:
    """Of a thousand draws about 95 % hold the exponent: within four standard errors."""
    random = np.random.default_rng(0)
    hits = 0
    for _ in range(1000):
        law = fit("power", points(X, [2 * x**1.5 * math.exp(0.1 * random.normal()) for x in X]))
        assert isinstance(law, Law)
        hits += abs(law.coefficients[1] - 1.5) <= law.half_widths[1]
    assert abs(hits / 1000 - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 1000)


def test_polynomials_and_their_intervals() -> None:
    """The line is scipy's; the quadratic is found as it was made."""
    y = [5 + 0.2 * x + (-1) ** i for i, x in enumerate(X)]
    law, known = fit("linear", points(X, y)), stats.linregress(X, y)
    assert isinstance(law, Law) and law.name == "line" and "with 3 degrees" in law.description
    assert law.coefficients == pytest.approx([known.intercept, known.slope])
    t = stats.t.ppf(0.975, 3)
    assert law.half_widths == pytest.approx([t * known.intercept_stderr, t * known.stderr])
    assert law.description.endswith(f"R² {known.rvalue**2:.4f})")
    square = fit("quadratic", points(X, [1 + 2e-3 * x + 3e-6 * x * x for x in X]))
    assert isinstance(square, Law) and "with 2 degrees" in square.description
    assert square.coefficients == pytest.approx([1, 2e-3, 3e-6])
    assert (
        square.description.startswith("(1 ± ") and " x²; ± is half of a 95%" in square.description
    )


def test_what_is_refused_in_words() -> None:
    two = points(X[:2], [1.0, 2.0])
    assert fit("power", two) == (
        "No power law: x must have 3 values or more for 2 constants, got 2."
    )
    three = points(X[:3], [1.0, 2.0, 3.0])
    assert "No quadratic: x must have 4 values or more" in str(fit("quadratic", three))
    assert "No line: x must have 3 values or more" in str(fit("linear", two[:1]))
    named = pd.concat([pd.Series([1.0], ["sgd"]), three])
    assert fit("power", named) == "No power law: x is not a number at every point."
    below = points(X[:3], [1.0, -2.0, 3.0])
    assert fit("power", below) == "No power law: x and y are not above 0 at every point."
    assert isinstance(fit("linear", below), Law)
