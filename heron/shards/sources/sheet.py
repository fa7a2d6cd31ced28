"""Reads tables such as CSV files, by pyarrow where they are plain, and their columns of numbers."""

import codecs
import csv
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from heron.shards.errors import SourceError
from heron.shards.sources.labels import classes_of
from heron.shards.sources.text import DECIMAL, MISSING, is_missing, parse_number, resembles_number

MAX_HEAD_LINES = 100  # that tell how a table is written
MAX_CATEGORIES = 1000  # of a column
CHUNK, ROWS_PER_CHUNK = 1 << 20, 1 << 13
UNNAMED = "", "Unnamed: 0"  # titles of an index that pandas wrote
SEPARATORS = {"comma": ",", "tab": "\t", "semicolon": ";", "space": " "}
FLOAT32_MAX = float(np.finfo(np.float32).max)
THOUSANDS = re.compile(r"[+-]?[0-9]{1,3}(,[0-9]{3})+")


@dataclass(frozen=True, eq=False)
class Sheet:
    """A table file: its view, its column names, and its cells, a column of strings each."""

    view: str
    path: Path
    names: list[str] | None
    columns: list[Any]  # pyarrow's strings
    rows: int
    dialect: "Dialect"
    notes: list[str] = field(default_factory=list)  # what was taken for something else

    @property
    def file(self) -> str:
        """The name of the file."""
        return self.path.name

    @property
    def width(self) -> int:
        """The number of columns."""
        return len(self.columns)

    def __len__(self) -> int:
        """Returns the number of rows."""
        return self.rows

    def cells(self, column: int) -> list[str]:
        """Returns the cells of a column."""
        cells: list[str] = self.columns[column].to_pylist()
        return cells

    def line(self, row: int) -> int:
        """Returns the number of the line that a row ends on, which takes a reading of the file."""
        return next(islice(_lines(self.path, self.dialect), row + (self.names is not None), None))[
            0
        ]

    def title(self, column: int) -> str:
        """Returns the name of a column, or one made of the view and its number."""
        return self.names[column] if self.names else f"{self.view}-{column}"

    def shown(self, column: int) -> str:
        """Returns how messages name a column."""
        return repr(self.names[column]) if self.names else str(column)

    def plain(self, cell: str) -> str:
        """Returns a cell, with a point where it is a number with a decimal comma."""
        return cell.replace(",", ".") if self.dialect.comma and DECIMAL.fullmatch(cell) else cell

    def numbers(self, column: int, may_miss: bool) -> NDArray[np.float64] | None:
        """Returns a column of numbers, NaN where one is missing; None where a cell is neither.

        Raises SourceError where a comma may be of decimals or of thousands.
        """
        cells = self.columns[column]
        values = None if self.dialect.comma == "asked" else parse_column(cells, ".")
        if values is None and self.dialect.comma:
            values = parse_column(cells, ",")
            texts = [c for c in self.cells(column) if "," in c] if values is not None else []
            if texts and self.dialect.comma == "likely":
                where = f"{self.file}, column {self.shown(column)}"
                if all(THOUSANDS.fullmatch(text) for text in texts):
                    raise SourceError(
                        f"{where}: {texts[0]!r} has a decimal comma or one of thousands; use "
                        "--decimal comma, or write no thousands"
                    )
                self.notes.append(f"{where}: {texts[0]} is read with a decimal comma")
        if values is None or not (np.abs(values[~np.isnan(values)]) <= FLOAT32_MAX).all():
            return None
        return values if may_miss or not np.isnan(values).any() else None

    def values(self, column: int, category: bool, may_miss: bool) -> NDArray[np.float64]:
        """Returns a column as numbers [rows, 1], or as 0 and 1 for each of its categories."""
        if not category and (numbers := self.numbers(column, may_miss)) is not None:
            return numbers[:, None]
        cells = [self.plain(cell) for cell in self.cells(column)]
        where = f"column {self.shown(column)}"
        present = [cell for cell in cells if category and not is_missing(cell)]
        names = classes_of(present, f"{self.file}, {where}")[0]
        if len(names) > MAX_CATEGORIES:
            raise SourceError(
                f"{self.file}, {where}: {len(names):,} categories, and the limit is "
                f"{MAX_CATEGORIES:,}; remove the column with --ignore"
            )
        values = np.zeros((len(cells), len(names) if category else 1))
        positions = {name: position for position, name in enumerate(names)}
        for row, cell in enumerate(cells):
            missing, fault = is_missing(cell), None
            value = parse_number(cell)
            if missing and not may_miss:
                fault = (
                    "the cell is missing; fill it first, or use the column's mean with --missing "
                    "mean"
                )
            elif not missing and not category and (value is None or not abs(value) <= FLOAT32_MAX):
                fault = (
                    "must be a finite float32; correct it, remove the column with --ignore, or "
                    "name it in --categories"
                )
            if fault:
                raise SourceError(
                    f"{self.file}, line {self.line(row)}, {where}: found {cell!r}; {fault}"
                )
            if missing:
                values[row] = np.nan
            elif category:
                values[row, positions[cell]] = 1
            else:
                values[row] = value
        return values


