"""A column that gives the label away is refused by name, and a line of names is never a row."""

from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.io import savemat
from sklearn import datasets

from heron.base.errors import SourceError
from heron.cli.main import main
from heron.data.reader import Reader
from heron.shards.build import build
from heron.shards.manifest import Labels
from heron.sources import make_source
from heron.sources.leaks import refuse_leaks

DATA = Path(__file__).parents[3] / "shared" / "data"
DRAW = np.random.default_rng(0)
ROWS = 60
Y = DRAW.integers(0, 3, ROWS)
X = DRAW.normal(size=(ROWS, 4)).astype(np.float32)


def table(folder: Path, frame: pd.DataFrame, name: str = "t.csv", **options: Any) -> Path:
    frame.to_csv(folder / name, **options)
    return folder / name


def shown(out: Path) -> tuple[np.ndarray, np.ndarray]:
    """The features and the class numbers of a data set."""
    reader = Reader(out)
    rows = np.arange(reader.starts[-1])
    return reader.read(reader.manifest.views[0].name, rows), reader.labels(rows)


@pytest.mark.parametrize("index", [False, True])
@pytest.mark.parametrize("names", [range(5), list("abcde"), range(10, 15)])
def test_what_pandas_writes_is_what_pandas_reads(tmp_path: Path, index: bool, names: Any) -> None:
    frame = pd.DataFrame(np.column_stack([X, Y]), columns=names).astype({[*names][-1]: int})
    path = table(tmp_path, frame, index=index)
    options = {"csv": str(path)} | ({"header": "yes"} if names == range(10, 15) else {})
    build(make_source("table", options), tmp_path / "out", progress=False)
    features, classes = shown(tmp_path / "out")
    expected = pd.read_csv(path, index_col=0 if index else None)
    np.testing.assert_allclose(features, expected.iloc[:, :-1], rtol=1e-6)
    np.testing.assert_array_equal(classes, expected.iloc[:, -1])


def test_where_it_is_unclear_it_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row 0, 1, 2 of whole numbers may be either; both remedies that the error names work."""
    lines = "0,1,2\n" + "".join(f"{n * 2},{n * 7 % 5},{n % 2}\n" for n in range(1, 20))
    (tmp_path / "t.csv").write_text(lines)
    words = ["shards", "build", "table", "--csv", str(tmp_path / "t.csv"), "--quiet"]
    assert main([*words, "--out", str(tmp_path / "a")]) == 1
    assert "may be a row, or names as pandas writes columns" in (error := capsys.readouterr().err)
    for header, rows in (("yes", 19), ("no", 20)):
        assert f"--header {header}" in error
        assert main([*words, "--header", header, "--out", str(tmp_path / header)]) == 0
        expected = pd.read_csv(StringIO(lines), header=0 if header == "yes" else None)
        features, classes = shown(tmp_path / header)
        assert len(features) == rows == len(expected)
        np.testing.assert_array_equal(features, expected.iloc[:, :-1])


def test_six_tables_with_the_class_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Five of them kept it as a feature: accuracy .974 for .968."""
    paths = []
    for number in range(6):
        frame = pd.DataFrame(np.column_stack([X + number, Y])).astype({4: int})
        paths.append(str(table(tmp_path, frame, f"v{number}.csv", header=False, index=False)))
    words = ["shards", "build", "table", "--csv", *paths, "--label=v0:-1", "--quiet"]
    assert main([*words, "--out", str(tmp_path / "a")]) == 1
    error = capsys.readouterr().err
    listed = ", ".join(f"v{n}:v{n}-4" for n in range(1, 6))
    assert f"{listed} give the class away in all of 60 labelled rows" in error
    ignored = [f"v{n}:v{n}-4" for n in range(1, 6)]
    assert f"--ignore {' '.join(ignored)} " in error
    assert main([*words, "--ignore", *ignored, "--out", str(tmp_path / "b")]) == 0
    assert {view.shape for view in Reader(tmp_path / "b").manifest.views} == {(4,)}
    kept = [f"v{n}:v{n}-4" for n in range(1, 6)]
    assert f"--keep {' '.join(kept)}" in error
    assert main([*words, "--keep", *kept, "--out", str(tmp_path / "c")]) == 0
    assert Reader(tmp_path / "c").manifest.views[5].shape == (5,)


LEAKS = {  # columns that give the class, or one label, away
    "the class": Y,
    "another number of it": 7 - 2 * Y,
    "an indicator": Y == 1,
    "a finer code": Y * 2 + (np.arange(ROWS) % 2),
}
MULTI = DRAW.integers(0, 2, (ROWS, 3))


