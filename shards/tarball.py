"""A tar as others write it: any dialect of headers, and nothing of it lost without a word."""

import math
import re
import tarfile
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

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
NAMING = (*PAX, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME)  # headers of what comes after them
AGAIN = "get it again from where it came"
ORDER = "pack it again in the order of names (tar --sort=name)"
CHUNK = 1 << 20  # bytes of a read


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
    for path, span in places(tar):
        key, suffix = _parted(path)
        if not key.rpartition("/")[2] or not suffix:
            grouped.strays.append(path)
            continue
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


def _parted(path: str) -> tuple[str, str]:
    """Returns the key and the suffix of a file: see `Contents`."""
    folder, slash, name = path.rpartition("/")
    base, _, suffix = name.partition(".")
    return folder + slash + base, suffix.lower()


def places(tar: Path) -> Iterator[tuple[str, ByteRange]]:
    """Yields the path and byte range of every file of a tar: see `walk`."""
    with tar.open("rb") as stream:
        for path, span, _ in walk(stream, tar.name):
            yield path, span


def walk(
    stream: BinaryIO, title: str, suffixes: Container[str] = ()
) -> Iterator[tuple[str, ByteRange, bytes]]:
    """Yields the path, byte range and bytes of every file of a tar: v7, ustar, pax or GNU.

    Python's own reader ends without a word at a damaged header, and passes over a bad pax one.

    Args:
        stream: the tar, a file or what a command writes; it is read once, to its end.
        title: begins the messages.
        suffixes: of the files whose bytes are asked for; of others there are none.

    Raises:
        ShardError: the tar is cut or damaged, or holds what is no file or folder.
    """
    at = 0
    renamed: dict[bytes, bytes] = {}  # path and size of the next file, from headers before it
    while (header := b"".join(_pieces(stream, BLOCK))) != bytes(BLOCK):
        try:
            info = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        except (tarfile.HeaderError, ValueError) as fault:
            raise _no_header(title, header, at, fault) from None
        start, length = at + BLOCK, int(renamed.get(b"size", info.size))
        if info.type == tarfile.DIRTYPE:
            length = 0  # some writers count what lies in a folder
        name = renamed.get(b"path", info.name.encode(errors="surrogateescape"))
        asked = info.type in NAMING or _parted(name.decode(errors="replace"))[1] in suffixes
        came, kept = 0, []
        for piece in _pieces(stream, length):
            came += len(piece)
            if asked:
                kept.append(piece)
        if came != length:
            left = f"{length:,} bytes, of which {came:,} are there"
            raise _broken(title, at, f"is cut inside {info.name!r} ({left})")
        at = start + length + sum(map(len, _pieces(stream, -length % BLOCK)))
        data = b"".join(kept)
        if info.type in PAX:
            renamed |= _pax(title, start, data)
        elif info.type == tarfile.XGLTYPE:
            if _pax(title, start, data):
                raise _broken(title, start, "has a global header that names files")
        elif info.type == tarfile.GNUTYPE_LONGNAME:
            renamed[b"path"] = data.partition(b"\0")[0]
        elif info.type != tarfile.GNUTYPE_LONGLINK:
            renamed = {}
            if info.isreg() and info.type not in LINKS:
                yield _checked(title, start - BLOCK, name), ByteRange(start, length), data
            elif info.type != tarfile.DIRTYPE:
                what = f"no file (type {info.type!r}); pack it again without"
                text = name.decode(errors="replace")
                raise ShardError(f"{title} holds {text!r}: it is {LINKS.get(info.type, what)}")
    if renamed:
        raise _broken(title, at, "ends between a long name and its file")
    _check_end(stream, title, at)


def _pieces(stream: BinaryIO, length: float = math.inf) -> Iterator[bytes]:
    """Yields the next bytes of a stream, of a tar that is cut fewer than are asked for."""
    while length > 0 and (piece := stream.read(int(min(length, CHUNK)))):
        length -= len(piece)
        yield piece


def _check_end(stream: BinaryIO, title: str, at: int) -> None:
    """Checks that two blocks of zeros end a tar, and nothing but padding of any size follows."""
    padding = 0
    for piece in _pieces(stream):
        padding += len(piece)
        if piece.strip(b"\0"):
            raise ShardError(
                f"{title} goes on after its end mark (byte {at}): two tars one after the other? "
                "readers would see the first alone; unpack it with tar --ignore-zeros, and pack it "
                "again"
            )
    if padding < BLOCK:
        raise _broken(title, at, "is cut inside its end mark")


def _no_header(title: str, block: bytes, at: int, fault: Exception) -> ShardError:
    """Says what the block is that should be a header."""
    if not at:
        for magic, what in COMPRESSED.items():
            if block.startswith(magic):
                return ShardError(
                    f"{title} is compressed by {what}; expected a plain tar, since nobody can seek "
                    "in a compressed one; decompress it (pictures do not grow by it)"
                )
        found = f"no tar (it begins with {block[:16]!r})" if block else "empty (0 bytes)"
        return ShardError(f"{title} is {found}; expected a tar; {AGAIN}")
    if not block:
        return _broken(title, at, "has no end mark: it is cut, or unfinished")
    cut = len(block) < BLOCK
    return _broken(title, at, "is cut inside a header" if cut else f"has a bad header ({fault})")


def _pax(title: str, at: int, text: bytes) -> dict[bytes, bytes]:
    """Returns the path and size that a pax header gives the file after it, where it gives them."""
    given = {}
    while text:
        record = re.match(rb"([1-9][0-9]{0,8}) ([^=]+)=", text)
        length = int(record[1]) if record else 0
        if record is None or length < record.end() or text[length - 1 : length] != b"\n":
            raise _broken(title, at, "has a bad pax header")
        key, value = record[2], text[record.end() : length - 1]
        if key == b"size" and not re.fullmatch(rb"[0-9]{1,18}", value):
            raise _broken(title, at, f"has a pax header of size {shown(value)}")
        if key.startswith(b"GNU.sparse."):
            raise ShardError(f"{title} holds {LINKS[tarfile.GNUTYPE_SPARSE]}")
        if key in (b"path", b"size"):
            given[key] = value
        text = text[length:]
    return given


def _checked(title: str, at: int, name: bytes) -> str:
    """Returns the name of a file, without `./`; ShardError where it leads anywhere else."""
    try:
        text = name.decode()
    except UnicodeDecodeError:
        raise ShardError(
            f"{title} holds {name!r} (byte {at}), a name that is not UTF-8; rename it, and "
            "pack it again"
        ) from None
    parts = text.removeprefix("./").split("/")
    if CONTROL.search(text):
        raise ShardError(
            f"{title} holds {shown(text)} (byte {at}), a name with control characters; rename "
            "it, and pack it again"
        )
    if "\\" in text or {"", ".", ".."} & set(parts):
        raise ShardError(
            f"{title} holds {text!r} (byte {at}), a path out of a folder or with '\\'; "
            "expected FOLDER/KEY.SUFFIX; pack it again from inside its folder"
        )
    return "/".join(parts)


def _broken(title: str, at: int, what: str) -> ShardError:
    return ShardError(f"{title} {what} (byte {at}); {AGAIN}")
