"""Embeddings and indexes behind a URL: the bytes of a folder, whole or not there."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest

from heron.base.errors import InUse, RetrievalError, ShardError
from heron.base.workers import Processes
from heron.cli.main import main
from heron.retrieval import build, locations
from heron.retrieval.build import build_index
from heron.retrieval.embed import Embedder, embed
from heron.retrieval.embed_tasks import embed_on
from heron.retrieval.embeddings import Embeddings
from heron.retrieval.index import Index
from heron.retrieval.query import Retriever
from heron.shards.remote import Remote
from heron.shards.store import open_store
from tests.retrieval.test_embed import SMALL, files
from tests.retrieval.test_embed import run as run  # a fixture
from tests.retrieval.test_embed import whole as whole
from tests.shards.test_object_stores import s3 as s3


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HERON_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def url() -> str:
    """A folder of fsspec's file system in memory, which forgets no folder."""
    return f"memory://{uuid4().hex}/faces"


def remote_files(url: str) -> dict[str, str]:
    """The checksum of every file behind a URL, by its name from there on."""
    store = open_store(url)
    found: dict[str, str] = {}
    for name in store.names() or ():
        if "." in name:
            found[name] = sha256(store.read_bytes(name)).hexdigest()
        else:
            found |= {f"{name}/{n}": data for n, data in remote_files(f"{url}/{name}").items()}
    return found


def test_embeddings_behind_a_url_are_those_of_a_folder(
    url: str, run: Path, whole: Embeddings
) -> None:
    embed(run, url, SMALL, progress=False)
    assert remote_files(url) == files(whole.folder)
    there = Embeddings.open(url)
    assert there.where == url and len(there) == len(whole)
    for layer in whole.layers:
        for (a, x), (b, y) in zip(there.blocks(layer, 50), whole.blocks(layer, 50), strict=True):
            assert a == b
            np.testing.assert_array_equal(x, y)
    numbers = np.array([3, 369, 100], np.int64)
    np.testing.assert_array_equal(there.take("hidden", numbers), whole.take("hidden", numbers))
    embed(run, url, SMALL, progress=False)  # finds everything there
    assert remote_files(url) == files(whole.folder)


def test_s3_and_processes(s3: str, run: Path, whole: Embeddings) -> None:
    url = "s3://shards/embedded"
    embed_on(Processes(2), run, url, SMALL, progress=False)
    assert remote_files(url) == files(whole.folder)


