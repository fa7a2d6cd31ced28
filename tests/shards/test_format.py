"""What is on disk: tars any reader reads, indexes, manifests, and their errors."""

import gc
import json
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset

from heron.base.errors import ShardError
from heron.shards.build import build
from heron.shards.index import ShardIndex, array_at, map_arrays
from heron.shards.manifest import Labels, load_manifest
from heron.shards.tarball import walk
from heron.sources import make_source
from tests.sealed import seal
from tests.shards.tiny import arrays_of, arrays_source, whole


@pytest.fixture
def vectors(tmp_path: Path) -> Path:
    build(arrays_source(tmp_path, 600), tmp_path / "v", shard_rows=256, progress=False)
    return tmp_path / "v"


def test_vectors_round_trip(vectors: Path, tmp_path: Path) -> None:
    source = arrays_source(tmp_path, 600)
    manifest = load_manifest(vectors)
    rows = whole(source, "train")
    assert {split: manifest.rows(split) for split in manifest.splits} == {"train": 592, "test": 8}
    assert [shard.samples for shard in manifest.splits["train"]] == [256, 256, 80]
    first = 0
    for shard in manifest.splits["train"]:
        index = ShardIndex.read(vectors / shard.index_file)
        stop = first + shard.samples
        np.testing.assert_array_equal(index.labels, rows.labels[first:stop])
        assert index.starts.tolist() == [0, shard.samples]
        for view in manifest.views:
            column = index.column(f"{view.name}.npy")
            places = index.offsets[:, column], index.lengths[:, column]
            (block,) = map_arrays(vectors / shard.file, *places)
            assert isinstance(block.base, np.memmap) and not block.flags.writeable
            assert block.dtype == np.float32
            np.testing.assert_array_equal(block, rows.views[view.name][first:stop])
        first = stop


def test_statistics_are_those_of_the_train_split(vectors: Path, tmp_path: Path) -> None:
    rows = whole(arrays_source(tmp_path, 600), "train")
    for view in load_manifest(vectors).views:
        assert view.mean is not None and view.std is not None
        values = np.asarray(rows.views[view.name], np.float64)
        np.testing.assert_allclose(view.mean, values.mean(0), rtol=1e-12)
        np.testing.assert_allclose(view.std, values.std(0), rtol=1e-12)


def plain_samples(tar: Path) -> list[dict[str, Any]]:
    samples = list(webdataset.WebDataset(str(tar), shardshuffle=False))
    gc.collect()  # it leaves the tar open: warn here, where that is expected
    return samples


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_plain_webdataset_reads_the_same_bytes(vectors: Path, tmp_path: Path) -> None:
    (sample,) = plain_samples(vectors / "train-000000.tar")
    rows = whole(arrays_source(tmp_path, 600), "train")
    assert sample["__key__"] == "train-000000"
    for name in ("view1", "view2"):
        stored = np.load(BytesIO(sample[f"{name}.npy"]))
        np.testing.assert_array_equal(stored, rows.views[name][:256])

    faces = make_source("faces", {"train": 5, "test": 0, "size": 32})
    build(faces, tmp_path / "faces", progress=False)
    samples = plain_samples(tmp_path / "faces" / "train-000000.tar")
    rows = whole(faces, "train")
    assert [sample["__key__"] for sample in samples] == rows.keys
    assert [sample["jpg"] for sample in samples] == rows.views["image"]
    labels = [np.load(BytesIO(sample["labels.npy"])) for sample in samples]
    np.testing.assert_array_equal(np.concatenate(labels), rows.labels)


def test_index_says_what_a_walk_of_the_tar_finds(vectors: Path) -> None:
    index = ShardIndex.read(vectors / "train-000002.index.npz")
    places = [place for _, place in walk(vectors / "train-000002.tar")]
    assert [place.offset for place in places] == index.offsets.ravel().tolist()
    assert [place.length for place in places] == index.lengths.ravel().tolist()
    with pytest.raises(ShardError, match="no member 'jpg'; it has view1.npy, view2.npy"):
        index.column("jpg")


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2, ",  # no end
        "{'descr': '<f4', 'fortran_order': False, 'shape': (02,), }",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (0, -2), }",
        "{'descr': '|O', 'fortran_order': False, 'shape': (0,), }",
    ],
)
def test_headers_of_arrays_that_are_none(header: str) -> None:
    data = b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header.encode()
    with pytest.raises(ShardError, match="^a.tar(:| is not an npy array at byte 0) "):
        array_at(np.frombuffer(data, np.uint8), 0, len(data), "a.tar")


@pytest.mark.parametrize(("flag", "value"), [(6, 128), (8, 1), (10, 97)])
def test_a_damaged_index_is_an_error(vectors: Path, flag: int, value: int) -> None:
    """Of its zip: a version that is none, encryption, a method of compression."""
    data = bytearray((vectors / "train-000000.index.npz").read_bytes())
    data[data.index(b"PK\1\2") + flag] = value
    with pytest.raises(
        ShardError, match="^a.index.npz is not an index .*, which is an npz of keys"
    ):
        ShardIndex.parse(bytes(data), "a.index.npz")


