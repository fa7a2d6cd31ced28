"""A cache of whole, verified files of remote data sets, shared by all processes of a host."""

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

from heron.base.artefact import FileSum
from heron.base.atomic import cache_folder, is_at
from heron.base.errors import DISK_FULL, ShardError

DEFAULT_LIMIT = 100 * 10**9  # bytes, unless a limit is given or the disk has less room
FREE_SHARE = 0.9  # of the free disk, which the default limit may take
POLL_PAUSES_S = 0.01, 0.25  # first and longest pause between attempts to find room

log = logging.getLogger("heron")


class LocalFile:
    """A local file that is not evicted until it is closed or its process ends.

    Unmap it before closing: a mapping stays readable, but the cache no longer counts its bytes.
    """

    def __init__(self, path: Path, descriptor: int | None = None) -> None:
        """Takes a descriptor that holds the file's lock, or None where nothing evicts it."""
        self.path = path
        self._close = None if descriptor is None else weakref.finalize(self, os.close, descriptor)

    def close(self) -> None:
        """Releases the file; a second call does nothing."""
        if self._close is not None:
            self._close()

    def __enter__(self) -> Self:
        """Returns itself; the file is closed at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the file."""
        self.close()

    def __reduce__(self) -> NoReturn:
        """Raises TypeError, as a lock belongs to its process."""
        raise TypeError(
            "a file that is in use cannot be pickled; ask the store again in the other process"
        )


