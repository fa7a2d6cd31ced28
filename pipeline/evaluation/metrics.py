"""Scores of predictions against labels; exact, because every row is counted once."""

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Scores = dict[str, float]
THRESHOLDS = 200  # that are tried, at most


def multi_label_scores(
    probability: NDArray[np.float32], y: NDArray[np.float32], threshold: float
) -> Scores:
    """Returns scores of independent labels; one is predicted where it is above the threshold.

    Labels that are unknown, NaN in y, count nowhere.

    Returns:
        `f1_weighted`, `f1_macro`, `f1_micro`, `accuracy` (whole label vectors, as far as they are
        known), `auc_macro` and `map` (macro); the last two over the labels that have both values
        among the rows, of which `auc_labels` is the number.
    """
    known, true, predicted = ~np.isnan(y), y == 1, probability > threshold
    f1, support = _f1_of_labels(true, predicted & known), true.sum(0)
    micro = _f1_of_labels(true.reshape(-1, 1), (predicted & known).reshape(-1, 1))
    scores = {
        "f1_weighted": (f1 * support).sum() / max(1, support.sum()),
        "f1_macro": f1.mean(),
        "f1_micro": micro.item(),
        "accuracy": ((true == predicted) | ~known).all(1).mean(),
    }
    return {name: float(value) for name, value in scores.items()} | _ranking(probability, y)


def _f1_of_labels(true: NDArray[np.bool_], predicted: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Returns the F1 of every label, [labels], of what is true and predicted, [rows, labels]."""
    right, total = (true & predicted).sum(0), true.sum(0) + predicted.sum(0)
    return np.asarray(2 * right / np.maximum(1, total))


def multi_class_scores(probability: NDArray[np.float32], y: NDArray[np.float32]) -> Scores:
    """Returns scores of exclusive classes: the most probable one is predicted; see the above.

    The macro F1 is the mean over the classes that some row has or is predicted.
    """
    classes = np.arange(y.shape[1])
    true, predicted = (x.argmax(1, keepdims=True) == classes for x in (y, probability))
    f1, support = _f1_of_labels(true, predicted), true.sum(0)
    micro = _f1_of_labels(true.reshape(-1, 1), predicted.reshape(-1, 1)).item()
    scores = {
        "f1_weighted": float((f1 * support).sum() / max(1, support.sum())),
        "f1_macro": float(f1[(true | predicted).any(0)].mean()),
        "f1_micro": micro,
        "accuracy": micro,  # the same where a row has one class: each error is missed and wrong
    }
    return scores | _ranking(probability, y)


def fitted_threshold(probability: NDArray[np.float32], y: NDArray[np.float32]) -> float:
    """Returns the threshold, one for all labels, with the best weighted F1 of some rows.

    Those between the probabilities that occur are tried, `THRESHOLDS` of them evenly by rank; of
    equals the nearest to 0.5 is taken, which is also that of rows without a label or all alike.

    Args:
        probability: of the labels, [rows, labels].
        y: the labels as 0/1, [rows, labels]; NaN, unknown, counts nowhere.
    """
    known, y = ~np.isnan(y), np.nan_to_num(y)
    values = np.unique(probability).astype(np.float64)
    tried = (values[1:] + values[:-1]) / 2
    tried = tried[np.linspace(0, len(tried) - 1, min(len(tried), THRESHOLDS)).round().astype(int)]
    true, best = y.sum(0), (-1.0, 0.0, 0.5)
    for threshold in tried.tolist():
        f1 = _f1_of_labels(y == 1, (probability > threshold) & known)
        best = max(best, (float((f1 * true).sum()), -abs(threshold - 0.5), threshold))
    return best[2] if true.any() else 0.5


def label_auc(probability: NDArray[np.float32], y: NDArray[np.float32]) -> list[float]:
    """Returns the AUC of every label over the rows where it is known; NaN where all agree.

    It is the share of pairs of a row that has the label and one that has not whose order is right;
    half of a pair with equal probabilities is.

    Raises:
        ValueError: a probability is NaN.
    """
    return [auc for auc, _ in _by_label(probability, y)]


def _by_label(
    probability: NDArray[np.float32], y: NDArray[np.float32]
) -> Iterator[tuple[float, float]]:
    """Yields AUC and average precision of every label; NaN where its known rows all agree.

    Average precision is the mean over the rows that have the label of the share that has it among
    the rows at least as probable.
    """
    if np.isnan(probability).any():
        rows = np.flatnonzero(np.isnan(probability).any(1))
        raise ValueError(
            f"{len(rows)} of {len(probability)} rows have NaN as a probability, the first is row "
            f"{rows[0]}; expected numbers: the model's weights or its inputs are not finite"
        )
    for scores, label in zip(probability.T, y.T, strict=True):
        positive, negative = np.sort(scores[label == 1]), np.sort(scores[label == 0])
        if not len(positive) or not len(negative):
            yield math.nan, math.nan
            continue
        below, up_to = (np.searchsorted(negative, positive, side) for side in ("left", "right"))
        auc = (below + up_to).sum() / (2 * len(positive) * len(negative))
        found = len(positive) - np.searchsorted(positive, positive)
        precision = found / (found + len(negative) - below)
        yield float(auc), float(precision.mean())


def label_f1(
    probability: NDArray[np.float32], y: NDArray[np.float32], threshold: float | None
) -> list[float]:
    """Returns the F1 of every label over the rows where it is known; 0 where it is never right.

    A label is predicted above the threshold; without one, the most probable class is.
    """
    if threshold is None:
        predicted = np.arange(y.shape[1]) == probability.argmax(1, keepdims=True)
    else:
        predicted = probability > threshold
    f1: list[float] = _f1_of_labels(y == 1, predicted & ~np.isnan(y)).tolist()
    return f1


def _ranking(probability: NDArray[np.float32], y: NDArray[np.float32]) -> Scores:
    both = [found for found in _by_label(probability, y) if not math.isnan(found[0])]
    auc, precision = np.mean(both, axis=0).tolist() if both else (math.nan, math.nan)
    return {"auc_macro": auc, "map": precision, "auc_labels": float(len(both))}
