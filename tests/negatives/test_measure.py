"""What is measured of near pairs: every number against a loop, and planted cases."""

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from heron.pipeline.config.errors import RetrievalError
from heron.pipeline.negatives import definition, neighbours, repulsion
from heron.pipeline.negatives import measure as statistics
from heron.pipeline.negatives.definition import RELATIONS
from heron.pipeline.negatives.estimates import Estimate
from heron.pipeline.negatives.measure import SHARES, measure_labels
from heron.pipeline.negatives.neighbours import NearPairs, Question, find_neighbours
from heron.pipeline.negatives.repulsion import (
    HARDENINGS,
    Temperatures,
    measure_repulsion,
    near_weights,
)
from heron.pipeline.retrieval.build import build_index
from heron.pipeline.retrieval.embeddings import Embeddings
from tests.retrieval import made

NAMES = ["calm", "keen", "old", "tall", "wise"]
TAU, GAMMA = 0.7, 0.4
TEMPERATURES = Temperatures(TAU, GAMMA)


def unit(vectors: NDArray[Any]) -> NDArray[np.float64]:
    found = vectors.astype(np.float64)
    return np.asarray(found / np.linalg.norm(found, axis=-1, keepdims=True))


def drawn(folder: Path, kind: str = "multi_label", rows: int = 40) -> Embeddings:
    """Random vectors in which labels show a little; sample 7 has none."""
    random = np.random.default_rng(0)
    targets = (random.random((rows, 5)) < 0.4).astype(np.uint8)
    if kind != "multi_label":
        targets = np.eye(5, dtype=np.uint8)[random.integers(0, 5, rows)]
    hidden = random.normal(size=(rows, 6)) + targets @ random.normal(size=(5, 6))
    z, h = random.normal(size=(2, rows, 2, 4))
    known = np.arange(rows) != 7
    vectors: dict[Any, NDArray[Any]] = {"hidden": hidden}
    vectors |= {"projection": unit(z).reshape(rows, 8), "weight": unit(abs(h)).reshape(rows, 8)}
    return made.embeddings(folder, vectors, targets, NAMES, kind, known=known, views=2)


@pytest.fixture(scope="module", params=["multi_label", "multi_class"])
def embeddings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return drawn(tmp_path_factory.mktemp("embeddings") / "e", request.param)


@pytest.fixture(scope="module")
def found(embeddings: Embeddings) -> NearPairs:
    return find_neighbours(embeddings, Question(k=3, anchors=15))


@pytest.fixture(scope="module")
def numbers(found: NearPairs) -> dict[str, Any]:
    return measure_labels(found) | measure_repulsion(found, TEMPERATURES)[0]


@cache
def distance(e: Embeddings, i: int, k: int) -> float:
    a, b = (e.samples.label_names(n) for n in (i, k))
    if e.samples.exclusive:
        return float(a != b)
    return sum((name in a) != (name in b) for name in NAMES) / 5


def others(e: Embeddings, i: int) -> list[int]:
    return [k for k in range(len(e)) if k not in (i, 7)]


def by_hand(e: Embeddings, layer: Any = "hidden") -> tuple[NDArray[np.float64], Callable[..., Any]]:
    """Cosines of all, and the nearest of a sample."""
    x = unit(e.take(layer, np.arange(len(e))))
    cosine = x @ x.T
    return cosine, lambda i, k: sorted(others(e, i), key=lambda j: -cosine[i, j])[:k]


def test_neighbours_are_the_nearest_others_with_labels(
    embeddings: Embeddings, found: NearPairs
) -> None:
    cosine, near = by_hand(embeddings)
    assert len(found.pairs.anchors) == 15 and 7 not in found.pairs.anchors
    assert found.ks == (1, 2, 3, 5, 10, 20) and found.numbers.shape == (15, 20)
    for row, i in enumerate(found.pairs.anchors.tolist()):
        assert found.numbers[row].tolist() == near(i, 20)
        for column, k in enumerate(found.numbers[row].tolist()):
            assert found.cosine[row, column] == pytest.approx(cosine[i, k], abs=1e-5)
            assert found.difference[row, column] / found.pairs.largest == pytest.approx(
                distance(embeddings, i, k)
            )


