"""The source `folder`: splits, classes, hierarchies, keys, and what it says of a bad file."""

import re
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from heron.base.errors import SourceError
from heron.base.workers import Processes
from heron.data.reader import Reader
from heron.shards.build import build
from heron.shards.manifest import load_manifest
from heron.shards.show import contact_sheet
from heron.shards.source import Source
from heron.shards.verify import verify
from heron.sources import make_source
from heron.sources.folder import MAX_KEY_CHARS, make_keys
from tests.shards.tiny import bomb, whole

FLAT = ["train/cat/1.jpg", "train/dog/a.b.jpeg", "train/dog/2.JPG", "test/cat/1.jpg"]


def jpeg(seed: int, size: tuple[int, int] = (6, 4), mode: str = "RGB") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3)).astype(np.uint8)
    stream = BytesIO()
    Image.fromarray(pixels).convert(mode).save(stream, "JPEG")
    return stream.getvalue()


def png(pixels: NDArray[Any]) -> bytes:
    stream = BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def put(root: Path, path: str, data: bytes) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_bytes(data)


def folder(root: Path, paths: list[str], **options: object) -> Source:
    for seed, path in enumerate(paths):
        put(root / "pets", path, jpeg(seed))
    return make_source("folder", {"folder": root / "pets", **options})


def test_classes_in_splits(tmp_path: Path) -> None:
    source = folder(tmp_path, FLAT)
    assert source.splits == {"train": 3, "test": 1} and source.dataset == "pets"
    assert source.labels.kind == "multi_class" and source.labels.names == ["cat", "dog"]
    assert source.views[0].shape == (4, 6, 3)
    rows = whole(source, "train")
    assert rows.keys == ["train-cat-1", "train-dog-2", "train-dog-a_b"]
    assert rows.labels.tolist() == [0, 1, 1]
    assert rows.views["image"] == [jpeg(0), jpeg(2), jpeg(1)]  # the bytes as they were
    assert source.read("train", 1, 2).keys == rows.keys[1:2]
    assert whole(source, "test").keys == ["test-cat-1"]


def test_levels_are_columns(tmp_path: Path) -> None:
    paths = ["animal/cat/1.jpg", "animal/dog/1.jpg", "plant/cat/1.jpg"]
    source = folder(tmp_path, paths)
    assert source.splits == {"all": 3} and source.labels.kind == "hierarchical"
    assert source.labels.levels == [
        ["animal", "plant"],
        ["animal/cat", "animal/dog", "plant/cat"],
    ]
    assert whole(source, "all").labels.tolist() == [[0, 0], [0, 1], [1, 2]]
    build(source, tmp_path / "out", progress=False)
    assert verify(tmp_path / "out").ok


def test_splits_by_name(tmp_path: Path) -> None:
    paths = ["train/cat/1.jpg", "valid/dog/1.jpg", "extra/cow/1.jpg"]
    source = folder(tmp_path, paths, split_names=["valid", "train"])
    assert source.splits == {"valid": 1, "train": 1} and source.labels.names == ["cat", "dog"]
    vehicles = folder(tmp_path / "vehicles", ["train/1.jpg", "bus/1.jpg"], split_names=["all"])
    assert vehicles.splits == {"all": 2} and vehicles.labels.names == ["bus", "train"]
    no_train = folder(tmp_path / "no", ["test/cat/1.jpg"])
    assert no_train.labels.levels == [["test"], ["test/cat"]]


def test_hidden_files_are_ignored(tmp_path: Path) -> None:
    put(tmp_path / "pets", "train/.DS_Store", b"")
    put(tmp_path / "pets", ".cache/x", b"")
    assert folder(tmp_path, FLAT).splits == {"train": 3, "test": 1}


def test_sizes_that_vary_and_grey_pictures(tmp_path: Path) -> None:
    source = folder(tmp_path, FLAT)
    put(tmp_path / "pets", "train/dog/wide.jpg", jpeg(9, (8, 4), "L"))
    assert source.views[0].shape == (4, -1, 3)
    put(tmp_path / "pets", "test/dog/high.jpg", jpeg(9, (8, 5), "CMYK"))
    source = make_source("folder", {"folder": tmp_path / "pets"})
    assert source.views[0].shape == (-1, -1, 3)
    build(source, out := tmp_path / "out", progress=False)
    assert verify(out).ok
    contact_sheet(out, tmp_path / "sheet.png")


