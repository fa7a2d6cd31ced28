"""The figures of the report on negatives, each as HTML; small, to be read on a phone too."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from heron.pipeline.negatives.estimates import Estimate
from heron.pipeline.negatives.measure import Negatives
from heron.pipeline.negatives.repulsion import Weight
from heron.pipeline.training.page import embedded, plot, png

FEW = 30  # pairs that a point of a curve is of, at least
DRAWN = 40  # labels on a heat map
COARSE = 20  # bins of a histogram that are drawn as one


def _band(axes: Axes, x: Sequence[float], curve: Estimate, color: str, label: str) -> None:
    axes.plot(x, curve.value, "o-", markersize=4, color=color, label=label)
    axes.fill_between(x, curve.low, curve.high, color=color, alpha=0.25, linewidth=0)


def rates(found: Negatives) -> str:
    """False negatives among the k nearest, by k, above those of random pairs."""
    figure, axes = plot("k nearest neighbours", "false negatives, %")
    names = {"close": "close labels", "same": "same labels"}
    for number, name in enumerate(names if found.close else ["same"]):
        near, chance = found.rates[name]
        scaled = Estimate(100 * near.value, 100 * near.low, 100 * near.high)
        _band(axes, list(found.ks), scaled, f"C{number}", names[name])
        axes.axhline(100 * float(chance.value), color=f"C{number}", linestyle=":", linewidth=1.5)
    axes.set_xscale("log")
    axes.set_xticks(found.ks, [str(k) for k in found.ks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.legend()
    return embedded("False negatives among the nearest, by k; dotted: random pairs", png(figure))


def similarity(found: Negatives) -> str:
    """Densities of the cosine of positives, negatives and hard negatives."""
    figure, axes = plot(f"cosine in '{found.question.layer}'", "share of pairs, %")
    names = {
        "close": "close labels" if found.close else "same labels",
        "others": "other labels",
        "hard": "hard negatives",
    }
    low, high = 1.0, -1.0
    for number, (name, label) in enumerate(names.items()):
        counts = found.histograms[name].reshape(-1, COARSE).sum(1)
        if not counts.any():
            continue
        edges = np.linspace(-1, 1, len(counts) + 1)
        share, color = 100 * counts / counts.sum(), ("C2", "0.5", "C3")[number]
        axes.stairs(share, edges, fill=True, alpha=0.25, color=color)
        axes.stairs(share, edges, color=color, label=label, linewidth=1.5)
        seen = np.flatnonzero(share > 0.05)
        low, high = min(low, edges[seen[0]]), max(high, edges[seen[-1] + 1])
    axes.set_xlim(low, high)
    axes.set_ylim(bottom=0)
    axes.legend()
    return embedded("Cosine similarity of pairs by their labels", png(figure))


def confusion(found: Negatives, expected: int) -> str:
    """Which labels take whose place: times as often as by chance, or of classes the share."""
    counts, chance = found.confusion.swapped, found.confusion.expected
    shown = np.arange(len(counts))
    if len(counts) > DRAWN:  # those with most in the wrong place
        wrong = counts - np.diag(np.diag(counts))
        shown = np.sort(np.argsort(-(wrong.sum(0) + wrong.sum(1)), kind="stable")[:DRAWN])
    names = [found.pairs.samples.names[i] for i in shown]
    some = np.ix_(shown, shown)
    size = 2.6 + 0.2 * len(names)
    figure = Figure(figsize=(size + 0.8, size))
    axes = figure.add_subplot()
    values: NDArray[np.float64]
    if found.pairs.samples.exclusive:
        total = counts.sum(1)[shown][:, None]
        values = np.where(total > 0, 100 * counts[some] / np.maximum(total, 1), np.nan)
        drawn = axes.imshow(values, cmap="viridis", vmin=0, vmax=100)
        title = "% of the anchor's neighbours"
    else:
        enough = chance[some] >= expected
        values = np.where(enough, counts[some] / np.where(enough, chance[some], 1), np.nan)
        drawn = axes.imshow(values, cmap="RdBu_r", vmin=0, vmax=2)
        title = "times as often as random pairs (grey: too few)"
    axes.set_facecolor("0.85")
    axes.set_xticks(range(len(names)), names, rotation=90, fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_xlabel("the neighbour has, the anchor has not")
    axes.set_ylabel("the anchor has, the neighbour has not")
    if found.pairs.samples.exclusive:
        axes.set_xlabel("the neighbour's class")
        axes.set_ylabel("the anchor's class")
    figure.colorbar(drawn, ax=axes, label=title, location="top", shrink=0.7, pad=0.02)
    return embedded("Which labels are confused", png(figure))


def weight_by_label(weight: Weight) -> str:
    """Mean g by label similarity."""
    figure, axes = plot("label similarity (1 − label distance)", "mean g")
    seen = weight.pairs >= FEW
    curve = Estimate(*(v[seen] for v in (weight.by_label.value, weight.by_label.low,
                                         weight.by_label.high)))  # fmt: skip
    _band(axes, (1 - weight.distance[seen]).tolist(), curve, "C0", "g")
    return embedded(f"Mean g by label similarity; points of {FEW} pairs or more", png(figure))


def weight_by_cosine(weight: Weight) -> str:
    """Mean g by the cosine of the projections."""
    figure, axes = plot("cosine of the projections", "mean g")
    middle = (np.arange(len(weight.counts)) + 0.5) * (2 / len(weight.counts)) - 1
    seen = weight.counts >= FEW
    curve = Estimate(*(v[seen] for v in (weight.by_cosine.value, weight.by_cosine.low,
                                         weight.by_cosine.high)))  # fmt: skip
    _band(axes, middle[seen].tolist(), curve, "C1", "g")
    return embedded(f"Mean g by cosine; points of {FEW} pairs or more", png(figure))
