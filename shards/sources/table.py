"""Tables of numbers: a CSV file with a row a line, one of its columns the class."""

from __future__ import annotations

import csv
import re
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, FilePath, field_validator

from heron.shards.errors import SourceError
from heron.shards.manifest import Labels
from heron.shards.sources.base import WHOLE, FileSource, Loaded
from heron.shards.sources.text import parse_number

MISSING = ("", "?", "nan")
LARGEST = float(np.finfo(np.float32).max)


class Table(FileSource):
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
        rows = read_rows(self.csv)
        first = next(iter(rows.values()))
        names = rows.pop(next(iter(rows))) if self._has_header(rows) else None
        if not rows:
            raise SourceError(f"{self.csv.name}: a header and no rows; expected a line for each")
        at = self._label_column(names, len(first))
        features = {number: _without(cells, at) for number, cells in rows.items()}
        titles = [repr(name) for name in names] if names else [str(n) for n in range(len(first))]
        classes, targets = _classes(self.csv.name, {n: cells[at] for n, cells in rows.items()}, at)
        return Loaded(
            views={"features": self._features(features, _without(titles, at))},
            targets=targets,
            labels=Labels(kind="multi_class", names=classes),
            splits={WHOLE: range(len(rows))},
        )

    def _has_header(self, rows: dict[int, list[str]]) -> bool:
        """Returns whether the first line names the columns; SourceError where it may be a row."""
        if self.header != "auto":
            return self.header == "yes"
        (line, first), *others = rows.items()
        at = _whole(self.label or "-1")
        if at is None:
            return True  # the class has a name, so there are names
        at = at if -len(first) <= at < len(first) else -1
        cells = [cell for cell in _without(first, at) if not _is_missing(cell)]
        words = [cell for cell in cells if parse_number(cell) is None]
        numbers = [cell for cell in cells if _resembles_number(cell)]
        if words and numbers:
            raise SourceError(
                f"{self.csv.name}, line {line}: found {words[0]!r}, as in a header, and "
                f"{numbers[0]!r}, as in a row; expected names alone or numbers alone; say which it "
                "is with --header yes or --header no"
            )
        return bool(words) or (
            parse_number(first[at]) is None
            and all(parse_number(row[at]) is not None for _, row in others)
        )

    def _label_column(self, names: list[str] | None, width: int) -> int:
        """Returns the number of the column of the class, from 0 on."""
        label = str(width - 1) if self.label is None else self.label
        same, number = (names or []).count(label), _whole(label)
        if names is not None and same == 1 and self.label is not None:
            return names.index(label)
        if number is not None and -width <= number < width:
            return number % width
        problem = f"{same} columns are called" if same else "no column"
        known = f"names {', '.join(names)}" if names else "there are no names"
        raise SourceError(
            f"{self.csv.name}: {problem} {label!r}; {known}; expected a name that one column has, "
            f"or a number from {-width} to {width - 1}; see --label and --header"
        )

    def _features(self, rows: dict[int, list[str]], titles: list[str]) -> NDArray[np.float32]:
        """Returns cells as float32 [rows, columns]; missing ones are the mean."""
        values = np.empty((len(rows), len(titles)))
        for row, (line, cells) in enumerate(rows.items()):
            for column, cell in enumerate(cells):
                missing = _is_missing(cell)
                value = np.nan if missing else parse_number(cell)
                fault = None
                if value is None or abs(value) > LARGEST:
                    fault = "expected a finite float32; correct it or drop the column first"
                elif missing and self.missing == "error":
                    fault = (
                        "the cell is missing; expected a number; fill it first, or take the "
                        "column's mean with --missing mean"
                    )
                if fault:
                    raise SourceError(
                        f"{self.csv.name}, line {line}, column {titles[column]}: found {cell!r}; "
                        f"{fault}"
                    )
                values[row, column] = value
        gaps = np.isnan(values)
        if gaps.all(0).any():
            raise SourceError(
                f"{self.csv.name}, column {titles[int(gaps.all(0).argmax())]}: every cell is "
                "missing, so there is no mean; drop the column first"
            )
        for column in np.flatnonzero(gaps.any(0)).tolist():
            values[gaps[:, column], column] = values[~gaps[:, column], column].mean()
        return values.astype(np.float32)


def read_rows(path: Path) -> dict[int, list[str]]:
    """Returns the cells of every line that is not blank, as many in each, by the line's number."""
    rows: dict[int, list[str]] = {}
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.reader(stream, skipinitialspace=True, strict=True)
            for cells in reader:
                if len(cells) > 1 or (cells and cells[0].strip()):
                    rows[reader.line_num] = [cell.strip(" \t") for cell in cells]
    except (csv.Error, UnicodeDecodeError) as fault:
        raise SourceError(
            f"{path.name}: cannot be read ({fault}); expected a CSV file in UTF-8"
        ) from None
    if not rows:
        raise SourceError(f"{path.name}: no rows; expected a CSV file with a row a line")
    first, width = next((line, len(cells)) for line, cells in rows.items())
    for line, cells in rows.items():
        if len(cells) == 1 or len(cells) != width:
            expected = "a feature and a class at least, parted by commas"
            if width > 1:
                expected = f"{width}, as in line {first}"
            raise SourceError(
                f"{path.name}, line {line}: {len(cells)} column{'s' * (len(cells) > 1)}; "
                f"expected {expected}"
            )
    return rows


def _classes(file: str, texts: dict[int, str], at: int) -> tuple[list[str], NDArray[np.int64]]:
    """Returns the names of the classes, sorted, and the class of each row."""
    for line, text in texts.items():
        if _is_missing(text):
            raise SourceError(
                f"{file}, line {line}: the class in column {at} is missing (found {text!r}); "
                "expected a class for each row; fill it or drop the row first"
            )
    names = sorted(set(texts.values()))
    values = {name: parse_number(name) for name in names}
    if None not in values.values():
        names.sort(key=lambda name: values[name] or 0.0)
        for one, other in pairwise(names):
            if values[one] == values[other]:
                raise SourceError(
                    f"{file}: classes {one!r} and {other!r} are the same number in two spellings; "
                    "expected one spelling of each class; write them alike first"
                )
    number = {name: place for place, name in enumerate(names)}
    return names, np.array([number[text] for text in texts.values()], np.int64)


def _without(cells: list[str], at: int) -> list[str]:
    return [cell for number, cell in enumerate(cells) if number != at % len(cells)]


def _is_missing(cell: str) -> bool:
    return cell.lower() in MISSING


def _whole(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?[0-9]{1,9}", text) else None


def _resembles_number(text: str) -> bool:
    """Tells whether a cell is a number, or is meant as one, such as 1_000: it is in no header."""
    try:
        float(text.replace("_", ""))
    except ValueError:
        return False
    return True
