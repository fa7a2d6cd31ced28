"""Reads the columns of sheets as features; what is none is refused once, with all that helps."""

import shlex
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from heron.shards.errors import SourceError
from heron.shards.sources.sheet import Place, Sheet, Sheets, is_float32, parse_column
from heron.shards.sources.text import parse_number

MAX_SHOWN = 8  # faults that are told one by one
MISSING, EMPTY = "the cell is missing", "every cell is missing, so there is no mean"
NO_NUMBER = "must be a finite float32"
SENTINELS = (-999, -9999, -99999)  # written for a missing number
FIXED = {"--missing": "--missing mean", "--decimal": "--decimal comma"}  # options without columns


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
    lowest = np.unique(values[~missing])[:2].tolist()
    if ask and lowest[0] in SENTINELS and len(lowest) == 2 and lowest[1] > lowest[0] / 5:
        return f"{lowest[0]:g} may stand for a missing number", [f"--na={lowest[0]:g}", "--missing"]
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
