"""The verb: what it writes, says and refuses, on shards with planted faults."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from heron.audit.copies import read_groups
from heron.audit.findings import look
from heron.audit.report import audit
from heron.base.errors import RetrievalError
from heron.base.workers import Processes
from heron.cli.main import main
from heron.data.reader import Reader
from heron.retrieval.embeddings import Embeddings, ViewRecord
from heron.shards.build import build
from heron.sources import make_source
from tests.retrieval import made

ROWS = 400


def vectors() -> tuple[Any, Any, Any]:
    """Two views of four classes, and the classes; row 300 is a copy of row 10."""
    random = np.random.default_rng(0)
    classes = random.integers(0, 4, ROWS)
    hidden = np.eye(4)[classes] @ random.normal(size=(4, 6)) * 2 + random.normal(size=(ROWS, 6))
    left, right = (hidden @ random.normal(size=(6, 9)) for _ in range(2))
    left, right = (view + 0.3 * random.normal(size=view.shape) for view in (left, right))
    left[300], right[300] = left[10], right[10]
    classes[300] = classes[10]
    return left.astype(np.float32), right.astype(np.float32), classes


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with shards, and embeddings that are their numbers, with faults in both."""
    folder = tmp_path_factory.mktemp("audit")
    left, right, classes = vectors()
    given = classes.copy()
    given[20:40] = (given[20:40] + 1) % 4
    right[100:130] = right[102:132].copy()
    split = np.where(np.arange(ROWS) < 250, "train", "test")
    np.savez(folder / "a.npz", left=left, right=right, labels=given, split=split)
    build(make_source("arrays", {"npz": folder / "a.npz"}), folder / "data", progress=False)
    reader = Reader(folder / "data")
    order = np.arange(ROWS)
    keys = reader.sample_keys(order)
    views = [np.stack(list(reader.read(name, order))) for name in ("left", "right")]
    made.embeddings(
        folder / "e", {"hidden": np.hstack(views)}, reader.ground_truth(order),
        reader.manifest.labels.names, "multi_class", keys, data=str(folder / "data"),
    )  # fmt: skip
    return folder


def with_views(place: Path) -> Embeddings:
    e = Embeddings.open(place / "e")
    views = [ViewRecord(stored=name, width=9) for name in ("left", "right")]
    object.__setattr__(e, "manifest", e.manifest.model_copy(update={"views": views}))
    return e


def test_what_the_verb_writes(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(place / "e"), "--out", str(place / "out")]) == 0
    said = capsys.readouterr().out
    assert " of 400 labels look wrong" in said and "planted faults (95 % interval" in said
    assert "2 samples are copies, or nearly, of others, in 1 groups: 1 of these are in" in said
    names = ["audit.json", "copies.csv", "labels.csv", "labels.parquet", "outliers.csv"]
    assert sorted(p.name for p in (place / "out").iterdir()) == [*names, "report.html"]
    numbers = json.loads((place / "out" / "audit.json").read_text())
    assert numbers["labels"]["known"] == 400 and numbers["copies"]["leaks"] == 1
    with (place / "out" / "labels.csv").open(newline="") as lines:
        listed = list(csv.DictReader(lines))
    assert len(listed) == 200 and {line["decision"] for line in listed} == {""}
    reader = Reader(place / "data")
    keys = reader.sample_keys(np.arange(ROWS))
    wrong = {key for key in keys if 20 <= original(reader, keys, key) < 40}
    assert len(wrong & {line["key"] for line in listed[:20]}) >= 16
    table = pd.read_parquet(place / "out" / "labels.parquet")
    assert len(table) == 400 and table.suspicion.is_monotonic_decreasing
    page = (place / "out" / "report.html").read_text()
    assert "look wrong" in page and "suspicion" in page and 'src="http' not in page


def original(reader: Reader, keys: list[str], key: str) -> int:
    """The row of the arrays that a sample was: by its numbers, since shards are shuffled."""
    left, _, _ = vectors()
    stored = reader.read("left", np.array([keys.index(key)]))[0]
    return int(np.abs(left - stored).sum(1).argmin())


def test_the_same_bytes_on_any_processes(place: Path) -> None:
    written = []
    e = with_views(place)
    for name, executor in (("one", Processes()), ("two", Processes(2))):
        audit(e, place / name, executor=executor)
        written.append({p.name: p.read_bytes() for p in (place / name).iterdir()})
    assert written[0].keys() == written[1].keys() and "pairs-left-right.parquet" in written[0]
    assert all(written[0][name] == written[1][name] for name in written[0])


def test_views_out_of_step_are_said_in_the_order_of_the_keys(place: Path) -> None:
    e = with_views(place)
    reader = Reader(place / "data")
    found = look(e, "hidden", reader)
    (pairs,) = found.pairs
    assert pairs.views == ("left", "right") and len(pairs.rows) == ROWS
    keys = [e.samples.key(int(row)) for row in pairs.rows]
    assert keys == sorted(keys)
    assert found.outliers.keys() == {"left", "right"}
    assert found.splits == ["train", "test"]
    assert np.bincount(found.split).tolist() == [250, 150]


