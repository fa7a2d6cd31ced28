"""Neighbours by some of the views: only the parts of vectors that are of these are compared."""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from heron.config.errors import RetrievalError
from heron.retrieval.embeddings import BLOCK, Embeddings, prepare_vectors
from heron.retrieval.index import Index, Neighbours
from heron.retrieval.index_files import IndexManifest
from heron.retrieval.samples import Samples


@dataclass(frozen=True)
class SomeViews:
    """An index that is searched by some of the views that its vectors hold side by side.

    The metric is the index's, over the numbers of these views alone, so that a sample's own view
    has a cosine of 1. A sample without these views, whose numbers are zeros, is never found. Every
    sample is compared, by its embeddings if they are there, else by the index: of a vector with
    zeros in place of a view, what FAISS finds need not be near by the other views.
    """

    index: Index
    embeddings: Embeddings | None  # what the index was built from, if it is there
    columns: NDArray[np.bool_]  # the numbers of these views, [dim of the index]

    @classmethod
    def of(cls, index: Index, embeddings: Embeddings | None, columns: NDArray[np.bool_]) -> Self:
        """Searches by some columns of the layer, of which an index may hold a prefix."""
        if (prefix := index.manifest.prefix) is not None:
            columns = columns.reshape(prefix.views, -1)[:, : prefix.width].reshape(-1)
        return cls(index, embeddings, columns)

    @property
    def samples(self) -> Samples:
        """The samples that are searched."""
        return self.index.samples

    @property
    def manifest(self) -> IndexManifest:
        """The manifest of the index."""
        return self.index.manifest

    def search(
        self, vectors: NDArray[np.float32], k: int = 10, allowed: NDArray[np.bool_] | None = None
    ) -> Neighbours:
        """Returns the k nearest allowed samples of one vector, [1, dim], as `Index.search` does.

        Raises a RetrievalError if the views of the vector are not finite, or zero under cosine, or
        if no allowed sample has these views.
        """
        unit, metric = self.manifest.normalised, self.manifest.metric
        query = prepare_vectors(self._whole(vectors)[:, self.columns], unit, lambda _: "the query")
        numbers, scores = [], []
        compared = np.arange(len(self.samples)) if allowed is None else np.flatnonzero(allowed)
        for first in range(0, max(1, len(compared)), BLOCK):
            block = compared[first : first + BLOCK]
            parts = self._take(block)[:, self.columns]
            norms = np.linalg.norm(parts, axis=1)
            block, parts, norms = block[norms > 0], parts[norms > 0], norms[norms > 0]
            if metric == "euclidean":
                found = -np.linalg.norm(parts - query, axis=1)
            else:
                found = parts @ query[0] / (norms if unit else 1)
            numbers.append(block)
            scores.append(found)
        number, score = np.concatenate(numbers), np.concatenate(scores)
        if not len(number):
            raise RetrievalError(
                "none of the samples that pass has the views of the query; expected one at least; "
                "ask for less, or give the other views"
            )
        order = np.argsort(-score, kind="stable")[:k]
        nearest = np.full((1, k), -1, np.int64), np.full((1, k), np.nan, np.float32)
        nearest[0][0, : len(order)] = number[order]
        nearest[1][0, : len(order)] = (
            np.abs(score[order]) if metric == "euclidean" else score[order]
        )
        return Neighbours(*nearest)

    def _take(self, numbers: NDArray[np.int64]) -> NDArray[np.float32]:
        if self.embeddings is None:
            return self.index.vectors(numbers)
        return self._whole(self.embeddings.take(self.manifest.layer, numbers))

    def _whole(self, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
        """Returns vectors as wide as the index's: see `Prefix`."""
        prefix = self.manifest.prefix
        cut = prefix is not None and vectors.shape[1] == prefix.dim != self.manifest.dim
        return prefix.of(vectors) if prefix is not None and cut else vectors
