"""Parses lines, numbers and tables of text files, more strictly than Python does."""

import csv
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from heron.shards.errors import SourceError

NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]+)?|[+-]?(inf|nan)", re.I)

WORDS = {"train": "train(ing)?", "val": "val(id|idation)?|dev", "test": "test(ing)?"}
# A split and the regular expression of file names that hold its word, with no letter beside it.
SPLIT_PATTERNS = [(split, f"(?i)(.*[^a-z])?({word})([^a-z].*)?") for split, word in WORDS.items()]
MISSING = ("", "?", "nan")
UNNAMED = "", "Unnamed: 0"  # titles of an index that pandas wrote
SEPARATORS = {"comma": ",", "tab": "\t", "semicolon": ";", "space": " "}


def split_lines(text: str) -> list[str]:
    r"""Returns the lines of a text, which end with \n or \r\n, without a byte order mark."""
    lines = [line.removesuffix("\r") for line in text.removeprefix("\ufeff").split("\n")]
    return lines if lines[-1] else lines[:-1]


def parse_number(text: str) -> float | None:
    """Returns the number of plain ASCII digits, inf or nan; None for others, as `1_000` and `١`."""
    return float(text) if NUMBER.fullmatch(text) else None


class Sheet(NamedTuple):
    """A table file: its view, its column names, and the cells of its rows by line number."""

    view: str
    file: str
    names: list[str] | None
    rows: dict[int, list[str]]

    @property
    def width(self) -> int:
        """The number of columns."""
        return len(next(iter(self.rows.values())))

    def cells(self, column: int) -> list[str]:
        """Returns the cells of a column."""
        return [row[column] for row in self.rows.values()]

    def title(self, column: int) -> str:
        """Returns the name of a column, or one made of the view and its number."""
        return self.names[column] if self.names else f"{self.view}-{column}"

    def shown(self, column: int) -> str:
        """Returns how messages name a column."""
        return repr(self.names[column]) if self.names else str(column)


def read_rows(path: Path, separator: str | None = None) -> dict[int, list[str]]:
    """Returns the cells of every line that is not blank, as many in each, by line number.

    `separator` is a comma, tab, semicolon or space; None: the one that splits the first line.
    """
    rows: dict[int, list[str]] = {}
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            head = next(filter(str.strip, stream), "")
            delimiter = separator or _separator(path.name, head)
            stream.seek(0)
            reader = _reader((line.rstrip(" \r\n") + "\n" for line in stream), delimiter)
            for cells in reader:
                if len(cells) > 1 or (cells and cells[0].strip()):
                    rows[reader.line_num] = [cell.strip(" \t") for cell in cells]
    except (csv.Error, UnicodeDecodeError) as fault:
        raise SourceError(
            f"{path.name}: cannot be read ({fault}); expected a table in UTF-8"
        ) from None
    if not rows:
        raise SourceError(f"{path.name}: no rows; expected a table with a row a line")
    first, width = next((line, len(cells)) for line, cells in rows.items())
    for number, cells in rows.items():
        if len(cells) == 1 or len(cells) != width:
            expected = "two at least, parted by commas, tabs, semicolons or spaces"
            if width > 1:
                expected = f"{width}, as in line {first}"
            raise SourceError(
                f"{path.name}, line {number}: {len(cells)} column{'s' * (len(cells) > 1)}; "
                f"expected {expected}"
            )
    return rows


def _reader(lines: Iterable[str], separator: str) -> Any:
    return csv.reader(lines, delimiter=separator, skipinitialspace=True, strict=True)


def _separator(file: str, line: str) -> str:
    """Returns the separator of the cells of a line; SourceError if two may be."""
    counts = {name: len(next(_reader([line], mark), ())) for name, mark in SEPARATORS.items()}
    candidates = [name for name, count in counts.items() if count > 1 and name != "space"]
    if len(candidates) > 1:
        splits = " and ".join(f"by {name}s into {counts[name]}" for name in candidates)
        raise SourceError(
            f"{file}: its first line is parted {splits} cells; expected one of them; say which "
            "with --separator"
        )
    return SEPARATORS[candidates[0] if candidates else "comma" if counts["space"] < 2 else "space"]


def is_missing(cell: str) -> bool:
    """Returns whether a cell stands for a missing value."""
    return cell.lower() in MISSING


def whole_number(text: str) -> int | None:
    """Returns a whole number of at most 9 digits, such as a column's, or None."""
    return int(text) if re.fullmatch(r"-?[0-9]{1,9}", text) else None


def resembles_number(text: str) -> bool:
    """Returns whether a cell is or resembles a number, as 1_000 does, and so is not in a header."""
    try:
        float(text.replace("_", ""))
    except ValueError:
        return False
    return True


def counts_up(cells: list[str]) -> bool:
    """Returns whether cells are 0, 1, 2, ..., as pandas names columns; the first may be empty."""
    numbers = [whole_number(cell) for cell in (cells[1:] if cells[0] == "" else cells)]
    return len(numbers) > 1 and numbers == [*range(len(numbers))]
