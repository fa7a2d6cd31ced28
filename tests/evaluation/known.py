"""A data set and a network whose answers are known: weights by hand, probabilities by NumPy.

Every number is another one, so that rows, columns, views, splits or classes that change places are
seen. The arrays that were written say what must come out, in float64, by code that shares no line
with the library: rows standardised by those of `train` that have the view, a layer for each view,
the classifier; scores are scikit-learn's.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn import metrics

from heron.data.streams import Streams
from heron.data.views import Views
from heron.evaluation.evaluator import Evaluator
from heron.experiment.config import Config, parse_config
from heron.experiment.open_data import open_data
from heron.losses.classification import Bce, CrossEntropy
from heron.losses.unsupervised import WeightedUnsupervised
from heron.models.heterogeneous import Heterogeneous
from heron.shards.build import build
from heron.sources import make_source
from tests.experiments import merge

TRAIN, TEST = 43, 29  # rows; 29 are dealt 15, 14 to two processes and 10, 10, 9 to three
EXCLUSIVE = ("multi_class", "hierarchical", "complementary")
NAMES = ["delta", "alpha", "charlie", "bravo"]  # in no order that a sort would give
WIDTHS = 3, 2  # columns of the two views
WIDTH, PROJECTION = 3, 2  # of each view's hidden features and projections
BATCH_NORM_EPS = 1e-5


def _layer(draw: np.random.Generator, out: int, width: int) -> dict[str, NDArray[np.float64]]:
    """Weights of a layer of Heron's networks: linear, ReLU, batch norm with its running moments."""
    return {
        "weight": draw.normal(0, 1, (out, width)),
        "bias": draw.normal(0.5, 0.5, out),
        "mean": draw.normal(0.5, 0.2, out),
        "var": draw.uniform(0.3, 3, out),
        "scale": draw.uniform(0.5, 2, out),
        "shift": draw.normal(0, 0.3, out),
    }


DRAW = np.random.default_rng(11)
ENCODERS = [_layer(DRAW, WIDTH, width) for width in WIDTHS]
PROJECTORS = [_layer(DRAW, PROJECTION, WIDTH) for _ in WIDTHS]
CLASSIFIER, BIAS = DRAW.normal(0, 1, (4, 2 * WIDTH)), np.array([0.4, -0.9, 0.1, -0.5])


def through(x: NDArray[np.float64], layer: dict[str, NDArray[np.float64]]) -> NDArray[np.float64]:
    """What a layer makes of rows in evaluation: batch norm uses its running moments."""
    linear = np.maximum(x @ layer["weight"].T + layer["bias"], 0)
    unit = (linear - layer["mean"]) / np.sqrt(layer["var"] + BATCH_NORM_EPS)
    return np.asarray(unit * layer["scale"] + layer["shift"])


@dataclass
class Known:
    """What was written: views with NaN where a row lacks one, the truth, and the stored labels."""

    views: list[NDArray[np.float64]]
    y: NDArray[np.float64]  # the truth, 0/1; NaN: unknown; rows without a label are all NaN
    kind: str

    @property
    def test(self) -> NDArray[np.int64]:
        """The rows of the split `test` with a label."""
        rows = np.arange(TRAIN, TRAIN + TEST)
        return rows[~np.isnan(self.y[rows]).all(1)]

    def by_view(self, rows: Any) -> list[NDArray[np.float64]]:
        """Each view's features of rows; NaN where a row lacks the view."""
        scaled = [(x - np.nanmean(x[:TRAIN], 0)) / np.nanstd(x[:TRAIN], 0) for x in self.views]
        return [through(x[rows], layer) for x, layer in zip(scaled, ENCODERS, strict=True)]

    def hidden(self, rows: Any) -> NDArray[np.float64]:
        """S: the views side by side, 0 where one is missing, times views / views that are there."""
        share = 2 / self.present(rows).sum(1, keepdims=True)
        return np.asarray(np.nan_to_num(np.concatenate(self.by_view(rows), 1)) * share)

    def projections(self, rows: Any) -> list[NDArray[np.float64]]:
        return [through(h, z) for h, z in zip(self.by_view(rows), PROJECTORS, strict=True)]

    def present(self, rows: Any) -> NDArray[np.bool_]:
        return np.array([~np.isnan(x[rows]).any(1) for x in self.views]).T

    def probability(self, rows: Any) -> NDArray[np.float64]:
        logits = self.hidden(rows) @ CLASSIFIER.T + BIAS
        if self.kind not in EXCLUSIVE:
            return np.asarray(1 / (1 + np.exp(-logits)))
        return np.asarray(np.exp(logits) / np.exp(logits).sum(1, keepdims=True))

    def labelled(self, count: int = TRAIN) -> NDArray[np.int64]:
        """The rows of `train` with a label."""
        return np.flatnonzero(~np.isnan(self.y[:count]).all(1))


