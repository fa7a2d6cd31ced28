"""Reads tars sequentially, from a file, a URL or the output of a command."""

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
CHUNK = 1 << 20  # bytes per read of the rest of a stream
EXIT_TIMEOUT_S = 5.0  # for a command to exit after its output ends


class _CountingReader:
    """Counts the bytes read of a tar; `filled` counts those up to the last that is not zero."""

    def __init__(self, raw: BinaryIO, max_bytes: int) -> None:
        self.raw, self.max_bytes, self.count, self.filled = raw, max_bytes, 0, 0

    def read(self, size: int) -> bytes:
        data = self.raw.read(size)
        for magic, program in COMPRESSED.items():
            if not self.count and data.startswith(magic):
                raise ValueError(
                    f"is compressed by {program}; expected a plain tar; decompress it, or read it "
                    "through a command (pipe:)"
                )
        if length := len(data.rstrip(b"\0")):
            self.filled = self.count + length
        self.count += len(data)
        if self.count > self.max_bytes:
            raise ValueError(
                f"has more than {self.max_bytes:,} bytes; expected {self.max_bytes:,} at most; "
                "raise data.webdataset.tar_bytes, or write smaller tars"
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
            raise ShardError(f"{where}: {fault.strerror or fault}; expected a tar") from None

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
            raise ValueError(f"{fault.reason}; expected a tar") from None
        except TooLong:
            raise ValueError(
                f"has more than {self.most:,} bytes; expected {self.most:,} at most; raise "
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
                raise ValueError(f"{prefix}the command ended with status {status}; expected 0")
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
                    raise ValueError(f"{info.name!r} is a sparse file; expected a plain one")
                if info.isreg():
                    suffix = info.name.rpartition("/")[2].partition(".")[2].lower()
                    file = tar.extractfile(info) if suffix in suffixes else None
                    yield re.sub(r"^\./", "", info.name), file.read() if file else b""
                tar.members = []  # type: ignore[attr-defined]  # they would accumulate in memory
            end = tar.offset
    except (EOFError, tarfile.TarError) as fault:
        raise ValueError(f"is no whole tar ({fault})") from None
    while stream.read(CHUNK):
        pass
    if stream.filled > end:
        raise ValueError(f"has a bad header, or goes on after its end mark (byte {end})")
    if stream.count < end + 2 * BLOCK:
        raise ValueError(f"is cut: it has no end mark (byte {end})")
