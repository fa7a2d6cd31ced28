"""The charts of a study, and laws fitted to its measured points.

Charts are curves with error bars, and heat maps; laws are powers and polynomials, with intervals of
their constants.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from heron.report.charts import Chart
from heron.studies.results import lower_is_better
from heron.studies.text import label, number, scale, short

LOG_RATIO = 6.0  # of largest to smallest, from which on an axis is logarithmic
MAX_TICKS = 8  # values of x that get a tick each
COLORS = (  # of curves, legible on light and dark backgrounds
    *("#2f80d6", "#e07b1a", "#2a9d5c", "#d6455d", "#8f62d0", "#9a7b4f", "#d667b4", "#7f8793"),
    *("#a8a02c", "#23a3b5"),
)
MAX_CURVES = len(COLORS)  # with distinct colours
DASHES = "dash", "dashdot", "dot"
HEIGHT = 380  # pixels
Lines = dict[str, Callable[[np.ndarray], np.ndarray]]  # y of x, by name
Values = NDArray[np.float64]
LEVEL = 0.95
DEGREES = {"power": 1, "linear": 1, "quadratic": 2}
NAMES = {"power": "power law", "linear": "line", "quadratic": "quadratic"}


def curves(means: pd.DataFrame, x: str, y: str, lines: Mapping[str, Lines]) -> Chart:
    """Returns points of y over x with bars of one standard deviation over repeats.

    `means` is from `results.points`. `lines` has further lines to draw, by the name of the curve;
    a line whose own name begins with `_` has no legend.
    """
    numeric, unit = pd.api.types.is_numeric_dtype(means["x"]), scale(y)
    traces = []
    for color, (name, curve) in zip(COLORS, means.groupby("curve", sort=False), strict=False):
        laws = lines.get(name, {}) if numeric else {}
        xs = list(curve["x"] if numeric else curve["x"].map(str))
        style = {"name": name or "measured", "color": color}
        traces.append(_line(xs, unit * curve["mean"], **style))
        traces[-1]["mode"] = "lines+markers" if numeric else "markers"
        # a point without repeats has NaN, and no bar
        spread = _plain(unit * curve["std"])
        traces[-1]["error_y"] = {"type": "data", "array": spread, "color": color}
        for (line, law), dash in zip(laws.items(), DASHES, strict=False):
            spaced = np.geomspace if min(xs) > 0 else np.linspace
            x_line = spaced(min(xs), max(xs), 60)
            line_style = {"name": f"{name}: {line}" if name else line, "color": color, "dash": dash}
            traces.append(_line(x_line, unit * law(x_line), **line_style))
            traces[-1]["showlegend"] = not line.startswith("_")
    axes = {"xaxis": {"title": {"text": label(x)}, "type": "category"}}
    if numeric:
        axes["xaxis"] |= _axis(means["x"], ticks=True)
    axes["yaxis"] = {"title": {"text": label(y)}}
    if lower_is_better(y):
        axes["yaxis"] |= _axis(unit * means["mean"])
    return Chart("", traces, axes | {"height": HEIGHT, "showlegend": len(traces) > 1})


def heat_map(y: str, means: pd.DataFrame, lowest_is_best: bool) -> Chart:
    """Returns a heat map of y from `results.grid`; the best is framed, missing cells are empty."""
    values = scale(y) * means
    across, down = ([f"{v:.15g}" for v in axis] for axis in (means.columns, means.index))
    cells = [[None if math.isnan(v) else float(v) for v in row] for row in values.to_numpy()]
    text = [["none" if v is None else number(v, 3) for v in row] for row in cells]
    heat: dict[str, Any] = {"type": "heatmap", "x": across, "y": down, "z": cells, "text": text}
    heat |= {"texttemplate": "%{text}", "colorscale": "Viridis", "hoverongaps": False}
    heat |= {"colorbar": {"title": {"text": label(y), "side": "right"}, "thickness": 12}}
    heat |= {"xgap": 1, "ygap": 1}
    best_index = (np.nanargmin if lowest_is_best else np.nanargmax)(values.to_numpy(float))
    row, column = map(int, np.unravel_index(best_index, values.shape))
    frame = {"type": "rect", "x0": column - 0.5, "x1": column + 0.5, "y0": row - 0.5}
    frame |= {"y1": row + 0.5, "line": {"color": "#e02020", "width": 3}}
    axes = {
        name: {"title": {"text": short(str(key))}, "type": "category"}
        for name, key in (("xaxis", means.columns.name), ("yaxis", means.index.name))
    }
    title = f"{label(y)}, mean over repeats"
    return Chart(title, [heat], axes | {"shapes": [frame], "height": HEIGHT, "showlegend": False})


def _line(x: Any, y: Any, *, name: str, color: str, dash: str = "solid") -> dict[str, Any]:
    trace = {"type": "scatter", "x": _plain(x), "y": _plain(y), "name": name, "mode": "lines"}
    return trace | {"line": {"color": color, "dash": dash}, "marker": {"size": 7, "color": color}}


def _plain(values: Any) -> list[Any]:
    """Returns numbers rounded to six digits, None where not finite; texts as they are."""
    if any(isinstance(value, str) for value in values):
        return [*values]
    return [float(f"{v:.6g}") if math.isfinite(v) else None for v in map(float, values)]


def _axis(values: pd.Series, ticks: bool = False) -> dict[str, Any]:
    """Returns an axis, logarithmic for a wide range; with `ticks` at each value where they are few.

    Ticks at decades only would leave most logarithmic axes with one or two.
    """
    finite = sorted({float(v) for v in values if math.isfinite(v)})
    is_wide = bool(finite) and 0 < LOG_RATIO * finite[0] <= finite[-1]
    axis: dict[str, Any] = {"type": "log", "dtick": "D2"} if is_wide else {"type": "linear"}
    if ticks and len(finite) <= MAX_TICKS:
        axis |= {"tickvals": finite, "ticktext": [number(value, 3) for value in finite]}
    return axis


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
    """Returns why constants cannot be fitted to a curve; empty if they can."""
    if not pd.api.types.is_numeric_dtype(curve.index):
        return "x is not a number at every point"
    if (count := curve.index.nunique()) <= constants:
        return f"x must have {constants + 1} values or more for {constants} constants, got {count}"
    if power and ((curve <= 0).any() or (curve.index <= 0).any()):
        return "x and y are not above 0 at every point"
    return ""
