"""A layer of embeddings as it goes into FAISS: cut, checked, of unit length, rotated."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from heron.config.extras import require
from heron.evaluation.knn import Numbers, Vectors
from heron.retrieval.embeddings import Embeddings, Layer
from heron.retrieval.index_files import FAISS_METRICS, Prefix
from heron.retrieval.index_plan import BLOCK, Metric, Plan, VectorSet, compared_by
from heron.retrieval.vectors import VectorsInMemory, prepare_vectors
from heron.shards.terminal import Bar

faiss = require("faiss", "an index")


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
