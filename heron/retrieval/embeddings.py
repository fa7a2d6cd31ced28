"""Embeddings in a folder or in memory: their vectors, the sample of each, and what made them."""

import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from heron.base.artefact import MANIFEST, Artefact, Count, FileSum, Fingerprint, Record, Sha256
from heron.base.errors import RetrievalError
from heron.retrieval.locations import Fetched
from heron.retrieval.samples import FILES, Samples, map_array
from heron.shards.store import Store, is_remote, open_store

FORMAT: Literal[2] = 2  # of the manifests of embeddings and of indexes
EMBED_AGAIN = "embed again, into an empty folder"
PLAN = "plan.json"  # what an unfinished embedding is to become
BLOCK = 65_536  # vectors read at a time
Layer = Literal["hidden", "projection", "weight"]
Role = Literal["labelled", "unlabelled", "test", "validation"]  # of rows in a run
LAYERS: tuple[Layer, ...] = get_args(Layer)
Width = Annotated[int, Field(ge=1, le=2**24)]  # of vectors


class LayerRecord(Record):
    """The shape and type of one layer's vectors.

    `hidden` is S, the features that the classifier sees; `projection` the projections z and
    `weight` HeroCon's H(z), of each view a unit vector, side by side (`views` of them).
    """

    dim: Width
    dtype: Literal["float32", "float16"]
    views: Width


class ViewRecord(Record):
    """A view that the classifier sees: the stored view's name, and its numbers in `hidden`."""

    stored: str
    width: Width


class Part(Record):
    """Vectors of consecutive samples: how many, and each layer's file."""

    count: Count
    files: dict[Layer, FileSum]


class PartManifest(Artefact):
    """A part as it was written, and its rows that could not be read."""

    description: ClassVar[str] = "the manifest of a part"
    error: ClassVar[type[RetrievalError]] = RetrievalError
    remedy: ClassVar[str] = "embed it again"
    versions: ClassVar[tuple[int, ...]] = (FORMAT,)

    format: Literal[2]
    part: Part
    lost: dict[Count, str]


class EmbeddingsManifest(Artefact):
    """What a folder of embeddings holds.

    `checkpoint` is the sha256 of the weights, `data_fingerprint` the data set's; `lost` maps the
    rows that could not be read, by number, to why. `views` are in the order of their numbers in a
    vector; `missing` are the stored views that the data set lacks, whose numbers are zeros.
    """

    description: ClassVar[str] = "the manifest of embeddings"
    error: ClassVar[type[RetrievalError]] = RetrievalError
    remedy: ClassVar[str] = EMBED_AGAIN
    versions: ClassVar[tuple[int, ...]] = (FORMAT,)

    format: Literal[2]
    run: str
    checkpoint: Sha256
    data: str
    data_fingerprint: Fingerprint
    precision: str
    rows: Count
    views: list[ViewRecord] = []
    missing: list[str] = []
    layers: dict[Layer, LayerRecord] = Field(min_length=1)
    parts: list[Part]
    samples: dict[str, FileSum]
    lost: dict[Count, str]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if any(part.files.keys() != self.layers.keys() for part in self.parts):
            raise ValueError(
                f"every part must have one file of each layer: {', '.join(self.layers)}"
            )
        if sorted(self.samples) != sorted(FILES):
            raise ValueError(f"samples must be {', '.join(FILES)}, got {sorted(self.samples)}")
        if (total := sum(part.count for part in self.parts)) != self.rows:
            raise ValueError(f"the parts have {total:,} vectors instead of {self.rows:,}")
        return self

    @property
    def files(self) -> dict[str, FileSum]:
        """Every file of the folder, by name."""
        parts = enumerate(self.parts)
        named = {part_name(k, n): file for n, part in parts for k, file in part.files.items()}
        return self.samples | named


