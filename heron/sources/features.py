"""The columns of sheets as views: of features, whose faults are told at once, pictures, texts."""

import re
import shlex
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, DirectoryPath, Field

from heron.base.errors import SourceError
from heron.shards.manifest import InputFile
from heron.sources.base import ROUNDED, Column, Missing, holds, read_each
from heron.sources.folder import PictureSource, folder_record, path_faults, picture_column
from heron.sources.sheet import Place, Sheet, Sheets, is_float32, parse_column
from heron.sources.text import is_missing, parse_number

MAX_SHOWN = 8  # faults that are told one by one
MISSING, EMPTY = "the cell is missing", "every cell is missing, so there is no mean"
NO_NUMBER = "must be a finite float32"
SENTINELS = (-999, -9999, -99999)  # written for a missing number
FIXED = {"--missing": "--missing mean", "--decimal": "--decimal comma"}  # options without columns


def as_list(value: Any) -> Any:
    """YAML and Python may give a single value instead of a list."""
    return value if isinstance(value, list) or value is None else [str(value)]


Columns = Annotated[list[str] | None, BeforeValidator(as_list)]


class ColumnViews(PictureSource):
    """Base class of tables some columns of which are views: paths of pictures, or texts."""

    remedy: ClassVar[str] = "correct it"

    text: Columns = Field(
        None, description="columns of texts, each a view (default: those of sentences)"
    )
    image: Columns = Field(
        None, description="columns of paths of pictures, each a view (default: found by their ends)"
    )
    folder: DirectoryPath | None = Field(
        None, description="the folder that these paths lie in (default: that of the table)"
    )

    @property
    @abstractmethod
    def named(self) -> Sheets:
        """The sheets."""

    @property
    @abstractmethod
    def asked_categories(self) -> list[Place]:
        """The columns that are features of categories by their names."""

    @property
    @abstractmethod
    def candidates(self) -> set[Place]:
        """The columns that are neither labels nor a key, nor left out by name."""

    def input_files(self) -> list[InputFile]:
        """Returns a record of each file, and one of the pictures that each column names."""
        records = super().input_files()
        for view, (number, _) in self.images.items():
            good = dict.fromkeys(c for c in self.cells[view] if c not in self.skipped)
            records.append(folder_record(self._top(number), [*good]))
        return records

    @property
    def block_rows(self) -> int | None:  # type: ignore[override]
        """None where rows have pictures or texts: each is a tar sample."""
        return None if self.images or self.texts else 256

    @cached_property
    def images(self) -> dict[str, Place]:
        """The column of each view of pictures."""
        return self._views_of(self.image, "--image", Sheet.is_paths)

    @cached_property
    def texts(self) -> dict[str, Place]:
        """The column of each view of texts."""
        return self._views_of(self.text, "--text", Sheet.is_sentences)

    @property
    def view_columns(self) -> set[Place]:
        """The columns of all of these."""
        return {*self.images.values(), *self.texts.values()}

    def _views_of(
        self, asked: list[str] | None, option: str, fits: Callable[[Sheet, int], bool]
    ) -> dict[str, Place]:
        columns = sorted(self.candidates - {*self.asked_categories})
        found = [place for place in columns if fits(self.named.sheets[place[0]], place[1])]
        views = dict[str, Place]()
        for place in found if asked is None else [self.named.find_one(n, option) for n in asked]:
            title = self.named.sheets[place[0]].title(place[1])
            view = re.sub(r"[^A-Za-z0-9_-]+", "_", title)[:40].strip("_") or f"view{len(views)}"
            if view in views or (option == "--text" and view in self.images):
                raise SourceError(
                    f"{self.named.sheets[place[0]].file}: two columns make a view {view!r}; use "
                    f"--ignore {self.named.typed(place)}"
                )
            views[view] = place
        return views

    @cached_property
    def cells(self) -> dict[str, list[str]]:
        """The cells of each view of pictures or of texts."""
        places = self.images | self.texts
        return {view: self.named.sheets[n].cells(column) for view, (n, column) in places.items()}

    def pictures_and_texts(self) -> dict[str, Any]:
        """Returns the views that are no vectors."""
        views: dict[str, Any] = {}
        for view, (number, _) in self.images.items():
            top, found = self._top(number), self.checked[0][view]
            views[view] = picture_column(top, self.cells[view], found)
        for view in self.texts:
            texts = [None if is_missing(cell) else cell.encode() for cell in self.cells[view]]
            missing: Missing = "allow" if None in texts else None
            views[view] = Column((len(texts), -1), read_each(texts.__getitem__), missing=missing)
        return views

    @property
    def picture_views(self) -> list[str]:
        """The views of pictures."""
        return [*self.images]

    def payloads(self, view: str) -> Iterator[tuple[str, bytes]]:
        """Reads every picture once."""
        top, strays = self._top(self.images[view][0]), self.strays
        for cell in dict.fromkeys(self.cells[view]):
            if cell not in strays:
                yield cell, (top / cell).read_bytes()

    def _top(self, number: int) -> Path:
        return (self.folder or self.files[number].parent).resolve()

    @cached_property
    def strays(self) -> dict[str, str]:
        """The lines of other lengths, and the paths that lead to no picture of the folder."""
        faults = {f"{s.file}, line {n}:": f for s in self.named.sheets for n, f in s.faults.items()}
        for view, (number, column) in self.images.items():
            sheet, cells = self.named.sheets[number], sorted({*self.cells[view]})
            bad = path_faults(self._top(number), cells)
            if len(bad) == len(cells):
                raise SourceError(
                    f"{sheet.file}, column {sheet.shown(column)}: {cells[0]!r} {bad[cells[0]]}, "
                    "nor is another; name the folder of the pictures with --folder FOLDER"
                )
            faults |= bad
        return faults


