"""Reads tars in any dialect of headers, without ever ignoring a part silently.

A file is indexed in place, and a file, a URL or the output of a command is read sequentially.
"""

from __future__ import annotations

import mmap
import os
import re
import signal
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO, NamedTuple, cast

from heron.base.errors import CONTROL, DISK_FULL, ShardError, short_repr
from heron.shards.index import BLOCK
from heron.shards.remote import Missing, Remote, Retry, TooLong
from heron.shards.store import is_remote

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
REFETCH = "get it again from its source"
SORT_NAMES = "pack it again in the order of names (tar --sort=name)"
PIPE = "pipe:"  # before a command whose output is a tar
CHUNK = 1 << 20  # bytes per read of the rest of a stream
EXIT_TIMEOUT_S = 5.0  # for a command to exit after its output ends


class ByteRange(NamedTuple):
    """Where the payload of a member is in its tar, in bytes."""

    offset: int
    length: int


@dataclass(frozen=True)
class Contents:
    """The samples of a tar, as byte ranges by key and member suffix, and files of no sample.

    As in WebDataset, `a/b.left.jpg` is member `left.jpg` of sample `a/b`: a key ends at the first
    dot of the file's name, and suffixes are lower case. A leading `./` is not part of a key.
    `strays` are files without a suffix and those that begin with a dot, such as macOS's `._b.jpg`.
    """

    samples: dict[str, dict[str, ByteRange]] = field(default_factory=dict)
    strays: list[str] = field(default_factory=list)


def read_contents(tar: Path) -> Contents:
    """Groups the files of a tar into samples.

    Raises ShardError where it is no tar, is cut or damaged, a key or member occurs twice, a
    sample's members are not adjacent, a name leads out of its folder, or a file is a link.
    """
    grouped = Contents()
    last = None
    for path, span in walk(tar):
        folder, slash, name = path.rpartition("/")
        stem, _, suffix = name.partition(".")
        if not stem or not suffix:
            grouped.strays.append(path)
            continue
        key, suffix = folder + slash + stem, suffix.lower()
        if key != last and key in grouped.samples:
            raise ShardError(
                f"{tar.name} sample {key} occurs again after {last}: a duplicate key, or its "
                f"files are apart, and readers would see two halves; {SORT_NAMES}"
            )
        members = grouped.samples.setdefault(key, {})
        if suffix in members:
            raise ShardError(
                f"{tar.name} sample {key}: member {suffix!r} occurs twice; a key ends at the "
                "first dot of a file's name: rename the files, and pack them again"
            )
        members[suffix] = span
        last = key
    return grouped


