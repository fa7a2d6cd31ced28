"""What a manifest vouches for: itself, and the files beside it."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heron.base import artefact
from heron.base.artefact import FileSum, parse_json, sha256
from heron.base.errors import ShardError
from heron.data.reader import Reader
from heron.shards.build import build
from heron.shards.index import ShardIndex
from heron.shards.manifest import load_manifest
from tests.sealed import seal
from tests.shards.tiny import arrays_source


@pytest.fixture
def vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HERON_CACHE", str(tmp_path / "cache"))
    build(arrays_source(tmp_path, 600), tmp_path / "v", progress=False)
    return tmp_path / "v"


def test_every_flipped_bit_of_a_manifest_is_refused_or_means_the_same(vectors: Path) -> None:
    path = vectors / "manifest.json"
    data = path.read_bytes()
    good, harmless = load_manifest(vectors), 0
    flips = np.random.default_rng(0).choice(8 * len(data), 400, replace=False)
    for flip in flips.tolist():
        altered = bytearray(data)
        altered[flip // 8] ^= 1 << flip % 8
        path.write_bytes(altered)
        try:
            assert load_manifest(vectors) == good, f"bit {flip} gave another manifest"
            harmless += 1
        except ShardError as error:
            assert "\n" not in str(error)
    assert harmless <= len(flips) // 100


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"std": [1.0, -1.0, 1.0, 1.0, 1.0]}, "a std is below 0"),
        ({"std": [float("nan")] * 5}, "NaN is not a finite number"),
        ({"mean": [1e31, 0, 0, 0, 0]}, r"mean is not within ±1e\+30"),
        ({"mean": [0.0]}, "1 values of mean do not fit it"),
        ({"mean": ["0", "0", "0", "0", "0"]}, "mean.0 must be a valid number"),
        ({"shape": [2**64]}, "shape.0 must be less"),
        ({"shape": [5.5]}, "shape.0 must be a valid integer"),
        ({"kind": "image"}, "of kind image is uint8 with 3 axes"),
    ],
)
def test_what_a_view_may_not_be(vectors: Path, change: dict[str, Any], message: str) -> None:
    views = json.loads((vectors / "manifest.json").read_text())["views"]
    try:
        seal(vectors / "manifest.json", views=[views[0] | change, *views[1:]])
    except ValueError:  # canonical JSON has no NaN: it comes without a right fingerprint
        text = (vectors / "manifest.json").read_text()
        (vectors / "manifest.json").write_text(text.replace('"std": [', '"std": [NaN, ', 1))
    with pytest.raises(ShardError, match=message):
        load_manifest(vectors)


def test_a_reader_refuses_blocks_and_labels_that_do_not_fit_the_manifest(vectors: Path) -> None:
    path, manifest = vectors / "train-000000.index.npz", load_manifest(vectors)
    good, index = (vectors / "manifest.json").read_text(), ShardIndex.read(path)
    assert manifest.block_rows is not None
    seal(vectors / "manifest.json", block_rows=manifest.block_rows * 2)
    with pytest.raises(ShardError, match="samples must have 512 rows"):
        Reader(vectors).sample_key(0)
    negative = index.rows.copy()
    negative[0], negative[-1] = -negative[0], index.rows.sum() + negative[0] * 2
    outside = index.labels.copy()
    outside[0] = 7
    for change, message in [
        ({"rows": negative}, "labels|samples of -"),
        ({"labels": outside}, "labels must be 0 to 3, got 7 in row 0"),
        ({"labels": index.labels.astype(np.int32)}, "got int32 .*"),
        ({"labels": index.labels[:, None]}, "got int64 .*"),
        ({"offsets": index.offsets - 10**6}, "a member begins before the tar does"),
    ]:
        replace(index, **change).write(path)
        tree = json.loads(good)
        shard = tree["splits"]["train"][0]
        shard |= {"index_sha256": sha256(path), "index_bytes": path.stat().st_size}
        (vectors / "manifest.json").write_text(good)
        seal(vectors / "manifest.json", splits=tree["splits"])
        with pytest.raises(ShardError, match=message):
            Reader(vectors).sample_key(0)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"a": 1, "a": 2}', "key 'a' occurs twice"),
        (b"1e400", "1e400 is not a finite number"),
        (b"[NaN]", "NaN is not a finite number"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"a": ' + b"9" * 5000 + b"}", "digits"),
        (b"\xff", "not JSON \\(not UTF-8 at byte 0\\)"),
    ],
)
def test_json_that_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_json(data)


def test_an_endless_manifest_is_not_read(vectors: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artefact, "MAX_MANIFEST_BYTES", 100)
    with pytest.raises(ShardError, match="more than 100 bytes"):
        load_manifest(vectors)


def test_a_file_is_hashed_once_and_again_when_it_changed(
    vectors: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, hashed = vectors / "train-000000.tar", list[Path]()
    written = FileSum.of(path)

    def counted(path: Path) -> str:
        hashed.append(path)
        return sha256(path)

    monkeypatch.setattr(artefact, "sha256", counted)
    assert [written.fault(path), written.fault(path)] == ["", ""]
    assert hashed == [path]
    data = bytearray(path.read_bytes())
    data[600] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    assert "was altered: its sha256 is" in written.fault(path)
    assert "was altered" in written.fault(path)  # nothing remembers it as whole
    assert written.fault(path, read=False) == ""
    path.write_bytes(data[:-1])
    assert f"has {len(data) - 1:,} bytes instead of 40,960" in written.fault(path, read=False)
    path.unlink()
    assert "No such file" in written.fault(path)


def test_a_cache_that_cannot_be_written_costs_a_process_one_reading(
    vectors: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, hashed = vectors / "train-000000.tar", list[Path]()
    written = FileSum.of(path)
    monkeypatch.setenv("HERON_CACHE", str(path))  # a file

    def counted(path: Path) -> str:
        hashed.append(path)
        return written.sha256

    monkeypatch.setattr(artefact, "sha256", counted)
    assert [written.fault(path), written.fault(path)] == ["", ""]
    assert hashed == [path]
