"""Vectors as they go into FAISS: of a layer of embeddings, or given in memory; cut and checked."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from heron.base.artefact import FileSum
from heron.base.errors import RetrievalError
from heron.base.extras import require
from heron.base.terminal import Bar
from heron.evaluation.knn import Numbers, Vectors
from heron.retrieval.embeddings import Embeddings, Layer, LayerRecord
from heron.retrieval.index_files import FAISS_METRICS, Prefix
from heron.retrieval.index_plan import BLOCK, Metric, Plan, VectorSet, compared_by
from heron.retrieval.samples import Samples
from heron.shards.manifest import Labels

faiss = require("faiss", "an index")
TINY = float(np.finfo(np.float32).tiny)  # a square below this has lost precision
MAX_CLASSES = 1 << 20  # each has a name, and a column with a byte per vector
ORIGINS = ("embeddings", "embeddings_fingerprint", "checkpoint", "run", "data", "data_fingerprint")


@dataclass(frozen=True)
class VectorsInMemory:
    """An array of vectors, and the sample of each."""

    array: NDArray[Any]  # [N, dim], real numbers
    samples: Samples  # of each vector
    where: str = "the array"  # what messages call it

    def __len__(self) -> int:
        """Returns how many vectors there are."""
        return len(self.array)

    def layer(self, name: Layer) -> LayerRecord:
        """Returns the record of the vectors, whatever the layer."""
        return LayerRecord(dim=self.array.shape[1], dtype="float32", views=1)

    def part_bytes(self, name: Layer) -> int:
        """Returns 0: no file is mapped."""
        return 0

    @property
    def starts(self) -> Numbers:
        """The number of the only part's first vector, 0, and how many there are."""
        return np.array([0, len(self)])

    def blocks(
        self, name: Layer, rows: int = BLOCK, part: int | None = None
    ) -> Iterator[tuple[int, Vectors]]:
        """Yields all vectors in order: the number of the first, and float32 [at most rows, dim]."""
        for first in range(0, len(self), rows):
            yield first, _float32(self.array[first : first + rows])

    def take(self, name: Layer, numbers: Numbers) -> Vectors:
        """Returns the vectors of some samples, float32 [numbers, dim], in their order."""
        return _float32(self.array[numbers])

    def origin(self) -> dict[str, Any]:
        """Returns the fields of an index's manifest that say where its vectors come from: blank."""
        return dict.fromkeys(ORIGINS, "") | {"views": [], "missing": []}

    def copy_samples(self, folder: Path) -> dict[str, FileSum]:
        """Writes keys and labels to a folder; returns the size and checksum of each file."""
        return self.samples.save(folder)


@dataclass(frozen=True)
class LayerVectors:
    """A layer of embeddings, as it goes into FAISS."""

    embeddings: Embeddings | VectorsInMemory
    layer: Layer
    metric: Metric
    progress: bool = False  # show a bar for each named pass
    prefix: Prefix | None = None  # the part of each vector to index; None: all of it
    rotation: Vectors | None = None  # see `index_files.rotation`

    @property
    def dim(self) -> int:
        """The dimension of a vector."""
        if self.prefix is not None:
            return self.prefix.width * self.prefix.views
        return self.embeddings.layer(self.layer).dim

    def vector_set(self, held_out: int) -> VectorSet:
        """Returns the facts that a plan depends on."""
        return VectorSet(
            count=len(self.embeddings),
            dim=self.dim,
            part_bytes=self.embeddings.part_bytes(self.layer),
            held_out=held_out,
            euclidean=self.metric != "inner_product",
        )

    def blocks(self, name: str = "") -> Iterator[tuple[int, Vectors]]:
        """Yields blocks of checked vectors, each with the number of its first."""
        hidden, count = not (name and self.progress), len(self.embeddings)
        with Bar(count, "vector", name=name, hidden=hidden) as bar:
            for start, block in self.embeddings.blocks(self.layer, BLOCK):
                yield start, self.prepare(block, np.arange(start, start + len(block)))
                bar.update(len(block))

    def take(self, numbers: Numbers) -> Vectors:
        """Returns the checked vectors of some samples, read block by block to bound memory."""
        vectors = np.empty((len(numbers), self.dim), np.float32)
        for first in range(0, len(numbers), BLOCK):
            block_numbers = numbers[first : first + BLOCK]
            block = self.embeddings.take(self.layer, block_numbers)
            vectors[first : first + BLOCK] = self.prepare(block, block_numbers)
        return vectors

    def prepare(self, vectors: Vectors, numbers: Numbers) -> Vectors:
        """Returns the vectors of some samples as FAISS takes them; RetrievalError if it cannot."""
        samples = self.embeddings.samples
        unit = self.metric == "cosine"
        vectors = vectors if self.prefix is None else self.prefix.of(vectors)
        vectors = prepare_vectors(vectors, unit, lambda row: f"'{samples.key(int(numbers[row]))}'")
        return vectors if self.rotation is None else vectors @ self.rotation

    def empty_index(self, plan: Plan) -> Any:
        """Returns an empty FAISS index for a plan."""
        metric = FAISS_METRICS[compared_by(self.metric, plan.kind)]
        return faiss.index_factory(self.dim, plan.factory, metric)


