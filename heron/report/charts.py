"""The charts of a run's report, each as Plotly's traces and layout."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_POINTS = 500  # of a curve; in longer ones each point is the mean of several steps
MAX_CLASSES = 60  # of a confusion matrix
MAP_LABELS = 12  # labels that the map can be coloured by
MONITORING = "monitoring: test rows"  # what the curves of a run without validation rows show
FLAT = 1e-12  # features that differ by less count as equal
HOVER_LABELS = 8  # labels of a row that the map names

# Charts of metrics.jsonl: their titles, and the keys that share a chart.
STEP_CURVES = {
    "Gradient norm": ("gradient_norm",),
    "Learning rate": ("lr",),
    "Samples per second": ("samples_per_s",),
    "Wait for data, s": ("data_wait_s",),
    "Alignment and uniformity": ("alignment", "uniformity"),
    "Effective rank": ("effective_rank",),
    "Model FLOPs utilisation": ("mfu",),
}
EVALUATED = {
    "f1_weighted": "F1, weighted",
    "accuracy": "accuracy",
    "auc_macro": "AUC, macro",
    "knn_accuracy": "kNN accuracy",
    "knn_f1_weighted": "kNN F1, weighted",
    "rankme": "RankMe",
}


@dataclass(frozen=True)
class Chart:
    """A Plotly chart with a title."""

    title: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any] = field(default_factory=dict)  # merged into the layout of all charts
    links: Sequence[Sequence[str]] = ()  # opened by a click on a heat map's cell; "" opens none
    least_width: int = 0  # in pixels: a narrower page scrolls; the chart has at most twice this

    @property
    def plot(self) -> dict[str, Any]:
        """Returns what the page's script hands to Plotly."""
        return {"traces": self.traces, "layout": self.layout, "links": self.links}


