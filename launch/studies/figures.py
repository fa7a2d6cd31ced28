"""The charts of a study: curves with error bars, a heat map, parts of a step."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from heron.launch.studies.results import lower_is_better
from heron.launch.studies.text import label, number, scale, short
from heron.pipeline.report.charts import Chart

WIDE = 6.0  # times the least: an axis of such numbers is logarithmic
FEW = 8  # numbers at x that have a tick each
COLORS = (  # of curves, legible on light and on dark ground
    *("#2f80d6", "#e07b1a", "#2a9d5c", "#d6455d", "#8f62d0", "#9a7b4f", "#d667b4", "#7f8793"),
    *("#a8a02c", "#23a3b5"),
)
MOST = len(COLORS)  # curves whose colours can be told apart
DASHES = "dash", "dashdot", "dot"
TALL = 380  # pixels
Lines = dict[str, Callable[[np.ndarray], np.ndarray]]  # y of x, by name


def curves(drawn: pd.DataFrame, x: str, y: str, lines: Mapping[str, Lines]) -> Chart:
    """Returns points of y over x with bars of one standard deviation over repeats.

    `drawn` is from `results.points`; `lines` are drawn beside the curve of their name, and one
    whose own name begins with `_` has no legend.
    """
    numeric, unit = pd.api.types.is_numeric_dtype(drawn["x"]), scale(y)
    traces = []
    for color, (name, curve) in zip(COLORS, drawn.groupby("curve", sort=False), strict=False):
        beside = lines.get(name, {}) if numeric else {}
        at = list(curve["x"] if numeric else curve["x"].map(str))
        of = {"name": name or "measured", "color": color}
        traces.append(_line(at, unit * curve["mean"], **of))
        traces[-1]["mode"] = "lines+markers" if numeric else "markers"
        # of a point without repeats the deviation is NaN, and no bar is drawn
        spread = _plain(unit * curve["std"])
        traces[-1]["error_y"] = {"type": "data", "array": spread, "color": color}
        for (line, law), dash in zip(beside.items(), DASHES, strict=False):
            space = np.geomspace if min(at) > 0 else np.linspace
            along = space(min(at), max(at), 60)
            named = {"name": f"{name}: {line}" if name else line, "color": color, "dash": dash}
            traces.append(_line(along, unit * law(along), **named))
            traces[-1]["showlegend"] = not line.startswith("_")
    axes = {"xaxis": {"title": {"text": label(x)}, "type": "category"}}
    if numeric:
        axes["xaxis"] |= _axis(drawn["x"], ticks=True)
    axes["yaxis"] = {"title": {"text": label(y)}}
    if lower_is_better(y):
        axes["yaxis"] |= _axis(unit * drawn["mean"])
    return _chart("", traces, axes)


def heat_map(y: str, means: pd.DataFrame, least: bool) -> Chart:
    """Returns the means of y from `results.grid`: the best is framed, a missing one is empty."""
    values = scale(y) * means
    across, down = ([f"{v:.15g}" for v in axis] for axis in (means.columns, means.index))
    cells = [[None if math.isnan(v) else float(v) for v in line] for line in values.to_numpy()]
    text = [["none" if v is None else number(v, 3) for v in line] for line in cells]
    heat: dict[str, Any] = {"type": "heatmap", "x": across, "y": down, "z": cells, "text": text}
    heat |= {"texttemplate": "%{text}", "colorscale": "Viridis", "hoverongaps": False}
    heat |= {"colorbar": {"title": {"text": label(y), "side": "right"}, "thickness": 12}}
    heat |= {"xgap": 1, "ygap": 1}
    flat = (np.nanargmin if least else np.nanargmax)(values.to_numpy(float))
    line, column = map(int, np.unravel_index(flat, values.shape))
    frame = {"type": "rect", "x0": column - 0.5, "x1": column + 0.5, "y0": line - 0.5}
    frame |= {"y1": line + 0.5, "line": {"color": "#e02020", "width": 3}}
    axes = {
        name: {"title": {"text": short(str(key))}, "type": "category"}
        for name, key in (("xaxis", means.columns.name), ("yaxis", means.index.name))
    }
    title = f"{label(y)}, mean over repeats"
    return Chart(title, [heat], axes | {"shapes": [frame], "height": TALL, "showlegend": False})


def extrapolated(parts: pd.DataFrame) -> Chart:
    """Returns the parts of a predicted step, indexed by the number of processes, and their sum."""
    traces = [_line(parts.index, parts.sum(axis=1), name="step", color="#7f8793")]
    traces[0]["line"]["width"] = 4
    for color, (name, seconds) in zip(COLORS, parts.items(), strict=False):
        if seconds.min() > 0:
            traces.append(_line(parts.index, seconds, name=str(name), color=color))
            traces[-1]["mode"] = "lines+markers"
    every = {"type": "log", "tickvals": [*parts.index], "ticktext": [f"{n:,}" for n in parts.index]}
    axes = {"xaxis": {"title": {"text": "processes"}, **every}}
    axes["yaxis"] = {"title": {"text": "time, s"}, "type": "log", "dtick": "D2"}
    return _chart("Parts of a step by processes: an extrapolation", traces, axes)


def _line(x: Any, y: Any, *, name: str, color: str, dash: str = "solid") -> dict[str, Any]:
    trace = {"type": "scatter", "x": _plain(x), "y": _plain(y), "name": name, "mode": "lines"}
    return trace | {"line": {"color": color, "dash": dash}, "marker": {"size": 7, "color": color}}


def _plain(values: Any) -> list[Any]:
    """Returns numbers to six digits, None in place of what is not finite, or texts."""
    if any(isinstance(value, str) for value in values):
        return [*values]
    return [float(f"{v:.6g}") if math.isfinite(v) else None for v in map(float, values)]


def _axis(values: pd.Series, ticks: bool = False) -> dict[str, Any]:
    """Returns an axis, logarithmic where numbers are far apart; with `ticks` at x where x are few.

    Decades alone would leave most such axes with one tick or two.
    """
    known = sorted({float(v) for v in values if math.isfinite(v)})
    far = bool(known) and 0 < WIDE * known[0] <= known[-1]
    axis: dict[str, Any] = {"type": "log", "dtick": "D2"} if far else {"type": "linear"}
    if ticks and len(known) <= FEW:
        axis |= {"tickvals": known, "ticktext": [number(value, 3) for value in known]}
    return axis


def _chart(title: str, traces: Sequence[dict[str, Any]], axes: dict[str, Any]) -> Chart:
    return Chart(title, [*traces], axes | {"height": TALL, "showlegend": len(traces) > 1})
