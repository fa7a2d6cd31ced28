"""Tars that are read once, from beginning to end: of a file, an address or a command."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO, cast

from heron.shards.errors import DISK_FULL, ShardError
from heron.shards.remote import Missing, Remote, TooLong
from heron.shards.store import is_remote
from heron.shards.tarball import walk

PIPE = "pipe:"  # before a command whose output is a tar
ENDS_S = 5.0  # for a command to end once its output has


@dataclass(frozen=True)
class TarReader:
    """Reads tars of local files, of addresses that fsspec knows, and of commands.

    What is behind an address is fetched whole, under the limits of `heron.shards.remote`, into a
    file without a name; of a command's output the tar is read as it comes.

    Attributes:
        most: bytes of a tar.
        options: fsspec's, for addresses.
    """

    most: int
    options: dict[str, Any] = field(default_factory=dict, repr=False)

    def files(self, tar: str, suffixes: set[str]) -> Iterator[tuple[str, bytes]]:
        """Yields name and bytes of every file of a tar; no bytes where its suffix is another.

        Raises:
            ShardError: it cannot be had, or is cut, damaged, compressed, too long, or holds links.
        """
        where = tar if tar.startswith(PIPE) or not is_remote(tar) else _remote(tar)[0].where()
        try:
            with self._open(tar, where) as raw:
                bounded = cast(BinaryIO, _Bounded(raw, self.most, where))
                for path, _, data in walk(bounded, f"{where}:", suffixes):
                    yield path, data
        except OSError as fault:
            if fault.errno in DISK_FULL:
                raise  # no fault of the tar
            raise ShardError(f"{where}: {fault.strerror or fault}; expected a tar") from None

    @contextmanager
    def _open(self, tar: str, where: str) -> Iterator[BinaryIO]:
        if tar.startswith(PIPE):
            with _output_of(tar.removeprefix(PIPE), where) as raw:
                yield raw
        elif not is_remote(tar):
            with Path(tar.removeprefix("file://")).open("rb") as raw:
                yield raw
        else:
            folder, name = _remote(tar, self.options)
            with TemporaryFile(prefix="heron-") as raw:
                try:
                    folder.fetch(name, raw, limit=self.most)
                except Missing as fault:
                    raise ShardError(f"{where}: {fault.found}; expected a tar") from None
                except TooLong:
                    raise _too_long(where, self.most) from None
                raw.seek(0)
                yield raw


class _Bounded:
    """A tar of at most so many bytes, as it comes."""

    def __init__(self, raw: BinaryIO, most: int, where: str) -> None:
        self.raw, self.most, self.where, self.count = raw, most, where, 0

    def read(self, size: int) -> bytes:
        data = self.raw.read(size)
        self.count += len(data)
        if self.count > self.most:
            raise _too_long(self.where, self.most)
        return data


def _too_long(where: str, most: int) -> ShardError:
    return ShardError(
        f"{where}: has more than {most:,} bytes; expected {most:,} at most; raise "
        "data.webdataset.tar_bytes, or write smaller tars"
    )


def _remote(tar: str, options: dict[str, Any] | None = None) -> tuple[Remote, str]:
    """Returns the folder of a tar's address, which keeps the query that signs it, and its name."""
    address, mark, query = tar.partition("?") if tar.startswith("http") else (tar, "", "")
    folder, _, name = address.rpartition("/")
    return Remote(folder + mark + query, options), name


@contextmanager
def _output_of(command: str, where: str) -> Iterator[BinaryIO]:
    """Runs a command of the shell; ShardError where it fails. It is killed when nobody reads on."""
    process = subprocess.Popen(
        command,
        shell=True,  # the user's own words, as in webdataset
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    output = cast(BinaryIO, process.stdout)
    try:
        fault: ShardError | None = None
        try:
            yield output
        except ShardError as broken:
            fault = broken
        with suppress(subprocess.TimeoutExpired):
            if status := process.wait(ENDS_S):
                said = fault or f"{where}: its output came"
                raise ShardError(f"{said}; the command ended with status {status}; expected 0")
        if fault:
            raise fault
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        output.close()
        process.wait()
