"""CIFAR-10 and CIFAR-100: the archive of the Python version."""

import tarfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, FilePath

from heron.base.errors import DOWNLOAD_AGAIN, SourceError
from heron.shards.manifest import Labels
from heron.sources.base import FileSource, Loaded, split_ranges
from heron.sources.pickled import decode_text, read_pickle
from heron.sources.zips import open_unpacked

SIDE, CHANNELS = 32, 3
PIXELS = SIDE * SIDE * CHANNELS  # of a row: the red plane, the green and the blue, row by row
EXPECTED = "cifar-10-python.tar.gz or cifar-100-python.tar.gz, as its publisher distributes it"
GROUPS = ["animal", "vehicle"]  # of CIFAR-10, whose files have no second level
VEHICLES = ("airplane", "automobile", "ship", "truck")
ANIMALS = ("bird", "cat", "deer", "dog", "frog", "horse")


class _Edition(NamedTuple):
    """The names that the publisher gives the files of a data set and their entries."""

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


# The rows of a file: pixels [rows, 3072] and labels [rows, levels], coarse to fine.
_Batch = tuple[NDArray[np.uint8], NDArray[np.int64]]


class Cifar(FileSource):
    """CIFAR-10 and CIFAR-100: the archive of the Python version as it is.

    Pictures are stored as raw pixels, without loss. Labels of CIFAR-100 are a hierarchy, in which a
    fine class is named by its path, such as fish/shark; those of CIFAR-10 are classes, or on demand
    a hierarchy of animal and vehicle. Classes keep the publisher's numbers. The files are pickles:
    they are read, never executed.
    """

    name: ClassVar[str] = "cifar"
    examples: ClassVar[str] = (
        "heron shards build cifar --path cifar-100-python.tar.gz --out data/cifar100"
    )

    path: FilePath = Field(description="cifar-10-python.tar.gz or cifar-100-python.tar.gz")
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
        """`cifar-10` or `cifar-100`, depending on the files."""
        return self.loaded.dataset

    def load(self) -> Loaded:
        """Concatenates the batches of train and then test, in the order of their names."""
        pickles = self._read_pickles()
        edition = self._edition(pickles)
        names = [
            _texts(f"{self._title}, {edition.meta}", pickles[edition.meta], key)
            for key in edition.names
        ]
        batches = {
            file: _batch(f"{self._title}, {file}", pickles[file], edition.labels, names)
            for files in edition.batches.values()
            for file in files
        }
        planes, targets = map(np.concatenate, zip(*batches.values(), strict=True))
        labels = Labels(kind="multi_class", names=names[-1])
        default = "hierarchical" if len(names) > 1 else "multi_class"
        if (self.label_kind or default) == "hierarchical":
            coarse = names[0] if len(names) > 1 else GROUPS
            parents = self._parents(names, batches)
            paths = [f"{coarse[p]}/{name}" for p, name in zip(parents, names[-1], strict=True)]
            labels = Labels(kind="hierarchical", names=paths, levels=[coarse, paths])
            targets = np.stack([parents[targets[:, -1]], targets[:, -1]], 1)
        rows = {
            split: sum(len(batches[file][0]) for file in files)
            for split, files in edition.batches.items()
        }
        return Loaded(
            views={"image": planes.reshape(-1, CHANNELS, SIDE, SIDE).transpose(0, 2, 3, 1)},
            targets=targets if labels.levels else targets[:, -1],
            labels=labels,
            splits=split_ranges(rows, self.merge),
            dataset=edition.name,
        )

    def _parents(self, names: list[list[str]], batches: dict[str, _Batch]) -> NDArray[np.int64]:
        """Returns the coarse class of each class, on which CIFAR-100's rows must agree."""
        fine = names[-1]
        if len(names) == 1:
            if unknown := [name for name in fine if name not in VEHICLES + ANIMALS]:
                raise SourceError(
                    f"{self._title}: class {unknown[0]!r} is neither animal nor vehicle, the "
                    "levels of CIFAR-10; pass its own files, or use --label-kind multi_class"
                )
            return np.array([int(name in VEHICLES) for name in fine])
        pairs = np.unique(np.concatenate([labels for _, labels in batches.values()]), axis=0)
        counts = np.bincount(pairs[:, 1], minlength=len(fine))
        if len(bad := np.flatnonzero(counts != 1)):
            raise SourceError(
                f"{self._title}: class {fine[bad[0]]!r} is in {counts[bad[0]]} coarse classes, not "
                f"in one; {DOWNLOAD_AGAIN}, or use --label-kind multi_class"
            )
        parents: NDArray[np.int64] = pairs[np.argsort(pairs[:, 1]), 0]
        return parents

    @property
    def _title(self) -> str:
        return self.path.resolve().name

    def _edition(self, present: Collection[str]) -> _Edition:
        """Returns the data set of these files; SourceError unless all of its files are there."""
        edition = max(EDITIONS, key=lambda e: sum(f in present for f in e.files) / len(e.files))
        missing = [file for file in edition.files if file not in present]
        if len(missing) == len(edition.files):
            fault = f"no file of CIFAR; pass another --path: {EXPECTED}"
        elif missing:
            fault = (
                f"no {', '.join(missing)}, so this is not the whole Python version of "
                f"{edition.name}; {DOWNLOAD_AGAIN}"
            )
        else:
            return edition
        raise SourceError(f"{self._title}: {fault}")

    def _read_pickles(self) -> dict[str, Any]:
        """Reads the pickles by file name; an archive is not unpacked to a folder."""
        pickles: dict[str, Any] = {}
        for file, data in _read_archive(self.path):
            where = f"{self._title}, {file}"
            if file in pickles:
                raise SourceError(f"{where} occurs twice; {DOWNLOAD_AGAIN}")
            pickles[file] = read_pickle(data, where)
        return pickles


