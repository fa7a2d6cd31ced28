"""An index finds what comparing all vectors finds, says how well, and refuses what is not its."""

from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
from numpy.typing import NDArray

from heron.base.errors import RetrievalError
from heron.retrieval import build
from heron.retrieval.build import build_index
from heron.retrieval.embeddings import Embeddings
from heron.retrieval.index import Index, Neighbours
from heron.retrieval.index_files import INDEX
from heron.retrieval.index_plan import KINDS, LISTED, METRICS, Kind, Metric, Plan, VectorSet
from heron.retrieval.inverted_file import train, write_lists
from heron.retrieval.recall import ExactSearch
from heron.retrieval.vectors import LayerVectors
from tests.retrieval.made import clustered, unlabelled

N, DIM, GB = 1500, 16, 10**9


@pytest.fixture(scope="module")
def embeddings(tmp_path_factory: pytest.TempPathFactory) -> Embeddings:
    return unlabelled(tmp_path_factory.mktemp("made") / "embeddings", clustered(N))


@pytest.fixture(scope="module")
def indices(
    embeddings: Embeddings, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[Kind, bool], Index]:
    """Of every kind, in memory and, but for HNSW, mapped; opened from disk."""
    folder, found = tmp_path_factory.mktemp("indices"), {}
    reading = VectorSet(count=N, dim=DIM, part_bytes=N // 2 * DIM * 4).reading_bytes
    for kind in KINDS:
        for mapped in (False, True)[: 1 if kind == "hnsw" else 2]:
            out = folder / f"{kind}-{mapped}"
            budget = reading + 1000 if mapped else GB
            options: Any = {"memory_bytes": budget, "queries": 100, "k": 5, "progress": False}
            build_index(embeddings, out, kind=kind, recall=0.9, **options)
            found[kind, mapped] = Index.open(out)
            assert found[kind, mapped].manifest.plan.mapped == mapped
    return found


def by_hand(
    vectors: NDArray[Any], query: NDArray[Any], metric: Metric, allowed: NDArray[np.bool_]
) -> list[tuple[float, int]]:
    """Scores and numbers of all that are allowed, the nearest first, in float64."""
    x, y = vectors.astype(np.float64), query.astype(np.float64)
    scores = x @ y
    if metric == "cosine":
        scores /= np.sqrt((x * x).sum(1)) * np.sqrt(y @ y)
    if metric == "euclidean":
        scores = np.sqrt(((x - y) ** 2).sum(1))
    pairs = [(float(scores[number]), int(number)) for number in np.flatnonzero(allowed)]
    return sorted(pairs, reverse=metric != "euclidean")


@pytest.mark.parametrize("metric", METRICS)
def test_flat_is_exact(embeddings: Embeddings, metric: Metric, tmp_path: Path) -> None:
    build_index(embeddings, tmp_path / "index", metric=metric, progress=False)
    index = Index.open(tmp_path / "index")
    assert index.manifest.kind == "flat" and index.manifest.normalised == (metric == "cosine")
    queries, everything = clustered(3, seed=5), np.ones(N, bool)
    found = index.search(queries, 7)
    assert found.numbers.dtype == np.int64 and found.scores.dtype == np.float32
    for row, query in enumerate(queries):
        expected = by_hand(clustered(N), query, metric, everything)[:7]
        assert found.numbers[row].tolist() == [number for _, number in expected]
        np.testing.assert_allclose(found.scores[row], [s for s, _ in expected], rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("metric", METRICS)
def test_scores_are_those_of_the_metric(
    kind: Kind, metric: Metric, embeddings: Embeddings, tmp_path: Path
) -> None:
    build_index(embeddings, tmp_path / "i", kind=kind, metric=metric, progress=False)
    index = Index.open(tmp_path / "i")
    found = index.search(clustered(2), 4)
    near = {"ivfpq": 0.1, "rabitq": 0.05, "sq8": 0.02}.get(kind, 1e-4)
    for row, query in enumerate(clustered(2).astype(np.float64)):
        scores = {n: s for s, n in by_hand(clustered(N), query, metric, np.ones(N, bool))}
        expected = [scores[number] for number in found.numbers[row].tolist()]
        np.testing.assert_allclose(found.scores[row], expected, rtol=near, atol=max(near, 3e-3))
    ordered = np.sort(found.scores, 1)
    np.testing.assert_array_equal(
        found.scores, ordered if metric == "euclidean" else ordered[:, ::-1]
    )


@pytest.mark.parametrize("kind", ["flat", *LISTED])
def test_the_file_is_that_of_faiss(
    kind: Kind, indices: dict[tuple[Kind, bool], Index], embeddings: Embeddings, tmp_path: Path
) -> None:
    """Bare FAISS adds all vectors at once and writes; the bytes are the same."""
    index = indices[kind, False]
    plan, vectors = index.manifest.plan, LayerVectors(embeddings, "hidden", "cosine")
    everything = np.concatenate([block for _, block in vectors.blocks()])
    if kind == "flat":
        bare = faiss.IndexFlat(DIM, faiss.METRIC_INNER_PRODUCT)
        written = index.folder / INDEX
    else:
        bare = train(vectors, plan, np.arange(0, N, 2))
        assigned = bare.quantizer.search(everything, 1)[1][:, 0]
        written = tmp_path / "ours"
        write_lists(written, bare, vectors.blocks(), assigned)
    bare.add(everything)
    faiss.write_index(bare, str(tmp_path / "bare"))
    assert written.read_bytes() == (tmp_path / "bare").read_bytes()


@pytest.mark.parametrize("kind", ["flat", *LISTED])
def test_vectors_lie_in_memory_in_any_order(kind: Kind) -> None:
    vectors = clustered(N)  # those of a data frame stand column by column
    numbers = [
        Index.build(given, kind=kind, memory_bytes=GB).search(vectors[:50], 5).numbers.tolist()
        for given in (vectors, np.asfortranarray(vectors))
    ]
    assert numbers[0] == numbers[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_mapped_index_finds_the_same(kind: Kind, indices: dict[tuple[Kind, bool], Index]) -> None:
    index, other = indices[kind, False], indices[kind, kind != "hnsw"]
    if kind in LISTED:  # the least training sample, so other centroids
        exact, same = (i.search(clustered(20), 5, allowed=np.ones(N, bool)) for i in (index, other))
        assert np.mean(exact.numbers[:, 0] == same.numbers[:, 0]) > 0.5
    else:
        assert_same(index.search(clustered(9), 5), other.search(clustered(9), 5))
    numbers = np.array([N - 1, 0, 7])
    unit = clustered(N) / np.linalg.norm(clustered(N), axis=1, keepdims=True)
    for held in (index, other):
        slack = {"ivfpq": 0.35, "rabitq": 0.35, "sq8": 0.01}.get(kind, 1e-6)
        np.testing.assert_allclose(held.vectors(numbers), unit[numbers], atol=slack)
        with pytest.raises(RetrievalError, match="must be 0 to 1499 in .*, got 0 to 1500"):
            held.vectors(np.array([0, N]))


def assert_same(a: Neighbours, b: Neighbours) -> None:
    np.testing.assert_array_equal(a.numbers, b.numbers)
    np.testing.assert_array_equal(a.scores, b.scores)


@pytest.mark.parametrize("kind", KINDS)
def test_recall_is_what_a_recount_says(kind: Kind, indices: dict[tuple[Kind, bool], Index]) -> None:
    """The queries are the draw of seed 0; each is left out of what is found and of the truth."""
    index = indices[kind, False]
    measured = index.manifest.recall
    assert measured is not None and (measured.k, measured.queries) == (5, 100)
    own = np.sort(np.random.default_rng(0).permutation(N)[:100])
    hits = []
    for number, found in zip(own, index.search(clustered(N)[own], 6).numbers, strict=True):
        near = by_hand(clustered(N), clustered(N)[number], "cosine", np.arange(N) != number)
        others = [n for n in found.tolist() if n != number][:5]
        hits.append(len({n for _, n in near[:5]} & set(others)) / 5)
    assert np.mean(hits) == pytest.approx(measured.value, abs=2e-3)
    setting = next(iter(index.manifest.search.values()), 0)
    curve = {point.setting: point.recall for point in measured.curve}
    assert curve[setting] == measured.value and list(curve) == sorted(curve)
    assert measured.reached == (measured.value >= 0.9)
    if measured.reached:  # and no cheaper one does
        assert all(value < 0.9 for tried, value in curve.items() if tried < setting)


def test_queries_do_not_train(
    embeddings: Embeddings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, NDArray[np.int64]] = {}

    def spy(vectors: LayerVectors, plan: Plan, training: NDArray[np.int64], gpu: bool) -> Any:
        seen["training"] = training
        return train(vectors, plan, training, gpu)

    measure = build.measure

    def watch(held: Any, vectors: LayerVectors, plan: Plan, own: Any, *more: Any) -> Any:
        seen["own"] = own
        return measure(held, vectors, plan, own, *more)

    monkeypatch.setattr(build, "train", spy)
    monkeypatch.setattr(build, "measure", watch)
    build_index(embeddings, tmp_path / "i", kind="ivf", queries=80, progress=False)
    assert len(seen["own"]) == 80 and len(seen["training"]) == N - 80
    assert not set(seen["own"].tolist()) & set(seen["training"].tolist())


def test_among_equal_vectors_any_is_right(tmp_path: Path) -> None:
    vectors = np.repeat(clustered(4), 25, axis=0)
    manifest = build_index(
        unlabelled(tmp_path / "e", vectors), tmp_path / "i", kind="ivf", progress=False
    )
    assert manifest.recall is not None and manifest.recall.value == 1


def test_recall_by_hand() -> None:
    """Vectors on a line at 0, 1, 2, ...: of query 0 the two nearest are 1 and 2."""
    line = np.arange(6, dtype=np.float32)[:, None]
    truth = ExactSearch(
        lambda n: line[n], [(0, line[:4]), (4, line[4:])], np.array([0]), 2, faiss.METRIC_L2
    )
    assert truth.numbers.tolist() == [[1, 2]] and truth.scores.tolist() == [[1.0, 4.0]]
    for found, expected in (([0, 1, 2], 1), ([0, 2, 3], 0.5), ([1, 2, 0], 1), ([3, 4, -1], 0)):
        assert truth.recall(np.array([found])) == expected

    def search(queries: Any, k: int, setting: int) -> NDArray[np.int64]:
        return np.array([[0, 1, 2] if setting >= 11 else [0, 1, 5]])

    setting, told = truth.tune(search, 1, 64, 0.9)
    assert (setting, told.value, told.reached) == (11, 1.0, True)
    assert [point.setting for point in told.curve] == [1, 2, 4, 8, 10, 11, 12, 16]
    setting, told = truth.tune(search, 1, 8, 0.9)
    assert (setting, told.value, told.reached) == (1, 0.5, False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.002, 0.05, 0.3, 0.8])
def test_a_filter_returns_k_where_k_exist(
    kind: Kind, share: float, indices: dict[tuple[Kind, bool], Index]
) -> None:
    index, queries = indices[kind, False], clustered(12, seed=3)
    allowed = np.random.default_rng(1).random(N) < share
    allowed[[3, 700]] = True
    there, k = int(allowed.sum()), 6
    found = index.search(queries, k, allowed=allowed)
    agree = []
    for row, query in enumerate(queries.astype(np.float64)):
        got = found.numbers[row]
        assert (got >= 0).sum() == min(k, there) == len(set(got[got >= 0].tolist()))
        assert allowed[got[got >= 0]].all()
        assert (np.isnan(found.scores[row]) == (got < 0)).all()
        expected = [n for _, n in by_hand(clustered(N), query, "cosine", allowed)[:k]]
        agree.append(len(set(expected) & set(got.tolist())) / len(expected))
    least = {"flat": 1, "ivf": 0.8, "sq8": 0.8, "rabitq": 0.7, "ivfpq": 0.4, "hnsw": 0.9}
    assert np.mean(agree) >= least[kind]


@pytest.mark.parametrize("kind", ["ivf", "hnsw"])
def test_the_search_widens_until_k_are_found(
    kind: Kind, indices: dict[tuple[Kind, bool], Index], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that is allowed lies about other centres than the query's, and few are looked at."""
    index = indices[kind, False]
    monkeypatch.setattr(index, "setting", 1)
    monkeypatch.setattr(index, "_filtered_setting", lambda share: 1)
    allowed = np.arange(N) % 30 > 14
    found = index.search(clustered(6), 40, allowed=allowed)
    assert (found.numbers >= 0).all() and allowed[found.numbers].all()
    for kept in (0, 1):  # at last all are compared
        few = np.zeros(N, bool)
        few[: kept * 1000 : 100] = True
        assert (
            (index.search(clustered(6), 12, allowed=few).numbers >= 0).sum(1) == few.sum()
        ).all()
    if kind == "ivf":  # without a filter as well: lists of 39 vectors cannot give 200
        index.faiss.nprobe = 1
        assert (index.search(clustered(6), 200).numbers >= 0).all()
        index.faiss.nprobe = index.manifest.search["nprobe"]


def test_what_cannot_be_searched_is_refused(indices: dict[tuple[Kind, bool], Index]) -> None:
    index = indices["flat", False]
    queries = clustered(4)
    for k in (0, N + 1):
        with pytest.raises(
            RetrievalError, match=f"k must be 1 to 1,500, .* in the index, got {k}$"
        ):
            index.search(queries, k)
    assert index.search(queries, N).numbers.shape == (4, N)
    with pytest.raises(RetrievalError, match=r"queries must be \[queries, 16\], .*, got \[4, 15\]"):
        index.search(queries[:, 1:], 3)
    with pytest.raises(RetrievalError, match=r"queries must be \[queries, 16\], .*, got \[16\]"):
        index.search(queries[0], 3)
    for value in (np.nan, np.inf, 1e30):
        broken = queries.copy()
        broken[[1, 3], 2] = value
        with pytest.raises(
            RetrievalError, match="2 of 4 vectors are not finite.*: query 1, query 3"
        ):
            index.search(broken, 3)
    with pytest.raises(RetrievalError, match="1 of 4 vectors are zero.*: query 2; remove"):
        index.search(queries * np.array([[1], [1], [0], [1]]), 3)
    with pytest.raises(RetrievalError, match=r"allowed must be bool \[1500\], .*, got bool \[3\]"):
        index.search(queries, 3, allowed=np.ones(3, bool))


@pytest.mark.parametrize("kind", KINDS)
def test_predicted_bytes_are_those_of_the_file(
    kind: Kind, indices: dict[tuple[Kind, bool], Index]
) -> None:
    known = indices[kind, False].manifest
    table = 4 * known.plan.lists * known.plan.subvectors * 2**known.plan.bits * known.plan.table
    predicted = known.plan.index_bytes - table
    assert predicted == pytest.approx(known.files[INDEX].bytes, rel=0.2)