class ShardCache:
    """A folder of files named by their sha256, of limited total size.

    Files in use have a shared lock; of the others, the least recently used are evicted first. A
    file being fetched counts whole. The folder must be on this host, as locks may fail over NFS.
    """

    def __init__(
        self, folder: Path | str | None = None, limit: int | None = None, patience_s: float = 60.0
    ) -> None:
        """Takes a folder and a limit in bytes; the folder is created with the first file.

        The defaults are $HERON_CACHE or ~/.cache/heron/shards, and 100 GB or 90 % of the disk's
        free bytes, whichever is less. `patience_s` is how long to wait for other processes to close
        files where all are in use.
        """
        self.folder = Path(folder).expanduser().absolute() if folder else cache_folder()
        if limit is None:
            cached_bytes = sum(state.st_size for _, state in self._files())
            limit = min(DEFAULT_LIMIT, int(FREE_SHARE * (self._free_bytes() + cached_bytes)))
        self.limit = limit
        self.patience_s = patience_s

    def _free_bytes(self) -> int:
        existing = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        return shutil.disk_usage(existing).free

    def get(
        self,
        sha256: str,
        size: int,
        fetch: Callable[[BinaryIO], None],
        *,
        of_content: bool = True,
    ) -> LocalFile:
        """Returns the file with a checksum; where it is missing or altered, one process fetches it.

        `fetch` writes it to a stream, and raises where it is not the requested one. Without
        `of_content` the checksum is of its identity, and only the size is compared. Raises
        ShardError where too much is in use or the disk is full.
        """
        path = self.folder / sha256
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            while True:
                if (cached := self._open_cached(path, size, of_content)) is not None:
                    return cached
                if (part := self._create_part(path)) is not None:
                    return self._fetch(path, part, size, fetch)
        except OSError as fault:
            raise self._disk_error(fault, size) from None

    def clear(self, wait: bool = True) -> None:
        """Removes unused files; a finalizer must not `wait`, as its thread may hold the lock."""
        with suppress(OSError), self._locked(wait):
            for path, _ in list(self._files()):
                _evict(path)

    def _open_cached(self, path: Path, size: int, of_content: bool) -> LocalFile | None:
        """Opens and locks the cached file; None where it is missing or damaged."""
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        cached = LocalFile(path, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if not is_at(path, descriptor):  # evicted before it was locked
            cached.close()
            return None
        state = os.fstat(descriptor)
        if FileSum(bytes=size, sha256=path.name).fault(path, of_content):
            with self._locked():
                if is_at(path, descriptor):
                    log.warning("%s is not as it was fetched, so it is fetched again", path)
                    path.unlink()
            cached.close()
            return None
        # Set the access time, which the file system may not maintain. The modification time stays,
        # since it identifies the file as verified.
        os.utime(descriptor, ns=(time.time_ns(), state.st_mtime_ns))
        return cached

    def _create_part(self, path: Path) -> FileIO | None:
        """Creates and locks a .part; if another process has one, waits for it and returns None."""
        part = path.with_suffix(".part")
        with self._locked():  # nothing evicts the file before it is locked
            with suppress(FileNotFoundError, BlockingIOError), FileIO(part) as abandoned:
                fcntl.flock(abandoned, fcntl.LOCK_EX | fcntl.LOCK_NB)
                part.unlink()  # of a killed process, and not to be trusted
            with suppress(FileExistsError):
                if not path.exists():
                    stream = FileIO(part, "x+")
                    fcntl.flock(stream, fcntl.LOCK_EX)
                    return stream
        with suppress(FileNotFoundError), FileIO(part) as other:
            log.info("%s: waiting for another process to fetch it", path)
            fcntl.flock(other, fcntl.LOCK_SH)  # granted once it is renamed or given up
        return None

    def _fetch(
        self, path: Path, stream: FileIO, size: int, fetch: Callable[[BinaryIO], None]
    ) -> LocalFile:
        """Fills a .part and renames it, without ever releasing its lock."""
        part = path.with_suffix(".part")
        with stream:
            try:
                self._reserve(stream, part, size)
                fetch(cast(BinaryIO, stream))
                os.fsync(stream.fileno())
                with self._locked():
                    part.rename(path)
                    fcntl.flock(stream, fcntl.LOCK_SH)
                    return LocalFile(path, os.dup(stream.fileno()))
            except BaseException:
                part.unlink(missing_ok=True)
                raise

    def _reserve(self, stream: FileIO, part: Path, size: int) -> None:
        """Reserves `size` bytes for a .part; waits while all room is in use."""
        if size > self.limit:
            raise ShardError(
                f"cache {self.folder}: a file of {size:,} bytes; the limit is {self.limit:,}; "
                "raise data.cache.bytes"
            )
        pause, longest = POLL_PAUSES_S
        deadline = time.monotonic() + self.patience_s
        while True:
            with self._locked():
                files, used = self._evict_for(size, part)
                if used + size <= self.limit:
                    stream.truncate(size)
                    return
            if time.monotonic() >= deadline:
                raise ShardError(
                    f"cache {self.folder} is full: {used:,} of {self.limit:,} bytes are in use "
                    f"({files} files), {size:,} more are needed; raise data.cache.bytes, or open "
                    "fewer shards at once: lower data.canonical_streams"
                )
            if pause == POLL_PAUSES_S[0]:
                log.info("cache %s is full of files in use; waiting for room", self.folder)
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _evict_for(self, size: int, part: Path) -> tuple[int, int]:
        """Evicts until `size` bytes fit; returns the number and the bytes of the remaining files.

        Parts go first: a part without a lock belongs to a killed process.
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
        """Yields every file that counts: cached files, and parts of files being fetched."""
        with suppress(FileNotFoundError), os.scandir(self.folder) as entries:
            for entry in entries:
                if re.fullmatch(r"[0-9a-f]{64}(\.part)?", entry.name):
                    with suppress(FileNotFoundError):
                        yield Path(entry.path), entry.stat()

    @contextmanager
    def _locked(self, wait: bool = True) -> Iterator[None]:
        """Keeps others from evicting, reserving and renaming; never wait for a file inside."""
        descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            yield
        finally:
            os.close(descriptor)

    def _disk_error(self, fault: OSError, size: int) -> ShardError:
        if fault.errno not in DISK_FULL:
            return ShardError(
                f"cache {self.folder}: {fault}; it must be writable: set data.cache.dir or "
                "HERON_CACHE to another folder"
            )
        return ShardError(
            f"cache {self.folder}: the disk is full ({self._free_bytes():,} bytes are free) "
            f"for a file of {size:,} bytes; free some space, lower data.cache.bytes, or set "
            "HERON_CACHE to a folder on a larger disk"
        )


def _evict(path: Path) -> bool:
    """Removes a file unless it is in use; returns whether it is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if is_at(path, descriptor):
            path.unlink()
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
