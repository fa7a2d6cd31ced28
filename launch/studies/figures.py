"""The figures of a study, each as HTML: curves with error bars, a heat map, parts of a step."""

import html
from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from heron.launch.studies.results import less_is_better
from heron.launch.studies.text import label, number, scale, short
from heron.pipeline.training.page import embedded, plot, png

WIDE = 6.0  # times the least: an axis of such numbers is logarithmic
MOST = 10  # curves whose colours can be told apart
Lines = dict[str, Callable[[np.ndarray], np.ndarray]]  # y of x, by name


def curves(drawn: pd.DataFrame, x: str, y: str, lines: Mapping[str, Lines]) -> str:
    """Draws points with bars of one standard deviation over repeats, a curve each name.

    Args:
        drawn: from `curves.points`.
        x: the column that they are over.
        y: the column that they show.
        lines: that are drawn beside a curve; one whose name begins with `_` has no legend.
    """
    figure, axes = plot(label(x), label(y))
    numeric, unit = pd.api.types.is_numeric_dtype(drawn["x"]), scale(y)
    for i, (name, curve) in enumerate(drawn.groupby("curve", sort=False)):
        at, color = curve["x"] if numeric else curve["x"].map(str), f"C{i}"
        beside = lines.get(name, {}) if numeric else {}
        shown = name or ("measured" if beside else None)
        # of a point without repeats the bar is NaN, and is not drawn
        axes.errorbar(at, unit * curve["mean"], yerr=unit * curve["std"], markersize=5, capsize=3,
                      fmt="o-" if numeric else "o", color=color, label=shown)  # fmt: skip
        for (line, law), style in zip(beside.items(), ("--", "-.", ":"), strict=False):
            space = np.geomspace if at.min() > 0 else np.linspace
            along = space(at.min(), at.max(), 60)
            axes.plot(along, unit * law(along), style, color=color, label=line)
    if numeric:
        means = unit * drawn["mean"].to_numpy()
        _log(axes, drawn["x"].to_numpy(), "x")
        if less_is_better(y):
            _log(axes, means, "y")
            axes.set_ylim(bottom=means.min() / 2 if axes.get_yscale() == "log" else None)
    else:
        axes.tick_params(axis="x", rotation=20)
    _legend(axes)
    return embedded(f"{y} against {x}", png(figure))


def heat_map(y: str, means: pd.DataFrame, least: bool) -> str:
    """Draws the means of y from `curves.grid`: the best is framed, a missing one grey."""
    values = scale(y) * means.iloc[::-1]  # the least at the bottom, as of an axis
    values = values.rename_axis(
        index=html.escape(short(means.index.name)), columns=html.escape(short(means.columns.name))
    )
    style = values.style.set_uuid(y.encode().hex()).set_properties(padding=".4rem .8rem")
    style = style.format(lambda value: number(value, 3), na_rep="none")
    style = style.format_index("{:g}").format_index("{:g}", axis=1)
    style = style.background_gradient("viridis", axis=None)
    style = style.highlight_null(props="background: #d9d9d9; color: #555")
    framed = style.highlight_min if least else style.highlight_max
    table = framed(axis=None, props="outline: 3px solid red").to_html()
    return f'<div style="overflow-x: auto">{table}</div>'


def extrapolated(parts: pd.DataFrame) -> str:
    """Draws the parts of a predicted step, indexed by the number of processes, and their sum."""
    figure, axes = plot("processes", "time, s")
    axes.plot(parts.index, parts.sum(axis=1), "k", linewidth=2, label="step")
    for name, seconds in parts.items():
        if seconds.min() > 0:
            axes.plot(parts.index, seconds, "o-", markersize=3, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(parts.index, [f"{n:,}" for n in parts.index], rotation=35, fontsize=8)
    axes.tick_params(axis="x", which="minor", bottom=False)
    _legend(axes)
    return embedded("Parts of a step by processes: an extrapolation", png(figure))


def _legend(axes: Axes) -> None:
    """Puts names beside the axes where there are many, so that they hide no point."""
    handles, _ = axes.get_legend_handles_labels()
    if len(handles) > 3:
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    elif handles:
        axes.legend(fontsize=8)


def _log(axes: Axes, values: np.ndarray, which: str) -> None:
    """Makes an axis logarithmic where numbers are far apart; has ticks at x where x are few."""
    far = 0 < WIDE * values.min() <= values.max()
    axis = axes.xaxis if which == "x" else axes.yaxis
    if far:
        axes.set(**{f"{which}scale": "log"})
    few = which == "x" and len(set(values)) <= (8 if far else 5)
    if few:
        axes.set_xticks(sorted(set(values)))
        axes.minorticks_off()
    if far or few:
        axis.set_major_formatter(lambda value, _: number(value, 3))
