"""What is measured of near pairs where the answer is known beforehand."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heron.pipeline.negatives import measure as negatives
from heron.pipeline.negatives import repulsion
from heron.pipeline.negatives.histograms import more_similar
from heron.pipeline.negatives.measure import Question, examples, measure
from heron.pipeline.negatives.repulsion import Temperatures
from heron.pipeline.retrieval.embeddings import Embeddings
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
    e = clusters(tmp_path / "e")
    found = measure(e, Question(k=10, anchors=0))
    near, chance = found.rates["same"]
    assert (near.value[: found.ks.index(20) + 1] == 1).all() and chance.value == 49 / 199
    assert found.hard_share == 0 and not examples(found, "hard")
    assert (np.diag(found.confusion.swapped) == 500).all()
    assert found.confusion.swapped.sum() == 2000
    pushed = repulsion.measure(e, found.pairs, found.close, Temperatures(), 0)
    assert pushed.layer == "hidden" and pushed.weight is None
    assert pushed.shares["same"].weighted is None
    assert pushed.shares["same"].without.value > pushed.shares["same"].count.value
    assert all(a.holds.value == 1 for a in pushed.assumption["same"].values())
    assert pushed.notes == [
        "without the layer 'projection' all is measured on 'hidden', and without g"
    ]


def test_shuffled_labels_have_the_rate_of_random_pairs(tmp_path: Path) -> None:
    found = measure(clusters(tmp_path / "e", shuffled=True), Question(anchors=0))
    near, chance = found.rates["same"]
    assert (near.low[2:] <= chance.value).all() and (chance.value <= near.high[2:]).all()
    assert more_similar(found.histograms["same"], found.histograms["others"]) == pytest.approx(
        0.5, abs=0.02
    )


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
    e = labelled_signs(tmp_path / "e", weight)
    found = measure(e, Question("projection", 5, 0))
    pushed = repulsion.measure(e, found.pairs, found.close, Temperatures(), 0)
    assert pushed.weight is not None
    # Levels that are equal in float64 may differ by rounding in g, hence not exactly 1.
    for estimate in (pushed.weight.label_rank, pushed.weight.cosine_rank):
        assert estimate.value == pytest.approx(rank, abs=0.03, nan_ok=True)
    ratio = pushed.shares["close"].ratio
    assert ratio is not None
    if weight == "constant":
        assert ratio.value == pytest.approx(1, rel=1e-6)
    else:
        assert (ratio.high < 1) if weight == "z" else (ratio.low > 1)


def test_close_is_at_most_a_hundredth_of_random_pairs(tmp_path: Path) -> None:
    e = labelled_signs(tmp_path / "e", "z")
    cases = {(0, 1, 99): (1, 2), (0, 2, 98): (0, 2), (60, 30, 10): (0, 1), (1, 0, 99): (1, 2)}
    for levels, expected in cases.items():
        assert negatives.thresholds(np.array(levels), e) == expected
