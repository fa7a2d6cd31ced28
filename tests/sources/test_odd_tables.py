"""Tables as people have them: read at the first try as pandas reads them, or refused once.

What a table has is told by pandas, by arguments that say what is odd about it. A refusal is one
line, and the options that it names are typed as they stand.
"""

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest

from heron.base.errors import SourceError
from heron.cli.main import main
from heron.data.reader import Reader
from heron.sources import make_source
from tests.shards.others import jpeg
from tests.shards.tiny import whole

ROWS = 40
DRAW = np.random.default_rng(0)
NUMBERS = pd.DataFrame(DRAW.normal(size=(ROWS, 3)).round(3), columns=["a", "b b", "c"])
KIND = pd.Series([f"kind {n * 7 % 3}" for n in range(ROWS)], name="kind")
FRAME = NUMBERS.assign(kind=KIND)
WORDS = [f"row number {n} says that it is the sentence of {n}" for n in range(ROWS)]


def csv(frame: pd.DataFrame = FRAME, **options: Any) -> str:
    return str(frame.to_csv(index=False, **options))


def lines(change: Callable[[int, str], str], text: str | None = None) -> str:
    """The table with its rows changed; the header is line 0."""
    return "".join(f"{change(n, x)}\n" for n, x in enumerate((text or csv()).splitlines()))


class Odd(NamedTuple):
    """A table; how pandas is told to read it, or its features; and a part of its refusal."""

    text: str | bytes
    read: dict[str, Any] | pd.DataFrame = {}
    refused: str = ""
    words: str = ""  # of the command, from the start
    label: int | None = -1  # the column that pandas has the classes in
    features: list[str] | None = None  # among pandas' columns


def categories(frame: pd.DataFrame, *columns: str) -> pd.DataFrame:
    """The frame with a column of 0 and 1 for each value of some, in its place."""
    parts = [pd.get_dummies(frame[c], dtype=float) if c in columns else frame[[c]] for c in frame]
    return pd.concat(parts, axis=1)


YES = FRAME.assign(a=np.where(FRAME["a"] > 0, "yes", "no"), c=np.where(FRAME["c"] > 0, "t", "f"))
DATES = pd.date_range("2024-01-01", periods=ROWS).strftime("%Y-%m-%d")
THOUSANDS = NUMBERS["a"].map(lambda x: f"{1234567 + 1000 * x:,.0f}")
HOLES = FRAME.mask(DRAW.random(FRAME.shape) < 0.1).assign(kind=KIND)
FILLED = HOLES.fillna(HOLES.mean(numeric_only=True))
CODES = DRAW.integers(0, 3, ROWS)
INDEX = DRAW.permutation(3 * ROWS)[:ROWS]
IDS = FRAME.assign(sample_id=INDEX, uuid=[f"u{n:x}" for n in INDEX])

