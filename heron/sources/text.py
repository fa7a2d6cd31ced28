"""Lines, cells and numbers of text files, read by pyarrow where they are plain, else strictly."""

import codecs
import csv
import io
import re
from collections.abc import Iterable, Iterator
from itertools import islice, pairwise, takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple

from heron.base.errors import SourceError, list_faults
from heron.sources.zips import open_unpacked, refuse_other_kinds

NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]+)?|[+-]?(inf|nan)", re.I)

DECIMAL = re.compile(r"[+-]?[0-9]*,[0-9]+(e[+-]?[0-9]+)?", re.I)  # a number with a decimal comma

WORDS = {"train": "train(ing)?", "val": "val(id|idation)?|dev", "test": "test(ing)?"}
# A split and the regular expression of file names that hold its word, with no letter beside it.
SPLIT_PATTERNS = [(split, f"(?i)(.*[^a-z])?({word})([^a-z].*)?") for split, word in WORDS.items()]
MISSING = ("", "?", "nan", "na", "n/a", "#n/a", "<na>", "null")  # in lower case
CHUNK, ROWS_PER_CHUNK = 1 << 20, 1 << 13
MAX_HEAD_LINES = 100  # that tell how a table is written
SEPARATORS = {"comma": ",", "tab": "\t", "semicolon": ";", "pipe": "|", "space": " "}


def split_lines(text: str) -> list[str]:
    r"""Returns the lines of a text, which end with \n or \r\n, without a byte order mark."""
    lines = [line.removesuffix("\r") for line in text.removeprefix("\ufeff").split("\n")]
    return lines if lines[-1] else lines[:-1]


def parse_number(text: str) -> float | None:
    """Returns the number of plain ASCII digits, inf or nan; None for others, as `1_000` and `١`."""
    return float(text) if NUMBER.fullmatch(text) else None


def is_missing(cell: str) -> bool:
    """Returns whether a cell stands for a missing value."""
    return cell.lower() in MISSING


def whole_number(text: str) -> int | None:
    """Returns a whole number of at most 9 digits, such as a column's, or None."""
    return int(text) if re.fullmatch(r"-?[0-9]{1,9}", text) else None


def resembles_number(text: str) -> bool:
    """Returns whether a cell is or resembles a number, as 1_000 does, and so is not in a header."""
    try:
        float(text.replace("_", ""))
    except ValueError:
        return False
    return True


def are_rising(cells: list[str]) -> bool:
    """Returns whether cells are whole numbers, each above the one before."""
    numbers = [whole_number(cell) for cell in cells]
    return all(a is not None and b is not None and a < b for a, b in pairwise(numbers))


def counts_up(cells: list[str]) -> bool:
    """Returns whether cells are 0, 1, 2, ..., as pandas names columns; the first may be empty."""
    numbers = [whole_number(cell) for cell in (cells[1:] if cells[0] == "" else cells)]
    return len(numbers) > 1 and numbers == [*range(len(numbers))]


class Dialect(NamedTuple):
    """How the cells of a file are parted, and its text encoded."""

    separator: str
    encoding: str
    comma: Literal["asked", "likely", ""]  # whether commas begin fractions
    skipped: int = 0  # lines before the first row: comments, or sep=; of Excel


