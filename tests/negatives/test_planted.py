"""What is measured of near pairs where the answer is known beforehand."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heron.evaluation.negatives import close_difference, hard_difference
from heron.negatives import neighbours
from heron.negatives.measure import measure_labels
from heron.negatives.neighbours import Question, find_neighbours
from heron.negatives.repulsion import Temperatures, measure_repulsion
from heron.retrieval.embeddings import Embeddings
from tests.retrieval import made


def clusters(folder: Path, shuffled: bool = False, rows: int = 200) -> Embeddings:
    """Four clusters whose classes are the labels, or are not."""
    random = np.random.default_rng(1)
    of = np.arange(rows) % 4
    hidden = np.eye(4, 8)[of] + 0.01 * random.normal(size=(rows, 8))
    labels = random.permutation(of) if shuffled else of
    targets = np.eye(4, dtype=np.uint8)[labels]
    return made.embeddings(
        folder, {"hidden": hidden}, targets, ["calm", "keen", "old", "tall"], "multi_class"
    )


def test_clusters_by_label_are_all_false_negatives(tmp_path: Path) -> None:
    near = find_neighbours(clusters(tmp_path / "e"), Question(k=10, anchors=0))
    numbers = measure_labels(near)
    rates = numbers["false_negatives"]["same"]
    assert (rates["near"].value[: near.ks.index(20) + 1] == 1).all()
    assert rates["random"].value == 49 / 199
    assert numbers["hard_share"] == 0 and not near.examples("hard")
    swapped = numbers["confusion"]["swapped"]
    assert (np.diag(swapped) == 500).all() and swapped.sum() == 2000
    repulsion, notes = measure_repulsion(near, Temperatures())
    assert repulsion["compared_layer"] == "hidden" and repulsion["weight"] is None
    share = repulsion["repulsion"]["same"]
    assert share["weighted"] is None and share["without"].value > share["count"].value
    assert all(a["holds"].value == 1 for a in repulsion["assumption_1"]["same"].values())
    assert notes == ["there is no layer 'projection', so 'hidden' is measured, and without g"]


def test_shuffled_labels_have_the_rate_of_random_pairs(tmp_path: Path) -> None:
    e = clusters(tmp_path / "e", shuffled=True)
    numbers = measure_labels(find_neighbours(e, Question(anchors=0)))
    near, chance = (numbers["false_negatives"]["same"][name] for name in ("near", "random"))
    assert (near.low[2:] <= chance.value).all() and (chance.value <= near.high[2:]).all()
    assert numbers["closer_than_random"] == pytest.approx(0.5, abs=0.02)


def labelled_signs(folder: Path, weight: str) -> Embeddings:
    """Projections that are the labels as signs, so that cos = 1 - 2 distance; H(z) likewise."""
    targets = (np.random.default_rng(2).random((60, 9)) < 0.5).astype(np.uint8)
    z = (2.0 * targets - 1) / 3
    h = {"z": z, "-z": -z, "constant": np.zeros_like(z)}[weight]
    if weight == "constant":  # orthogonal to every z
        z, h = np.hstack([z, np.zeros((60, 1))]), np.hstack([h, np.ones((60, 1))])
    names = [f"l{i}" for i in range(9)]
    layers: dict[Any, Any] = {"projection": z, "weight": h}
    return made.embeddings(folder, layers, targets, names)


@pytest.mark.parametrize(("weight", "rank"), [("z", -1.0), ("-z", 1.0), ("constant", math.nan)])
def test_planted_g(weight: str, rank: float, tmp_path: Path) -> None:
    near = find_neighbours(labelled_signs(tmp_path / "e", weight), Question("projection", 5, 0))
    numbers, _ = measure_repulsion(near, Temperatures())
    # Differences that are equal in float64 may differ by rounding in g, hence not exactly 1.
    for name in ("label_rank", "cosine_rank"):
        measured = numbers["weight"][name].value
        assert measured == pytest.approx(rank, abs=0.03, nan_ok=True)
    ratio = numbers["repulsion"]["close"]["ratio"]
    if weight == "constant":
        assert ratio.value == pytest.approx(1, rel=1e-6)
    else:
        assert (ratio.high < 1) if weight == "z" else (ratio.low > 1)


def test_close_is_at_most_a_hundredth_of_random_pairs() -> None:
    cases = {(0, 1, 99): 1, (0, 2, 98): 0, (60, 30, 10): 0, (1, 0, 99): 1}
    for counts, close in cases.items():
        assert close_difference(np.array(counts)) == close


def test_hard_is_the_median_or_more_and_never_the_same() -> None:
    cases = {(0, 1, 99): 2, (0, 60, 40): 1, (0, 50, 50): 2, (60, 0, 40): 2, (9, 1, 0): 1,
             (9, 0, 0): 2, (0, 0, 0): 2, (40, 60): 1, (60, 40): 1}  # fmt: skip
    for counts, hard in cases.items():
        apart = np.repeat(np.arange(len(counts)), counts)
        far = [d for d in apart if d > 0 and d >= np.median(apart)]
        assert hard_difference(np.array(counts)) == hard == min(far, default=len(counts) - 1)


def test_close_labels_are_never_hard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = (np.random.default_rng(5).random((60, 20)) < 0.5).astype(np.uint8)
    vectors: dict[Any, Any] = {"hidden": np.random.default_rng(6).normal(size=(60, 4))}
    e = made.embeddings(tmp_path / "e", vectors, targets, [f"l{i}" for i in range(20)])
    of_an_outlier = np.ones(60, np.int64)  # whose median is within the close labels
    monkeypatch.setattr(neighbours, "hard_difference", lambda counts: of_an_outlier)
    near = find_neighbours(e, Question(k=5, anchors=0))
    assert near.close > 0 and (near.hard == near.close + 1).all()
