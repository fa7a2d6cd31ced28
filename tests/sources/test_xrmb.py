"""The source `xrmb`: rows of its MATLAB files, all or HeroCon's, and what it says of bad ones."""

import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from heron.base.errors import SourceError
from heron.cli.main import main
from heron.shards.build import build
from heron.shards.manifest import load_manifest
from heron.shards.source import Source
from heron.shards.verify import verify
from heron.sources import make_source
from tests.shards.tiny import whole
from tests.sources.matlab_files import FILES, FORMATS, write_v5, write_xrmb

Array = NDArray[Any]
Changes = Mapping[str, Array | None]
ONE, TWO = FILES
ROWS = {"train": 60, "tune": 7, "test": 9}


@pytest.fixture(autouse=True)
def scratch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HERON_CACHE", str(tmp_path / "cache"))
    (folder := tmp_path / "cache" / "unpacked").mkdir(parents=True)
    return folder


def drawn(rows: int, columns: int) -> Array:
    return np.random.default_rng(rows).normal(size=(rows, columns)).astype("f4")


def numbered(rows: int) -> Array:
    """Classes 0 to 3 in turn, as a column of doubles."""
    return (np.arange(rows) % 4).astype("f8")[:, None]


X1, X2 = drawn(60, 6), drawn(60, 4)
SOUND = {"X1": X1, "XV1": drawn(7, 6), "XTe1": drawn(9, 6)}
ARTICULATION = {
    "X2": X2,
    "trainLabel": numbered(60),
    "XV2": drawn(7, 4),
    "tuneLabel": numbered(7),
    "XTe2": drawn(9, 4),
    "testLabel": numbered(9),
    "trainID": numbered(60),  # of the speaker: published, not read
}


def xrmb(
    folder: Path,
    changes: Changes | None = None,
    form: str = "v5",
    /,
    **options: object,
) -> Source:
    """A small XRMB, some of its variables changed, or None: left out."""
    changes = changes or {}
    files = [
        {name: changes.get(name, array) for name, array in file.items()}
        for file in (SOUND, ARTICULATION)
    ]
    one, two = ({n: a for n, a in file.items() if a is not None} for file in files)
    return make_source("xrmb", write_xrmb(folder, (one, two), form) | options)


@pytest.mark.parametrize("form", FORMATS)
def test_every_split_of_every_format(tmp_path: Path, form: str, scratch_folder: Path) -> None:
    if form == "v7.3":
        pytest.importorskip("h5py")
    source = xrmb(tmp_path, {}, form)
    assert source.splits == ROWS and source.dataset == "xrmb"
    assert [(view.name, view.shape) for view in source.views] == [("view1", (6,)), ("view2", (4,))]
    assert source.labels.kind == "multi_class" and source.labels.names == list("0123")
    for split, one, two in [
        ("train", "X1", "X2"),
        ("tune", "XV1", "XV2"),
        ("test", "XTe1", "XTe2"),
    ]:
        rows = whole(source, split)
        np.testing.assert_array_equal(rows.views["view1"], SOUND[one])
        np.testing.assert_array_equal(rows.views["view2"], ARTICULATION[two])
        assert rows.labels.dtype == np.int64
        assert rows.labels.tolist() == [row % 4 for row in range(ROWS[split])]
    part = source.read("train", 17, 20)
    np.testing.assert_array_equal(part.views["view1"], X1[17:20])
    assert part.labels.tolist() == [1, 2, 3]
    del source
    assert {path.name for path in scratch_folder.iterdir()} <= {"lock"}


def test_the_first_rows_of_each_class(tmp_path: Path) -> None:
    """HeroCon's selection, by its own words: for each class, where the label is it, the first."""
    labels = np.random.default_rng(0).integers(0, 5, (60, 1)).astype("f8")
    options = {"classes": 3, "per_class": 4, "parts": ["train"]}
    source = xrmb(tmp_path, {"trainLabel": labels}, "v5-compressed", **options)
    chosen = np.sort(np.concatenate([np.where(labels == x)[0][:4] for x in range(3)]))
    rows = whole(source, "train")
    assert source.splits == {"train": 12} and source.labels.names == list("012")
    np.testing.assert_array_equal(rows.views["view1"], X1[chosen])
    np.testing.assert_array_equal(rows.views["view2"], X2[chosen])
    assert rows.labels.tolist() == labels[chosen, 0].tolist()


def test_shuffled_rows_are_the_same_rows(tmp_path: Path) -> None:
    plain = whole(xrmb(tmp_path, classes=3), "train")
    source = xrmb(tmp_path, classes=3, shuffle=True)
    rows = whole(source, "train")
    first, mixed = np.asarray(plain.views["view1"]), np.asarray(rows.views["view1"])
    assert not np.array_equal(first, mixed)
    order = [int(np.flatnonzero((first == row).all(1))[0]) for row in mixed]
    assert sorted(order) == list(range(45))
    np.testing.assert_array_equal(rows.views["view2"], np.asarray(plain.views["view2"])[order])
    assert rows.labels.tolist() == plain.labels[order].tolist()
    part = source.read("train", 11, 30)
    np.testing.assert_array_equal(part.views["view1"], mixed[11:30])
    other = whole(xrmb(tmp_path, classes=3, shuffle=True, seed=1), "train").views["view1"]
    assert not np.array_equal(mixed, np.asarray(other))


