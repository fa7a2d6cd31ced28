"""A data set written again with what was decided on it: labels, rows, bytes, history, refusals."""

import csv
import tarfile
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from heron.base.decisions import Decision, read_decisions, write_decisions
from heron.base.errors import SourceError
from heron.base.workers import Processes
from heron.cli.main import main
from heron.data.amend import Amended
from heron.data.reader import Reader
from heron.shards.build import build
from heron.shards.manifest import Labels, Manifest, View
from heron.shards.source import Rows, Source
from heron.shards.verify import verify
from heron.sources import make_source

RANDOM = np.random.default_rng(0)


def amending(data: Path, decisions: Path) -> Amended:
    return Amended.model_validate({"data": str(data), "decisions": decisions})


def amended(data: Path, lines: list[Decision], out: Path, **options: Any) -> Manifest:
    write_decisions(out.with_suffix(".csv"), lines)
    source = amending(data, out.with_suffix(".csv"))
    return build(source, out, shard_rows=options.pop("shard_rows", 512), progress=False, **options)


@pytest.fixture(scope="module")
def faces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("amend") / "faces"
    source = make_source("faces", {"train": 30, "test": 10, "size": 32})
    build(source, folder, shard_rows=20, progress=False)
    return folder


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two views of 600 rows in blocks, one of which some rows lack, and three classes."""
    folder = tmp_path_factory.mktemp("amend")
    second = RANDOM.normal(size=(600, 3)).astype("f4")
    second[::7] = np.nan
    views: dict[str, Any] = {"v1": RANDOM.normal(size=(600, 4)).astype("f4"), "v2": second}
    np.savez(folder / "a.npz", labels=np.arange(600) % 3, **views)
    source = make_source("arrays", {"npz": folder / "a.npz", "missing": "allow"})
    build(source, folder / "numbers", progress=False)
    return folder / "numbers"


def everything(reader: Reader) -> Any:
    return np.arange(int(reader.starts[-1]))


def test_pictures_stay_as_they_are_and_labels_are_those_decided(
    faces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = Reader(faces)
    rows, names = everything(old), old.manifest.labels.names
    y, keys = old.labels(rows), old.sample_keys(rows)
    lines = [
        Decision(keys[3], names[5], str(y[3, 5]), str(1 - y[3, 5]), "", "wrong"),
        Decision(keys[4], names[6], str(y[4, 6]), str(1 - y[4, 6]), "", "unknown"),
        Decision(keys[33], decision="drop"),
        Decision(keys[5], names[7], str(y[5, 7]), str(1 - y[5, 7]), "", "right"),
        Decision(keys[6], names[7], str(y[6, 7]), str(1 - y[6, 7])),
    ]
    file = tmp_path / "decisions.csv"
    write_decisions(file, lines)
    out = tmp_path / "new"
    given = ["--decisions", str(file), "--out", str(out), "--workers", "2", "--quiet"]
    assert main(["shards", "amend", str(faces), *given]) == 0
    said = capsys.readouterr().out
    assert "1 label changed, 1 removed, 1 sample left out" in said
    new, kept = Reader(out), np.delete(rows, 33)
    expected = np.delete(y, 33, 0)
    expected[3, 5], expected[4, 6] = 1 - y[3, 5], 255
    assert new.sample_keys(everything(new)) == [keys[row] for row in kept]
    np.testing.assert_array_equal(new.labels(everything(new)), expected)
    assert new.payloads("image", everything(new)) == old.payloads("image", kept)
    assert new.manifest.labels.unknown == "allow" and new.manifest.dataset == "faces"
    origin = new.manifest.built_from
    assert origin.options["of"]["fingerprint"] == old.manifest.fingerprint
    assert origin.options["of"]["built_from"]["source"] == "faces"
    assert origin.files[0].name == "decisions.csv" and origin.shard_rows == 20
    assert verify(out).ok and new.manifest.fingerprint != old.manifest.fingerprint


def test_without_a_change_the_tars_are_the_same_bytes(numbers: Path, tmp_path: Path) -> None:
    """Also of rows that lack a view; and any number of workers writes them."""
    old = Reader(numbers)
    key = old.sample_keys(np.array([0]))[0]
    now = old.manifest.labels.names[int(old.labels(np.array([0]))[0])]
    other = str((int(now) + 1) % 3)
    rows = {"shard_rows": old.manifest.built_from.shard_rows}
    amended(numbers, [Decision(key, "", now, other, "", "wrong")], tmp_path / "there", **rows)
    back = [Decision(key, "", other, now, "", "wrong")]
    new = amended(tmp_path / "there", back, tmp_path / "new", **rows)
    assert new.built_from.options["of"]["built_from"]["source"] == "amended"  # the whole history
    for one, two in zip(old.manifest.splits["all"], new.splits["all"], strict=True):
        assert (one.file, one.sha256, one.index_sha256) == (two.file, two.sha256, two.index_sha256)
    assert [view.mean for view in new.views] == [view.mean for view in old.manifest.views]
    several = [
        Decision(key, "", now, other, "", "wrong"),
        Decision("all-000001/7", decision="drop"),
    ]
    written = [
        amended(numbers, several, tmp_path / name, executor=executor)
        for name, executor in (("one", Processes()), ("two", Processes(2)))
    ]
    assert [s.sha256 for s in written[0].splits["all"]] == [
        s.sha256 for s in written[1].splits["all"]
    ]


def test_rows_of_blocks_keep_their_numbers_and_classes_change(
    numbers: Path, tmp_path: Path
) -> None:
    old = Reader(numbers)
    rows = everything(old)
    keys, y, names = old.sample_keys(rows), old.labels(rows), old.manifest.labels.names
    lines = [Decision(keys[n], decision="drop") for n in (5, 300, 599)]
    lines.append(Decision(keys[8], "", names[y[8]], names[(y[8] + 1) % 3], "", "wrong"))
    lines.append(Decision(keys[9], "", names[y[9]], names[(y[9] + 1) % 3], "", "unknown"))
    amended(numbers, lines, tmp_path / "new")
    new, kept = Reader(tmp_path / "new"), np.delete(rows, [5, 300, 599])
    expected = y.copy()
    expected[8], expected[9] = (y[8] + 1) % 3, -1
    np.testing.assert_array_equal(new.labels(everything(new)), expected[kept])
    for view in ("v1", "v2"):
        np.testing.assert_array_equal(new.read(view, everything(new)), old.read(view, kept))
    np.testing.assert_array_equal(
        new.present(everything(new), ["v1", "v2"]), old.present(kept, ["v1", "v2"])
    )


def test_tars_of_others_become_shards_of_their_own(faces: Path, tmp_path: Path) -> None:
    folder, old = tmp_path / "others", Reader(faces)
    folder.mkdir()
    rows = everything(old)
    with tarfile.open(folder / "a.tar", "w") as tar:
        for row, payload in enumerate(old.payloads("image", rows)):
            for name, data in (("jpg", payload), ("cls", str(row % 2).encode())):
                (tmp_path / "part").write_bytes(data or b"")
                tar.add(tmp_path / "part", f"s{row:03d}.{name}")
    assert main(["shards", "index", str(folder), "--image", "jpg", "--label", "cls"]) == 0
    write_decisions(tmp_path / "d.csv", [Decision("s004", "", "0", "1", "", "wrong")])
    given = ["--decisions", str(tmp_path / "d.csv"), "--out", str(tmp_path / "new")]
    assert main(["shards", "amend", str(folder), *given]) == 0
    new = Reader(tmp_path / "new")
    assert new.payloads("image", rows) == old.payloads("image", rows)
    expected = rows % 2
    expected[4] = 1
    assert new.labels(rows).tolist() == expected.tolist() and not new.manifest.foreign


class Tree(Source):
    """Sixty rows of four classes below two."""

    name: ClassVar[str] = "tree"

    @property
    def views(self) -> list[View]:
        """One view of vectors."""
        return [View(name="v", kind="vector", shape=(2,), dtype="float32")]

    @property
    def labels(self) -> Labels:
        """Two levels."""
        levels = [["top 0", "top 1"], list("abcd")]
        return Labels(kind="hierarchical", names=levels[1], levels=levels)

    @property
    def splits(self) -> dict[str, int]:
        """One split."""
        return {"train": 60}

    def read(self, split: str, start: int, stop: int) -> Rows:
        """Rows of their numbers."""
        rows = np.arange(start, stop)
        paths = np.stack([rows % 4 // 2, rows % 4], 1)
        return Rows({"v": np.stack([rows, rows], 1).astype(np.float32)}, paths)


def test_a_class_of_a_hierarchy_takes_its_parents(tmp_path: Path) -> None:
    build(Tree.model_validate({}), tmp_path / "tree", shard_rows=256, progress=False)
    (key,) = Reader(tmp_path / "tree").sample_keys(np.array([4]))
    amended(tmp_path / "tree", [Decision(key, "", "a", "d", "", "wrong")], tmp_path / "new")
    assert Reader(tmp_path / "new").labels(np.array([3, 4, 5])).tolist() == [[1, 3], [1, 3], [0, 1]]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("nobody,,0,1,,wrong", "has no sample 'nobody'; pass decisions on its own samples"),
        ("K,,1,2,,wrong", "the data set has 0, but the decision was made on '1'; audit this data"),
        ("K,,0,0,,wrong", "'0' is what it has already; say what it is instead"),
        ("K,,0,9,,wrong", "there is no class '9' among 0, 1, 2"),
        ("K,,0,1,,", "decides on nothing: no line of its column 'decision' is wrong, unknown or"),
        (
            "K,,0,1,,perhaps",
            "line 2: the decision must be one of right, wrong, unknown, drop, skip",
        ),
    ],
)
def test_decisions_that_do_not_fit(numbers: Path, tmp_path: Path, line: str, said: str) -> None:
    reader = Reader(numbers)
    row = int(np.flatnonzero(reader.labels(everything(reader)) == 0)[0])
    file = tmp_path / "d.csv"
    key = reader.sample_keys(np.array([row]))[0]
    file.write_text(f"key,label,given,likely,suspicion,decision\n{line.replace('K', key)}\n")
    with pytest.raises(SourceError) as refused:
        build(amending(numbers, file), tmp_path / "new", progress=False)
    assert said in str(refused.value) and not (tmp_path / "new" / "manifest.json").exists()


def test_the_data_set_itself_is_never_written(
    faces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --overwrite it was moved aside first, and then not found."""
    names = sorted(path.name for path in faces.iterdir())
    key = Reader(faces).sample_key(0)
    write_decisions(tmp_path / "d.csv", [Decision(key, decision="drop")])
    given = ["--decisions", str(tmp_path / "d.csv"), "--out", f"{faces}/../{faces.name}"]
    assert main(["shards", "amend", str(faces), *given, "--overwrite"]) == 2
    assert "--out is the data set itself" in capsys.readouterr().err
    assert sorted(path.name for path in faces.iterdir()) == names
    for text, told in (
        ("key;decision\n1;drop\n", "its cells are separated by ';', not by commas"),
        ("key,decision,Key\n1,drop,2\n", "two columns have the name 'key'"),
    ):
        (tmp_path / "d.csv").write_text(text)
        with pytest.raises(SourceError, match=told):
            build(amending(faces, tmp_path / "d.csv"), tmp_path / "x")
    (tmp_path / "d.csv").write_text(f"key,decision,,\n{key},drop,,\n")  # as spreadsheets may
    left = amending(faces, tmp_path / "d.csv").amendment.counts["left_out"]
    assert left == 1


