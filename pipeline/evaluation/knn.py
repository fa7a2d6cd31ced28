"""Exact nearest neighbours: the one search that mining, the report on negatives and recall use."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from heron.pipeline.config.extras import require

faiss = require("faiss", "a search for neighbours")

Numbers = NDArray[np.int64]
Vectors = NDArray[np.float32]


def exact_nearest(
    blocks: Iterable[tuple[Numbers, Vectors]],
    queries: Vectors,
    own: Numbers,
    k: int,
    metric: int = faiss.METRIC_INNER_PRODUCT,
) -> tuple[Numbers, Vectors]:
    """Returns the k nearest of each query, by comparison with all vectors but its own.

    Args:
        blocks: numbers of samples [rows], and their vectors [rows, dim].
        queries: [queries, dim].
        own: number of the sample that each query is, [queries].
        k: at most the number of vectors less one.
        metric: of FAISS.

    Returns:
        Numbers and scores (inner products, or squared distances), [queries, k], the nearest first.
    """
    heap = faiss.ResultHeap(len(queries), k + 1, keep_max=faiss.is_similarity_metric(metric))
    for numbers, vectors in blocks:
        if len(numbers):
            scores, rows = faiss.knn(queries, vectors, k + 1, metric)
            heap.add_result(scores, numbers[rows])  # of a short block, row -1 has the worst score
    heap.finalize()
    keep = without_own(heap.I, own)
    return heap.I[keep].reshape(len(own), k), heap.D[keep].reshape(len(own), k)


def without_own(numbers: Numbers, own: Numbers) -> NDArray[np.bool_]:
    """Returns which of k + 1 neighbours [queries, k + 1] are the k nearest other samples."""
    keep: NDArray[np.bool_] = numbers != own[:, None]
    keep[keep.all(1), -1] = False  # the query is not among them: the furthest goes
    return keep
