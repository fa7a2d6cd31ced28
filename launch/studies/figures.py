"""The figures of a study, each as HTML: curves with error bars, a heat map, efficiency."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from heron.launch.studies.curves import Curve
from heron.launch.studies.fits import Law
from heron.launch.studies.rows import less_is_better
from heron.launch.studies.text import label, number, scale, short
from heron.pipeline.training.page import embedded, plot, png

WIDE = 6.0  # times the least: an axis of such numbers is logarithmic
MOST = 10  # curves whose colours can be told apart


def curves(
    title: str,
    drawn: Sequence[Curve],
    laws: Sequence[Sequence[Law]] = (),
    square: bool = False,
) -> str:
    """Draws curves of one column over another, with bars of one standard deviation over repeats.

    Args:
        title: of the figure.
        drawn: the curves.
        laws: that were fitted to each, drawn as lines; of several curves the first of each.
        square: draw the slope of a square through the last point of the first curve.
    """
    figure, axes = plot(label(drawn[0].x), label(drawn[0].y))
    numeric, unit = all(curve.numeric for curve in drawn), scale(drawn[0].y)
    for i, curve in enumerate(drawn):
        fitted = list(laws[i])[: 1 if len(drawn) > 1 else None] if laws else []
        style = "o-" if numeric and not fitted else "o"
        x = curve.points.index if numeric else curve.points.index.map(str)
        _points(axes, i, curve, x, style, curve.name or ("measured" if fitted else None))
        for law, line in zip(fitted, ("-", "--", ":"), strict=False):
            along = np.geomspace(x[0], x[-1], 60) if x[0] > 0 else np.linspace(x[0], x[-1], 60)
            axes.plot(along, unit * law.at(along), line, color=f"C{i}", label=law.name)
    means = unit * pd.concat([curve.points["mean"] for curve in drawn])
    if numeric:
        _log(axes, means.index.to_numpy(), "x")
        if any(laws) and less_is_better(drawn[0].y):
            _log(axes, means.to_numpy(), "y")
    else:
        axes.tick_params(axis="x", rotation=20)
    if square and numeric:
        first = unit * drawn[0].points["mean"]
        at = np.linspace(first.index[0], first.index[-1], 200)
        squares = first.iloc[-1] * (at / at[-1]) ** 2
        kept = squares > means.min() / 2
        axes.plot(at[kept], squares[kept], "--", color="0.45", label="x² (HeroCon, Figure 4b)")
    _legend(axes)
    return embedded(title, png(figure))


def heat_map(y: str, means: pd.DataFrame, least: bool) -> str:
    """Draws the mean of y over two keys that are varied: see `heron.launch.studies.curves.grid`.

    Args:
        y: the column.
        means: of it; the best is framed, a missing one grey.
        least: whether the best is the least.
    """
    down, across = map(short, (means.index.name, means.columns.name))
    values = scale(y) * means.to_numpy()
    height, width = values.shape
    figure = Figure(figsize=(max(4.2, 1.6 + 0.62 * width), max(2.8, 1.5 + 0.45 * height)))
    axes = figure.add_subplot(facecolor="0.85", xlabel=across, ylabel=down)
    drawn = axes.imshow(values, cmap="viridis", aspect="auto", origin="lower")
    axes.set_xticks(range(width), [f"{v:g}" for v in means.columns])
    axes.set_yticks(range(height), [f"{v:g}" for v in means.index])
    known = np.isfinite(values)
    for (i, j), value in np.ndenumerate(values):
        bright = "black" if value > values[known].mean() else "white"
        text, color = (number(value, 3), bright) if known[i, j] else ("none", "0.35")
        axes.text(j, i, text, ha="center", va="center", fontsize=8, color=color)
    if known.any():
        pick = np.nanargmin(values) if least else np.nanargmax(values)
        i, j = divmod(int(pick), width)
        corner = j - 0.5, i - 0.5
        axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor="red", linewidth=2))
    figure.colorbar(drawn, ax=axes, label=label(y))
    return embedded(f"{label(y)} over {across} and {down}", png(figure))


def speed_up(drawn: Sequence[Curve]) -> str:
    """Draws samples a second against workers, beside what it would be if none were lost."""
    figure, axes = plot("workers", label("samples_per_s"))
    for i, curve in enumerate(drawn):
        x, y = curve.points.index, curve.points["mean"]
        _points(axes, i, curve, x, "o-", curve.name or "measured")
        axes.plot(x, y.iloc[0] * x / x[0], ":", color=f"C{i % MOST}")
    _log(axes, np.concatenate([curve.points.index for curve in drawn]), "x")
    axes.set_ylim(bottom=0)
    _legend(axes)
    return embedded("Samples a second by workers; dotted: nothing lost", png(figure))


def extrapolated(worlds: pd.Series, parts: pd.DataFrame) -> str:
    """Draws the parts of a predicted step against the number of processes, and their sum."""
    figure, axes = plot("processes", "time, s")
    axes.plot(worlds, parts.sum(axis=1), "k", linewidth=2, label="step")
    for i, (name, seconds) in enumerate(parts.items()):
        if seconds.min() > 0:
            axes.plot(worlds, seconds, "o-", markersize=3, color=f"C{i}", label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(worlds, [f"{world:,}" for world in worlds], rotation=35, fontsize=8)
    axes.tick_params(axis="x", which="minor", bottom=False)
    _legend(axes)
    return embedded("Parts of a step by processes: an extrapolation", png(figure))


def _points(axes: Axes, i: int, curve: Curve, x: pd.Index, style: str, name: str | None) -> None:
    """Draws a curve's means; where a point has no repeats, its bar is NaN and is not drawn."""
    unit, points = scale(curve.y), curve.points
    axes.errorbar(x, unit * points["mean"], yerr=unit * points["std"], fmt=style, markersize=5,
                  capsize=3, color=f"C{i % MOST}", label=name)  # fmt: skip


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
        axis.set_major_formatter(lambda value, _: number(value, 3))
    if which == "x" and len(set(values)) <= (8 if far else 5):
        axes.set_xticks(sorted(set(values)))
        axis.set_major_formatter(lambda value, _: number(value, 3))
        axes.minorticks_off()
