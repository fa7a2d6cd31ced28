"""Wrong labels are found, and their number is told, where both are known."""

from typing import Any

import numpy as np
import pytest
from scipy.special import softmax
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score
from sklearn.model_selection import cross_val_predict

from heron.audit.labels import FOLDS, LabelModel, Near, _fit_labels, suspicion
from heron.audit.planting import Kinds, estimate, judge
from heron.evaluation.knn import exact_nearest
from heron.evaluation.probe import fit_logistic

ROWS = 700  # of the digits


def near_of(x: Any, k: int = 10) -> Near:
    unit = np.asarray(x / np.linalg.norm(x, axis=1, keepdims=True), np.float32)
    own = np.arange(len(x))
    return Near(*exact_nearest([(own, unit)], unit, own, k))


def digits(rate: float, seed: int = 0) -> tuple[Any, Any, Any]:
    """Pixels, classes of which a share is wrong, and which are."""
    data, random = load_digits(), np.random.default_rng(seed)
    pixels, classes = data.data[:ROWS], data.target[:ROWS]
    wrong = random.random(ROWS) < rate
    given = np.where(wrong, (classes + random.integers(1, 10, ROWS)) % 10, classes)
    x = (pixels - pixels.mean(0)).astype(np.float32)
    return x, np.eye(10, dtype=np.float32)[given], wrong


def several(rate: float, rows: int = 800, seed: int = 0) -> tuple[Any, Any, Any]:
    """Six labels of eight numbers, the last two of which always go together; some are wrong."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, 8)).astype(np.float32)
    y = (x[:, :6] + 0.5 * random.normal(size=(rows, 6)) > 0.7).astype(np.float32)
    y[:, 5] = y[:, 4]
    wrong = random.random(y.shape) < rate
    return x, np.where(wrong, 1 - y, y).astype(np.float32), wrong


def test_votes_are_those_of_a_loop() -> None:
    x, y, _ = several(0.1, 60)
    y[random_cells(y, 40)] = np.nan
    near = near_of(x, 5)
    for row, votes in enumerate(near.votes(y)):
        weight = np.exp(near.cosine[row] / 0.1)
        for label in range(y.shape[1]):
            theirs = y[near.numbers[row], label]
            known = np.isfinite(theirs)
            share = (weight * theirs)[known].sum() / weight[known].sum() if known.any() else 0.5
            assert votes[label] == pytest.approx(share, abs=1e-5)


def random_cells(y: Any, count: int) -> Any:
    at = np.random.default_rng(3).choice(y.size, count, replace=False)
    return np.unravel_index(at, y.shape)


def test_wrong_classes_rank_above_those_of_confident_learning() -> None:
    """Its ranking is by the same regression's out-of-sample probability of the given class."""
    x, y, wrong = digits(0.1)
    model = LabelModel.of(x, y, True, near_of(x))
    found = suspicion(model.probabilities(y), y, True)[:, 0]
    plain = LogisticRegression(C=0.01, max_iter=500)
    alone = cross_val_predict(plain, x / 4, y.argmax(1), cv=5, method="predict_proba")
    ours, theirs = (
        average_precision_score(wrong, score) for score in (found, 1 - (alone * y).sum(1))
    )
    assert ours > max(0.95, theirs)


def test_other_labels_of_a_row_tell_what_its_features_do_not() -> None:
    x, y, wrong = several(0.05)
    model = LabelModel.of(x, y, False, near_of(x))
    given = suspicion(model.probabilities(y), y, False)
    alone = suspicion(model.out_of_fold(y), y, False)
    precision = [
        average_precision_score(wrong[:, 4:].ravel(), s[:, 4:].ravel()) for s in (given, alone)
    ]
    assert precision[0] > precision[1] + 0.1


def test_a_label_has_no_part_in_its_own_probability() -> None:
    """Where one label is changed, the models of its row's fold do not see it."""
    x, y, _ = several(0.0, 200)
    model = LabelModel.of(x, y, False, near_of(x))
    changed = y.copy()
    changed[17, 2] = 1 - changed[17, 2]
    before, after = (model.out_of_fold(labels)[17] for labels in (y, changed))
    np.testing.assert_array_equal(before, after)
    votes = (model.near.votes(labels)[17] for labels in (y, changed))
    np.testing.assert_array_equal(*votes)


def test_all_labels_at_once_are_fitted_as_one_by_one() -> None:
    x, y, _ = several(0.1, 300)
    y[:, 3] = 1
    y[random_cells(y, 200)] = np.nan
    ours = _fit_labels(x.astype(np.float64), y, 0.1)(x)
    theirs = fit_logistic(x.astype(np.float64), y, False, 0.1, 1000)(x)
    np.testing.assert_allclose(ours, theirs, atol=2e-3)


def test_groups_are_never_split_among_folds() -> None:
    x, y, _ = several(0.1, 300)
    groups = np.arange(300) // 3
    model = LabelModel.of(x, y, False, near_of(x), groups)
    assert (model.fold.reshape(-1, 3) == model.fold[::3, None]).all()
    assert sorted(np.unique(model.fold)) == list(range(FOLDS))


