"""Scratch files: what is packed in a publisher's file, unpacked once for all worker processes."""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import tempfile
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from shards.errors import DISK_FULL, SourceError

LOCK = "lock"


class Scratch:
    """A folder of files unpacked from one file, shared by all processes that read that file.

    It lies in the system's temporary folder (TMPDIR), under the identity of the file: a changed
    file has another. Each of its users holds a shared lock, which the kernel drops with its
    process; whoever leaves and finds no other removes the folder. One that nobody locks was left
    by a build that was killed, and goes when the next one begins.
    """

    def __init__(self, packed: Path) -> None:
        """Become a user of the scratch folder of a file."""
        self.packed = packed
        parent, ours = Path(tempfile.gettempdir()), f"heron-{os.getuid()}"
        self.folder = parent / f"{ours}-{_identity(packed)}"
        for other in parent.glob(f"{ours}-*"):
            with suppress(OSError):  # others look for leftovers too
                if other != self.folder and _is_ours(other):
                    _leave(other, _open(other))
        weakref.finalize(self, _leave, self.folder, _join(self.folder))

    def file(self, name: str, size: int, fill: Callable[[BinaryIO], None]) -> Path:
        """A file of `size` bytes, which the first process that asks for it fills.

        The others wait. Raises SourceError where the disk is full.
        """
        path = self.folder / name
        if path.exists():
            return path
        part = path.with_name(f"{name}.part")
        lock = os.open(part, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                with part.open("wb") as stream:
                    fill(stream)
                part.replace(path)
        except BaseException as fault:
            os.ftruncate(lock, 0)  # not removed: others may wait for its lock, to try it again
            if isinstance(fault, OSError) and fault.errno in DISK_FULL:
                raise SourceError(
                    f"{self.folder.parent}: the disk is full; {self.packed.name} needs "
                    f"{size:,} bytes there to unpack {path.stem}; free some space, or set "
                    "TMPDIR to a folder that has more"
                ) from None
            raise
        finally:
            os.close(lock)
        return path


def _identity(path: Path) -> str:
    path = path.resolve()
    found = path.stat()
    parts = (path, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _is_ours(folder: Path) -> bool:
    """A temporary folder is everyone's: what others put there, links above all, is not touched."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def _open(folder: Path) -> int:
    return os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)


def _join(folder: Path) -> int:
    """Make the folder where it is missing, and hold its lock."""
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        if not _is_ours(folder):
            raise SourceError(
                f"{folder}: found what another user put there; expected a folder of your own; "
                "set TMPDIR to another folder"
            )
        try:
            lock = _open(folder)
        except FileNotFoundError:  # its last user has just removed it
            continue
        fcntl.flock(lock, fcntl.LOCK_SH)
        if os.fstat(lock).st_nlink:
            return lock
        os.close(lock)  # the same, between the opening and the lock


def _leave(folder: Path, lock: int) -> None:
    """Drop the lock, and remove the folder where nobody else holds it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The lock goes last: who comes before that waits for it, and then makes a new folder.
        for path in sorted(folder.iterdir(), key=lambda path: path.name == LOCK):
            path.unlink()
        folder.rmdir()
    except OSError:
        pass  # locked by another user of the folder, or already gone
    finally:
        os.close(lock)
