"""Builds behind a URL: whole and checked, the manifest last; what fails reads as unfinished."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from heron.base.artefact import sha256
from heron.base.errors import ShardError
from heron.base.workers import Processes
from heron.cli.main import main
from heron.shards.build import build
from heron.shards.manifest import load_manifest
from heron.shards.remote import Remote
from heron.shards.source import Source
from heron.shards.store import open_store
from heron.shards.verify import verify
from heron.sources import make_source
from tests.shards.test_build import contents
from tests.shards.test_object_stores import s3 as s3  # a fixture
from tests.sources.test_captions import folder

ROWS = {"train": 600, "test": 100}  # four shards


def source(seed: int = 0) -> Source:
    return make_source("frames", ROWS | {"seed": seed})


@pytest.fixture
def local(tmp_path: Path) -> dict[str, bytes]:
    build(source(), tmp_path / "local", shard_rows=256, progress=False)
    return contents(tmp_path / "local")


@pytest.fixture
def url() -> Iterator[str]:
    """A folder of fsspec's file system in memory."""
    import fsspec

    yield "memory://bucket/faces"
    fs = fsspec.filesystem("memory")
    for path in fs.find("/bucket"):
        fs.rm(path)


def remote_contents(url: str) -> dict[str, bytes]:
    store = open_store(url)
    return {name: store.read_bytes(name) for name in sorted(store.names() or ())}


def test_s3_has_the_bytes_of_a_disk(s3: str, local: dict[str, bytes], tmp_path: Path) -> None:
    url = "s3://shards/built"
    build(source(), url, shard_rows=256, executor=Processes(2), progress=False)
    assert remote_contents(url) == local
    assert verify(url).ok and load_manifest(url) == load_manifest(tmp_path / "local")


def test_texts_have_their_tokenizer_there(url: str, tmp_path: Path) -> None:
    words = ["shards", "build", "captions", "--folder", str(folder(tmp_path)), "--quiet"]
    assert main([*words, "--out", str(tmp_path / "local")]) == 0
    assert main([*words, "--out", url]) == 0
    found = contents(tmp_path / "local")
    assert remote_contents(url) == found and any("tokenizer" in name for name in found)


def test_the_verb(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["shards", "build", "frames", "--train", "600", "--test", "100", "--out", url]
    for said in ("train 600 rows in 1 shard", "is complete: train 600 rows"):
        assert main(words) == 0
        assert f"{url}" in (out := capsys.readouterr().out) and said in out
    assert main([*words, "--seed", "3"]) == 1
    error = capsys.readouterr().err
    assert "has another build: its seed is 0, not 3; choose another --out, or rem" in error
    assert main([*words, "--overwrite"]) == 1
    assert "--overwrite moves a folder aside, which object stores can" in capsys.readouterr().err
    assert main([*words[:-1], "http://127.0.0.1:1/set"]) == 1
    assert "files cannot be put by HTTP; choose another --out" in capsys.readouterr().err


class Broken(Exception):
    """What the wire does."""


@pytest.mark.parametrize("broken", ["train-000001.index.npz", "train-000001.tar", "manifest.json"])
def test_a_put_that_breaks_off_leaves_an_unfinished_build(
    broken: str,
    url: str,
    local: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cut files lie there, as of a kill; the next build puts them anew, and no finished shard."""
    put, asked = Remote.put, list[str]()

    def breaks(self: Remote, name: str, path: Path) -> None:
        asked.append(name)
        if name == broken:
            fs, root = self._connect()
            if name != "manifest.json":  # which a reader refuses by its fingerprint, if it is cut
                fs.pipe_file(f"{root}/{name}", path.read_bytes()[:700])
            raise Broken(name)
        put(self, name, path)

    with monkeypatch.context() as patch:
        patch.setattr(Remote, "put", breaks)
        with pytest.raises(Broken):
            build(source(), url, shard_rows=256, progress=False)
    assert asked[:4] == ["build.json", "train-000000.index.npz", "train-000000.tar", asked[3]]
    with pytest.raises(ShardError, match="an unfinished build; run the same"):
        verify(url)
    asked.clear()
    broken = ""
    monkeypatch.setattr(Remote, "put", breaks)
    build(source(), url, shard_rows=256, progress=False)
    assert remote_contents(url) == local
    assert not [name for name in asked if name.startswith("train-000000")]
    if broken == "manifest.json":
        assert asked == ["build.json", "manifest.json"]


def test_a_file_that_comes_altered_is_put_again(
    url: str, local: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    monkeypatch.setattr("heron.shards.remote.Retry.pause", lambda *_: 0)
    put, altered = MemoryFileSystem.put_file, list[str]()

    def alters(self: Any, lpath: str, rpath: str, **options: Any) -> None:
        put(self, lpath, rpath, **options)
        if rpath.endswith("1.tar") and len(altered) < limit:
            altered.append(rpath)
            data = bytearray(self.cat_file(rpath))
            data[len(altered)] ^= 1
            self.pipe_file(rpath, bytes(data))

    monkeypatch.setattr(MemoryFileSystem, "put_file", alters)
    limit = 1
    build(source(), url, shard_rows=256, progress=False)
    assert altered and remote_contents(url) == local
    limit = 9
    altered.clear()
    checksum = sha256(tmp_path / "local" / "train-000001.tar")
    with pytest.raises(ShardError, match=f"1.tar: .* instead of .* with sha256 {checksum}"):
        build(source(), f"{url}-2", shard_rows=256, progress=False)
    assert len(altered) == 2


def test_records_of_another_build_are_not_taken(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tars were removed by hand, and their records were not."""
    put = Remote.put

    def breaks(self: Remote, name: str, path: Path) -> None:
        if name == "manifest.json":
            raise Broken(name)
        put(self, name, path)

    with monkeypatch.context() as patch:
        patch.setattr(Remote, "put", breaks)
        with pytest.raises(Broken):
            build(source(1), url, shard_rows=256, progress=False)
    with pytest.raises(ShardError, match="has another build: its seed is 1, not 0"):
        build(source(), url, shard_rows=256, progress=False)
    remote = open_store(url).remote  # type: ignore[attr-defined]
    remote.remove([name for name in remote.names() if name.endswith(".tar")])
    build(source(), url, shard_rows=256, progress=False)
    assert verify(url).ok and load_manifest(url).built_from.options["seed"] == 0


def test_what_cannot_be_put_says_why(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ShardError, match=r"no such file.*; make the bucket or folder first"):
        build(source(), "s3://nowhere/set", shard_rows=256, progress=False)
    record = json.dumps({"format": 1, "fingerprint": "sha256:0"}).encode()
    store = open_store("s3://shards/odd")
    fs, root = store.remote._connect()  # type: ignore[attr-defined]
    fs.pipe_file(f"{root}/train-000000.made.json", record)
    with pytest.raises(
        ShardError, match=r"odd/train-000000.made.json: its fingerprint .*; remove i"
    ):
        build(source(), "s3://shards/odd", shard_rows=256, progress=False)