def _read_archive(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Yields the files of an archive, and reads it to its end, where gzip verifies its checksum."""
    try:
        with open_unpacked(archive) as unpacked, tarfile.open(fileobj=unpacked, mode="r|") as tar:
            for member in tar:
                file = member.name.rpartition("/")[2]
                if member.isreg() and any(file in edition.files for edition in EDITIONS):
                    data = tar.extractfile(member)
                    if data is None or member.issparse():  # may claim any size, all zeros
                        raise tarfile.ReadError("a sparse file")
                    yield file, data.read()
            while unpacked.read(1 << 20):
                pass
    except (tarfile.TarError, EOFError) as fault:
        raise SourceError(
            f"{archive.name} is cut short, damaged or not an archive ({fault}); it must be "
            f"{EXPECTED}; {DOWNLOAD_AGAIN}"
        ) from None


def _texts(where: str, meta: Any, key: str) -> list[str]:
    names = _entry(where, meta, key)
    try:
        return [decode_text(name) for name in names]
    except (ValueError, TypeError):
        raise SourceError(f"{where}: {key!r} is not a list of names; {DOWNLOAD_AGAIN}") from None


def _batch(where: str, batch: Any, keys: tuple[str, ...], names: list[list[str]]) -> _Batch:
    pixels, columns = _entry(where, batch, "data"), [_entry(where, batch, key) for key in keys]
    if getattr(pixels, "shape", ())[1:] != (PIXELS,):
        actual = getattr(pixels, "shape", type(pixels).__name__)
        raise SourceError(
            f"{where}: 'data' must be bytes [rows, {PIXELS}], of 32 × 32 pixels in three "
            f"channels, got {actual}; {DOWNLOAD_AGAIN}"
        )
    for key, column, level in zip(keys, columns, names, strict=True):
        valid = isinstance(column, list) and len(column) == len(pixels)
        if not valid or any(type(x) is not int or not 0 <= x < len(level) for x in column):
            raise SourceError(
                f"{where}: {key!r} must be a list of {len(pixels)} numbers from 0 to "
                f"{len(level) - 1}, a label for each row of 'data'; {DOWNLOAD_AGAIN}"
            )
    return pixels, np.array(columns, np.int64).T


def _entry(where: str, entries: Any, key: str) -> Any:
    if not isinstance(entries, dict) or key not in entries:
        keys = ", ".join(list(entries)[:9]) if isinstance(entries, dict) else "no dict"
        raise SourceError(f"{where} has no {key!r}, only {keys:.80}; {DOWNLOAD_AGAIN}")
    return entries[key]
