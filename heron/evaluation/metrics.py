"""Scores predictions against labels, and projections of one view against those of another.

They are exact, because every row is counted once. `Evaluate` is the section of an experiment.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from heron.base.sections import Natural, Positive, Section, Share

Scores = dict[str, float]
THRESHOLDS = 200  # tried at most
RECALL_AT = 1, 5, 10  # the k of recall@k
COSINES_AT_ONCE = 1 << 22  # cosines computed at a time
TIE = 1e-6  # cosines this close are ties, so that rounding, which depends on the batch, has no say


class Evaluate(Section):
    """How predictions are scored, and whether a probe makes some: see `evaluation.probe`.

    Attributes:
        probe: when a probe makes predictions: only if no term trains a classifier (`auto`),
            also beside a classifier (`always`), or `never`.
        probe_by: kind of probe: logistic regression, or support vector machines for exclusive
            classes (see `evaluation.probe`).
        knn: number of labelled neighbours that vote on each test row at every evaluation, which
            then also measures RankMe of the test rows; null: no vote.
        knn_tau: temperature of the neighbours' votes: see `evaluation.knn.vote`.
        cross_view: whether to measure recall@k of each view's test rows by the projections of each
            other view: see `evaluation.metrics`.
        threshold: probability above which a label of a multi-label row is predicted; F1 and
            subset accuracy depend on it, AUC and mAP do not. `fitted`: the one with the best
            weighted F1 on the validation rows, the same for all labels.
        batch: number of rows that are evaluated at a time.
        map: whether the report has a map of test rows, and some rows with their nearest neighbours;
            `auto`: if training took two minutes or more.
        map_rows: largest number of test rows on the map, approximately.
        baselines: whether logistic regression, a random forest, gradient boosting and the plain
            network are trained on the same labels, for comparison; `plain`: only the network;
            `scikit-learn`: only the others, which are fitted beside the run. Boosting has up to 20
            labels.
        seeds: number of seeds, from `seed` on, with which networks are trained, in folders `seed-N`
            of the run's folder; the report shows their spread. scikit-learn's baselines use none.
        test: whether the test rows are scored; false: they stay unread, as in a search's trials.
    """

    probe: Literal["auto", "always", "never"] = "auto"
    probe_by: Literal["logistic", "svm"] = "logistic"
    knn: Natural | None = None
    knn_tau: Positive = 0.07
    cross_view: bool = False
    threshold: Share | Literal["fitted"] = 0.4
    batch: Natural = 512
    map: Literal["auto", "always", "never"] = "auto"
    map_rows: Natural = 1000
    baselines: Literal[True, False, "plain", "scikit-learn"] = False
    seeds: Natural = 1
    test: bool = True

    @property
    def fits_columns(self) -> bool:
        """Whether scikit-learn's baselines are wanted."""
        return self.baselines in (True, "scikit-learn")


def multi_label_scores(
    probability: NDArray[np.float32], y: NDArray[np.float32], threshold: float
) -> Scores:
    """Scores independent labels, each predicted where its probability exceeds the threshold.

    Unknown labels, NaN in y, are not counted.

    Returns:
        `f1_weighted`, `f1_macro`, `f1_micro`, `subset_accuracy` (the share of rows whose known
        labels are all right: low where there are many labels), `auc_macro` and `map` (macro). The
        last two average the `auc_labels` labels that some rows have and others do not.
    """
    known, true, predicted = ~np.isnan(y), y == 1, probability > threshold
    f1, support = _f1_of_labels(true, predicted & known), true.sum(0)
    micro = _f1_of_labels(true.reshape(-1, 1), (predicted & known).reshape(-1, 1))
    scores = {
        "f1_weighted": (f1 * support).sum() / max(1, support.sum()),
        "f1_macro": f1.mean(),
        "f1_micro": micro.item(),
        "subset_accuracy": ((true == predicted) | ~known).all(1).mean(),
    }
    return {name: float(value) for name, value in scores.items()} | _ranking(probability, y)


