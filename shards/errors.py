"""What goes wrong with data: shards of ours, and files of a publisher."""

import errno
import re
from collections.abc import Iterable, Sequence
from typing import Any

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)  # the second: of one user
REBUILD = "build or index it again with --overwrite"
DOWNLOAD = "download it again"
RESTORE = f"restore it from a good copy or {REBUILD}"
LONGEST = 60  # characters of a text in a message
MESSAGE = 4000  # characters of a whole one
# Characters that end lines, hide, or cannot be written: none stands in a name, or in a message.
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ufeff\ud800-\udfff]")


class HeronError(Exception):
    """What a user can mend: its message names the thing, what was found, expected, the remedy."""

    def __str__(self) -> str:
        """Returns the message on one line, whatever characters are in what it quotes of others."""
        return one_line(re.sub(r"\n +", " ", super().__str__()))  # our own lists are indented


class ShardError(HeronError):
    """A folder of shards is missing, damaged, or not what its manifest says."""


class SourceError(HeronError):
    """A publisher's file, or an option of the source that reads it, is not what it should be."""


def one_line(text: str) -> str:
    """Returns a text in which control characters are written as Python writes them, and cut."""
    text = text if len(text) <= MESSAGE else f"{text[:MESSAGE]}…"
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def times(shape: Iterable[Any]) -> str:
    """Returns a shape in words: `218 × 178`."""
    return " × ".join(map(str, shape)) or "empty"


def shown(value: Any) -> str:
    """Returns a value as Python writes it, cut where it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # of a whole number with more digits than Python writes
        text = f"{type(value).__name__} too large to show"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def some(names: Sequence[str]) -> str:
    """Returns the first few names, and how many more there are."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