def test_arrays_of_a_tar_share_one_mapping(tmp_path: Path) -> None:
    source = arrays_source(tmp_path, 600)
    build(source, tmp_path / "v", shard_rows=512, progress=False)
    tar = tmp_path / "v" / "train-000000.tar"
    index = ShardIndex.read(tar.with_suffix(".index.npz"))
    offsets, lengths = index.offsets[:, 1], index.lengths[:, 1]
    blocks = map_arrays(tar, offsets, lengths)
    assert len(blocks) == 2 and blocks[0].base is blocks[1].base
    rows = whole(source, "train").views["view2"]
    np.testing.assert_array_equal(np.concatenate(blocks), rows[:512])
    for place, size, message in [
        (offsets, lengths - 4, r"3\) at byte \d+ is too short or too long; restore it"),
        (offsets + 512, lengths, "npy array at byte 7168 \\(the magic string"),
        (offsets + 10**6, lengths, r"not an npy array at byte \d+"),
    ]:
        with pytest.raises(ShardError, match=f"train-000000.tar(:| is) .*{message}"):
            map_arrays(tar, place, size)
    tar.write_bytes(tar.read_bytes()[: int(offsets[1]) + 600])
    with pytest.raises(ShardError, match="is too short or too long"):
        map_arrays(tar, offsets, lengths)


def test_manifest_errors(vectors: Path, tmp_path: Path) -> None:
    path = vectors / "manifest.json"
    good = json.loads(path.read_text())
    cases: list[tuple[dict[str, Any], str]] = [
        ({"schema_version": 7}, "schema_version is 7, but this version of heron reads 3"),
        ({"colour": "red"}, "colour: extra inputs are not permitted"),
        ({"block_rows": -1}, "block_rows must be greater than 0"),
        ({"splits": {"a": [good["splits"]["test"][0] | {"file": "../x.tar"}]}}, "splits.a.0.file"),
        ({"splits": {"../a": []}}, "'../a' cannot name a view or a split"),
        (
            {"labels": good["labels"] | {"levels": [["0"]]}},
            "have levels only if their kind is hierarchical",
        ),
        ({"splits": good["splits"] | {"again": good["splits"]["test"]}}, "a shard is listed twice"),
        ({"splits": {"test": 2 * good["splits"]["test"]}}, "a shard is listed twice"),
    ]
    for change, message in cases:
        path.write_text(json.dumps(good))
        seal(path, **change)
        with pytest.raises(ShardError, match=message):
            load_manifest(vectors)
    path.write_text("<html>")
    with pytest.raises(ShardError, match=r"manifest.json: not JSON \(line 1.*--overwrite"):
        load_manifest(vectors)
    with pytest.raises(ShardError, match="no such file; pass a folder"):
        load_manifest(tmp_path / "nowhere")
    with pytest.raises(ShardError, match="tiny has no split 'valid'; it has train, test"):
        path.write_text(json.dumps(good))
        load_manifest(vectors).rows("valid")


def test_index_errors(vectors: Path) -> None:
    path = vectors / "test-000000.index.npz"
    index = ShardIndex.read(path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ShardError, match="is not an index .*, which is an npz of"):
        ShardIndex.read(path)
    np.savez(path, **{**arrays_of(index), "rows": index.rows + 1})
    with pytest.raises(ShardError, match=r"labels \(8,\) do not fit 1 keys of 3 members"):
        ShardIndex.read(path)
    np.savez(path, **{**arrays_of(index), "keys": np.array([{}])})
    with pytest.raises(ShardError, match="not an index.*objects is a pickle, never decoded"):
        ShardIndex.read(path)
    path.unlink()
    with pytest.raises(ShardError, match="and every shard has an index beside it"):
        ShardIndex.read(path)


def test_labels_of_every_kind_are_checked() -> None:
    def fault(labels: Labels, array: object, dtype: str) -> str | None:
        values = np.array(array, dtype)
        return labels.fault(values, len(values))

    multi = Labels(kind="multi_label", names=["a", "b"])
    assert fault(multi, [[0, 1]], "u1") is None
    assert fault(multi, [[0, 2]], "u1") == "labels must be 0 to 1, got 2 in row 0"
    assert "got int64 (1, 2)" in str(fault(multi, [[0, 1]], "i8"))
    assert fault(Labels(kind="complementary", names=["a", "b"]), [[1, 0]], "u1") is None
    classes = Labels(kind="multi_class", names=["a", "b", "c"])
    assert fault(classes, [0, 2], "i8") is None
    assert fault(classes, [0, 3], "i8") == "labels must be 0 to 2, got 3 in row 1"
    tree = Labels(kind="hierarchical", names=["a", "b", "c"], levels=[["x"], ["a", "b", "c"]])
    assert fault(tree, [[0, 2]], "i8") is None
    assert fault(tree, [[1, 2]], "i8") == "labels must be 0 to 0, got 1 in row 0"
