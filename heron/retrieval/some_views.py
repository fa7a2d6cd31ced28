"""Neighbours by some of the views: only the parts of vectors that are of these are compared."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from heron.base.errors import RetrievalError
from heron.retrieval.embeddings import BLOCK, EMBED_AGAIN, Embeddings, Layer, LayerRecord, compared
from heron.retrieval.index import Index, Neighbours
from heron.retrieval.index_files import IndexManifest
from heron.retrieval.samples import Samples
from heron.retrieval.vectors import prepare_vectors

DECODED = 1024  # vectors of an index that are decoded at a time: few, which a cache holds


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
    _last: dict[bytes, NDArray[np.float32]] = field(default_factory=dict)  # scores, by the query

    @classmethod
    def of(cls, index: Index, embeddings: Embeddings | None, columns: NDArray[np.bool_]) -> Self:
        """Searches by some columns of the layer, even where the index holds only a prefix of it."""
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
        part = self._whole(vectors)[:, self.columns]
        query = np.zeros((1, len(self.columns)), np.float32)
        query[:, self.columns] = prepare_vectors(part, unit, lambda _: "the query")
        scores = self._scores(query[0], metric == "euclidean", unit)
        number = np.flatnonzero(
            np.isfinite(scores) if allowed is None else np.isfinite(scores) & allowed
        )
        if not len(number):
            raise RetrievalError(
                "none of the samples that pass has the views of the query; relax the filter, or "
                "query by other views"
            )
        score, k_found = scores[number], min(k, len(number))
        least = np.partition(score, -k_found)[-k_found]  # ties are in the order of the samples
        number, score = number[score >= least], score[score >= least]
        order = np.argsort(-score, kind="stable")[:k]
        nearest = np.full((1, k), -1, np.int64), np.full((1, k), np.nan, np.float32)
        nearest[0][0, : len(order)] = number[order]
        nearest[1][0, : len(order)] = (
            np.abs(score[order]) if metric == "euclidean" else score[order]
        )
        return Neighbours(*nearest)

    def _scores(
        self, query: NDArray[np.float32], euclidean: bool, unit: bool
    ) -> NDArray[np.float32]:
        """Returns how near each sample is, [N], larger is nearer; -inf without these views.

        The last scores are kept: an answer and the labels that it predicts need the same.
        """
        if (key := query.tobytes()) in self._last:
            return self._last[key]
        edges = np.flatnonzero(np.diff(self.columns, prepend=False, append=False))
        runs = [slice(*run) for run in edges.reshape(-1, 2).tolist()]
        scores = np.empty(len(self.samples), np.float32)
        for first, block in self._blocks():
            product, square = np.zeros((2, len(block)), np.float32)
            for run in runs:
                part = block[:, run]  # no copy
                square += np.vecdot(part, part)
                if euclidean:
                    part = part - query[run]
                    product -= np.vecdot(part, part)
                else:
                    product += part @ query[run]
            product = -np.sqrt(-product) if euclidean else product
            norm = np.sqrt(square) if unit else 1
            found = scores[first : first + len(block)]
            found[:] = -np.inf
            np.divide(product, norm, out=found, where=square > 0)
        self._last.clear()
        self._last[key] = scores
        return scores

    def _blocks(self) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Yields the vectors of all samples as wide as the index's: see `Embeddings.blocks`."""
        if self.embeddings is not None:
            for first, block in self.embeddings.blocks(self.manifest.layer, BLOCK):
                yield first, self._whole(block)
            return
        for first in range(0, len(self.samples), DECODED):
            numbers = np.arange(first, min(first + DECODED, len(self.samples)))
            yield first, self.index.vectors(numbers)

    def _whole(self, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
        """Returns vectors as wide as the index's: see `Prefix`."""
        prefix = self.manifest.prefix
        cut = prefix is not None and vectors.shape[1] == prefix.dim != self.manifest.dim
        return prefix.of(vectors) if prefix is not None and cut else vectors


class EmbeddingsOfViews(Embeddings):
    """Embeddings of which the numbers of some stored views alone are there.

    They are exact where each view has an encoder of its own. A sample that lacks one of the views
    that were asked for counts as one without labels.
    """

    def __init__(
        self,
        whole: Embeddings,
        names: Collection[str] = (),
        known: NDArray[np.bool_] | None = None,
    ) -> None:
        """Takes the named views, by default all that the data set has.

        `known` says which samples count as labelled, if that is known already, bool [N].
        Raises a RetrievalError if no such view was embedded, or the folder does not say which.
        """
        super().__init__(whole.folder, whole.manifest, whole.fetched)
        manifest, there, self.whole = whole.manifest, whole.views, whole
        stored = [view.stored for view in manifest.views]
        if not stored:
            raise RetrievalError(f"{whole.where} does not say which views it has; {EMBED_AGAIN}")
        if unknown := [name for name in names if name not in there]:
            fault = "the data set lacks it" if unknown[0] in stored else "the model does not see it"
            raise RetrievalError(
                f"{whole.where} has nothing of view '{unknown[0]}': {fault}; use one or more of "
                f"{', '.join(there)}"
            )
        self.given = [name for name in there if not names or name in names]
        others = [name for name in there if name not in self.given]
        self.compares = compared(self.given, others, manifest.missing)
        self._columns, self._ends = dict[Layer, NDArray[np.bool_]](), dict[Layer, list[int]]()
        self.layers = {}
        flags = [name in self.given for name in stored]
        for layer, record in manifest.layers.items():
            even = [record.dim // record.views] * record.views
            widths = [view.width for view in manifest.views] if layer == "hidden" else even
            self._columns[layer] = np.repeat(flags, widths)
            kept = [width for width, given in zip(widths, flags, strict=True) if given]
            self._ends[layer] = np.cumsum([0, *kept]).tolist()
            self.layers[layer] = LayerRecord(dim=sum(kept), dtype=record.dtype, views=sum(flags))
        if names and known is None:
            known = self.samples.known & self._have_all()
        self.samples = replace(self.samples, known=self.samples.known if known is None else known)

    def __reduce__(self) -> tuple[Any, ...]:
        """Sends how another process opens them: see `Embeddings`."""
        return EmbeddingsOfViews, (self.whole, self.given, np.array(self.samples.known))

    def _have_all(self) -> NDArray[np.bool_]:
        """Returns which samples have numbers of every view, [N]; those of a missing one are 0."""
        layer: Layer = "projection" if "projection" in self.layers else self.default_layer
        ends, there = self._ends[layer], np.empty(len(self), bool)
        for first, block in self.blocks(layer):
            parts = [block[:, start:end].any(1) for start, end in pairwise(ends)]
            there[first : first + len(block)] = np.logical_and.reduce(parts)
        return there

    def blocks(
        self, layer: Layer, rows: int = BLOCK, part: int | None = None
    ) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Yields the views' vectors: see `Embeddings.blocks`."""
        for first, block in self.whole.blocks(layer, rows, part):
            yield first, block[:, self._columns[layer]]

    def take(self, layer: Layer, numbers: NDArray[np.int64]) -> NDArray[np.float32]:
        """Returns the views' vectors of some samples, float32 [numbers, dim], in their order."""
        return self.whole.take(layer, numbers)[:, self._columns[layer]]