def test_slabs_join_and_memory_is_bounded(tmp_path: Path) -> None:
    rows = 5 * 8192 + 9
    ramp = np.arange(rows, dtype="f4")[:, None]
    changes = {
        "X1": ramp + np.arange(60, dtype="f4"),
        "X2": -ramp + np.arange(4, dtype="f4"),
        "trainLabel": numbered(rows),
    }
    shapes = {"XV1": drawn(7, 60), "XTe1": drawn(9, 60)}
    for options in ({}, {"classes": 2}):
        source = xrmb(tmp_path, changes | shapes, **options)
        every = source.splits["train"]
        assert every == (changes["trainLabel"] < options.get("classes", 4)).sum()
        tracemalloc.start()
        try:
            for start in range(0, every, 256):
                block = source.read("train", start, min(start + 256, every))
                numbers = np.asarray(block.views["view1"])[:, 0]
                assert (numbers == -np.asarray(block.views["view2"])[:, 0]).all()
                assert (numbers % 4 == block.labels).all()
            assert tracemalloc.get_traced_memory()[1] < 7e6 < changes["X1"].nbytes
        finally:
            tracemalloc.stop()
        ends = source.read("train", 8192 - 3, 2 * 8192 + 3)
        got = np.asarray(ends.views["view1"])[:, 0]
        assert len(got) == 8192 + 6 and (np.diff(got) > 0).all()
        np.testing.assert_array_equal(
            source.read("train", 8192 - 3, 8192 + 1).views["view1"],
            np.asarray(ends.views["view1"])[:4],
        )


def test_labels_from_one_leave_a_name_unused(tmp_path: Path) -> None:
    ones: Changes = {
        name: array + 1 for name, array in ARTICULATION.items() if name.endswith("Label")
    }
    source = xrmb(tmp_path, ones, per_class=1)
    assert source.labels.names == list("01234") and source.splits["train"] == 4
    assert whole(source, "train").labels.tolist() == [1, 2, 3, 4]


def test_a_part_that_neither_file_has_is_no_split(tmp_path: Path) -> None:
    without: Changes = dict.fromkeys(["XV1", "XV2", "tuneLabel"])
    assert list(xrmb(tmp_path, without).splits) == ["train", "test"]
    assert list(xrmb(tmp_path, parts=["test", "train"]).splits) == ["train", "test"]
    assert list(xrmb(tmp_path, {"XTe1": None}, parts=["train"]).splits) == ["train"]


def with_value(name: str, row: int, column: int, value: float) -> dict[str, Array]:
    array = {**SOUND, **ARTICULATION}[name].copy()
    array[row, column] = value
    return {name: array}


MADE = "has no variable"
BAD: list[tuple[Changes, dict[str, object], str]] = [
    (
        {"X1": X1[:50]},
        {},
        f"{ONE}, {TWO}: X1 is 50 × 6, X2 is 60 × 4, trainLabel is 60; a split must have as many",
    ),
    ({"XV2": drawn(8, 4)}, {}, "XV1 is 7 × 6, XV2 is 8 × 4, tuneLabel is 7; a split must"),
    ({"testLabel": numbered(8)}, {}, "XTe2 is 9 × 4, testLabel is 8; a split must"),
    (
        {"trainLabel": drawn(60, 2)},
        {},
        f"{TWO}: trainLabel must be a column, a class number for each row, got 60 × 2; download",
    ),
    (
        with_value("trainLabel", 5, 0, 256),
        {},
        f"{TWO}: trainLabel must be integers from 0 to 255, got 256.0 in row 5; download",
    ),
    (with_value("trainLabel", 6, 0, 1.5), {}, "trainLabel must be integers from 0 to"),
    (with_value("tuneLabel", 3, 0, -1), {}, "tuneLabel must be integers from 0 to"),
    (with_value("tuneLabel", 0, 0, np.nan), {}, "tuneLabel must be integers from 0 to"),
    (with_value("tuneLabel", 0, 0, np.inf), {}, "tuneLabel must be integers from 0 to"),
    (
        with_value("X1", 57, 3, np.nan),
        {},
        f"{ONE}: X1, row 57, column 3 is nan, which is not a finite float32; download it again",
    ),
    (
        with_value("XTe2", 8, 0, -np.inf),
        {},
        f"{TWO}: XTe2, row 8, column 0 is -inf, which is not a",
    ),
    (
        {"X1": X1.astype("f8") + 1e300},
        {},
        f"{ONE}: X1, row 0, column 0 is 1e+300, which is not a finite float32",
    ),
    ({"X1": None}, {}, f"{ONE} {MADE} X1, only XV1, XTe1; download it"),
    ({"X2": None, "XV2": None}, {}, f"{TWO} has no variable X2, only trainLabel, tuneLabel, XTe2"),
    ({"tuneLabel": None}, {}, f"{TWO} has no variable tuneLabel, only X2, trainLabel, XV2, XTe2"),
    (
        {"XV1": None, "XV2": None, "tuneLabel": None},
        {"parts": ["tune"]},
        f"{ONE} has no variable XV1, only X1, XTe1; download it again",
    ),
    (
        {"X2": X2[:0]},
        {},
        f"{TWO}: X2 must be a matrix of real numbers, full and not empty, got single",
    ),
    (
        {"XV1": drawn(7, 5)},
        {},
        "XV1 is 7 × 5, XV2 is 7 × 4, tuneLabel is 7; a split must have as many rows in each, of 6",
    ),
    (
        {},
        {"classes": 5},
        f"{TWO}: its labels go to 3, not from 0 to ",
    ),
    (
        {"testLabel": numbered(9) + 2},
        {"classes": 2},
        "testLabel begins with 2, but classes must be below 2; use a larger --classes, or leave",
    ),
    (
        {},
        {"per_class": 3},
        f"{TWO}: tuneLabel has 2 rows of class 0, not 3; lower --per-class, or leave tune out with "
        "--parts",
    ),
]


