"""Copies, leaks and outliers, where they are known."""

from typing import Any

import numpy as np

from heron.audit.copies import find_copies, other_labels, outliers
from tests.audit.test_labels import near_of


def vectors(rows: int = 300) -> Any:
    return np.random.default_rng(0).normal(size=(rows, 16)).astype(np.float32)


def test_equal_and_nearly_equal_samples_are_groups_and_no_others() -> None:
    x = vectors()
    x[10], x[20] = x[5], x[5]
    x[40] = x[30] + 0.05 * np.random.default_rng(1).normal(size=16)
    found = find_copies(near_of(x))
    assert sorted(map(list, found.members())) == [[5, 10, 20], [30, 40]]
    assert np.flatnonzero(found.equal).tolist() == [5, 10, 20]
    assert found.nearest[30] == found.nearest[40] > 6e-4


def test_dense_clusters_are_no_copies() -> None:
    """All members of a cluster are near each other, none much nearer than the others."""
    x = np.repeat(vectors(15), 20, 0) + 0.05 * vectors(300)
    assert not list(find_copies(near_of(x)).members())


def test_labels_differ_where_both_are_known() -> None:
    y = np.array([[1, 0], [1, np.nan], [1, 1], [np.nan, np.nan]], np.float32)
    assert not other_labels(np.array([0, 1]), y)
    assert other_labels(np.array([0, 1, 2]), y)
    assert not other_labels(np.array([1, 3]), y)


def test_a_sample_like_no_other_is_an_outlier() -> None:
    x = np.abs(vectors()) + 3
    x[7] = -x[7]
    found, score = outliers(near_of(x))
    assert found.tolist() == [7] and score[7] == score.max() > 5
