"""What a run leaves to look at: result.json for machines, one HTML file with its figures."""

import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic_core import to_json

from heron.pipeline.data.reader import Reader
from heron.pipeline.evaluation.evaluator import Predictions
from heron.pipeline.evaluation.metrics import label_auc
from heron.pipeline.training.page import embedded, heading, page, png
from heron.pipeline.training.tracking import read_metrics
from heron.shards.atomic import atomic_write

if TYPE_CHECKING:  # the figures are drawn at a run's end, and their libraries are loaded there
    from matplotlib.figure import Figure

LONG = 120.0  # seconds of training, beside which the seconds of a map are little
_PANELS = 6  # labels shown on the map, where labels are not exclusive


def write_result(folder: Path, result: Mapping[str, Any]) -> None:
    """Writes result.json, all or nothing of it; a score that is not a number becomes null."""
    with atomic_write(folder / "result.json") as stream:
        stream.write(to_json(result, indent=1, inf_nan_mode="null") + b"\n")


def wants_map(setting: Literal["auto", "always", "never"], train_seconds: float) -> bool:
    """Returns whether the report is to have a map of test rows, which takes seconds to draw.

    `auto` asks for it where the run was long; its seconds count those before it was resumed.
    """
    return setting == "always" or (setting == "auto" and train_seconds >= LONG)


def write_report(
    folder: Path,
    result: Mapping[str, Any],
    predictions: Predictions,
    embedding: Predictions | None,
    reader: Reader,
) -> Path:
    """Writes report.html, which opens from disk, and its figures as PNG beside it.

    Args:
        folder: the run's folder; its metrics.jsonl and config.yaml are read.
        result: what result.json holds.
        predictions: of all test rows.
        embedding: hidden features of some of them; None draws no map.
        reader: names the labels.
    """
    names = reader.manifest.labels.names
    figures = {"loss": ("Loss", _loss_curves(read_metrics(folder / "metrics.jsonl")))}
    if predictions.probability is not None and len(predictions.y):
        auc = label_auc(predictions.probability, predictions.y)
        figures["auc"] = ("AUC of each label", _bars(names, auc))
    if embedding and embedding.hidden is not None and len(embedding.hidden) >= 5:
        exclusive = bool((embedding.y.sum(1) == 1).all())
        named = names if (embedding.y == 1).any() else []  # rows that have no label have no colour
        drawing = _map(embedding.hidden, embedding.y, named, exclusive)
        figures["map"] = (f"{len(embedding.hidden):,} test embeddings in two dimensions", drawing)
    sections = []
    for name, (title, figure) in figures.items():
        picture = png(figure)
        (folder / f"{name}.png").write_bytes(picture)
        sections.append(heading(title) + embedded(title, picture))
    rows = "".join(
        f"<tr><th>{html.escape(k)}</th><td>{html.escape(_shown(v))}</td></tr>"
        for k, v in result.items()
    )
    config = html.escape((folder / "config.yaml").read_text())
    body = f"<table>{rows}</table>{''.join(sections)}<h2>Configuration</h2><pre>{config}</pre>"
    path = folder / "report.html"
    path.write_text(page(folder.name, body))
    return path


def _shown(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _loss_curves(rows: Sequence[Mapping[str, Any]]) -> "Figure":
    """Draws the objective and each term, each on its own axes: their scales differ."""
    from matplotlib.figure import Figure

    steps = [row for row in rows if "loss" in row]
    names = [k for k in (steps[0] if steps else {}) if k == "loss" or k.startswith("loss/")]
    figure = Figure(figsize=(10, 2.6))
    for i, name in enumerate(names):
        axes = figure.add_subplot(1, len(names), i + 1)
        axes.plot([r["step"] for r in steps], [r[name] for r in steps], linewidth=1, color="C0")
        axes.set_title("objective" if name == "loss" else name.removeprefix("loss/"), fontsize=9)
        axes.set_xlabel("step", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
    figure.tight_layout()
    return figure


def _bars(names: Sequence[str], values: Sequence[float]) -> "Figure":
    """Draws a bar a label, the best on top."""
    from matplotlib.figure import Figure

    order = np.argsort(np.nan_to_num(np.array(values), nan=-1.0))
    figure = Figure(figsize=(8, 0.6 + 0.19 * len(names)))
    axes = figure.add_subplot()
    axes.barh([names[i] for i in order], [values[i] for i in order], color="C0")
    axes.axvline(0.5, color="0.4", linewidth=1, linestyle=":")
    axes.set_xlim(0, 1)
    axes.margins(y=0.01)
    axes.tick_params(labelsize=8)
    axes.set_xlabel("AUC (dotted: chance)", fontsize=8)
    return figure


def _map(
    hidden: NDArray[np.float32], y: NDArray[np.float32], names: Sequence[str], exclusive: bool
) -> "Figure":
    """Draws t-SNE of the hidden features, coloured by class, if any, or a panel a label."""
    import matplotlib
    from matplotlib.figure import Figure
    from sklearn.manifold import TSNE

    centred = hidden - hidden.mean(0)
    perplexity = min(30.0, (len(hidden) - 1) / 3)
    points = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(centred)
    if exclusive or not names:
        figure = Figure(figsize=(7, 6))
        axes = figure.add_subplot()
        for a, name in enumerate(names):
            chosen = y[:, a] == 1
            color = matplotlib.colormaps["turbo"](a / max(len(names) - 1, 1))
            axes.scatter(points[chosen, 0], points[chosen, 1], 8, color=color, label=name)
        if names:
            axes.legend(fontsize=7, markerscale=2, bbox_to_anchor=(1, 1), loc="upper left")
        else:
            axes.scatter(points[:, 0], points[:, 1], 8, color="C0")
        axes.set_axis_off()
        return figure
    balanced = np.argsort(np.abs(np.nan_to_num(np.nanmean(y, 0)) - 0.5))[:_PANELS]
    columns = min(3, len(balanced))
    figure = Figure(figsize=(3.3 * columns, 3.2 * math.ceil(len(balanced) / columns)))
    for i, a in enumerate(balanced):
        axes = figure.add_subplot(math.ceil(len(balanced) / columns), columns, i + 1)
        for value, shade in ((0, "0.8"), (1, "C3")):
            chosen = y[:, a] == value
            axes.scatter(points[chosen, 0], points[chosen, 1], 5, color=shade)
        axes.set_title(names[a], fontsize=9)
        axes.set_axis_off()
    return figure
