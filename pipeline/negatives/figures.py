"""The figures of the report on negatives, each as HTML; small, to be read on a phone too."""

import html
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from heron.pipeline.negatives.estimates import Estimate
from heron.pipeline.negatives.links import PageLinks
from heron.pipeline.negatives.measure import EXPECTED
from heron.pipeline.training.page import DPI, embedded, plot, png

FEW = 30  # pairs that a point of a curve is of, at least
LARGEST = 40  # labels on a heat map


def draw(numbers: Mapping[str, Any], exclusive: bool, links: PageLinks) -> dict[str, str]:
    """Draws every figure of the numbers of `negatives.json`, by name."""
    close, question = numbers["thresholds"]["close"] > 0, numbers["question"]
    figures = {
        "rates": _rates(numbers["false_negatives"], ["close", "same"] if close else ["same"]),
        "similarity": _similarity(numbers["similarity"], question.layer, close),
        "confusion": _confusion(numbers["confusion"], numbers["labels"]["names"], exclusive, links),
    }
    if (weight := numbers["weight"]) is not None:
        alike, bins = "label similarity (1 − label distance)", len(weight["counts"])
        middles = (np.arange(bins) + 0.5) * (2 / bins) - 1
        for name, x, at, pairs in (
            ("by_label", alike, 1 - weight["distance"], weight["pairs"]),
            ("by_cosine", "cosine of the projections", middles, weight["counts"]),
        ):
            figures[f"g_{name}"] = _mean_g(x, at[pairs >= FEW], weight[name][pairs >= FEW])
    return figures


def _band(axes: Axes, x: Any, curve: Estimate, color: str, label: str) -> None:
    axes.plot(x, curve.value, "o-", markersize=4, color=color, label=label)
    axes.fill_between(x, curve.low, curve.high, color=color, alpha=0.25, linewidth=0)


def _rates(rates: Mapping[str, Any], kinds: list[str]) -> str:
    """Draws false negatives among the k nearest, by k, above those of random pairs."""
    figure, axes = plot("k nearest neighbours", "false negatives, %")
    for kind, color in zip(kinds, ("C0", "C1"), strict=False):
        near, chance = rates[kind]["near"], rates[kind]["random"]
        in_percent = Estimate(100 * near.value, 100 * near.low, 100 * near.high)
        _band(axes, rates["k"], in_percent, color, f"{kind} labels")
        axes.axhline(100 * float(chance.value), color=color, linestyle=":", linewidth=1.5)
    axes.set_xscale("log")
    axes.set_xticks(rates["k"], [str(k) for k in rates["k"]])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.legend()
    return embedded("False negatives among the nearest, by k; dotted: random pairs", png(figure))


def _similarity(similarity: Mapping[str, Any], layer: str, close: bool) -> str:
    """Draws densities of the cosine of positives, negatives and hard negatives."""
    figure, axes = plot(f"cosine in '{layer}'", "share of pairs, %")
    ends = []
    for name, label, color in (
        ("close", "close labels" if close else "same labels", "C2"),
        ("others", "other labels", "0.5"),
        ("hard", "hard negatives", "C3"),
    ):
        counts = similarity[name]["histogram"]
        if counts.any():
            edges, share = np.linspace(-1, 1, len(counts) + 1), 100 * counts / counts.sum()
            axes.stairs(share, edges, fill=True, alpha=0.25, color=color)
            axes.stairs(share, edges, color=color, label=label, linewidth=1.5)
            visible = np.flatnonzero(share > 0.05)
            ends += [edges[visible[0]], edges[visible[-1] + 1]]
    axes.set_xlim(min(ends), max(ends))
    axes.set_ylim(bottom=0)
    axes.legend()
    return embedded("Cosine similarity of pairs by their labels", png(figure))


def _confusion(
    confusion: Mapping[str, Any], names: list[str], exclusive: bool, links: PageLinks
) -> str:
    """Draws which labels take whose place: times as often as by chance, or of classes the share.

    A cell is a link to such samples.
    """
    counts, chance = confusion["swapped"], confusion["expected"]
    shown = np.arange(len(counts))
    if len(counts) > LARGEST:  # those with most in the wrong place
        wrong = counts - np.diag(np.diag(counts))
        shown = np.sort(np.argsort(-(wrong.sum(0) + wrong.sum(1)), kind="stable")[:LARGEST])
    of_shown, values = np.ix_(shown, shown), np.full((len(shown), len(shown)), np.nan)
    base: NDArray[np.float64] = chance[of_shown]
    enough, colors, most = base >= EXPECTED, "RdBu_r", 2
    x, y = "the neighbour has, the anchor has not", "the anchor has, the neighbour has not"
    unit = "times as often as random pairs (grey: too few)"
    if exclusive:
        base = np.broadcast_to(counts.sum(1)[shown][:, None] / 100, values.shape)
        enough, colors, most = base > 0, "viridis", 100
        x, y, unit = "the neighbour's class", "the anchor's class", "% of the anchor's neighbours"
    np.divide(counts[of_shown], base, out=values, where=enough)
    size, labels = 2.6 + 0.2 * len(shown), [names[i] for i in shown]
    figure = Figure(figsize=(size + 0.8, size))
    axes = figure.add_subplot()
    image = axes.imshow(values, cmap=colors, vmin=0, vmax=most)
    axes.set_facecolor("0.85")
    axes.set_xticks(range(len(labels)), labels, rotation=90, fontsize=8)
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    figure.colorbar(image, ax=axes, label=unit, location="top", shrink=0.7, pad=0.02)
    areas = "".join(
        f'<area shape="rect" coords="{",".join(map(str, corners))}" '
        f'href="{html.escape(links.confused(labels[row], labels[column]))}" '
        f'title="{html.escape(f"{labels[row]}, {labels[column]}")}" alt="">'
        for (row, column), corners in cell_corners(figure, axes, len(labels)).items()
        if enough[row, column]
    )
    drawn = embedded("Which labels are confused", png(figure))
    linked = drawn.replace("<img ", '<img usemap="#confused" ', 1)
    return f'{linked}<map name="confused">{areas}</map>'


def cell_corners(figure: Figure, axes: Axes, count: int) -> dict[tuple[int, int], list[int]]:
    """Returns left, top, right and bottom of the cells of a square heat map in its PNG, in pixels.

    `png` cuts the picture to what is drawn, and adds a margin.
    """
    figure.set_dpi(DPI)
    figure.canvas.draw()
    box = figure.get_tightbbox().padded(rcParams["savefig.pad_inches"])  # inches
    edges = np.arange(count + 1) - 0.5
    points = axes.transData.transform(np.stack([edges, edges], 1)) - np.array([box.x0, 0]) * DPI
    x, y = np.rint(points[:, 0]).astype(int), np.rint(box.y1 * DPI - points[:, 1]).astype(int)
    return {
        (row, column): [int(x[column]), int(y[row]), int(x[column + 1]), int(y[row + 1])]
        for row in range(count)
        for column in range(count)
    }


def _mean_g(x: str, at: NDArray[np.float64], curve: Estimate) -> str:
    """Draws the mean of HeroCon's g where a point is of enough pairs."""
    figure, axes = plot(x, "mean g")
    _band(axes, at, curve, "C0", "g")
    return embedded(f"Mean g by {x}; points of {FEW} pairs or more", png(figure))