def dialect_of(
    path: Path, separator: str | None, encoding: str | None, decimal: str = "auto"
) -> Dialect:
    """Returns how a table is written; SourceError where that is ambiguous, or it is no table.

    `separator` is one of SEPARATORS; None: the one that splits the first line. An `encoding` of
    None is UTF-8, or UTF-16 by a byte order mark. Lines that begin with # are comments where they
    are not the names of the columns.
    """
    refuse_other_kinds(path)
    with open_unpacked(path) as stream:
        begins_as_utf16 = stream.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    encoding = encoding or ("utf-16" if begins_as_utf16 else "utf-8-sig")
    encoding += "-le" * (encoding == "utf-16" and not begins_as_utf16)
    try:
        with open_unpacked(path) as raw, io.TextIOWrapper(raw, encoding, newline="") as stream:
            head = list(islice(stream, MAX_HEAD_LINES))
        if "\0" in "".join(head):
            raise SourceError(
                f"{path.name} has zero bytes, as no text in {encoding} has; use --encoding utf-16 "
                "if it is, or else the source that reads such files"
            )
        skipped = next((n for n, line in enumerate(head) if not _is_comment(line)), 0)
        marks = [line.strip()[4:] for line in head[:skipped] if line.startswith("sep=")]
        lines = [line for line in head[skipped:] if line.strip()]
        separator = separator or next(iter(marks), None) or _separator(path.name, lines)
        if skipped and lines and not marks:  # names of columns by NumPy, or rows of hashtags
            width = len(_split(lines[0], separator))
            alike = (1 < len(_split(line[1:], separator)) == width for line in head[:skipped][::-1])
            skipped -= len([*takewhile(bool, alike)])
    except (csv.Error, UnicodeError) as fault:
        raise _unreadable(path, fault) from None
    comma: Literal["asked", "likely", ""] = "asked" if decimal == "comma" else ""
    if decimal == "auto" and separator != ",":
        comma = "likely"
    return Dialect(separator, encoding, comma, skipped)


def _is_comment(line: str) -> bool:
    return line.startswith("#") or re.fullmatch(r"sep=[,;|\t]\s*", line) is not None


def _unreadable(path: Path, fault: Exception) -> SourceError:
    reason = "a table must be UTF-8"
    if isinstance(fault, UnicodeError):
        reason += ", or UTF-16 with a byte order mark; use --encoding latin-1 if it is"
    return SourceError(f"cannot read {path.name} ({fault}); {reason}")


def read_lines(path: Path, dialect: Dialect) -> Iterator[tuple[int, list[str]]]:
    """Yields the number and the cells of each line that is not blank, as `csv` splits them."""
    try:
        with (
            open_unpacked(path) as raw,
            io.TextIOWrapper(raw, dialect.encoding, newline="") as stream,
        ):
            lines = (line.rstrip(" \r\n") + "\n" for line in islice(stream, dialect.skipped, None))
            reader = _reader(lines, dialect.separator)
            for cells in reader:
                if len(cells) > 1 or (cells and cells[0].strip()):
                    yield dialect.skipped + reader.line_num, [cell.strip(" \t") for cell in cells]
    except (csv.Error, UnicodeError) as fault:
        raise _unreadable(path, fault) from None


def read_columns(
    path: Path, dialect: Dialect, alone: bool = True, faults: dict[int, str] | None = None
) -> list[Any]:
    """Returns the cells of every line that is not blank, a column of strings each.

    A table that is `alone` has two columns at least; beside others one may be the labels. Lines of
    other lengths than the first are added to `faults`. A last column without a single cell, which
    a separator at the end of each line makes, is left out.
    """
    columns = _read_plain(path, dialect)
    if columns is None:
        columns = _read_quoted(path, dialect, alone, {} if faults is None else faults)
    while len(columns) > 2 and not columns[-1][0].as_py() and not any(columns[-1].to_pylist()):
        columns.pop()
    return columns