class Embeddings:
    """What `heron embed` wrote, in a folder or behind a URL; vectors are memory-mapped."""

    def __init__(
        self, folder: Path, manifest: EmbeddingsManifest, fetched: Fetched | None = None
    ) -> None:
        """Maps the samples; see `open`. `fetched` is the folder behind a URL, `folder` its copy."""
        self.folder, self.manifest, self.fetched = folder, manifest, fetched
        self.where = str(fetched or folder)  # what messages and manifests call it
        self.samples = Samples.load(self.folder)
        self.layers: dict[Layer, LayerRecord] = manifest.layers
        self.compares = ""  # what is compared, in words, if not all: see `EmbeddingsOfViews`
        # The number of each part's first vector, and at the end how many there are.
        self.starts = np.cumsum([0, *(part.count for part in manifest.parts)], dtype=np.int64)
        if len(self.samples) != len(self):
            raise RetrievalError(
                f"{self.where} has {len(self.samples):,} samples but {len(self):,} vectors; "
                f"{EMBED_AGAIN}"
            )

    @classmethod
    def open(cls, folder: str | Path, verify: bool = True) -> Self:
        """Opens a folder of embeddings; checks file sizes and, with `verify`, checksums.

        Of a folder behind a URL, files are checked as they are fetched, which is when they are
        read. Raises a RetrievalError if it holds none, or they are unfinished or damaged.
        """

        def remedy(store: Store) -> str:
            if store.exists(PLAN):
                return (
                    "this is an unfinished `heron embed`; run the same command again to finish it"
                )
            return "pass a folder that `heron embed` wrote"

        if is_remote(str(folder)):
            fetched = Fetched(str(folder))
            manifest = fetched.manifest(EmbeddingsManifest, remedy)
            for name, file in manifest.samples.items():
                fetched.fetch(name, file)
            return cls(fetched.folder, manifest, fetched)
        folder = Path(folder)
        manifest = EmbeddingsManifest.read(folder / MANIFEST, remedy(open_store(folder)))
        manifest.check_files(folder, manifest.files, verify)
        return cls(folder, manifest)

    def __reduce__(self) -> tuple[Any, ...]:
        """Sends how another process opens them; files are not verified again."""
        return Embeddings.open, (self.fetched.url if self.fetched else str(self.folder), False)

    def __len__(self) -> int:
        """Returns how many samples there are."""
        return int(self.starts[-1])

    @property
    def views(self) -> list[str]:
        """The stored views that there are numbers of; none if the manifest names none."""
        manifest = self.manifest
        return [
            *dict.fromkeys(v.stored for v in manifest.views if v.stored not in manifest.missing)
        ]

    @property
    def default_layer(self) -> Layer:
        """The layer that is indexed by default: `hidden`, or the only one."""
        first, *others = self.manifest.layers
        return "hidden" if others else first

    def layer(self, name: Layer) -> LayerRecord:
        """Returns the record of a layer; raises a RetrievalError if there is no such layer."""
        if name not in self.layers:
            raise RetrievalError(
                f"{self.where} has no layer '{name}', only {', '.join(self.layers)}; use one of "
                "these, or embed a model that has it"
            )
        return self.layers[name]

    def part_bytes(self, name: Layer) -> int:
        """Returns the bytes of a layer's largest file, which is mapped while it is read."""
        layer, largest = self.layer(name), max(part.count for part in self.manifest.parts)
        return largest * layer.dim * np.dtype(layer.dtype).itemsize

    def origin(self) -> dict[str, Any]:
        """Returns the fields of an index's manifest that say where its vectors come from."""
        same = {"checkpoint", "run", "data", "data_fingerprint", "missing"}
        own = {"embeddings": self.where, "embeddings_fingerprint": self.manifest.fingerprint}
        return self.manifest.model_dump(include=same) | own | {"views": self.views}

    def copy_samples(self, folder: Path) -> dict[str, FileSum]:
        """Copies keys and labels to a folder; returns the size and checksum of each file."""
        for name in FILES:
            shutil.copyfile(self.folder / name, folder / name)
        self.manifest.check_files(folder, self.manifest.samples)
        return self.manifest.samples

    def _part(self, layer: Layer, number: int) -> NDArray[Any]:
        record, name = self.layer(layer), part_name(layer, number)
        path = self.folder / name
        if self.fetched is None:
            array = map_array(path, EMBED_AGAIN)
        else:
            with self.fetched.opened(name, self.manifest.parts[number].files[layer]):
                array = map_array(path, EMBED_AGAIN)
        shape = (self.manifest.parts[number].count, record.dim)
        if array.shape != shape or array.dtype != record.dtype:
            raise RetrievalError(
                f"{path} is {array.dtype} {array.shape} instead of {record.dtype} {shape}; "
                f"{EMBED_AGAIN}"
            )
        return array

    def blocks(
        self, layer: Layer, rows: int = BLOCK, part: int | None = None
    ) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Yields all vectors, or those of a part: number of the first, float32 [<= rows, dim]."""
        for number, start in enumerate(self.starts[:-1].tolist()):
            if part not in (None, number):
                continue
            array = self._part(layer, number)
            for first in range(0, len(array), rows):
                yield start + first, np.asarray(array[first : first + rows], np.float32)

    def take(self, layer: Layer, numbers: NDArray[np.int64]) -> NDArray[np.float32]:
        """Returns the vectors of some samples, float32 [numbers, dim], in their order."""
        vectors = np.empty((len(numbers), self.layer(layer).dim), np.float32)
        parts = np.searchsorted(self.starts, numbers, side="right") - 1
        for number in np.unique(parts).tolist():
            in_part = parts == number
            vectors[in_part] = self._part(layer, number)[numbers[in_part] - self.starts[number]]
        return vectors


def compared(given: Collection[str], others: Collection[str], lacking: Collection[str] = ()) -> str:
    """Returns which views are compared, in words; "" if all are.

    `others` are not given, and `lacking` not in the data set.
    """
    rest = ""
    for names, where in ((others, "given"), (lacking, "in the data set")):
        if names:
            rest += f"; {', '.join(names)} {'is' if len(names) == 1 else 'are'} not {where}"
    same = "the same view" if len(given) == 1 else "the same views"
    return f"{', '.join(given)} with {same} of each sample{rest}" if rest else ""


def choose_data(data: str | None, named: str, by: str) -> str:
    """Returns the user's shards, else those that the manifest of `by` names.

    Raises a RetrievalError if those are remote: they are fetched only when the user gives them.
    """
    if data is None and is_remote(named):
        raise RetrievalError(
            f"{by} uses the data set {named}, which is only fetched if you name it; add --data "
            f"{named}"
        )
    return named if data is None else data


def used(given: Collection[str], missing: Collection[str], data: object) -> str:
    """Returns what is used of a model's views, in a line; "" if the data set lacks none."""
    return f"used {', '.join(given)}; {data} lacks {', '.join(missing)}" if missing else ""


def record_name(number: int) -> str:
    """Returns the file name of a part's manifest."""
    return f"parts/{number:05d}.json"


def part_name(layer: str, number: int) -> str:
    """Returns the file name of a layer's part, such as `hidden/00000.npy`."""
    return f"{layer}/{number:05d}.npy"
