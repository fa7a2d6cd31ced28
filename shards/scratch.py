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


class Scratch:
    """The files unpacked from one file, shared by all processes that read that file.

    They lie in the system's temporary folder (TMPDIR), under the identity of the packed file: a
    changed one has others. Each of its users holds a shared lock on a file, which the kernel drops
    with its process; the last one removes it. A file that nobody locks was left by a build that
    was killed, and goes when the next one begins.
    """

    def __init__(self, packed: Path) -> None:
        """Name the packed file, and remove what killed builds left."""
        self.packed = packed
        self.folder = Path(tempfile.gettempdir()) / f"heron-{os.getuid()}"
        state = packed.stat()
        identity = packed.resolve(), state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns
        self._prefix = hashlib.sha256(repr(identity).encode()).hexdigest()[:16]
        with suppress(FileNotFoundError):  # others look for leftovers too
            self._make_folder()
            for path in self.folder.iterdir():
                _leave(path, os.open(path, os.O_RDWR))

    def file(self, name: str, size: int, fill: Callable[[BinaryIO], None]) -> Path:
        """Returns a file of `size` bytes, which the first process that asks for it fills.

        The others wait. One byte behind the others says that all are there. Raises SourceError
        where the disk is full.
        """
        path = self.folder / f"{self._prefix}-{name}"
        while True:
            try:
                self._make_folder()
                lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            except FileNotFoundError:  # the last user of another file has just removed the folder
                continue
            try:
                with suppress(BlockingIOError):  # another process fills it, or uses it
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    self._fill(path, lock, size, fill)
                fcntl.flock(lock, fcntl.LOCK_SH)
                state = os.fstat(lock)
                if state.st_nlink and state.st_size == size + 1:
                    weakref.finalize(self, _leave, path, os.dup(lock))
                    return path
            finally:
                os.close(lock)

    def _make_folder(self) -> None:
        """A temporary folder is everyone's: what others put there, links above all, is refused."""
        with suppress(FileExistsError):
            self.folder.mkdir(mode=0o700)
        state = self.folder.lstat()
        if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid():
            raise SourceError(
                f"{self.folder}: found what another user put there; expected a folder of your "
                "own; set TMPDIR to another folder"
            )

    def _fill(self, path: Path, lock: int, size: int, fill: Callable[[BinaryIO], None]) -> None:
        if not os.fstat(lock).st_nlink:  # removed between the opening and the lock
            return
        try:
            os.ftruncate(lock, 0)
            with open(os.dup(lock), "r+b") as stream:
                fill(stream)
                stream.seek(size)
                stream.write(b"\1")
        except BaseException as fault:
            path.unlink()
            if isinstance(fault, OSError) and fault.errno in DISK_FULL:
                raise SourceError(
                    f"{self.folder.parent}: the disk is full; {self.packed.name} needs "
                    f"{size:,} bytes there to unpack {path.name.partition('-')[2]}; free some "
                    "space, or set TMPDIR to a folder that has more"
                ) from None
            raise


def _leave(path: Path, lock: int) -> None:
    """Drop the lock, and remove the file and its folder where nobody else holds them."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
        path.parent.rmdir()
    except OSError:
        pass  # used by another process, or gone, or there are other files
    finally:
        os.close(lock)
