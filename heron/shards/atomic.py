"""Writes that leave no half: a file appears whole or not at all, and earlier work is moved aside.

No command destroys what an earlier one wrote: the file or folder gets a free name beside its own.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

from heron.shards.errors import DISK_FULL, HeronError, ShardError, one_line

IS_CURRENT = "is the current folder or one above it, which cannot be moved aside"


def save_json(path: Path, value: Any, several: bool = False) -> None:
    """Writes a JSON file atomically: see `atomic_write`."""
    with atomic_write(path, several) as stream:
        stream.write(json.dumps(value, indent=1, allow_nan=False).encode() + b"\n")


@contextmanager
def atomic_write(path: Path, several: bool = False) -> Iterator[BinaryIO]:
    """Writes a temporary file that is renamed when complete; ShardError where the disk is full.

    With `several`, others may be writing the same file, as a worker does whose driver was killed:
    each writes a temporary file of its own, which whoever starts over removes (`.NAME.*.part`).
    """
    own = f".{uuid4().hex}" if several else ""
    path = named(path)
    partial = path.with_name(f".{path.name}{own}.part")
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
                f"{path}: the disk is full; free some space, and run the same command again: what "
                "is finished is kept"
            ) from None
        raise


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
    """Removes what processes left that were killed while they wrote files of a folder."""
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
def new_folder(
    out: Path, overwrite: bool, error: type[HeronError], option: str = "--out"
) -> Iterator[Path]:
    """Gives an empty folder to fill, which becomes `out` when all went well: see `make_room`.

    The current folder stays the same one, with what was filled in moved into it.
    """
    refuse_taken(out, overwrite, error, option)
    target = out.resolve()
    partial = target.with_name(f".{target.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
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