def read_features(
    sheets: Sheets,
    categories: Mapping[Place, bool],
    may_miss: bool,
    na: Sequence[str] | None,
    given: Mapping[str, Sequence[str]],
) -> dict[Place, NDArray[np.float32]]:
    """Returns columns as numbers [rows, 1], or as 0 and 1 for each of their categories.

    The mean is in place of missing cells. Columns that are read make room: their strings go.

    Args:
        sheets: what has the columns.
        categories: the columns that are read, and whether each is one of categories.
        may_miss: whether cells may be missing.
        na: the numbers that are missing ones; None: those such as -999 are asked back.
        given: the columns that options name already.

    Raises:
        SourceError: some are no features. It names all of them, and a line of options that helps.
    """
    read, faults = dict[Place, NDArray[np.float32]](), dict[Place, str]()
    mends: dict[str, list[str]] = {}
    absent = [number for number in map(parse_number, na or ()) if number is not None]
    for place, category in categories.items():
        sheet, column = sheets.sheets[place[0]], place[1]
        values = sheet.numbers(column) if not category else None
        if category and sheet.is_category(column):
            values = sheet.indicators(column)
        if values is not None:
            values = values.reshape(len(sheet), -1)
            if absent and not category:  # whose cells were blanked before
                values[np.isin(values, absent)] = np.nan
        fault, options = _fault(sheet, column, values, may_miss, na is None)
        if values is None and category:
            distinct = len({*sheet.present(column)})
            fault = f"{distinct:,} different values in {len(sheet):,} rows are no categories"
            options = ["--ignore"]
        for option in options:
            mends.setdefault(option, []).append(sheets.typed(place))
        if fault:
            faults[place] = fault
        elif values is not None:
            missing = np.isnan(values).all(1)
            if not holds(values.astype(np.float32), values).all():
                sheet.notes.append(f"{sheet.file}: column {sheet.title(column)} {ROUNDED}")
            values[missing] = values[~missing].mean(0)
            read[place] = values.astype(np.float32)
            sheet.columns[column] = None
    if faults:
        told = [_tell(sheets.sheets[n], c, faults[n, c]) for n, c in [*faults][:MAX_SHOWN]]
        more = f"; and {len(faults) - MAX_SHOWN:,} more columns" * (len(faults) > MAX_SHOWN)
        raise SourceError(
            f"{'; '.join(told)}{more}; correct the cells, or use {_line(mends, given)}"
        )
    return read


def _fault(
    sheet: Sheet, column: int, values: NDArray[np.float64] | None, may_miss: bool, ask: bool
) -> tuple[str, list[str]]:
    """Returns what is wrong with the values of a column, and the options that mend it."""
    if values is None:
        return NO_NUMBER, _mends(sheet, column, may_miss)
    missing = np.isnan(values).all(1)
    if missing.all():
        return EMPTY, ["--ignore"]
    low = np.nanmin(values)
    if ask and low in SENTINELS and np.nanmin(values, initial=0, where=values != low) > low / 5:
        return f"{low:g} may stand for a missing number", [f"--na={low:g}", "--missing"]
    return (MISSING, ["--missing"]) if missing.any() and not may_miss else ("", [])


def _mends(sheet: Sheet, column: int, may_miss: bool) -> list[str]:
    """Returns the options that read, or leave out, a column whose cells are not all numbers."""
    present = sheet.present(column)
    missing = ["--missing"] * (not may_miss and len(present) < len(sheet))
    cells = sheet.columns[column]
    if parse_column(cells, ".") is None and parse_column(cells, ",") is not None:
        return ["--decimal", *missing]
    words = sum(not is_float32(sheet.plain(cell)) for cell in present)
    if sheet.is_category(column) and 2 * words > len(present):
        return ["--categories", *missing]
    return ["--ignore"]


def _tell(sheet: Sheet, column: int, fault: str) -> str:
    where, found = sheet.file, ""
    if fault in (MISSING, NO_NUMBER):
        row = sheet.odd_row(column)
        where, found = f"{where}, line {sheet.line(row)}", f" found {sheet.cells(column)[row]!r};"
    return f"{where}, column {sheet.shown(column)}:{found} {fault}"


def _line(mends: Mapping[str, Sequence[str]], given: Mapping[str, Sequence[str]]) -> str:
    """Returns options as they are typed, with the columns that were given before."""
    wrong, words = mends.get("--ignore", ()), list[str]()
    options = dict.fromkeys([*given, *mends]) if wrong else dict.fromkeys(mends)
    for option in options:
        columns = [*map(shlex.quote, given.get(option, ())), *mends.get(option, ())]
        left = [c for c in dict.fromkeys(columns) if option == "--ignore" or c not in wrong]
        if option in FIXED or option.startswith("--na="):
            words.append(FIXED.get(option, option))
        elif left:
            words.append(" ".join([option, *left]))
    return " ".join(words)