def _f1_of_labels(true: NDArray[np.bool_], predicted: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Returns the F1 of every label, [labels], from true and predicted labels [rows, labels]."""
    right, total = (true & predicted).sum(0), true.sum(0) + predicted.sum(0)
    return np.asarray(2 * right / np.maximum(1, total))


def multi_class_scores(probability: NDArray[np.float32], y: NDArray[np.float32]) -> Scores:
    """Scores exclusive classes; the most probable one is predicted. See the function above.

    The macro F1 averages the classes that occur among the true or predicted ones.
    """
    classes = np.arange(y.shape[1])
    true, predicted = (x.argmax(1, keepdims=True) == classes for x in (y, probability))
    f1, support = _f1_of_labels(true, predicted), true.sum(0)
    micro = _f1_of_labels(true.reshape(-1, 1), predicted.reshape(-1, 1)).item()
    scores = {
        "f1_weighted": float((f1 * support).sum() / max(1, support.sum())),
        "f1_macro": float(f1[(true | predicted).any(0)].mean()),
        "f1_micro": micro,
        "accuracy": micro,  # equal here: every error is one false positive and one false negative
    }
    return scores | _ranking(probability, y)


def fitted_threshold(probability: NDArray[np.float32], y: NDArray[np.float32]) -> float:
    """Returns the one threshold for all labels that gives the best weighted F1.

    Tries midpoints between the probabilities that occur, at most `THRESHOLDS`, evenly spaced by
    rank. Ties go to the one nearest 0.5, which is also the answer without any positive label. Both
    arguments are [rows, labels]; y is 0 or 1, or NaN for unknown labels, which do not count.
    """
    known, y = ~np.isnan(y), np.nan_to_num(y)
    values = np.unique(probability).astype(np.float64)
    candidates = (values[1:] + values[:-1]) / 2
    candidates = candidates[
        np.linspace(0, len(candidates) - 1, min(len(candidates), THRESHOLDS)).round().astype(int)
    ]
    support, best = y.sum(0), (-1.0, 0.0, 0.5)
    for threshold in candidates.tolist():
        f1 = _f1_of_labels(y == 1, (probability > threshold) & known)
        best = max(best, (float((f1 * support).sum()), -abs(threshold - 0.5), threshold))
    return best[2] if support.any() else 0.5


def label_auc(probability: NDArray[np.float32], y: NDArray[np.float32]) -> list[float]:
    """Returns the AUC of every label over the rows where it is known; NaN if all rows agree.

    AUC is the share of pairs (a row with the label, a row without) that are ranked correctly; a
    tie counts one half.

    Raises:
        ValueError: a probability is NaN.
    """
    return [auc for auc, _ in _by_label(probability, y)]


def _by_label(
    probability: NDArray[np.float32], y: NDArray[np.float32]
) -> Iterator[tuple[float, float]]:
    """Yields AUC and average precision of every label; NaN if its known rows all agree.

    Average precision averages, over the rows with the label, the precision among the rows that are
    at least as probable.
    """
    if np.isnan(probability).any():
        rows = np.flatnonzero(np.isnan(probability).any(1))
        raise ValueError(
            f"{len(rows)} of {len(probability)} rows have NaN as a probability, the first is row "
            f"{rows[0]}; check that the model's weights and its inputs are finite"
        )
    for scores, label in zip(probability.T, y.T, strict=True):
        positive, negative = np.sort(scores[label == 1]), np.sort(scores[label == 0])
        if not len(positive) or not len(negative):
            yield math.nan, math.nan
            continue
        below, up_to = (np.searchsorted(negative, positive, side) for side in ("left", "right"))
        auc = (below + up_to).sum() / (2 * len(positive) * len(negative))
        positives_above = len(positive) - np.searchsorted(positive, positive)
        precision = positives_above / (positives_above + len(negative) - below)
        yield float(auc), float(precision.mean())


def label_f1(
    probability: NDArray[np.float32], y: NDArray[np.float32], threshold: float | None
) -> list[float]:
    """Returns the F1 of every label over the rows where it is known; 0 if it is never right.

    A label is predicted above the threshold; without a threshold, the most probable class is.
    """
    if threshold is None:
        predicted = np.arange(y.shape[1]) == probability.argmax(1, keepdims=True)
    else:
        predicted = probability > threshold
    f1: list[float] = _f1_of_labels(y == 1, predicted & ~np.isnan(y)).tolist()
    return f1


def _ranking(probability: NDArray[np.float32], y: NDArray[np.float32]) -> Scores:
    defined = [pair for pair in _by_label(probability, y) if not math.isnan(pair[0])]
    auc, precision = np.mean(defined, axis=0).tolist() if defined else (math.nan, math.nan)
    return {"auc_macro": auc, "map": precision, "auc_labels": float(len(defined))}


def cross_view_recalls(
    views: Sequence[Float[Tensor, "rows dim"]],  # projections, a tensor a view
    names: Sequence[str],  # of the views
    present: Bool[Tensor, "rows views"] | None = None,  # which views each row has
) -> dict[str, float]:
    """Returns recall@k from each view to each other view, such as `recall@10_caption_image`.

    A row's projection in the first view finds its row if fewer than k other rows have, in the
    second view, a cosine at least as large as its own. Ties and NaN count against the query: equal
    vectors find nothing. Chance level is k / rows. Queries need both views, candidates the second.
    """
    unit = [normalize(view.double(), dim=1) for view in views]
    recalls = {}
    for u, name in enumerate(names):
        for v, other in enumerate(names):
            if present is None:
                queries, keys = unit[u], unit[v]
            else:  # the keys of the queries come first
                both, keys_only = present[:, u] & present[:, v], present[:, v] & ~present[:, u]
                queries, keys = unit[u][both], torch.cat([unit[v][both], unit[v][keys_only]])
            if u != v and len(queries):
                ranks = _ranks(queries, keys)
                for k in RECALL_AT:
                    recalls[f"recall@{k}_{name}_{other}"] = float((ranks < k).double().mean())
    return recalls


def _ranks(queries: Tensor, keys: Tensor) -> Tensor:
    """Counts the keys that are at least as near to each query as its own key, [queries].

    The first keys belong to the queries, in order.
    """
    own = (queries * keys[: len(queries)]).sum(1)
    ranks = []
    for rows in torch.split(torch.arange(len(queries)), max(1, COSINES_AT_ONCE // len(keys))):
        cosines = queries[rows] @ keys.T
        near = ~(cosines < own[rows, None] - TIE)  # True for NaN, which must not count as found
        near[torch.arange(len(rows)), rows] = False
        ranks.append(near.sum(1))
    return torch.cat(ranks)