@pytest.mark.parametrize("source", ["arrays", "mat", "parquet", "table"])
@pytest.mark.parametrize("leak", LEAKS)
def test_every_source_refuses_and_keeps(tmp_path: Path, source: str, leak: str) -> None:
    x = np.column_stack([X[:, :2], LEAKS[leak], X[:, 2:]]).astype(np.float32)
    second = X[::-1].copy()
    if source == "arrays":
        np.savez(tmp_path / "a.npz", one=second, two=x, labels=Y)
        options: dict[str, Any] = {"npz": str(tmp_path / "a.npz")}
    elif source == "mat":
        savemat(tmp_path / "a.mat", {"one": second, "two": x, "Y": Y[:, None].astype(float)})
        options = {"mat": str(tmp_path / "a.mat")}
    elif source == "parquet":
        frame = pd.DataFrame({"one": list(second), "two": list(x), "kind": Y})
        frame.to_parquet(tmp_path / "a.parquet")
        options = {"data": [str(tmp_path / "a.parquet")], "label": ["kind"]}
        options["vector"] = ["one", "two"]
    else:
        table(tmp_path, pd.DataFrame(second, columns=list("abcd")), "one.csv", index=False)
        frame = pd.DataFrame(x, columns=["e", "f", "2", "g", "h"]).assign(kind=Y)
        table(tmp_path, frame, "two.csv", index=False)
        options = {"csv": [str(tmp_path / f"{n}.csv") for n in ("one", "two")], "label": "kind"}
    with pytest.raises(SourceError, match="view 'two', column '2': it gives the class") as fault:
        build(make_source(source, options), tmp_path / "out", progress=False)
    remedy = str(fault.value).rpartition("--keep ")[2]
    kept = build(
        make_source(source, options | {"keep": [remedy]}), tmp_path / "out", progress=False
    )
    assert [view.shape for view in kept.views] == [(4,), (5,)]


def test_a_label_of_several(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", one=np.column_stack([X, 1 - MULTI[:, 1]]), labels=MULTI)
    with pytest.raises(SourceError, match="column '4': it gives the label '1' away"):
        build(
            make_source("arrays", {"npz": str(tmp_path / "a.npz")}), tmp_path / "o", progress=False
        )


def harmless() -> dict[str, tuple[Any, Any, Labels]]:
    """Public data sets, whose features are features."""
    sets = {}
    for name in ("iris", "wine", "breast_cancer", "digits"):
        x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
        names = [str(n) for n in range(y.max() + 1)]
        sets[name] = x, y, Labels(kind="multi_class", names=names)
    for seed in range(5):  # binary words, some rare, and labels of them with noise
        x, y = datasets.make_multilabel_classification(400, 60, n_classes=12, random_state=seed)
        kind = Labels(kind="multi_label", names=[str(n) for n in range(12)])
        sets[f"words {seed}"] = (x > 3).astype(float), y.astype(np.uint8), kind
    return sets


@pytest.mark.parametrize("name", harmless())
def test_no_false_alarm(name: str) -> None:
    x, y, labels = harmless()[name]
    refuse_leaks({"x": x}, y, labels, {}, [])


@pytest.mark.skipif(not DATA.is_dir(), reason="needs the public data sets")
def test_no_false_alarm_on_public_tables(tmp_path: Path) -> None:
    for name in ("dermatology", "yeast"):
        source = make_source("table", {"csv": str(DATA / "uci" / f"{name}.csv"), "missing": "mean"})
        assert sum(source.splits.values()) > 300
    arff = [str(DATA / "scene" / f"scene-{part}.arff") for part in ("train", "test")]
    assert make_source("mulan", {"arff": arff, "xml": str(DATA / "scene/scene.xml")}).splits


def test_what_is_not_a_leak() -> None:
    """A key, a number, a feature that errs once, a column that is too rare to tell."""
    labels = Labels(kind="multi_class", names=["0", "1", "2"])
    errs = Y.copy()
    errs[0] = (errs[0] + 1) % 3
    rare = np.where(np.arange(ROWS) == int(np.flatnonzero(Y == 2)[0]), 1, 0)
    columns = [np.arange(ROWS), Y + DRAW.normal(size=ROWS) * 1e-3, errs, rare, np.zeros(ROWS)]
    refuse_leaks({"x": np.column_stack(columns)}, Y, labels, {}, [])
    with pytest.raises(SourceError, match="column '1'"):
        refuse_leaks({"x": np.column_stack([errs, Y])}, Y, labels, {}, [])
