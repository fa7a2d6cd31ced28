"""Text files of a publisher: their lines and numbers, where Python alone would take more."""

import re

NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]+)?|[+-]?(inf|nan)", re.I)

WORDS = {"train": "train(ing)?", "val": "val(id|idation)?|dev", "test": "test(ing)?"}
# Of a split in the name of a file, as a regular expression: a word, with no letter beside it.
BY_WORD = [(split, f"(?i)(.*[^a-z])?({word})([^a-z].*)?") for split, word in WORDS.items()]


def split_lines(text: str) -> list[str]:
    r"""Returns the lines of a text, which end with \n or \r\n; a byte order mark begins none."""
    lines = [line.removesuffix("\r") for line in text.removeprefix("\ufeff").split("\n")]
    return lines if lines[-1] else lines[:-1]


def parse_number(text: str) -> float | None:
    """Returns a number in plain digits, infinite ones too, or None (of `1_000`, or `١`)."""
    return float(text) if NUMBER.fullmatch(text) else None
