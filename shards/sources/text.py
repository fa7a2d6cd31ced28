"""Text files of a publisher: their lines, numbers and tables, where Python would take more."""

import csv
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from heron.shards.errors import SourceError

NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]+)?|[+-]?(inf|nan)", re.I)

WORDS = {"train": "train(ing)?", "val": "val(id|idation)?|dev", "test": "test(ing)?"}
# Of a split in the name of a file, as a regular expression: a word, with no letter beside it.
BY_WORD = [(split, f"(?i)(.*[^a-z])?({word})([^a-z].*)?") for split, word in WORDS.items()]
MISSING = ("", "?", "nan")
SEPARATORS = {"comma": ",", "tab": "\t", "semicolon": ";", "space": " "}


def split_lines(text: str) -> list[str]:
    r"""Returns the lines of a text, which end with \n or \r\n; a byte order mark begins none."""
    lines = [line.removesuffix("\r") for line in text.removeprefix("\ufeff").split("\n")]
    return lines if lines[-1] else lines[:-1]


def parse_number(text: str) -> float | None:
    """Returns a number in plain digits, infinite ones too, or None (of `1_000`, or `١`)."""
    return float(text) if NUMBER.fullmatch(text) else None


class Sheet(NamedTuple):
    """A file: its view, the names of its columns, and the cells of its rows by their lines."""

    view: str
    file: str
    names: list[str] | None
    rows: dict[int, list[str]]

    @property
    def width(self) -> int:
        """The number of its columns."""
        return len(next(iter(self.rows.values())))

    def cells(self, at: int) -> list[str]:
        """Returns a column."""
        return [row[at] for row in self.rows.values()]

    def title(self, at: int) -> str:
        """Returns what a column is called."""
        return self.names[at] if self.names else f"{self.view}-{at}"

    def shown(self, at: int) -> str:
        """Returns how messages name a column."""
        return repr(self.names[at]) if self.names else str(at)


def read_rows(path: Path, separator: str | None = None) -> dict[int, list[str]]:
    """Returns the cells of every line that is not blank, as many in each, by the line's number.

    `separator` parts them, a comma, tab, semicolon or spaces; None: the one that parts a line.
    """
    rows: dict[int, list[str]] = {}
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            head = next(filter(str.strip, stream), "")
            parted = separator or _separator(path.name, head)
            stream.seek(0)
            reader = _reader((line.rstrip(" \r\n") + "\n" for line in stream), parted)
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
    """Returns what parts the cells of a line."""
    counts = {name: len(next(_reader([line], mark), ())) for name, mark in SEPARATORS.items()}
    found = [name for name, count in counts.items() if count > 1 and name != "space"]
    if len(found) > 1:
        parts = " and ".join(f"by {name}s into {counts[name]}" for name in found)
        raise SourceError(
            f"{file}: its first line is parted {parts} cells; expected one of them; say which with "
            "--separator"
        )
    return SEPARATORS[found[0] if found else "comma" if counts["space"] < 2 else "space"]


def is_missing(cell: str) -> bool:
    """Tells whether a cell says that nobody knows."""
    return cell.lower() in MISSING


def whole_number(text: str) -> int | None:
    """Returns the number of a column, or None."""
    return int(text) if re.fullmatch(r"-?[0-9]{1,9}", text) else None


def resembles_number(text: str) -> bool:
    """Tells whether a cell is a number, or is meant as one, such as 1_000: it is in no header."""
    try:
        float(text.replace("_", ""))
    except ValueError:
        return False
    return True