def curves(rows: Sequence[Mapping[str, Any]]) -> tuple[list[Chart], int]:
    """Returns a chart of each metric over the steps, and how many steps a point averages.

    `rows` are the lines of metrics.jsonl.
    """
    steps = [row for row in rows if "loss" in row]
    stride = -(-len(steps) // MAX_POINTS) or 1
    losses = list(dict.fromkeys(k for row in steps for k in row if k.startswith("loss/")))
    charts = [Chart("Objective", _lines(steps, {"loss": "objective"}, stride))]
    charts += [Chart(f"Loss of {k[5:]}", _lines(steps, {k: k[5:]}, stride)) for k in losses]
    validated = any(key.startswith("validation/") for row in rows for key in row)
    role = "validation" if validated else "test"  # then scored once, at the end: no curve
    named = "validation rows" if validated else MONITORING
    for key, title in EVALUATED.items():
        if traces := _lines(rows, {f"{role}/{key}": title}, 1, "lines+markers"):
            charts.append(Chart(f"{title} ({named})", traces))
    for title, keys in STEP_CURVES.items():
        if traces := _lines(steps, {key: key.replace("_", " ") for key in keys}, stride):
            charts.append(Chart(title, traces))
    return [chart for chart in charts if chart.traces], stride


def _lines(
    rows: Sequence[Mapping[str, Any]], names: Mapping[str, str], stride: int, mode: str = "lines"
) -> list[dict[str, Any]]:
    """Returns a line for each key that any row has; a point is the mean of `stride` values."""
    traces = []
    for key, name in names.items():
        points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
        if points:
            x, y = (_means(np.array(column, float), stride) for column in zip(*points, strict=True))
            shown_mode = "lines+markers" if len(x) < 30 else mode
            traces.append({"type": "scatter", "x": x, "y": y, "name": name, "mode": shown_mode})
    return traces


def _means(values: NDArray[np.float64], stride: int) -> list[float]:
    return [float(f"{values[i : i + stride].mean():.9g}") for i in range(0, len(values), stride)]


def comparison(title: str, methods: Mapping[str, Sequence[float]]) -> Chart:
    """Returns a chart of a score by method: a dot per seed, their mean and standard deviation."""
    traces: list[dict[str, Any]] = []
    for i, (name, values) in enumerate(methods.items()):
        color = "#888" if i else "#2f80d6"  # the run itself comes first
        spread = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
        markers: dict[str, Any] = {"type": "scatter", "mode": "markers"}
        diamond = {"size": 13, "symbol": "diamond", "color": color}
        mean = {"x": [float(np.mean(values))], "y": [name], "name": f"{name}, mean"}
        bar = {"error_x": {"type": "data", "array": [spread], "thickness": 2}} if spread else {}
        traces.append(markers | mean | {"marker": diamond} | bar)
        if len(values) > 1:
            circle = {"size": 8, "color": color, "symbol": "circle-open"}
            dots = {"x": list(values), "y": [name] * len(values), "name": f"{name}, by seed"}
            traces.append(markers | dots | {"marker": circle})
    layout = {"yaxis": {"autorange": "reversed", "automargin": True}, "showlegend": False}
    return Chart(title, traces, layout)


def heat_map(
    title: str,
    names: Sequence[str],  # of the rows, and of the columns
    z: NDArray[np.float64],  # the values that are coloured, [rows, columns]; NaN leaves a cell grey
    counts: NDArray[np.int64],  # `customdata` of the hover text, [rows, columns]
    axes: tuple[str, str],  # the titles of the x and the y axis
    links: Sequence[Sequence[str]],  # the cells' links; "" opens none
    **options: Any,  # of Plotly's trace
) -> Chart:
    """Returns a square heat map."""
    x, y = ({"title": {"text": text}, "type": "category", "dtick": 1} for text in axes)
    cells = {"x": list(names), "y": list(names), "z": z.round(4).tolist()}
    heat = {"type": "heatmap", "customdata": counts.tolist(), "xgap": 1, "ygap": 1}
    layout = {"xaxis": x | {"showgrid": False, "tickangle": -90}, "height": 280 + 18 * len(names)}
    layout["yaxis"] = y | {"showgrid": False, "autorange": "reversed"}
    layout["plot_bgcolor"] = "rgba(128,128,128,.3)"
    return Chart(title, [heat | cells | options], layout, links, 240 + 16 * len(names))


def confusion(
    counts: NDArray[np.int64],  # rows by true and predicted class, [classes, classes]
    names: Sequence[str],  # of the classes
    links: Sequence[Sequence[str]],  # the cells' links; "" opens none
) -> Chart:
    """Returns the confusion matrix of exclusive classes, coloured by share of the true class."""
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    text = "%{y}, predicted as %{x}: %{customdata} rows, %{z:.1%}<extra></extra>"
    options = {"hovertemplate": text, "colorscale": "Viridis", "zmin": 0, "zmax": 1}
    return heat_map("Confusion", names, share, counts, ("predicted", "true"), links, **options)


@lru_cache(maxsize=1)  # a run writes its report again with each baseline: the map stays
def _plane(features: bytes, width: int) -> NDArray[np.float64]:
    """Returns the t-SNE of float32 rows of `width` features, [rows, 2]."""
    from sklearn.manifold import TSNE  # imported late: it takes half as long to load as torch

    hidden = np.frombuffer(features, np.float32).reshape(-1, width)
    tsne = TSNE(perplexity=min(30.0, (len(hidden) - 1) / 3), init="pca", random_state=0)
    centred = hidden - hidden.mean(0)
    centred = np.pad(centred, ((0, 0), (0, max(0, 2 - width))))  # PCA needs two columns
    # Equal features would make PCA divide by 0, and t-SNE of NaN crashes the process.
    flat = np.ptp(hidden, axis=0).max() <= FLAT
    points: NDArray[np.float64] = (
        np.zeros((len(hidden), 2)) if flat else tsne.fit_transform(centred)
    )
    return points.round(2)


def label_map(
    hidden: NDArray[np.float32],  # features of the rows, [rows, width]
    keys: Sequence[str],  # of the rows
    y: NDArray[np.float32],  # their labels as 0/1, NaN where unknown, [rows, labels]
    names: Sequence[str],  # of the labels
    order: Sequence[int],  # numbers of the labels, those that the model learnt best first
) -> dict[str, Any]:
    """Returns the rows as points in the plane; the page draws them by the selected label.

    The points are t-SNE (van der Maaten and Hinton 2008) of the features, initialised by PCA; if
    all rows have the same features, they share one point. The map offers only labels that rows
    have.
    """
    points = _plane(hidden.astype(np.float32).tobytes(), hidden.shape[1])
    row_labels = [np.flatnonzero(row == 1) for row in y]
    hover = [
        f"{key}: " + ", ".join(names[a] for a in labels[:HOVER_LABELS])
        for key, labels in zip(keys, row_labels, strict=True)
    ]
    data: dict[str, Any] = {"x": points[:, 0].tolist(), "y": points[:, 1].tolist(), "hover": hover}
    if all(len(labels) <= 1 for labels in row_labels):
        classes = [str(names[labels[0]]) if len(labels) else "none" for labels in row_labels]
        return data | {"classes": classes}
    offered = [a for a in order if (y[:, a] == 1).any()][:MAP_LABELS]
    columns = {names[a]: np.nan_to_num(y[:, a], nan=-1).astype(int).tolist() for a in offered}
    return data | {"labels": columns}
