"""Tables of numbers: a CSV file with a row a line, one of its columns the class."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, FilePath, field_validator

from heron.shards.errors import SourceError
from heron.shards.manifest import Labels
from heron.shards.sources.base import WHOLE, InMemory, Loaded

MISSING = ("", "?", "nan")
LARGEST = float(np.finfo(np.float32).max)


class Table(InMemory):
    """A table of numbers, such as UCI's: a CSV file, one of its columns the class.

    Classes are the distinct values of that column, in the order of numbers where all are numbers
    and of texts where not. Blank lines are no rows; all rows are one split, `all`.
    """

    name: ClassVar[str] = "table"
    examples: ClassVar[str] = "heron shards build table --csv yeast.csv --out data/yeast"

    csv: FilePath = Field(description="the CSV file, its cells parted by commas")
    header: Literal["auto", "yes", "no"] = Field(
        "auto", description="whether the first line names the columns; auto: it holds no numbers"
    )
    label: str | None = Field(
        None,
        description="the column of the class, by its name or its number: 0 is the first, -1 the "
        "last (default: the last)",
        coerce_numbers_to_str=True,
    )
    missing: Literal["error", "mean"] = Field(
        "error",
        description="a cell that is empty, ? or nan is an error, or becomes the mean of the cells "
        "that its column has",
    )

    @field_validator("header", mode="before")
    @classmethod
    def _header_of_yaml(cls, value: Any) -> Any:
        """YAML reads a bare yes or no as a truth value."""
        return {True: "yes", False: "no"}[value] if isinstance(value, bool) else value

    @property
    def dataset(self) -> str:
        """The name of the file."""
        return self.csv.stem

    @property
    def files(self) -> list[Path]:
        """The CSV file."""
        return [self.csv]

    def load(self) -> Loaded:
        """Reads the file; the view `features` has every column but the class, in its order."""
        lines = read_lines(self.csv)
        first = lines[0].cells
        names = first if self._has_header(lines) else None
        if names is not None:
            lines = lines[1:]
        if not lines:
            raise SourceError(f"{self.csv.name}: a header and no rows; expected a line for each")
        at = self._label_column(names, len(first))
        classes, numbers = _classes(self.csv.name, lines, at)
        titles = [repr(n) for n in names] if names else [str(n) for n in range(len(first))]
        features = _features(self.csv.name, lines, at, titles, self.missing == "mean")
        return Loaded(
            views={"features": features},
            targets=numbers,
            labels=Labels(kind="multi_class", names=classes),
            splits={WHOLE: range(len(lines))},
        )

    def _has_header(self, lines: list[_Line]) -> bool:
        """Returns whether the first line names the columns; SourceError where it may be a row."""
        if self.header != "auto":
            return self.header == "yes"
        first = lines[0].cells
        number = _whole(self.label) if self.label is not None else -1
        if number is None:
            return True  # the class has a name, so there are names
        at = number if -len(first) <= number < len(first) else -1
        cells = [cell for cell in _without(first, at) if not _is_missing(cell)]
        words = [cell for cell in cells if _number(cell) is None]
        if words and len(words) < len(cells):
            value = next(cell for cell in cells if _number(cell) is not None)
            raise SourceError(
                f"{self.csv.name}, line {lines[0].number}: found {words[0]!r}, as in a header, and "
                f"{value!r}, as in a row; expected names alone or numbers alone; say which it is "
                "with --header yes or --header no"
            )
        below = (line.cells[at] for line in lines[1:])
        return bool(words) or (
            _number(first[at]) is None and all(_number(cell) is not None for cell in below)
        )

    def _label_column(self, names: list[str] | None, width: int) -> int:
        """Returns the number of the column of the class, from 0 on."""
        if self.label is None:
            return width - 1
        if names is not None and names.count(self.label) == 1:
            return names.index(self.label)
        number = _whole(self.label)
        if number is not None and -width <= number < width:
            return number % width
        if names is not None and self.label in names:
            problem = f"{names.count(self.label)} columns have the name {self.label!r}"
        elif number is not None:
            problem = f"no column {number}"
        else:
            problem = f"no column {self.label!r}"
        known = f"names {', '.join(names)}" if names else "there are no names"
        raise SourceError(
            f"{self.csv.name}: {problem}; {known}; expected a name that one column has, or a "
            f"number from {-width} to {width - 1}; see --label and --header"
        )


class _Line(NamedTuple):
    number: int  # of the line in the file, from 1 on
    cells: list[str]


def read_lines(path: Path) -> list[_Line]:
    """Returns the cells of every line that is not blank; their number must not differ."""
    lines = []
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.reader(stream, skipinitialspace=True, strict=True)
            for cells in reader:
                if len(cells) > 1 or (cells and cells[0].strip()):
                    lines.append(_Line(reader.line_num, [cell.strip() for cell in cells]))
    except (csv.Error, UnicodeDecodeError) as fault:
        raise SourceError(
            f"{path.name}: cannot be read ({fault}); expected a CSV file in UTF-8"
        ) from None
    if not lines:
        raise SourceError(f"{path.name}: no rows; expected a CSV file with a row a line")
    width = len(lines[0].cells)
    if width == 1:
        raise SourceError(
            f"{path.name}, line {lines[0].number}: 1 column; expected a feature and a class at "
            "least, parted by commas"
        )
    for line in lines:
        if len(line.cells) != width:
            raise SourceError(
                f"{path.name}, line {line.number}: {len(line.cells)} columns; expected {width}, "
                f"as in line {lines[0].number}"
            )
    return lines


def _classes(file: str, lines: list[_Line], at: int) -> tuple[list[str], NDArray[np.int64]]:
    """Returns the names of the classes, sorted, and the class of each row."""
    texts = [line.cells[at] for line in lines]
    for line in lines:
        if _is_missing(line.cells[at]):
            raise SourceError(
                f"{file}, line {line.number}: the class in column {at} is missing (found "
                f"{line.cells[at]!r}); expected a class for each row; fill it or drop the row first"
            )
    names = sorted(set(texts))
    values = {name: _number(name) for name in names}
    if None not in values.values():
        names.sort(key=lambda name: values[name] or 0.0)
        for one, other in zip(names, names[1:], strict=False):
            if values[one] == values[other]:
                raise SourceError(
                    f"{file}: classes {one!r} and {other!r} are the same number in two spellings; "
                    "expected one spelling of each class; write them alike first"
                )
    of = {name: number for number, name in enumerate(names)}
    return names, np.array([of[text] for text in texts], np.int64)


def _features(
    file: str, lines: list[_Line], at: int, titles: list[str], fill: bool
) -> NDArray[np.float32]:
    """Returns the columns but the class, float32 [rows, columns]; `titles` name all columns."""
    titles = _without(titles, at)
    values = np.empty((len(lines), len(titles)))
    for row, line in enumerate(lines):
        for column, cell in enumerate(_without(line.cells, at)):
            value = np.nan if _is_missing(cell) else _number(cell)
            if value is None or abs(value) > LARGEST:
                raise SourceError(
                    f"{file}, line {line.number}, column {titles[column]}: found {cell!r}; "
                    "expected a finite float32; correct it or drop the column first"
                )
            if value != value and not fill:
                raise SourceError(
                    f"{file}, line {line.number}, column {titles[column]}: the cell is missing "
                    f"(found {cell!r}); expected a number; fill it first, or take the column's "
                    "mean with --missing mean"
                )
            values[row, column] = value
    gaps = np.isnan(values)
    for column in np.flatnonzero(gaps.any(0)).tolist():
        if gaps[:, column].all():
            raise SourceError(
                f"{file}, column {titles[column]}: every cell is missing, so there is no mean; "
                "drop the column first"
            )
        values[gaps[:, column], column] = values[~gaps[:, column], column].mean()
    return values.astype(np.float32)


def _without(cells: list[str], at: int) -> list[str]:
    at %= len(cells)
    return cells[:at] + cells[at + 1 :]


def _is_missing(cell: str) -> bool:
    return cell.lower() in MISSING


def _whole(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?[0-9]+", text) else None


def _number(text: str) -> float | None:
    """Returns the number in a cell, infinite ones too, or None (Python alone reads 1_000)."""
    try:
        return None if "_" in text else float(text)
    except ValueError:
        return None