def walk(tar: Path) -> Iterator[tuple[str, ByteRange]]:
    """Yields the path and byte range of every file of a tar: v7, ustar, pax or GNU.

    Python's tarfile stops silently at a damaged header, and ignores a bad pax header. Here both are
    ShardErrors, as is anything other than files and folders.
    """
    if not tar.stat().st_size:
        raise ShardError(f"{tar.name} is empty (0 bytes); {REFETCH}")
    with tar.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        offset = 0
        overrides: dict[bytes, bytes] = {}  # of the next file, by extension headers
        while (header := data[offset : offset + BLOCK]) != bytes(BLOCK):
            try:
                info = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
            except (tarfile.HeaderError, ValueError) as fault:
                raise _header_error(tar, header, offset, len(data), fault) from None
            start, length = offset + BLOCK, int(overrides.get(b"size", info.size))
            if info.type == tarfile.DIRTYPE:
                length = 0  # some writers state the size of the folder's content
            if not 0 <= length <= len(data) - start:
                extent = f"{length:,} bytes, of which it has {len(data) - start:,}"
                raise _damaged(tar, offset, f"is cut inside {info.name!r} ({extent})")
            offset = -(-(start + length) // BLOCK) * BLOCK
            if info.type in PAX:
                overrides |= _parse_pax(tar, start, data[start : start + length])
            elif info.type == tarfile.XGLTYPE:
                if _parse_pax(tar, start, data[start : start + length]):
                    raise _damaged(tar, start, "has a global header that names files")
            elif info.type == tarfile.GNUTYPE_LONGNAME:
                overrides[b"path"] = data[start : start + length].partition(b"\0")[0]
            elif info.type != tarfile.GNUTYPE_LONGLINK:
                name = overrides.get(b"path", info.name.encode(errors="surrogateescape"))
                overrides = {}
                if info.isreg() and info.type not in LINKS:
                    yield _checked_name(tar, start - BLOCK, name), ByteRange(start, length)
                elif info.type != tarfile.DIRTYPE:
                    problem = f"not a file (type {info.type!r}); pack it again without"
                    shown_name = name.decode(errors="replace")
                    raise ShardError(
                        f"{tar.name}: {shown_name!r} is {LINKS.get(info.type, problem)}"
                    )
        if overrides:
            raise _damaged(tar, offset, "ends between a long name and its file")
        _check_end(tar, data, offset)


def _check_end(tar: Path, data: mmap.mmap, offset: int) -> None:
    """Checks that a tar ends with two blocks of zeros, followed by nothing but zeros."""
    if offset + 2 * BLOCK > len(data):
        raise _damaged(tar, offset, "is cut inside its end mark")
    chunk = 1 << 20
    if any(data[start : start + chunk].strip(b"\0") for start in range(offset, len(data), chunk)):
        raise ShardError(
            f"{tar.name} continues after its end mark (byte {offset}): two tars concatenated? "
            "readers would see only the first; unpack it with tar --ignore-zeros, and pack it "
            "again"
        )


def _header_error(tar: Path, block: bytes, offset: int, size: int, fault: Exception) -> ShardError:
    for magic, program in COMPRESSED.items():
        if not offset and block.startswith(magic):
            return ShardError(
                f"{tar.name} is compressed by {program}, and a compressed tar cannot be read at "
                "random; decompress it (pictures do not grow)"
            )
    if not offset:
        return ShardError(f"{tar.name} is not a tar (it begins with {block[:16]!r}); {REFETCH}")
    if offset >= size:
        return _damaged(tar, offset, "has no end mark: it is cut short, or unfinished")
    is_cut = size - offset < BLOCK
    return _damaged(
        tar, offset, "is cut inside a header" if is_cut else f"has a bad header ({fault})"
    )


def _parse_pax(tar: Path, offset: int, text: bytes) -> dict[bytes, bytes]:
    """Returns the path and the size, where a pax header states them for the file after it."""
    fields = {}
    while text:
        record = re.match(rb"([1-9][0-9]{0,8}) ([^=]+)=", text)
        length = int(record[1]) if record else 0
        if record is None or length < record.end() or text[length - 1 : length] != b"\n":
            raise _damaged(tar, offset, "has a bad pax header")
        key, value = record[2], text[record.end() : length - 1]
        if key == b"size" and not re.fullmatch(rb"[0-9]{1,18}", value):
            raise _damaged(tar, offset, f"has a pax header of size {short_repr(value)}")
        if key.startswith(b"GNU.sparse."):
            raise ShardError(f"{tar.name} has {LINKS[tarfile.GNUTYPE_SPARSE]}")
        if key in (b"path", b"size"):
            fields[key] = value
        text = text[length:]
    return fields


def _checked_name(tar: Path, offset: int, name: bytes) -> str:
    """Returns the name of a file without `./`; ShardError where it is unsafe or not UTF-8."""
    try:
        text = name.decode()
    except UnicodeDecodeError:
        raise ShardError(
            f"{tar.name} has {name!r} (byte {offset}), a name that is not UTF-8; rename it, and "
            "pack it again"
        ) from None
    parts = text.removeprefix("./").split("/")
    if CONTROL.search(text):
        raise ShardError(
            f"{tar.name} has {short_repr(text)} (byte {offset}), a name with control characters; "
            "rename it, and pack it again"
        )
    if "\\" in text or {"", ".", ".."} & set(parts):
        raise ShardError(
            f"{tar.name} has {text!r} (byte {offset}), a path out of its folder or with '\\'; "
            "paths must be FOLDER/KEY.SUFFIX; pack it again from inside its folder"
        )
    return "/".join(parts)


def _damaged(tar: Path, offset: int, problem: str) -> ShardError:
    return ShardError(f"{tar.name} {problem} (byte {offset}); {REFETCH}")


class _CountingReader:
    """Counts the bytes read of a tar; `filled` counts those up to the last that is not zero."""

    def __init__(self, raw: BinaryIO, max_bytes: int) -> None:
        self.raw, self.max_bytes, self.count, self.filled = raw, max_bytes, 0, 0

    def read(self, size: int) -> bytes:
        data = self.raw.read(size)
        for magic, program in COMPRESSED.items():
            if not self.count and data.startswith(magic):
                raise ValueError(
                    f"is compressed by {program}; decompress it, or read it with a pipe:"
                )
        if length := len(data.rstrip(b"\0")):
            self.filled = self.count + length
        self.count += len(data)
        if self.count > self.max_bytes:
            raise ValueError(
                f"has more than {self.max_bytes:,} bytes, which is the limit; raise "
                "data.webdataset.tar_bytes, or write smaller tars"
            )
        return data


@dataclass(frozen=True)
class TarReader:
    """Reads tars from local files, URLs that fsspec knows, and commands.

    A URL is fetched whole, under the limits of `heron.shards.remote`, into an unnamed file; the
    output of a command is read as it comes. A tar has at most `most` bytes; `options` and `retry`
    are those of `Remote`.
    """

    most: int
    options: dict[str, Any] = field(default_factory=dict, repr=False)
    retry: Retry = Retry()

    def files(self, tar: str, suffixes: set[str]) -> Iterator[tuple[str, bytes]]:
        """Yields the name and bytes of every file of a tar; b"" for files of other suffixes.

        Raises ShardError if it is unreadable, cut, damaged, compressed, too long, or holds links.
        """
        local = tar.startswith(PIPE) or not is_remote(tar)
        where = tar if local else _split_url(tar)[0].where()
        try:
            with self._open(tar) as raw:
                yield from _read_files(_CountingReader(raw, self.most), suffixes)
        except ValueError as fault:
            raise ShardError(f"{where}: {fault}") from None
        except OSError as fault:
            if fault.errno in DISK_FULL:
                raise  # not a fault of the tar
            raise ShardError(f"{where}: {fault.strerror or fault}") from None

    @contextmanager
    def _open(self, tar: str) -> Iterator[BinaryIO]:
        if tar.startswith(PIPE):
            with _run_command(tar.removeprefix(PIPE)) as raw:
                yield raw
        elif not is_remote(tar):
            with Path(tar.removeprefix("file://")).open("rb") as raw:
                yield raw
        else:
            with TemporaryFile(prefix="heron-") as raw:
                self._fetch(tar, raw)
                raw.seek(0)
                yield raw

    def _fetch(self, tar: str, raw: BinaryIO) -> None:
        folder, name = _split_url(tar, self.options, self.retry)
        try:
            folder.fetch(name, raw, limit=self.most)
        except Missing as fault:
            raise ValueError(f"{fault.reason}") from None
        except TooLong:
            raise ValueError(
                f"has more than {self.most:,} bytes, which is the limit; raise "
                "data.webdataset.tar_bytes, or write smaller tars"
            ) from None


def _split_url(tar: str, *arguments: Any) -> tuple[Remote, str]:
    """Splits a tar's URL into its folder, which keeps a signing query, and the tar's name."""
    address, mark, query = tar.partition("?") if tar.startswith("http") else (tar, "", "")
    folder, _, name = address.rpartition("/")
    return Remote(folder + mark + query, *arguments), name


@contextmanager
def _run_command(command: str) -> Iterator[BinaryIO]:
    """Yields the output of a shell command, and kills it at the end; ValueError where it fails."""
    process = subprocess.Popen(
        command,
        shell=True,  # a command of the user, as in webdataset
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    output = cast(BinaryIO, process.stdout)
    try:
        fault: ValueError | None = None
        try:
            yield output
        except ValueError as error:
            fault = error
        with suppress(subprocess.TimeoutExpired):
            if status := process.wait(EXIT_TIMEOUT_S):
                prefix = f"{fault}; " if fault else ""
                raise ValueError(f"{prefix}the command ended with status {status} instead of 0")
        if fault:
            raise fault
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        output.close()
        process.wait()


def _read_files(stream: _CountingReader, suffixes: set[str]) -> Iterator[tuple[str, bytes]]:
    """Yields the files; ValueError where tarfile would stop silently, at a bad header or a cut."""
    try:
        with tarfile.open(fileobj=cast(Any, stream), mode="r|") as tar:
            for info in tar:
                if info.type in LINKS:
                    raise ValueError(f"{info.name!r} is {LINKS[info.type]}")
                if info.issparse():  # few bytes may expand to any number of zeros
                    raise ValueError(f"{info.name!r} is a sparse file, not a plain one")
                if info.isreg():
                    suffix = info.name.rpartition("/")[2].partition(".")[2].lower()
                    file = tar.extractfile(info) if suffix in suffixes else None
                    yield re.sub(r"^\./", "", info.name), file.read() if file else b""
                tar.members = []  # type: ignore[attr-defined]  # they would accumulate in memory
            end = tar.offset
    except (EOFError, tarfile.TarError) as fault:
        raise ValueError(f"is not a whole tar ({fault})") from None
    while stream.read(CHUNK):
        pass
    if stream.filled > end:
        raise ValueError(f"has a bad header, or continues after its end mark (byte {end})")
    if stream.count < end + 2 * BLOCK:
        raise ValueError(f"is cut short: it has no end mark (byte {end})")
