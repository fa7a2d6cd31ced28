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

from heron.config.errors import RetrievalError
from heron.shards.artefact import MANIFEST, Artefact, FileSum
from heron.shards.atomic import kept_in_cache
from heron.shards.cache import LocalFile, ShardCache
from heron.shards.remote import Missing
from heron.shards.remote_build import RemoteFolder
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
class FolderOutput:
    """A folder that is written file by file, each atomically."""

    folder: Path
    lock: None = None  # beside the folder: see `atomic.locked`

    def __str__(self) -> str:
        """Returns its path."""
        return str(self.folder)

    def read(self, name: str) -> bytes:
        """Returns the bytes of a small file; raises Missing if there is none."""
        path = self.folder / name
        return open_store(path.parent).read_bytes(path.name)

    def has(self, name: str) -> bool:
        """Returns whether there is a file with this name."""
        return (self.folder / name).exists()

    def has_files(self, files: dict[str, FileSum]) -> bool:
        """Returns whether the files are there, undamaged."""
        return not any(file.fault(self.folder / name) for name, file in files.items())

    @contextmanager
    def writing(self, last: str) -> Iterator[Path]:
        """Gives the folder itself."""
        yield self.folder


@dataclass(frozen=True)
class RemoteOutput:
    """A folder behind a URL; its files are written here first, and put when they are whole."""

    url: str
    _names: dict[str, set[str]] = field(default_factory=dict, repr=False, compare=False)

    def __str__(self) -> str:
        """Returns its address, without passwords."""
        return str(open_store(self.url))

    @property
    def lock(self) -> Path:
        """Where this machine's commands that write it see each other."""
        return kept_in_cache("lock", self.url)

    def folder(self, name: str = "") -> tuple[RemoteFolder, str]:
        """Returns the folder to put a file into, and the file's name there."""
        url, plain = subfolder(self.url, name)
        return RemoteFolder.open(url), plain

    def read(self, name: str) -> bytes:
        """Returns the bytes of a small file; raises Missing if there is none."""
        folder, plain = self.folder(name)
        return folder.store.read_bytes(plain)

    def has(self, name: str) -> bool:
        """Returns whether a file was there when its folder was first asked for: it is listed once.

        To list it for each of many parts would take the square of their time.
        """
        folder, _, plain = name.rpartition("/")
        if folder not in self._names:
            self._names[folder] = self.folder(name)[0].names()
        return plain in self._names[folder]

    def has_files(self, files: dict[str, FileSum]) -> bool:
        """Returns whether the files are there; each was read back when it was put."""
        return all(map(self.has, files))

    @contextmanager
    def writing(self, last: str) -> Iterator[Path]:
        """Gives an empty folder; puts what was written there, `last` after all other files."""
        with TemporaryDirectory(prefix="heron-") as temporary:
            local = Path(temporary)
            yield local
            files = sorted(path for path in local.rglob("*") if path.is_file())
            for path in sorted(files, key=lambda path: path == local / last):
                self.folder(str(path.relative_to(local)))[0].put(path)

    def refuse_taken(self, overwrite: bool, ours: Callable[[set[str]], bool]) -> set[str]:
        """Returns the names that are there; RetrievalError unless `ours` says to go on."""
        names = RemoteFolder.open(self.url, overwrite).names()
        if names and not ours(names):
            raise RetrievalError(
                f"{self} already has files; choose another --out, or remove what is there"
            )
        return names


Output = FolderOutput | RemoteOutput


def open_output(out: str | Path) -> Output:
    """Returns the place that a path or a URL names; nothing is made yet."""
    return RemoteOutput(str(out)) if is_remote(str(out)) else FolderOutput(Path(out))