def vectors_in_memory(
    vectors: ArrayLike,
    labels: ArrayLike | None = None,
    label_names: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
) -> VectorsInMemory:
    """Returns vectors with their samples, see `Index.build`; RetrievalError if they do not fit."""
    array = np.asarray(vectors)
    if array.ndim != 2 or array.dtype.kind not in "fiu" or not array.shape[1]:
        raise RetrievalError(
            "vectors must be numbers [rows, dim], one vector for each sample, such as "
            f"`Model.encode` returns, got {array.dtype} {list(array.shape)}"
        )
    keys = [str(n) for n in range(len(array))] if keys is None else [str(key) for key in keys]
    if len(keys) != len(array):
        raise RetrievalError(
            f"there must be one key for each of {len(array):,} vectors, got {len(keys):,} keys"
        )
    return VectorsInMemory(array, _samples(keys, labels, label_names))


def _samples(
    keys: Sequence[str], labels: ArrayLike | None, label_names: Sequence[str] | None
) -> Samples:
    """Returns samples with labels of classes [rows], 0/1 columns [rows, names], or none."""
    count = len(keys)
    values = np.asarray(np.full(count, -1) if labels is None else labels)
    expected = (
        f"must be {count:,} class numbers [rows], -1 where unknown, or 0 and 1 [rows, names], one "
        "column for each label, in the order of `label_names`"
    )
    are_integers = values.dtype.kind in "biu" or (
        values.dtype.kind == "f" and (values % 1 == 0).all()
    )
    if not are_integers or values.ndim not in (1, 2) or len(values) != count:
        raise RetrievalError(f"labels {expected}, got {values.dtype} {list(values.shape)}")
    width = values.shape[1] if values.ndim == 2 else int(values.max() if count else -1) + 1
    if label_names is None and width > MAX_CLASSES:
        raise RetrievalError(
            f"labels: class numbers must be at most {MAX_CLASSES - 1:,}, got {width - 1:,}; number "
            "the classes from 0: np.unique(labels, return_inverse=True)"
        )
    names = [str(n) for n in range(width)] if label_names is None else list(label_names)
    kind = "multi_label" if values.ndim == 2 else "multi_class" if names else "none"
    try:
        label_info = Labels.model_validate({"kind": kind, "names": names})
        stored = values.astype(label_info.dtype)
        if (stored != values).any():
            raise ValueError("not all are 0 or 1")
        if fault := label_info.fault(stored, count):
            raise ValueError(fault)
    except ValueError as fault:
        raise RetrievalError(f"labels: {fault}; they {expected}") from None
    labelled = label_info.is_labelled(stored)
    targets = np.zeros((count, len(names)), np.uint8)
    if values.ndim == 2:
        targets[labelled] = stored[labelled]
    else:
        targets[labelled, stored[labelled]] = 1
    as_bytes = np.array([key.encode() for key in keys], np.bytes_)
    return Samples(as_bytes, np.arange(count, dtype=np.int64), targets, labelled, names, kind)


def _float32(vectors: NDArray[Any]) -> Vectors:
    with np.errstate(over="ignore"):  # overflow gives infinity, which is refused later
        return vectors.astype(np.float32)


def prepare_vectors(vectors: Vectors, unit: bool, name: Callable[[int], str]) -> Vectors:
    """Returns vectors ready for FAISS: finite, contiguous and, if `unit`, of length 1; [rows, dim].

    Raises a RetrievalError, which calls each row by its `name`, if rows are not finite, or zero
    where they must have a direction.
    """
    with np.errstate(all="ignore"):
        squares = np.asarray(np.vecdot(vectors, vectors), np.float32)
    least = TINY if unit else 0.0
    if len(squares) and not (squares.min() >= least and squares.max() < np.inf):  # or NaN
        bad, fault = ~np.isfinite(squares), "not finite, or too large to square"
        if not bad.any():
            bad, fault = squares < least, "zero, which has no cosine"
        rows = np.flatnonzero(bad).tolist()
        names = ", ".join(map(name, rows[:5])) + (", ..." if len(rows) > 5 else "")
        raise RetrievalError(
            f"{len(rows)} of {len(bad)} vectors are {fault}: {names}; remove these samples, or "
            "check the model that made the vectors"
        )
    if not unit:
        return np.ascontiguousarray(vectors)
    return np.divide(vectors, np.sqrt(squares)[:, None], dtype=np.float32, order="C")
