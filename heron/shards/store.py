"""Stores: the files of a data set, in a local folder or behind a URL."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from heron.base.artefact import MAX_MANIFEST_BYTES
from heron.base.atomic import save_json
from heron.base.errors import ShardError
from heron.shards.cache import LocalFile, ShardCache
from heron.shards.remote import Missing, Remote, Retry


class Store(ABC):
    """The files of a data set, addressed by their names in its manifest."""

    def __str__(self) -> str:
        """Returns the path or address of the folder."""
        return self.where()

    @abstractmethod
    def where(self, name: str = "") -> str:
        """Returns the path or address of a file, or of the folder, for messages."""

    @abstractmethod
    def read_bytes(self, name: str) -> bytes:
        """Returns the present bytes of a small file; raises Missing where there is none.

        Files of more than MAX_MANIFEST_BYTES are not read whole.
        """

    @abstractmethod
    def names(self) -> set[str] | None:
        """Returns the names of all files, or None where they cannot be listed."""

    @abstractmethod
    def local(self, name: str, size: int, sha256: str) -> LocalFile:
        """Returns a local file with the bytes of a tar or an index, until it is closed.

        A remote file is compared with its checksum and its size when it is fetched; a local one is
        used in place, unread and perhaps missing. Raises Missing, or ShardError where it cannot be
        fetched, has wrong bytes, or the cache has no room.
        """

    @abstractmethod
    def local_copies(self, sizes: Mapping[str, int]) -> AbstractContextManager[Path]:
        """Provides a local folder with the present state of these files, less the missing ones.

        Raises TooLong where a file is longer than its size.
        """

    def locate(self, name: str) -> tuple[Store, str]:
        """Returns the store that has a file, and the file's name there: see `MixedStore`."""
        return self, name

    def exists(self, name: str) -> bool:
        """Returns whether a (small) file exists."""
        try:
            self.read_bytes(name)
        except Missing:
            return False
        return True


@dataclass(frozen=True)
class LocalStore(Store):
    """A folder of this host, whose files are used in place."""

    folder: Path

    def where(self, name: str = "") -> str:
        """Returns the path."""
        return str(self.folder / name)

    def read_bytes(self, name: str) -> bytes:
        """Returns a small file."""
        try:
            with (self.folder / _check_plain_name(name)).open("rb") as stream:
                return stream.read(MAX_MANIFEST_BYTES + 1)
        except (FileNotFoundError, NotADirectoryError):
            raise Missing(f"{self.where(name)} does not exist") from None

    def names(self) -> set[str]:
        """Returns the names of all files."""
        return {path.name for path in self.folder.iterdir()}

    def local(self, name: str, size: int, sha256: str) -> LocalFile:
        """Returns the file in place."""
        return LocalFile(self.folder / _check_plain_name(name))

    @contextmanager
    def local_copies(self, sizes: Mapping[str, int]) -> Iterator[Path]:
        """Provides the folder itself; nothing is copied."""
        yield self.folder


@dataclass(frozen=True)
class RemoteStore(Store):
    """A folder behind a URL, whose files are fetched whole into a cache."""

    remote: Remote
    cache: ShardCache | None = field(default=None, repr=False)

    def where(self, name: str = "") -> str:
        """Returns the address, without secrets."""
        return self.remote.where(name)

    def read_bytes(self, name: str) -> bytes:
        """Returns a small file, fetched anew every time."""
        stream = BytesIO()
        self.remote.fetch(_check_plain_name(name), stream, limit=MAX_MANIFEST_BYTES)
        return stream.getvalue()

    def names(self) -> set[str] | None:
        """Returns the names of all files, none if there is no such folder yet; None over HTTP."""
        try:
            return self.remote.names()
        except Missing:
            return set()

    def put(self, path: Path) -> None:
        """Puts a file of a disk, under its own name: see `Remote.put`."""
        self.remote.put(path.name, path)

    def put_json(self, name: str, tree: Any) -> None:
        """Puts a JSON file."""
        with TemporaryDirectory(prefix="heron-") as temporary:
            save_json(path := Path(temporary) / name, tree)
            self.put(path)

    def remove(self, names: Collection[str]) -> None:
        """Removes files; those that are not there already are no fault."""
        self.remote.remove(set(names) & (self.names() or set()))

    def local(self, name: str, size: int, sha256: str) -> LocalFile:
        """Returns the file in the cache; fetches it first where it is not there."""
        fetch = partial(self.remote.fetch, _check_plain_name(name), size=size, sha256=sha256)
        return (self.cache or ShardCache()).get(sha256, size, fetch)

    @contextmanager
    def local_copies(self, sizes: Mapping[str, int]) -> Iterator[Path]:
        """Provides a temporary folder, as the cache would hide later damage to the files."""
        with TemporaryDirectory(prefix="heron-") as temporary:
            folder = Path(temporary)
            for name, size in sizes.items():
                path = folder / _check_plain_name(name)
                try:
                    with path.open("wb", buffering=0) as stream:
                        self.remote.fetch(name, stream, limit=size)
                except Missing:
                    path.unlink()
                except OSError as fault:
                    raise ShardError(
                        f"{path}: {fault}; there must be room for a copy of {self.where(name)}; "
                        "set TMPDIR to a folder on a larger disk"
                    ) from None
            yield folder


def is_remote(path: str) -> bool:
    """Returns whether a path is a URL whose files must be fetched."""
    return "://" in path and not path.startswith("file://")


def open_store(
    folder: str | Path | Store,
    cache: ShardCache | None = None,
    options: dict[str, Any] | None = None,
    retry: Retry | None = None,
) -> Store:
    """Returns the store of a local path, file:// or any URL that fsspec knows; reads nothing yet.

    `options` are fsspec's storage options, which differ by protocol. A store is returned as it is.
    """
    if isinstance(folder, Store):
        return folder
    text = str(folder)
    if "\0" in text:
        raise ShardError(f"{text!r} is not a folder or a URL: it has a zero byte")
    if isinstance(folder, Path) or not is_remote(text):
        return LocalStore(Path(text.removeprefix("file://")))
    return RemoteStore(Remote(text, options, retry), cache)


def _check_plain_name(name: str) -> str:
    """Returns the name unchanged; ShardError where it is a path, which could leave the folder."""
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", name):
        raise ShardError(f"{name!r} is not a file of the data set; use a name without a path")
    return name