def _read_plain(path: Path, dialect: Dialect) -> list[Any] | None:
    """Reads a file as pyarrow does; None where it has quotes, or anything odd."""
    import pyarrow as pa
    from pyarrow import compute, csv

    if dialect.separator == " " or dialect.encoding != "utf-8-sig" or dialect.skipped:
        return None
    spaces, tabs = False, dialect.separator != "\t"
    with open_unpacked(path) as stream:
        head = next(filter(bytes.strip, stream), b"")
        chunk = head
        while chunk:
            if b'"' in chunk:
                return None
            spaces = spaces or b" " in chunk or (tabs and b"\t" in chunk)
            chunk = stream.read(CHUNK)
    width = head.count(dialect.separator.encode()) + 1
    try:
        with open_unpacked(path) as stream:
            found = csv.read_csv(
                stream,
                csv.ReadOptions(column_names=[str(n) for n in range(width)], block_size=CHUNK),
                csv.ParseOptions(delimiter=dialect.separator, quote_char=False),
                csv.ConvertOptions(column_types={str(n): pa.string() for n in range(width)}),
            )
    except pa.ArrowInvalid:  # such as lines of several lengths: the fault is found below
        return None
    if width < 2 or not len(found):
        return None
    return [compute.ascii_trim(x, " \t") if spaces else x for x in found.columns]


def _read_quoted(path: Path, dialect: Dialect, alone: bool, faults: dict[int, str]) -> list[Any]:
    import pyarrow as pa

    chunks, rows, first, width = list[list[Any]](), list[list[str]](), 0, 0

    def flush() -> None:
        chunks.append([pa.array(column, pa.string()) for column in zip(*rows, strict=True)])
        rows.clear()

    for line, cells in read_lines(path, dialect):
        if not width:
            first, width = line, len(cells)
            if width == 1 and (alone or "|" in cells[0]):  # separated by something unknown
                raise SourceError(
                    f"{path.name}, line {line}: 1 column, but there must be two at least, "
                    "separated by commas, tabs, semicolons, pipes or spaces; a single one is read "
                    "with --label none"
                )
        elif (len(rows), len(chunks), len(cells)) == (1, 0, width + 1) and not any(
            map(resembles_number, rows[0])
        ):  # R gives the column of its row names no name; or each line ends with a separator
            rows[0].insert(0 if cells[-1] else width, "")
            width += 1
        if len(cells) == width:
            rows.append(cells)
        else:
            count = f"{len(cells)} column{'s' * (len(cells) > 1)}"
            faults[line] = f"{count}, but there must be {width}, as in line {first}"
        if len(rows) == ROWS_PER_CHUNK:
            flush()
    if not width:
        raise SourceError(f"{path.name} has no rows; write one per line")
    flush()
    chunks = [chunk for chunk in chunks if chunk]
    if len(faults) > sum(len(chunk[0]) for chunk in chunks):
        listed = list_faults({f"line {line}:": fault for line, fault in faults.items()}, 3)
        raise SourceError(
            f"{path.name}, {listed}; remove what is above the table, or see --separator"
        )
    return [pa.chunked_array(parts) for parts in zip(*chunks, strict=True)]


def _reader(lines: Iterable[str], separator: str) -> Any:
    return csv.reader(lines, delimiter=separator, skipinitialspace=True, strict=True)


def _split(line: str, separator: str) -> list[str]:
    try:
        return next(_reader([line], separator), [])
    except csv.Error:  # it is quoted, and parted otherwise
        return []


def _separator(file: str, lines: list[str]) -> str:
    """Returns the separator of the cells of a table; SourceError if two may be."""
    first, *rest = lines or [""]
    counts = {name: len(_split(first, mark)) for name, mark in SEPARATORS.items()}
    candidates = [name for name, count in counts.items() if count > 1 and name != "space"]
    if "comma" in candidates:  # which may be a decimal one
        others = [name for name, count in counts.items() if count > 1 and name != "comma"]
        cells = [c for name in others for line in rest for c in _split(line, SEPARATORS[name])]
        if cells and all(DECIMAL.fullmatch(cell.strip()) for cell in cells if "," in cell):
            candidates.remove("comma")
    if len(candidates) > 1:
        splits = " and ".join(f"by {name}s into {counts[name]}" for name in candidates)
        raise SourceError(f"{file}: its first line can be split {splits} cells; choose --separator")
    return SEPARATORS[candidates[0] if candidates else "comma" if counts["space"] < 2 else "space"]
