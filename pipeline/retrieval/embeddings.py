"""Embeddings on disk: arrays of vectors in parts, whose they are, and what made them."""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from heron.pipeline.config.errors import RetrievalError
from heron.pipeline.retrieval.samples import Samples
from heron.shards.artefact import MANIFEST, Record, sha256

FORMAT: Literal[1] = 1  # of the manifests of embeddings and of indexes
AGAIN = "embed again, into an empty folder"
PLAN = "plan.json"  # what an unfinished embedding is to become
BLOCK = 65_536  # vectors read at a time
Layer = Literal["hidden", "projection", "weight"]
LAYERS: tuple[Layer, ...] = get_args(Layer)
R = TypeVar("R", bound=Record)


class LayerRecord(Record):
    """One layer of the model: what its vectors are.

    `hidden` is S, the features that the classifier sees; `projection` the projections z and
    `weight` HeroCon's H(z), of each view a unit vector, side by side (`views` of them).
    """

    dim: int
    dtype: Literal["float32", "float16"]
    views: int


class Part(Record):
    """Vectors of consecutive samples: how many, and the checksum of each layer's file."""

    count: int
    sha256: dict[str, str]


class EmbeddingsManifest(Record):
    """What a folder of embeddings holds.

    `checkpoint` is the sha256 of the weights, `data_sha256` that of the data set's manifest;
    `lost` are the rows that could not be read, by number, and why.
    """

    format: Literal[1]
    run: str
    checkpoint: str
    data: str
    data_sha256: str
    precision: str
    rows: int
    layers: dict[Layer, LayerRecord]
    parts: list[Part]
    samples: dict[str, str]
    lost: dict[int, str]


def read_manifest(folder: Path, record: type[R], what: str, remedy: str, again: str) -> R:
    """Reads the manifest of a folder.

    `what` it should be, the `remedy` where there is none, and how it is made `again` are for the
    message of the RetrievalError.
    """
    path = folder / MANIFEST
    try:
        text = path.read_bytes()
    except OSError as error:
        raise RetrievalError(
            f"{path} cannot be read: {error.strerror}; expected {what}; {remedy}"
        ) from None
    try:
        return record.model_validate_json(text)
    except ValidationError as error:
        fault = error.errors()[0]
        where = "".join(f"{name}: " for name in fault["loc"])
        raise RetrievalError(
            f"{path}: {where}{fault['msg']}, found {fault['input']!r:.40}; expected {what} of "
            f"format {FORMAT}; {again}"
        ) from None


class Embeddings:
    """A folder that `heron embed` wrote; vectors are mapped, not read.

    Attributes:
        folder: where they are.
        manifest: what it holds.
        samples: the sample of each vector.
    """

    def __init__(self, folder: str | Path, manifest: EmbeddingsManifest) -> None:
        """Maps the samples; see `open`."""
        self.folder, self.manifest = Path(folder), manifest
        self.samples = Samples.load(self.folder)
        self._starts = np.cumsum([0, *(part.count for part in manifest.parts)])
        if len(self.samples) != len(self):
            raise RetrievalError(
                f"{folder}: {len(self.samples):,} samples and {len(self):,} vectors; {AGAIN}"
            )

    @classmethod
    def open(cls, folder: str | Path) -> Self:
        """Opens a folder of embeddings.

        Raises:
            RetrievalError: it holds none, or they are unfinished or damaged.
        """
        folder = Path(folder)
        remedy = "give the folder that `heron embed` wrote"
        if (folder / PLAN).exists():
            remedy = "this is an unfinished `heron embed`; run the same again to finish it"
        return cls(folder, read_manifest(folder, EmbeddingsManifest, "embeddings", remedy, AGAIN))

    @cached_property
    def sha256(self) -> str:
        """The checksum of the manifest, which holds those of all else."""
        return sha256(self.folder / MANIFEST)

    def __len__(self) -> int:
        """Returns how many samples there are."""
        return int(self._starts[-1])

    def layer(self, name: Layer) -> LayerRecord:
        """Returns what is known of a layer; raises a RetrievalError where it is not there."""
        if name not in self.manifest.layers:
            raise RetrievalError(
                f"{self.folder} has no layer '{name}'; found {', '.join(self.manifest.layers)}; "
                "expected one of them, or embed a model that has it"
            )
        return self.manifest.layers[name]

    def verify(self) -> None:
        """Compares every file with its checksum, a pass over all bytes.

        Raises:
            RetrievalError: names the files that were altered.
        """
        wanted = dict(self.manifest.samples)
        for number, part in enumerate(self.manifest.parts):
            wanted |= {part_name(layer, number): digest for layer, digest in part.sha256.items()}
        found = {name: self.folder / name for name in wanted}
        bad = [n for n, path in found.items() if not path.exists() or sha256(path) != wanted[n]]
        if bad:
            raise RetrievalError(
                f"{self.folder}: {', '.join(bad)} is not what was written; "
                f"bring it back, or {AGAIN}"
            )

    def _part(self, layer: Layer, number: int) -> NDArray[Any]:
        """Maps the vectors of a part, as they are stored."""
        known, path = self.layer(layer), self.folder / part_name(layer, number)
        try:
            found: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise RetrievalError(f"{path} cannot be read: {error}; {AGAIN}") from None
        shape = (self.manifest.parts[number].count, known.dim)
        if found.shape != shape or found.dtype != known.dtype:
            raise RetrievalError(
                f"{path} is {found.dtype} {found.shape}; expected {known.dtype} {shape}; {AGAIN}"
            )
        return found

    def blocks(self, layer: Layer, rows: int = BLOCK) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Yields all vectors in order: the number of the first, and float32 [at most rows, dim]."""
        for number, start in enumerate(self._starts[:-1].tolist()):
            part = self._part(layer, number)
            for first in range(0, len(part), rows):
                yield start + first, np.asarray(part[first : first + rows], np.float32)

    def take(self, layer: Layer, numbers: NDArray[np.int64]) -> NDArray[np.float32]:
        """Returns the vectors of some samples, float32 [numbers, dim], in their order."""
        out = np.empty((len(numbers), self.layer(layer).dim), np.float32)
        parts = np.searchsorted(self._starts, numbers, side="right") - 1
        for number in np.unique(parts).tolist():
            mine = parts == number
            out[mine] = self._part(layer, number)[numbers[mine] - self._starts[number]]
        return out


def part_name(layer: str, number: int) -> str:
    """Returns the name of the file of a part of a layer: `hidden/00000.npy`."""
    return f"{layer}/{number:05d}.npy"
