"""Writes that leave no half: a file appears whole or not at all, and earlier work is moved aside.

No command destroys what an earlier one wrote: the file or folder gets a free name beside its own.
One command at a time writes it: see `locked`.
"""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO
from uuid import uuid4

from heron.base.errors import AGAIN, DISK_FULL, DiskFull, HeronError, InUse, ShardError, one_line

IS_CURRENT = "is the current folder or one above it, which cannot be moved aside"
NO_LOCKS = errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS  # of a file system without locks
MAX_NAME = 240  # bytes of a file's name, beside which a lock has a name
POLL_S = 0.1  # between two looks at a lock


def save_json(path: Path, value: Any, several: bool = False) -> None:
    """Writes a JSON file atomically: see `atomic_write`."""
    with atomic_write(path, several) as stream:
        stream.write(json.dumps(value, indent=1, allow_nan=False).encode() + b"\n")


@contextmanager
def atomic_write(path: Path, several: bool = False) -> Iterator[BinaryIO]:
    """Writes a temporary file that is renamed when complete; errors are those of `naming`.

    With `several`, others may be writing the same file, as a worker does whose driver was killed:
    each writes a temporary file of its own, which whoever starts over removes (`.NAME.*.part`).
    """
    own = f".{uuid4().hex}" if several else ""
    path = named(path)
    partial = path.with_name(f".{path.name}{own}.part")
    try:
        with naming(path, partial):
            with partial.open("wb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


@contextmanager
def naming(path: object, written: Path | None = None) -> Iterator[None]:
    """Makes write errors name the file; a full disk is DiskFull, which says what to do.

    `written` is the file itself as far as it is written: whatever goes wrong with it has its name,
    and where numpy says how many values it wrote, but not why, a few more bytes are tried.
    """
    try:
        yield
    except OSError as fault:
        reason = fault
        if type(fault) is OSError and fault.errno is None and written is not None:
            try:
                with written.open("ab") as stream:
                    stream.write(bytes(2**20))
            except OSError as told:
                reason = told
        if reason.errno in DISK_FULL:
            full = f"{fault.filename or path}: the disk is full; free some space, and {AGAIN}"
            raise DiskFull(full) from None
        if reason.errno and not fault.filename and (written or reason.errno == errno.EFBIG):
            raise OSError(reason.errno, reason.strerror, str(path)) from fault
        raise


def cache_folder() -> Path:
    """Returns the folder for what can be fetched or computed again."""
    return Path(os.environ.get("HERON_CACHE") or "~/.cache/heron/shards").expanduser().absolute()


def kept_in_cache(kind: str, where: object) -> Path:
    """Returns the cache folder that keeps the progress of a job on a path or URL: see `Kept`."""
    return cache_folder() / f"{kind}-{hashlib.sha256(os.fsencode(str(where))).hexdigest()[:16]}"


@contextmanager
def locked(out: object, lock: Path | None = None, wait: bool = False) -> Iterator[None]:
    """Holds the lock of a file or folder, so that one command at a time writes it.

    A command takes it before it removes or moves anything. It is a file beside the output, so that
    it stays when that is moved aside; of a URL, or where nothing can be put beside it, it is in the
    cache, and commands on other machines do not see it. It ends with the process, however that
    ends. `lock` is its path, where that is known. Errors of writes name the output: see `naming`.

    Raises InUse, with the name of who has it; or, with `wait`, says so and waits until it is free.
    """
    if lock is None:
        target = Path(str(out)).resolve()
        with suppress(OSError):
            target.parent.mkdir(parents=True, exist_ok=True)
        lock, place = kept_in_cache("lock", target), target.parent
        has_room = 0 < len(os.fsencode(target.name)) < MAX_NAME and place.is_dir()
        if has_room and os.access(place, os.W_OK):
            lock = place / f".{target.name}.lock"
    with suppress(OSError):
        lock.parent.mkdir(parents=True, exist_ok=True)
    announced = False

    def held(owner: str) -> None:
        nonlocal announced
        if not wait:
            raise InUse(
                f"{out} is being written by {owner}; wait until that ends, or choose another name"
            )
        if not announced:
            print(f"{out} is being written by {owner}; waiting until that ends", flush=True)
        announced = True
        time.sleep(POLL_S)

    if not os.access(lock.parent, os.W_OK):
        print(f"{out} cannot be locked; make sure that only one command writes it")
        with naming(out):
            yield
        return
    file = take_lock(lock, f"only one command writes {out}", held)
    try:
        with naming(out):
            yield
    finally:
        lock.unlink(missing_ok=True)
        file.close()


def take_lock(path: Path, alone: str, held: Callable[[str], object]) -> IO[str]:
    """Locks a file, whose text names its owner, until it is closed or the process ends.

    `held` is called with the owner while that has it, again and again, and raises to give up.
    Where the file system has no locks, it prints the condition `alone`, which the user must ensure.
    """
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        file = os.fdopen(descriptor, "r+", errors="replace")
        try:
            while not _try_lock(descriptor, path, alone):
                file.seek(0)
                held(file.read(1000).strip() or "another process")
            if is_at(path, descriptor):
                with suppress(OSError):  # a disk that is full has no room for a name
                    os.ftruncate(descriptor, 0)
                    os.pwrite(
                        descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0
                    )
                return file
        except BaseException:
            file.close()
            raise
        file.close()  # who held it has removed it, or moved its folder aside


def _try_lock(descriptor: int, path: Path, alone: str) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        print(f"{path.parent} cannot be locked ({error}); make sure that {alone}")
    return True


class Kept:
    """What a job that was killed had finished: a folder of files, each with its checksum.

    It belongs to what the job is made from, a JSON tree. The folder of a job made from something
    else is moved aside, which is printed, and one without a whole plan is emptied. Where it cannot
    be written, nothing is kept.
    """

    def __init__(self, folder: Path, made_from: Mapping[str, Any]) -> None:
        """Opens or makes the folder."""
        self.folder, plan = folder, json.dumps(made_from, sort_keys=True).encode()
        found, old = self.get("plan"), None
        self.goes_on = found == plan  # an earlier job's work is used
        with suppress(ValueError, TypeError, RecursionError):
            old = dict(json.loads(found or b""))
        if old is None:
            shutil.rmtree(folder, ignore_errors=True)
        elif not self.goes_on:
            other = ", ".join(f"{k} {old.get(k)}" for k, v in made_from.items() if old.get(k) != v)
            aside = set_aside(folder)
            print(
                one_line(f"what was unfinished, with other settings ({other}), is now in {aside}")
            )
        with suppress(OSError):  # the cache may be read-only
            folder.mkdir(parents=True, exist_ok=True)
            remove_partial_files(folder)
        self.put("plan", plan)

    def put(self, name: str, data: bytes) -> None:
        """Keeps bytes under a name, if the folder can be written."""
        with suppress(OSError, ShardError), atomic_write(self.folder / name) as stream:
            stream.write(hashlib.sha256(data).digest() + data)

    def get(self, name: str) -> bytes | None:
        """Returns what was kept under a name; None if it is missing or damaged."""
        try:
            data = (self.folder / name).read_bytes()
        except OSError:
            return None
        return data[32:] if hashlib.sha256(data[32:]).digest() == data[:32] else None


def remove_partial_files(folder: Path, pattern: str = ".*.part") -> None:
    """Removes the temporary files of processes that were killed while writing to a folder."""
    for path in folder.glob(pattern):
        path.unlink(missing_ok=True)


def is_at(path: Path, descriptor: int) -> bool:
    """Returns whether a path still names an open file or folder, which may have been moved."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def named(path: Path) -> Path:
    """Returns a path that ends with a name, which `.`, `..` and `/` do not: the whole path."""
    return path.resolve() if path.name in ("", "..") else path


def is_taken(path: Path) -> bool:
    """Returns whether a path is a file, or a folder that is not empty."""
    return path.exists() and not (path.is_dir() and not any(path.iterdir()))


def _is_current(path: Path) -> bool:
    """Returns whether a path is the current folder or one above it."""
    try:
        return Path.cwd().is_relative_to(path.resolve())
    except FileNotFoundError:  # the current folder was removed
        return False


def aside_name(path: Path) -> Path:
    """Returns the first free name beside a file or folder: `faces-1`, `faces-1.onnx`."""
    target, number = path.resolve(), 1
    stem, suffix = (target.name, "") if target.is_dir() else (target.stem, target.suffix)
    while (aside := target.with_name(f"{stem}-{number}{suffix}")).exists():
        number += 1
    return aside if path.is_symlink() or path != named(path) else path.with_name(aside.name)


def set_aside(path: Path) -> Path:
    """Renames a file or a whole folder, and returns its new name; an empty folder takes its place.

    Of a link, what it leads to is renamed. Raises OSError where that is refused, as of a folder
    that a disk is mounted on, and ShardError for the current folder, which `.` would still mean.
    """
    if _is_current(path):
        raise ShardError(f"{path} {IS_CURRENT}; choose another folder")
    aside, target = aside_name(path), path.resolve()
    is_folder = target.is_dir()
    target.rename(target.with_name(aside.name))
    if is_folder:
        target.mkdir()
    return aside


def make_parents(out: Path, error: type[HeronError], option: str = "--out") -> None:
    """Makes the folders that a new file or folder is in; raises `error` where one is a file."""
    refuse_file_above(out, error, option)
    out.parent.mkdir(parents=True, exist_ok=True)


def refuse_file_above(out: Path, error: type[HeronError], option: str = "--out") -> None:
    """Raises `error` if a path leads through a file."""
    if files := [path for path in out.absolute().parents if path.is_file()]:
        raise error(f"{files[0]} is a file, not a folder; choose another {option}")


def refuse_taken(
    out: Path, overwrite: bool, error: type[HeronError], option: str = "--out"
) -> None:
    """Raises `error` if a path holds something, unless it may be moved aside.

    Verbs that write a new file or folder, named by an option, call it before the work, and
    `make_room` after it.
    """
    refuse_file_above(out, error, option)
    if not is_taken(out):
        return
    if _is_current(out):
        raise error(f"{out} is not empty and {IS_CURRENT}; choose another {option}")
    if not overwrite:
        raise error(
            f"{out} already exists; choose another {option}, or add --overwrite, which moves it "
            f"to {aside_name(out)}"
        )


@contextmanager
def new_file(out: Path, overwrite: bool, error: type[HeronError]) -> Iterator[BinaryIO]:
    """Gives a stream to write, which becomes the file `out` when all went well: see `make_room`."""
    with locked(out):
        refuse_taken(out, overwrite, error)
        with atomic_write(out) as stream:
            yield stream
            make_room(out, overwrite, error)


@contextmanager
def new_folder(
    out: Path, overwrite: bool, error: type[HeronError], option: str = "--out"
) -> Iterator[Path]:
    """Gives an empty folder to fill, which becomes `out` when all went well: see `make_room`.

    The current folder stays the same one, with what was filled in moved into it.
    """
    refuse_taken(out, overwrite, error, option)
    target = out.resolve()
    partial = target.with_name(f".{target.name}.part")
    with locked(out):
        refuse_taken(out, overwrite, error, option)  # by who has just had the lock
        shutil.rmtree(partial, ignore_errors=True)  # left by one that was killed
        partial.mkdir(parents=True)
        try:
            yield partial
            make_room(out, overwrite, error, option)
            if _is_current(target):
                for path in partial.iterdir():
                    path.replace(target / path.name)
            else:
                partial.replace(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def make_room(out: Path, overwrite: bool, error: type[HeronError], option: str = "--out") -> None:
    """Moves aside what a path holds, and says so; without `overwrite`, raises `error`.

    The folders that it is in are made.
    """
    refuse_taken(out, overwrite, error, option)
    if is_taken(out):
        print(f"what was in {out} is now in {set_aside(out)}", flush=True)
    make_parents(out, error, option)