class Dialect(NamedTuple):
    """How the cells of a file are parted, and its text encoded."""

    separator: str
    encoding: str
    comma: Literal["asked", "likely", ""]  # whether commas begin fractions


def dialect_of(
    path: Path, separator: str | None, encoding: str | None, decimal: str = "auto"
) -> Dialect:
    """Returns how a table is written; SourceError where that is ambiguous.

    `separator` is a comma, tab, semicolon or space; None: the one that splits the first line. An
    `encoding` of None is UTF-8, or UTF-16 by a byte order mark.
    """
    with path.open("rb") as stream:
        begins_as_utf16 = stream.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    encoding = encoding or ("utf-16" if begins_as_utf16 else "utf-8-sig")
    try:
        with path.open(encoding=encoding, newline="") as stream:
            head = [line for line in islice(stream, MAX_HEAD_LINES) if line.strip()]
        separator = separator or _separator(path.name, head)
    except (csv.Error, UnicodeError) as fault:
        raise _unreadable(path, fault) from None
    comma: Literal["asked", "likely", ""] = "asked" if decimal == "comma" else ""
    if decimal == "auto" and separator != ",":
        comma = "likely"
    return Dialect(separator, encoding, comma)


def _unreadable(path: Path, fault: Exception) -> SourceError:
    reason = "a table must be UTF-8"
    if isinstance(fault, UnicodeError):
        reason += ", or UTF-16 with a byte order mark; use --encoding latin-1 if it is"
    return SourceError(f"cannot read {path.name} ({fault}); {reason}")


def read_columns(path: Path, dialect: Dialect, alone: bool = True) -> list[Any]:
    """Returns the cells of every line that is not blank, a column of strings each.

    A table that is `alone` has two columns at least; beside others one may be the labels.
    """
    columns = _read_plain(path, dialect)
    if columns is None:
        columns = _read_quoted(path, dialect, alone)
    return columns


def _read_plain(path: Path, dialect: Dialect) -> list[Any] | None:
    """Reads a file as pyarrow does; None where it has quotes, or anything odd."""
    import pyarrow as pa
    from pyarrow import compute, csv

    if dialect.separator == " " or dialect.encoding != "utf-8-sig":
        return None
    spaces, tabs = False, dialect.separator != "\t"
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            if b'"' in chunk:
                return None
            spaces = spaces or b" " in chunk or (tabs and b"\t" in chunk)
        stream.seek(0)
        head = next(filter(bytes.strip, stream), b"")
    width = head.count(dialect.separator.encode()) + 1
    try:
        found = csv.read_csv(
            path,
            csv.ReadOptions(column_names=[str(n) for n in range(width)], block_size=CHUNK),
            csv.ParseOptions(delimiter=dialect.separator, quote_char=False),
            csv.ConvertOptions(column_types={str(n): pa.string() for n in range(width)}),
        )
    except pa.ArrowInvalid:  # such as lines of several lengths: the fault is found below
        return None
    if width < 2 or not len(found):
        return None
    return [compute.ascii_trim(x, " \t") if spaces else x for x in found.columns]


