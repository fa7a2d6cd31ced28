"""Parses lines and numbers of text files, more strictly than Python does."""

import re

NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]+)?|[+-]?(inf|nan)", re.I)

DECIMAL = re.compile(r"[+-]?[0-9]*,[0-9]+(e[+-]?[0-9]+)?", re.I)  # a number with a decimal comma

WORDS = {"train": "train(ing)?", "val": "val(id|idation)?|dev", "test": "test(ing)?"}
# A split and the regular expression of file names that hold its word, with no letter beside it.
SPLIT_PATTERNS = [(split, f"(?i)(.*[^a-z])?({word})([^a-z].*)?") for split, word in WORDS.items()]
MISSING = ("", "?", "nan")


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


def counts_up(cells: list[str]) -> bool:
    """Returns whether cells are 0, 1, 2, ..., as pandas names columns; the first may be empty."""
    numbers = [whole_number(cell) for cell in (cells[1:] if cells[0] == "" else cells)]
    return len(numbers) > 1 and numbers == [*range(len(numbers))]
