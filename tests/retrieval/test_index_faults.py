"""What an index refuses: vectors, options, damaged files, those of another model."""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from heron.base.errors import InUse, RetrievalError
from heron.retrieval import build
from heron.retrieval.build import build_index
from heron.retrieval.embeddings import Embeddings
from heron.retrieval.index import Index
from heron.retrieval.index_files import INDEX
from tests.retrieval.made import clustered, unlabelled
from tests.sealed import seal

N = 1500


@pytest.fixture(scope="module")
def embeddings(tmp_path_factory: pytest.TempPathFactory) -> Embeddings:
    return unlabelled(tmp_path_factory.mktemp("made") / "embeddings", clustered(N))


@pytest.fixture(scope="module")
def index(embeddings: Embeddings, tmp_path_factory: pytest.TempPathFactory) -> Index:
    out = tmp_path_factory.mktemp("indices") / "flat"
    build_index(embeddings, out, kind="flat", queries=100, k=5, progress=False)
    return Index.open(out)


def test_vectors_that_faiss_must_not_see(tmp_path: Path) -> None:
    vectors = clustered(60)
    vectors[[2, 40]] = np.nan
    with pytest.raises(RetrievalError, match=r"1 of 30 vectors are not finite.*: 's002'; remove"):
        build_index(unlabelled(tmp_path / "nan", vectors), tmp_path / "i", progress=False)
    vectors[[2, 40]] = 0
    embeddings = unlabelled(tmp_path / "zero", vectors)
    with pytest.raises(RetrievalError, match=r"are zero, which has no cosine: 's002'; remove"):
        build_index(embeddings, tmp_path / "i", progress=False)
    assert [path.name for path in tmp_path.iterdir() if "i" in path.name] == []
    build_index(embeddings, tmp_path / "i", metric="euclidean", progress=False)
    twice = [f"s{number % 59}" for number in range(60)]
    with pytest.raises(RetrievalError, match="1 keys occur twice, first 's0'"):
        build_index(
            unlabelled(tmp_path / "keys", clustered(60), keys=twice),
            tmp_path / "j",
            progress=False,
        )


def test_options_that_make_no_sense(embeddings: Embeddings, tmp_path: Path) -> None:
    for options in ({"recall": 0.0}, {"recall": 1.1}, {"k": 0}, {"queries": 0}):
        with pytest.raises(RetrievalError, match="recall must be above 0 and at most 1"):
            build_index(embeddings, tmp_path / "i", **options)
    with pytest.raises(RetrievalError, match="metric must be one of cosine, .*, got 'hamming'"):
        build_index(embeddings, tmp_path / "i", metric="hamming")  # type: ignore[arg-type]
    with pytest.raises(RetrievalError, match="has no layer 'weight', only hidden"):
        build_index(embeddings, tmp_path / "i", layer="weight")


def test_a_lone_vector(tmp_path: Path) -> None:
    build_index(unlabelled(tmp_path / "e", clustered(1)), tmp_path / "i", progress=False)
    index = Index.open(tmp_path / "i")
    assert index.manifest.recall is None
    assert index.search(clustered(1), 1).numbers.tolist() == [[0]]


def damage(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / INDEX
        path.write_bytes(change(path.read_bytes()))

    return apply


def edit(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: seal(folder / "manifest.json", **changes)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (damage(lambda x: x[:-1]), "has 96,044 bytes instead of 96,045; restore it, or build"),
        (
            damage(lambda x: x[:-1] + b"\7"),
            "faiss was altered: its sha256 is .* instead of .*; restore it",
        ),
        (damage(lambda x: b"ours" + x[4:]), "instead of .*; restore it, or build the index again"),
        (
            lambda f: (f / INDEX).unlink(),
            "No such file or directory; restore it, or build the index",
        ),
        (lambda f: (f / "keys.npy").write_bytes(b"?" * 7628), "keys.npy was altered: its sha256"),
        (lambda f: (f / "manifest.json").unlink(), "has no manifest.json.*heron index"),
        (
            lambda f: (f / "manifest.json").write_text("{"),
            r"the manifest of an index .*manifest.json: not JSON \(line 1: .*; build the i",
        ),
        (
            edit(format=1),
            "format is 1, but this version of heron reads 2; build the index again",
        ),
        (
            lambda f: (f / "manifest.json").write_text('{"format": 2, "fingerprint": "x"}'),
            "manifest of an index .*: its fingerprint is 'x', its content has",
        ),
        (edit(surprise=1), "surprise: extra inputs are not permitted"),
    ],
)
def test_damage_is_found_before_faiss_reads(
    harm: Callable[[Path], Any],
    message: str,
    index: Index,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copytree(index.folder, tmp_path / "index")
    Index.open(tmp_path / "index")
    harm(tmp_path / "index")
    monkeypatch.setattr(faiss, "read_index", lambda *_: pytest.fail("FAISS reads what is damaged"))
    with pytest.raises(RetrievalError, match=message):
        Index.open(tmp_path / "index")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": N + 1}, "vectors: 1500 instead of 1501; samples: 1500 instead of 1501"),
        ({"dim": 8}, "dimensions: 16 instead of 8"),
        (
            {"metric": "euclidean", "normalised": False, "compared_by": "euclidean"},
            "the metric of FAISS: 0 instead of 1",
        ),
    ],
)
def test_a_manifest_of_another_index(
    changes: Any, message: str, index: Index, tmp_path: Path
) -> None:
    shutil.copytree(index.folder, tmp_path / "index")
    edit(**changes)(tmp_path / "index")
    with pytest.raises(RetrievalError, match=message):
        Index.open(tmp_path / "index")