def test_labels_that_cannot_be_judged_are_said(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(60, 5))
    for name, targets, kind, why in (
        ("same", np.ones((60, 1)), "multi_label", "all samples have the same"),
        ("not", np.eye(3)[np.arange(60) % 3], "complementary", "say what a sample is not"),
    ):
        e = made.embeddings(tmp_path / name, {"hidden": x}, targets, ["a", "b", "c"][: targets.shape[1]], kind)  # noqa: E501  # fmt: skip
        found = look(e, "hidden", None)
        assert found.labels is None and why in found.notes[0]
    few = made.unlabelled(tmp_path / "few", x[:20])
    with pytest.raises(RetrievalError, match="has 20 samples, but an audit needs 50 or more"):
        look(few, "hidden", None)


def test_shards_of_other_samples_are_refused(place: Path, tmp_path: Path) -> None:
    keys = Reader(place / "data").sample_keys(np.arange(ROWS))[:-1] + ["other"]
    x = np.random.default_rng(0).normal(size=(ROWS, 4))
    other = made.embeddings(
        tmp_path / "o",
        {"hidden": x},
        np.ones((ROWS, 1)),
        ["a"],
        keys=keys,
        data=str(place / "data"),
    )
    # Others at the path of the embedded ones are told; it uses the labels that were embedded.
    assert "has other samples than" in audit(other, tmp_path / "told")["left_out"][-1]
    with pytest.raises(RetrievalError, match="has other samples than"):
        audit(other, tmp_path / "refused", data=str(place / "data"))
    assert main(["audit", str(place / "e"), "--out", str(tmp_path / "a"), "--data", "none"]) == 1
    e = Embeddings.open(place / "e")
    keys = [e.samples.key(n) for n in range(ROWS)]
    y = np.eye(4)[np.arange(ROWS) % 4]
    named = made.embeddings(
        tmp_path / "n", {"hidden": np.eye(4)[np.arange(ROWS) % 4]}, y, list("wxyz"), keys=keys
    )
    with pytest.raises(RetrievalError, match="has other labels than"):
        audit(named, tmp_path / "named", data=str(place / "data"))
    out = ["--out", str(tmp_path / "own"), "--data", str(place / "data")]
    assert main(["audit", str(place / "e"), *out]) == 0


def test_groups(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    e = Embeddings.open(place / "e")
    keys = [e.samples.key(n) for n in range(ROWS)]
    path = tmp_path / "groups.csv"

    def refused(text: str, words: str) -> None:
        path.write_text(text)
        out = ["--out", str(tmp_path / "out")]
        assert main(["audit", str(place / "e"), *out, "--groups", str(path)]) == 1
        assert words in " ".join(capsys.readouterr().err.split())

    lines = [f"{key},p{number // 3}\n" for number, key in enumerate(keys)]
    refused("".join(lines), "has no column 'key'; it must have the columns key and group")
    refused("key,group\n" + "".join(lines[1:]), f"no group of 1 samples, the first '{keys[0]}'")
    refused("key,group\n" + lines[0] + "".join(lines), f"names '{keys[0]}' twice; remove one")
    path.unlink()
    with pytest.raises(RetrievalError, match="No such file or directory.*; pass a CSV file"):
        read_groups(path, e)
    path.write_text("key,group\n" + "".join(lines))
    assert (np.bincount(read_groups(path, e)) == [*[3] * 133, 1]).all()
    assert main(["audit", str(place / "e"), "--out", str(tmp_path / "out"), "--groups", str(path)]) == 0  # noqa: E501  # fmt: skip


def test_labels_after_unlabelled_rows_and_views_that_rows_lack(tmp_path: Path) -> None:
    """A part without labels, and one without a view, are read over."""
    random = np.random.default_rng(0)
    y = np.eye(3)[np.arange(200) % 3]
    x = np.hstack([y @ random.normal(size=(3, 5)), y @ random.normal(size=(3, 5))])
    x += 0.1 * random.normal(size=x.shape)
    x[120:, 5:] = 0
    views = [ViewRecord(stored=name, width=5) for name in ("left", "right")]
    known = np.arange(200) >= 110
    e = made.embeddings(
        tmp_path / "e", {"hidden": x}, y, ["a", "b", "c"], "multi_class", known=known, views=2,
    )  # fmt: skip
    object.__setattr__(e, "manifest", e.manifest.model_copy(update={"views": views}))
    found = look(e, "hidden", None)
    assert found.labels is not None and len(found.labels.rows) == 90
    assert len(found.pairs[0].rows) == 120
    odd, score = found.outliers["right"]
    assert (score[120:] == 0).all() and not set(odd.tolist()) & set(range(120, 200))


def test_features_that_say_nothing_judge_no_label(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    x, y = random.normal(size=(200, 6)), np.eye(4)[random.integers(0, 4, 200)]
    e = made.embeddings(tmp_path / "e", {"hidden": x}, y, ["a", "b", "c", "d"], "multi_class")
    numbers = audit(e, tmp_path / "out")
    assert not numbers["labels"]["told"]
    assert "no label can be judged" in (tmp_path / "out" / "report.html").read_text()


def test_one_group_leaves_nothing_to_judge_by(place: Path) -> None:
    e = Embeddings.open(place / "e")
    found = look(e, "hidden", None, np.zeros(ROWS, np.int64))
    assert found.labels is None and "fewer than 5 groups" in found.notes[0]


def test_either_embeddings_or_an_encoder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--out", "out"]) == 2
    assert "pass either a folder of embeddings, or --encoder and --data" in capsys.readouterr().err
    assert main(["audit", "--encoder", "timm:resnet18", "--out", "out"]) == 2
    assert "an audit by --encoder needs the shards: add --data DATA" in capsys.readouterr().err
