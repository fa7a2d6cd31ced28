"""What each source stores is what its publisher wrote, but for the table of docs/data.md."""

import csv
import re
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from scipy.io import savemat

from heron.base.errors import SourceError
from heron.shards.build import build
from heron.shards.manifest import load_manifest
from heron.shards.verify import verify
from heron.sources import SOURCES, make_source
from tests.shards.tiny import ARFF, XML, whole

DRAW = np.random.default_rng(0)
ROWS = 30
# Rows that a reader may be tempted to change: out of order, twice, large, small, negative.
X = DRAW.normal(size=(ROWS, 3)) * [1e-7, 1, 1e9]
X[[4, 9]] = X[2]
Y = DRAW.permutation(np.arange(ROWS) % 3)
NAMES = np.array(["b ", "A", "a"])[Y]  # upper and lower case differ
TEXTS = [f'  Ein {"É" * n} Text,\t"{n}"  ' for n in range(ROWS)]
Found = tuple[dict[str, Any], Any, list[str]]  # views, classes, and names of the classes


def tall_jpeg(number: int) -> bytes:
    """A photograph on its side, whose pixels no file without it would have."""
    exif = Image.Exif()
    exif[0x0112] = 6
    noise = DRAW.integers(0, 256, (5 + number, 8, 3), np.uint8)
    Image.fromarray(noise).save(out := BytesIO(), "JPEG", exif=exif, quality=35)
    return out.getvalue()


def odd_png(number: int) -> bytes:
    """A transparent picture, or one of 16 bits."""
    mode = Image.fromarray(DRAW.integers(0, 256, (6, 6, 4), np.uint8))
    deep = Image.fromarray(DRAW.integers(0, 1 << 16, (6, 6), np.uint16))
    (deep if number % 2 else mode).save(out := BytesIO(), "PNG")
    return out.getvalue()


FILES = {f"{'ab'[n % 2]}/{n:02}.{'jpg' if n % 3 else 'png'}": n for n in range(6)}
PICTURES = {name: (tall_jpeg if name.endswith("jpg") else odd_png)(n) for name, n in FILES.items()}


