"""ARFF files: numeric and nominal attributes, in dense and sparse rows."""

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from heron.base.errors import CONTROL, DOWNLOAD_AGAIN, SourceError, first_few, short_repr
from heron.sources.text import parse_number, split_lines

ATTRIBUTE = re.compile(r"@attribute\s+('[^']*'|\"[^\"]*\"|\S+)\s+(.+)", re.I | re.A)
NUMERIC = ("numeric", "real", "integer")
BINARY = ["0", "1"]  # the values of an attribute that is read as a number, 0 or 1
MAX_VALUES = 1 << 29  # of a file: a sparse row of two bytes has as many features as any other


class ArffFile(NamedTuple):
    """An ARFF file: the possible values of each attribute, and its rows.

    `kinds` has () for numeric attributes. `values` is float64 [rows, attributes]; a nominal value
    is its index in `kinds`, or itself if the possible values are 0 and 1, in either order.
    """

    file: str
    kinds: dict[str, tuple[str, ...]]
    lines: list[int]  # of the rows
    values: NDArray[np.float64]


def read_arff(path: Path) -> ArffFile:
    r"""Reads an ARFF file, dense or sparse; SciPy's reader knows no sparse rows and names no line.

    Raises SourceError where a line is not an attribute or row, a cell is not a value of its
    attribute, or a value is ambiguous. Only \n and \r\n end a line.
    """
    kinds: dict[str, tuple[str, ...]] = {}
    rows: dict[int, NDArray[np.float64]] | None = None  # by line number
    width = 0  # of a row of features and labels
    lines = split_lines(path.read_bytes().decode(errors="surrogateescape"))
    for number, line in enumerate(lines, 1):
        text, where = line.replace("\t", " ").strip(" "), f"{path.name}, line {number}"
        if not text or text.startswith("%"):
            continue
        if match := CONTROL.search(text):
            raise SourceError(
                f"{where}: found {match[0]!r} in {text[max(0, match.start() - 20) :][:40]!r}; "
                "save it again as UTF-8 text whose lines end with \\n or \\r\\n"
            )
        keyword = text.partition(" ")[0].lower()
        if rows is not None:
            if (len(rows) + 1) * width > MAX_VALUES:
                raise SourceError(
                    f"{where}: {width:,} columns of more than {len(rows):,} rows, and the limit "
                    f"is {MAX_VALUES:,} values; split the file"
                )
            rows[number] = _read_row(where, text, kinds)
        elif keyword == "@data":
            rows, width = {}, sum(1 if is_numeric(kind) else len(kind) for kind in kinds.values())
        elif keyword == "@attribute":
            name, kind = _read_attribute(where, text)
            if name in kinds:
                raise SourceError(f"{where}: a second attribute {name!r}; rename one")
            kinds[name] = kind
        elif keyword != "@relation":
            raise SourceError(
                f"{where}: {short_repr(text)} is not @relation, @attribute, @data or a comment; "
                "fix the line"
            )
    if not kinds:
        raise SourceError(f"{path.name} has no @attribute lines, so it is not an ARFF file")
    if not rows:
        raise SourceError(f"{path.name} has no rows after @data")
    return ArffFile(path.name, kinds, list(rows), np.stack(list(rows.values())))


def _read_attribute(where: str, text: str) -> tuple[str, tuple[str, ...]]:
    """Returns the name of an attribute, and its possible values; () if it is numeric."""
    if (match := ATTRIBUTE.fullmatch(text)) is None:
        raise SourceError(f"{where}: not an @attribute NAME TYPE")
    name, kind = match[1].strip("'\""), match[2].strip(" ")
    if kind.lower() in NUMERIC:
        return name, ()
    values = tuple(map(_unquoted, _split(kind[1:-1])))
    if not (kind.startswith("{") and kind.endswith("}")) or not all(values):
        raise SourceError(
            f"{where}: attribute {name!r} must be {', '.join(NUMERIC)}, or {{VALUE,...}}, got "
            f"{short_repr(kind)}; remove it from the file"
        )
    if len(set(values)) < len(values):
        raise SourceError(
            f"{where}: attribute {name!r} is {short_repr(kind)}, with a value twice; fix the line"
        )
    return name, values


