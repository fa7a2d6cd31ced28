"""The source `parquet`: columns of Parquet files, and data sets that `datasets` saved."""

import json
import pickle
import sys
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from heron.base.errors import SourceError
from heron.data.reader import Reader
from heron.shards.build import build
from heron.shards.manifest import load_manifest
from heron.shards.source import Source
from heron.shards.verify import verify
from heron.sources import make_source
from tests.shards.tiny import whole


def picture(shade: int, size: tuple[int, int] = (9, 8), kind: str = "PNG") -> bytes:
    Image.new("RGB", size, (shade, shade, shade)).save(out := BytesIO(), kind)
    return out.getvalue()


def table(rows: int = 10, **others: Any) -> dict[str, Any]:
    columns: dict[str, Any] = {
        "image": [{"bytes": picture(n), "path": None} for n in range(rows)],
        "caption": [f"picture {n}" for n in range(rows)],
        "sensors": [[n, n + 0.5] for n in range(rows)],
        "age": list(range(rows)),
        "kind": [n % 2 for n in range(rows)],
        "tags": [["b"] * (n % 2) + ["a"] * (n > 4) for n in range(rows)],
        "calm": [n % 2 == 0 for n in range(rows)],
    }
    return columns | others


VIEWS: dict[str, object] = {
    "image": ["image"],
    "text": ["words=caption"],
    "vector": ["numbers=sensors,age"],
}


def parquet(folder: Path, columns: dict[str, Any], **options: object) -> Source:
    pq.write_table(pa.table(columns), folder / "mine.parquet", row_group_size=4)
    return make_source("parquet", {"data": [folder / "mine.parquet"], **options})


@pytest.mark.parametrize("label", ["kind", "tags"])
def test_views_by_column(tmp_path: Path, label: str) -> None:
    source = parquet(tmp_path, table(), **VIEWS, label=[label])
    found = [(view.name, view.kind, view.shape) for view in source.views]
    assert found == [
        ("image", "image", (8, 9, 3)),
        ("words", "text", (-1,)),
        ("numbers", "vector", (3,)),
    ]
    rows = source.read("all", 2, 7)  # over three groups of rows
    assert rows.keys == [f"all-{n:08d}" for n in range(2, 7)]
    assert rows.views["words"] == [f"picture {n}".encode() for n in range(2, 7)]
    assert rows.views["image"] == [picture(n) for n in range(2, 7)]
    np.testing.assert_array_equal(rows.views["numbers"], [[n, n + 0.5, n] for n in range(2, 7)])
    if label == "tags":
        assert source.labels.names == ["a", "b"]
        assert rows.labels.tolist() == [[n > 4, n % 2] for n in range(2, 7)]
    else:
        assert source.labels.names == ["0", "1"] and rows.labels.tolist() == [0, 1, 0, 1, 0]
    again = pickle.loads(pickle.dumps(source)).read("all", 2, 7)  # as a reading process does
    assert again.views["image"] == rows.views["image"]
    build(source, tmp_path / "out", shard_rows=3, progress=False)
    assert verify(tmp_path / "out").ok
    pixels = Reader(tmp_path / "out").read("image", np.array([7]))
    assert (pixels == 7).all() and pixels.shape == (1, 8, 9, 3)


def test_vectors_alone_are_blocks_and_splits_go_by_names(tmp_path: Path) -> None:
    for name, rows in (("train-00000", 6), ("train-00001", 5), ("test-00000", 3)):
        (tmp_path / "data").mkdir(exist_ok=True)
        pq.write_table(pa.table(table(rows)), tmp_path / "data" / f"{name}.parquet")
    options = {"vector": ["sensors"], "label": ["calm", "kind"]}
    source = make_source("parquet", {"data": [tmp_path / "data"], **options})
    assert source.splits == {"test": 3, "train": 11} and source.block_rows == 256
    assert source.labels.names == ["calm", "kind"]
    sensors = np.asarray(whole(source, "train").views["sensors"])
    assert sensors[:, 0].tolist() == [*range(6), *range(5)]
    (tmp_path / "data" / "other.parquet").write_bytes(b"")
    with pytest.raises(
        SourceError, match="other.parquet is in no split, but test-00000.parquet is in one"
    ):
        _ = make_source("parquet", {"data": [tmp_path / "data"], **options}).splits


