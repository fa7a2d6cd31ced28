"""CIFAR-10 and CIFAR-100: the archive of their Python version as it is, or unpacked."""

from __future__ import annotations

import gzip
import tarfile
import zlib
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from heron.shards.errors import DOWNLOAD, SourceError
from heron.shards.manifest import Labels
from heron.shards.sources.base import FileOrFolder, InMemory, Loaded, split_ranges
from heron.shards.sources.pickled import read_pickle, text
from heron.shards.sources.zips import HTML, is_html

SIDE, CHANNELS = 32, 3
PIXELS = SIDE * SIDE * CHANNELS  # of a row: the red plane, the green and the blue, row by row
MOST_BYTES = 1 << 28  # of an archive that is unpacked, or of a file; either archive has 187 MB
EXPECTED = "cifar-10-python.tar.gz or cifar-100-python.tar.gz, or what is in one"
LESS = f"expected less than {MOST_BYTES:,}, which is more than CIFAR has; {DOWNLOAD}"
GROUPS = ["animal", "vehicle"]  # of CIFAR-10, whose files have no second level
VEHICLES = ("airplane", "automobile", "ship", "truck")
ANIMALS = ("bird", "cat", "deer", "dog", "frog", "horse")


class _Edition(NamedTuple):
    """What the publisher calls the files of a data set, and the things in them."""

    name: str
    batches: dict[str, tuple[str, ...]]  # split -> files
    meta: str
    names: tuple[str, ...]  # of the classes in `meta`, coarse to fine
    labels: tuple[str, ...]  # in a batch, coarse to fine

    @property
    def files(self) -> tuple[str, ...]:
        """All the files that are read."""
        return (*(file for files in self.batches.values() for file in files), self.meta)


EDITIONS = (
    _Edition(
        "cifar-10",
        {"train": tuple(f"data_batch_{n}" for n in range(1, 6)), "test": ("test_batch",)},
        "batches.meta",
        ("label_names",),
        ("labels",),
    ),
    _Edition(
        "cifar-100",
        {"train": ("train",), "test": ("test",)},
        "meta",
        ("coarse_label_names", "fine_label_names"),
        ("coarse_labels", "fine_labels"),
    ),
)


