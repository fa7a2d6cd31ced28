"""A tar as others write it: any dialect of headers, and nothing of it lost without a word."""

import mmap
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from heron.shards.errors import CONTROL, ShardError, shown
from heron.shards.index import BLOCK

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


class ByteRange(NamedTuple):
    """Where the payload of a member lies in its tar, in bytes."""

    offset: int
    length: int


@dataclass(frozen=True)
class Contents:
    """The samples of a tar, each a byte range by the suffix of a member, and files of no sample.

    As in WebDataset, `a/b.left.jpg` is member `left.jpg` of sample `a/b`: a key ends at the first
    dot of the file's name, and suffixes are lower case. A leading `./` is no part of a key.
    `strays` are files without a suffix and those that begin with a dot, such as macOS's `._b.jpg`.
    """

    samples: dict[str, dict[str, ByteRange]] = field(default_factory=dict)
    strays: list[str] = field(default_factory=list)


def contents(tar: Path) -> Contents:
    """Groups the files of a tar into samples.

    Raises:
        ShardError: it is no tar, is cut or damaged, a key or a member comes twice, members of a
            sample lie apart, a name leads out of a folder, or a file is a link.
    """
    grouped = Contents()
    last = None
    for path, span in walk(tar):
        folder, slash, name = path.rpartition("/")
        base, _, suffix = name.partition(".")
        if not base or not suffix:
            grouped.strays.append(path)
            continue
        key, suffix = folder + slash + base, suffix.lower()
        if key != last and key in grouped.samples:
            raise ShardError(
                f"{tar.name} sample {key} comes again after {last}: a duplicate key, or its files "
                f"lie apart, and readers would see two halves; {ORDER}"
            )
        members = grouped.samples.setdefault(key, {})
        if suffix in members:
            raise ShardError(
                f"{tar.name} sample {key}: member {suffix!r} comes twice; expected one; a key "
                "ends at the first dot of a file's name: rename the files, and pack them again"
            )
        members[suffix] = span
        last = key
    return grouped


def walk(tar: Path) -> Iterator[tuple[str, ByteRange]]:
    """Yields the path and byte range of every file of a tar: v7, ustar, pax or GNU.

    Python's own reader ends without a word at a damaged header, and passes over a bad pax one.

    Raises:
        ShardError: the tar is cut or damaged, or holds what is no file or folder.
    """
    if not tar.stat().st_size:
        raise ShardError(f"{tar.name} is empty (0 bytes); expected a tar; {AGAIN}")
    with tar.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = 0
        renamed: dict[bytes, bytes] = {}  # path and size of the next file, from headers before it
        while (header := data[at : at + BLOCK]) != bytes(BLOCK):
            try:
                info = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
            except (tarfile.HeaderError, ValueError) as fault:
                raise _no_header(tar, header, at, len(data), fault) from None
            start, length = at + BLOCK, int(renamed.get(b"size", info.size))
            if info.type == tarfile.DIRTYPE:
                length = 0  # some writers count what lies in a folder
            if not 0 <= length <= len(data) - start:
                left = f"{length:,} bytes, of which {len(data) - start:,} are there"
                raise _broken(tar, at, f"is cut inside {info.name!r} ({left})")
            at = -(-(start + length) // BLOCK) * BLOCK
            if info.type in PAX:
                renamed |= _pax(tar, start, data[start : start + length])
            elif info.type == tarfile.XGLTYPE:
                if _pax(tar, start, data[start : start + length]):
                    raise _broken(tar, start, "has a global header that names files")
            elif info.type == tarfile.GNUTYPE_LONGNAME:
                renamed[b"path"] = data[start : start + length].partition(b"\0")[0]
            elif info.type != tarfile.GNUTYPE_LONGLINK:
                name = renamed.get(b"path", info.name.encode(errors="surrogateescape"))
                renamed = {}
                if info.isreg() and info.type not in LINKS:
                    yield _checked(tar, start - BLOCK, name), ByteRange(start, length)
                elif info.type != tarfile.DIRTYPE:
                    what = f"no file (type {info.type!r}); pack it again without"
                    text = name.decode(errors="replace")
                    raise ShardError(f"{tar.name}: {text!r} is {LINKS.get(info.type, what)}")
        if renamed:
            raise _broken(tar, at, "ends between a long name and its file")
        _check_end(tar, data, at)


def _check_end(tar: Path, data: mmap.mmap, at: int) -> None:
    """Checks that two blocks of zeros end a tar, and nothing but padding of any size follows."""
    if at + 2 * BLOCK > len(data):
        raise _broken(tar, at, "is cut inside its end mark")
    step = 1 << 20
    if any(data[first : first + step].strip(b"\0") for first in range(at, len(data), step)):
        raise ShardError(
            f"{tar.name} goes on after its end mark (byte {at}): two tars one after the other? "
            "readers would see the first alone; unpack it with tar --ignore-zeros, and pack it "
            "again"
        )


def _no_header(tar: Path, block: bytes, at: int, size: int, fault: Exception) -> ShardError:
    """Says what the block is that should be a header."""
    for magic, what in COMPRESSED.items():
        if not at and block.startswith(magic):
            return ShardError(
                f"{tar.name} is compressed by {what}; expected a plain tar, since nobody can seek "
                "in a compressed one; decompress it (pictures do not grow by it)"
            )
    if not at:
        return ShardError(f"{tar.name} is no tar (it begins with {block[:16]!r}); {AGAIN}")
    if at >= size:
        return _broken(tar, at, "has no end mark: it is cut, or unfinished")
    cut = size - at < BLOCK
    return _broken(tar, at, "is cut inside a header" if cut else f"has a bad header ({fault})")


def _pax(tar: Path, at: int, text: bytes) -> dict[bytes, bytes]:
    """Returns the path and size that a pax header gives the file after it, where it gives them."""
    given = {}
    while text:
        record = re.match(rb"([1-9][0-9]{0,8}) ([^=]+)=", text)
        length = int(record[1]) if record else 0
        if record is None or length < record.end() or text[length - 1 : length] != b"\n":
            raise _broken(tar, at, "has a bad pax header")
        key, value = record[2], text[record.end() : length - 1]
        if key == b"size" and not re.fullmatch(rb"[0-9]{1,18}", value):
            raise _broken(tar, at, f"has a pax header of size {shown(value)}")
        if key.startswith(b"GNU.sparse."):
            raise ShardError(f"{tar.name} holds {LINKS[tarfile.GNUTYPE_SPARSE]}")
        if key in (b"path", b"size"):
            given[key] = value
        text = text[length:]
    return given


def _checked(tar: Path, at: int, name: bytes) -> str:
    """Returns the name of a file, without `./`; ShardError where it leads anywhere else."""
    try:
        text = name.decode()
    except UnicodeDecodeError:
        raise ShardError(
            f"{tar.name} holds {name!r} (byte {at}), a name that is not UTF-8; rename it, and "
            "pack it again"
        ) from None
    parts = text.removeprefix("./").split("/")
    if CONTROL.search(text):
        raise ShardError(
            f"{tar.name} holds {shown(text)} (byte {at}), a name with control characters; rename "
            "it, and pack it again"
        )
    if "\\" in text or {"", ".", ".."} & set(parts):
        raise ShardError(
            f"{tar.name} holds {text!r} (byte {at}), a path out of a folder or with '\\'; "
            "expected FOLDER/KEY.SUFFIX; pack it again from inside its folder"
        )
    return "/".join(parts)


def _broken(tar: Path, at: int, what: str) -> ShardError:
    return ShardError(f"{tar.name} {what} (byte {at}); {AGAIN}")