def test_an_embedding_goes_on_where_it_was_stopped(
    url: str, run: Path, whole: Embeddings, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, done = Remote.put, list[str]()

    def breaking(remote: Remote, name: str, path: Path) -> None:
        if name == "00002.npy":
            raise ShardError("the network is gone")
        done.append(name)
        put(remote, name, path)

    with monkeypatch.context() as patch:
        patch.setattr(Remote, "put", breaking)
        with pytest.raises(ShardError, match="the network is gone"):
            embed(run, url, SMALL, progress=False)
    assert "manifest.json" not in remote_files(url)
    with pytest.raises(RetrievalError, match="this is an unfinished `heron embed`; run the same"):
        Embeddings.open(url)
    parts = list[int]()
    run_parts = Embedder.run

    def counted(embedder: Embedder, missing: Any) -> Iterator[int]:
        parts.extend(missing)
        return run_parts(embedder, missing)

    monkeypatch.setattr(Embedder, "run", counted)
    embed(run, url, SMALL, progress=False)
    assert parts == [2, 3, 4, 5]  # 0 and 1 were whole
    assert remote_files(url) == files(whole.folder)


def test_other_settings_and_files_of_others_are_refused(url: str, run: Path) -> None:
    embed(run, url, SMALL, progress=False)
    before = remote_files(url)
    with pytest.raises(RetrievalError, match=r"has embeddings with other settings: .*part_rows.*;"):
        embed(run, url, replace(SMALL, part_rows=100), progress=False)
    with pytest.raises(ShardError, match="--overwrite moves a folder aside"):
        embed(run, url, SMALL, progress=False, overwrite=True)
    with pytest.raises(RetrievalError, match=" already has files; choose another --out"):
        build_index(Embeddings.open(url), url, queries=20, k=5, progress=False)
    assert remote_files(url) == before
    place = url + "-other"
    assert remote_files(url + "/parts")  # a folder without a plan
    with pytest.raises(RetrievalError, match="already has files"):
        embed(run, url + "/parts", SMALL, progress=False)
    embed(run, place, SMALL, progress=False)  # what the message says to do


def test_an_index_behind_a_url_answers_as_one_on_disk(
    url: str, whole: Embeddings, tmp_path: Path, cache: Path
) -> None:
    options: dict[str, Any] = {"kind": "ivf", "queries": 20, "k": 5, "progress": False}
    build_index(whole, tmp_path / "index", **options)
    build_index(whole, url, **options)
    here, there = files(tmp_path / "index"), remote_files(url)
    assert {n: b for n, b in there.items() if n != "manifest.json"} == {
        n: b for n, b in here.items() if n != "manifest.json"
    }
    ours, theirs = Index.open(tmp_path / "index"), Index.open(url)
    assert theirs.where == url
    queries = whole.take("hidden", np.arange(9))
    for a, b in zip(ours.search(queries, 7), theirs.search(queries, 7), strict=True):
        np.testing.assert_array_equal(a, b)
    theirs.save(tmp_path / "copy")
    assert files(tmp_path / "copy") == there
    answer = Retriever.open(url).by_key(theirs.samples.key(5), 4)
    assert [hit.key for hit in answer.hits] == [
        hit.key for hit in Retriever.open(tmp_path / "index").by_key(ours.samples.key(5), 4).hits
    ]


def test_an_index_that_was_not_put_whole_is_not_there(
    url: str, whole: Embeddings, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = Remote.put

    def breaking(remote: Remote, name: str, path: Path) -> None:
        if name == "manifest.json":
            raise ShardError("the network is gone")
        put(remote, name, path)

    with monkeypatch.context() as patch:
        patch.setattr(Remote, "put", breaking)
        with pytest.raises(ShardError, match="the network is gone"):
            build_index(whole, url, queries=20, k=5, progress=False)
    with pytest.raises(
        RetrievalError, match=r"has no manifest\.json; pass a folder that `heron in"
    ):
        Index.open(url)
    build_index(whole, url, queries=20, k=5, progress=False)
    assert len(Index.open(url)) == len(whole)


def test_a_file_that_was_altered_is_refused(url: str, whole: Embeddings) -> None:
    build_index(whole, url, queries=20, k=5, progress=False)
    import fsspec

    path = url.removeprefix("memory:/") + "/index.faiss"
    fs = fsspec.filesystem("memory")
    data = bytearray(fs.cat_file(path))
    data[-1] ^= 1
    fs.pipe_file(path, bytes(data))
    with pytest.raises(ShardError, match="index.faiss"):
        Index.open(url)


def test_the_verbs(
    url: str, run: Path, whole: Embeddings, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    embedded, indexed = f"{url}/embeddings", f"{url}/index"
    assert main(["embed", str(run), "--out", embedded, "--quiet"]) == 0
    assert f"{embedded}: 370 embeddings" in capsys.readouterr().out
    assert (
        main(["index", embedded, "--out", indexed, "--queries", "20", "--k", "5", "--quiet"]) == 0
    )
    assert f"{indexed}: flat of 370 vectors" in capsys.readouterr().out
    key = whole.samples.key(0)
    assert main(["query", indexed, "--key", key, "--k", "3"]) == 0
    assert "found   3 of 3 requested" in capsys.readouterr().out
    assert main(["query", indexed, "--key", key, "--embeddings", embedded, "--k", "3"]) == 0
    assert f"the embeddings of {embedded}" in capsys.readouterr().out
    report = str(tmp_path / "report")
    assert main(["negatives", embedded, "--out", report, "--k", "5", "--anchors", "50"]) == 0
    assert (
        main(["negatives", embedded, "--index", indexed, "--out", f"{report}-2", "--k", "5"]) == 0
    )


def test_files_are_held_only_while_they_are_read(
    url: str, run: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embed(run, url, SMALL, progress=False)
    there = Embeddings.open(url)
    assert there.fetched is not None
    held = len(there.fetched._held)
    for _ in there.blocks("hidden"):
        assert len(there.fetched._held) == held  # the samples' files alone
    folder = there.fetched.folder
    assert folder.is_dir()
    del there
    assert not folder.exists()


def test_threads_read_the_same_part(url: str, run: Path, whole: Embeddings) -> None:
    """As those of a server do, for the vectors of samples that are queried."""
    embed(run, url, SMALL, progress=False)
    there = Embeddings.open(url)
    begin = threading.Barrier(8)

    def take(n: int) -> bool:
        begin.wait()
        numbers = np.array([n % 3, 369 - n % 2], np.int64)
        return all(
            np.array_equal(there.take("hidden", numbers), whole.take("hidden", numbers))
            for _ in range(40)
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(take, range(8)))
    assert there.fetched is not None
    assert not [name for name in there.fetched._held if "/" in name]


def test_a_folder_is_listed_once(
    url: str, run: Path, whole: Embeddings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many parts there are: a billion rows have 15,000, and as many are not there yet."""
    listed, read = list[str](), list[str]()
    names, fetch = Remote.names, Remote.fetch

    def counted(remote: Remote) -> set[str] | None:
        listed.append(remote.where())
        return names(remote)

    def noted(remote: Remote, name: str, *args: Any, **more: Any) -> None:
        read.append(name)
        fetch(remote, name, *args, **more)

    monkeypatch.setattr(Remote, "names", counted)
    monkeypatch.setattr(Remote, "fetch", noted)
    embed(run, url, SMALL, progress=False)
    assert sorted(listed) == [url, f"{url}/parts"]  # is it taken; which parts are there
    assert read.count("00003.json") == 1  # once it was written, for the manifest
    listed.clear()
    embed(run, url, SMALL, progress=False)
    assert sorted(listed) == [url, *(f"{url}/{n}" for n in sorted([*whole.layers, "parts"]))]


def test_names_below_a_url() -> None:
    assert locations.subfolder("s3://a/b", "hidden/00000.npy") == ("s3://a/b/hidden", "00000.npy")
    assert locations.subfolder("s3://a/b/", "x.npy") == ("s3://a/b/", "x.npy")
    assert locations.subfolder("https://h/b?sig=1", "h/0.npy") == ("https://h/b/h?sig=1", "0.npy")


def test_two_builds_to_a_url(url: str, whole: Embeddings, monkeypatch: pytest.MonkeyPatch) -> None:
    def again(*_: Any) -> None:
        build_index(whole, url, kind="flat", progress=False)

    monkeypatch.setattr(build, "make", again)
    with pytest.raises(InUse, match=f"^{url} is being written by process"):
        again()