ODD = {
    "semicolons": Odd(csv(sep=";"), {"sep": ";"}),
    "tabs": Odd(csv(sep="\t"), {"sep": "\t"}),
    "pipes": Odd(csv(sep="|"), {"sep": "|"}),
    "decimal commas": Odd(csv(sep=";", decimal=","), {"sep": ";", "decimal": ","}),
    "a mark, CRLF and sep= of Excel": Odd(
        ("sep=;\r\n" + csv(sep=";", decimal=",", lineterminator="\r\n")).encode("utf-8-sig"),
        {"sep": ";", "decimal": ",", "skiprows": 1},
    ),
    "UTF-16": Odd(csv().encode("utf-16"), {"encoding": "utf-16"}),
    "UTF-16 without a mark": Odd(
        csv().encode("utf-16-le"), {"encoding": "utf-16-le"}, refused="has zero bytes"
    ),
    "Latin": Odd(
        csv(FRAME.rename(columns={"a": "größe"})).encode("latin-1"),
        {"encoding": "latin-1"},
        refused="--encoding latin-1",
    ),
    "newlines in quotes": Odd(
        csv(
            FRAME.assign(kind=KIND.str.replace(" ", "\n")).rename(columns={"b b": "b\nb"}),
            quoting=2,
        ).replace("kind\n", "kind "),
        FRAME,
    ),
    "thousands": Odd(csv(FRAME.assign(a=THOUSANDS)), {"thousands": ","}),
    "thousands, or decimal commas": Odd(
        csv(FRAME.assign(a=[f"{n + 1},{n % 3}50" for n in range(ROWS)]), sep=";"),
        {"sep": ";", "decimal": ","},
        refused="has a decimal comma or one of thousands",
    ),
    "dates": Odd(csv(FRAME.assign(a=DATES)), FRAME.drop(columns="a"), refused="found '2024-01-01'"),
    "words of yes and no": Odd(csv(YES), categories(YES, "a", "c"), refused="--categories a c"),
    "missing as NA, ? and nothing": Odd(csv(HOLES, na_rep="NA"), FILLED, refused="--missing mean"),
    "missing as -999": Odd(
        csv(HOLES.fillna(-999)), FILLED, refused="-999 may stand for a missing number"
    ),
    "one column": Odd(
        csv(FRAME[["a"]]),
        FRAME[["a"]],
        refused="a single one is read with --label none",
        label=None,
    ),
    "names twice": Odd(csv(FRAME.set_axis(["a", "a", "b", "kind"], axis=1)), FRAME),
    "comments above": Odd("# made by a robot\n# on a Monday\n" + csv(), {"comment": "#"}),
    "names behind a #": Odd("# " + csv(), FRAME),
    "separators at the ends": Odd(lines(lambda n, x: f"{x},"), FRAME),
    "separators at the ends of rows": Odd(lines(lambda n, x: f"{x}," if n else x), FRAME),
    "lines cut short": Odd(
        lines(lambda n, x: "1,2" if n in (7, 9) else x),
        FRAME.drop(index=[6, 8]),
        refused="line 8: 2 columns, but there must be 4, as in line 1; t.csv, line 10:",
    ),
    "an index": Odd(FRAME.set_axis(INDEX).to_csv(), {"index_col": 0}),
    "an index in an index": Odd(
        csv(FRAME.set_axis(INDEX).reset_index(names="Unnamed: 0")), {"index_col": 0}
    ),
    "ids": Odd(csv(IDS[["sample_id", "a", "uuid", "b b", "c", "kind"]]), FRAME),
    "ids last": Odd(
        csv(FRAME.assign(id=INDEX).rename(columns={"kind": "class"})),
        FRAME,
        refused="--label class",
    ),
    "numbers that differ": Odd(csv(FRAME.assign(a=INDEX + 0.5, c=INDEX)), {}),
    "per cents": Odd(
        csv(FRAME.assign(a=[f"{n} %" for n in range(ROWS)])), FRAME.assign(a=np.arange(ROWS))
    ),
    "words among numbers": Odd(
        csv(FRAME.assign(a=[*NUMBERS["a"][:-1], "tall"])),
        FRAME.drop(columns="a"),
        refused="line 41, column 'a': found 'tall'",
    ),
    "a constant": Odd(csv(FRAME.assign(a=1)), {}),
    "categories that are names": Odd(
        csv(FRAME.assign(a=[f"n{n}" for n in range(ROWS)], c=CODES)),
        categories(FRAME.assign(c=CODES).drop(columns="a"), "c"),
        refused="40 different values in 40 rows are no categories",
        words="--categories a c",
    ),
    "pandas' numbers as names, one twice": Odd(
        csv(pd.DataFrame(DRAW.integers(0, 90, (ROWS, 8)) + 1).assign(last=INDEX % 2)).replace(
            "last", "0", 1
        ),
        {},
    ),
    "a target before the last": Odd(
        csv(FRAME.rename(columns={"kind": "target"})[["target", "a", "b b", "c"]]),
        FRAME,
        refused="and so no classes; use --label target",
    ),
}


def build(folder: Path, words: list[str], name: str = "t.csv") -> int:
    path = str(folder / name)
    return main(["shards", "build", "table", "--csv", path, "--out", str(folder / "o"), *words])


def remedy(told: str) -> list[str]:
    """The options that an error names, as they are typed; the first of two ways."""
    assert len(told.strip().splitlines()) == 1, told
    found = re.search(r"(?:use|with|choose) `?(--.*?)(?=,? or |`|;|$)", told.strip())
    assert found, told
    return shlex.split(found[1].removesuffix(" if it is"))


