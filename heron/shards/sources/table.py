"""Tables, such as CSV files: each file is a view, and some columns are the labels."""

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BeforeValidator, Field, field_validator

from heron.shards.dotted import without_case
from heron.shards.errors import SourceError, first_few
from heron.shards.manifest import Labels
from heron.shards.sources.base import ROUNDED, SINGLE_SPLIT, FileSource, Loaded, holds
from heron.shards.sources.labels import MinusOne, classes_of, encode_labels
from heron.shards.sources.leaks import KEEP
from heron.shards.sources.sheet import (
    SEPARATORS,
    UNNAMED,
    Sheet,
    dialect_of,
    read_columns,
)
from heron.shards.sources.text import (
    counts_up,
    is_missing,
    parse_number,
    resembles_number,
    whole_number,
)

MIN_NUMBERED = 10  # rows from which a first column of numbers in order is an index
NONE = "none"  # no column: the rows have no labels


def _check(value: str) -> str:
    if "\0" in value or not Path(_path_of(value)).is_file():
        raise ValueError("must be FILE or NAME=FILE, a file that exists")
    return value


def _path_of(value: str) -> str:
    return value if "=" not in value or Path(value).is_file() else value.partition("=")[2]


def _as_list(value: Any) -> Any:
    """YAML and Python may give a single value instead of a list."""
    return value if isinstance(value, list) or value is None else [str(value)]


Columns = Annotated[list[str] | None, BeforeValidator(_as_list)]