def test_a_saved_folder_of_pictures_and_captions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    kinds = datasets.ClassLabel(names=["cat", "dog"])
    columns = table(6, kind=[0, 1, 1, 0, -1, 1], tags=[[0], [1, 0], [], [1], [0], []])
    columns["matrix"] = [np.full((2, 2), n, "f4") for n in range(6)]
    features = datasets.Dataset.from_dict(table(6)).features | {
        "image": datasets.Image(),
        "kind": kinds,
        "tags": datasets.List(kinds),
        "matrix": datasets.Array2D((2, 2), "float32"),
    }
    made = datasets.Dataset.from_dict(columns, features=datasets.Features(features))
    datasets.DatasetDict({"train": made, "dev": made.select([3, 1])}).save_to_disk(tmp_path / "a")
    made.to_parquet(tmp_path / "train.parquet")
    for data in (tmp_path / "a", tmp_path / "a" / "train", tmp_path / "train.parquet"):
        options: dict[str, object] = {"image": ["image"], "text": ["caption"], "vector": ["matrix"]}
        options |= {"data": [data], "missing_label": "unlabelled"}
        source = make_source("parquet", options | {"label": ["kind"]})
        split = next(iter(source.splits))
        assert source.labels.names == ["cat", "dog"]
        rows = whole(source, split)
        assert rows.labels.tolist() == [0, 1, 1, 0, -1, 1]
        np.testing.assert_array_equal(
            rows.views["matrix"], np.repeat(np.arange(6), 4).reshape(6, 4)
        )
        tags = make_source("parquet", options | {"label": ["tags"]})
        assert tags.labels.names == ["cat", "dog"]
        found = [[1, 0], [1, 1], [0, 0], [0, 1], [1, 0], [0, 0]]
        assert whole(tags, split).labels.tolist() == found
    assert make_source("parquet", options | {"data": [tmp_path / "a"]}).splits == {
        "train": 6,
        "dev": 2,
    }
    build(
        make_source("parquet", options | {"data": [tmp_path / "a"]}),
        tmp_path / "out",
        progress=False,
    )
    assert verify(tmp_path / "out").ok


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        (
            {"label": [0, 1] * 5, "y": [0, 1] * 5},
            {"image": None},
            "no view was chosen, and the columns label and y may be the label; choose one with "
            "--label, as in --image image --text caption --vector sensors --label label",
        ),
        ({}, {"image": ["picture"]}, "no column 'picture', only image, caption, sensors, age"),
        ({}, {"text": ["image=caption"]}, "a second view 'image'; use VIEW=COLUMN"),
        (
            {"image": [{"bytes": None, "path": "a.jpg"}] * 10},
            {},
            "column image, row 0 has None instead of the",
        ),
        (
            {"image": [b"GIF89a"] * 10},
            {},
            "column image, row 0 is a damaged GIF",
        ),
        ({"caption": [None] * 10}, {"text": ["caption"]}, "row 0 must be text, got None; fi"),
        (
            {"sensors": [[1.0]] * 9 + [[2.0, 3]]},
            {"vector": ["sensors"]},
            "values; every row must have the same number",
        ),
        ({"sensors": [[1.0, None]] * 10}, {"vector": ["sensors"]}, "double with rows that are mis"),
        (
            {},
            {"vector": ["caption"]},
            "caption is string ; every row must have the same number of numbers",
        ),
        (
            {"age": [1, None] * 5},
            {"label": ["age"]},
            "age is null in row 1, but each row needs a label",
        ),
        ({"age": [0.5] * 10}, {"label": ["age"]}, "label age must be a class in each row, got 0.5"),
        (
            {"tags": [[0.5]] * 10},
            {"label": ["tags"]},
            "lists must have class numbers or names, got [0.5]",
        ),
        (
            {},
            {"label": ["age", "kind"]},
            "label age is 2 in a row; several label columns must be 0 or 1",
        ),
        ({"kind": [1, -1] * 5}, {"label": ["kind"]}, "labels are only -1 and 1"),
    ],
)
def test_errors(
    tmp_path: Path, columns: dict[str, Any], options: dict[str, object], message: str
) -> None:
    source = parquet(tmp_path, table(**columns), **({"image": ["image"]} | options))
    with pytest.raises(SourceError) as fault:
        build(source, tmp_path / "out", progress=False)
    assert message in str(fault.value)


