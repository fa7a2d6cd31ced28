"""What is done to the vectors of a layer before FAISS compares them: a prefix, and a rotation."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from heron.pipeline.config.errors import RetrievalError
from heron.pipeline.retrieval.embeddings import Layer, LayerRecord, Width
from heron.shards.artefact import Record

Vectors = NDArray[np.float32]


class Prefix(Record):
    """The first numbers of a layer's vectors: Matryoshka embeddings (Kusupati et al. 2022).

    Of a layer of several views it is the first `width` numbers of each, side by side. Those of
    projections and weights, which are unit vectors, are made unit vectors again, view by view.
    """

    width: Width
    views: Width  # of the layer
    dim: Width  # of the whole layer
    unit: bool

    @classmethod
    def choose(cls, width: int, layer: Layer, known: LayerRecord) -> "Prefix":
        """Returns the prefix of a layer; raises a RetrievalError where it has fewer numbers."""
        whole = known.dim // known.views
        if not 1 <= width <= whole:
            raise RetrievalError(
                f"width is {width}; expected 1 to {whole}, as many numbers as layer '{layer}' has "
                "of a view; give another --width, or none for all"
            )
        return cls(width=width, views=known.views, dim=known.dim, unit=layer != "hidden")

    def of(self, vectors: Vectors) -> Vectors:
        """Returns the prefixes of whole vectors [rows, dim]: [rows, views * width]."""
        found = vectors.reshape(len(vectors), self.views, -1)[:, :, : self.width]
        scale = np.ones((len(vectors), self.views, 1), np.float32)
        if self.unit:
            lengths = np.linalg.norm(found, axis=2, keepdims=True)
            scale = np.where(lengths > 0, lengths, scale)
        return np.asarray(found / scale, np.float32).reshape(len(vectors), -1)


@lru_cache(maxsize=4)
def rotation(dim: int, seed: int) -> Vectors:
    """Returns a random rotation, orthogonal [dim, dim], the same for a seed.

    RaBitQ's bound holds for a random rotation of the vectors (Gao and Long 2024, section 3.1): a
    bit a number says little of a vector that has its length in few of them. Distances stay.
    """
    noise = np.random.default_rng(seed).standard_normal((dim, dim))
    q, r = np.linalg.qr(noise)
    found = np.asarray(q * np.sign(np.diag(r)), np.float32)  # with these signs there is one alone
    found.setflags(write=False)
    return found
