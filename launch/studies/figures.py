"""The figures of a study, each as HTML: curves with error bars, a heat map, efficiency."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from launch.studies.fits import Law
from launch.studies.points import Curve, Point, Values, number, short
from launch.studies.rows import NEGATIVES, less_is_better
from pipeline.page import embedded, plot, png

WIDE = 6.0  # times the least: an axis of such numbers is logarithmic
MOST = 10  # curves whose colours can be told apart
UNITS = {
    NEGATIVES: "size of the negative set |N_i|",
    "step_s": "time of a step, s",
    "data_wait_s": "waiting for data, s a step",
    "samples_per_s": "samples / s",
    "peak_memory_bytes": "peak memory of a process, MB",
    "seconds": "time of the run, s",
    "train_seconds": "time of training, s",
    "f1_weighted": "F1, weighted",
    "auc_macro": "AUC, macro",
    "workers": "workers",
}


def label(name: str) -> str:
    """A column with its unit, for an axis."""
    return UNITS.get(name, short(name))


def curves(
    title: str,
    drawn: Sequence[Curve],
    laws: Sequence[Sequence[Law]] = (),
    square: bool = False,
) -> str:
    """Curves of one column over another, with bars of one standard deviation over repeats.

    Args:
        title: of the figure.
        drawn: the curves.
        laws: that were fitted to each, drawn as lines; of several curves the first of each.
        square: draw the slope of a square through the last point of the first curve.
    """
    figure, axes = plot(label(drawn[0].x), label(drawn[0].y))
    every = [point for curve in drawn for point in curve.points]
    numeric = all(curve.numeric for curve in drawn)
    places = {str(point.x): i for i, point in enumerate(every)} if not numeric else {}
    order = {name: i for i, name in enumerate(places)}
    scale = _scale(drawn[0].y)
    for i, curve in enumerate(drawn):
        color = f"C{i % MOST}"
        x = [float(p.x) if numeric else order[str(p.x)] for p in curve.points]
        fitted = list(laws[i])[: 1 if len(drawn) > 1 else None] if laws else []
        style = "o-" if numeric and not fitted else "o"
        name = curve.name or ("measured" if fitted else "")
        axes.errorbar(
            x,
            [scale * p.mean for p in curve.points],
            yerr=_bars(curve.points, scale),
            fmt=style,
            markersize=5,
            capsize=3,
            color=color,
            label=name or None,
        )
        for law, line in zip(fitted, ("-", "--", ":"), strict=False):
            along = np.geomspace(x[0], x[-1], 60) if x[0] > 0 else np.linspace(x[0], x[-1], 60)
            axes.plot(along, scale * law.at(along), line, color=color, linewidth=1.3,
                      label=law.name)  # fmt: skip
    if numeric:
        _log(axes, [float(p.x) for p in every], "x")
        if any(laws) and less_is_better(drawn[0].y):
            _log(axes, [scale * p.mean for p in every], "y")
    else:
        axes.set_xticks(list(order.values()), list(order), rotation=20, ha="right")
    if square and numeric:
        last = drawn[0].points[-1]
        at = np.linspace(float(drawn[0].points[0].x), float(last.x), 200)
        squares = scale * last.mean * (at / float(last.x)) ** 2
        kept = squares > scale * min(p.mean for p in every) / 2
        axes.plot(at[kept], squares[kept], "--", color="0.45", label="x² (HeroCon, Figure 4b)")
    if any(curve.name for curve in drawn) or any(laws) or square:
        _legend(axes)
    return embedded(title, png(figure))


def heat_map(
    y: str,
    across: str,
    down: str,
    columns: Sequence[Any],
    lines: Sequence[Any],
    means: Values,
    mode: str | None = None,
) -> str:
    """The mean of y over two keys that are varied: see `launch.studies.points.grid`.

    The best cell is framed, by `mode` or else `less_is_better`, a missing one grey.
    """
    size = 1.6 + 0.62 * len(columns), 1.5 + 0.45 * len(lines)
    figure = Figure(figsize=(max(4.2, size[0]), max(2.8, size[1])))
    axes = figure.add_subplot()
    scale = _scale(y)
    drawn = axes.imshow(scale * means, cmap="viridis", aspect="auto", origin="lower")
    axes.set_facecolor("0.85")
    axes.set_xticks(range(len(columns)), [f"{v:g}" for v in columns])
    axes.set_yticks(range(len(lines)), [f"{v:g}" for v in lines])
    axes.set_xlabel(short(across))
    axes.set_ylabel(short(down))
    middle = float(np.nanmean(means)) if np.isfinite(means).any() else 0.0
    for i, j in np.ndindex(means.shape):
        value = float(means[i, j])
        shade = "black" if value > middle else "white"
        text = number(scale * value, 3) if math.isfinite(value) else "none"
        axes.text(j, i, text, ha="center", va="center", fontsize=8,
                  color=shade if math.isfinite(value) else "0.35")  # fmt: skip
    if np.isfinite(means).any():
        least = less_is_better(y) if mode is None else mode == "min"
        pick = np.nanargmin(means) if least else np.nanargmax(means)
        i, j = divmod(int(pick), means.shape[1])
        corner = j - 0.5, i - 0.5
        axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor="red", linewidth=2))
    figure.colorbar(drawn, ax=axes, label=label(y))
    return embedded(f"{label(y)} over {short(across)} and {short(down)}", png(figure))


def speed_up(drawn: Sequence[Curve]) -> str:
    """Samples a second against workers, beside what it would be if none were lost."""
    figure, axes = plot("workers", label("samples_per_s"))
    for i, curve in enumerate(drawn):
        x = [float(point.x) for point in curve.points]
        y = [point.mean for point in curve.points]
        axes.errorbar(x, y, yerr=_bars(curve.points, 1.0), fmt="o-", markersize=5, capsize=3,
                      color=f"C{i % MOST}", label=curve.name or "measured")  # fmt: skip
        axes.plot(x, [y[0] * v / x[0] for v in x], ":", color=f"C{i % MOST}", linewidth=1.3)
    _log(axes, [float(p.x) for c in drawn for p in c.points], "x")
    axes.set_ylim(bottom=0)
    _legend(axes)
    return embedded("Samples a second by workers; dotted: nothing lost", png(figure))


def extrapolated(worlds: Sequence[int], parts: Mapping[str, Sequence[float]]) -> str:
    """The parts of a predicted step against the number of processes, and their sum."""
    figure, axes = plot("processes", "time, s")
    axes.plot(worlds, np.sum(list(parts.values()), 0), "k", linewidth=2, label="step")
    for i, (name, seconds) in enumerate(parts.items()):
        if min(seconds) > 0:
            axes.plot(worlds, seconds, "o-", markersize=3, color=f"C{i}", label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(worlds, [f"{world:,}" for world in worlds], rotation=35, fontsize=8)
    axes.tick_params(axis="x", which="minor", bottom=False)
    _legend(axes)
    return embedded("Parts of a step by processes: an extrapolation", png(figure))


def _legend(axes: Axes) -> None:
    """Beside the axes where it is long, so that it hides no point."""
    handles, _ = axes.get_legend_handles_labels()
    if len(handles) > 3:
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    else:
        axes.legend(fontsize=8)


def _bars(points: Sequence[Point], scale: float) -> list[float] | None:
    """Standard deviations; none where every point is one run."""
    spreads = [scale * p.spread if math.isfinite(p.spread) else 0.0 for p in points]
    return spreads if any(spreads) else None


def _log(axes: Axes, values: Sequence[float], which: str) -> None:
    """A logarithmic axis where numbers are far apart; ticks of x at its values if they are few."""
    far = min(values) > 0 and max(values) >= WIDE * min(values)
    axis = axes.xaxis if which == "x" else axes.yaxis
    if far:
        (axes.set_xscale if which == "x" else axes.set_yscale)("log")
        axis.set_major_formatter(lambda value, _: number(value, 3))
    if which == "x" and len(set(values)) <= (8 if far else 5):
        axes.set_xticks(sorted(set(values)))
        axis.set_major_formatter(lambda value, _: number(value, 3))
        axes.minorticks_off()


def _scale(name: str) -> float:
    """Memory is shown in MB."""
    return 1e-6 if name.endswith("_bytes") else 1.0