def write(folder: Path, kind: str, whole: bool) -> Known:
    """Builds the shards of a kind of labels; unless `whole`, some rows lack a view, label or all.

    Labels follow the known logits with noise, so that no score is 0, 1/2 or 1.
    """
    draw, rows = np.random.default_rng(5), TRAIN + TEST
    views = [draw.normal(3, 2, (rows, 3)) * [1, 9, 0.2], draw.normal(-1, 1, (rows, 2)) * [4, 1]]
    views = [x.astype(np.float32).astype(np.float64) for x in views]
    if not whole:
        views[0][[2, 9, 44, 57]], views[1][[5, 11, 47, 48, 66]] = np.nan, np.nan
    known = Known(views, np.zeros((rows, 4)), kind)
    noisy = known.hidden(np.arange(rows)) @ CLASSIFIER.T + BIAS + draw.normal(0, 2, (rows, 4))
    known.y = np.eye(4)[noisy.argmax(1)] if kind in EXCLUSIVE else (noisy > 0).astype(float)
    if not whole:
        known.y[[3, 8, 30, 46, 59, 70]] = np.nan
    if not whole and kind == "multi_label":
        known.y[[1, 20, 50, 63], [0, 3, 2, 1]] = np.nan
    arrays: dict[str, Any] = {"a": views[0].astype("f4"), "b": views[1].astype("f4")}
    arrays["split"] = np.array(["train"] * TRAIN + ["test"] * TEST)
    options: dict[str, Any] = {"label_names": NAMES} if kind != "none" else {}
    classes = known.y.argmax(1)
    unlabelled = np.asarray(np.isnan(known.y).all(1))
    if kind == "multi_class":
        arrays["labels"] = np.where(unlabelled, -1, classes)
    if kind == "hierarchical":  # delta and bravo are below 1
        path = np.stack([np.isin(classes, [0, 3]).astype(int), classes], 1)
        arrays["labels"] = np.where(unlabelled[:, None], -1, path)
    if kind in ("multi_label", "complementary"):
        stored = 1 - known.y if kind == "complementary" else known.y
        arrays["labels"] = np.where(np.isnan(stored), 255, stored).astype(np.uint8)
    lacking = {} if whole else {"missing": "allow"}
    lacking |= {} if whole or kind != "multi_label" else {"unknown": "allow"}
    np.savez(folder / "known.npz", **arrays)
    given = {"npz": folder / "known.npz", "label_kind": kind, **options, **lacking}
    build(make_source("arrays", given), folder / "known", progress=False)
    return known


def near(found: Any, expected: Any, atol: float) -> None:
    """Asserts that what was found, in any type, is what is expected."""
    np.testing.assert_allclose(np.asarray(found, float), expected, atol=atol)