class Table(FileSource):
    """Tables, such as UCI's: CSV files of numbers and categories, some columns of which are labels.

    Each of several files is a view, with the same rows in the same order. A column is given by its
    name or its number (0 is the first, -1 the last), as VIEW:COLUMN where two files have it. The
    classes of one label column are its distinct values, sorted as numbers if all are, else as
    texts; several label columns are 0 and 1 each (multi_label), or levels. A file of labels alone
    is no view. Blank lines are skipped; all rows are one split, `all`.
    """

    name: ClassVar[str] = "table"
    left_out: ClassVar[tuple[str, ...]] = ("keep", "encoding", "decimal")
    examples: ClassVar[str] = (
        "heron shards build table --csv yeast.csv --out data/yeast\n"
        "  heron shards build table --csv audio.csv video=v.tsv y.csv --label kind --out data/mine"
    )

    csv: Annotated[list[Annotated[str, AfterValidator(_check)]], BeforeValidator(_as_list)] = Field(
        min_length=1, description="the files, NAME=FILE to give a view another name than its file"
    )
    separator: Literal["auto", "comma", "tab", "semicolon", "space"] = Field(
        "auto", description="what separates the cells; auto: whatever separates the first line"
    )
    encoding: Literal["auto", "utf-8", "utf-16", "latin-1", "windows-1252"] = Field(
        "auto", description="of the text; auto: UTF-8, or UTF-16 with a byte order mark"
    )
    decimal: Literal["auto", "point", "comma"] = Field(
        "auto", description="what begins a fraction; auto: a comma unless it separates cells"
    )
    header: Literal["auto", "yes", "no"] = Field(
        "auto",
        description="whether the first line names the columns; auto: it holds no numbers, or 0, 1, "
        "2, ... as pandas writes them",
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
    ignore: Columns = Field(None, description="columns that are not used")
    keep: list[str] = Field([], description=KEEP)
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
        """YAML reads a bare yes or no as a boolean."""
        return {True: "yes", False: "no"}[value] if isinstance(value, bool) else value

    @property
    def dataset(self) -> str:
        """The name of the file, or of the folder of the first file if there are several."""
        first = self.files[0]
        return first.stem if len(self.csv) == 1 else first.resolve().parent.name

    @property
    def files(self) -> list[Path]:
        """The files."""
        return [Path(_path_of(value)) for value in self.csv]

    def options(self) -> dict[str, Any]:
        """Returns the options for the manifest; a single file or label is not a list there."""
        files = []
        for value, path in zip(self.csv, self.files, strict=True):
            view = value[: len(value) - len(_path_of(value))]
            files.append(view + path.name)
        options = super().options() | {"csv": files}
        single = {k: options[k][0] for k in ("csv", "label") if options[k] and len(options[k]) == 1}
        return options | single

    def load(self) -> Loaded:
        """Reads the files; the columns of a view are those not used as label, key or ignored."""
        self._check_rows()
        label_columns, taken = self._label_columns, set(self._label_columns)
        for name in filter(None, [*(self.ignore or ()), self.key]):
            taken.update(self._find(name))
        taken.update(self._row_numbers)
        views, columns = {}, {}
        for number, sheet in enumerate(self._sheets):
            features = [column for column in range(sheet.width) if (number, column) not in taken]
            if features and sheet.view in views:
                raise SourceError(f"{sheet.file}: a second view {sheet.view!r}; use NAME=FILE")
            if features:
                views[sheet.view], columns[sheet.view] = self._features(number, features)
            elif not any(label[0] == number for label in label_columns):
                raise SourceError(f"{sheet.file}: no column is left for a feature or a label")
        if not views:
            raise SourceError(
                f"{self._sheets[0].file}: no column is left for a feature beside the labels"
            )
        rows = len(self._sheets[0])
        unlabelled = Labels(kind="none", names=[]), np.full(rows, -1)
        labels, targets = self._labels(label_columns) if label_columns else unlabelled
        return Loaded(
            views=views,
            targets=targets,
            labels=labels,
            splits={SINGLE_SPLIT: range(rows)},
            warning="; ".join(self._notes),
            columns=columns,
        )

    @cached_property
    def _row_numbers(self) -> set[tuple[int, int]]:
        """The first columns that number the rows, as pandas and R write: from 0, unnamed from 1."""
        taken = {*self._label_columns, *(self._find(self.key) if self.key else ())}
        found = set()
        for number, sheet in enumerate(self._sheets):
            unnamed = sheet.names is not None and sheet.names[0] in UNNAMED
            kept = f"{sheet.view}:{sheet.title(0)}" in self.keep or (number, 0) in taken
            if kept or not (unnamed or (len(sheet) >= MIN_NUMBERED and sheet.width > 2)):
                continue
            first = whole_number(sheet.columns[0][0].as_py())
            if first == 0 or (unnamed and first == 1):
                numbers = [whole_number(cell) for cell in sheet.cells(0)]
                if numbers == [*range(first, first + len(numbers))]:
                    found.add((number, 0))
        return found

    @property
    def _notes(self) -> list[str]:
        """What was taken for something else than a feature or a row."""
        notes = [
            f"{sheet.file}: the first line, {', '.join(sheet.names[:4])}, ..., is taken for names "
            "of columns (--header no: for a row)"
            for sheet in self._sheets
            if self.header == "auto" and sheet.names and counts_up(sheet.names)
        ]
        for sheet in self._sheets:
            if self.encoding == "auto" and sheet.dialect.encoding == "utf-16":
                notes.append(f"{sheet.file}: read as UTF-16")
        for sheet in (self._sheets[number] for number, _ in sorted(self._row_numbers)):
            keep = f"--keep {sheet.view}:{sheet.title(0)}"
            notes.append(f"{sheet.file}: its first column numbers the rows: left out ({keep})")
        return [*notes, *(note for sheet in self._sheets for note in sheet.notes)]

    @cached_property
    def _sheets(self) -> list[Sheet]:
        sheets = []
        for value, path in zip(self.csv, self.files, strict=True):
            view = value.partition("=")[0] if _path_of(value) != value else path.stem
            if len(self.csv) == 1 and _path_of(value) == value:
                view = "features"
            encoding = None if self.encoding == "auto" else self.encoding.replace("-8", "-8-sig")
            dialect = dialect_of(path, SEPARATORS.get(self.separator), encoding, self.decimal)
            columns = read_columns(path, dialect, len(self.csv) == 1)
            sheet = Sheet(view, path, None, columns, len(columns[0]), dialect)
            if self._has_header(sheet):
                names = [column[0].as_py() for column in sheet.columns]
                columns = [column[1:] for column in columns]
                sheet = replace(sheet, names=names, columns=columns, rows=sheet.rows - 1)
            if not len(sheet):
                raise SourceError(f"{path.name} has a header but no rows")
            sheets.append(sheet)
        return sheets

    def _check_rows(self) -> None:
        first, *others = self._sheets
        for sheet in others:
            if len(sheet) != len(first):
                raise SourceError(
                    f"{sheet.file} has {len(sheet):,} rows but {first.file} {len(first):,}; every "
                    "file must have the same rows"
                )
        if self.key is None:
            return
        keys = {number: self._sheets[number].cells(at) for number, at in self._find(self.key)}
        for number, sheet in enumerate(self._sheets):
            if number not in keys:
                raise SourceError(
                    f"{sheet.file} has no column {self.key!r}, the key that every file needs"
                )
            for row, (key, expected) in enumerate(zip(keys[number], keys[0], strict=True)):
                if key != expected:
                    raise SourceError(
                        f"{sheet.file}, line {sheet.line(row)}: {self.key} is {key!r}, but "
                        f"{expected!r} in that row of {first.file}; sort both files alike"
                    )

    def _has_header(self, sheet: Sheet) -> bool:
        """Returns whether the first line names the columns; SourceError where it is ambiguous."""
        if self.header != "auto":
            return self.header == "yes"
        first = [sheet.plain(column[0].as_py()) for column in sheet.columns]
        labels = [NONE] if self.label is None and len(self.csv) > 1 else self.label or ["-1"]
        requested = [*labels, *(self.ignore or ()), *(self.categories or ()), self.key or NONE]
        columns = [
            name.removeprefix(f"{sheet.view}:") for name in requested if name not in (NONE, "all")
        ]
        if any(
            whole_number(name) is None
            and (without_case(name, first) in first or len(self.csv) == 1)
            for name in columns
        ):
            return True  # an option gives a column by its name
        label_columns = [i for i in map(whole_number, labels) if i is not None]
        label_columns = [i if -len(first) <= i < len(first) else -1 for i in label_columns]
        skipped = {i % len(first) for i in label_columns}
        cells = [c for n, c in enumerate(first) if n not in skipped and not is_missing(c)]
        if counts_up(first):
            columns_below = (sheet.cells(n)[1:] for n in range(sheet.width))
            if any(
                column and all(whole_number(cell) is None for cell in column)
                for column in columns_below
            ):
                return True
            raise SourceError(
                f"{sheet.file}, line {sheet.line(0)}: {first_few(first)} may be a row, or names "
                "as pandas writes columns; use --header yes or --header no"
            )
        words = [cell for cell in cells if parse_number(cell) is None]
        numbers = [cell for cell in cells if resembles_number(cell)]
        if words and numbers:
            raise SourceError(
                f"{sheet.file}, line {sheet.line(0)} has {words[0]!r}, as in a header, and "
                f"{numbers[0]!r}, as in a row; choose with --header yes or --header no"
            )
        return bool(words) or any(
            parse_number(first[i]) is None
            and all(parse_number(cell) is not None for cell in sheet.cells(i)[1:])
            for i in label_columns
        )

    @cached_property
    def _label_columns(self) -> list[tuple[int, int]]:
        """The label columns: the number of the file, and that of the column."""
        if self.label == [NONE] and not any(NONE in (s.names or ()) for s in self._sheets):
            return []
        if self.label is None and len(self.csv) > 1:
            raise SourceError(
                f"{', '.join(sheet.file for sheet in self._sheets)}: there are several files, and "
                "none is named as having the labels; use --label COLUMN, or --label none"
            )
        return [self._find_one(name, "--label") for name in self.label or ["-1"]]

    def _find_one(self, name: str, option: str) -> tuple[int, int]:
        """Returns the only column of a name or number; SourceError unless there is exactly one."""
        columns = self._find(name)
        if len(columns) == 1:
            return columns[0]
        sheet, *others = self._sheets
        names = f"names {', '.join(sheet.names)}" if sheet.names else "there are no names"
        expected = f"or a number from {-sheet.width} to {sheet.width - 1}"
        if others:
            names = "names " + "; ".join(
                f"{s.view}: {first_few(s.names or [])}" for s in self._sheets
            )
            expected = f"such as VIEW:{name}"
        raise SourceError(
            f"{', '.join(s.file for s in self._sheets)}: {len(columns) or 'no'} "
            f"column{'s are' if columns else ' is'} named {name!r}; {names}; use a name that one "
            f"column has, {expected}; see {option} and --header"
        )

    def _find(self, name: str) -> list[tuple[int, int]]:
        """Returns the columns of a name or number; with several files a number needs its VIEW:."""
        titles = [name.removeprefix(f"{sheet.view}:") for sheet in self._sheets]
        named = list(zip(titles, self._sheets, strict=True))
        if not any(title in (sheet.names or ()) for title, sheet in named):
            titles = [without_case(title, sheet.names or ()) for title, sheet in named]
        columns = []
        for number, (title, sheet) in enumerate(zip(titles, self._sheets, strict=True)):
            columns += [(number, i) for i, other in enumerate(sheet.names or ()) if other == title]
            index, numbers_allowed = whole_number(title), title != name or len(self.csv) == 1
            if title not in (sheet.names or ()) and index is not None and numbers_allowed:
                columns += [(number, index % sheet.width)] * (-sheet.width <= index < sheet.width)
        return columns

    def _labels(self, columns: list[tuple[int, int]]) -> tuple[Labels, NDArray[Any]]:
        texts = []
        for number, column in columns:
            sheet = self._sheets[number]
            for row, text in enumerate(cells := sheet.cells(column)):
                if is_missing(text):
                    raise SourceError(
                        f"{sheet.file}, line {sheet.line(row)}: the class in column {column} is "
                        f"missing ({text!r}); unknown labels are not read: fill it or drop the "
                        "row first"
                    )
            texts.append(cells)
        files = ", ".join(dict.fromkeys(self._sheets[number].file for number, _ in columns))
        if len(columns) == 1:
            names, targets = classes_of(texts[0], files)
            return Labels(kind="multi_class", names=names), targets
        titles = [self._sheets[number].title(column) for number, column in columns]
        where = f"{files}: labels"
        if self.label_kind == "hierarchical":
            return encode_labels(np.array(texts).T, f"{where} {first_few(titles)}", "hierarchical")
        values = [[parse_number(cell) for cell in cells] for cells in texts]
        for title, cells, numbers in zip(titles, texts, values, strict=True):
            if bad := [c for c, n in zip(cells, numbers, strict=True) if n not in (-1, 0, 1)]:
                raise SourceError(
                    f"{files}: label {title} is {bad[0]!r} in a row; several label columns must "
                    "be 0 or 1; use --label-kind hierarchical if they are levels"
                )
        array = np.array(values, float).astype(int).T
        minus_one: MinusOne | None = "no" if (array == -1).any() else None
        return encode_labels(array, where, "multi_label", titles, minus_one)

    @cached_property
    def _category_columns(self) -> set[tuple[int, int]]:
        if self.categories != ["all"]:
            return {self._find_one(name, "--categories") for name in self.categories or ()}
        return {
            (number, column)
            for number, sheet in enumerate(self._sheets)
            for column in range(sheet.width)
            if not any(resembles_number(c) for c in sheet.cells(column) if not is_missing(c))
        }

    def _features(self, number: int, columns: list[int]) -> tuple[NDArray[np.float32], list[str]]:
        """Returns columns as float32 [rows, features], and the features' names.

        The mean is in place of missing cells.
        """
        sheet = self._sheets[number]
        features, names = [], list[str]()
        for column in columns:
            values = sheet.values(
                column, (number, column) in self._category_columns, self.missing == "mean"
            )
            missing = np.isnan(values).all(1)
            if missing.all():
                raise SourceError(
                    f"{sheet.file}, column {sheet.shown(column)}: every cell is missing, so there "
                    "is no mean; remove the column with --ignore"
                )
            values[missing] = values[~missing].mean(0)
            features.append(values.astype(np.float32))
            if not holds(features[-1], values).all():
                sheet.notes.append(f"{sheet.file}: column {sheet.shown(column)} {ROUNDED}")
            sheet.columns[column] = None  # its strings make room
            names += [sheet.title(column)] * values.shape[1]
        return np.hstack(features), names