def test_embeddings_of_another_model(embeddings: Embeddings, index: Index, tmp_path: Path) -> None:
    index.check(embeddings)
    other = unlabelled(tmp_path / "other", clustered(N), checkpoint="e" * 64)
    with pytest.raises(RetrievalError, match="checkpoint e{19}, not c{19}; fingerprint sha"):
        index.check(other)
    fewer = unlabelled(tmp_path / "fewer", clustered(N)[:, :8], keys=[f"k{n}" for n in range(N)])
    with pytest.raises(RetrievalError, match=r"keys .*, not .*; dimension 8, not 16"):
        index.check(fewer)


def test_a_folder_appears_when_it_is_whole(
    embeddings: Embeddings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "deep" / "index"
    left = out.with_name(".index.part")
    left.mkdir(parents=True)
    (left / "of-a-killed-build").write_text("")

    def fail(*_: Any) -> None:
        assert not out.exists() and (left / INDEX).exists()
        with pytest.raises(InUse, match=rf"index is being written by process {os.getpid()} on"):
            build_index(embeddings, out, progress=False)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(build, "measure", fail)
        with pytest.raises(KeyboardInterrupt):
            build_index(embeddings, out, progress=False)
    assert list(out.parent.iterdir()) == []
    build_index(embeddings, out, progress=False)
    assert [path.name for path in out.parent.iterdir()] == ["index"]
    files = {"index.faiss", "keys.npy", "rows.npy", "targets.npy", "known.npy", "labels.json"}
    assert {path.name for path in out.iterdir()} == files | {"map.npy", "manifest.json"}
    with pytest.raises(RetrievalError, match="already exists; choose another --out"):
        build_index(embeddings, out, progress=False)


def test_a_build_that_loses_the_race_leaves_the_others_index(
    embeddings: Embeddings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "index"

    def other_build_ends(*_: Any) -> tuple[int, None]:
        shutil.copytree(embeddings.folder, out)
        return 0, None

    with monkeypatch.context() as patch:
        patch.setattr(build, "measure", other_build_ends)
        with pytest.raises(RetrievalError, match="index already exists; choose another --out"):
            build_index(embeddings, out, kind="flat", progress=False)
    assert [*tmp_path.iterdir()] == [out] and (out / "manifest.json").exists()
    assert Embeddings.open(out).manifest == embeddings.manifest
    build_index(embeddings, tmp_path / "another", kind="flat", progress=False)
    Index.open(tmp_path / "another")


@pytest.mark.parametrize("finished", [True, False])
def test_another_build_that_ends_as_this_one_begins(
    embeddings: Embeddings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: bool
) -> None:
    out, locks = tmp_path / "index", list[Any]()

    def lock(*arguments: Any) -> None:
        if not locks:  # between the opening of the lock file and the lock
            out.with_name(".index.lock").unlink()
            if finished:
                shutil.copytree(embeddings.folder, out)
        locks.append(arguments)
        flock(*arguments)

    flock = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", lock)
    if finished:
        with pytest.raises(RetrievalError, match="already exists; choose another --out"):
            build_index(embeddings, out, kind="flat", progress=False)
    else:
        build_index(embeddings, out, kind="flat", progress=False)
    assert [*tmp_path.iterdir()] == [out] and len(locks) == 2


def test_a_build_that_clears_up_keeps_others_out(
    embeddings: Embeddings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, remove = tmp_path / "index", shutil.rmtree

    def slow(work: Path, **options: Any) -> None:
        for path in work.glob("*"):
            path.unlink()
        with pytest.raises(InUse, match="index is being written by process"):
            build_index(embeddings, out, kind="flat", progress=False)
        remove(work, **options)

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", slow)
        patch.setattr(build, "measure", fail)
        with pytest.raises(KeyboardInterrupt):
            build_index(embeddings, out, kind="flat", progress=False)
    assert [*tmp_path.iterdir()] == []


def test_a_link_to_an_empty_folder_gets_the_index(embeddings: Embeddings, tmp_path: Path) -> None:
    disk, link = tmp_path / "disk" / "index", tmp_path / "link"
    disk.mkdir(parents=True)
    link.symlink_to(disk)
    build_index(embeddings, link, progress=False)
    assert link.is_symlink() and len(Index.open(disk)) == len(Index.open(link)) == len(embeddings)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "link"]


def test_the_folder_that_one_is_in_is_filled_and_stays(
    embeddings: Embeddings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here := tmp_path / "here").mkdir()
    monkeypatch.chdir(here)
    build_index(embeddings, Path("."), progress=False)
    assert [*tmp_path.iterdir()] == [here] and Path.cwd() == here
    Index.open(".")


def test_altered_samples_are_not_copied(tmp_path: Path) -> None:
    embeddings = unlabelled(tmp_path / "e", clustered(40))
    path = tmp_path / "e" / "labels.json"
    path.write_text(path.read_text().replace("multi_label", "multi-label"))
    with pytest.raises(RetrievalError, match=r"labels.json was altered: its sha256 .*restore it"):
        build_index(embeddings, tmp_path / "i", progress=False)