def _read_row(where: str, text: str, kinds: dict[str, tuple[str, ...]]) -> NDArray[np.float64]:
    """Returns the values of a row; a sparse one is `{column value, ...}`."""
    names, sparse = list(kinds), text.startswith("{")
    cells = _sparse_cells(where, text, kinds) if sparse else dict(enumerate(_split(text)))
    if not sparse and len(cells) != len(names):
        raise SourceError(f"{where}: {len(cells)} columns for {len(names)} @attribute lines")
    values = np.zeros(len(names))
    for column, cell in cells.items():
        kind, text = kinds[names[column]], cell.strip(" ")
        if is_numeric(kind):
            value, expected = parse_number(_unquoted(text) if kind else text), "a finite number"
        else:
            index = {item: number for number, item in enumerate(kind)}.get(_unquoted(text))
            value, expected = None if index is None else float(index), f"one of {first_few(kind)}"
        if value is None or (kind and not np.isfinite(value)):
            raise SourceError(
                f"{where}, column {names[column]!r} must be {expected}, got {short_repr(text)}; "
                "fill or drop missing values first"
            )
        values[column] = value
    return values


def _sparse_cells(where: str, text: str, kinds: dict[str, tuple[str, ...]]) -> dict[int, str]:
    """Returns a sparse row's cells by column; a missing one is 0, or its type's first value."""
    if not text.endswith("}"):
        raise SourceError(
            f"{where}: a sparse row must end with '}}', got {text[-20:]!r}; {DOWNLOAD_AGAIN}, or "
            "fix the line"
        )
    names, cells = list(kinds), dict[int, str]()
    for cell in _split(text[1:-1]) if text[1:-1].strip(" ") else ():
        number, _, value = cell.strip(" ").partition(" ")
        column = int(number) if re.fullmatch("[0-9]{1,9}", number) else len(names)
        if column >= len(names) or column in cells:
            raise SourceError(
                f"{where}: cell {short_repr(cell.strip(' '))} must be COLUMN VALUE, each column "
                f"once, from 0 to {len(names) - 1}; fix the line"
            )
        cells[column] = value
    for column, (name, kind) in enumerate(kinds.items()):
        if column not in cells and "0" in kind[1:]:  # ambiguous: 0, or the first
            raise SourceError(
                f"{where}: column {name!r} of type {short_repr(type_of(kind))} is omitted, which "
                "means its first value, and that is not 0; write it out in every sparse row"
            )
    return cells


def _split(text: str) -> list[str]:
    """Splits a text at commas outside quotes."""
    if "'" not in text and '"' not in text:
        return text.split(",")
    cells, start, quote = [], 0, ""
    for i, character in enumerate(text):
        if quote and character == quote and text[i - 1] != "\\":
            quote = ""
        elif not quote and character in "'\"" and text[i - 1 : i] in ("", " ", ",", "{"):
            quote = character
        elif not quote and character == ",":
            cells.append(text[start:i])
            start = i + 1
    return [*cells, text[start:]]


def _unquoted(text: str) -> str:
    """Returns a value without its quotes and the backslashes that escape."""
    text = text.strip(" ")
    if len(text) > 1 and text[0] in "'\"" and text[-1] == text[0]:
        return re.sub(r"\\(.)", r"\1", text[1:-1])
    return text


def is_numeric(kind: tuple[str, ...]) -> bool:
    """Returns whether an attribute is stored as a number: it is numeric, or nominal of 0 and 1."""
    return not kind or sorted(kind) == BINARY


def type_of(kind: tuple[str, ...]) -> str:
    """Returns the type of a nominal attribute as the file writes it."""
    return f"{{{','.join(kind)}}}"