def one_label(**columns: Any) -> dict[str, Any]:
    return {"label": ["cat", "dog"] * 5} | columns


PICTURES = [{"bytes": picture(n), "path": None} for n in range(10)]


@pytest.mark.parametrize(
    ("columns", "views", "label"),
    [
        (one_label(image=PICTURES), {"image": "image"}, "label"),
        (one_label(img=[p["bytes"] for p in PICTURES]), {"img": "image"}, "label"),
        (
            {"image": PICTURES, "caption": ["a cat"] * 10, "url": [f"{n}" for n in range(10)]},
            {"image": "image", "caption": "text"},
            None,
        ),
        (
            {"image": PICTURES, "breed": list("ab") * 5, "id": range(10)},
            {"image": "image"},
            "breed",
        ),
        ({"Text": [f"no {n}" for n in range(10)], "Label": [0, 1] * 5}, {"Text": "text"}, "Label"),
        ({"review": [f"no {n}" for n in range(10)], "y": [0, 1] * 5}, {"review": "text"}, "y"),
        (one_label(e=[[n, 0.5] for n in range(10)], age=range(10)), {"e": "vector"}, "label"),
        (one_label(a=range(10), b=[n / 2 for n in range(10)]), {"features": "vector"}, "label"),
        (one_label(a=range(10), __index_level_0__=range(10)), {"a": "vector"}, "label"),
    ],
)
def test_columns_with_one_reading_need_no_option(
    tmp_path: Path,
    columns: dict[str, Any],
    views: dict[str, str],
    label: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = parquet(tmp_path, columns)
    assert {view.name: view.kind for view in source.views} == views
    assert source.labels.kind == ("none" if label is None else "multi_class")
    build(source, tmp_path / "out", progress=False)
    assert "parquet: read as --" in caplog.text and verify(tmp_path / "out").ok
    options = load_manifest(tmp_path / "out").built_from.options
    assert options["label"] == ([label] if label else None)
    given = {kind: options[kind] for kind in ("image", "text", "vector", "label")}
    build(parquet(tmp_path, columns, **given), tmp_path / "out", progress=False)  # complete


def test_columns_are_named_in_any_case(tmp_path: Path) -> None:
    source = parquet(tmp_path, table(), image=["Image"], vector=["n=SENSORS,age"], label=["Kind"])
    assert [view.name for view in source.views] == ["image", "n"]
    assert source.options()["label"] == ["kind"]
    source = parquet(tmp_path, table(KIND=[1] * 10), image=["image"], label=["Kind"])
    with pytest.raises(SourceError, match="no column 'Kind', only .*; did you mean 'kind'"):
        _ = source.views


def test_files_that_are_none_or_of_two_sets(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"<html>")
    options: dict[str, object] = {"data": [tmp_path / "a.parquet"], "vector": ["age"]}
    with pytest.raises(SourceError, match="which must be a Parquet or an Arrow file"):
        _ = make_source("parquet", options).splits
    for name in ("a", "b"):
        pq.write_table(pa.table({"age": [1], name: [2]}), tmp_path / f"{name}.parquet")
    with pytest.raises(SourceError, match="its columns age int64, b int64 differ from those of"):
        _ = make_source(
            "parquet", options | {"data": [tmp_path / f"{n}.parquet" for n in "ab"]}
        ).splits
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match="no Parquet files, and no state.json of Dataset.save_to"):
        _ = make_source("parquet", options | {"data": [tmp_path / "empty"]}).splits
    (tmp_path / "empty" / "state.json").write_text('{"_data_files": [{"filename": "../a"}]}')
    with pytest.raises(SourceError, match="has no list of names under '_data_files', as a file of"):
        _ = make_source("parquet", options | {"data": [tmp_path / "empty"]}).splits
    with pytest.raises(SourceError, match="set either data or hub, not both or neither"):
        make_source("parquet", {"vector": ["age"]})


