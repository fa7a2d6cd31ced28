"""The nearest neighbours of samples: exact, or as an index has them."""

from typing import TYPE_CHECKING

import faiss
import numpy as np
from numpy.typing import NDArray

from heron.pipeline.config.errors import RetrievalError
from heron.pipeline.retrieval.embeddings import Embeddings, Layer
from heron.pipeline.retrieval.samples import Samples

if TYPE_CHECKING:
    from heron.pipeline.retrieval.index import Index


def unit(
    vectors: NDArray[np.float32], samples: Samples, numbers: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Vectors [n, ...] of length one along the last axis.

    Raises:
        RetrievalError: some have no direction; names their samples.
    """
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    sound = (np.isfinite(lengths) & (lengths > 0)).reshape(len(vectors), -1).all(1)
    if not sound.all():
        keys = [samples.key(int(numbers[i])) for i in np.flatnonzero(~sound)[:5]]
        raise RetrievalError(
            f"the vectors of {int((~sound).sum()):,} samples are zero or not finite, the first "
            f"{', '.join(keys)}; expected vectors with a direction; embed again, or leave them out"
        )
    return np.asarray(vectors / lengths, np.float32)


def nearest(
    embeddings: Embeddings,
    layer: Layer,
    anchors: NDArray[np.int64],
    k: int,
    index: "Index | None" = None,
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The k nearest samples with labels of each anchor, never itself, and their cosine.

    Args:
        embeddings: to search; read in blocks.
        layer: whose vectors are compared.
        anchors: numbers of samples, [anchors].
        k: neighbours; there must be as many others with labels.
        index: to take them from, in its order; None: exact ones.

    Returns:
        Their numbers and cosines, [anchors, k].

    Raises:
        RetrievalError: the index is of other embeddings or of another layer, or gives fewer; or
            vectors have no direction.
    """
    if index is not None:
        return _from_index(embeddings, layer, anchors, k, index)
    samples = embeddings.samples
    queries = unit(embeddings.take(layer, anchors), samples, anchors)
    numbers = np.full((len(anchors), k), -1)
    cosine = np.full((len(anchors), k), -np.inf, np.float32)
    for first, block in embeddings.blocks(layer):
        here = np.flatnonzero(samples.known[first : first + len(block)])
        if not len(here):
            continue
        keys = unit(block[here], samples, first + here)
        near = min(k + 1, len(here))
        scores, places = faiss.knn(queries, keys, near, metric=faiss.METRIC_INNER_PRODUCT)
        found = first + here[places]
        scores[found == anchors[:, None]] = -np.inf
        scores, found = np.hstack([cosine, scores]), np.hstack([numbers, found])
        best = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        cosine = np.take_along_axis(scores, best, 1)
        numbers = np.take_along_axis(found, best, 1)
    return numbers, cosine


def _from_index(
    embeddings: Embeddings, layer: Layer, anchors: NDArray[np.int64], k: int, index: "Index"
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Neighbours as an index has them, in its order; cosines are of the embeddings."""
    index.check(embeddings)
    if (found := index.manifest.layer) != layer:
        raise RetrievalError(
            f"the index is of the layer '{found}'; expected '{layer}'; give --layer {found}, or "
            "leave --index out for exact neighbours"
        )
    samples = embeddings.samples
    allowed = None if samples.known.all() else np.asarray(samples.known)
    numbers = np.empty((len(anchors), k), np.int64)
    cosine = np.empty((len(anchors), k), np.float32)
    for first in range(0, len(anchors), 256):
        part = slice(first, first + 256)
        mine = embeddings.take(layer, anchors[part])
        near = index.search(mine, k + 1, allowed).numbers
        own = near == anchors[part, None]
        kept = np.argsort(own, axis=1, kind="stable")[:, :k]
        numbers[part] = np.take_along_axis(near, kept, 1)
        if (numbers[part] < 0).any():
            key = samples.key(int(anchors[part][(numbers[part] < 0).any(1)][0]))
            raise RetrievalError(
                f"the index gave fewer than {k} neighbours of '{key}'; expected as many; give a "
                "smaller --k, or leave --index out for exact neighbours"
            )
        theirs = embeddings.take(layer, numbers[part].reshape(-1))
        theirs = unit(theirs, samples, numbers[part].reshape(-1)).reshape(*near[:, :k].shape, -1)
        cosine[part] = np.einsum("nd,nkd->nk", unit(mine, samples, anchors[part]), theirs)
    return numbers, cosine
