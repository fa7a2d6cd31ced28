"""The cache: whole, verified files of remote data sets, shared by all processes of a host."""

import fcntl
import logging
import os
import re
import shutil
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import BinaryIO, NoReturn, Self, cast

from heron.shards.artefact import FileSum, cache_folder
from heron.shards.errors import DISK_FULL, ShardError

MOST = 100 * 10**9  # bytes that a cache holds where nobody says how many
OF_FREE = 0.9  # share of the free disk that it takes at most, then
POLL_S = 0.01, 0.25  # first and longest pause between looks for room

log = logging.getLogger("heron")


class LocalFile:
    """A local file that nobody evicts until it is closed, or its process ends.

    Unmap the file before closing: what is mapped stays readable, but its bytes no longer count.
    """

    def __init__(self, path: Path, descriptor: int | None = None) -> None:
        """Holds a file by a descriptor that has its lock; none where nothing is ever evicted."""
        self.path = path
        self._close = None if descriptor is None else weakref.finalize(self, os.close, descriptor)

    def close(self) -> None:
        """Lets the file go; again does nothing."""
        if self._close is not None:
            self._close()

    def __enter__(self) -> Self:
        """Holds it for a block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Lets it go."""
        self.close()

    def __reduce__(self) -> NoReturn:
        """Refuse: a lock belongs to its process."""
        raise TypeError("a held file cannot be pickled; ask the store again in the other process")


