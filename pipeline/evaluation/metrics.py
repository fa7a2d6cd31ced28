"""Scores of predictions against labels; exact, because every row is counted once."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Scores = dict[str, float]
THRESHOLDS = 200  # that are tried, at most
AT = 1, 5, 10  # k of the recall between views
STRIP = 1 << 22  # cosines at a time
TIE = 1e-6  # cosines so near are equal: rounding, which hangs on the batch, decides nothing


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
    """Returns scores of exclusive classes: the most probable one is predicted; see the above."""
    from sklearn.metrics import accuracy_score, f1_score

    true, predicted = y.argmax(1), probability.argmax(1)
    scores = {
        f"f1_{average}": float(f1_score(true, predicted, average=average, zero_division=0))
        for average in ("weighted", "macro", "micro")
    }
    scores["accuracy"] = float(accuracy_score(true, predicted))
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
    """Returns the AUC of every label over the rows where it is known; NaN where all agree."""
    from sklearn.metrics import roc_auc_score  # here: it loads scipy, before a run's first step

    both, known = (y == 0).any(0) & (y == 1).any(0), ~np.isnan(y)
    return [
        float(roc_auc_score(y[known[:, a], a], probability[known[:, a], a]))
        if both[a]
        else float("nan")
        for a in range(y.shape[1])
    ]


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
    from sklearn.metrics import average_precision_score

    auc, known = np.array(label_auc(probability, y)), ~np.isnan(y)
    precision = [
        average_precision_score(y[known[:, a], a], probability[known[:, a], a])
        for a in np.flatnonzero(~np.isnan(auc))
    ]
    if not precision:
        return {"auc_macro": float("nan"), "map": float("nan"), "auc_labels": 0.0}
    return {
        "auc_macro": float(np.nanmean(auc)),
        "map": float(np.mean(precision)),
        "auc_labels": float(len(precision)),
    }


def cross_view_recalls(
    views: Sequence[NDArray[np.float32]],  # projections [rows, dim], an array a view
    names: Sequence[str],  # of the views
    present: NDArray[np.bool_] | None = None,  # which views each row has, [rows, views]
) -> dict[str, float]:
    """Returns recall@k of each view's rows by each other view's, as `recall@10_caption_image`.

    A row's query (its projection in the first view) finds the row where fewer than k other rows
    have a cosine with it, in the second view, that is as large as the row's own: of ties none
    counts for it, so that equal vectors find nothing. By chance it is k / rows. Queries are rows
    with both views, among rows with the second.
    """
    wide = [view.astype(np.float64) for view in views]
    unit = [x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12) for x in wide]
    found = {}
    for u, name in enumerate(names):
        for v, other in enumerate(names):
            queries, keys = unit[u], unit[v]
            if present is not None:  # the keys of the queries come first
                both, alone = present[:, u] & present[:, v], present[:, v] & ~present[:, u]
                queries, keys = queries[both], np.concatenate([keys[both], keys[alone]])
            if u != v and len(queries):
                ranks = _ranks(queries, keys)
                for k in AT:
                    found[f"recall@{k}_{name}_{other}"] = float((ranks < k).mean())
    return found


def _ranks(queries: NDArray[np.float64], keys: NDArray[np.float64]) -> NDArray[np.int64]:
    """Returns how many other keys are as near to each query as its own, the first keys."""
    own = (queries * keys[: len(queries)]).sum(1)
    ranks, size = np.empty(len(queries), np.int64), max(1, STRIP // len(keys))
    for start in range(0, len(queries), size):
        rows = np.arange(start, min(start + size, len(queries)))
        cosines = queries[rows] @ keys.T
        cosines[np.arange(len(rows)), rows] = -np.inf
        ranks[rows] = (cosines >= own[rows, None] - TIE).sum(1)
    return ranks
