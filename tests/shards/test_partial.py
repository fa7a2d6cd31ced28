"""Rows that lack views, and single labels that are not known: built, verified, shown, read."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heron.base.errors import ShardError, SourceError
from heron.data.reader import Reader
from heron.shards.build import build
from heron.shards.index import ShardIndex
from heron.shards.manifest import Labels, load_manifest
from heron.shards.show import show
from heron.shards.source import Source
from heron.shards.verify import verify
from heron.sources import make_source
from heron.sources.labels import with_unknown

RANDOM = np.random.default_rng(0)
SOUND = RANDOM.normal(3, 2, (300, 4)).astype("f4")
SIGHT = RANDOM.normal(size=(300, 2)).astype("f4")
LABELS = RANDOM.integers(0, 2, (300, 3)).astype("f4")
DEAF, BLIND = np.arange(300) % 3 == 1, np.arange(300) % 5 == 3  # 30 rows would be both
BLIND &= ~DEAF


def lacking(values: Any, rows: Any) -> Any:
    return np.where(rows[:, None], np.float32(np.nan), values)


def source(folder: Path, arrays: dict[str, Any] | None = None, **options: Any) -> Source:
    given = {"sound": lacking(SOUND, DEAF), "sight": lacking(SIGHT, BLIND), "labels": LABELS}
    np.savez(folder / "mine.npz", **(given | (arrays or {})))
    names = {"view_names": ["sound", "sight"], "label_kind": "multi_label"}
    return make_source("arrays", {"npz": folder / "mine.npz", **names, **options})


ALLOWED: dict[str, Any] = {"missing": "allow", "unknown": "allow"}


def test_rows_of_blocks_that_lack_views(tmp_path: Path) -> None:
    manifest = build(source(tmp_path, **ALLOWED), tmp_path / "out", progress=False)
    assert manifest.partial and [view.missing for view in manifest.views] == ["allow", "allow"]
    assert verify(tmp_path / "out").ok
    reader, rows = Reader(tmp_path / "out"), np.arange(300)
    there = np.stack([~DEAF, ~BLIND], 1)
    np.testing.assert_array_equal(reader.present(rows, ["sound", "sight"]), there)
    np.testing.assert_array_equal(reader.present(rows, ["sight"]), there[:, 1:])
    np.testing.assert_array_equal(reader.read("sound", rows)[~DEAF], SOUND[~DEAF])
    assert not reader.read("sound", rows)[DEAF].any()
    mean, std = (np.array(x) for x in (manifest.views[0].mean, manifest.views[0].std))
    np.testing.assert_allclose(mean, SOUND[~DEAF].mean(0), rtol=1e-5)  # of rows that have it
    np.testing.assert_allclose(std, SOUND[~DEAF].std(0), rtol=1e-5)
    lines = show(tmp_path / "out").split("\n")
    counts = {" ".join(line.split()[:-1]): line.split()[-1] for line in lines if line}
    assert counts["rows with"] == "rows" and counts["sound + sight"] == str(there.all(1).sum())
    assert counts["sound"] == str(BLIND.sum()) and counts["sight"] == str(DEAF.sum())


def test_a_view_that_no_row_of_train_has(tmp_path: Path) -> None:
    late = np.arange(300) > 99
    split = np.where(late, "test", "train")
    arrays = {"sound": SOUND, "sight": lacking(SIGHT, ~late), "split": split}
    build(source(tmp_path, arrays, **ALLOWED), tmp_path / "out", progress=False)
    sound, sight = load_manifest(tmp_path / "out").views
    assert len(sound.mean or ()) == 4 and sight.mean is sight.std is None
    assert verify(tmp_path / "out").ok


def test_samples_without_a_member(tmp_path: Path) -> None:
    manifest = build(make_source("tests.mixed.Mixed", {"missing": True}), tmp_path, progress=False)
    assert verify(tmp_path, decode=True).ok
    whole = build(make_source("tests.mixed.Mixed", {}), tmp_path / "whole", progress=False)
    assert (
        not whole.partial
        and '"missing": null' not in (tmp_path / "whole/manifest.json").read_text()
    )
    reader, other, rows = Reader(tmp_path), Reader(tmp_path / "whole"), np.arange(60)
    names = [view.name for view in manifest.views]
    for number, name in enumerate(names):
        there = rows % 6 != 2 * number + 1
        np.testing.assert_array_equal(reader.present(rows, [name])[:, 0], there)
        found = reader.read(name, rows)
        np.testing.assert_array_equal(found[there], other.read(name, rows)[there])
        assert (found[~there] == (-1 if name == "caption" else 0)).all()
    assert "image + caption + sensors" in show(tmp_path)


def test_an_index_that_says_otherwise_is_refused(tmp_path: Path) -> None:
    manifest = build(make_source("tests.mixed.Mixed", {"missing": True}), tmp_path, progress=False)
    (shard, *_), (index_of, *_) = manifest.splits["train"], sorted(tmp_path.glob("train*.npz"))
    index = ShardIndex.read(index_of)
    assert index.present is not None and manifest.index_fault(shard, index) is None
    for row, column, message in ((1, None, "a row lacks a view"), (0, 0, "and no member for it")):
        present = index.present.copy()
        present[row, slice(None) if column is None else column] = 0
        assert message in str(manifest.index_fault(shard, replace(index, present=present)))
    assert "got None" in str(manifest.index_fault(shard, replace(index, present=None)))


@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        ({}, {"unknown": "allow"}, "which is not a finite float32"),
        ({"sight": lacking(SIGHT, DEAF)}, ALLOWED, "row 1 has none of its views"),
        ({"sound": np.where(SOUND > 7, np.nan, SOUND)}, ALLOWED, "which is not a finite float32"),
        ({"labels": LABELS + 0.5}, ALLOWED, "label '0' of row 0 must be 0 or 1, or NaN"),
        ({"labels": LABELS[:, 0]}, ALLOWED, "must be numbers [rows, labels]"),
        (
            {"labels": LABELS},
            {"missing": "allow"},
            "must be integers or names [rows], or 0/1 [rows",
        ),
        (
            {"labels": np.where(LABELS > 0, np.nan, LABELS)},
            {"missing": "allow"},
            "is nan; labels must be integers; if single labels of a row are unknown",
        ),
    ],
)
def test_refused(
    tmp_path: Path, arrays: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises((SourceError, ShardError)) as raised:
        build(source(tmp_path, arrays, **options), tmp_path / "out", progress=False)
    assert message in str(raised.value)


@pytest.mark.parametrize("nothing", [np.nan, -1, 255])
def test_unknown_labels(tmp_path: Path, nothing: float) -> None:
    hidden = RANDOM.random(LABELS.shape) < 0.4
    hidden[:5] = True  # rows without any label
    given = np.where(hidden, nothing, LABELS)
    given = given if np.isnan(nothing) else given.astype(int)
    manifest = build(source(tmp_path, {"labels": given}, **ALLOWED), tmp_path / "o", progress=False)
    assert verify(tmp_path / "o").ok and manifest.labels.unknown == "allow"
    reader, rows = Reader(tmp_path / "o"), np.arange(300)
    assert reader.may_lack_labels and not reader.is_labelled(rows)[:5].any()
    np.testing.assert_array_equal(reader.targets(rows), np.where(hidden, np.nan, LABELS))
    truth = reader.ground_truth(rows)
    labelled = ~hidden.all(1)
    np.testing.assert_array_equal(truth[labelled], np.where(hidden, np.nan, LABELS)[labelled])
    rate = 100 * LABELS[:, 0][~hidden[:, 0]].mean()  # of rows where it is known
    assert f"0  {rate:5.1f} %" in show(tmp_path / "o")


def test_single_labels_of_a_class_are_not_unknown() -> None:
    with pytest.raises(ValueError, match="not multi_label"):
        Labels(kind="multi_class", names=["a", "b"], unknown="allow")
    stored, labels = with_unknown(np.array([[1.0, np.nan], [0.0, 1.0]]), ["a", "b"], "mine")
    assert stored.tolist() == [[1, 255], [0, 1]] and labels.unknown == "allow"
    with pytest.raises(SourceError, match="must have 3 columns, one per label, got"):
        with_unknown(np.zeros((2, 2)), ["a", "b", "c"], "mine")
