"""Exact nearest neighbours: the one search of mining, reports, recall and the kNN classifier."""

from collections.abc import Iterable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from heron.base.errors import RetrievalError
from heron.base.extras import require

faiss = require("faiss", "a search for neighbours")

Numbers = NDArray[np.int64]
Vectors = NDArray[np.float32]


def exact_nearest(
    blocks: Iterable[tuple[Numbers, Vectors]],  # numbers of samples [rows], vectors [rows, dim]
    queries: Vectors,  # [queries, dim]
    own: Numbers,  # number of the sample that each query is, [queries]
    k: int,  # at most the number of vectors less one
    metric: int = faiss.METRIC_INNER_PRODUCT,
    gpu: bool = False,  # search on the first GPU that FAISS sees (unmeasured)
) -> tuple[Numbers, Vectors]:
    """Finds the k nearest vectors of each query, its own left out, by exhaustive search.

    Returns sample numbers and scores (inner products, or squared distances), [queries, k], nearest
    first. Raises RetrievalError if `gpu` is set, and FAISS can use none.
    """
    knn = faiss.knn
    if gpu:
        require_gpus()
        knn = partial(faiss.knn_gpu, faiss.StandardGpuResources())
    heap = faiss.ResultHeap(len(queries), k + 1, keep_max=faiss.is_similarity_metric(metric))
    for numbers, vectors in blocks:
        if len(numbers):
            scores, rows = knn(queries, vectors, k + 1, metric=metric)
            heap.add_result(scores, numbers[rows])  # of a short block, row -1 has the worst score
    heap.finalize()
    keep = without_own(heap.I, own)
    return heap.I[keep].reshape(len(own), k), heap.D[keep].reshape(len(own), k)


def require_gpus() -> None:
    """Raises a RetrievalError if FAISS can use no GPU."""
    built = hasattr(faiss, "StandardGpuResources")  # by faiss-gpu
    if not (built and faiss.get_num_gpus()):
        why = "sees none" if built else f"{faiss.__version__} is built without them"
        raise RetrievalError(
            f"search on GPUs was requested, but FAISS {why}; it must be faiss-gpu, on a machine "
            "with a GPU: pip install 'heron-pretrain[gpu]', or remove --gpu or negatives.gpu"
        )


def vote(
    labelled: tuple[Numbers, Vectors, Vectors],  # rows, features [rows, width], labels as 0/1
    test: tuple[Numbers, Vectors],  # the same without labels
    k: int,  # neighbours that vote; all labelled rows if there are fewer
    tau: float,  # temperature, > 0
) -> Vectors:
    r"""Predicts each test row by a vote of its k nearest labelled rows, [test rows, labels].

    The weighted vote of Wu et al. (2018, section 3.4): neighbour j has the weight exp(cos / tau),

    .. math:: p_a = \frac{\sum_j y_{ja} e^{\cos_j / \tau}}{\sum_j e^{\cos_j / \tau}}

    For exclusive classes the p sum to 1, and the largest is the prediction. For several labels each
    p is the weighted share of neighbours with that label. A row is never its own neighbour.
    """
    (numbers, features, y), (own, queries) = labelled, test
    # A test row that is labelled as well leaves one fewer to choose from.
    k = min(k, len(numbers) - bool(np.isin(own, numbers).any()))
    if not k or not len(own):
        return np.zeros((len(own), y.shape[1]), np.float32)
    keys, anchors = unit_rows(features), unit_rows(queries)
    near, cosine = exact_nearest([(numbers, keys)], anchors, own, k)
    order = np.argsort(numbers)
    positions = order[np.searchsorted(numbers, near, sorter=order)]
    weights = np.exp((cosine - cosine[:, :1]).astype(np.float64) / tau)  # the nearest counts 1
    neighbour_labels = y[positions].astype(np.float64)
    # Only neighbours whose label is known vote on it; without any, the answer is 1/2.
    label_weight = np.einsum("qk,qka->qa", weights, ~np.isnan(neighbour_labels))
    votes = np.einsum("qk,qka->qa", weights, np.nan_to_num(neighbour_labels))
    return np.asarray(
        np.where(label_weight > 0, votes / np.maximum(label_weight, 1e-300), 0.5), np.float32
    )


def unit_rows(vectors: Vectors) -> Vectors:
    """Returns rows of length one; a row of zeros stays one."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.ascontiguousarray(vectors / np.where(lengths > 0, lengths, 1), np.float32)


def without_own(numbers: Numbers, own: Numbers) -> NDArray[np.bool_]:
    """Marks the k nearest other samples among k + 1 neighbours, [queries, k + 1]."""
    keep: NDArray[np.bool_] = numbers != own[:, None]
    keep[keep.all(1), -1] = False  # the query is not among them: drop the furthest
    return keep
