"""What is measured of near pairs and their labels: every number against a loop."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heron.evaluation import negatives as definition
from heron.evaluation.negatives import RELATIONS
from heron.negatives import measure as statistics
from heron.negatives import repulsion
from heron.negatives.estimates import Estimate
from heron.negatives.measure import SHARES, measure_labels
from heron.negatives.neighbours import NearPairs, Question, find_neighbours
from heron.negatives.repulsion import (
    measure_repulsion,
    near_weights,
)
from heron.retrieval.embeddings import Embeddings
from tests.negatives.loops import NAMES, TEMPERATURES, by_hand, distance, drawn, others


def hard_from(e: Embeddings, i: int) -> float:
    """The label distance from which on a near sample is a hard negative of i: see `definition`."""
    apart = [distance(e, i, k) for k in others(e, i)]
    return min((d for d in apart if d > 0 and d >= np.median(apart) - 1e-9), default=1.0)


def test_rates_and_relations_by_loops(
    embeddings: Embeddings, found: NearPairs, numbers: dict[str, Any]
) -> None:
    _, near = by_hand(embeddings)
    anchors, largest = found.pairs.anchors.tolist(), found.pairs.max_difference
    apart = [distance(embeddings, i, k) for i in anchors for k in others(embeddings, i)]
    steps = sorted(set(apart) | {0.0})
    close = max([d for d in steps if np.mean([a <= d for a in apart]) <= 0.01], default=0.0)
    hard = [max(hard_from(embeddings, i), close + 1 / largest) for i in anchors]
    assert numbers["thresholds"]["close"] == found.close / largest == pytest.approx(close)
    assert numbers["thresholds"]["far"] == pytest.approx(np.median(hard))
    np.testing.assert_allclose(found.hard / largest, hard)
    assert found.counts.sum() == numbers["random_pairs_by_distance"]["pairs"].sum() == 15 * 38
    measures: dict[str, Callable[[float], float]] = {
        "same": lambda d: d == 0,
        "close": lambda d: d <= close,
        "distance": lambda d: d,
    }
    for name, value in measures.items():
        rates = numbers["false_negatives"][name]
        assert rates["random"].value == pytest.approx(np.mean([value(d) for d in apart]))
        for place, k in enumerate(found.ks):
            expected = [value(distance(embeddings, i, j)) for i in anchors for j in near(i, k)]
            rate = rates["near"][place]
            assert rate.value == pytest.approx(np.mean(expected))
            assert rate.low <= rate.value <= rate.high
    relations = np.array(RELATIONS)[found.relation]
    d = found.difference / largest
    assert ((relations == "false") == (d == 0)).all()
    is_hard = d >= np.array(hard)[:, None] - 1e-9
    assert ((relations == "hard") == is_hard).all() and is_hard.any()


def test_similarities_are_of_all_pairs(
    embeddings: Embeddings, found: NearPairs, numbers: dict[str, Any]
) -> None:
    cosine, near = by_hand(embeddings)
    groups: dict[str, list[float]] = {"same": [], "close": [], "others": [], "hard": []}
    for i, hard in zip(found.pairs.anchors.tolist(), found.hard, strict=True):
        for k in others(embeddings, i):
            apart = distance(embeddings, i, k)
            groups["same"] += [cosine[i, k]] * (apart == 0)
            groups["close"] += [cosine[i, k]] * (apart <= found.close / found.pairs.max_difference)
            groups["others"] += [cosine[i, k]] * (apart > found.close / found.pairs.max_difference)
        least = hard / found.pairs.max_difference - 1e-9
        groups["hard"] += [cosine[i, k] for k in near(i, 3) if distance(embeddings, i, k) >= least]
    for name, values in groups.items():
        similarity = numbers["similarity"][name]
        assert similarity["pairs"] == similarity["histogram"].sum() == len(values)
        if values:
            expected = np.quantile(values, SHARES, method="inverted_cdf")
            measured = list(similarity["quantiles"].values())
            np.testing.assert_allclose(measured, expected, atol=1.1e-3)
            assert similarity["mean"] == pytest.approx(np.mean(values), abs=1e-3)
    wins = [(a > b) + (a == b) / 2 for a in groups["close"] for b in groups["others"]]
    assert numbers["closer_than_random"] == pytest.approx(np.mean(wins), abs=5e-3)
    below = np.mean([a < np.quantile(groups["hard"], 0.5, method="lower") for a in groups["close"]])
    assert numbers["positives_below_hard"] == pytest.approx(below, abs=0.02)
    assert numbers["hard_share"] == pytest.approx(len(groups["hard"]) / 45)


def test_confused_labels_by_loops(
    embeddings: Embeddings, found: NearPairs, numbers: dict[str, Any]
) -> None:
    _, near = by_hand(embeddings)
    anchors, has = found.pairs.anchors.tolist(), embeddings.samples.label_names
    confusion = numbers["confusion"]
    for a, name in enumerate(NAMES):
        mine = [i for i in anchors if name in has(i)]
        kept = [name in has(k) for i in mine for k in near(i, 3)]
        chance = [np.mean([name in has(k) for k in others(embeddings, i)]) for i in mine]
        if mine:
            assert confusion["precision"].value[a] == pytest.approx(np.mean(kept))
            assert confusion["random"][a] == pytest.approx(np.mean(chance))
        else:
            assert np.isnan([confusion["random"][a], confusion["precision"].value[a]]).all()
    exclusive = embeddings.samples.exclusive

    def swapped(i: int, k: int, a: str, b: str) -> bool:
        if a == b:
            return exclusive and a in has(i) and a in has(k)
        return (a in has(i)) > (b in has(i)) and (b in has(k)) > (a in has(k))

    for a, first in enumerate(NAMES):
        for b, second in enumerate(NAMES):
            count = sum(swapped(i, k, first, second) for i in anchors for k in near(i, 3))
            blind = [swapped(i, k, first, second) for i in anchors for k in others(embeddings, i)]
            assert confusion["swapped"][a, b] == count
            assert confusion["expected"][a, b] == pytest.approx(np.mean(blind) * 45, abs=1e-4)
    for swap in confusion["worst"]:
        at = NAMES.index(swap["anchor"]), NAMES.index(swap["neighbour"])
        assert swap["pairs"] == confusion["swapped"][at]
        assert swap["expected"] == confusion["expected"][at] >= statistics.MIN_EXPECTED
        assert at[0] != at[1] or not exclusive


def test_blocks_make_no_difference(
    found: NearPairs, numbers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (definition, statistics, repulsion):
        monkeypatch.setattr(module, "BLOCK_PAIRS", 100)
    monkeypatch.setattr(definition, "BLOCK_LABELS", 10)
    again = find_neighbours(found.embeddings, Question(k=3, anchors=15))
    in_blocks = measure_labels(again) | measure_repulsion(again, TEMPERATURES)[0]
    near = near_weights(found, TEMPERATURES)
    monkeypatch.undo()
    at_once = near_weights(found, TEMPERATURES)
    assert near is not None and at_once is not None
    np.testing.assert_allclose(near, at_once, rtol=1e-6)
    assert (again.counts == found.counts).all() and (again.difference == found.difference).all()

    def same(a: Any, b: Any, name: str = "") -> None:
        if isinstance(a, dict):
            assert a.keys() == b.keys()
            for key in a:
                same(a[key], b[key], key)
        elif isinstance(a, Estimate):
            same(a.value, b.value, name)
        elif name == "histogram":
            assert abs(a - b).sum() <= 2  # a cosine at the edge of a bin
        elif isinstance(a, np.ndarray | float):
            np.testing.assert_allclose(a, b, 1e-6, err_msg=name)

    same(in_blocks, numbers)


def test_what_is_left_out_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    e = drawn(tmp_path / "e")
    monkeypatch.setattr(definition, "OTHERS", 30)
    found = find_neighbours(e, Question(k=3, anchors=100))
    assert len(found.pairs.anchors) == 39 and len(found.pairs.others) == 30
    assert found.counts.sum() == 39 * 30 - 30  # others are anchors too, but not of themselves
    assert found.notes == [
        "1 samples without labels are excluded, also as neighbours",
        "only 39 samples have labels, fewer than 100 anchors",
        "random pairs and sums over negatives use 30 samples, a random subset of 39",
        "rates stop at k = 20: only 39 samples have labels",
    ]
    monkeypatch.setattr(definition, "BLOCK_PAIRS", 30)  # some anchors alone: not their others
    weight = measure_repulsion(found, TEMPERATURES)[0]["weight"]
    assert weight["pairs"].sum() == weight["counts"].sum() == found.counts.sum()
    partners = repulsion._draw_others(found.pairs, 0)
    assert (found.pairs.others[partners] != found.pairs.anchors[:, None]).all()
    assert set(partners.reshape(-1).tolist()) == set(range(30))