def _read_quoted(path: Path, dialect: Dialect, alone: bool) -> list[Any]:
    import pyarrow as pa

    chunks, rows, first, width = list[list[Any]](), list[list[str]](), 0, 0

    def flush() -> None:
        chunks.append([pa.array(column, pa.string()) for column in zip(*rows, strict=True)])
        rows.clear()

    for line, cells in _lines(path, dialect):
        if not width:
            first, width = line, len(cells)
        elif (len(rows), len(chunks), len(cells)) == (1, 0, width + 1) and not any(
            map(resembles_number, rows[0])
        ):  # R gives the column of its row names no name
            rows[0].insert(0, "")
            width += 1
        single = len(cells) == 1 and (alone or "|" in cells[0])  # separated by something unknown
        if single or len(cells) != width:
            expected = "two at least, separated by commas, tabs, semicolons or spaces"
            if width > 1:
                expected = f"{width}, as in line {first}"
            raise SourceError(
                f"{path.name}, line {line}: {len(cells)} column{'s' * (len(cells) > 1)}, but "
                f"there must be {expected}"
            )
        rows.append(cells)
        if len(rows) == ROWS_PER_CHUNK:
            flush()
    if not width:
        raise SourceError(f"{path.name} has no rows; write one per line")
    flush()
    chunks = [chunk for chunk in chunks if chunk]
    return [pa.chunked_array(parts) for parts in zip(*chunks, strict=True)]


def _lines(path: Path, dialect: Dialect) -> Iterator[tuple[int, list[str]]]:
    """Yields the line and the cells of each row, more strictly than pyarrow reads them."""
    try:
        with path.open(encoding=dialect.encoding, newline="") as stream:
            lines = (line.rstrip(" \r\n") + "\n" for line in stream)
            reader = _reader(lines, dialect.separator)
            for cells in reader:
                if len(cells) > 1 or (cells and cells[0].strip()):
                    yield reader.line_num, [cell.strip(" \t") for cell in cells]
    except (csv.Error, UnicodeError) as fault:
        raise _unreadable(path, fault) from None


def parse_column(column: Any, decimal: str) -> NDArray[np.float64] | None:
    """Returns the numbers of a column, NaN where a cell is missing; None if a cell is neither."""
    import pyarrow as pa
    from pyarrow import compute

    try:
        if decimal == ",":
            column = compute.replace_substring(column, ",", ".")
        try:
            values = compute.cast(column, pa.float64())
        except pa.ArrowInvalid:
            missing = compute.is_in(compute.ascii_lower(column), pa.array(MISSING))
            unsigned = compute.replace_substring_regex(column, r"^\+([0-9.])", r"\1")
            present = compute.if_else(missing, None, unsigned)
            values = compute.cast(present, pa.float64())
        if values.null_count:
            values = compute.fill_null(values, float("nan"))
        # Its own to_numpy would import pandas, which takes longer than all of this.
        return np.concatenate([np.from_dlpack(chunk) for chunk in values.chunks])
    except pa.ArrowInvalid:
        return None


def _reader(lines: Iterable[str], separator: str) -> Any:
    return csv.reader(lines, delimiter=separator, skipinitialspace=True, strict=True)


def _split(line: str, separator: str) -> list[str]:
    try:
        return next(_reader([line], separator), [])
    except csv.Error:  # it is quoted, and parted otherwise
        return []


def _separator(file: str, lines: list[str]) -> str:
    """Returns the separator of the cells of a table; SourceError if two may be."""
    first, *rest = lines or [""]
    counts = {name: len(_split(first, mark)) for name, mark in SEPARATORS.items()}
    candidates = [name for name, count in counts.items() if count > 1 and name != "space"]
    if "comma" in candidates:  # which may be a decimal one
        others = [name for name, count in counts.items() if count > 1 and name != "comma"]
        cells = [c for name in others for line in rest for c in _split(line, SEPARATORS[name])]
        if cells and all(DECIMAL.fullmatch(cell.strip()) for cell in cells if "," in cell):
            candidates.remove("comma")
    if len(candidates) > 1:
        splits = " and ".join(f"by {name}s into {counts[name]}" for name in candidates)
        raise SourceError(f"{file}: its first line can be split {splits} cells; choose --separator")
    return SEPARATORS[candidates[0] if candidates else "comma" if counts["space"] < 2 else "space"]
