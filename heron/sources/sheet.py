"""Sheets of cells, such as CSV files have: their columns, what is in them, and how to name them."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heron.base.dotted import without_case
from heron.base.errors import SourceError, first_few
from heron.shards.picture import SUFFIXES
from heron.sources.labels import LABEL_NAMES, classes_of
from heron.sources.leaks import names_keys
from heron.sources.text import (
    DECIMAL,
    MISSING,
    Dialect,
    are_rising,
    counts_up,
    is_missing,
    parse_number,
    read_lines,
    resembles_number,
    whole_number,
)

MIN_ROWS = 10  # of fewer, cells differ or count up by chance
MIN_NAMES = 6  # numbers that rise in the first line alone, and are names
SENTENCE_WORDS = 5  # in the mean; names and addresses have fewer
MAX_CATEGORIES = 1000  # of a column
FLOAT32_MAX = float(np.finfo(np.float32).max)
THOUSANDS = re.compile(r"[+-]?[1-9][0-9]{0,2}(,[0-9]{3})+(\.[0-9]+)?")
Place = tuple[int, int]  # the number of a sheet, and that of a column in it
ENDINGS = tuple(f".{suffix}" for suffix in SUFFIXES)


@dataclass(frozen=True, eq=False)
class Sheet:
    """A table file: its view, its column names, and its cells, a column of strings each."""

    view: str
    path: Path
    names: list[str] | None
    columns: list[Any]  # pyarrow's strings
    rows: int
    dialect: Dialect
    faults: dict[int, str]  # lines with more or fewer cells, which are no rows
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

    def present(self, column: int) -> list[str]:
        """Returns the cells of a column that are not missing."""
        return [cell for cell in self.cells(column) if not is_missing(cell)]

    def line(self, row: int) -> int:
        """Returns the number of the line that a row ends on, which takes a reading of the file."""
        lines = (n for n, _ in read_lines(self.path, self.dialect) if n not in self.faults)
        return next(islice(lines, row + (self.names is not None), None))

    @property
    def titles(self) -> list[str]:
        """The names of the columns, or some made of the view and their numbers."""
        return self.names or [f"{self.view}-{column}" for column in range(self.width)]

    def title(self, column: int) -> str:
        """Returns the name of a column, or one made of the view and its number."""
        return self.titles[column]

    def shown(self, column: int) -> str:
        """Returns how messages name a column."""
        return repr(self.names[column]) if self.names else str(column)

    def plain(self, cell: str) -> str:
        """Returns a cell, with a point where it is a number with a decimal comma."""
        return cell.replace(",", ".") if self.dialect.comma and DECIMAL.fullmatch(cell) else cell

    def has_header(self, labels: set[int]) -> bool:
        """Returns whether the first line names the columns; SourceError where it is ambiguous.

        The columns of the labels, `labels`, may have texts in the first row too.
        """
        first = [self.plain(column[0].as_py()) for column in self.columns]
        features = [n for n, c in enumerate(first) if n not in labels and not is_missing(c)]
        cells = [first[n] for n in features]
        if any(not is_missing(cell) and self.is_paths(n) for n, cell in enumerate(first)):
            return False  # a name of the column would be no path of a picture
        if any(
            first[n].lower() in LABEL_NAMES
            or parse_number(first[n]) is None
            and all(parse_number(cell) is not None for cell in self.cells(n)[1:])
            for n in labels
        ):
            return True
        if len(cells) > 1 and are_rising(cells):
            counted = counts_up(first) or (len(cells) >= MIN_NAMES and counts_up(cells))
            fractions = [
                self.rows > 1 and all(whole_number(c) is None for c in self.cells(n)[1:])
                for n in (range(self.width) if counted else features)
            ]
            rows = zip(*(self.columns[n][1:100].to_pylist() for n in features), strict=True)
            alone = len(cells) >= MIN_NAMES and not any(are_rising([*row]) for row in rows)
            if counted and (any(fractions) or (alone and self.rows > MIN_ROWS)):
                return True
            if all(fractions) or (alone and cells[0] == "0"):
                return True
            if counted or alone:
                raise SourceError(
                    f"{self.file}, line {self.line(0)}: {first_few(first)} may be a row, or names "
                    "as pandas writes columns; use --header yes or --header no"
                )
        words = [cell for cell in cells if parse_number(cell) is None]
        numbers = [cell for cell in cells if resembles_number(cell)]
        if words and numbers:
            raise SourceError(
                f"{self.file}, line {self.line(0)} has {words[0]!r}, as in a header, and "
                f"{numbers[0]!r}, as in a row; choose with --header yes or --header no"
            )
        return bool(words)

    def lines_above(self) -> list[str]:
        """Says which first line of numbers is no row."""
        said, names = [], self.names or []
        if sum(whole_number(name) is not None for name in names) > 1:
            said.append(
                f"{self.file}: the first line, {', '.join(names[:4])}, ..., is taken for names of "
                "columns (--header no: for a row)"
            )
        return said

    def is_key(self, column: int) -> bool:
        """Returns whether a column tells the rows apart, and says nothing else of them.

        Its cells differ, and are whole numbers that have a key's name, or none as pandas and R
        write them, or are the first of their lines and so dense that they differ by no accident;
        or they are texts with such a name. Fractions are none, and neither are named numbers
        that do not count the rows.
        """
        named = self.names is not None and names_keys(self.names[column])
        if not named and (column or self.rows < MIN_ROWS or self.width < 3):
            return False
        cells = self.cells(column)
        if not 1 < len(set(cells)) == len(cells) or any(map(is_missing, cells)):
            return False
        numbers = [n for n in map(parse_number, cells) if n is not None and n.is_integer()]
        if len(numbers) < len(cells):
            return named and not any(map(resembles_number, cells))
        if named or self.names is not None:
            return named or sorted(numbers) == [*range(self.rows)]
        return self.rows**2 > 20 * (max(numbers) - min(numbers) + 1)

    def is_paths(self, column: int) -> bool:
        """Returns whether a column has the paths of pictures."""
        first = self.columns[column][0].as_py()
        if not is_missing(first) and not first.lower().endswith(ENDINGS):
            return False
        present = self.present(column)
        return bool(present) and all(cell.lower().endswith(ENDINGS) for cell in present)

    def is_sentences(self, column: int) -> bool:
        """Returns whether a column has texts: sentences, few of them twice."""
        first = self.columns[column][:MIN_ROWS].to_pylist()
        if sum(len(cell.split()) for cell in first) < SENTENCE_WORDS * len(first) / 2:
            return False
        cells = self.present(column)
        words = sum(len(cell.split()) for cell in cells)
        return words >= SENTENCE_WORDS * max(1, len(cells)) and not self.is_category(column, 1)

    def is_category(self, column: int, least: int = MIN_ROWS) -> bool:
        """Returns whether a column has few values: half as many as rows, where there are some."""
        distinct = len(set(self.present(column)))
        return distinct <= MAX_CATEGORIES and (self.rows < least or 2 * distinct <= self.rows)

    def numbers(self, column: int) -> NDArray[np.float64] | None:
        """Returns a column of numbers, NaN where one is missing; None where a cell is neither.

        Raises SourceError where a comma may be of decimals or of thousands.
        """
        cells, comma = self.columns[column], self.dialect.comma
        where = f"{self.file}, column {self.shown(column)}"
        values = None if comma == "asked" else parse_column(cells, ".")
        if values is None and comma:
            values = parse_column(cells, ",")
            texts = [c for c in self.cells(column) if "," in c] if values is not None else []
            if texts and comma == "likely":
                if all(THOUSANDS.fullmatch(text) for text in texts):
                    raise SourceError(
                        f"{where}: {texts[0]!r} has a decimal comma or one of thousands; use "
                        "--decimal comma, or --decimal point for thousands"
                    )
                self.notes.append(f"{where}: {texts[0]} is read with a decimal comma")
        if values is None and comma != "asked":
            values = self._marked_numbers(column, where)
        if values is None or not (np.abs(values[~np.isnan(values)]) <= FLOAT32_MAX).all():
            return None
        return values

    def _marked_numbers(self, column: int, where: str) -> NDArray[np.float64] | None:
        """Returns numbers that all end with %, or whose commas part thousands, with a note."""
        from pyarrow import compute

        present = self.present(column)
        commas = [cell for cell in present if "," in cell]
        percent = bool(present) and all(cell.endswith("%") for cell in present)
        if not percent and not (commas and all(map(THOUSANDS.fullmatch, commas))):
            return None
        mark, shown = ("%", present[0]) if percent else (",", commas[0])
        plain = compute.utf8_trim_whitespace(
            compute.replace_substring(self.columns[column], mark, "")
        )
        values = parse_column(plain, ".")
        if values is not None:
            self.notes.append(f"{where}: {shown} is read as {shown.replace(mark, '')}")
        return values

    def indicators(self, column: int) -> NDArray[np.float64]:
        """Returns 0 and 1 for each category of a column, in their order, NaN for missing cells."""
        cells = [self.plain(cell) for cell in self.cells(column)]
        missing = np.array([is_missing(cell) for cell in cells])
        present = [cell for cell in cells if not is_missing(cell)]
        names, found = classes_of(present, f"{self.file}, column {self.shown(column)}")
        values = np.full((len(cells), len(names)), np.nan)
        values[~missing] = np.eye(len(names))[found]
        return values

    def odd_row(self, column: int) -> int:
        """Returns the first row of a column whose cell is no number, or else is missing."""
        cells = [self.plain(cell) for cell in self.cells(column)]
        odd = [not is_missing(cell) and not is_float32(cell) for cell in cells]
        return (odd if any(odd) else [is_missing(cell) for cell in cells]).index(True)


class Sheets:
    """The sheets of a table, side by side, and its columns as users name them."""

    def __init__(self, sheets: Sequence[Sheet]) -> None:
        """Takes the sheets in their order."""
        self.sheets = sheets

    def check_rows(self, key: str | None) -> None:
        """Raises a SourceError unless the sheets have as many rows, and the same cells of a key."""
        first, *others = self.sheets
        for sheet in others:
            if len(sheet) != len(first):
                raise SourceError(
                    f"{sheet.file} has {len(sheet):,} rows but {first.file} {len(first):,}; every "
                    "file must have the same rows"
                )
        if key is None:
            return
        keys = {number: self.sheets[number].cells(at) for number, at in self.find(key)}
        for number, sheet in enumerate(self.sheets):
            if number not in keys:
                raise SourceError(
                    f"{sheet.file} has no column {key!r}, the key that every file needs"
                )
            for row, (cell, expected) in enumerate(zip(keys[number], keys[0], strict=True)):
                if cell != expected:
                    raise SourceError(
                        f"{sheet.file}, line {sheet.line(row)}: {key} is {cell!r}, but "
                        f"{expected!r} in that row of {first.file}; sort both files alike"
                    )

    def find_one(self, name: str, option: str) -> Place:
        """Returns the only column of a name or number; SourceError unless there is exactly one."""
        columns = self.find(name)
        if len(columns) == 1:
            return columns[0]
        sheet, *others = self.sheets
        names = f"names {', '.join(sheet.names)}" if sheet.names else "there are no names"
        expected = f"or a number from {-sheet.width} to {sheet.width - 1}"
        if others:
            names = "names " + "; ".join(
                f"{s.view}: {first_few(s.names or [])}" for s in self.sheets
            )
            expected = f"such as VIEW:{name}"
        raise SourceError(
            f"{', '.join(s.file for s in self.sheets)}: {len(columns) or 'no'} "
            f"column{'s are' if columns else ' is'} named {name!r}; {names}; use a name that one "
            f"column has, {expected}; see {option} and --header"
        )

    def find(self, name: str) -> list[Place]:
        """Returns the columns of a name or number; with several files a number needs its VIEW:."""
        titles = [name.removeprefix(f"{sheet.view}:") for sheet in self.sheets]
        named = list(zip(titles, self.sheets, strict=True))
        if not any(title in sheet.titles for title, sheet in named):
            titles = [without_case(title, sheet.titles) for title, sheet in named]
        columns = []
        for number, (title, sheet) in enumerate(zip(titles, self.sheets, strict=True)):
            columns += [(number, i) for i, other in enumerate(sheet.titles) if other == title]
            index, numbers_allowed = whole_number(title), title != name or len(self.sheets) == 1
            if title not in sheet.titles and index is not None and numbers_allowed:
                columns += [(number, index % sheet.width)] * (-sheet.width <= index < sheet.width)
        return columns

    def typed(self, place: Place) -> str:
        """Returns what one types to name a column: its name, or its number."""
        sheet = self.sheets[place[0]]
        view = f"{sheet.view}:" * (len(self.sheets) > 1)
        title = f"{view}{sheet.title(place[1])}"
        fits = title and not title.startswith("-") and self.find(title) == [place]
        return shlex.quote(title if fits else f"{view}{place[1]}")


def is_float32(cell: str) -> bool:
    """Returns whether a cell is a finite number that float32 holds."""
    value = parse_number(cell)
    return value is not None and abs(value) <= FLOAT32_MAX


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


def blanked(column: Any, cells: Sequence[str]) -> Any:
    """Returns a column whose cells of these values are empty."""
    import pyarrow as pa
    from pyarrow import compute

    return compute.if_else(compute.is_in(column, pa.array(cells)), "", column) if cells else column
