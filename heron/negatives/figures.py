"""The charts of the report on negatives, which Plotly draws in the page."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heron.negatives.estimates import Estimate
from heron.negatives.measure import MIN_EXPECTED
from heron.report.charts import Chart, heat_map
from heron.report.links import PageLinks

MIN_PAIRS = 30  # pairs per point of a curve, at least
MAX_LABELS = 40  # labels on a heat map
BLUE_TO_RED = [[0, "#2166ac"], [0.5, "#f7f7f7"], [1, "#b2182b"]]
BLUE, ORANGE, GREEN, RED, GREY = "#2f80d6", "#d9730d", "#1f9d57", "#d6455d", "#888"


def draw(numbers: Mapping[str, Any], exclusive: bool, links: PageLinks) -> dict[str, Chart]:
    """Returns every chart of the numbers of `negatives.json`, by name."""
    close, question = numbers["thresholds"]["close"] > 0, numbers["question"]
    charts = {
        "rates": _rates(numbers["false_negatives"], ["close", "same"] if close else ["same"]),
        "similarity": _similarity(numbers["similarity"], question.layer, close),
        "confusion": _confusion(numbers["confusion"], numbers["labels"]["names"], exclusive, links),
    }
    if (weight := numbers["weight"]) is not None:
        similarity, bins = "label similarity (1 − label distance)", len(weight["counts"])
        middles = (np.arange(bins) + 0.5) * (2 / bins) - 1
        for name, x, positions, pairs in (
            ("by_label", similarity, 1 - weight["distance"], weight["pairs"]),
            ("by_cosine", "cosine of the projections", middles, weight["counts"]),
        ):
            curve = _curve(
                positions[pairs >= MIN_PAIRS], weight[name][pairs >= MIN_PAIRS], BLUE, "g"
            )
            title = f"Mean g by {x}; points of {MIN_PAIRS} pairs or more"
            charts[f"g_{name}"] = Chart(title, [curve], _axes(x, "mean g"))
    return charts


def _axes(x: str, y: str, **xaxis: Any) -> dict[str, Any]:
    return {"height": 320, "xaxis": {"title": {"text": x}} | xaxis, "yaxis": {"title": {"text": y}}}


def _line(x: Any, y: Any, name: str, color: str, **style: Any) -> dict[str, Any]:
    data = {"x": np.asarray(x).tolist(), "y": np.asarray(y).tolist(), "name": name}
    return {"type": "scatter", "mode": "lines", "line": {"color": color} | style} | data


def _curve(x: Any, estimate: Estimate, color: str, name: str) -> dict[str, Any]:
    bars: dict[str, Any] = {"type": "data", "symmetric": False, "thickness": 1.2, "width": 3}
    bars["array"] = (estimate.high - estimate.value).tolist()
    bars["arrayminus"] = (estimate.value - estimate.low).tolist()
    return _line(x, estimate.value, name, color) | {"mode": "lines+markers", "error_y": bars}


def _rates(rates: Mapping[str, Any], kinds: list[str]) -> Chart:
    """Draws the rate of false negatives among the k nearest, by k, and that of random pairs."""
    traces, ks = [], rates["k"]
    for kind, color in zip(kinds, (BLUE, ORANGE), strict=False):
        near, chance = rates[kind]["near"], 100 * float(rates[kind]["random"].value)
        percent = Estimate(100 * near.value, 100 * near.low, 100 * near.high)
        traces.append(_curve(ks, percent, color, f"{kind} labels"))
        name = f"{kind} labels, random pairs"
        traces.append(_line(ks, [chance] * len(ks), name, color, dash="dot"))
    ticks = {"type": "log", "tickvals": ks, "ticktext": [str(k) for k in ks]}
    layout = _axes("k nearest neighbours", "false negatives, %", **ticks)
    layout["yaxis"]["rangemode"] = "tozero"
    return Chart("False negatives among the nearest, by k; dotted: random pairs", traces, layout)


def _similarity(similarity: Mapping[str, Any], layer: str, close: bool) -> Chart:
    """Draws shares of pairs by their cosine: of positives, negatives and hard negatives."""
    traces, ends = [], []
    for name, label, color in (
        ("close", "close labels" if close else "same labels", GREEN),
        ("others", "other labels", GREY),
        ("hard", "hard negatives", RED),
    ):
        counts = similarity[name]["histogram"]
        if counts.any():
            edges, share = np.linspace(-1, 1, len(counts) + 1), 100 * counts / counts.sum()
            steps = _line(edges, [*share, share[-1]], label, color, shape="hv", width=1.5)
            traces.append(steps | {"fill": "tozeroy"})
            visible = np.flatnonzero(share > 0.05)
            ends += [float(edges[visible[0]]), float(edges[visible[-1] + 1])]
    layout = _axes(f"cosine in '{layer}'", "share of pairs, %", range=[min(ends), max(ends)])
    return Chart("Cosine similarity of pairs by their labels", traces, layout)


def _confusion(
    confusion: Mapping[str, Any], names: list[str], exclusive: bool, links: PageLinks
) -> Chart:
    """Draws how often labels replace others, relative to chance; for classes, the share."""
    counts, chance = confusion["swapped"], confusion["expected"]
    shown = np.arange(len(counts))
    if len(counts) > MAX_LABELS:  # those that are confused most
        wrong = counts - np.diag(np.diag(counts))
        shown = np.sort(np.argsort(-(wrong.sum(0) + wrong.sum(1)), kind="stable")[:MAX_LABELS])
    block, values = np.ix_(shown, shown), np.full((len(shown), len(shown)), np.nan)
    base: NDArray[np.float64] = chance[block]
    comparable, colors = base >= MIN_EXPECTED, {"colorscale": BLUE_TO_RED, "zmin": 0, "zmax": 2}
    x, y = "the neighbour has, the anchor has not", "the anchor has, the neighbour has not"
    unit = "times as often as random pairs (grey: too few)"
    if exclusive:
        base = np.broadcast_to(counts.sum(1)[shown][:, None] / 100, values.shape)
        comparable, colors = base > 0, {"colorscale": "Viridis", "zmin": 0, "zmax": 100}
        x, y, unit = "the neighbour's class", "the anchor's class", "% of the anchor's neighbours"
    np.divide(counts[block], base, out=values, where=comparable)
    labels = [names[i] for i in shown]
    addresses = [
        [links.confused(a, b) if comparable[row, column] else "" for column, b in enumerate(labels)]
        for row, a in enumerate(labels)
    ]
    hover = "%{y}, %{x}: %{customdata} pairs, %{z:.3g} " + unit.partition(" (")[0]
    return heat_map(
        f"Which labels are confused: {unit}",
        labels,
        values,
        counts[block],
        (x, y),
        addresses,
        hovertemplate=f"{hover}<extra></extra>",
        showscale=True,
        **colors,
    )