def hard_from(e: Embeddings, i: int) -> float:
    """The label distance from which on a near sample is a hard negative of i: see `definition`."""
    apart = [distance(e, i, k) for k in others(e, i)]
    return min((d for d in apart if d > 0 and d >= np.median(apart) - 1e-9), default=1.0)


def test_rates_and_relations_by_loops(
    embeddings: Embeddings, found: NearPairs, numbers: dict[str, Any]
) -> None:
    _, near = by_hand(embeddings)
    anchors, largest = found.pairs.anchors.tolist(), found.pairs.largest
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
            groups["close"] += [cosine[i, k]] * (apart <= found.close / found.pairs.largest)
            groups["others"] += [cosine[i, k]] * (apart > found.close / found.pairs.largest)
        least = hard / found.pairs.largest - 1e-9
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
        assert swap["expected"] == confusion["expected"][at] >= statistics.EXPECTED
        assert at[0] != at[1] or not exclusive


@cache
def views_of(e: Embeddings, layer: Any) -> NDArray[np.float64]:
    """[samples, views, dim]."""
    return unit(e.take(layer, np.arange(len(e))).reshape(len(e), 2, 4))


def g_of(e: Embeddings, i: int, k: int, u: int, j: int) -> float:
    """HeroCon, Eq. 4, in float64."""
    z, h = views_of(e, "projection"), views_of(e, "weight")
    near = float(z[i, u] @ h[k, j]), float(z[k, j] @ h[i, u])
    return (math.exp(1 - near[0]) + math.exp(1 - near[1])) / 2


def f_of(e: Embeddings, i: int, k: int, u: int, j: int, tau: float) -> float:
    z = views_of(e, "projection")
    return math.exp(float(z[i, u] @ z[k, j]) / tau)


def test_g_by_label_distance_and_by_cosine(
    embeddings: Embeddings, found: NearPairs, numbers: dict[str, Any]
) -> None:
    weight = numbers["weight"]
    assert weight is not None and numbers["compared_layer"] == "projection"
    views = [(u, j) for u in (0, 1) for j in (0, 1)]
    by_distance: dict[float, list[float]] = {}
    by_cosine: dict[int, list[float]] = {}
    for i in found.pairs.anchors.tolist():
        for k in others(embeddings, i):
            g = float(np.mean([g_of(embeddings, i, k, u, j) for u, j in views]))
            cosine = np.mean([math.log(f_of(embeddings, i, k, u, j, 1)) for u, j in views])
            by_distance.setdefault(round(distance(embeddings, i, k), 6), []).append(g)
            by_cosine.setdefault(int((cosine + 1) * 20), []).append(g)
    for place, apart in enumerate(weight["distance"].tolist()):
        values = by_distance.get(round(apart, 6), [])
        assert weight["pairs"][place] == len(values)
        if values:
            assert weight["by_label"].value[place] == pytest.approx(np.mean(values), rel=1e-5)
    for place, values in by_cosine.items():
        assert weight["counts"][place] == len(values)
        assert weight["by_cosine"].value[place] == pytest.approx(np.mean(values), rel=1e-5)
    near = near_weights(found, TEMPERATURES)
    assert near is not None
    for row, i in enumerate(found.pairs.anchors.tolist()):
        for column, k in enumerate(found.numbers[row, :3].tolist()):
            expected = np.mean([g_of(embeddings, i, k, u, j) for u, j in views])
            assert near[row, column] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("options", [{}, {"first": True}, {"cross_view": True}])
def test_repulsion_shares_by_loops(
    embeddings: Embeddings, found: NearPairs, options: dict[str, Any]
) -> None:
    shares = measure_repulsion(found, Temperatures(TAU, GAMMA, **options))[0]["repulsion"]
    for name, limit in (("same", 0.0), ("close", found.close / found.pairs.largest)):
        plain, weighted, counted = [], [], []
        for i in found.pairs.anchors.tolist():
            by_view = []
            for u in (0,) if options.get("first") else (0, 1):
                sums = np.zeros((2, 2))
                for k in others(embeddings, i):
                    wrong = distance(embeddings, i, k) <= limit
                    for j in (1 - u,) if options.get("cross_view") else (0, 1):
                        f = f_of(embeddings, i, k, u, j, TAU)
                        g = g_of(embeddings, i, k, u, j)
                        sums += np.array([[f, f * wrong], [g * f, g * f * wrong]])
                by_view.append(sums[:, 1] / sums[:, 0])
            near = [distance(embeddings, i, k) <= limit for k in others(embeddings, i)]
            counted.append(np.mean(near))
            plain.append(np.mean(by_view, axis=0)[0])
            weighted.append(np.mean(by_view, axis=0)[1])
        share = shares[name]
        assert share["count"].value == pytest.approx(np.mean(counted))
        assert share["without"].value == pytest.approx(np.mean(plain), rel=1e-5)
        assert share["weighted"].value == pytest.approx(np.mean(weighted), rel=1e-5)
        assert share["ratio"].value == pytest.approx(np.mean(weighted) / np.mean(plain), rel=1e-5)


