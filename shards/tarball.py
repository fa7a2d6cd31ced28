"""A tar as others write it: any dialect of headers, and nothing of it lost without a word."""

from __future__ import annotations

import mmap
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from shards.errors import ShardError
from shards.index import BLOCK

Bytes = mmap.mmap | bytes

COMPRESSED = {
    b"\x1f\x8b": "gzip (gunzip)",
    b"BZh": "bzip2 (bunzip2)",
    b"\xfd7zXZ": "xz (unxz)",
    b"\x28\xb5\x2f\xfd": "zstd (unzstd)",
    b"PK\x03\x04": "zip (unzip, and tar)",
}
LINKS = {
    tarfile.LNKTYPE: "a hard link; pack it again with tar --hard-dereference",
    tarfile.SYMTYPE: "a symbolic link; pack it again with tar --dereference",
    tarfile.GNUTYPE_SPARSE: "a sparse file; pack it again without tar --sparse",
}
PAX = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
AGAIN = "get it again from where it came"
ORDER = "pack it again in the order of names (tar --sort=name)"


class Place(NamedTuple):
    """Where the payload of a member lies in its tar, in bytes."""

    offset: int
    length: int


@dataclass(frozen=True)
class Contents:
    """The samples of a tar, each the places of its members by suffix, and files that are of none.

    As in WebDataset, `a/b.left.jpg` is member `left.jpg` of sample `a/b`: a key ends at the first
    dot of the file's name, and suffixes are lower case. A leading `./` is no part of a key.
    `strays` are files without a suffix and those that begin with a dot, such as macOS's `._b.jpg`.
    """

    samples: dict[str, dict[str, Place]] = field(default_factory=dict)
    strays: list[str] = field(default_factory=list)


def contents(tar: Path) -> Contents:
    """Group the files of a tar into samples.

    Raises:
        ShardError: it is no tar, is cut or damaged, a key or a member comes twice, members of a
            sample lie apart, a name leads out of a folder, or a file is a link.
    """
    found = Contents()
    last = None
    for path, place in walk(tar):
        folder, slash, name = path.rpartition("/")
        base, _, suffix = name.partition(".")
        if not base or not suffix:
            found.strays.append(path)
            continue
        key, suffix = folder + slash + base, suffix.lower()
        if key != last and key in found.samples:
            raise ShardError(
                f"{tar.name} sample {key} comes again after {last}: a duplicate key, or its files "
                f"lie apart, and readers would see two halves; {ORDER}"
            )
        members = found.samples.setdefault(key, {})
        if suffix in members:
            raise ShardError(
                f"{tar.name} sample {key}: member {suffix!r} comes twice; expected one; a key "
                "ends at the first dot of a file's name: rename the files, and pack them again"
            )
        members[suffix] = place
        last = key
    return found


def walk(tar: Path) -> Iterator[tuple[str, Place]]:
    """The path and place of every file of a tar: v7, ustar, pax or GNU, with folders or without.

    Raises:
        ShardError: where Python's reader, and so WebDataset's, would end or go on without a word.
    """
    with tar.open("rb") as stream:
        size = tar.stat().st_size
        if not size:
            raise ShardError(f"{tar.name} is empty (0 bytes); expected a tar; {AGAIN}")
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield from _walk(tar, data, size)


