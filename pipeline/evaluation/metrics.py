"""Scores of predictions against labels; exact, because every row is counted once."""

import numpy as np
from numpy.typing import NDArray

Scores = dict[str, float]


def multi_label_scores(
    probability: NDArray[np.float32], y: NDArray[np.float32], threshold: float
) -> Scores:
    """Returns scores of independent labels; one is predicted where it is above the threshold.

    Returns:
        `f1_weighted`, `f1_macro`, `f1_micro`, `accuracy` (whole label vectors), `auc_macro` and
        `map` (macro); the last two over the labels that have both values among the rows, of which
        `auc_labels` is the number.
    """
    predicted = (probability > threshold).astype(int)
    return _f1(y.astype(int), predicted) | _ranking(probability, y)


def multi_class_scores(probability: NDArray[np.float32], y: NDArray[np.float32]) -> Scores:
    """Returns scores of exclusive classes: the most probable one is predicted; see the above."""
    true, predicted = y.argmax(1), probability.argmax(1)
    return _f1(true, predicted) | _ranking(probability, y)


def label_auc(probability: NDArray[np.float32], y: NDArray[np.float32]) -> list[float]:
    """Returns the AUC of every label; NaN where all rows agree."""
    from sklearn.metrics import roc_auc_score  # here: it loads scipy, before a run's first step

    both = (y.min(0) == 0) & (y.max(0) == 1)
    return [
        float(roc_auc_score(y[:, a], probability[:, a])) if both[a] else float("nan")
        for a in range(y.shape[1])
    ]


def _f1(true: NDArray[np.int64], predicted: NDArray[np.int64]) -> Scores:
    from sklearn.metrics import accuracy_score, f1_score

    one = true.ndim == 2 and true.shape[1] == 1  # sklearn would average over 0 and 1
    scores = {
        f"f1_{a}": float(f1_score(true, predicted, average="binary" if one else a, zero_division=0))
        for a in ("weighted", "macro", "micro")
    }
    return scores | {"accuracy": float(accuracy_score(true, predicted))}


def _ranking(probability: NDArray[np.float32], y: NDArray[np.float32]) -> Scores:
    from sklearn.metrics import average_precision_score

    auc = np.array(label_auc(probability, y))
    usable = ~np.isnan(auc)
    if not usable.any():
        return {"auc_macro": float("nan"), "map": float("nan"), "auc_labels": 0.0}
    precision = average_precision_score(y[:, usable], probability[:, usable], average="macro")
    return {
        "auc_macro": float(auc[usable].mean()),
        "map": float(precision),
        "auc_labels": float(usable.sum()),
    }
