"""Atomic writes: a file appears under its name whole, or not at all."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from heron.shards.errors import DISK_FULL, ShardError


def save_json(path: Path, value: Any) -> None:
    """Writes a JSON file atomically."""
    with atomic_write(path) as stream:
        stream.write(json.dumps(value, indent=1, allow_nan=False).encode() + b"\n")


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Writes a temporary file that is renamed when complete; ShardError where the disk is full."""
    partial = path.with_name(f".{path.name}.part")
    try:
        with partial.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    except BaseException as fault:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(fault, OSError) and fault.errno in DISK_FULL:
            raise ShardError(
                f"{path}: the disk is full; expected room for the whole file; free some space, "
                "and run the same again: what is finished is kept"
            ) from None
        raise


def is_at(path: Path, descriptor: int) -> bool:
    """Returns whether a path still names an open file or folder, which may have been moved."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