@pytest.mark.parametrize(("changes", "options", "message"), BAD)
def test_errors(
    tmp_path: Path,
    changes: Changes,
    options: dict[str, object],
    message: str,
) -> None:
    with pytest.raises(SourceError) as fault:
        build(xrmb(tmp_path, changes, **options), tmp_path / "out", progress=False)
    assert message in str(fault.value)


def test_a_bad_value_of_a_row_that_is_not_chosen_does_not_matter(tmp_path: Path) -> None:
    changes: Changes = with_value("X1", 3, 0, np.nan)
    rows = whole(xrmb(tmp_path, changes, classes=3), "train")  # row 3 is of class 3
    np.testing.assert_array_equal(rows.views["view1"], np.delete(X1, np.s_[3::4], 0))
    with pytest.raises(
        SourceError, match="X1, row 3, column 0 is nan, which is not a finite float32"
    ):
        whole(xrmb(tmp_path, changes, shuffle=True), "train")


def test_a_bad_value_is_found_when_its_row_is_read(tmp_path: Path) -> None:
    source = xrmb(tmp_path, with_value("X2", 40, 1, np.inf))
    np.testing.assert_array_equal(source.read("train", 0, 40).views["view2"], X2[:40])
    with pytest.raises(
        SourceError, match="X2, row 40, column 1 is inf, which is not a finite float32"
    ):
        source.read("train", 38, 41)


def test_a_page_and_a_download_that_stopped(tmp_path: Path) -> None:
    source = xrmb(tmp_path)
    data = (path := source.files[0]).read_bytes()
    path.write_bytes(data[:-100])
    with pytest.raises(
        SourceError, match="it has 2,020 bytes, but its variable at byte 1,848 ends at 2,120"
    ):
        _ = source.splits
    path.write_bytes(b"<!DOCTYPE html>" + data)
    with pytest.raises(
        SourceError,
        match="a file of MATLAB v5 or v7\\.3: it has .* begins with b'<!DOCTYPE html>M'",
    ):
        _ = source.splits


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"classes": 0}, "classes must be greater than 0, got 0"),
        ({"per_class": 0}, "per_class must be greater than 0, got 0"),
        ({"parts": ["dev"]}, "parts.0 must be 'train', 'tune' or 'test', got 'dev'"),
        ({"parts": []}, "parts must have at least 1 item, got []"),
        ({"single1": "no.mat"}, "single1: path does not point to a file (got 'no.mat')"),
        ({"single3": 1}, "xrmb has no option 'single3'; did you mean 'single"),
    ],
)
def test_options(tmp_path: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(SourceError) as fault:
        xrmb(tmp_path, **options)
    assert message in str(fault.value)


def test_built_by_two_workers_from_the_command_line(tmp_path: Path, scratch_folder: Path) -> None:
    rows = {"X1": drawn(600, 6), "X2": drawn(600, 4), "trainLabel": numbered(600)}
    source = xrmb(tmp_path, rows, "v5-compressed")
    one, two = map(str, source.files)
    build(source, tmp_path / "alone", shard_rows=256, progress=False)
    words = ["shards", "build", "xrmb", "--single1", one, "--single2", two, "--shard-rows", "256"]
    out = tmp_path / "out"
    assert main([*words, "--out", str(out), "--workers", "2", "--quiet"]) == 0
    manifest = load_manifest(out)
    assert manifest == load_manifest(tmp_path / "alone") and verify(out).ok
    assert manifest.rows("train") == 600 and len(manifest.splits["train"]) == 3
    assert [file.name for file in manifest.built_from.files] == FILES
    del source
    assert {path.name for path in scratch_folder.iterdir()} <= {"lock"}


def test_both_views_in_one_file(tmp_path: Path) -> None:
    write_v5(path := tmp_path / "both.mat", SOUND | ARTICULATION)
    assert make_source("xrmb", {"single1": path, "single2": path}).splits == ROWS
