"""Tables, such as CSV files: each file is a view, and some columns are the labels."""

import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BeforeValidator, DirectoryPath, Field, field_validator

from heron.shards.dotted import without_case
from heron.shards.errors import SourceError
from heron.shards.manifest import InputFile, Labels
from heron.shards.sources.base import SINGLE_SPLIT, Column, Loaded, Missing, read_each
from heron.shards.sources.features import read_features
from heron.shards.sources.folder import PictureSource, folder_record
from heron.shards.sources.labels import LABEL_NAMES, encode_columns
from heron.shards.sources.leaks import KEEP, LEAKS, find_leaks, is_kept
from heron.shards.sources.sheet import Place, Sheet, Sheets, blanked
from heron.shards.sources.text import (
    SEPARATORS,
    dialect_of,
    is_missing,
    read_columns,
    resembles_number,
    whole_number,
)
from heron.shards.sources.zips import stem_of

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


class Table(PictureSource):
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
    remedy: ClassVar[str] = "correct it"
    examples: ClassVar[str] = (
        "heron shards build table --csv yeast.csv --out data/yeast\n"
        "  heron shards build table --csv audio.csv video=v.tsv y.csv --label kind --out data/mine"
    )

    csv: Annotated[list[Annotated[str, AfterValidator(_check)]], BeforeValidator(_as_list)] = Field(
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
    text: Columns = Field(
        None, description="columns of texts, each a view (default: those of sentences)"
    )
    image: Columns = Field(
        None, description="columns of paths of pictures, each a view (default: found by their ends)"
    )
    folder: DirectoryPath | None = Field(
        None, description="the folder that these paths lie in (default: that of the table)"
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

    def input_files(self) -> list[InputFile]:
        """Returns a record of each file, and one of the pictures that each column names."""
        records = super().input_files()
        for view, (number, _) in self._images.items():
            good = dict.fromkeys(c for c in self._cells[view] if c not in self.skipped)
            records.append(folder_record(self._top(number), [*good]))
        return records

    @property
    def block_rows(self) -> int | None:  # type: ignore[override]
        """None where rows have pictures or texts: each is a tar sample."""
        return None if self._images or self._texts else 256

    def load(self) -> Loaded:
        """Reads the files; the columns of a view are those not used as label, key or ignored."""
        self._check_rows()
        skipped, notes = self.skipped, list[str]()  # raises what is wrong with lines and pictures
        rows, labels, targets = len(self._sheets[0]), Labels(kind="none", names=[]), None
        views, columns = self._pictures_and_texts(), dict[str, list[str]]()
        left = self._candidates - {*self._images.values(), *self._texts.values(), *self._row_keys}
        values = read_features(
            self._named,
            {place: self._is_category(place) for place in sorted(left)},
            self.missing == "mean",
            self.na,
            {"--categories": self.categories or [], "--ignore": self.ignore or []},
        )
        for number, sheet in enumerate(self._sheets):
            features = [place for place in values if place[0] == number]
            if features and sheet.view in views:
                raise SourceError(f"{sheet.file}: a second view {sheet.view!r}; use NAME=FILE")
            if features:
                views[sheet.view] = np.hstack([values[place] for place in features])
                columns[sheet.view] = [
                    sheet.title(place[1]) for place in features for _ in values[place].T
                ]
            elif not any(n == number for n, _ in {*self._label_columns, *self._view_columns}):
                raise SourceError(f"{sheet.file}: no column is left for a feature or a label")
        if not views:
            raise SourceError(
                f"{self._sheets[0].file}: no column is left for a feature beside the labels; "
                f"{'; '.join(self._notes)}"
            )
        if self._label_columns:
            labels, targets = self._labels()
        targets = np.full(rows, -1) if targets is None else targets
        known = views, targets, labels, columns, self.keep
        for view, column in reversed(find_leaks(*known) if LEAKS in (self.ignore or ()) else {}):
            views[view] = np.delete(views[view], column, 1)
            notes.append(f"{view}:{columns[view].pop(column)} gives a label away: left out")
        bad = [n for v in self._images for n, cell in enumerate(self._cells[v]) if cell in skipped]
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
    def _candidates(self) -> set[Place]:
        """The columns that are neither labels nor a key, nor left out by name."""
        names = [n for n in (*(self.ignore or ()), self.key) if n not in (None, LEAKS)]
        taken = {
            *self._label_columns,
            *(place for name in names for place in self._named.find(name)),
        }
        sheets = enumerate(self._sheets)
        return {(n, column) for n, sheet in sheets for column in range(sheet.width)} - taken

    @cached_property
    def _images(self) -> dict[str, Place]:
        """The column of each view of pictures."""
        return self._views_of(self.image, "--image", Sheet.is_paths)

    @cached_property
    def _texts(self) -> dict[str, Place]:
        """The column of each view of texts."""
        return self._views_of(self.text, "--text", Sheet.is_sentences)

    @property
    def _view_columns(self) -> set[Place]:
        return {*self._images.values(), *self._texts.values()}

    def _views_of(
        self, asked: list[str] | None, option: str, fits: Callable[[Sheet, int], bool]
    ) -> dict[str, Place]:
        columns = sorted(self._candidates - {*self._asked_categories})
        found = [place for place in columns if fits(self._sheets[place[0]], place[1])]
        views = dict[str, Place]()
        for place in found if asked is None else [self._named.find_one(n, option) for n in asked]:
            title = self._sheets[place[0]].title(place[1])
            view = re.sub(r"[^A-Za-z0-9_-]+", "_", title)[:40].strip("_") or f"view{len(views)}"
            if view in views:
                raise SourceError(
                    f"{self._sheets[place[0]].file}: two columns make a view {view!r}; use "
                    f"--ignore {self._named.typed(place)}"
                )
            views[view] = place
        return views

    @cached_property
    def _cells(self) -> dict[str, list[str]]:
        """The cells of each view of pictures or of texts."""
        places = self._images | self._texts
        return {view: self._sheets[n].cells(column) for view, (n, column) in places.items()}

    def _pictures_and_texts(self) -> dict[str, Any]:
        views: dict[str, Any] = {}
        for view, (number, _) in self._images.items():
            paths, found = [self._top(number) / c for c in self._cells[view]], self.checked[0][view]
            shape = len(paths), *found.shape
            views[view] = Column(shape, read_each(partial(_read_picture, paths)), found.member)
        for view in self._texts:
            texts = [None if is_missing(cell) else cell.encode() for cell in self._cells[view]]
            missing: Missing = "allow" if None in texts else None
            views[view] = Column((len(texts), -1), read_each(texts.__getitem__), missing=missing)
        return views

    @property
    def picture_views(self) -> list[str]:
        """The views of pictures."""
        return [*self._images]

    def payloads(self, view: str) -> Iterator[tuple[str, bytes]]:
        """Reads every picture once."""
        top, strays = self._top(self._images[view][0]), self.strays
        for cell in dict.fromkeys(self._cells[view]):
            if cell not in strays:
                yield cell, (top / cell).read_bytes()

    def _top(self, number: int) -> Path:
        return (self.folder or self.files[number].parent).resolve()

    @cached_property
    def strays(self) -> dict[str, str]:
        """The lines of other lengths, and the paths that lead to no picture of the folder."""
        faults = {f"{s.file}, line {n}:": f for s in self._sheets for n, f in s.faults.items()}
        for view, (number, column) in self._images.items():
            top, sheet, cells = self._top(number), self._sheets[number], {*self._cells[view]}
            inside = {c for c in cells if (top / c).resolve().is_relative_to(top)}
            faults |= dict.fromkeys(sorted(cells - inside), f"is outside {top.name} (see --folder)")
            bad = sorted(cell for cell in inside if not (top / cell).is_file())
            if len(bad) == len(cells):
                raise SourceError(
                    f"{sheet.file}, column {sheet.shown(column)}: {bad[0]!r} is no file in "
                    f"{top}, nor is another; name the folder of the pictures with --folder FOLDER"
                )
            faults |= dict.fromkeys(bad, f"is no file in {top.name}")
        return faults

    @cached_property
    def _row_keys(self) -> set[Place]:
        """The columns that tell the rows apart, and are no features."""
        asked = {*self._asked_categories, *self._view_columns}
        return {
            (number, column)
            for number, column in self._candidates - asked
            if (sheet := self._sheets[number]).is_key(column)
            and not is_kept(sheet.view, sheet.title(column), self.keep)
        }

    @property
    def _notes(self) -> list[str]:
        """What was taken for something else than a feature or a row."""
        notes = []
        for number, sheet in enumerate(self._sheets):
            names, encoding = sheet.names or [], sheet.dialect.encoding
            if self.header == "auto" and sum(whole_number(n) is not None for n in names) > 1:
                notes.append(
                    f"{sheet.file}: the first line, {', '.join(names[:4])}, ..., is taken for "
                    "names of columns (--header no: for a row)"
                )
            if self.encoding == "auto" and encoding == "utf-16":
                notes.append(f"{sheet.file}: read as UTF-16")
            if sheet.dialect.skipped:
                notes.append(f"{sheet.file}: {sheet.dialect.skipped} first lines are comments")
            for column in sorted(c for n, c in self._row_keys if n == number):
                keep = shlex.quote(f"{sheet.view}:{sheet.title(column)}")
                notes.append(
                    f"{sheet.file}: column {sheet.shown(column)} only tells the rows apart: left "
                    f"out (--keep {keep})"
                )
            notes += sheet.notes
        for view, place in (self._images | self._texts).items():
            kind, typed = "pictures" if view in self._images else "texts", self._named.typed(place)
            notes.append(f"column {typed} is a view of {kind}, {view!r} (--ignore {typed})")
        return notes

    @cached_property
    def _named(self) -> Sheets:
        return Sheets(self._sheets)

    @cached_property
    def _sheets(self) -> list[Sheet]:
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
            columns = [blanked(column, self.na or ()) for column in columns]
            sheet = Sheet(view, path, None, columns, len(columns[0]), dialect, faults)
            if self._has_header(sheet):
                names = [column[0].as_py().removeprefix("#").strip() for column in sheet.columns]
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
        keys = {number: self._sheets[number].cells(at) for number, at in self._named.find(self.key)}
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
        numbers = [i for i in map(whole_number, labels) if i is not None]
        return sheet.has_header({i % len(first) for i in numbers if -len(first) <= i < len(first)})

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
        places = [self._named.find_one(name, "--label") for name in self.label or ["-1"]]
        sheet, column = self._sheets[0], places[0][1]
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
            sheet = self._sheets[number]
            for row, text in enumerate(cells := sheet.cells(column)):
                if is_missing(text):
                    raise SourceError(
                        f"{sheet.file}, line {sheet.line(row)}: the class in column {column} is "
                        f"missing ({text!r}); unknown labels are not read: fill it or drop the "
                        "row first"
                    )
            texts.append(cells)
            titles.append(sheet.title(column))
        files = dict.fromkeys(self._sheets[number].file for number, _ in self._label_columns)
        return encode_columns(texts, titles, ", ".join(files), self.label_kind)

    @cached_property
    def _asked_categories(self) -> list[Place]:
        names = [] if self.categories == ["all"] else self.categories or []
        return [self._named.find_one(name, "--categories") for name in names]

    def _is_category(self, place: Place) -> bool:
        """Returns whether a column is one of categories: by its name, or as nothing is a number."""
        if self.categories != ["all"]:
            return place in self._asked_categories
        return not any(map(resembles_number, self._sheets[place[0]].present(place[1])))


def _read_picture(paths: list[Path], row: int) -> bytes:
    return paths[row].read_bytes()