def saved(folder: Path, table: Any, **state: Any) -> Path:
    """What `Dataset.save_to_disk` writes; versions before 2 wrote an indices mapping too."""
    folder.mkdir()
    write_arrow(folder / "dataset.arrow", table)
    state = {"_data_files": [{"filename": "dataset.arrow"}], "_fingerprint": "x"} | state
    (folder / "state.json").write_text(json.dumps(state))
    return folder


def write_arrow(path: Path, table: Any) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


@pytest.mark.parametrize("key", ["_indices_data_files", "_indices_files"])
def test_a_saved_folder_with_an_indices_mapping(tmp_path: Path, key: str) -> None:
    """All 30 stored rows were read, in stored order, and are by `datasets` of today."""
    x, y = np.arange(30.0), np.arange(30) % 2
    mapped = {key: [{"filename": "a.arrow"}, {"filename": "b.arrow"}], "_split": "train[:10%]"}
    folder = saved(tmp_path / "d", pa.table({"x": x, "label": y}), **mapped)
    write_arrow(folder / "a.arrow", pa.table({"indices": pa.array([5, 3], pa.uint64())}))
    write_arrow(folder / "b.arrow", pa.table({"indices": pa.array([1, 5], pa.uint64())}))
    other = saved(tmp_path / "e", pa.table({"x": x + 100, "label": y}), _split="test")
    options: dict[str, object] = {"vector": ["x"], "label": ["label"]}
    source = make_source("parquet", options | {"data": [other, folder]})
    assert source.splits == {"test": 30, "train": 4}
    assert [file.name for file in source.input_files()] == [
        *("dataset.arrow", "dataset.arrow", "a.arrow", "b.arrow")
    ]
    rows = whole(source, "train")
    np.testing.assert_array_equal(rows.views["x"], [[5], [3], [1], [5]])
    assert rows.labels.tolist() == [1, 1, 1, 1]
    np.testing.assert_array_equal(whole(source, "test").views["x"], x[:, None] + 100)
    for values in (pa.array([5, 30]), pa.array([5, -1]), pa.array([5.0, 1])):
        write_arrow(folder / "a.arrow", pa.table({"indices": values}))
        with pytest.raises(SourceError, match=r"a\.arrow: indices must be 0 to 29; download it ag"):
            _ = make_source("parquet", options | {"data": [folder]}).splits
    write_arrow(folder / "a.arrow", pa.table({"x": [1.0]}))
    with pytest.raises(SourceError, match=r"a\.arrow has no column 'indices' alone"):
        _ = make_source("parquet", options | {"data": [folder]}).splits


def test_the_rows_that_found_an_indices_mapping() -> None:
    folder = Path(__file__).parents[3] / "shared" / "found" / "hf_idx" / "train"
    if not folder.is_dir():
        pytest.skip("needs the inputs that were found to fail")
    with pa.memory_map(str(folder / "dataset.arrow")) as stream:
        stored = pa.ipc.open_stream(stream).read_all()
    source = make_source("parquet", {"data": [folder], "vector": ["x"], "label": ["label"]})
    rows = whole(source, "train")
    expected = np.array(stored["x"].to_pylist(), np.float32)[[5, 3, 1]]
    np.testing.assert_array_equal(rows.views["x"], expected)
    assert rows.labels.tolist() == [stored["label"][n].as_py() for n in (5, 3, 1)]


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"_mask_files": []}, "has '_mask_files', and what that does to rows is not known; load"),
        ({"_data_files": [{"filename": "dataset.arrow", "take": 3}]}, "has no list of names under"),
        ({"_data_files": [{"filename": "../dataset.arrow"}]}, "has no list of names under"),
        ({"_indices_files": [{"filename": "gone.arrow"}]}, "gone.arrow is missing, which its st"),
        ({"_data_files": []}, "has no list of names under '_data_files'"),
    ],
)
def test_what_a_saved_folder_says_is_used_or_refused(
    tmp_path: Path, state: dict[str, Any], said: str
) -> None:
    folder = saved(tmp_path / "d", pa.table({"x": [1.0, 2.0]}), **state)
    with pytest.raises(SourceError, match=said):
        _ = make_source("parquet", {"data": [folder], "vector": ["x"]}).splits