@pytest.mark.parametrize("name", ODD)
def test_as_pandas_reads_it(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = ODD[name]
    data = odd.text.encode() if isinstance(odd.text, str) else odd.text
    (tmp_path / "t.csv").write_bytes(data)
    words = ["--quiet", *odd.words.split()]
    if odd.refused:
        assert build(tmp_path, words) == 1
        told = capsys.readouterr().err
        assert odd.refused in told, told
        words += remedy(told)
    assert build(tmp_path, words) == 0, capsys.readouterr().err
    frame = odd.read
    if isinstance(frame, dict):
        frame = pd.read_csv(tmp_path / "t.csv", **frame)
    reader = Reader(tmp_path / "o")
    rows = np.arange(reader.starts[-1])
    assert [view.name for view in reader.manifest.views] == ["features"]
    kind = next((c for c in frame if c in ("kind", "class", "target", "0", "last")), None)
    position = [*frame].index(kind) if kind else None
    features = frame.iloc[:, [n for n in range(frame.shape[1]) if n != position]]
    if name == "pandas' numbers as names, one twice":
        features, position = frame.iloc[:, :-1], -1
    np.testing.assert_allclose(
        reader.read("features", rows), features.to_numpy(np.float32), rtol=1e-5, atol=1e-6
    )
    if odd.label is not None:
        classes = [reader.manifest.labels.names[n] for n in reader.labels(rows)]
        expected = frame.iloc[:, position].astype(str).tolist()
        assert [" ".join(c.split()) for c in classes] == expected


def table(folder: Path, data: str | bytes, name: str = "t.csv", **options: Any) -> Any:
    (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)
    return make_source("table", {"csv": str(folder / name), **options})


def pictures(folder: Path) -> pd.DataFrame:
    (folder / "imgs").mkdir()
    for n in range(ROWS):
        (folder / "imgs" / f"{n}.jpg").write_bytes(jpeg(n))
    (folder / "secret.jpg").write_bytes(jpeg(99))
    return pd.DataFrame({"path": [f"imgs/{n}.jpg" for n in range(ROWS)], "kind": KIND})


def test_sentences_and_pictures_are_views(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frame = pictures(tmp_path).assign(a=NUMBERS["a"], review=WORDS)
    frame.loc[3, "review"] = None
    (tmp_path / "t.csv").write_text(csv(frame[["path", "a", "review", "kind"]]))
    assert build(tmp_path, ["--quiet"]) == 0, capsys.readouterr().err
    assert main(["shards", "verify", str(tmp_path / "o")]) == 0
    reader = Reader(tmp_path / "o")
    kinds = {view.name: view.kind for view in reader.manifest.views}
    assert kinds == {"path": "image", "review": "text", "features": "vector"}
    rows = whole(make_source("table", {"csv": str(tmp_path / "t.csv")}), "all")
    assert rows.views["path"] == [jpeg(n) for n in range(ROWS)]
    assert rows.views["review"] == [None if n == 3 else w.encode() for n, w in enumerate(WORDS)]
    np.testing.assert_array_equal(
        np.asarray(rows.views["features"])[:, 0], NUMBERS["a"].to_numpy(np.float32)
    )


def test_a_picture_in_the_first_line_is_a_row(tmp_path: Path) -> None:
    """A list of pictures and their sentences or classes has no number that tells it apart."""
    frame = pictures(tmp_path)
    for other, label in ((KIND, "-1"), (WORDS, "none")):
        text = csv(frame[["path"]].assign(other=other), header=False)
        assert len(table(tmp_path, text, label=[label]).load().keys) == ROWS


def test_pictures_elsewhere_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frame = pictures(tmp_path)
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "t.csv").write_text(csv(frame))
    assert build(tmp_path / "tables", ["--quiet"]) == 1
    told = capsys.readouterr().err
    assert (
        "'imgs/0.jpg' is no file in " in told
        and "folder of the pictures with --folder FOLDER" in told
    )
    assert build(tmp_path / "tables", ["--quiet", "--folder", str(tmp_path)]) == 0


@pytest.mark.parametrize("path", ["../secret.jpg", "{folder}/secret.jpg", "link/secret.jpg"])
def test_no_picture_outside_the_folder_is_read(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    frame = pictures(inner)
    (tmp_path / "secret.jpg").write_bytes(jpeg(77))
    (inner / "link").symlink_to(tmp_path)
    frame.loc[0, "path"] = path.format(folder=tmp_path)
    (inner / "t.csv").write_text(csv(frame))
    assert build(inner, ["--quiet"]) == 1
    told = capsys.readouterr().err
    assert f"{frame.loc[0, 'path']} is outside inner" in told
    assert build(inner, ["--quiet", "--on-error", "skip"]) == 0
    assert Reader(inner / "o").manifest.rows("all") == ROWS - 1


@pytest.mark.parametrize("count", [3, 60])
def test_leaks_are_refused_once_by_their_names(
    count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both lines that the one refusal names work as they are typed."""
    names = [f"leak {n}" for n in range(count)]
    leaks = pd.DataFrame({name: pd.factorize(KIND)[0] * (n + 1) for n, name in enumerate(names)})
    (tmp_path / "t.csv").write_text(csv(pd.concat([NUMBERS, leaks, KIND], axis=1)))
    assert build(tmp_path, ["--quiet"]) == 1
    told = capsys.readouterr().err
    assert all(f"features:{name}" in told for name in names[:8]) and "the class away" in told
    assert len(told) < 1500
    for option, width, out in (("--ignore", 3, "i"), ("--keep", 3 + count, "k")):
        typed = re.search(f"({option} .*?)( what is no feature|$)", told.strip())
        assert typed is not None
        words = ["--quiet", *shlex.split(typed[1]), "--out", str(tmp_path / out)]
        assert build(tmp_path, words) == 0, capsys.readouterr().err
        assert Reader(tmp_path / out).manifest.views[0].shape == (width,)


@pytest.mark.parametrize(
    ("name", "values", "dropped"),
    [
        ("id", INDEX, True),
        ("ID", [f"p{n}" for n in INDEX], True),
        ("PassengerId", INDEX, True),
        ("sample_id", INDEX, True),
        ("index", INDEX, True),
        ("row", INDEX, True),
        ("", [f"car {n}" for n in INDEX], True),
        ("Unnamed: 0", INDEX, True),
        ("id", INDEX + 0.25, False),
        ("index", INDEX // 2, False),
        ("acid", INDEX, False),
        ("year", 1900 + np.arange(ROWS), False),
        ("refractive index", INDEX, False),
        ("", NUMBERS["a"], False),
    ],
)
def test_what_tells_rows_apart_is_no_feature(
    name: str, values: Any, dropped: bool, tmp_path: Path
) -> None:
    text = csv(FRAME.assign(x=values).rename(columns={"x": name})[["a", name, "c", "kind"]])
    source = table(tmp_path, text)
    assert source.views[0].shape == (2 if dropped else 3,)
    if dropped:
        keep = re.findall(r"\(--keep (.*?)\)", source.loaded.warning)[0]
        kept = table(tmp_path, text, keep=shlex.split(keep), ignore=["a"])
        if not isinstance(values, list):
            assert kept.views[0].shape == (2,)


@pytest.mark.parametrize("dense", [True, False])
def test_a_first_column_without_a_name(dense: bool, tmp_path: Path) -> None:
    """Numbers that differ in a narrow range, as UCI's glass has them; others may be a feature."""
    index = 1 + DRAW.permutation(ROWS) if dense else DRAW.permutation(10**6)[:ROWS]
    text = csv(FRAME.assign(n=index)[["n", "a", "b b", "c", "kind"]], header=False)
    assert table(tmp_path, text).views[0].shape == (3 if dense else 4,)


def test_what_pandas_indexes_by_in_parquet(tmp_path: Path) -> None:
    NUMBERS.assign(id=INDEX, y=CODES).set_axis(INDEX).to_parquet(tmp_path / "p.parquet")
    source: Any = make_source("parquet", {"data": [str(tmp_path / "p.parquet")]})
    np.testing.assert_array_equal(
        np.asarray(whole(source, "all").views["features"]), NUMBERS.to_numpy(np.float32)
    )
    assert "not read: columns id, __index_level_0__ (see --vector)" in source.loaded.warning
    asked = {"data": [str(tmp_path / "p.parquet")], "vector": ["v=a,id"], "label": ["y"]}
    assert make_source("parquet", asked).views[0].shape == (2,)


def test_two_columns_of_one_view_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = pd.DataFrame({"a b": WORDS, "a-b": WORDS[::-1], "a+b": WORDS, "kind": KIND})
    (tmp_path / "t.csv").write_text(csv(texts))
    assert build(tmp_path, ["--quiet"]) == 1
    told = capsys.readouterr().err
    assert "two columns make a view 'a_b'; use --ignore a+b" in told
    assert build(tmp_path, ["--quiet", *remedy(told)]) == 0


def test_a_table_without_a_byte(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="t.csv has no rows; write one per line"):
        _ = table(tmp_path, "").splits


def test_a_title_above_the_table(tmp_path: Path) -> None:
    """What is wrong with each line is told once, and what is to be removed."""
    with pytest.raises(SourceError) as fault:
        _ = table(tmp_path, "A report, by us\n" + csv()).splits
    said = "line 2: 4 columns, but there must be 2, as in line 1; line 3: "
    assert f"t.csv, {said}" in str(fault.value)
    assert "38 more; remove what is above the table, or see --separator" in str(fault.value)
    assert table(tmp_path, csv()).splits == {"all": ROWS}


def test_a_picture_and_a_text_of_one_name(tmp_path: Path) -> None:
    frame = pictures(tmp_path).rename(columns={"path": "a b"}).assign(**{"a+b": WORDS})
    with pytest.raises(SourceError, match="two columns make a view 'a_b'; use --ignore a.b"):
        _ = table(tmp_path, csv(frame[["a b", "a+b", "kind"]])).splits


def test_processes_read_the_same_rows(tmp_path: Path) -> None:
    """Lines and pictures that one process leaves out are left out by each."""
    frame = pictures(tmp_path).assign(a=NUMBERS["a"])[["path", "a", "kind"]]
    frame.loc[5, "path"] = "imgs/none.jpg"
    text = lines(lambda n, x: "1,2" if n == 3 else x, csv(frame))
    (tmp_path / "t.csv").write_text(text)
    words = ["--quiet", "--on-error", "skip", "--workers", "2", "--shard-rows", "7"]
    assert build(tmp_path, words) == 0
    reader = Reader(tmp_path / "o")
    left = NUMBERS["a"].drop(index=[2, 5]).to_numpy(np.float32)
    found = reader.read("features", np.arange(reader.starts[-1]))
    np.testing.assert_array_equal(found[:, 0], left)


def features(folder: Path) -> np.ndarray[Any, Any]:
    """The features of a table that was built in a folder, [rows, columns]."""
    reader = Reader(folder / "o")
    return reader.read("features", np.arange(reader.starts[-1]))


def test_rows_that_begin_with_a_hash_are_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Hex colours: 150 rows in, 150 rows out; a comment above some is still none, and said."""
    rows = [f"#{n:06x},{n / 7:.3f},{n % 3}" for n in range(150)]
    some = ["# made by hand", *rows[:3], *(row[1:] for row in rows[3:])]
    for lines_of, said in ((rows, False), (some, True)):
        (tmp_path / "t.csv").write_text("\n".join(lines_of) + "\n")
        assert build(tmp_path, ["--header", "no", "--ignore", "0", "--overwrite"]) == 0
        assert features(tmp_path)[:, 0] == pytest.approx([n / 7 for n in range(150)], abs=1e-3)
        assert ("1 first lines are comments" in caplog.text) == said


def test_hashtags_of_one_column_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "t.csv").write_text("#tag is what this text begins with\n" + "\n".join(WORDS))
    assert build(tmp_path, ["--header", "no", "--label", "none", "--separator", "comma"]) == 0
    assert "1 first lines are comments" in caplog.text


def test_leaks_are_no_name_of_a_column(tmp_path: Path) -> None:
    text = csv(NUMBERS.assign(kind=CODES), header=False)
    (tmp_path / "t.csv").write_text(text)
    assert build(tmp_path, ["--ignore", "leaks"]) == 0
    assert len(features(tmp_path)) == ROWS


def test_fractions_with_a_comma_are_no_thousands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = [f"0,{100 + n}" for n in range(ROWS)]
    (tmp_path / "t.csv").write_text(csv(FRAME.assign(a=values)))
    assert build(tmp_path, []) == 1
    assert "found '0,100'" in capsys.readouterr().err
    (tmp_path / "t.csv").write_text(csv(pd.DataFrame({"a": values, "kind": KIND})))
    assert build(tmp_path, ["--decimal", "comma"]) == 0
    assert features(tmp_path)[:, 0] == pytest.approx([(100 + n) / 1000 for n in range(ROWS)])


def test_missing_numbers_are_not_those_of_categories(tmp_path: Path) -> None:
    frame = FRAME.assign(a=[0.0 if n == 5 else 1.5 + n % 4 for n in range(ROWS)])
    frame = frame.assign(c=[f"c{code}" for code in CODES])
    (tmp_path / "t.csv").write_text(csv(frame))
    assert build(tmp_path, ["--na", "0", "--missing", "mean", "--categories", "c"]) == 0
    expected = categories(frame.drop(columns="kind"), "c").to_numpy(float)
    expected[5, 0] = np.delete(expected[:, 0], 5).mean()
    assert features(tmp_path) == pytest.approx(expected, abs=1e-6)


def test_no_number_is_missing_and_the_word_none_stays(tmp_path: Path) -> None:
    codes = ["none" if n % 4 == 0 else f"b{n % 3}" for n in range(ROWS)]
    frame = FRAME.assign(a=[-999 if n % 9 == 0 else n / 3 for n in range(ROWS)], c=codes)
    (tmp_path / "t.csv").write_text(csv(frame))
    assert build(tmp_path, ["--na", "none", "--categories", "c"]) == 0
    expected = categories(frame.drop(columns="kind"), "c").to_numpy(float)
    assert features(tmp_path) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("text", ["# made by hand\n", "# made by hand\n\n  \n"])
def test_comments_alone_are_no_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (tmp_path / "t.csv").write_text(text)
    assert build(tmp_path, ["--header", "no"]) == 1
    assert capsys.readouterr().err.startswith("error: t.csv")
