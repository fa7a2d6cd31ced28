"""Tables: files of a row a line, such as CSV; a view each, some of their columns the labels."""

from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BeforeValidator, Field, field_validator

from heron.shards.errors import SourceError, some
from heron.shards.manifest import Labels
from heron.shards.sources.base import WHOLE, FileSource, Loaded
from heron.shards.sources.labels import MinusOne, classes_of, describe
from heron.shards.sources.text import (
    SEPARATORS,
    Sheet,
    is_missing,
    parse_number,
    read_rows,
    resembles_number,
    whole_number,
)

LARGEST = float(np.finfo(np.float32).max)
MOST_CATEGORIES = 1000  # of a column
NONE = "none"  # no column: the rows have no labels


def _table(value: str) -> str:
    if "\0" in value or not Path(_path_of(value)).is_file():
        raise ValueError("expected FILE or NAME=FILE, a file that is there")
    return value


def _path_of(value: str) -> str:
    return value if "=" not in value or Path(value).is_file() else value.partition("=")[2]


def _several(value: Any) -> Any:
    """YAML and Python may give one value alone."""
    return value if isinstance(value, list) or value is None else [str(value)]


Columns = Annotated[list[str] | None, BeforeValidator(_several)]


class Table(FileSource):
    """Tables, such as UCI's: CSV files of numbers and categories, a column or more the labels.

    Several files are a view each, their lines the same rows in the same order. A column goes by its
    name or its number (0 is the first, -1 the last), with VIEW: before it where two files have it.
    The classes of one label column are its distinct values, in the order of numbers where all are
    numbers and of texts where not; several label columns are 0 and 1 each (multi_label), or levels.
    A file of labels alone is no view. Blank lines are no rows; all rows are one split, `all`.
    """

    name: ClassVar[str] = "table"
    examples: ClassVar[str] = (
        "heron shards build table --csv yeast.csv --out data/yeast\n"
        "  heron shards build table --csv audio.csv video=v.tsv y.csv --label kind --out data/mine"
    )

    csv: Annotated[list[Annotated[str, AfterValidator(_table)]], BeforeValidator(_several)] = Field(
        min_length=1, description="the files, NAME=FILE for a view of another name than its file"
    )
    separator: Literal["auto", "comma", "tab", "semicolon", "space"] = Field(
        "auto", description="what parts the cells; auto: the one that parts the first line"
    )
    header: Literal["auto", "yes", "no"] = Field(
        "auto", description="whether the first line names the columns; auto: it holds no numbers"
    )
    label: Columns = Field(
        None,
        description="the columns of the labels, or none (default: the last column of the one file)",
    )
    label_kind: Literal["multi_label", "hierarchical"] = Field(
        "multi_label", description="what several label columns are: 0 and 1 each, or levels"
    )
    categories: Columns = Field(
        None,
        description="columns of categories, each a feature of 0 and 1; all: every column in which "
        "nothing is like a number",
    )
    ignore: Columns = Field(None, description="columns that are left out")
    key: str | None = Field(
        None, description="a column that all files have, whose cells must be the same in each"
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
        """The name of the file, or of the folder of the first of several."""
        first = self.files[0]
        return first.stem if len(self.csv) == 1 else first.resolve().parent.name

    @property
    def files(self) -> list[Path]:
        """The files."""
        return [Path(_path_of(value)) for value in self.csv]

    def options(self) -> dict[str, Any]:
        """Returns the options, files by name alone; one file and one label are no list."""
        named = []
        for value, path in zip(self.csv, self.files, strict=True):
            view = value[: len(value) - len(_path_of(value))]
            named.append(view + path.name)
        given = super().options() | {"csv": named}
        alone = {k: given[k][0] for k in ("csv", "label") if given[k] and len(given[k]) == 1}
        return given | alone

    def load(self) -> Loaded:
        """Reads the files; a view has every column that is no label, key or ignored, in order."""
        self._check_rows()
        labels, taken = self._label_columns, set(self._label_columns)
        taken |= {
            at for name in [*(self.ignore or ()), self.key] if name for at in self._find(name)
        }
        views = {}
        for number, sheet in enumerate(self._sheets):
            left = [at for at in range(sheet.width) if (number, at) not in taken]
            if left and sheet.view in views:
                raise SourceError(
                    f"{sheet.file}: another view {sheet.view!r}; expected each once; say NAME=FILE"
                )
            if left:
                views[sheet.view] = self._features(number, left)
            elif not any(label[0] == number for label in labels):
                raise SourceError(f"{sheet.file}: no column is left; expected a feature or a label")
        if not views:
            raise SourceError(
                f"{self._sheets[0].file}: no column is left; expected a feature beside the labels"
            )
        rows = len(self._sheets[0].rows)
        described, targets = self._labels(labels) if labels else (None, np.full(rows, -1))
        return Loaded(
            views=views,
            targets=targets,
            labels=described or Labels(kind="none", names=[]),
            splits={WHOLE: range(rows)},
        )

    @cached_property
    def _sheets(self) -> list[Sheet]:
        """The files, read."""
        sheets = []
        for value, path in zip(self.csv, self.files, strict=True):
            view = value.partition("=")[0] if _path_of(value) != value else path.stem
            if len(self.csv) == 1 and _path_of(value) == value:
                view = "features"
            rows = read_rows(path, SEPARATORS.get(self.separator))
            names = rows.pop(next(iter(rows))) if self._has_header(path.name, view, rows) else None
            if not rows:
                raise SourceError(f"{path.name}: a header and no rows; expected a line for each")
            sheets.append(Sheet(view, path.name, names, rows))
        return sheets

    def _check_rows(self) -> None:
        """Raises a SourceError where the files are not of the same rows."""
        first, *others = self._sheets
        for sheet in others:
            if len(sheet.rows) != len(first.rows):
                raise SourceError(
                    f"{sheet.file} has {len(sheet.rows):,} rows and {first.file} "
                    f"{len(first.rows):,}; expected the same rows in every file"
                )
        if self.key is None:
            return
        keys = {number: self._sheets[number].cells(at) for number, at in self._find(self.key)}
        for number, sheet in enumerate(self._sheets):
            if number not in keys:
                raise SourceError(f"{sheet.file}: no column {self.key!r}; expected the key in each")
            for line, own, other in zip(sheet.rows, keys[number], keys[0], strict=True):
                if own != other:
                    raise SourceError(
                        f"{sheet.file}, line {line}: {self.key} is {own!r}, and {other!r} in that "
                        f"row of {first.file}; expected the same rows in the same order; sort them"
                    )

    def _has_header(self, file: str, view: str, rows: dict[int, list[str]]) -> bool:
        """Returns whether the first line names the columns; SourceError where it may be a row."""
        if self.header != "auto":
            return self.header == "yes"
        (line, first), *others = rows.items()
        labels = [NONE] if self.label is None and len(self.csv) > 1 else self.label or ["-1"]
        given = [*labels, *(self.ignore or ()), *(self.categories or ()), self.key or NONE]
        places = [name.removeprefix(f"{view}:") for name in given if name not in (NONE, "all")]
        if any(
            whole_number(name) is None and (name in first or len(self.csv) == 1) for name in places
        ):
            return True  # a column has a name, so there are names
        classes = [at for at in map(whole_number, labels) if at is not None]
        classes = [at if -len(first) <= at < len(first) else -1 for at in classes]
        set_aside = {at % len(first) for at in classes}
        cells = [c for n, c in enumerate(first) if n not in set_aside and not is_missing(c)]
        words = [cell for cell in cells if parse_number(cell) is None]
        numbers = [cell for cell in cells if resembles_number(cell)]
        if words and numbers:
            raise SourceError(
                f"{file}, line {line}: found {words[0]!r}, as in a header, and "
                f"{numbers[0]!r}, as in a row; expected names alone or numbers alone; say which it "
                "is with --header yes or --header no"
            )
        return bool(words) or any(
            parse_number(first[at]) is None
            and all(parse_number(row[at]) is not None for _, row in others)
            for at in classes
        )

    @cached_property
    def _label_columns(self) -> list[tuple[int, int]]:
        """The label columns: the number of the file, and of the column."""
        if self.label == [NONE] and not any(NONE in (s.names or ()) for s in self._sheets):
            return []
        if self.label is None and len(self.csv) > 1:
            raise SourceError(
                f"{', '.join(sheet.file for sheet in self._sheets)}: no labels are named; expected "
                "them to be, where there are several files; give --label COLUMN, or --label none"
            )
        return [self._only(name, "--label") for name in self.label or ["-1"]]

    def _only(self, name: str, option: str) -> tuple[int, int]:
        """Returns the one column that a name or a number stands for."""
        found = self._find(name)
        if len(found) == 1:
            return found[0]
        sheet, *others = self._sheets
        known = f"names {', '.join(sheet.names)}" if sheet.names else "there are no names"
        expected = f"or a number from {-sheet.width} to {sheet.width - 1}"
        if others:
            known = "names " + "; ".join(f"{s.view}: {some(s.names or [])}" for s in self._sheets)
            expected = f"such as VIEW:{name}"
        raise SourceError(
            f"{', '.join(s.file for s in self._sheets)}: {len(found) or 'no'} "
            f"column{'s are' if found else ' is'} called {name!r}; {known}; expected a name that "
            f"one column has, {expected}; see {option} and --header"
        )

    def _find(self, name: str) -> list[tuple[int, int]]:
        """Returns the columns that a name or a number stands for; a number in one file alone."""
        found = []
        for number, sheet in enumerate(self._sheets):
            own = name.removeprefix(f"{sheet.view}:")
            found += [(number, at) for at, title in enumerate(sheet.names or ()) if title == own]
            place, by_number = whole_number(own), own != name or len(self.csv) == 1
            if own not in (sheet.names or ()) and place is not None and by_number:
                found += [(number, place % sheet.width)] * (-sheet.width <= place < sheet.width)
        return found

    def _labels(self, columns: list[tuple[int, int]]) -> tuple[Labels, NDArray[Any]]:
        """Returns what the labels are, and those of each row."""
        texts = []
        for number, at in columns:
            sheet = self._sheets[number]
            for line, text in zip(sheet.rows, cells := sheet.cells(at), strict=True):
                if is_missing(text):
                    raise SourceError(
                        f"{sheet.file}, line {line}: the class in column {at} is missing (found "
                        f"{text!r}); expected a class for each row: unknown labels are not read; "
                        "fill it or drop the row first"
                    )
            texts.append(cells)
        files = ", ".join(dict.fromkeys(self._sheets[number].file for number, _ in columns))
        if len(columns) == 1:
            names, targets = classes_of(texts[0], files)
            return Labels(kind="multi_class", names=names), targets
        titles = [self._sheets[number].title(at) for number, at in columns]
        if self.label_kind == "hierarchical":
            return describe(np.array(texts).T, f"{files}: labels {some(titles)}", "hierarchical")
        values = [[parse_number(cell) for cell in cells] for cells in texts]
        for title, cells, numbers in zip(titles, texts, values, strict=True):
            if bad := [c for c, n in zip(cells, numbers, strict=True) if n not in (-1, 0, 1)]:
                raise SourceError(
                    f"{files}: label {title} is {bad[0]!r} in a row; expected 0 or 1 in several "
                    "label columns; say --label-kind hierarchical where they are levels"
                )
        array = np.array(values, float).astype(int).T
        minus: MinusOne | None = "no" if (array == -1).any() else None
        return describe(array, f"{files}: labels", "multi_label", titles, minus)

    @cached_property
    def _category_columns(self) -> set[tuple[int, int]]:
        if self.categories != ["all"]:
            return {self._only(name, "--categories") for name in self.categories or ()}
        return {
            (number, at)
            for number, sheet in enumerate(self._sheets)
            for at in range(sheet.width)
            if not any(resembles_number(c) for c in sheet.cells(at) if not is_missing(c))
        }

    def _features(self, number: int, columns: list[int]) -> NDArray[np.float32]:
        """Returns cells as float32 [rows, features]; missing ones are the mean."""
        sheet = self._sheets[number]
        found = []
        for at in columns:
            values = self._values(sheet, at, (number, at) in self._category_columns)
            gaps = np.isnan(values).all(1)
            if gaps.all():
                raise SourceError(
                    f"{sheet.file}, column {sheet.shown(at)}: every cell is missing, so there is "
                    "no mean; leave the column out with --ignore"
                )
            values[gaps] = values[~gaps].mean(0)
            found.append(values)
        return np.hstack(found).astype(np.float32)

    def _values(self, sheet: Sheet, at: int, category: bool) -> NDArray[np.float64]:
        """Returns a column as numbers [rows, 1], or as 0 and 1 for each of its categories."""
        cells = sheet.cells(at)
        where = f"column {sheet.shown(at)}"
        stated = [cell for cell in cells if category and not is_missing(cell)]
        names = classes_of(stated, f"{sheet.file}, {where}")[0]
        if len(names) > MOST_CATEGORIES:
            raise SourceError(
                f"{sheet.file}, {where}: {len(names):,} categories; expected at most "
                f"{MOST_CATEGORIES:,}; leave the column out with --ignore"
            )
        values = np.zeros((len(cells), len(names) if category else 1))
        places = {name: place for place, name in enumerate(names)}
        for row, (line, cell) in enumerate(zip(sheet.rows, cells, strict=True)):
            missing, fault = is_missing(cell), None
            value = parse_number(cell)
            if missing and self.missing == "error":
                fault = (
                    "the cell is missing; expected a value; fill it first, or take the column's "
                    "mean with --missing mean"
                )
            elif not missing and not category and (value is None or abs(value) > LARGEST):
                fault = (
                    "expected a finite float32; correct it, leave the column out with --ignore, or "
                    "name it in --categories"
                )
            if fault:
                raise SourceError(f"{sheet.file}, line {line}, {where}: found {cell!r}; {fault}")
            if missing:
                values[row] = np.nan
            elif category:
                values[row, places[cell]] = 1
            else:
                values[row] = value
        return values
