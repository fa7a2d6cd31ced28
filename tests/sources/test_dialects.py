"""How tables are written: separators, decimals, quotes, encodings, numbered rows; by pandas."""

import logging
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from benchmarks import csv_files
from heron.base.errors import SourceError
from heron.cli.main import main
from heron.shards.source import Source
from heron.sources import make_source
from heron.sources.text import dialect_of, read_columns
from tests.shards.tiny import whole

ROWS = 24
FRAME = pd.DataFrame({"height": np.arange(ROWS) / 8 - 1, "width": 7.5 - np.arange(ROWS) ** 2 / 4})
FRAME["kind"] = [f"k{n * 7 % 3}" for n in range(ROWS)]
EXPECTED = FRAME[["height", "width"]].to_numpy(np.float32)


def table(folder: Path, data: str | bytes, **options: Any) -> Source:
    path = folder / "t.csv"
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return make_source("table", {"csv": str(path), **options})


def check(source: Source) -> None:
    rows = whole(source, "all")
    np.testing.assert_array_equal(rows.views["features"], EXPECTED)
    assert [source.labels.names[n] for n in rows.labels] == FRAME["kind"].tolist()


@pytest.mark.parametrize("separator", [",", ";", "\t", " "])
@pytest.mark.parametrize("header", [True, False])
@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("decimal", [".", ","])
@pytest.mark.parametrize("quoting", [0, 2])
def test_what_pandas_writes(
    tmp_path: Path, separator: str, header: bool, index: bool, decimal: str, quoting: int
) -> None:
    options: dict[str, Any] = {"sep": separator, "decimal": decimal, "quoting": quoting}
    text = FRAME.to_csv(header=header, index=index, lineterminator="\r\n", **options)
    if decimal == "," and separator == "," and not quoting:
        return  # pandas quotes such numbers by itself, or nobody could tell
    words = {"decimal": "comma"} if decimal == "," and separator == "," else {}
    check(table(tmp_path, text, **words))


def test_thousands_and_decimal_commas_are_asked_for(tmp_path: Path) -> None:
    text = "a;b;y\n1,234;2;0\n5,678;3;1\n"
    with pytest.raises(SourceError, match="'1,234' has a decimal comma or one of thousands"):
        _ = table(tmp_path, text).splits
    found = whole(table(tmp_path, text, decimal="comma"), "all").views["features"]
    np.testing.assert_array_equal(found, np.array([[1.234, 2], [5.678, 3]], np.float32))
    found = whole(table(tmp_path, text, decimal="point"), "all").views["features"]
    np.testing.assert_array_equal(found, np.array([[1234, 2], [5678, 3]], np.float32))


def test_newlines_in_quotes_and_the_lines_of_errors(tmp_path: Path) -> None:
    text = 'a,note,y\n1,"one\ntwo",0\n2,"say ""x"", y",1\n3,c,0\n4,d,1\nx,e,0\n'
    with pytest.raises(SourceError, match="t\\.csv, line 7, column 'a': found 'x'; must"):
        _ = table(tmp_path, text, ignore="note").splits
    text = text.replace("x,e", "5,e")
    assert pd.read_csv(StringIO(text)).note[0] == "one\ntwo"
    assert table(tmp_path, text, categories="note").views[0].shape == (6,)
    with pytest.raises(SourceError, match="a label has the name"):
        _ = table(tmp_path, text, label="note").splits


@pytest.mark.parametrize(
    ("encoding", "asked"),
    [("utf-16", None), ("utf-8-sig", None), ("latin-1", "latin-1"), ("cp1252", "windows-1252")],
)
def test_encodings(tmp_path: Path, encoding: str, asked: str | None) -> None:
    frame = FRAME.rename(columns={"height": "Höhe"}).replace({"kind": {"k0": "grün"}})
    data = frame.to_csv(index=False).encode(encoding)
    if asked:
        with pytest.raises(SourceError, match="a table must be UTF-8, or UTF-16"):
            _ = table(tmp_path, data).splits
    source = table(tmp_path, data, **({"encoding": asked} if asked else {}))
    assert "grün" in source.labels.names
    np.testing.assert_array_equal(whole(source, "all").views["features"], EXPECTED)


def test_a_first_column_that_numbers_the_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    named = FRAME.reset_index(names="id").to_csv(index=False)
    with caplog.at_level(logging.WARNING, "heron"):
        check(source := table(tmp_path, named))
        _ = source.splits
    assert (
        "t.csv: column 'id' only tells the rows apart: left out (--keep features:id)" in caplog.text
    )
    kept = table(tmp_path, named, keep=["features:id"])
    np.testing.assert_array_equal(
        np.asarray(whole(kept, "all").views["features"])[:, 0], np.arange(ROWS)
    )
    from_one = FRAME.set_axis(range(1, ROWS + 1))
    check(table(tmp_path, from_one.to_csv()))  # as R writes it
    assert table(tmp_path, from_one.to_csv(index_label="n")).views[0].shape == (3,)


@pytest.mark.parametrize("cell", ["+1.5", "1.", ".5", "1e-3", " 7 ", "-0", "9" * 30, "1E+5", "nan"])
def test_a_number_is_what_python_says(tmp_path: Path, cell: str) -> None:
    text = "a,b,y\n" + "".join(f"{cell},{n}.5,{n % 2}\n" for n in range(2)) + "2,2,0\n"
    found: Any = whole(table(tmp_path, text, missing="mean"), "all").views["features"]
    assert found[0, 0] == np.float32(2 if cell == "nan" else float(cell))


@pytest.mark.parametrize("cell", ["infinity", "++1", "0x10", "1_0", "1e", "--1", "NaN1"])
def test_and_nothing_else(tmp_path: Path, cell: str) -> None:
    text = "a,b,y\n1,2,0\n" + f"{cell},2,1\n"
    with pytest.raises(SourceError, match="line 3, column 'a'"):
        _ = table(tmp_path, text, missing="mean", header="yes").splits


def test_plain_and_quoted_files_are_read_alike(tmp_path: Path) -> None:
    rows = [[f" {n * 3} ", f"x{n}", "", "\u00e9"] for n in range(20_000)]
    plain, quoted = tmp_path / "plain.csv", tmp_path / "quoted.csv"
    plain.write_text("\n\n".join(",".join(row) for row in rows))
    quoted.write_text("\n".join(",".join(f'"{cell}"' for cell in row) for row in rows))
    found = [
        [column.to_pylist() for column in read_columns(path, dialect_of(path, None, None))]
        for path in (plain, quoted)
    ]
    assert found[0] == found[1] == [list(column) for column in zip(*map(strip, rows), strict=True)]


def strip(row: list[str]) -> list[str]:
    return [cell.strip() for cell in row]


def test_the_command_says_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "t.csv").write_text(FRAME.to_csv(sep=";", decimal=",", index=False))
    words = ["shards", "build", "table", "--csv", str(tmp_path / "t.csv"), "--quiet"]
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    assert "column 'height': -1,0 is read with a decimal comma" in caplog.text


def test_the_benchmark_of_reading_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["csv_files", "--small"])
    csv_files.main()
    said = capsys.readouterr().out
    assert said.startswith("2,000 rows of 51 columns") and said.count("\n| ") == 5
