"""Exact neighbours of embedded samples, block by block, in any executor's processes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from heron.base.errors import RetrievalError
from heron.base.workers import ALONE, Executor, Item, Result, in_order
from heron.evaluation.knn import Numbers, Vectors, exact_nearest
from heron.retrieval.embeddings import Embeddings, Layer
from heron.retrieval.samples import Samples

SEARCHED = 2048  # samples that are searched for at a time; all vectors are read for each time


class Block(NamedTuple):
    """Consecutive samples, an item of an executor."""

    start: int
    stop: int

    def __str__(self) -> str:
        """Returns what messages call it."""
        return f"samples {self.start} to {self.stop - 1}"


def blocks_of(count: int, size: int) -> list[Block]:
    """Cuts 0 to `count` into blocks of `size`."""
    return [Block(start, min(start + size, count)) for start in range(0, count, size)]


def map_in_order(
    executor: Executor, job: Callable[[Item], Result], items: Sequence[Item]
) -> list[Result]:
    """Returns what an executor's processes make of items, in the order of the items."""
    with closing(executor.map(job, items)) as results:
        return [result for _, result in in_order(items, results)]


def nearest_of(
    embeddings: Embeddings,
    layer: Layer,
    anchors: Numbers,
    k: int,
    allowed: NDArray[np.bool_] | None = None,
    executor: Executor = ALONE,
) -> tuple[Numbers, Vectors]:
    """Returns the k nearest others of each anchor, and their cosines, [anchors, k].

    Neighbours are the samples that are `allowed` [samples], by default all; there must be more than
    k of them. Raises a RetrievalError that names samples whose vectors have no direction.
    """
    job = partial(_exact, embeddings, layer, anchors, k, allowed)
    found = map_in_order(executor, job, blocks_of(len(anchors), SEARCHED))
    numbers, cosine = zip(*found, strict=True)
    return np.concatenate(numbers), np.concatenate(cosine)


def _exact(
    embeddings: Embeddings,
    layer: Layer,
    all_anchors: Numbers,
    k: int,
    allowed: NDArray[np.bool_] | None,
    block: Block,
) -> tuple[Numbers, Vectors]:
    anchors, samples = all_anchors[slice(*block)], embeddings.samples

    def candidates() -> Iterator[tuple[Numbers, Vectors]]:
        for start, vectors in embeddings.blocks(layer):
            rows = np.arange(len(vectors))
            if allowed is not None:
                rows = np.flatnonzero(allowed[start : start + len(vectors)])
            if len(rows):
                yield start + rows, unit(vectors[rows], samples, start + rows)

    return exact_nearest(candidates(), unit_vectors(embeddings, layer, anchors)[0], anchors, k)


def unit_vectors(embeddings: Embeddings, layer: Layer, numbers: Numbers, views: int = 1) -> Vectors:
    """Returns unit vectors of some samples, view by view: [views, *numbers, dim].

    Raises a RetrievalError that names samples whose vectors have no direction.
    """
    flat = numbers.reshape(-1)
    vectors = embeddings.take(layer, flat).reshape(len(flat), views, -1)
    by_view = unit(vectors, embeddings.samples, flat).swapaxes(0, 1)
    return np.ascontiguousarray(by_view).reshape(views, *numbers.shape, -1)


def unit(vectors: Vectors, samples: Samples, numbers: Numbers) -> Vectors:
    """Returns vectors [rows, ..., dim] of length one; see `unit_vectors`."""
    norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
    valid = (np.isfinite(norms) & (norms > 0)).reshape(len(vectors), -1).all(1)
    if not valid.all():
        keys = [samples.key(int(numbers[i])) for i in np.flatnonzero(~valid)[:5]]
        raise RetrievalError(
            f"the vectors of {int((~valid).sum()):,} samples are zero or not finite, so they have "
            f"no direction, the first {', '.join(keys)}; embed them again, or exclude them"
        )
    return np.asarray(vectors / norms, np.float32)