def test_a_blank_line_beside_a_decision_is_none(faces: Path, tmp_path: Path) -> None:
    key = Reader(faces).sample_key(0)
    lines = [Decision(key), Decision(key, decision="drop"), Decision(key, decision="skip")]
    write_decisions(tmp_path / "d.csv", lines)
    (tmp_path / "d.csv").write_text((tmp_path / "d.csv").read_text() + ",,,,,\n")
    source = amending(faces, tmp_path / "d.csv")
    assert source.amendment.counts["left_out"] == 1


def test_two_decisions_on_one_label_and_a_split_that_is_left_empty(
    faces: Path, tmp_path: Path
) -> None:
    reader = Reader(faces)
    keys = reader.sample_keys(everything(reader))
    both = [Decision(keys[0], decision=d) for d in ("drop", "right")]
    with pytest.raises(
        SourceError, match=f"two decisions on sample '{keys[0]}': drop  and right ; "
    ):
        amended(faces, both, tmp_path / "a")
    test = [Decision(keys[row], decision="drop") for row in range(30, 40)]
    with pytest.raises(SourceError, match="leaves out every sample of split 'test'"):
        amended(faces, test, tmp_path / "b")


def test_the_first_lines_without_a_look(faces: Path, tmp_path: Path) -> None:
    """`--undecided wrong --first N`, as the error says; what was decided stays so."""
    reader = Reader(faces)
    rows = everything(reader)
    keys, y, names = reader.sample_keys(rows), reader.labels(rows), reader.manifest.labels.names
    lines = [Decision(keys[n], names[0], str(y[n, 0]), str(1 - y[n, 0])) for n in range(6)]
    lines[1] = lines[1]._replace(decision="right")
    write_decisions(tmp_path / "labels.csv", lines)
    out = ["--out", str(tmp_path / "new"), "--quiet"]
    given = ["shards", "amend", str(faces), "--decisions", str(tmp_path / "labels.csv"), *out]
    assert main([*given, "--undecided", "wrong", "--first", "3"]) == 0
    changed = np.flatnonzero((Reader(tmp_path / "new").labels(rows) != y).any(1))
    assert changed.tolist() == [0, 2]


def test_keys_that_a_spreadsheet_would_compute_are_read_as_they_were(tmp_path: Path) -> None:
    keys = ["=1+1", "'quoted", '-a,"b', "plain", "@x\ny", "'=1", "''+x", "'"]
    lines = [Decision(key, "=label", "0", "1", "0.5", "right") for key in keys]
    write_decisions(tmp_path / "d.csv", lines)
    assert read_decisions(tmp_path / "d.csv", "--decisions", SourceError) == lines
    with (tmp_path / "d.csv").open(newline="") as stream:
        assert next(csv.DictReader(stream))["key"] == "'=1+1"
