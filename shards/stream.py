"""Tars that are read once, from beginning to end: of a file, an address or a command."""

from __future__ import annotations

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
from typing import Any, BinaryIO, cast

from heron.shards.errors import DISK_FULL, ShardError
from heron.shards.index import BLOCK
from heron.shards.remote import Missing, Remote, Retry, TooLong
from heron.shards.store import is_remote
from heron.shards.tarball import COMPRESSED, LINKS

PIPE = "pipe:"  # before a command whose output is a tar
CHUNK = 1 << 20  # bytes of a read where nobody looks at them
ENDS_S = 5.0  # for a command to end once its output has


class _Counted:
    """The bytes of a tar as they come.

    Attributes:
        count: of bytes so far.
        filled: of bytes up to the last that is not zero.
    """

    def __init__(self, raw: BinaryIO, most: int) -> None:
        self.raw, self.most, self.count, self.filled = raw, most, 0, 0

    def read(self, size: int) -> bytes:
        data = self.raw.read(size)
        for magic, what in COMPRESSED.items():
            if not self.count and data.startswith(magic):
                raise ValueError(
                    f"is compressed by {what}; expected a plain tar; decompress it, or read it "
                    "through a command (pipe:)"
                )
        if found := len(data.rstrip(b"\0")):
            self.filled = self.count + found
        self.count += len(data)
        if self.count > self.most:
            raise ValueError(
                f"has more than {self.most:,} bytes; expected {self.most:,} at most; raise "
                "data.webdataset.tar_bytes, or write smaller tars"
            )
        return data


@dataclass(frozen=True)
class TarReader:
    """Reads tars of local files, of addresses that fsspec knows, and of commands.

    What is behind an address is fetched whole, under the limits of `heron.shards.remote`, into a
    file without a name; of a command's output the tar is read as it comes.

    Attributes:
        most: bytes of a tar.
        options: fsspec's, for addresses.
        retry: how often an address is tried, and how long is waited for it.
    """

    most: int
    options: dict[str, Any] = field(default_factory=dict, repr=False)
    retry: Retry = Retry()

    def files(self, tar: str, suffixes: set[str]) -> Iterator[tuple[str, bytes]]:
        """Yields name and bytes of every file of a tar; no bytes where its suffix is another.

        Raises:
            ShardError: it cannot be had, or is cut, damaged, compressed, too long, or holds links.
        """
        where = tar if tar.startswith(PIPE) or not is_remote(tar) else _remote(tar)[0].where()
        try:
            with self._open(tar) as raw:
                yield from _files(_Counted(raw, self.most), suffixes)
        except ValueError as fault:
            raise ShardError(f"{where}: {fault}") from None
        except OSError as fault:
            if fault.errno in DISK_FULL:
                raise  # no fault of the tar
            raise ShardError(f"{where}: {fault.strerror or fault}; expected a tar") from None

    @contextmanager
    def _open(self, tar: str) -> Iterator[BinaryIO]:
        if tar.startswith(PIPE):
            with _output_of(tar.removeprefix(PIPE)) as raw:
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
        folder, name = _remote(tar, self.options, self.retry)
        try:
            folder.fetch(name, raw, limit=self.most)
        except Missing as fault:
            raise ValueError(f"{fault.found}; expected a tar") from None
        except TooLong:
            raise ValueError(
                f"has more than {self.most:,} bytes; expected {self.most:,} at most; raise "
                "data.webdataset.tar_bytes, or write smaller tars"
            ) from None


def _remote(tar: str, *how: Any) -> tuple[Remote, str]:
    """Returns the folder of a tar's address, which keeps the query that signs it, and its name."""
    address, mark, query = tar.partition("?") if tar.startswith("http") else (tar, "", "")
    folder, _, name = address.rpartition("/")
    return Remote(folder + mark + query, *how), name


@contextmanager
def _output_of(command: str) -> Iterator[BinaryIO]:
    """Runs a command of the shell; ValueError where it fails. It is killed when nobody reads on."""
    process = subprocess.Popen(
        command,
        shell=True,  # the user's own words, as in webdataset
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    output = cast(BinaryIO, process.stdout)
    try:
        fault: ValueError | None = None
        try:
            yield output
        except ValueError as broken:
            fault = broken
        with suppress(subprocess.TimeoutExpired):
            if status := process.wait(ENDS_S):
                said = f"{fault}; " if fault else ""
                raise ValueError(f"{said}the command ended with status {status}; expected 0")
        if fault:
            raise fault
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        output.close()
        process.wait()


def _files(stream: _Counted, suffixes: set[str]) -> Iterator[tuple[str, bytes]]:
    """Yields the files of a tar, and looks to it that nothing of it was passed over in silence.

    Python's own reader ends without a word at a damaged header, and where a tar is cut at one.
    """
    try:
        with tarfile.open(fileobj=cast(Any, stream), mode="r|") as tar:
            for info in tar:
                if info.type in LINKS:
                    raise ValueError(f"{info.name!r} is {LINKS[info.type]}")
                if info.issparse():  # some bytes of it may stand for any number of zeros
                    raise ValueError(f"{info.name!r} is a sparse file; expected a plain one")
                if info.isreg():
                    suffix = info.name.rpartition("/")[2].partition(".")[2].lower()
                    file = tar.extractfile(info) if suffix in suffixes else None
                    yield re.sub(r"^\./", "", info.name), file.read() if file else b""
                tar.members = []  # type: ignore[attr-defined]  # or they would fill memory
            end = tar.offset
    except (EOFError, tarfile.TarError) as fault:
        raise ValueError(f"is no whole tar ({fault})") from None
    while stream.read(CHUNK):
        pass
    if stream.filled > end:
        raise ValueError(f"has a bad header, or goes on after its end mark (byte {end})")
    if stream.count < end + 2 * BLOCK:
        raise ValueError(f"is cut: it has no end mark (byte {end})")
