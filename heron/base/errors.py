"""Every error that stops a command, and the wording of messages.

Each names the thing, what was found and expected, and the remedy.
"""

import csv
import errno
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

STOPPED = 75  # exit status: stopped by a signal, state saved; run again to continue (EX_TEMPFAIL)
INTERRUPTED = 130  # exit status: ended at once by Ctrl-C, as shells report it
LOST = 76  # exit status: a process is dead, hangs, or cannot be reached
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)  # the second is a user's quota
AGAIN = "run the same command again: what is finished is kept"  # where the disk was full
REBUILD = "build or index it again with --overwrite"
DOWNLOAD_AGAIN = "download it again"
FILL = "fill the row, or drop it first"
RESTORE = f"restore it from a good copy or {REBUILD}"
MAX_QUOTED = 60  # characters of a quoted value
MAX_MESSAGE = 4000  # characters of a whole message
# Characters that end lines, are invisible or cannot be encoded; kept out of names and messages.
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ufeff\ud800-\udfff]")
# What a spreadsheet computes, unless it is a number; `csvField` of the page has the same.
FORMULA = re.compile(r"(?![+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?$)[-=+@\t\r]")


class HeronError(Exception):
    """An error that a user can mend: it says what happened, why, and what to do about it."""

    def __str__(self) -> str:
        """Returns the message on one line, with control characters of quoted data escaped."""
        return one_line(re.sub(r"\n +", " ", super().__str__()))  # our own lists are indented lines


class ShardError(HeronError):
    """A folder of shards is missing, damaged, or not what its manifest says."""


class DiskFull(ShardError):
    """A disk, or a user's share of it, has no room for what is written: see `atomic.naming`."""


class InUse(HeronError):
    """Another command is writing the same file or folder."""


class SourceError(HeronError):
    """A publisher's file, or an option of the source that reads it, is invalid."""


class ConfigError(HeronError):
    """A configuration is invalid or does not fit the data."""


class CheckpointError(HeronError):
    """A checkpoint cannot be loaded."""


class TrainingError(HeronError):
    """A run cannot start or continue."""


class Held(TrainingError):
    """Another run is using the folder of this run."""


class InputError(HeronError):
    """Rows passed to a model do not fit its inputs."""


class RetrievalError(HeronError):
    """Embeddings, an index or a query are invalid."""


class StudyError(HeronError):
    """A study cannot be run or read."""


class Stopped(Exception):
    """A signal asked the run to stop, and a checkpoint holds its state."""


class Lost(Exception):
    """Another process can no longer be reached."""


def one_line(text: str) -> str:
    """Returns a text with control characters escaped as in Python, cut to `MAX_MESSAGE`."""
    text = text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]}…"
    return CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def csv_line(cells: Iterable[object]) -> str:
    """Returns a line of a CSV file, in which no spreadsheet finds a formula.

    A cell that would be one begins with an apostrophe and is in quotes (OWASP, "CSV Injection");
    numbers stay as they are.
    """
    given = map(str, cells)  # an apostrophe before a formula is told from one that was put there
    texts = (f"'{cell}" if FORMULA.match(cell.lstrip("'")) else cell for cell in given)
    quoted = (
        f'"{text.replace(chr(34), chr(34) * 2)}"' if re.search("[\",\r\n]|^'", text) else text
        for text in texts
    )
    return ",".join(quoted)


def csv_of(written: str) -> str:
    """Returns the text of a CSV file, as pandas writes it, with every line by `csv_line`."""
    return "".join(f"{csv_line(cells)}\n" for cells in csv.reader(io.StringIO(written, newline="")))


def format_shape(shape: Iterable[Any]) -> str:
    """Returns a shape in words: `218 × 178`."""
    return " × ".join(map(str, shape)) or "empty"


def short_repr(value: Any) -> str:
    """Returns the repr of a value, cut to `MAX_QUOTED` characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer with more digits than Python prints
        text = f"{type(value).__name__} too large to show"
    return text if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]}…"


def explain(error: Any, name: str) -> str:
    """Returns one of pydantic's errors as a sentence: `optim.lr must be at least 0, got -1`."""
    name, message = name or "it", error["msg"].removeprefix("Value error, ")
    if error["type"] == "missing":
        return f"{name} is missing"
    value = error["input"]
    section = isinstance(value, dict) or hasattr(type(value), "model_fields")
    got = "" if section else short_repr(value)  # the section's keys follow, one by one
    got = f"'{value}'" if isinstance(value, Path) else got
    _, should, wanted = message.partition(" should ")
    if should:
        wanted = re.split(" after validation|, unable to ", wanted)[0]
        return f"{name} must {wanted}" + (f", got {got}" if got else "")
    if error["type"] != "value_error":  # a name that ours begins with keeps its case
        message = message[:1].lower() + message[1:]
    message = f"{name}: {message}"
    return message if got in message else f"{message} (got {got})"


def list_faults(faults: Mapping[str, str], most: int = 10) -> str:
    """Returns what is wrong with the first of many things, by name, and how many more there are."""
    listed = "; ".join(f"{name} {fault}" for name, fault in [*faults.items()][:most])
    return listed + (f"; and {len(faults) - most:,} more" if len(faults) > most else "")


def first_few(names: Sequence[str]) -> str:
    """Returns the first eight names, and how many more there are."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