def test_a_grey_picture_is_read_with_three_channels(tmp_path: Path) -> None:
    put(tmp_path / "pets", "a/grey.jpg", jpeg(0, mode="L"))
    put(tmp_path / "pets", "a/red.jpg", jpeg(0))
    build(
        make_source("folder", {"folder": tmp_path / "pets"}),
        out := tmp_path / "out",
        progress=False,
    )
    assert verify(out).ok
    assert Reader(out).read("image", np.arange(2)).shape == (2, 4, 6, 3)


def test_png_files_lose_nothing(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 4, 6, 3)).astype(np.uint8)
    for place, path in enumerate(["test/dog/1.PNG", "train/cat/1.png", "train/dog/1.png"]):
        put(tmp_path / "pets", path, png(pixels[place]))
    source = make_source("folder", {"folder": tmp_path / "pets"})
    assert source.views[0].shape == (4, 6, 3) and source.views[0].member == "png"
    build(source, out := tmp_path / "out", progress=False)
    assert load_manifest(out).members == ["png", "labels.npy"]
    assert verify(out).ok
    contact_sheet(out, tmp_path / "sheet.png")
    found = Reader(out).read("image", np.arange(3))
    np.testing.assert_array_equal(found, pixels[[1, 2, 0]])


def test_png_files_of_other_modes_are_read_as_rgb(tmp_path: Path) -> None:
    grey = np.full((4, 6), 9, np.uint8)
    seen = np.full((4, 6, 4), [1, 2, 3, 0], np.uint8)  # transparent
    put(tmp_path / "pets", "a/1.png", png(grey))
    put(tmp_path / "pets", "a/2.png", png(seen))
    stream = BytesIO()
    Image.fromarray(seen[..., :3]).quantize(4).save(stream, "PNG")
    put(tmp_path / "pets", "a/3.png", stream.getvalue())
    build(
        make_source("folder", {"folder": tmp_path / "pets"}),
        out := tmp_path / "out",
        progress=False,
    )
    assert verify(out).ok
    found = Reader(out).read("image", np.arange(3))
    assert found[:, 3, 5].tolist() == [[9, 9, 9], [255, 255, 255], [1, 2, 3]]


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"", "is not a JPEG, PNG, WebP, GIF, TIFF or BMP: it begins with b''"),
        (b"<html>", "is not a JPEG, PNG, WebP, GIF, TIFF or BMP: it begins with b'<html>'"),
        (
            png(np.zeros((4, 6), np.uint8))[:20],
            "is a damaged PNG (its header is cut or has another checksum)",
        ),
        (bomb(), "must have 1 to 134,217,728 pixels, got 65536 × 65536"),
    ],
)
def test_pictures_that_are_no_png(tmp_path: Path, data: bytes, found: str) -> None:
    put(tmp_path / "pets", "cat/1.png", png(np.zeros((4, 6, 3), np.uint8)))
    put(tmp_path / "pets", "cat/2.png", data)
    with pytest.raises(SourceError) as fault:
        build(
            make_source("folder", {"folder": tmp_path / "pets"}), tmp_path / "out", progress=False
        )
    assert str(fault.value) == (
        f"pets: cat/2.png {found}; move it away, convert it, or leave out what is bad with "
        "`--on-error skip`"
    )


def test_a_long_header_is_read_to_its_end(tmp_path: Path) -> None:
    source = folder(tmp_path, ["a/1.jpg"])
    comment = b"\xff\xfe\x20\x02" + b"x" * 0x2000  # as long as a thumbnail
    put(tmp_path / "pets", "a/1.jpg", (data := jpeg(0))[:2] + comment + data[2:])
    assert source.views[0].shape == (4, 6, 3)


def test_the_manifest_knows_the_bytes_of_the_folder(tmp_path: Path) -> None:
    build(folder(tmp_path, FLAT), out := tmp_path / "out", progress=False)
    (record,) = load_manifest(out).built_from.files
    assert (record.name, record.bytes) == ("pets", sum(len(jpeg(seed)) for seed in range(4)))
    put(tmp_path / "pets", "test/cat/1.jpg", jpeg(7))
    (other,) = make_source("folder", {"folder": tmp_path / "pets"}).input_files()
    assert other.sha256 != record.sha256


def test_workers_make_the_same_bytes(tmp_path: Path) -> None:
    source = folder(tmp_path, [f"{c}/{n}.jpg" for c in "ab" for n in range(4)])
    one, two = (
        build(
            source,
            tmp_path / str(workers),
            executor=Processes(workers),
            shard_rows=4,
            progress=False,
        )
        for workers in (1, 2)
    )
    assert one == two and len(one.splits["all"]) == 2