class Cifar(InMemory):
    """CIFAR-10 and CIFAR-100: the archive of the Python version as it is, or unpacked.

    Pictures are kept as raw pixels, with nothing lost. Labels of CIFAR-100 are a hierarchy, in
    which a fine class is named by its path, such as fish/shark; those of CIFAR-10 are classes, or
    on demand a hierarchy of animal and vehicle. Classes keep the publisher's numbers. The files
    are pickles: they are read, never executed.
    """

    name: ClassVar[str] = "cifar"
    examples: ClassVar[str] = (
        "heron shards build cifar --path cifar-100-python.tar.gz --out data/cifar100"
    )

    path: FileOrFolder = Field(
        description="cifar-10-python.tar.gz or cifar-100-python.tar.gz as it is, or the folder "
        "cifar-10-batches-py or cifar-100-python"
    )
    label_kind: Literal["multi_class", "hierarchical"] | None = Field(
        None,
        description="multi_class: the 10 or 100 classes; hierarchical: the 20 coarse classes above "
        "the 100, animal and vehicle above the 10 (default: hierarchical for CIFAR-100)",
    )
    merge: bool = Field(
        False, description="true: one split `all`, train and then test; false: train and test"
    )

    @property
    def dataset(self) -> str:
        """`cifar-10` or `cifar-100`, as the files are."""
        return self.loaded.dataset

    @property
    def files(self) -> list[Path]:
        """The archive, or the files of the folder that are read."""
        if self.path.is_dir():
            return [self.path / file for file in _folder_edition(self.path, self._title).files]
        return [self.path]

    def load(self) -> Loaded:
        """Lays the batches of both splits end to end, in the order of their names."""
        edition, names, found = self._read_files()
        batches = [found[file] for files in edition.batches.values() for file in files]
        planes = np.concatenate([batch.pixels for batch in batches])
        images = planes.reshape(-1, CHANNELS, SIDE, SIDE).transpose(0, 2, 3, 1)
        fine = np.concatenate([batch.labels[:, -1] for batch in batches])
        sizes = {
            split: sum(len(found[file].pixels) for file in files)
            for split, files in edition.batches.items()
        }
        default = "hierarchical" if len(names) > 1 else "multi_class"
        if (self.label_kind or default) == "hierarchical":
            parents = self._parents(names, found)
            coarse = names[0] if len(names) > 1 else GROUPS
            paths = [f"{coarse[p]}/{name}" for p, name in zip(parents, names[-1], strict=True)]
            labels = Labels(kind="hierarchical", names=paths, levels=[coarse, paths])
            targets = np.stack([parents[fine], fine], 1)
        else:
            labels = Labels(kind="multi_class", names=names[-1])
            targets = fine
        splits = split_ranges(sizes, self.merge)
        return Loaded({"image": images}, targets, labels, splits, edition.name)

    def _parents(self, names: list[list[str]], batches: dict[str, _Batch]) -> NDArray[np.int64]:
        """Returns the coarse class of each class; CIFAR-100's rows must agree about it."""
        if len(names) == 1:
            for name in names[0]:
                if name not in VEHICLES + ANIMALS:
                    raise SourceError(
                        f"{self._title}: class {name!r} is neither animal nor vehicle; expected "
                        "CIFAR-10's; give its own files, or ask for --label-kind multi_class"
                    )
            return np.array([int(name in VEHICLES) for name in names[0]])
        parents = np.full(len(names[1]), -1)
        for file, batch in batches.items():
            coarse, fine = batch.labels.T
            new = parents[fine] < 0
            parents[fine[new]] = coarse[new]
            if len(bad := np.flatnonzero(parents[fine] != coarse)):
                row = int(bad[0])
                raise SourceError(
                    f"{self._title}, {file}: row {row} is {names[1][fine[row]]!r} in "
                    f"{names[0][coarse[row]]!r}; expected {names[0][parents[fine[row]]]!r}, as in "
                    f"other rows; {DOWNLOAD}"
                )
        if len(bare := np.flatnonzero(parents < 0)):
            raise SourceError(
                f"{self._title}: no row is {names[1][bare[0]]!r}, so that its coarse class is "
                "not known; expected rows of every class; ask for --label-kind multi_class"
            )
        return parents

    def _read_files(self) -> tuple[_Edition, list[list[str]], dict[str, _Batch]]:
        """Returns the names of the classes, coarse to fine, and the batches by their files."""
        title = self._title
        if self.path.is_dir():
            edition, pickles = _load_folder(self.path, title)
        else:
            edition, pickles = _load_archive(self.path)
        meta = pickles.pop(edition.meta)
        names = [_names(f"{title}, {edition.meta}", meta, key) for key in edition.names]
        batches = {
            file: _batch(f"{title}, {file}", batch, edition.labels, names)
            for file, batch in pickles.items()
            if file in edition.files
        }
        return edition, names, batches

    @property
    def _title(self) -> str:
        return self.path.resolve().name


class _Batch(NamedTuple):
    """A file of rows: uint8 [rows, 3072] and int64 [rows, levels], coarse to fine."""

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int64]


def _edition(title: str, held: set[str]) -> _Edition:
    """Returns the data set that the files are of; SourceError where they are not all of one."""
    edition = max(EDITIONS, key=lambda e: len(held.intersection(e.files)) / len(e.files))
    missing = [file for file in edition.files if file not in held]
    if len(missing) == len(edition.files):
        raise SourceError(f"{title}: no file of CIFAR; expected {EXPECTED}; give another --path")
    if missing:
        raise SourceError(
            f"{title}: no {', '.join(missing)}; expected the Python version of {edition.name}, "
            f"whole; {DOWNLOAD}"
        )
    return edition


def _folder_edition(folder: Path, title: str) -> _Edition:
    return _edition(title, {path.name for path in folder.iterdir() if path.is_file()})


