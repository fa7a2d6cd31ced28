"""Recall at ties: a sample that is as near as the k-th nearest is right, one beyond is not."""

import faiss
import numpy as np
import pytest

from heron.retrieval.recall import ExactSearch

LINE = np.array([[0.0], [3.0], [-3.0], [1.0], [3.00003], [5.0]], np.float32)  # of the query 0
RAYS = np.array([[2.0, 0], [3, 5], [3, -5], [4, 7], [2.99997, 1], [1, 0]], np.float32)


@pytest.mark.parametrize(
    ("vectors", "metric"), [(LINE, faiss.METRIC_L2), (RAYS, faiss.METRIC_INNER_PRODUCT)]
)
def test_the_k_th_nearest_may_be_any_of_equals(
    vectors: "np.ndarray[tuple[int, int], np.dtype[np.float32]]", metric: int
) -> None:
    """The nearest is 3; 1 and 2 come second alike; 4 is beyond rounding, 5 far."""
    exact = ExactSearch(lambda n: vectors[n], [(0, vectors)], np.array([0]), 2, metric)
    assert exact.numbers[0, 0] == 3 and exact.numbers[0, 1] in (1, 2)
    for found, recall in (([0, 3, 1], 1), ([0, 3, 2], 1), ([0, 3, 4], 0.5), ([0, 3, 5], 0.5)):
        assert exact.recall(np.array([found])) == recall, found
    assert exact.recall(np.array([[0, 1, 2]])) == 1  # each as near as the second
    assert exact.recall(np.array([[0, 5, -1]])) == 0
