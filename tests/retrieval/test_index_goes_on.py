"""An index of an inverted file whose build is killed: the next one does only what is missing."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from heron.base.atomic import Kept, cache_folder
from heron.base.errors import InUse
from heron.base.workers import Processes
from heron.retrieval import build
from heron.retrieval.build import build_index
from heron.retrieval.embeddings import Embeddings
from heron.retrieval.index_files import kept_beside
from heron.retrieval.index_plan import RequestedKind
from heron.retrieval.inverted_file import _Assigner, train
from tests.retrieval import made

PARTS = 6
OPTIONS: dict[str, Any] = {"kind": "ivf", "queries": 20, "k": 5, "map": "none"}


@pytest.fixture
def embeddings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Embeddings:
    monkeypatch.setenv("HERON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(made, "PARTS", PARTS)
    return made.unlabelled(tmp_path / "e", made.clustered(2000))


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is done, in order: `train`, and the numbers of parts that are assigned."""
    found, call = list[Any](), _Assigner.__call__

    def training(*arguments: Any) -> Any:
        found.append("train")
        return train(*arguments)

    def assigning(job: _Assigner, part: int) -> Any:
        if found[-1:] == ["stop"]:
            raise KeyboardInterrupt
        found.append(part)
        return call(job, part)

    monkeypatch.setattr(build, "train", training)
    monkeypatch.setattr(_Assigner, "__call__", assigning)
    return found


Interrupted = Callable[..., None]


@pytest.fixture
def interrupted(
    embeddings: Embeddings, done: list[Any], monkeypatch: pytest.MonkeyPatch
) -> Interrupted:
    """Builds an index, which ends after some parts are assigned; then nothing counts as done."""
    put = Kept.put

    def build_part(out: Path | str, after: int = 3, **options: Any) -> None:
        def stopping(kept: Any, name: str, data: bytes) -> None:
            put(kept, name, data)
            if name.endswith(f"-{after - 1}"):
                done.append("stop")

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Kept, "put", stopping)
            build_index(embeddings, out, progress=False, **OPTIONS | options)
        done.clear()

    return build_part


def bytes_of(folder: Path) -> bytes:
    return (folder / "index.faiss").read_bytes()


