"""The source `arrays`: .npy files, raw pictures, rows without a label; more in test_sources."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from heron.base.errors import ShardError, SourceError
from heron.base.workers import Processes
from heron.cli.main import main
from heron.data.reader import Reader
from heron.shards.build import build
from heron.shards.show import contact_sheet, show
from heron.shards.source import Source
from heron.shards.verify import verify
from heron.shards.write_shard import npy
from heron.sources import make_source
from heron.sources.arrays import map_npy
from tests.shards.test_verify import reseal, rewrite
from tests.shards.tiny import whole

RANDOM = np.random.default_rng(0)
AUDIO = RANDOM.normal(size=(300, 3)).astype("f4")
VIDEO = RANDOM.integers(0, 256, (300, 4, 5, 3)).astype("u1")
GREY = RANDOM.integers(0, 256, (300, 4, 5)).astype("u1")
LABELS = RANDOM.integers(0, 3, 300)


def files(folder: Path, arrays: dict[str, Any]) -> list[str]:
    folder.mkdir(exist_ok=True)
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return [f"{name}={folder / name}.npy" for name in arrays]


def stored(folder: Path, kind: str, arrays: dict[str, Any], **options: object) -> Source:
    """The same arrays in an .npz or in .npy files."""
    if kind == "npy":
        return make_source("arrays", {"npy": files(folder / "mine", arrays), **options})
    np.savez(folder / "mine.npz", **arrays)
    return make_source("arrays", {"npz": folder / "mine.npz", **options})


def fault(source: Source, out: Path) -> str:
    with pytest.raises(SourceError) as raised:
        build(source, out, progress=False)
    return str(raised.value)


@pytest.mark.parametrize("kind", ["npy", "npz"])
def test_vectors_and_raw_pictures(tmp_path: Path, kind: str) -> None:
    split = np.array(["test", "train", "train"] * 100)
    views = {"audio": AUDIO, "video": VIDEO, "grey": GREY}
    source = stored(tmp_path, kind, views | {"labels": LABELS, "split": split})
    assert source.dataset == "mine" and source.splits == {"test": 100, "train": 200}
    assert [(v.name, v.kind, v.dtype, v.shape) for v in source.views] == [
        ("audio", "vector", "float32", (3,)),
        ("video", "image", "uint8", (4, 5, 3)),
        ("grey", "image", "uint8", (4, 5, 1)),
    ]
    rows = whole(source, "train")
    chosen = split == "train"
    np.testing.assert_array_equal(rows.views["audio"], AUDIO[chosen])
    np.testing.assert_array_equal(rows.views["video"], VIDEO[chosen])
    np.testing.assert_array_equal(rows.views["grey"], GREY[chosen][..., None])
    np.testing.assert_array_equal(rows.labels, LABELS[chosen])
    assert all(type(view) is np.ndarray for view in rows.views.values())  # not a map of a file

    build(source, out := tmp_path / "out", progress=False)
    assert verify(out).ok
    reader = Reader(out)
    numbers = np.array([7, 299, 100])
    order = np.concatenate([np.flatnonzero(~chosen), np.flatnonzero(chosen)])[numbers]
    np.testing.assert_array_equal(reader.labels(numbers), LABELS[order])
    np.testing.assert_array_equal(reader.read("audio", numbers), AUDIO[order])
    np.testing.assert_array_equal(reader.read("video", numbers), VIDEO[order])
    np.testing.assert_array_equal(reader.read("grey", numbers), GREY[order][..., None])


def test_npy_and_npz_make_the_same_shards(tmp_path: Path) -> None:
    arrays = {"audio": AUDIO.astype("f8"), "video": VIDEO, "labels": LABELS}
    one = build(stored(tmp_path, "npz", arrays), tmp_path / "npz", shard_rows=256, progress=False)
    source = stored(tmp_path, "npy", arrays)
    two = build(source, tmp_path / "npy", shard_rows=256, executor=Processes(2), progress=False)
    assert one.splits == two.splits and one.views == two.views and one.labels == two.labels
    assert two.built_from.options["npy"] == [
        "audio=audio.npy",
        "video=video.npy",
        "labels=labels.npy",
    ]
    assert [file.name for file in two.built_from.files] == ["audio.npy", "video.npy", "labels.npy"]
    (tmp_path / "mine").rename(tmp_path / "moved")
    (tmp_path / "moved").rename(tmp_path / "mine")
    np.save(tmp_path / "mine" / "video.npy", VIDEO[::-1])
    with pytest.raises(ShardError, match="another build: its input files had other bytes"):
        build(stored(tmp_path, "npy", arrays | {"video": VIDEO[::-1]}), tmp_path / "npy")


def test_an_npy_stays_where_it_lies(tmp_path: Path) -> None:
    """Of a file that no memory holds, the rows that are asked for are read, and checked."""
    path = tmp_path / "big.npy"
    shape = (1 << 24, 1024)  # 64 GiB, but for a few bytes a hole
    with path.open("wb") as stream:
        head = {"descr": "<f4", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(stream, head)
        start = stream.tell()
        stream.truncate(start + 4 * shape[0] * shape[1])
        stream.seek(start + 4 * 1024 * (shape[0] - 2))
        stream.write(np.array([1, np.nan], "f4").tobytes())
    source = make_source("arrays", {"npy": [f"big={path}"]})
    assert source.splits == {"all": 1 << 24} and source.views[0].shape == (1024,)
    rows = source.read("all", 12_345_678, 12_345_934)
    assert np.asarray(rows.views["big"]).shape == (256, 1024) and not rows.views["big"][0].any()
    assert rows.labels.tolist() == [-1] * 256
    message = (
        "big.npy: view 'big', row 16777214, column 1 is nan, which is not a finite float32; fill"
    )
    with pytest.raises(SourceError, match=message):
        source.read("all", (1 << 24) - 256, 1 << 24)
    assert isinstance(map_npy(path), np.memmap)


@pytest.mark.parametrize("kind", ["npy", "npz"])
def test_rows_that_have_no_label(tmp_path: Path, kind: str) -> None:
    views = {"audio": AUDIO}
    bare = stored(tmp_path, kind, views)
    assert bare.labels.kind == "none" and whole(bare, "all").labels.tolist() == [-1] * 300
    build(bare, out := tmp_path / "bare", progress=False)
    assert verify(out).ok and "none labels (0)" in show(out)

    labels = np.where(np.arange(300) % 3, LABELS, -1)
    some = stored(tmp_path, kind, views | {"labels": labels})
    assert some.labels.kind == "multi_class" and some.labels.names == ["0", "1", "2"]
    np.testing.assert_array_equal(whole(some, "all").labels, labels)
    build(some, out := tmp_path / "some", progress=False)
    assert verify(out).ok
    share = (labels == 0).sum() / (labels >= 0).sum()
    assert f"\n0  {100 * share:5.1f} %" in show(out)  # of those that have a label

    for missing, dtype in [(255, "u1"), (-1, "i8")]:
        labels = (AUDIO > 0).astype(dtype)
        labels[::3] = missing
        multi = stored(tmp_path, kind, views | {"labels": labels})
        assert multi.labels.kind == "multi_label"
        found = whole(multi, "all").labels
        assert found.dtype == np.uint8 and (found[::3] == 255).all() and (found[1::3] < 2).all()

    labels = np.stack([LABELS // 2, LABELS], 1)
    labels[5] = -1
    tree = stored(tmp_path, kind, views | {"labels": labels}, label_kind="hierarchical")
    assert tree.labels.levels == [["0", "1"], ["0", "1", "2"]]
    np.testing.assert_array_equal(whole(tree, "all").labels, labels)

    everything = views | {"labels": np.zeros(7)}  # whatever it is, it was said to be none
    none = stored(tmp_path, kind, everything, label_kind="none", view_names=["audio"])
    assert none.labels.kind == "none"


def test_classes_go_by_their_values_and_names(tmp_path: Path) -> None:
    def labels(array: Any, **options: object) -> tuple[list[str], list[Any]]:
        source = stored(tmp_path, "npz", {"audio": AUDIO[:4], "labels": array}, **options)
        return source.labels.names, whole(source, "all").labels.tolist()

    gaps = np.array([7, 3, -1, 7])
    assert labels(gaps) == (["3", "7"], [1, 0, -1, 1])
    assert labels(gaps[:, None]) == (["3", "7"], [1, 0, -1, 1])
    assert labels(np.array(["tree", "10", "9", "tree"])) == (["10", "9", "tree"], [2, 0, 1, 2])
    assert labels(np.array([b"b", b"a", b"b", b"b"])) == (["a", "b"], [1, 0, 1, 1])
    named = labels(np.array([1, 0, -1, 1]), label_names=["low", "high"])
    assert named == (["low", "high"], [1, 0, -1, 1])
    signs = np.array([1, -1, -1, 1])
    assert labels(signs, minus_one="no") == (["-1", "1"], [1, 0, 0, 1])
    assert labels(signs, minus_one="unlabelled") == (["1"], [0, -1, -1, 0])
    sets = np.array([[1, -1], [-1, -1], [1, 1], [-1, 1]])
    assert labels(sets, minus_one="no")[1] == [[1, 0], [0, 0], [1, 1], [0, 1]]
    assert labels(np.maximum(sets, 0))[1] == [[1, 0], [0, 0], [1, 1], [0, 1]]
    names, tree = labels(np.array([["x", "b"], ["y", "a"]] * 2), label_kind="hierarchical")
    assert names == ["a", "b"] and tree == [[0, 1], [1, 0]] * 2


def test_whole_numbers_and_channels_are_converted_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = VIDEO.transpose(0, 3, 1, 2).copy()
    views = {"counts": LABELS[:, None] * 2, "video": first, "labels": LABELS}
    source = stored(tmp_path, "npy", views, keep=["counts:0"])
    build(source, tmp_path / "out", progress=False)
    assert "'counts' is int64, and stored as vectors of float32" in caplog.text
    assert "view 'video' has its channels moved last" in caplog.text
    reader, numbers = Reader(tmp_path / "out"), np.array([3, 280])
    np.testing.assert_array_equal(reader.read("video", numbers), VIDEO[numbers])
    np.testing.assert_array_equal(reader.read("counts", numbers)[:, 0], 2.0 * LABELS[numbers])
    last = stored(tmp_path, "npz", {"cube": VIDEO[:, :3, :3]}, channels="last")
    np.testing.assert_array_equal(whole(last, "all").views["cube"], VIDEO[:, :3, :3])
    large = stored(tmp_path, "npz", {"n": np.full((3, 1), 2**24 + 1), "labels": np.arange(3)})
    assert "row 0, column 0 is 16777217, which float32 cannot represent" in fault(
        large, tmp_path / "n"
    )


@pytest.mark.parametrize("kind", ["npy", "npz"])
@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        (
            {"labels": LABELS, "age": np.ones(300), "pose": np.ones((300, 2, 2))},
            {},
            ": 'age' is float64 (300,), and neither a view nor labels nor split; drop "
            "what is not used with --ignore age pose",
        ),
        (
            {"why": (AUDIO > 0).astype(int)},
            {},
            "no array 'labels', but 'why', which may be the labels; use --labels-name why if it is",
        ),
        (
            {"cube": VIDEO[:, :3, :3]},
            {},
            "without 1 or 3 channels on either the second axis or the last",
        ),
        (
            {"cube": VIDEO.repeat(4, 3)},
            {},
            "4, 5, 12), without 1 or 3 channels on either the second axis",
        ),
        (
            {"labels": np.array([1, -1] * 150)},
            {},
            "labels are only -1 and 1, and -1 may mean two things",
        ),
        (
            {"labels": np.array([[1, -1]] * 300)},
            {},
            "use --minus-one no if it is the other class, or a label that does not apply, and "
            "--minus-one",
        ),
        (
            {"labels": np.array([[1, 0]] * 300)},
            {"minus_one": "no"},
            "label of row 0 must be -1 or 1, because of --minus-one no, got neither",
        ),
        (
            {"labels": np.array(["a", ""] * 150)},
            {},
            "'labels', row 1 is empty; fill it, or drop the row",
        ),
        (
            {"labels": np.array(["a", "b"] * 150)},
            {"label_names": ["a"]},
            "'b' is not one of the names",
        ),
        ({"labels": np.array([b"a", b"\xff"] * 150)}, {}, "'labels': names are not UTF-8"),
        ({"labels": np.full(300, -2)}, {}, "label of row 0 must be a class number from 0"),
        (
            {"labels": np.array([[0, 255]] * 300, "u1")},
            {},
            "must be 0 or 1, or -1 in all of a row that has no label; see --minus-one, got 255",
        ),
        (
            {"labels": np.array([[0, -1]] * 300)},
            {"label_kind": "hierarchical"},
            "label of row 0 is -1, but must be a class number from 0 on, or -1 in all of a row "
            "that",
        ),
        ({}, {"labels_name": "y"}, "no array 'y', only audio"),
        ({}, {"label_kind": "multi_class"}, "no array 'labels', only audio"),
        (
            {},
            {"label_kind": "none", "label_names": ["a"]},
            "labels have names unless their kind is none, and",
        ),
        (
            {"kind": LABELS, "grey": GREY},
            {"view_names": ["audio", "grey"]},
            "no array 'labels', but 'kind', which may be the labels; use --labels-name kind if it "
            "is, and --label-kind none if there are none",
        ),
        (
            {"odd": VIDEO.astype("f4")},
            {"view_names": ["odd", "audio"], "label_kind": "none"},
            "view 'odd' must be numbers [rows, width], or uint8 [rows, height, width, channels],",
        ),
        (
            {"odd": VIDEO[:, :0]},
            {},
            "view 'odd' must be numbers [rows, width], or uint8 [rows, height",
        ),
        ({"grey": GREY[:9]}, {}, "'grey' has 9 rows but 'audio' has 300; every array must"),
        ({"a.b": GREY}, {}, "'a.b' cannot name a view or a split; rename it to 1 to 40 letters"),
        ({"labels": np.zeros((300, 0), "i8")}, {}, "'labels' must be integers or names [rows]"),
    ],
)
def test_errors(
    tmp_path: Path, kind: str, arrays: dict[str, Any], options: dict[str, object], message: str
) -> None:
    found = fault(stored(tmp_path, kind, {"audio": AUDIO} | arrays, **options), tmp_path / "out")
    assert message in found


def test_labels_that_may_be_misspelt(tmp_path: Path) -> None:
    """The narrowest array of whole numbers is proposed, not a view that has some too."""
    counts = np.arange(900).reshape(300, 3)
    np.savez(tmp_path / "mine.npz", counts=counts, audio=AUDIO, lable=LABELS[:, None])
    found = fault(make_source("arrays", {"npz": tmp_path / "mine.npz"}), tmp_path / "out")
    assert found.startswith("mine.npz: no array 'labels', but 'lable', which may be the la")
    words = files(tmp_path / "mine", {"audio": AUDIO, "lable": LABELS})
    found = fault(make_source("arrays", {"npy": words}), tmp_path / "out")
    assert found.startswith("audio.npy, lable.npy: no array 'labels', but 'lable', which may be")


@pytest.mark.parametrize("name", ["label", "y", "GT", "Truth"])
def test_labels_by_a_usual_name(tmp_path: Path, name: str) -> None:
    named: dict[str, Any] = {name: LABELS}
    np.savez(tmp_path / "mine.npz", audio=AUDIO, **named)
    source = make_source("arrays", {"npz": tmp_path / "mine.npz"})
    assert [view.name for view in source.views] == ["audio"]
    np.testing.assert_array_equal(whole(source, "all").labels, LABELS)
    np.savez(tmp_path / "two.npz", audio=AUDIO, gnd=LABELS[::-1], **named)
    found = fault(make_source("arrays", {"npz": tmp_path / "two.npz"}), tmp_path / "out")
    assert f"gnd and {name} may both be the labels" in found
    options = {"labels_name": name, "ignore": ["gnd"]}  # as it says
    source = make_source("arrays", {"npz": tmp_path / "two.npz"} | options)
    np.testing.assert_array_equal(whole(source, "all").labels, LABELS)


def test_options(tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", audio=AUDIO)
    (audio,) = files(tmp_path / "mine", {"audio": AUDIO})
    cases: list[tuple[dict[str, object], str]] = [
        ({}, "arrays: options: set either npz or npy, not both or neither"),
        (
            {"npz": tmp_path / "mine.npz", "npy": [audio]},
            "set either npz or npy, not both or neither",
        ),
        ({"npy": []}, "arrays: npy must have at least 1 item, got []"),
        ({"npy": ["audio.npy"]}, "arrays: npy.0: expected NAME=FILE.npy (got 'audio.npy')"),
        ({"npy": ["=audio.npy"]}, "arrays: npy.0: expected NAME=FILE.npy (got '=audio.npy')"),
        ({"npy": ["a=none.npy"]}, "arrays: npy.0: no file none.npy (got 'a=none.npy')"),
        ({"npy": [audio, audio]}, "npy: two files are named 'audio'; names must be unique"),
    ]
    for options, message in cases:
        with pytest.raises(SourceError) as raised:
            make_source("arrays", options)
        assert message in str(raised.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"<!DOCTYPE html>", "cannot read video.npy: the magic string is not correct"),
        (b"", "cannot read video.npy: EOF: reading magic string"),
        (
            npy(VIDEO)[:-1],
            "cannot read video.npy: mmap length is greater than file size",
        ),
        (npy(VIDEO)[:20], "cannot read video.npy: EOF: reading array header"),
        (None, "cannot read video.npy: arrays of Python objects are pickles, never decoded"),
    ],
)
def test_files_that_are_no_npy(tmp_path: Path, data: bytes | None, message: str) -> None:
    words = files(tmp_path / "mine", {"audio": AUDIO, "video": np.array([{}])})
    if data is not None:
        (tmp_path / "mine" / "video.npy").write_bytes(data)
    found = fault(make_source("arrays", {"npy": words}), tmp_path / "out")
    assert message in found


def test_built_and_shown_from_the_command_line(tmp_path: Path) -> None:
    colours = np.zeros((300, 96, 96, 3), "u1")
    colours[:] = np.arange(300).astype("u1")[:, None, None, None]
    colours[..., 2] = 7
    words = files(tmp_path / "mine", {"sky": colours, "grey": colours[..., 0], "labels": LABELS})
    build_words = ["shards", "build", "arrays", "--npy", *words, "--quiet", "--out"]
    assert main([*build_words, str(tmp_path / "out")]) == 0
    sheet = tmp_path / "sheet.png"
    assert main(["shards", "show", str(tmp_path / "out"), "--sheet", str(sheet)]) == 0
    with Image.open(sheet) as image:
        assert image.size == (8 * 96, 6 * 96)  # 48 of the 300
        assert image.getpixel((0, 0)) == (0, 0, 7)
        assert image.getpixel((8 * 96 - 1, 6 * 96 - 1)) == (47, 47, 7)
    contact_sheet(tmp_path / "out", sheet, count=290, captions=True)  # goes on in a second block
    grey_words = [*build_words, str(tmp_path / "grey"), "--view-names", "grey", "--ignore", "sky"]
    assert main(grey_words) == 0
    contact_sheet(tmp_path / "grey", sheet, count=2)
    with Image.open(sheet) as image:
        assert image.mode == "RGB" and image.getpixel((96, 0)) == (1, 1, 1)
    (spectral,) = files(tmp_path / "mine", {"spectral": colours[:, :2, :2].repeat(4, 3)})
    build(
        make_source("arrays", {"npy": [spectral], "channels": "last"}),
        tmp_path / "spectral",
        progress=False,
    )
    with pytest.raises(ShardError, match="no view of images in 1 or 3 channels; a contact sheet"):
        contact_sheet(tmp_path / "spectral", sheet)


def test_verify_looks_at_raw_pictures(tmp_path: Path) -> None:
    split = np.full(300, "train")
    arrays = {"video": VIDEO, "labels": LABELS, "split": split}
    build(stored(tmp_path, "npz", arrays), out := tmp_path / "out", progress=False)
    assert verify(out).ok

    def change(members: list[tuple[str, bytes]]) -> None:
        members[0] = (members[0][0], npy(VIDEO[:256, :, :, :1]))
        members[2] = (members[2][0], npy(VIDEO[256:].astype("i1")))

    rewrite(out, change)
    faults = "\n".join(verify(out).faults)
    for number, found in enumerate(["uint8 (256, 4, 5, 1)", "int8 (44, 4, 5, 3)"]):
        rows = (256, 44)[number]
        assert (
            f"sample train-00000{number}: view 'video' is {found}, not uint8 ({rows}, 4, 5, 3)"
        ) in faults
    data = bytearray((out / "train-000000.tar").read_bytes())
    data[5000] ^= 1
    (out / "train-000000.tar").write_bytes(data)
    reseal(out)
    assert "train-000000: member 'video.npy' was altered: its crc32 differs" in "\n".join(
        verify(out).faults
    )


@pytest.mark.parametrize("kind", ["npz", "npy"])
@pytest.mark.parametrize(
    "names",
    [
        ["x_train", "y_train", "x_test", "y_test"],
        ["train_x", "train_y", "val_x", "val_y", "test_x", "test_y"],
        ["Xtrain", "Ytrain", "Xvalid", "Yvalid", "XTest", "YTest"],
        ["train", "train_labels", "test", "test_labels"],
    ],
)
def test_arrays_in_parts_are_splits(tmp_path: Path, kind: str, names: list[str]) -> None:
    """As Keras and MedMNIST save them; they were refused with a remedy that led to a refusal."""
    given = {}
    sizes = dict.fromkeys(["train", "val", "test"][:: 1 if len(names) == 6 else 2], 0)
    for number, (x, y) in enumerate(zip(names[::2], names[1::2], strict=True)):
        count = 300 - 100 * number
        dtype = "<i8" if number else "<i4"
        given[x] = GREY[number : number + count] if "Xtrain" in names else AUDIO[:count] + number
        given[y] = np.arange(number, number + count).astype(dtype)[:, None] % 4
        sizes[[*sizes][number]] = count
    source = stored(tmp_path, kind, given)
    assert source.splits == sizes
    x, y = {"Xtrain": "XY", "train": ["x", "labels"]}.get(names[0], "xy")
    assert [view.name for view in source.views] == [x] and source.labels.names == [*"0123"]
    for split, first, second in zip(sizes, names[::2], names[1::2], strict=True):
        rows = whole(source, split)
        expected = given[first] if given[first].dtype == np.uint8 else given[first].astype("f4")
        np.testing.assert_array_equal(np.squeeze(rows.views[x]), np.squeeze(expected))
        np.testing.assert_array_equal(rows.labels, given[second][:, 0])
    build(source, tmp_path / "out", progress=False)
    assert verify(tmp_path / "out").ok


def test_arrays_with_words_of_splits_that_are_none(tmp_path: Path) -> None:
    """One part, an array `split`, an array of the same name, or an option that names a part."""
    one = {"x_train": AUDIO, "labels": LABELS}
    views = [view.name for view in stored(tmp_path, "npz", one).views]
    assert views == ["x_train"]
    both = {"a_train": AUDIO, "a_test": AUDIO, "labels": LABELS}
    for more, options in (
        ({"split": np.array(["one"] * 300)}, {}),
        ({"a": AUDIO}, {}),
        ({}, {"view_names": ["a_train", "a_test"]}),
    ):
        source = stored(tmp_path, "npz", both | more, **options)
        assert [v.name for v in source.views] == [
            "a_train",
            "a_test",
            *("a" for _ in more if "a" in more),
        ]


@pytest.mark.parametrize("parts", [("train_mask", "val_mask", "test_mask"), ("a_train", "a_test")])
def test_arrays_beside_labels_of_all_rows_are_no_splits(
    tmp_path: Path, parts: tuple[str, ...]
) -> None:
    """The masks of a graph's nodes, or two views of the same rows; labels are whole."""
    arrays: dict[str, Any] = {name: AUDIO[:, :2] for name in parts}
    np.savez(tmp_path / "mine.npz", x=AUDIO, labels=LABELS, **arrays)
    source = make_source("arrays", {"npz": tmp_path / "mine.npz"})
    build(source, tmp_path / "out", progress=False)
    manifest = Reader(tmp_path / "out").manifest
    assert {view.name for view in manifest.views} == {"x", *parts}
    assert [*manifest.splits] == ["all"]
