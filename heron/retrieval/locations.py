"""Where embeddings and indexes are: in a folder, or behind a URL that fsspec reads and writes.

What is behind a URL is written whole and read back, the manifest last; it is read by way of the
cache of shards.
"""

import shutil
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from threading import Lock
from typing import TypeVar

from heron.base.artefact import MANIFEST, Artefact, FileSum
from heron.base.atomic import aside_name, kept_in_cache, make_room, refuse_taken
from heron.base.errors import RetrievalError
from heron.shards.cache import LocalFile, ShardCache
from heron.shards.remote import Missing
from heron.shards.remote_build import open_folder
from heron.shards.store import Store, is_remote, open_store

A = TypeVar("A", bound=Artefact)


def subfolder(url: str, name: str) -> tuple[str, str]:
    """Returns the URL of the folder that has a file such as `hidden/00000.npy`, and its name."""
    folder, _, plain = name.rpartition("/")
    address, mark, query = url.partition("?")
    return f"{address.rstrip('/')}/{folder}{mark}{query}" if folder else url, plain


@dataclass
class Fetched:
    """A folder behind a URL: its files appear in a folder of this machine as they are needed.

    They are links into the cache, which keeps a file as long as it is held here.
    """

    url: str
    folder: Path = field(default_factory=lambda: Path(mkdtemp(prefix="heron-")))  # on this machine
    _held: dict[str, LocalFile] = field(default_factory=dict)
    _cache: ShardCache = field(default_factory=ShardCache)
    _lock: Lock = field(default_factory=Lock)

    def __post_init__(self) -> None:
        """Has the links removed with this object."""
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)

    def __str__(self) -> str:
        """Returns the address, without passwords."""
        return str(open_store(self.url))

    def manifest(self, kind: type[A], remedy: Callable[[Store], str]) -> A:
        """Fetches and checks the manifest; raises its error, with a remedy, if there is none."""
        store = open_store(self.url)
        try:
            data = store.read_bytes(MANIFEST)
        except Missing:
            text = f"cannot read {kind.description}: {store} has no {MANIFEST}; {remedy(store)}"
            raise kind.error(text) from None
        manifest = kind.parse(data, store.where(MANIFEST))
        (self.folder / MANIFEST).write_bytes(data)
        return manifest

    def fetch(self, name: str, file: FileSum) -> Path:
        """Returns the path of a file here; it is fetched, and checked, if the cache lacks it."""
        path = self.folder / name
        if name not in self._held:
            url, plain = subfolder(self.url, name)
            store = open_store(url, self._cache)
            self._held[name] = store.local(plain, file.bytes, file.sha256)
            path.parent.mkdir(exist_ok=True)
            path.symlink_to(self._held[name].path)
        return path

    @contextmanager
    def opened(self, name: str, file: FileSum) -> Iterator[Path]:
        """Fetches a file to map it, one thread at a time; then the cache may evict it.

        What is mapped of it stays readable.
        """
        with self._lock:
            path = self.fetch(name, file)
            try:
                yield path
            finally:
                path.unlink()
                self._held.pop(name).close()


@dataclass(frozen=True)
class Output:
    """A folder whose files are written atomically, here or behind a URL.

    What goes behind a URL is written here first, and put when it is whole.
    """

    place: str | Path
    _names: dict[str, set[str]] = field(default_factory=dict, repr=False, compare=False)

    def __str__(self) -> str:
        """Returns its path, or its address without passwords."""
        return str(open_store(self.place))

    @property
    def folder(self) -> Path | None:
        """The folder on this machine; None behind a URL."""
        return None if is_remote(str(self.place)) else Path(self.place)

    @property
    def lock(self) -> Path | None:
        """Where this machine's commands that write behind a URL see each other."""
        return kept_in_cache("lock", self.place) if self.folder is None else None

    @property
    def remedy(self) -> str:
        """What to do where it has other files, but to choose another one."""
        if self.folder is None:
            return "remove what is there"
        return f"add --overwrite, which moves {self} to {aside_name(self.folder)}"

    def claim(self, overwrite: bool, ours: Callable[[set[str]], bool]) -> set[str]:
        """Returns the names that are there; RetrievalError unless `ours` says to go on.

        With `overwrite` a folder is moved aside first.
        """
        names = set[str]()
        if self.folder is None:
            names = open_folder(str(self.place), overwrite).names() or set()
            if names and not ours(names):
                raise RetrievalError(
                    f"{self} already has files; choose another --out, or {self.remedy}"
                )
            return names
        if overwrite:
            make_room(self.folder, overwrite, RetrievalError)
        elif self.folder.is_dir():
            names = {path.name for path in self.folder.iterdir()}
        if not ours(names):
            refuse_taken(self.folder, False, RetrievalError)
        self.folder.mkdir(parents=True, exist_ok=True)
        return names

    def read(self, name: str) -> bytes:
        """Returns the bytes of a small file; raises Missing if there is none."""
        if self.folder is not None:
            path = self.folder / name
            return open_store(path.parent).read_bytes(path.name)
        url, plain = subfolder(str(self.place), name)
        return open_store(url).read_bytes(plain)

    def has(self, name: str) -> bool:
        """Returns whether there is a file; a folder behind a URL is listed once.

        To list it for each of many parts would take the square of their time.
        """
        if self.folder is not None:
            return (self.folder / name).exists()
        url, plain = subfolder(str(self.place), name)
        if url not in self._names:
            self._names[url] = open_folder(url).names() or set()
        return plain in self._names[url]

    def has_files(self, files: dict[str, FileSum]) -> bool:
        """Returns whether the files are there, undamaged; those put were read back then."""
        if self.folder is None:
            return all(map(self.has, files))
        return not any(file.fault(self.folder / name) for name, file in files.items())

    @contextmanager
    def writing(self, last: str) -> Iterator[Path]:
        """Gives a folder to write to; what is put from it is put with `last` after all others."""
        if self.folder is not None:
            yield self.folder
            return
        with TemporaryDirectory(prefix="heron-") as temporary:
            local = Path(temporary)
            yield local
            files = sorted(path for path in local.rglob("*") if path.is_file())
            for path in sorted(files, key=lambda path: path == local / last):
                url, _ = subfolder(str(self.place), str(path.relative_to(local)))
                open_folder(url).put(path)