def _load_folder(folder: Path, title: str) -> tuple[_Edition, dict[str, Any]]:
    """Returns the pickles of a folder, by their file names."""
    edition = _folder_edition(folder, title)
    pickles = {}
    for file in edition.files:
        where = f"{title}, {file}"
        if (size := (folder / file).stat().st_size) > MOST_BYTES:
            raise SourceError(f"{where}: {size:,} bytes; {LESS}")
        pickles[file] = read_pickle((folder / file).read_bytes(), where)
    return edition, pickles


def _load_archive(archive: Path) -> tuple[_Edition, dict[str, Any]]:
    """Returns the pickles of an archive, by their file names alone: no folder is made.

    The archive is read to its end, so that gzip's checksum is compared.
    """
    wanted = {file for edition in EDITIONS for file in edition.files}
    pickles: dict[str, Any] = {}
    with archive.open("rb") as stream:
        if is_html(stream.read(64)):
            raise SourceError(f"{archive.name}: {HTML}; expected {EXPECTED}; {DOWNLOAD}")
    try:
        with _Bounded(archive) as unpacked, tarfile.open(fileobj=unpacked, mode="r|") as tar:
            for member in tar:
                file = member.name.rpartition("/")[2]
                if file not in wanted or not member.isreg():
                    continue
                where = f"{archive.name}, {file}"
                if file in pickles:
                    raise SourceError(f"{where}: comes twice; expected it once; {DOWNLOAD}")
                pickles[file] = read_pickle(_payload(tar, member), where)
            while unpacked.read(1 << 20):
                pass
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError) as fault:
        raise SourceError(
            f"{archive.name}: cut short, damaged or no archive ({fault}); expected {EXPECTED}; "
            f"{DOWNLOAD}"
        ) from None
    return _edition(archive.name, set(pickles)), pickles


def _payload(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    if member.issparse() or (stream := tar.extractfile(member)) is None:
        raise tarfile.ReadError("a sparse file")  # may claim any size, filled with zeros
    return stream.read()


class _Bounded(gzip.GzipFile):
    """A gzip that is read no further than any CIFAR is long: a bomb is not set off."""

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        if self.tell() > MOST_BYTES:
            raise SourceError(f"{Path(self.name).name}: unpacks to too many bytes; {LESS}")
        return data


def _names(where: str, meta: Any, key: str) -> list[str]:
    names = _entry(where, meta, key)
    try:
        return [text(name) for name in names]
    except (ValueError, TypeError):
        raise SourceError(
            f"{where}: {key!r} is no list of texts; expected names; {DOWNLOAD}"
        ) from None


def _batch(where: str, batch: Any, keys: tuple[str, ...], names: list[list[str]]) -> _Batch:
    pixels = _entry(where, batch, "data")
    if not isinstance(pixels, np.ndarray) or pixels.ndim != 2 or pixels.shape[1] != PIXELS:
        found = pixels.shape if isinstance(pixels, np.ndarray) else type(pixels).__name__
        raise SourceError(
            f"{where}: 'data' is {found}; expected bytes [rows, {PIXELS}], of 32 × 32 pixels in "
            f"three channels; {DOWNLOAD}"
        )
    columns = []
    for key, level in zip(keys, names, strict=True):
        column = _entry(where, batch, key)
        if not isinstance(column, list) or len(column) != len(pixels):
            found = len(column) if isinstance(column, list) else type(column).__name__
            raise SourceError(
                f"{where}: {key!r} is {found}; expected a list of {len(pixels)}, a label for each "
                f"row of 'data'; {DOWNLOAD}"
            )
        for row, label in enumerate(column):
            if type(label) is not int or not 0 <= label < len(level):
                shown = label if type(label) is int else type(label).__name__
                raise SourceError(
                    f"{where}: {key!r} of row {row} is {shown}; expected 0 to {len(level) - 1}; "
                    f"{DOWNLOAD}"
                )
        columns.append(np.array(column, np.int64))
    return _Batch(pixels, np.stack(columns, 1))


def _entry(where: str, entries: Any, key: str) -> Any:
    if not isinstance(entries, dict) or key not in entries:
        found = ", ".join(list(entries)[:9]) if isinstance(entries, dict) else "no dict"
        raise SourceError(f"{where}: no {key!r}; found {found:.80}; expected it there; {DOWNLOAD}")
    return entries[key]
