"""Scores by hand."""

import math

import numpy as np
import pytest
from sklearn import metrics

from heron.evaluation.metrics import (
    fitted_threshold,
    label_auc,
    multi_class_scores,
    multi_label_scores,
)


def test_multi_label_scores_by_hand() -> None:
    """Label 0: 2 of 2 found, 1 wrong, F1 0.8; label 1: 1 of 1 found, F1 1; weights 2 and 1."""
    p = np.array([[0.9, 0.1], [0.5, 0.3], [0.45, 0.8]], np.float32)
    y = np.array([[1, 0], [1, 0], [0, 1]], np.float32)
    scores = multi_label_scores(p, y, threshold=0.4)
    assert scores["f1_weighted"] == pytest.approx((2 * 0.8 + 1) / 3)
    assert scores["f1_macro"] == pytest.approx(0.9)
    assert scores["f1_micro"] == pytest.approx(6 / 7)
    assert scores["subset_accuracy"] == pytest.approx(2 / 3)
    assert scores["auc_macro"] == scores["map"] == 1


def test_one_label_has_its_own_f1() -> None:
    p, y = np.array([[0.9], [0.6], [0.1]], np.float32), np.array([[1], [0], [0]], np.float32)
    assert multi_label_scores(p, y, 0.4)["f1_weighted"] == pytest.approx(2 / 3)


def test_multi_class_scores_by_hand() -> None:
    p = np.array([[0.4, 0.3, 0.3], [0.1, 0.2, 0.7], [0.3, 0.4, 0.3]], np.float32)
    y = np.eye(3, dtype=np.float32)[[0, 2, 2]]
    scores = multi_class_scores(p, y)
    assert scores["accuracy"] == pytest.approx(2 / 3)
    assert scores["f1_weighted"] == pytest.approx((1 + 2 * 2 / 3) / 3)


def test_a_label_that_never_varies_has_no_auc() -> None:
    p = np.array([[0.4, 0.3], [0.1, 0.2]], np.float32)
    y = np.array([[0, 1], [0, 0]], np.float32)
    assert math.isnan(label_auc(p, y)[0])
    scores = multi_label_scores(p, y, 0.4)
    assert (scores["auc_macro"], scores["auc_labels"]) == (1.0, 1.0)
    nothing = multi_label_scores(p, np.zeros((2, 2), np.float32), 0.4)
    assert math.isnan(nothing["auc_macro"])


@pytest.mark.parametrize("levels", [3, 1 << 20], ids=["many ties", "few ties"])
def test_scores_are_those_of_scikit_learn(levels: int) -> None:
    draw = np.random.default_rng(levels)
    p = (draw.integers(levels, size=(70, 5)) / levels).astype(np.float32)
    y = (draw.random((70, 5)) < 0.3).astype(np.float32)
    y[draw.random((70, 5)) < 0.2] = np.nan
    known = ~np.isnan(y)
    auc = [metrics.roc_auc_score(y[k, a], p[k, a]) for a, k in enumerate(known.T)]
    precision = [metrics.average_precision_score(y[k, a], p[k, a]) for a, k in enumerate(known.T)]
    scores = multi_label_scores(p, y, 0.5)
    assert label_auc(p, y) == pytest.approx(auc, rel=1e-14)
    assert scores["auc_macro"] == pytest.approx(np.mean(auc), rel=1e-14)
    assert scores["map"] == pytest.approx(np.mean(precision), rel=1e-14)


def test_scores_of_classes_are_those_of_scikit_learn() -> None:
    """Class 3 is predicted and never there, class 4 neither: the macro mean is over the others."""
    draw = np.random.default_rng(0)
    p, true = draw.random((50, 5)).astype(np.float32), draw.integers(3, size=50)
    p[:, 4] = 0
    scores, predicted = multi_class_scores(p, np.eye(5, dtype=np.float32)[true]), p.argmax(1)
    for average in ("weighted", "macro", "micro"):
        f1 = metrics.f1_score(true, predicted, average=average, zero_division=0)
        assert scores[f"f1_{average}"] == pytest.approx(f1, rel=1e-14)
    assert scores["accuracy"] == metrics.accuracy_score(true, predicted)


def test_probabilities_that_are_no_numbers() -> None:
    p, y = np.full((3, 2), 0.5, np.float32), np.eye(3, 2, dtype=np.float32)
    p[1, 1] = np.nan
    with pytest.raises(ValueError, match="1 of 3 rows have NaN as a probability, the first is row"):
        multi_label_scores(p, y, 0.5)


def test_a_threshold_is_fitted_to_the_best_weighted_f1() -> None:
    draw = np.random.default_rng(0)
    y = (draw.random((60, 3)) < 0.3).astype(np.float32)
    probability = (0.1 * y + 0.2 * draw.random((60, 3))).astype(np.float32)
    found = fitted_threshold(probability, y)
    reached = multi_label_scores(probability, y, found)["f1_weighted"]
    every = np.unique(probability)
    best = max(multi_label_scores(probability, y, float(t))["f1_weighted"] for t in every)
    assert 0.05 < found < 0.25 and reached == pytest.approx(best)
    hidden = np.concatenate([y, np.full((9, 3), np.nan, np.float32)])
    beside = np.concatenate([probability, probability[:9]])
    assert fitted_threshold(beside, hidden) == found  # rows without a known label count nowhere
    nothing = np.zeros((4, 2), np.float32)
    assert fitted_threshold(nothing + 0.7, nothing) == 0.5 == fitted_threshold(nothing, nothing + 1)