@pytest.mark.parametrize("kind", ["ivf", "sq8", "rabitq", "ivfpq"])
def test_an_interrupted_build_goes_on(
    kind: RequestedKind,
    embeddings: Embeddings,
    done: list[Any],
    interrupted: Interrupted,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = OPTIONS | {"kind": kind}
    build_index(embeddings, tmp_path / "one", progress=False, **options)
    assert done == ["train", *range(PARTS)]
    done.clear()
    out = tmp_path / "two"
    interrupted(out, 4, **options)
    assert not out.exists() and kept_beside(out).is_dir()
    capsys.readouterr()
    build_index(embeddings, out, **options)
    assert done == [4, 5]
    assert capsys.readouterr().out == "an unfinished index goes on: 4 of 6 parts are assigned\n"
    assert bytes_of(out) == bytes_of(tmp_path / "one")
    assert {path.name for path in tmp_path.glob(".*")} == set()


KILLED = """
import os, signal, sys
from heron.retrieval.build import build_index
from heron.retrieval.embeddings import Embeddings
from heron.base.atomic import Kept
from tests.retrieval.test_index_goes_on import OPTIONS
put = Kept.put
def killing(kept, name, data):
    put(kept, name, data)
    if name.endswith("-2"):
        (kept.folder / ".3.part").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
Kept.put = killing
build_index(Embeddings.open(sys.argv[1]), sys.argv[2], progress=False, **OPTIONS)
"""


def test_a_killed_build_goes_on_in_other_processes_and_does_the_damaged_again(
    embeddings: Embeddings, done: list[Any], tmp_path: Path
) -> None:
    build_index(embeddings, tmp_path / "one", progress=False, **OPTIONS)
    out, words = tmp_path / "two", [sys.executable, "-c", KILLED, str(embeddings.folder)]
    for _ in range(2):  # the second finds all of it, and is killed on part 2, which is damaged
        killed = subprocess.run([*words, str(out)], check=False)
        assert killed.returncode == -signal.SIGKILL
        (part,) = kept_beside(out).glob("*-2")
        data = bytearray(part.read_bytes())
        data[40] ^= 1
        part.write_bytes(data)
    next(kept_beside(out).glob("*-1")).write_bytes(b"")
    done.clear()
    build_index(embeddings, out, progress=False, **OPTIONS)
    assert done == [1, 2, 3, 4, 5]
    assert bytes_of(out) == bytes_of(tmp_path / "one") and not kept_beside(out).exists()


@pytest.mark.parametrize("what", ["trained", "plan"])
def test_damaged_centroids_or_settings_begin_anew(
    what: str,
    embeddings: Embeddings,
    done: list[Any],
    interrupted: Interrupted,
    tmp_path: Path,
) -> None:
    interrupted(tmp_path / "i")
    path = kept_beside(tmp_path / "i") / what
    path.write_bytes(path.read_bytes()[:-1])
    build_index(embeddings, tmp_path / "i", progress=False, **OPTIONS)
    # Centroids are trained again to the last bit; lists of others would not be used.
    assert done == ["train", *range(3 if what == "trained" else 0, PARTS)]


@pytest.mark.parametrize(
    ("change", "said"),
    [({"metric": "euclidean"}, r"metric cosine"), ({"seed": 3}, "seed 0"), ({}, "embeddings sha2")],
    ids=["metric", "seed", "embeddings"],
)
def test_other_settings_begin_anew(
    change: dict[str, Any],
    said: str,
    embeddings: Embeddings,
    done: list[Any],
    interrupted: Interrupted,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    interrupted(tmp_path / "i")
    if not change:
        embeddings = made.unlabelled(tmp_path / "other", made.clustered(2000, seed=1))
    build_index(embeddings, tmp_path / "i", progress=False, **OPTIONS | change)
    assert done == ["train", *range(PARTS)]
    out = capsys.readouterr().out
    assert out.startswith(f"what was unfinished, with other settings ({said}")
    assert out.endswith(f"is now in {tmp_path / '.i.kept-1'}\n")
    assert [*(tmp_path / ".i.kept-1").glob("*-2")] and not kept_beside(tmp_path / "i").exists()


def test_other_processes_assign_what_is_missing(
    embeddings: Embeddings, done: list[Any], tmp_path: Path, interrupted: Interrupted
) -> None:
    build_index(embeddings, tmp_path / "one", progress=False, **OPTIONS)
    interrupted(tmp_path / "two")
    build_index(embeddings, tmp_path / "two", progress=False, executor=Processes(2), **OPTIONS)
    assert bytes_of(tmp_path / "two") == bytes_of(tmp_path / "one")


def test_a_url_whose_put_breaks(
    embeddings: Embeddings, done: list[Any], tmp_path: Path, interrupted: Interrupted
) -> None:
    build_index(embeddings, tmp_path / "one", progress=False, **OPTIONS)
    url = "memory://goes-on/index"
    interrupted(url)
    assert [*cache_folder().glob("index-*/*-2")]
    build_index(embeddings, url, progress=False, **OPTIONS)
    assert done == [3, 4, 5] and not [*cache_folder().glob("index-*")]
    data = fsspec.filesystem("memory").cat_file("/goes-on/index/index.faiss")
    assert data == bytes_of(tmp_path / "one")


def test_a_url_needs_no_cache(
    embeddings: Embeddings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("HERON_CACHE", str(tmp_path / "file" / "cache"))
    build_index(embeddings, "memory://no-cache/index", progress=False, **OPTIONS)
    assert fsspec.filesystem("memory").exists("/no-cache/index/manifest.json")


def test_two_builds_to_a_url(embeddings: Embeddings, monkeypatch: pytest.MonkeyPatch) -> None:
    def again(*_: Any) -> None:
        build_index(embeddings, "memory://two/index", progress=False, **OPTIONS)

    monkeypatch.setattr(build, "make", again)
    with pytest.raises(InUse, match="^memory://two/index is being written by process"):
        again()


def test_what_is_kept_of_a_part_is_not_of_its_length(
    embeddings: Embeddings, done: list[Any], tmp_path: Path, interrupted: Interrupted
) -> None:
    interrupted(tmp_path / "i")
    kept = Kept.__new__(Kept)
    kept.folder = kept_beside(tmp_path / "i")
    kept.put(next(kept.folder.glob("*-1")).name, b"12345")
    kept.put(next(kept.folder.glob("trained")).name, b"12345")
    build_index(embeddings, tmp_path / "i", progress=False, **OPTIONS)
    assert done == ["train", 1, 3, 4, 5]