def test_class_names_are_those_of_the_folder_and_agree(tmp_path: Path) -> None:
    """Those of `dataset_info.json` were not read, and those of later files not compared."""
    for part, names in (("train", ["cat", "dog"]), ("test", ["dog", "cat"])):
        folder = saved(tmp_path / part, pa.table({"x": [1.0, 2], "y": [0, 1]}), _split=part)
        feature = {"names": names, "_type": "ClassLabel"}
        (folder / "dataset_info.json").write_text(json.dumps({"features": {"y": feature}}))
    options: dict[str, object] = {"vector": ["x"], "label": ["y"]}
    source = make_source("parquet", options | {"data": [tmp_path / "test"]})
    assert source.labels.names == ["dog", "cat"]
    both = {"data": [tmp_path / "train", tmp_path / "test"]}
    with pytest.raises(
        SourceError, match="the classes of y are dog, cat, but those of .* cat, dog"
    ):
        _ = make_source("parquet", options | both).splits


def test_a_data_set_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(pa.table(table()), tmp_path / "0.parquet")
    commit = "ab" * 20
    siblings = [
        SimpleNamespace(rfilename=name, size=9)
        for name in ("README.md", "one/train/0.parquet", "one/test/0.parquet", "two/0.parquet")
    ]

    class HfApi:
        def dataset_info(self, name: str, revision: str | None, files_metadata: bool) -> Any:
            if name == "gone":
                raise ConnectionError("no network")
            return SimpleNamespace(sha=commit, siblings=siblings)

    def hf_hub_download(name: str, path: str, repo_type: str, revision: str) -> str:
        assert (repo_type, revision) == ("dataset", commit)
        return str(tmp_path / "0.parquet")

    hub = SimpleNamespace(HfApi=HfApi, hf_hub_download=hf_hub_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    options: dict[str, object] = {"hub": f"me/birds@{commit}", "vector": ["age"], "subset": "one"}
    source = make_source("parquet", options)
    assert source.splits == {"test": 10, "train": 10} and source.dataset == "birds"
    for change, message in (
        (
            {"hub": "me/birds"},
            f"names no commit, which keeps .*; the current one is --hub me/birds@{commit}",
        ),
        ({"subset": "three"}, "has 0 Parquet files .* in three/; .* are one/test, one/train, two"),
        (
            {"hub": f"gone@{commit}"},
            "ConnectionError: no network; check the name and the network",
        ),
    ):
        with pytest.raises(SourceError, match=message):
            _ = make_source("parquet", options | change).splits
    for remedy in ({"subset": "one/test"}, {"hub": None, "data": [tmp_path / "0.parquet"]}):
        assert make_source("parquet", options | {"subset": None} | remedy).splits


@pytest.mark.parametrize(
    ("sensors", "told"),
    [
        ([[[1, 2], [3, 4]], [[5], [6, 7]], [[8, 9], [1, 2, 3]]], "lists of 1 and 2 values"),
        (
            [[1, 2], None, [3, 4]],
            "sensors is list<element: int64> ; every row must have the same number of",
        ),
        ([[1, 2], [3, None], [4, 5]], "sensors is int64 with rows that are missing"),
        ([[1, 2], [3, 4], [5]], "lists of 1 and 2 values; every row must have the same number"),
    ],
)
def test_lists_of_several_lengths(tmp_path: Path, sensors: list[Any], told: str) -> None:
    source = parquet(tmp_path, {"sensors": sensors}, vector=["sensors"])
    with pytest.raises(SourceError, match=told):
        whole(source, "all")


@pytest.mark.parametrize("view", [{"image": ["x"]}, {"text": ["x"]}, {"vector": ["x"]}])
def test_no_rows(tmp_path: Path, view: dict[str, object]) -> None:
    source = parquet(tmp_path, {"x": pa.array([], pa.binary())}, **view)
    with pytest.raises(SourceError, match="mine.parquet has no rows; pass other files"):
        _ = source.splits