def test_assumption_1_by_loops(
    embeddings: Embeddings, found: NearPairs, numbers: dict[str, Any]
) -> None:
    for name, limit in (("same", 0.0), ("close", found.close / found.pairs.largest)):
        for kind, (how, value) in HARDENINGS.items():
            holds, undefined = [], 0
            for i in found.pairs.anchors.tolist():
                for u in (0, 1):
                    sums = {True: np.zeros(2), False: np.zeros(2)}
                    for k in others(embeddings, i):
                        collides = distance(embeddings, i, k) <= limit
                        for j in (0, 1):
                            e_g = f_of(embeddings, i, k, u, j, GAMMA)
                            eta = e_g**value if how == "exp" else float(e_g >= math.exp(value))
                            sums[collides] += np.array([eta * e_g, eta])
                    if sums[True][1] and sums[False][1]:
                        expected = {side: total[0] / total[1] for side, total in sums.items()}
                        holds.append(expected[True] >= expected[False])
                    else:
                        undefined += 1
            assumption = numbers["assumption_1"][name][kind]
            assert assumption["holds"].value == pytest.approx(np.mean(holds))
            assert assumption["undefined"] == pytest.approx(undefined / 30)


def test_blocks_make_no_difference(
    found: NearPairs, numbers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (definition, statistics, repulsion):
        monkeypatch.setattr(module, "CELLS", 100)
    monkeypatch.setattr(definition, "LABELS", 10)
    again = find_neighbours(found.embeddings, Question(k=3, anchors=15))
    in_blocks = measure_labels(again) | measure_repulsion(again, TEMPERATURES)[0]
    near = near_weights(found, TEMPERATURES)
    monkeypatch.undo()
    at_once = near_weights(found, TEMPERATURES)
    assert near is not None and at_once is not None
    np.testing.assert_allclose(near, at_once, rtol=1e-6)
    assert (again.counts == found.counts).all() and (again.difference == found.difference).all()

    def same(a: Any, b: Any) -> None:
        if isinstance(a, dict):
            for name in a.keys() - {"histogram"}:
                same(a[name], b[name])
        elif isinstance(a, Estimate):
            same(a.value, b.value)
        elif isinstance(a, np.ndarray | float):  # a cosine may come to the next bin, or rank
            np.testing.assert_allclose(a, b, 1e-5, 1.1e-3)

    same(in_blocks, numbers)


def test_an_index_gives_the_neighbours(embeddings: Embeddings, tmp_path: Path) -> None:
    index = build_index(embeddings, tmp_path / "flat", kind="flat", progress=False)
    question = Question(k=3, anchors=15)
    exact, found = (find_neighbours(embeddings, question, i) for i in (None, index))
    assert (found.numbers == exact.numbers).all()
    np.testing.assert_allclose(found.cosine, exact.cosine, atol=1e-5)
    with pytest.raises(RetrievalError) as fault:
        find_neighbours(embeddings, Question("projection", 3), index)
    assert str(fault.value) == (
        "the index is of the layer 'hidden'; expected 'projection'; give --layer hidden, or leave "
        "--index out for exact neighbours"
    )


def test_examples_name_no_sample_twice(found: NearPairs) -> None:
    chosen = found.examples("hard")
    numbers = [n for row, column in chosen
               for n in (found.pairs.anchors[row], found.numbers[row, column])]  # fmt: skip
    assert chosen and len(set(numbers)) == len(numbers)
    cosines = [found.cosine[row, column] for row, column in chosen]
    assert cosines == sorted(cosines, reverse=True)
    wanted = found.difference[:, :3] >= found.hard[:, None]
    assert cosines[0] == found.cosine[:, :3][wanted].max()


def test_what_is_left_out_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    e = drawn(tmp_path / "e")
    monkeypatch.setattr(neighbours, "OTHERS", 30)
    found = find_neighbours(e, Question(k=3, anchors=100))
    assert len(found.pairs.anchors) == 39 and len(found.pairs.others) == 30
    assert found.counts.sum() == 39 * 30 - 30  # others are anchors too, but not of themselves
    assert found.notes == [
        "1 samples without labels are left out, as neighbours too",
        "100 anchors were asked for; 39 samples have labels",
        "random pairs and sums over negatives are of 30 samples, drawn from 39",
        "rates are of k up to 20: 39 samples have labels",
    ]
    monkeypatch.setattr(definition, "CELLS", 30)  # some anchors alone, which are not their others
    weight = measure_repulsion(found, TEMPERATURES)[0]["weight"]
    assert weight["pairs"].sum() == weight["counts"].sum() == found.counts.sum()
    partners = repulsion._draw_others(found.pairs, 0)
    assert (found.pairs.others[partners] != found.pairs.anchors[:, None]).all()
    assert set(partners.reshape(-1).tolist()) == set(range(30))


def test_questions_without_an_answer_are_refused(tmp_path: Path) -> None:
    e = drawn(tmp_path / "e")
    with pytest.raises(RetrievalError, match=r"k is 39; expected 1 to 38, since 39 samples have"):
        find_neighbours(e, Question(k=39))
    with pytest.raises(RetrievalError, match="k is 0; expected 1 to 38"):
        find_neighbours(e, Question(k=0))
    with pytest.raises(RetrievalError, match="-1 anchors; expected a number of them, or 0 for all"):
        find_neighbours(e, Question(k=3, anchors=-1))
    x = np.ones((4, 3))
    none = made.embeddings(tmp_path / "n", {"hidden": x}, np.zeros((4, 0)), [], "none",
                           known=np.zeros(4, bool))  # fmt: skip
    with pytest.raises(RetrievalError, match="0 of 4 samples have labels; expected two at least"):
        find_neighbours(none, Question(k=1))
    one = made.embeddings(tmp_path / "o", {"hidden": x}, np.ones((4, 1)), ["a"], "multi_class")
    with pytest.raises(RetrievalError, match="all samples with labels in .* have the same ones"):
        find_neighbours(one, Question(k=1))
    with pytest.raises(RetrievalError, match="has no layer 'projection'"):
        find_neighbours(one, Question("projection", 1))
    x[2] = 0
    zero = made.embeddings(tmp_path / "z", {"hidden": x}, np.eye(4), NAMES[:4])
    with pytest.raises(RetrievalError) as fault:
        find_neighbours(zero, Question(k=1))
    assert str(fault.value) == (
        "the vectors of 1 samples are zero or not finite, the first s002; expected vectors with a "
        "direction; embed again, or leave them out"
    )


def test_temperatures_are_the_runs(tmp_path: Path) -> None:
    missing = Temperatures.of_run(tmp_path)
    assert (missing.tau, missing.gamma) == (1.0, 0.5)
    assert missing.source.startswith("the default, since configuration")
    source = Path("configs/faces.yaml").read_text()
    (tmp_path / "config.yaml").write_text(source)
    found = Temperatures.of_run(tmp_path)
    assert found.source == f"objective.weighted_unsupervised.tau of {tmp_path}/config.yaml"
    assert found.pairs(2) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    of_two, of_one = "weighted_unsupervised: {weight: 0.1, tau: 0.1}", "single_view_unsupervised:"
    assert of_two in source
    (tmp_path / "config.yaml").write_text(source.replace(of_two, f"{of_one} {{tau: 0.5}}"))
    of_single = Temperatures.of_run(tmp_path)
    assert of_single.tau == 0.5
    assert of_single.source.endswith("compares inputs with projections; here it is projections")
    assert Temperatures(cross_view=True).pairs(2) == [(0, 1), (1, 0)]
    assert Temperatures(first=True).pairs(2) == [(0, 0), (0, 1)]
    assert Temperatures(cross_view=True).pairs(1) == [(0, 0)]
