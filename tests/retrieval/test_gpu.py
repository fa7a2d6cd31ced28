"""What is asked of GPUs, by stand-ins of FAISS's functions; the refusal where there are none."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from heron.base.errors import RetrievalError
from heron.cli.retrieval import index as index_verb
from heron.cli.retrieval import query, serve
from heron.retrieval.build import build_index
from heron.retrieval.embeddings import Embeddings
from heron.retrieval.index import Index
from heron.retrieval.index_files import INDEX
from heron.retrieval.index_plan import KINDS, Kind
from heron.training.mining import mine
from tests.retrieval.made import clustered, unlabelled

N = 400


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Embeddings:
    return unlabelled(tmp_path_factory.mktemp("gpu") / "e", clustered(N))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One GPU, whose functions are those of the processor and say that they were called."""
    made: list[str] = []

    def recorded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            made.append(name)
            return function(*given, **named)

        return call

    def knn_gpu(resources: object, *given: Any, metric: int) -> Any:
        assert resources == "resources"
        return faiss.knn(*given, metric=metric)

    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 1)
    monkeypatch.setattr(faiss, "StandardGpuResources", lambda: "resources", raising=False)
    monkeypatch.setattr(faiss, "knn_gpu", recorded("knn", knn_gpu), raising=False)
    monkeypatch.setattr(faiss, "index_cpu_to_all_gpus", recorded("copy", lambda index: index))
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_an_index_is_built_with_gpus_and_stored_as_ever(
    kind: Kind, stored: Embeddings, calls: list[str], tmp_path: Path
) -> None:
    options: Any = {"kind": kind, "queries": 20, "k": 3, "progress": False}
    if kind == "ivfpq":
        stored = unlabelled(tmp_path / "more", clustered(1000))
    build_index(stored, tmp_path / "plain", **options)
    assert calls == []
    build_index(stored, tmp_path / "i", gpu=True, **options)
    copies = 0 if kind in ("flat", "hnsw") else 2  # of what k-means compares with, and centroids
    assert calls == ["copy"] * copies + ["knn"] * 2  # and exact search, of two files
    if kind != "hnsw":  # whose links vary with threads
        assert (tmp_path / "i" / INDEX).read_bytes() == (tmp_path / "plain" / INDEX).read_bytes()


def test_searches_are_of_the_copy_where_there_is_no_filter(
    stored: Embeddings, calls: list[str], tmp_path: Path
) -> None:
    build_index(stored, tmp_path / "i", progress=False)
    index = Index.open(tmp_path / "i", gpu=True)
    assert calls == ["copy"] and index.gpu is not None
    expected = Index.open(tmp_path / "i").search(clustered(3), 4).numbers
    np.testing.assert_array_equal(index.search(clustered(3), 4).numbers, expected)
    query(str(tmp_path / "i"), key="s007", gpu=True)
    assert calls == ["copy", "copy"]


@pytest.mark.parametrize("kind", ["hnsw", "rabitq"])
def test_a_kind_without_a_search_on_gpus_is_refused(
    kind: Kind, stored: Embeddings, calls: list[str], tmp_path: Path
) -> None:
    build_index(stored, tmp_path / "i", kind=kind, progress=False)
    message = (
        f"{kind}, which FAISS cannot search on a GPU; remove --gpu, or build one of flat, ivf, sq8"
    )
    with pytest.raises(RetrievalError, match=message):
        Index.open(tmp_path / "i", gpu=True)
    assert len(Index.open(tmp_path / "i").search(clustered(3), 4).numbers) == 3


def test_mining_searches_on_the_gpu(calls: list[str]) -> None:
    x, y = clustered(50), np.eye(5, dtype=np.float32)[np.arange(50) % 5]
    plain = mine(x, y, np.arange(50), 3, exclusive=True)
    assert calls == []
    np.testing.assert_array_equal(mine(x, y, np.arange(50), 3, True, gpu=True), plain)
    assert calls == ["knn"]


def test_without_a_gpu_the_package_is_named(
    stored: Embeddings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_index(stored, tmp_path / "i", progress=False)
    x, y = clustered(9), np.eye(3, dtype=np.float32)[np.arange(9) % 3]
    uses: list[Callable[[], object]] = [
        lambda: index_verb(str(stored.folder), out=str(tmp_path / "j"), gpu=True, quiet=True),
        lambda: query(str(tmp_path / "i"), key="s007", gpu=True),
        lambda: serve(str(tmp_path / "i"), port=0, gpu=True),
        lambda: mine(x, y, np.arange(9), 2, True, gpu=True),
    ]
    for why in (r"1\S+ is built without them", "sees none"):
        for use in uses:
            message = (
                rf"FAISS {why}; it must be faiss-gpu, .*: pip install 'heron-pretrain\[gpu\]', or"
            )
            with pytest.raises(RetrievalError, match=message):
                use()
        monkeypatch.setattr(faiss, "get_num_gpus", lambda: 0)
        monkeypatch.setattr(faiss, "StandardGpuResources", object, raising=False)