def _walk(tar: Path, data: Bytes, size: int) -> Iterator[tuple[str, Place]]:
    at = 0
    long_name: str | None = None  # of a header before, for the file that follows
    long_size: int | None = None
    while True:
        header = data[at : at + BLOCK]
        if header == bytes(BLOCK):
            if long_name is not None or long_size is not None:
                raise _broken(tar, at, "ends between a long name and its file")
            _check_end(tar, data, at, size)
            return
        try:
            info = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        except (tarfile.HeaderError, ValueError) as fault:
            raise _no_header(tar, data, at, size, fault) from None
        start, length = at + BLOCK, info.size if long_size is None else long_size
        if info.type == tarfile.DIRTYPE:
            length = 0  # some writers count what lies in a folder
        if length < 0 or start + length > size:
            left = f"{length:,} bytes, of which {size - start:,} are there"
            raise _broken(tar, at, f"is cut inside {info.name!r} ({left})")
        at = -(-(start + length) // BLOCK) * BLOCK
        payload = Place(start, length)
        if info.type in PAX:
            long_name, long_size = _pax(tar, data, payload, long_name)
        elif info.type == tarfile.XGLTYPE:
            if _pax(tar, data, payload, None) != (None, None):
                raise _broken(tar, start, "has a global header that names files")
        elif info.type == tarfile.GNUTYPE_LONGNAME:
            text = data[start : start + length].partition(b"\0")[0]
            long_name = text.decode("utf-8", "surrogateescape")
        elif info.type != tarfile.GNUTYPE_LONGLINK:
            name = info.name if long_name is None else long_name
            long_name = long_size = None
            if info.isreg() and info.type not in LINKS:
                yield _checked(tar, start - BLOCK, name), payload
            elif info.type != tarfile.DIRTYPE:
                what = LINKS.get(info.type, f"no file (type {info.type!r}); pack it again without")
                raise ShardError(f"{tar.name}: {name!r} is {what}")


def _check_end(tar: Path, data: Bytes, at: int, size: int) -> None:
    """A tar ends with two blocks of zeros; padding to any size may follow, and nothing else."""
    if len(data[at : at + 2 * BLOCK]) < 2 * BLOCK:
        raise _broken(tar, at, "is cut inside its end mark")
    step = 1 << 20
    for first in range(at, size, step):
        if data[first : first + step].strip(b"\0"):
            raise ShardError(
                f"{tar.name} goes on after its end mark (byte {at}): two tars one after the "
                "other? readers would see the first alone; unpack it with tar --ignore-zeros, "
                "and pack it again"
            )


def _no_header(tar: Path, data: Bytes, at: int, size: int, fault: Exception) -> ShardError:
    """What to say of bytes that are no header."""
    if size - at < BLOCK and at:
        what = (
            "is cut inside a header" if size > at else "has no end mark: it is cut, or unfinished"
        )
        return _broken(tar, at, what)
    if at:
        return _broken(tar, at, f"has a bad header ({fault})")
    start = data[:BLOCK]
    for magic, what in COMPRESSED.items():
        if start.startswith(magic):
            return ShardError(
                f"{tar.name} is compressed by {what}; expected a plain tar, since nobody can seek "
                "in a compressed one; decompress it (pictures do not grow by it)"
            )
    return ShardError(f"{tar.name} is no tar (it begins with {start[:16]!r}); {AGAIN}")


def _pax(tar: Path, data: Bytes, payload: Place, name: str | None) -> tuple[str | None, int | None]:
    """The name and size that a pax header gives the file after it, where it gives them."""
    text, size = data[payload.offset : payload.offset + payload.length], None
    while text:
        matched = re.match(rb"([1-9][0-9]{0,8}) ([^=]+)=", text)
        length = int(matched[1]) if matched else 0
        if matched is None or length < matched.end() or text[length - 1 : length] != b"\n":
            raise _broken(tar, payload.offset, "has a bad pax header")
        key, value = matched[2], text[matched.end() : length - 1]
        if key == b"path":
            name = value.decode("utf-8", "surrogateescape")
        elif key == b"size":
            if not value.isdigit():
                raise _broken(tar, payload.offset, f"has a pax header of size {value!r}")
            size = int(value)
        elif key.startswith(b"GNU.sparse."):
            raise ShardError(f"{tar.name} holds {LINKS[tarfile.GNUTYPE_SPARSE]}")
        text = text[length:]
    return name, size


def _checked(tar: Path, at: int, name: str) -> str:
    """The name of a file, without `./`; ShardError where it leads anywhere else."""
    parts = name.removeprefix("./").split("/")
    if "\\" in name or "\0" in name or {"", ".", ".."} & set(parts):
        raise ShardError(
            f"{tar.name} holds {name!r} (byte {at}), a path out of a folder or with '\\'; "
            "expected FOLDER/KEY.SUFFIX; pack it again from inside its folder"
        )
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ShardError(
            f"{tar.name} holds {name.encode(errors='surrogateescape')!r} (byte {at}), a name that "
            "is not UTF-8; rename it, and pack it again"
        ) from None
    return "/".join(parts)


def _broken(tar: Path, at: int, what: str) -> ShardError:
    return ShardError(f"{tar.name} {what} (byte {at}); {AGAIN}")