class ShardCache:
    """A folder of files named by their sha256, at most so many bytes of them.

    Files that are used by a process have a shared lock and stay; of the others, the least recently
    used make room. A file that is being fetched counts with its whole size from the beginning.
    The folder must be on a disk of this host, as locks over NFS may not hold.
    """

    def __init__(
        self, folder: Path | str | None = None, limit: int | None = None, patience_s: float = 60.0
    ) -> None:
        """Chooses a folder and a limit in bytes; nothing is made before the first file.

        By default these are $HERON_CACHE or ~/.cache/heron/shards, and 100 GB, or 90 % of the
        disk's free bytes where that is less. Where all files are in use, `patience_s` is how long
        it waits for others to close some.
        """
        self.folder = Path(folder).expanduser().absolute() if folder else cache_folder()
        if limit is None:
            held = sum(state.st_size for _, state in self._files())
            limit = min(MOST, int(OF_FREE * (self._free() + held)))
        self.limit = limit
        self.patience_s = patience_s

    def _free(self) -> int:
        """Returns the free bytes of the disk that the folder is on, or will be."""
        existing = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        return shutil.disk_usage(existing).free

    def get(
        self,
        sha256: str,
        size: int | None,
        fetch: Callable[[BinaryIO], None],
        *,
        of_content: bool = True,
    ) -> LocalFile:
        """Holds the file with a checksum; where it is not there, one process fetches it.

        One that was altered since is fetched again. `fetch` writes the file to a stream, and raises
        where it is not the one asked for. Not `of_content`, the checksum is of what identifies the
        file, and its size alone is compared. ShardError: too much is in use, or the disk is full.
        """
        path = self.folder / sha256
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            while True:
                if (held := self._hold(path, size, of_content)) is not None:
                    return held
                if (part := self._begin(path)) is not None:
                    return self._fetch(path, part, size, fetch)
        except OSError as fault:
            raise self._disk_fault(fault, size) from None

    def clear(self, wait: bool = True) -> None:
        """Removes every file that nobody uses, where there are any and they may be removed.

        A finalizer, which may run while its own thread has the lock, must not `wait` for it.
        """
        with suppress(OSError), self._alone(wait):
            for path, _ in list(self._files()):
                _evict(path)

    def _hold(self, path: Path, size: int | None, of_content: bool) -> LocalFile | None:
        """Locks the cached file; None where there is none that is whole."""
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        held = LocalFile(path, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if not _lies_at(descriptor, path):  # evicted before we had the lock
            held.close()
            return None
        state = os.fstat(descriptor)
        expected = FileSum(bytes=state.st_size if size is None else size, sha256=path.name)
        if expected.fault(path, of_content):
            with self._alone():
                if _lies_at(descriptor, path):
                    log.warning("%s is not as it was fetched; it is fetched again", path)
                    path.unlink()
            held.close()
            return None
        # The time of last use, which a file system may not keep; that of change stays, by which it
        # is known that the file was found whole.
        os.utime(descriptor, ns=(time.time_ns(), state.st_mtime_ns))
        return held

    def _begin(self, path: Path) -> FileIO | None:
        """Makes and locks a .part; None once another process, which had one, is through with it."""
        part = path.with_suffix(".part")
        with self._alone():  # no evictor comes between the file and its lock
            with suppress(FileNotFoundError, BlockingIOError), FileIO(part) as left:
                fcntl.flock(left, fcntl.LOCK_EX | fcntl.LOCK_NB)
                part.unlink()  # of a killed process: to fetch is cheaper than to trust
            with suppress(FileExistsError):
                if not path.exists():
                    stream = FileIO(part, "x+")
                    fcntl.flock(stream, fcntl.LOCK_EX)
                    return stream
        with suppress(FileNotFoundError), FileIO(part) as other:
            log.info("%s: waiting for another process to fetch it", path)
            fcntl.flock(other, fcntl.LOCK_SH)  # granted when it has its name, or is given up
        return None

    def _fetch(
        self, path: Path, stream: FileIO, size: int | None, fetch: Callable[[BinaryIO], None]
    ) -> LocalFile:
        """Fills a .part, and gives it its name with no moment in which it has no lock."""
        part = path.with_suffix(".part")
        with stream:
            try:
                if size is not None:
                    self._reserve(stream, part, size)
                fetch(cast(BinaryIO, _Growing(self, stream, part) if size is None else stream))
                os.fsync(stream.fileno())
                with self._alone():
                    part.rename(path)
                    fcntl.flock(stream, fcntl.LOCK_SH)
                    return LocalFile(path, os.dup(stream.fileno()))
            except BaseException:
                part.unlink(missing_ok=True)
                raise

    def _reserve(self, stream: FileIO, part: Path, size: int) -> None:
        """Makes room for so many bytes, and takes it; waits while all of it is in use."""
        if size > self.limit:
            raise ShardError(
                f"cache {self.folder}: a file of {size:,} bytes; the limit is {self.limit:,}; "
                "raise data.cache.bytes"
            )
        pause, longest = POLL_S
        deadline = time.monotonic() + self.patience_s
        while True:
            with self._alone():
                files, used = self._make_room(size, part)
                if used + size <= self.limit:
                    stream.truncate(size)
                    return
            if time.monotonic() >= deadline:
                raise ShardError(
                    f"cache {self.folder} is full: {used:,} of {self.limit:,} bytes are in use "
                    f"({files} files), {size:,} more are needed; raise data.cache.bytes, or open "
                    "fewer shards at once: lower data.canonical_streams"
                )
            if pause == POLL_S[0]:
                log.info("cache %s is full of files in use; waiting for room", self.folder)
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _make_room(self, size: int, part: Path) -> tuple[int, int]:
        """Evicts until so many bytes fit; returns how many files are left, and their bytes.

        Parts go first: where one has no lock, its process was killed.
        """
        files = [(path, state) for path, state in self._files() if path != part]
        files.sort(key=lambda file: (file[0].suffix != ".part", file[1].st_atime_ns))
        count, used = len(files), sum(state.st_size for _, state in files)
        for path, state in files:
            if used + size <= self.limit:
                break
            if _evict(path):
                log.debug("evicted %s", path.name)
                count, used = count - 1, used - state.st_size
        return count, used

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        """Yields every file that counts: cached ones, and parts of those that are being fetched."""
        with suppress(FileNotFoundError), os.scandir(self.folder) as entries:
            for entry in entries:
                if re.fullmatch(r"[0-9a-f]{64}(\.part)?", entry.name):
                    with suppress(FileNotFoundError):
                        yield Path(entry.path), entry.stat()

    @contextmanager
    def _alone(self, wait: bool = True) -> Iterator[None]:
        """Keeps others from evicting, reserving and naming; wait for no file in here."""
        descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            yield
        finally:
            os.close(descriptor)

    def _disk_fault(self, fault: OSError, size: int | None) -> ShardError:
        if fault.errno not in DISK_FULL:
            return ShardError(
                f"cache {self.folder}: {fault}; expected a folder that can be written; "
                "set data.cache.dir or HERON_CACHE to one"
            )
        needed = "" if size is None else f" for a file of {size:,} bytes"
        return ShardError(
            f"cache {self.folder}: the disk is full ({self._free():,} bytes are free){needed}; "
            "free some space, lower data.cache.bytes, or set HERON_CACHE to a folder on a larger "
            "disk"
        )


class _Growing:
    """A file whose size is not known before it comes: room is made at every write."""

    def __init__(self, cache: ShardCache, stream: FileIO, part: Path) -> None:
        self.cache, self.stream, self.part = cache, stream, part

    def write(self, chunk: bytes) -> int:
        self.cache._reserve(self.stream, self.part, self.stream.tell() + len(chunk))
        return self.stream.write(chunk)

    def seek(self, offset: int) -> int:
        return self.stream.seek(offset)


def _evict(path: Path) -> bool:
    """Removes a file that nobody uses; returns whether it is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _lies_at(descriptor, path):
            path.unlink()
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)


def _lies_at(descriptor: int, path: Path) -> bool:
    """Tells whether an open file still has its name: others may have removed or renamed it."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
