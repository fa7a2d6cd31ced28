"""Texts that lie in the members of a tar: UTF-8, or a string of a JSON object."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

from heron.shards.errors import shown
from heron.shards.index import ShardIndex

LONGEST = 2**16  # bytes of a text that are looked at
LARGEST = 2**24  # bytes of a JSON object


def read_text(data: bytes, field: str | None = None) -> str:
    """Returns the text of a member, cut after `LONGEST` bytes.

    Args:
        data: of the member.
        field: of the JSON object that has it; None: the member is the text.

    Raises:
        ValueError: it is not UTF-8, no JSON object, or the field is no string.
    """
    if field is not None:
        try:
            found = json.loads(data) if len(data) <= LARGEST else None
        except (ValueError, RecursionError):
            found = None
        text = found.get(field) if isinstance(found, dict) else None
        if not isinstance(text, str):
            raise ValueError(f"is {shown(data)}; expected JSON with a string called {field!r}")
        return text[:LONGEST]
    try:
        return data[:LONGEST].decode("utf-8-sig", "ignore" if len(data) > LONGEST else "strict")
    except UnicodeDecodeError:
        raise ValueError(f"is {shown(data)}; expected UTF-8") from None


def texts_of(tar: Path, index: ShardIndex, member: str, field: str | None) -> Iterator[str]:
    """Yields the texts of a shard."""
    column = index.column(member)
    file = os.open(tar, os.O_RDONLY)
    try:
        for start, length in zip(index.offsets[:, column], index.lengths[:, column], strict=True):
            if length:  # else the row lacks its text
                yield read_text(os.pread(file, int(length), int(start)), field)
    finally:
        os.close(file)