def test_copies_do_not_vouch_for_each_other() -> None:
    """A wrong label that ten copies share is as suspicious as one that a sample has alone."""
    x, y, _ = several(0.0, 300)
    x[280:] = x[0]
    y[280:, 1] = y[0, 1] = 1 - y[0, 1]
    groups = np.arange(300)
    groups[280:] = 0
    for number, votes in ((groups, 0.5), (None, y[0, 1])):
        model = LabelModel.of(x, y, False, near_of(x), number)
        assert model.near.votes(y)[0, 1] == votes


def test_a_row_without_votes_is_judged_by_its_features_alone() -> None:
    x, y, _ = digits(0.0)
    groups = np.arange(ROWS)
    near = near_of(x)
    groups[near.numbers[0]] = groups[0]
    model = LabelModel.of(x, y, True, near, groups)
    assert not model.near.heard[0, 0] and model.near.heard[:, 0].sum() > ROWS / 2
    alone, whole = model.out_of_fold(y)[0], model.probabilities(y)[0]
    np.testing.assert_allclose(whole, (alone + 1e-3) / (alone + 1e-3).sum(), rtol=1e-5)


def test_unknown_labels_have_no_suspicion_and_labels_that_all_share_none() -> None:
    x, y, _ = several(0.1, 300)
    y[:, 3] = 1
    y[random_cells(y, 200)] = np.nan
    y[:, 2] = np.nan
    model = LabelModel.of(x, y, False, near_of(x))
    found = suspicion(model.probabilities(y), y, False)
    assert (np.isnan(found) == np.isnan(y)).all()
    assert np.nanmax(found[:, 3]) == 0


def test_planted_faults_tell_how_many_are_wrong_and_found() -> None:
    held = []
    for seed in range(2):
        x, y, wrong = digits(0.1, seed)
        model = LabelModel.of(x, y, True, near_of(x), seed=seed)
        probability = model.probabilities(y)
        given = suspicion(probability, y, True)
        found = estimate(model, y, probability, given, seed)
        assert 0.6 * wrong.sum() < found.errors < 1.6 * wrong.sum()
        first = np.argsort(-given[:, 0], kind="stable")[: found.errors]
        held.append(found.low <= wrong[first].sum() / wrong.sum() <= found.high)
    assert any(held)


def test_a_class_that_is_taken_for_the_same_other_one_is_told() -> None:
    """Planted on wrong labels too, and all ways mixed, faults told of 11 of 62."""
    x, right, _ = digits(0.0)
    wrong = np.random.default_rng(1).random(len(x)) < 0.1
    y = np.where(wrong[:, None], np.roll(right, 1, 1), right)
    model = LabelModel.of(x, y, True, near_of(x))
    probability = model.probabilities(y)
    given = suspicion(probability, y, True)
    found = estimate(model, y, probability, given, 0)
    first = np.argsort(-given[:, 0], kind="stable")[: found.errors]
    assert 0.3 * wrong.sum() < found.errors < 1.2 * wrong.sum()
    assert wrong[first].mean() > 0.8
    assert found.low <= wrong[first].sum() / wrong.sum() <= found.high


def test_right_labels_are_not_called_wrong() -> None:
    x, y, _ = digits(0.0)
    model = LabelModel.of(x, y, True, near_of(x))
    probability = model.probabilities(y)
    found = estimate(model, y, probability, suspicion(probability, y, True), 0)
    assert found.errors <= 0.01 * len(y)


@pytest.mark.parametrize("exclusive", [True, False])
def test_faults_are_planted_in_known_labels_of_the_kinds_that_are_asked(exclusive: bool) -> None:
    random = np.random.default_rng(0)
    if exclusive:
        y = np.eye(4, dtype=np.float32)[random.integers(0, 4, 200)]
        pattern = np.zeros(16)
        pattern[1 * 4 + 3] = 1  # 1 is taken for 3
    else:
        y = (random.random((200, 4)) < 0.5).astype(np.float32)
        y[:50] = np.nan
        pattern = np.zeros(8)
        pattern[2 * 2 + 1] = 1  # a 1 of label 2 is taken for 0
    changed, at = Kinds(y, exclusive).plant(pattern, 20, random)
    assert len(np.unique(at)) == 20
    if exclusive:
        assert (y[at].argmax(1) == 1).all() and (changed[at].argmax(1) == 3).all()
        assert ((changed != y).any(1)).sum() == 20 and (changed.sum(1) == 1).all()
    else:
        assert (at % 4 == 2).all() and (y.reshape(-1)[at] == 1).all()
        assert (changed.reshape(-1)[at] == 0).all()
        assert np.isnan(changed[:50]).all()
        assert np.nansum(changed != y) - np.isnan(y).sum() == 20


def test_the_number_of_errors_is_what_the_tails_of_both_lists_agree_on() -> None:
    """A tenth of the labels come from the planted ones' distribution, the others from below it."""
    random = np.random.default_rng(0)
    planted = random.uniform(0.5, 1, 1000).astype(np.float32)
    given = np.concatenate([random.uniform(0.5, 1, 200), random.uniform(0, 0.5, 1800)])
    found = judge([planted], given.astype(np.float32))
    assert 150 <= found.errors <= 210  # the least number that explains all places
    assert found.low < found.recall < found.high


def test_no_neighbour_counts_twice() -> None:
    near = Near(np.array([[1, 2]]), np.array([[0.9, 0.8]], np.float32))
    np.testing.assert_allclose(near.weights, softmax([[9, 8]], axis=1), rtol=1e-6)