def mulan(folder: Path) -> tuple[dict[str, Any], Found]:
    head, _ = ARFF.split("1.5,2")
    rows = "".join(
        f"{a!r},{b!r},{y % 2},{y // 2}\n" for (a, b), y in zip(X[:, 1:].tolist(), Y, strict=True)
    )
    (folder / "t.arff").write_text(head + rows)
    (folder / "t.xml").write_text(XML)
    found = {"view1": X[:, 1:].astype("f4")}, np.stack([Y % 2, Y // 2], 1), ["calm", "keen"]
    return {"arff": [folder / "t.arff"], "xml": folder / "t.xml"}, found


def arrays(folder: Path) -> tuple[dict[str, Any], Found]:
    pixels = DRAW.integers(0, 256, (ROWS, 4, 5, 3), np.uint8)
    big = np.asfortranarray(X.astype(">f8"))
    np.savez(folder / "t.npz", x=big, picture=np.asfortranarray(pixels), y=NAMES)
    views = {"x": X.astype("f4"), "picture": pixels}
    return {"npz": folder / "t.npz"}, (views, NAMES, ["A", "a", "b "])


def mat(folder: Path) -> tuple[dict[str, Any], Found]:
    savemat(folder / "t.mat", {"X": X.T, "Y": Y[:, None] + 1.0})
    return {"mat": folder / "t.mat"}, ({"X": X.astype("f4")}, (Y + 1).astype(str), [*"123"])


def parquet(folder: Path) -> tuple[dict[str, Any], Found]:
    table = pd.DataFrame({"x": list(X), "caption": TEXTS, "kind": NAMES})
    table.to_parquet(folder / "t.parquet", row_group_size=7)
    options = {"vector": ["x"], "text": ["caption"], "label": ["kind"]}
    views = {"x": X.astype("f4"), "caption": [text.encode() for text in TEXTS]}
    return options | {"data": [folder / "t.parquet"]}, (views, NAMES, ["A", "a", "b "])


def table(folder: Path) -> tuple[dict[str, Any], Found]:
    names = np.char.strip(NAMES)
    pd.DataFrame(X).assign(kind=names).to_csv(folder / "t.csv", index=False, header=list("abck"))
    views = {"features": X.astype("f4")}
    return {"csv": [str(folder / "t.csv")]}, (views, names, ["A", "a", "b"])


def folder(folder: Path) -> tuple[dict[str, Any], Found]:
    for name, data in PICTURES.items():
        (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "tree" / name).write_bytes(data)
    found = {"image": [PICTURES[n] for n in sorted(PICTURES)]}, sorted(n[0] for n in FILES), [*"ab"]
    return {"folder": folder / "tree"}, found


def captions(folder: Path) -> tuple[dict[str, Any], Found]:
    options, ((views), *_) = SIMPLE["folder"](folder)
    rows = [*sorted(PICTURES), sorted(PICTURES)[0]]  # one has two captions
    with (folder / "t.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows(zip(rows, TEXTS, strict=False))
    images = [*views["image"], views["image"][0]]
    texts = [text.encode() for text in TEXTS[: len(rows)]]
    options |= {"csv": folder / "t.csv"}
    return options, ({"image": images, "caption": texts}, [], [])


SIMPLE: dict[str, Callable[[Path], tuple[dict[str, Any], Found]]] = {
    f.__name__: f for f in (mulan, arrays, mat, parquet, table, folder, captions)
}
ELSEWHERE = {
    "celeba": "test_celeba.py::test_a_partition_splits_the_rows",
    "cifar": "test_cifar.py::test_ten_classes",
    "idx": "test_idx.py::test_grey_pictures_of_both_splits",
    "xrmb": "test_xrmb.py::test_every_split_of_every_format",
    "tu": "test_tu.py::test_a_folder_is_built_as_its_files_say",
}
DRAWN = {"faces", "frames"}


@pytest.mark.parametrize("name", SIMPLE)
def test_what_is_stored_is_what_was_published(name: str, tmp_path: Path) -> None:
    options, (views, targets, names) = SIMPLE[name](tmp_path)
    source = make_source(name, options)
    rows = whole(source, "all")
    assert list(source.splits) == ["all"] and source.labels.names == names
    for view, expected in views.items():
        stored = rows.views[view]
        if isinstance(expected, list):
            assert stored == expected
        else:
            np.testing.assert_array_equal(stored, expected)
    assert {*rows.views} == {*views}
    if names and source.labels.kind == "multi_class":
        assert [names[row] for row in rows.labels] == [*targets]
    elif names:
        np.testing.assert_array_equal(rows.labels, targets)
    build(source, tmp_path / "out", progress=False)
    assert verify(tmp_path / "out").ok
    assert load_manifest(tmp_path / "out").rows("all") == len(rows.labels)


def test_the_table_has_a_line_for_every_source() -> None:
    assert {*SOURCES} == {*SIMPLE, *ELSEWHERE, *DRAWN}
    root = Path(__file__).parents[2]
    text = (root / "docs" / "data.md").read_text()
    section = text.partition("### What is changed of what you have")[2].partition("\n###")[0]
    lines = re.findall(r"^\| (`.*?) \| ", section, re.M)
    assert {word for line in lines for word in re.findall("`(.*?)`", line)} == {*SOURCES}
    for place in ELSEWHERE.values():
        file, _, test = place.partition("::")
        assert f"def {test}(" in (Path(__file__).parent / file).read_text(), place


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        (np.array([1, 2**53 + 1] * 9), "9007199254740993, which float32 cannot represent"),
        (np.array([1.0, 2**24 + 1] * 9), "16777217.0, which float32 cannot represent"),
        (np.array([1.5, 2**24 + 1] * 9), ""),  # measured, and rounded as every such number is
        (np.array([1e20, -3e30] * 9), ""),
        (np.array([2.0**24, 2.0**30] * 9), ""),
    ],
)
@pytest.mark.parametrize("name", ["arrays", "parquet", "parquet beside floats"])
def test_a_whole_number_that_float32_cannot_hold(
    tmp_path: Path, values: Any, fault: str, name: str
) -> None:
    """An id of 54 bits, or one that pandas stores as float64, became another row's."""
    if name == "arrays":
        np.savez(tmp_path / "t.npz", x=values[:, None])
        options: dict[str, Any] = {"npz": tmp_path / "t.npz", "label_kind": "none"}
    else:
        beside = {"z": np.arange(18) + 0.5} if "beside" in name else {}
        pd.DataFrame({"x": values, **beside}).to_parquet(tmp_path / "t.parquet")
        options = {"data": [tmp_path / "t.parquet"], "vector": [f"v={','.join(['x', *beside])}"]}
    source = make_source(name.partition(" ")[0], options)
    if fault:
        with pytest.raises(SourceError, match=fault):
            build(source, tmp_path / "out", progress=False)
    else:
        view = next(iter(whole(source, "all").views.values()))
        np.testing.assert_array_equal(np.asarray(view)[:, 0], values.astype("f4"))


@pytest.mark.parametrize("name", ["table", "mulan"])
def test_numbers_of_a_text_that_are_rounded_are_said(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options, _ = SIMPLE[name](tmp_path)
    path = Path((options.get("csv") or options["arff"])[0])
    assert make_source(name, options).splits and "rounded" not in caplog.text
    path.write_text(re.sub(r"^-?[0-9.e-]+(,.*,)", r"16777217\1", path.read_text(), flags=re.M))
    assert make_source(name, options).splits
    column = "a" if name == "table" else "height"
    said = f"{column}'? has whole numbers above 16,777,216, which are rounded to float32"
    assert re.search(said, caplog.text)
