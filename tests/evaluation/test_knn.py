"""The weighted vote of the nearest labelled rows, against a loop, and at an evaluation."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from heron.data.dataset import build_data
from heron.evaluation.knn import vote
from heron.experiment.open_data import open_data
from tests import ranks
from tests.evaluation.test_evaluator import make
from tests.experiments import frames


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("knn")
    build_data(frames(folder).data, progress=False)
    return folder


def by_hand(
    labelled: list[tuple[int, NDArray[Any], NDArray[Any]]],
    test: list[tuple[int, NDArray[Any]]],
    k: int,
    tau: float,
) -> NDArray[np.float64]:
    """sum_j y_j e^(cos_j / tau) / sum_j e^(cos_j / tau) over the k nearest others, in float64."""
    out = []
    for number, x in test:
        others = []
        for other, z, y in labelled:
            if other != number:
                lengths = math.sqrt(sum(a * a for a in x)) * math.sqrt(sum(a * a for a in z))
                cosine = sum(a * b for a, b in zip(x, z, strict=True)) / lengths
                others.append((cosine, y))
        near = sorted(others, key=lambda pair: -pair[0])[:k]
        total = sum(math.exp(cosine / tau) for cosine, _ in near)
        out.append(sum(y * math.exp(cosine / tau) for cosine, y in near) / total)
    return np.array(out)


@pytest.mark.parametrize("k", [1, 5, 40])
@pytest.mark.parametrize("exclusive", [True, False])
def test_the_vote_is_the_loop_s(k: int, exclusive: bool) -> None:
    """Rows 20 to 29 are labelled and tested; numbers are in no order; 40 is more than there are."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(45, 6)).astype(np.float32) * draw.uniform(0.1, 9, (45, 1)).astype("f4")
    y = (np.eye(4)[draw.integers(0, 4, 45)] if exclusive else draw.random((45, 4)) < 0.4).astype(
        np.float32
    )
    rows, tested = draw.permutation(30), np.arange(20, 45)
    found = vote((rows, x[rows], y[rows]), (tested, x[tested]), k, 0.07)
    given = [(int(i), x[i].astype(float), y[i].astype(float)) for i in rows]
    expected = by_hand(given, [(int(i), x[i].astype(float)) for i in tested], min(k, 29), 0.07)
    np.testing.assert_allclose(found, expected, atol=2e-5)
    assert found.dtype == np.float32
    if exclusive:
        np.testing.assert_allclose(found.sum(1), 1, atol=1e-6)


def test_one_row_that_is_its_own_only_neighbour_has_no_vote() -> None:
    one, x, y = np.array([3]), np.ones((1, 2), np.float32), np.ones((1, 3), np.float32)
    assert (vote((one, x, y), (one, x), 5, 0.1) == 0).all()
    assert (vote((one, x, y), (one + 1, x), 5, 0.1) == 1).all()


KNN: dict[str, Any] = {"evaluate": {"knn": 5, "knn_tau": 0.2}}


@pytest.mark.parametrize("classify", [True, False])
def test_an_evaluation_has_the_vote_s_scores_and_rankme(folder: Path, classify: bool) -> None:
    plain, model, streams, _ = make(folder, classify)
    evaluator = make(folder, classify, **KNN)[0]
    _, without = plain.evaluate(model, streams.roles)
    _, scores = evaluator.evaluate(model, streams.roles)
    own = {name: scores.pop(name) for name in list(scores) if name.startswith("knn_")}
    rank = scores.pop("rankme")
    assert scores == without and own.keys() == {f"knn_{name}" for name in without}

    labelled = plain.predict(model, streams.roles.labelled, hidden=True)
    test = plain.predict(model, streams.roles.test, hidden=True)
    assert labelled.hidden is not None and test.hidden is not None
    given = [
        (int(r), s.astype(float), y.astype(float))
        for r, s, y in zip(labelled.rows, labelled.hidden, labelled.y, strict=True)
    ]
    asked = [(int(r), s.astype(float)) for r, s in zip(test.rows, test.hidden, strict=True)]
    voted = by_hand(given, asked, 5, 0.2)
    assert own["knn_accuracy"] == pytest.approx((voted.argmax(1) == test.y.argmax(1)).mean())

    values = np.linalg.svd(test.hidden.astype(float), compute_uv=False)
    shares = values / values.sum() + 1e-7  # RankMe, Eq. 1
    assert rank == pytest.approx(math.exp(-(shares * np.log(shares)).sum()), rel=1e-3)


def scores(folder: Path, k: int) -> dict[str, float]:
    """With many neighbours all labelled rows vote; the last of the tested rows is one of them."""
    given = {"evaluate": {"knn": k, "knn_tau": 0.2}}
    evaluator, model, _, _ = make(folder, classify=False, **given)
    roles = open_data(frames(folder)).roles
    test = np.concatenate([roles.test[:7], roles.labelled[:1]])
    votes = evaluator._vote(
        evaluator.predict(model, roles.labelled, hidden=True),
        evaluator.predict(model, test, hidden=True),
    )
    several = evaluator.evaluate(model, roles)[1]
    voted = np.ravel(np.asarray(votes.probability, float)).tolist()
    return several | {f"vote{n}": p for n, p in enumerate(voted)}


@pytest.mark.parametrize("k", [5, 1000])
def test_any_number_of_processes_has_the_same_scores(folder: Path, k: int) -> None:
    (alone,) = ranks.run(1, scores, folder, k)
    for several in ranks.run(3, scores, folder, k):
        assert several == pytest.approx(alone, rel=1e-4)
    assert "knn_accuracy" in alone