def config(folder: Path, kind: str, **changes: Any) -> Config:
    loss = "cross_entropy" if kind in EXCLUSIVE else "bce"
    tree: dict[str, Any] = {
        "seed": 3,
        "run": {"dir": str(folder / "run")},
        "data": {
            "path": str(folder / "known"),
            "protocol": {"test": "test"},
            "batch": {"labelled": 8 if kind != "none" else 0, "unlabelled": 0},
            "views": [{"stored": "a"}, {"stored": "b"}],
            "standardise": True,
        },
        "model": {
            "encoder": {"kind": "mlp", "widths": [WIDTH], "dropout": 0},
            "projection_width": PROJECTION,
        },
        "objective": {loss: {}, "weighted_unsupervised": {}},
        "train": {"epochs": 1, "cpu_threads": 1, "precision": "fp32"},
        "evaluate": {"batch": 4, "map": "never"},
    }
    if kind == "none":
        tree["data"]["batch"], tree["objective"] = {"unlabelled": 8, "labelled": 0}, {"nt_xent": {}}
    return parse_config(merge(tree, changes))


def network(config: Config, shapes: Any, kind: str, classify: bool) -> Heterogeneous:
    """The network whose weights are those above; its classifier is left out where none is asked."""
    terms: dict[str, Any] = {"weighted_unsupervised": WeightedUnsupervised()}
    if classify:
        terms |= {"loss": CrossEntropy() if kind in EXCLUSIVE else Bce()}
    model = Heterogeneous(config.model, shapes, 4, terms)
    for encoder, values in zip(model.encoders, ENCODERS, strict=False):  # views may share the first
        _set(encoder.layers, values)
    for projector, values in zip(model.projectors, PROJECTORS, strict=True):
        _set(projector, values)
    if model.classifier is not None:
        model.classifier.weight.data = torch.tensor(
            CLASSIFIER[:, : model.classified_width], dtype=torch.float32
        )
        model.classifier.bias.data = torch.tensor(BIAS, dtype=torch.float32)
    return model


def _set(layers: Any, values: dict[str, NDArray[np.float64]]) -> None:
    """Gives a layer its values."""
    linear, _, norm = layers
    for tensor, name in (
        (linear.weight, "weight"), (linear.bias, "bias"), (norm.running_mean, "mean"),
        (norm.running_var, "var"), (norm.weight, "scale"), (norm.bias, "shift"),
    ):  # fmt: skip
        tensor.data = torch.tensor(values[name], dtype=torch.float32)


def opened(
    folder: Path, kind: str, classify: bool = True, **changes: Any
) -> tuple[Evaluator, Heterogeneous, Streams]:
    made = config(folder, kind, **changes)
    streams = open_data(made)
    views = Views(streams.reader, made.data, torch.device("cpu"))
    model = network(made, [list(shape) for shape in views.shapes], kind, classify)
    return Evaluator(streams.reader, views, made.evaluate), model, streams


def scores(
    probability: NDArray[np.float64], y: NDArray[np.float64], kind: str, threshold: float = 0.4
) -> dict[str, float]:
    """The scores of scikit-learn, label by label where some are unknown."""
    known = ~np.isnan(y)
    columns = [
        (y[has, a], probability[has, a])
        for a, has in enumerate(known.T)
        if len(np.unique(y[has, a])) == 2
    ]
    found = {
        "auc_macro": np.mean([metrics.roc_auc_score(*column) for column in columns]),
        "map": np.mean([metrics.average_precision_score(*column) for column in columns]),
        "auc_labels": len(columns),
    }
    if kind in EXCLUSIVE:
        true, predicted = y.argmax(1), probability.argmax(1)
        found["accuracy"] = metrics.accuracy_score(true, predicted)
        for average in ("weighted", "macro", "micro"):
            found[f"f1_{average}"] = metrics.f1_score(true, predicted, average=average)
        return {name: float(value) for name, value in found.items()}
    predicted = probability > threshold
    pairs = [(y[has, a], predicted[has, a]) for a, has in enumerate(known.T)]
    f1 = np.array([metrics.f1_score(*pair, zero_division=0) for pair in pairs])
    support = np.nansum(y, 0)
    found |= {"f1_macro": f1.mean(), "f1_weighted": f1 @ support / support.sum()}
    found["f1_micro"] = metrics.f1_score(y[known], predicted[known])
    found["subset_accuracy"] = np.mean(
        [
            all(p == t for p, t in zip(*row, strict=True) if t == t)
            for row in zip(predicted, y, strict=True)
        ]
    )
    return {name: float(value) for name, value in found.items()}
