"""What pushes pairs apart: g, shares of the repulsion and Assumption 1 against loops."""

import math
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from heron.losses import Loss
from heron.losses.batch import GlobalBatch
from heron.negatives.neighbours import NearPairs
from heron.negatives.repulsion import (
    HARDENINGS,
    Temperatures,
    _summer,
    measure_repulsion,
    near_weights,
)
from heron.retrieval.embeddings import Embeddings
from tests.negatives.loops import (
    GAMMA,
    TAU,
    TEMPERATURES,
    distance,
    others,
    unit,
)


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


def test_sums_over_many_others_are_of_64_bits() -> None:
    values = np.random.default_rng(0).random((2, 300_000), np.float32)
    groups = np.broadcast_to(np.arange(300_000) % 97 // 32, values.shape)  # and 3 now and then
    wanted = [[row[groups[0] == g].sum(dtype=np.float64) for g in range(3)] for row in values]
    np.testing.assert_allclose(_summer(groups)(values), wanted, rtol=1e-12)


@pytest.mark.parametrize("options", [{}, {"first": True}, {"cross_view": True}])
def test_repulsion_shares_by_loops(
    embeddings: Embeddings, found: NearPairs, options: dict[str, Any]
) -> None:
    shares = measure_repulsion(found, Temperatures(TAU, GAMMA, **options))[0]["repulsion"]
    for name, limit in (("same", 0.0), ("close", found.close / found.pairs.max_difference)):
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
    for name, limit in (("same", 0.0), ("close", found.close / found.pairs.max_difference)):
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


class Mine(Loss):
    """A term of someone's own that pushes all others apart, from the first view on."""

    repels_all = True

    def __init__(self, *, tau: float = 0.25, anchors: str = "first") -> None:
        super().__init__()
        self.tau, self.anchors = tau, anchors

    def share(self, batch: GlobalBatch) -> None:
        raise NotImplementedError


def test_a_term_of_ones_own_says_what_it_pushes_apart(tmp_path: Path) -> None:
    lines, path = Path("configs/faces.yaml").read_text(), tmp_path / "config.yaml"
    of_run = "weighted_unsupervised: {weight: 0.1, tau: 0.1}"
    mine = f"tests.negatives.test_repulsion.Mine: {{weight: 0.2}}\n  {of_run}"
    path.write_text(lines.replace(of_run, mine))
    found = Temperatures.of_run(tmp_path)  # of two the heavier one
    assert (found.tau, found.first, found.cross_view) == (0.25, True, False)
    assert found.source == f"objective.tests.negatives.test_repulsion.Mine.tau of {path}"
    for term, pairs in (("cmc", [(0, 1), (1, 0)]), ("nt_xent", list(product(range(2), repeat=2)))):
        path.write_text(lines.replace(of_run, f"{term}: {{weight: 0.1, tau: 0.3}}"))
        found = Temperatures.of_run(tmp_path)
        assert found.pairs(2) == pairs and found.tau == 0.3
    path.write_text(lines.replace(of_run, "nt_xent: {weight: 0}"))
    assert Temperatures.of_run(tmp_path).source == f"the default: {path} has no unsupervised term"


def test_temperatures_are_the_runs(tmp_path: Path) -> None:
    missing = Temperatures.of_run(tmp_path)
    assert (missing.tau, missing.gamma) == (1.0, 0.5)
    assert missing.source.startswith("the default, because configuration")
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
    assert of_single.source.endswith(
        "compares inputs with projections; here, projections are compared"
    )
    assert Temperatures(cross_view=True).pairs(2) == [(0, 1), (1, 0)]
    assert Temperatures(first=True).pairs(2) == [(0, 0), (0, 1)]
    assert Temperatures(cross_view=True).pairs(1) == [(0, 0)]