def test_keys_are_safe_and_unique() -> None:
    paths = ["a/b-c.jpg", "a-b/c.jpg", "a/b.jpg", "a/ü x.jpg", f"a/{'x' * 90}.jpg", "a/b.jpeg"]
    keys = make_keys(paths)
    assert list(keys) == paths and len(set(keys.values())) == len(paths)
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{1,81}", key) for key in keys.values())
    assert keys["a/ü x.jpg"] == "a-__x"
    assert re.fullmatch("a-b-[0-9a-f]{16}", keys["a/b.jpg"])
    assert len(keys[paths[4]]) == MAX_KEY_CHARS + 17


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "train/cat/notes.txt",
            "pets: train/cat/notes.txt is not a picture; the folder may have .jpg, .png, .webp, ",
        ),
        (
            "train/1.jpg",
            "pets: train/1.jpg is not in the folder of a class; it must be train/CLASS/NAM",
        ),
        (
            "test/cat/old/1.jpg",
            "pets: test/cat/old/1.jpg is 2 folders of classes deep, but most are 1 (see "
            "--split-names)",
        ),
        (
            "readme.txt",
            "pets: readme.txt is beside the split train, where only train, val, test can be (name",
        ),
        (
            "valid/cat/1.jpg",
            "pets: valid is beside the split train, where only train, val, test can be (name the",
        ),
        (
            "train/cow/.hidden",
            "pets: the folder train/cow/ is empty; it needs pictures, or folders of them",
        ),
    ],
)
def test_errors(tmp_path: Path, path: str, message: str) -> None:
    source = folder(tmp_path, FLAT)
    put(tmp_path / "pets", path, jpeg(0))
    with pytest.raises(SourceError) as fault:
        build(source, tmp_path / "out", progress=False)
    assert message in str(fault.value)


def test_all_that_lies_wrong_is_named_at_once_and_may_be_left_out(tmp_path: Path) -> None:
    source = folder(tmp_path, [*FLAT, "train/1.jpg", "wild/1.jpg", "test/cat/old/2.jpg"])
    put(tmp_path / "pets", "train/cow/.hidden", b"")
    put(tmp_path / "pets", "train/cat/notes.txt", b"")
    wrong = ["wild", "the folder train/cow/", "train/cat/notes.txt", "train/1.jpg"]
    wrong.append("test/cat/old/2.jpg")
    with pytest.raises(SourceError) as fault:
        _ = source.splits
    assert all(f"{name} " in str(fault.value) for name in wrong)
    options = {"folder": tmp_path / "pets", "on_error": "skip"}
    manifest = build(make_source("folder", options), tmp_path / "out", progress=False)
    assert sum(map(manifest.rows, manifest.splits)) == len(FLAT)
    assert manifest.skipped is not None and manifest.skipped.count == len(wrong)


def test_pictures_without_folders_have_no_labels(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = folder(tmp_path, ["a cat.jpg", "b.jpg"])
    assert source.splits == {"all": 2} and source.labels.kind == "none"
    assert "the pictures are not in folders of classes: no labels" in caplog.text
    build(source, tmp_path / "out", progress=False)
    assert verify(tmp_path / "out").ok


@pytest.mark.parametrize("data", [b"", b"<html>", b"\x89PNG\r\n\x1a\n" + bytes(90), jpeg(0)[:100]])
def test_pictures_that_are_no_jpeg(tmp_path: Path, data: bytes) -> None:
    source = folder(tmp_path, FLAT)
    put(tmp_path / "pets", "train/cat/bad.jpg", data)
    with pytest.raises(SourceError, match="pets: train/cat/bad.jpg (begins|is).*; move it away"):
        build(source, tmp_path / "out", progress=False)


def test_a_jpeg_that_is_cut_behind_its_header(tmp_path: Path) -> None:
    source = folder(tmp_path, FLAT)
    whole = jpeg(0, (200, 200))
    for data in (whole[: len(whole) // 2], whole[:-2]):
        put(tmp_path / "pets", "train/cat/cut.jpg", data)
        with pytest.raises(SourceError, match="pets: train/cat/cut\\.jpg is cut short"):
            build(source, tmp_path / "out", progress=False, overwrite=True)


def test_splits_that_are_not_there(tmp_path: Path) -> None:
    source = folder(tmp_path, FLAT, split_names=["train", "dev"])
    with pytest.raises(SourceError, match="pets has no folder 'dev' for a split, only test, train"):
        _ = source.splits
    with pytest.raises(SourceError, match="split_names.0: '../x' cannot name a view or a split"):
        folder(tmp_path, FLAT, split_names=["../x"])
    (empty := tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match="the folder \\. is empty; it needs pictures"):
        _ = make_source("folder", {"folder": empty}).splits
