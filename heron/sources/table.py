"""Tables, such as CSV files: each file is a view, and some columns are the labels."""

import shlex
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BeforeValidator, Field, field_validator

from heron.base.dotted import without_case
from heron.base.errors import SourceError
from heron.shards.manifest import Labels
from heron.sources.base import SINGLE_SPLIT, Loaded
from heron.sources.features import Columns, ColumnViews, as_list, read_features
from heron.sources.labels import LABEL_NAMES, encode_columns
from heron.sources.leaks import KEEP, LEAKS, find_leaks, is_kept
from heron.sources.sheet import Place, Sheet, Sheets, blanked
from heron.sources.text import (
    SEPARATORS,
    dialect_of,
    is_missing,
    read_columns,
    resembles_number,
    whole_number,
)
from heron.sources.zips import stem_of

NONE = "none"  # no column: the rows have no labels


def _check(value: str) -> str:
    if "\0" in value or not Path(_path_of(value)).is_file():
        raise ValueError("must be FILE or NAME=FILE, a file that exists")
    return value


def _path_of(value: str) -> str:
    return value if "=" not in value or Path(value).is_file() else value.partition("=")[2]


class Table(ColumnViews):
    """Tables, such as UCI's: CSV files of numbers and categories, some columns of which are labels.

    Each of several files is a view, with the same rows in the same order. A column is given by its
    name or its number (0 is the first, -1 the last), as VIEW:COLUMN where two files have it. The
    classes of one label column are its distinct values, sorted as numbers if all are, else as
    texts; several label columns are 0 and 1 each (multi_label), or levels. A file of labels alone
    is no view. A column of sentences, or of the paths of pictures, is a view of its own. Columns
    that only tell rows apart are left out. Blank lines are skipped; all rows are one split, `all`.
    """

    name: ClassVar[str] = "table"
    left_out: ClassVar[tuple[str, ...]] = (
        *("keep", "encoding", "decimal", "text", "image", "folder", "na", "on_error"),
    )
    leaves_out: ClassVar[str] = "--ignore"
    examples: ClassVar[str] = (
        "heron shards build table --csv yeast.csv --out data/yeast\n"
        "  heron shards build table --csv audio.csv video=v.tsv y.csv --label kind --out data/mine"
    )

    csv: Annotated[list[Annotated[str, AfterValidator(_check)]], BeforeValidator(as_list)] = Field(
        min_length=1,
        description="the files, as they are or packed by gzip, bzip2, xz or zip; NAME=FILE gives a "
        "view another name than its file",
    )
    separator: Literal["auto", "comma", "tab", "semicolon", "pipe", "space"] = Field(
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
    ignore: Columns = Field(
        None, description="columns that are not used; leaks: all that give a label away"
    )
    keep: list[str] = Field([], description=KEEP)
    key: str | None = Field(
        None, description="a column that all files have, whose cells must be the same in each"
    )
    missing: Literal["error", "mean"] = Field(
        "error",
        description="a cell that is empty, ?, NA, nan or null is an error, or becomes the mean of "
        "the cells that its column has",
    )
    na: Columns = Field(
        None, description="other cells that are missing, such as -999; none: that is a number"
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
        return stem_of(first) if len(self.csv) == 1 else first.resolve().parent.name

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
        self.named.check_rows(self.key)
        skipped, notes = self.skipped, list[str]()  # raises what is wrong with lines and pictures
        rows, labels, targets = len(self.named.sheets[0]), Labels(kind="none", names=[]), None
        views, columns = self.pictures_and_texts(), dict[str, list[str]]()
        left = self.candidates - {*self.images.values(), *self.texts.values(), *self._row_keys}
        values = read_features(
            self.named,
            {place: self._is_category(place) for place in sorted(left)},
            self.missing == "mean",
            self.na,
            {"--categories": self.categories or [], "--ignore": self.ignore or []},
        )
        for number, sheet in enumerate(self.named.sheets):
            features = [place for place in values if place[0] == number]
            if features and sheet.view in views:
                raise SourceError(f"{sheet.file}: a second view {sheet.view!r}; use NAME=FILE")
            if features:
                views[sheet.view] = np.hstack([values[place] for place in features])
                columns[sheet.view] = [
                    sheet.title(place[1]) for place in features for _ in values[place].T
                ]
            elif not any(n == number for n, _ in {*self._label_columns, *self.view_columns}):
                raise SourceError(f"{sheet.file}: no column is left for a feature or a label")
        if not views:
            raise SourceError(
                f"{self.named.sheets[0].file}: no column is left for a feature beside the labels; "
                f"{'; '.join(self._notes)}"
            )
        if self._label_columns:
            labels, targets = self._labels()
        targets = np.full(rows, -1) if targets is None else targets
        known = views, targets, labels, columns, self.keep
        for view, column in reversed(find_leaks(*known) if LEAKS in (self.ignore or ()) else {}):
            views[view] = np.delete(views[view], column, 1)
            notes.append(f"{view}:{columns[view].pop(column)} gives a label away: left out")
        bad = [n for v in self.images for n, cell in enumerate(self.cells[v]) if cell in skipped]
        kept = np.setdiff1d(np.arange(rows), bad) if bad else range(rows)
        if not len(kept):
            raise SourceError(f"{self.dataset}: no row has a picture; {self.remedy}")
        return Loaded(
            views=views,
            targets=targets,
            labels=labels,
            splits={SINGLE_SPLIT: kept},
            keys=None if self.block_rows else [f"{SINGLE_SPLIT}-{n:08d}" for n in range(rows)],
            warning="; ".join([*self._notes, *notes]),
            columns=columns,
        )

    @cached_property
    def candidates(self) -> set[Place]:
        """The columns that are neither labels nor a key, nor left out by name."""
        names = [n for n in (*(self.ignore or ()), self.key) if n not in (None, LEAKS)]
        taken = {
            *self._label_columns,
            *(place for name in names for place in self.named.find(name)),
        }
        sheets = enumerate(self.named.sheets)
        return {(n, column) for n, sheet in sheets for column in range(sheet.width)} - taken

    @cached_property
    def _row_keys(self) -> set[Place]:
        """The columns that tell the rows apart, and are no features."""
        asked = {*self.asked_categories, *self.view_columns}
        return {
            (number, column)
            for number, column in self.candidates - asked
            if (sheet := self.named.sheets[number]).is_key(column)
            and not is_kept(sheet.view, sheet.title(column), self.keep)
        }

    @property
    def _notes(self) -> list[str]:
        """What was taken for something else than a feature or a row."""
        notes = []
        for number, sheet in enumerate(self.named.sheets):
            if self.encoding == "auto" and sheet.dialect.encoding == "utf-16":
                notes.append(f"{sheet.file}: read as UTF-16")
            if self.header == "auto":
                notes += sheet.lines_above()
            if skipped := sheet.dialect.skipped:
                notes.append(f"{sheet.file}: {skipped} first lines are comments")
            for column in sorted(c for n, c in self._row_keys if n == number):
                keep = shlex.quote(f"{sheet.view}:{sheet.title(column)}")
                notes.append(
                    f"{sheet.file}: column {sheet.shown(column)} only tells the rows apart: left "
                    f"out (--keep {keep})"
                )
            notes += sheet.notes
        for view, place in (self.images | self.texts).items():
            kind, typed = "pictures" if view in self.images else "texts", self.named.typed(place)
            notes.append(f"column {typed} is a view of {kind}, {view!r} (--ignore {typed})")
        return notes

    @cached_property
    def named(self) -> Sheets:
        """The sheets."""
        sheets = []
        alone = len(self.csv) == 1 and self.label != [NONE]
        for value, path in zip(self.csv, self.files, strict=True):
            view = value.partition("=")[0] if _path_of(value) != value else stem_of(path)
            if len(self.csv) == 1 and _path_of(value) == value:
                view = "features"
            encoding = None if self.encoding == "auto" else self.encoding.replace("-8", "-8-sig")
            dialect = dialect_of(path, SEPARATORS.get(self.separator), encoding, self.decimal)
            faults = dict[int, str]()
            columns = read_columns(path, dialect, alone, faults)
            if faults and len(self.csv) > 1:
                line, fault = next(iter(faults.items()))
                raise SourceError(f"{path.name}, line {line}: {fault}; correct it")
            columns = [
                blanked(column, [cell for cell in self.na or () if cell != NONE])
                for column in columns
            ]
            sheet = Sheet(view, path, None, columns, len(columns[0]), dialect, faults)
            if self._has_header(sheet):
                names = [column[0].as_py().removeprefix("#").strip() for column in sheet.columns]
                columns = [column[1:] for column in columns]
                sheet = replace(sheet, names=names, columns=columns, rows=sheet.rows - 1)
            if not len(sheet):
                raise SourceError(f"{path.name} has a header but no rows")
            sheets.append(sheet)
        return Sheets(sheets)

    def _has_header(self, sheet: Sheet) -> bool:
        """Returns whether the first line names the columns; SourceError where it is ambiguous."""
        if self.header != "auto":
            return self.header == "yes"
        first = [sheet.plain(column[0].as_py()) for column in sheet.columns]
        labels = [NONE] if self.label is None and len(self.csv) > 1 else self.label or ["-1"]
        requested = [*labels, *(self.ignore or ()), *(self.categories or ()), self.key or NONE]
        columns = [
            name.removeprefix(f"{sheet.view}:")
            for name in requested
            if name not in (NONE, "all", LEAKS)
        ]
        if any(
            whole_number(name) is None
            and (without_case(name, first) in first or len(self.csv) == 1)
            for name in columns
        ):
            return True  # an option gives a column by its name
        numbers = [i for i in map(whole_number, labels) if i is not None]
        return sheet.has_header({i % len(first) for i in numbers if -len(first) <= i < len(first)})

    @cached_property
    def _label_columns(self) -> list[tuple[int, int]]:
        """The label columns: the number of the file, and that of the column."""
        if self.label == [NONE] and not any(NONE in (s.names or ()) for s in self.named.sheets):
            return []
        if self.label is None and len(self.csv) > 1:
            raise SourceError(
                f"{', '.join(path.name for path in self.files)}: there are several files, and none "
                "is named as having the labels; use --label COLUMN, or --label none"
            )
        places = [self.named.find_one(name, "--label") for name in self.label or ["-1"]]
        sheet, column = self.named.sheets[0], places[0][1]
        if self.label is None and not (sheet.is_category(column) and sheet.width > 1):
            usual = [n for n in sheet.titles[:-1] if n.lower() in LABEL_NAMES]
            distinct = len({*sheet.cells(column)})
            raise SourceError(
                f"{sheet.file}: the last column, {sheet.shown(column)}, has {distinct:,} different "
                f"values in {len(sheet):,} rows, and so no classes; use --label "
                f"{shlex.quote(usual[0]) if usual else NONE}, or --label COLUMN"
            )
        return places

    def _labels(self) -> tuple[Labels, NDArray[Any]]:
        texts, titles = [], []
        for number, column in self._label_columns:
            sheet = self.named.sheets[number]
            for row, text in enumerate(cells := sheet.cells(column)):
                if is_missing(text):
                    raise SourceError(
                        f"{sheet.file}, line {sheet.line(row)}: the class in column {column} is "
                        f"missing ({text!r}); unknown labels are not read: fill it or drop the "
                        "row first"
                    )
            texts.append(cells)
            titles.append(sheet.title(column))
        files = dict.fromkeys(self.named.sheets[number].file for number, _ in self._label_columns)
        return encode_columns(texts, titles, ", ".join(files), self.label_kind)

    @cached_property
    def asked_categories(self) -> list[Place]:
        """The columns that are features of categories by their names."""
        names = [] if self.categories == ["all"] else self.categories or []
        return [self.named.find_one(name, "--categories") for name in names]

    def _is_category(self, place: Place) -> bool:
        """Returns whether a column is one of categories: by its name, or as nothing is a number."""
        if self.categories != ["all"]:
            return place in self.asked_categories
        return not any(map(resembles_number, self.named.sheets[place[0]].present(place[1])))
