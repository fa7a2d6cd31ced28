"""An index of vectors in memory: its neighbours are those of an exact search; kept and opened."""

import gc
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import heron
from heron.base.errors import RetrievalError
from heron.cli.main import main
from heron.retrieval.query import Retriever
from tests.retrieval.made import clustered

N = 700
Z = clustered(N)
NAMES = ["Beach", "Urban", "Red field"]
Y = np.random.default_rng(5).integers(0, 2, (N, 3))
UNIT = Z / np.linalg.norm(Z, axis=1, keepdims=True)


@pytest.fixture(scope="module")
def index() -> heron.Index:
    return heron.Index.build(Z, labels=Y, label_names=NAMES)


def test_neighbours_are_those_of_an_exact_search(index: heron.Index) -> None:
    found = index.search(torch.from_numpy(Z[:5]), k=10, where="Beach and not Urban")
    allowed = np.flatnonzero((Y[:, 0] == 1) & (Y[:, 1] == 0))
    for query, (numbers, scores) in enumerate(zip(*found, strict=True)):
        cosines = UNIT[allowed] @ UNIT[query]
        order = np.argsort(-cosines)[:10]
        assert numbers.tolist() == allowed[order].tolist()
        np.testing.assert_allclose(scores, cosines[order], atol=1e-6)
    assert (index.search(Z).numbers[:, 0] == np.arange(N)).all()
    both = index.search(Z[:3], 2, "Urban", np.arange(N) < 50)
    assert (both.numbers < 50).all() and (Y[both.numbers, 1] == 1).all()


@pytest.mark.parametrize("kind", ["ivf", "ivfpq", "hnsw"])
def test_other_kinds_find_most(kind: Any) -> None:
    found = heron.Index.build(Z, kind=kind, metric="euclidean", keys=[f"k{n}" for n in range(N)])
    assert found.manifest.kind == kind and found.samples.key(3) == "k3"
    itself = found.search(Z, 1).numbers[:, 0] == np.arange(N)
    assert itself.mean() > (0.6 if kind == "ivfpq" else 0.95)


def test_what_is_saved_is_opened_and_asked(
    index: heron.Index, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "kept"
    index.save(folder)
    opened = heron.Index.open(folder)
    ours, theirs = opened.search(Z[:9]), index.search(Z[:9])
    assert (ours.numbers == theirs.numbers).all() and (ours.scores == theirs.scores).all()
    assert main(["query", str(folder), "--key", "4", "--where", "'Red field'", "--k", "3"]) == 0
    told = capsys.readouterr().out
    assert "the index, because it was built from vectors in memory" in told and "Red field" in told
    with pytest.raises(RetrievalError, match="already exists; choose another --out"):
        index.save(folder)
    retriever = Retriever.open(folder)
    with pytest.raises(RetrievalError, match="has no model; query by a key or a vec"):
        retriever.by_file(folder / "face.jpg")
    with pytest.raises(RetrievalError, match="has no data set; pass the shards of the vec"):
        retriever.picture(0)


def test_its_files_go_with_it() -> None:
    found = heron.Index.build(Z[:20])
    folder = found.folder
    assert (folder / "index.faiss").exists()
    del found
    gc.collect()
    assert not folder.exists()


@pytest.mark.parametrize("dtype", ["uint8", "uint64", "bool", "int8", "float32"])
def test_labels_of_classes_are_of_any_type(dtype: str) -> None:
    samples = heron.Index.build(np.eye(3, 4), np.array([0, 1, 1]).astype(dtype)).samples
    assert samples.names == ["0", "1"] and samples.targets.tolist() == [[1, 0], [0, 1], [0, 1]]


def test_labels_of_classes_and_of_some() -> None:
    classes = np.where(Y[:, 0] == 1, 2, -1)
    found = heron.Index.build(Z, labels=classes, label_names=["a", "b", "c"])
    assert found.samples.kind == "multi_class"
    assert (found.samples.known == (Y[:, 0] == 1)).all()
    assert (Y[found.search(Z[:4], 5, "c").numbers, 0] == 1).all()
    assert heron.Index.build(Z, labels=Y.astype(np.float32)).samples.names == ["0", "1", "2"]
    assert heron.Index.build(Z, labels=torch.from_numpy(classes)).samples.names == ["0", "1", "2"]
    with pytest.raises(RetrievalError, match="these samples have no labels; remove the filter"):
        heron.Index.build(Z).search(Z[:1], where="Beach")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"vectors": Z[0]}, "vectors must be numbers [rows, dim], one vector for each sample"),
        ({"vectors": Z.astype(str)}, "such as `Model.encode` returns, got <U32 [700, 16]"),
        ({"labels": Y[:5]}, "labels must be 700 class numbers [rows], -1 where unknown, "
         "or 0 and 1 [rows, names], one column for each label, in the order of `label_names`, g"),
        ({"labels": np.arange(N) * 10**7}, "at most 1,048,575, got 6,990,000,000; number"),
        ({"labels": Y / 2}, "`label_names`, got float64 [700, 3]"),
        ({"labels": Y + 1}, "labels must be 0 to 1, got 2 in row 0; they must be 700 class"),
        ({"labels": Y - 1}, "labels: not all are 0 or 1; they must be 700 class numbers"),
        ({"labels": Y, "label_names": ["a"]}, "multi_label labels must be uint8 (700, 1), got"),
        ({"labels": Y, "label_names": ["a", "a", "b"]}, "two labels have the name 'a'"),
        ({"keys": ["a"]}, "there must be one key for each of 700 vectors, got 1 keys"),
        ({"keys": ["a"] * N}, "699 keys occur twice, first 'a' in samples 0 and 1"),
        ({"vectors": np.where(np.arange(N)[:, None] == 7, 0, Z)}, "1 of 700 vectors are zero, "
         "which has no cosine: '7'"),
        ({"kind": "tree"}, "kind must be one of flat, ivf, sq8, rabitq, binary, "
         "ivfpq, hnsw"),
        ({"vectors": Z[:0]}, "the array has no vectors to index"),
    ],
)  # fmt: skip
def test_what_does_not_fit(given: dict[str, Any], told: str) -> None:
    with pytest.raises(RetrievalError, match=re.escape(told)):
        heron.Index.build(**({"vectors": Z} | given))


def test_a_filter_that_is_none(index: heron.Index) -> None:
    with pytest.raises(RetrievalError, match="no label named 'Beech'.*Did you mean Beach"):
        index.search(Z[:1], where="Beech")
    with pytest.raises(RetrievalError, match="no sample passes the filter 'Urban and not Urban'"):
        index.search(Z[:1], where="Urban and not Urban")
    with pytest.raises(RetrievalError, match=r"allowed must be bool \[700\], .*, got bool \[3\]"):
        index.search(Z[:1], where="Urban", allowed=np.ones(3, bool))


@pytest.mark.parametrize(
    ("query", "k", "message"),
    [
        (Z[:2] + 1j, 3, "queries must be numbers [queries, 16], got complex64 [2, 16]"),
        ("a", 3, "queries must be numbers [queries, 16], got <U1 []"),
        (Z[:2], 2.5, "k must be 1 to 700, the number of vectors in the index, got 2.5"),
    ],
)
def test_queries_that_are_none(query: Any, k: Any, message: str) -> None:
    with pytest.raises(RetrievalError) as fault:
        heron.Index.build(Z).search(query, k=k)
    assert str(fault.value).startswith(message)
