"""What hard, false and easy negatives are: by hand, and by loops over pairs."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from heron.evaluation import negatives
from heron.evaluation.negatives import (
    RELATIONS,
    LabelPairs,
    close_difference,
    close_label_difference,
    draw_pairs,
    hard_difference,
    label_difference,
    relation,
    row_sums,
)

# Samples 0 to 5; a row with 0 differs from the others in 1, 3, 2, 4 and 0 labels.
Y = np.array([[1, 0, 0, 1], [1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 0, 1], [0, 1, 1, 0], [1, 0, 0, 1]])
DIFFERENCES = [1, 3, 2, 4, 0]


def labels(rows: int, seed: int) -> NDArray[Any]:
    return (np.random.default_rng(seed).random((rows, 5)) < [0.1, 0.3, 0.5, 0.7, 0.2]).astype(int)


def test_the_difference_counts_labels_or_tells_classes_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = np.array([[0], [4]]), np.array([1, 2, 3, 4, 5])
    by_hand = [DIFFERENCES, [3, 1, 2, 0, 4]]
    assert label_difference(Y, first, second, exclusive=False).tolist() == by_hand
    classes = np.eye(3, dtype=int)[[0, 0, 1, 2, 1, 0]]
    found = label_difference(classes, first, second, exclusive=True)
    assert found.tolist() == [[0, 1, 1, 1, 0], [1, 0, 1, 0, 1]]
    monkeypatch.setattr(negatives, "BLOCK_LABELS", 9)  # two pairs at a time
    assert label_difference(Y, first, second, exclusive=False).tolist() == by_hand


def test_hard_begins_above_the_median_and_above_0() -> None:
    """Of differences 0, 1, 1, 2, 3, 3, 3 the median is 2; of 0, 0, 0, 1 it is 0, so 1 is hard."""
    counts = np.array([[1, 2, 1, 3, 0], [3, 1, 0, 0, 0], [4, 0, 0, 0, 0], [0, 1, 0, 1, 0]])
    assert hard_difference(counts).tolist() == [2, 1, 4, 3]
    # Half of the others and no more are not above the median: 2 of 4.
    assert hard_difference(np.array([0, 2, 1, 1])).tolist() == 2


def test_close_is_within_1_percent_of_random_pairs() -> None:
    """Of 1,000 pairs 4 are equal; 6 more differ in one label: 1 %; with 7 more it is too many."""
    assert close_difference(np.array([4, 6, 490, 500])) == 1
    assert close_difference(np.array([4, 7, 489, 500])) == 0
    assert close_difference(np.array([200, 100, 700])) == 0  # equal labels are close, however many


def test_each_relation_has_its_name() -> None:
    differences = np.arange(6)
    names = [RELATIONS[n] for n in relation(differences, close=1, hard=4)]
    assert names == ["false", "close", "neither", "neither", "hard", "hard"]
    by_anchor = relation(np.array([[0, 2], [0, 2]]), 0, np.array([[1], [3]]))
    assert by_anchor.tolist() == [[0, 3], [0, 2]]


def test_sums_by_cell_are_the_rows_own() -> None:
    cells = np.array([[0, 2, 2], [1, 1, 0]])
    assert row_sums(cells, 3).tolist() == [[1, 0, 2], [1, 2, 0]]
    values = np.array([[5.0, 1, 2], [3, 4, 7]])
    assert row_sums(cells, 3, values).tolist() == [[5, 0, 3], [7, 7, 0]]


@pytest.mark.parametrize("exclusive", [True, False])
@pytest.mark.parametrize("block", [1, 1 << 22])
def test_counts_of_pairs_are_a_loop_s(
    exclusive: bool, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An anchor is not its own other; an anchor may be among the others or not."""
    monkeypatch.setattr(negatives, "BLOCK_PAIRS", block)
    y = np.eye(5, dtype=int)[labels(23, 1).argmax(1)] if exclusive else labels(23, 1)
    anchors, others = np.array([3, 7, 20]), np.array([0, 1, 3, 4, 9, 11, 12, 20, 22])
    pairs = LabelPairs(y, exclusive, anchors, others)
    expected = np.zeros((3, 2 if exclusive else 6), int)
    for (place, a), b in product(enumerate(anchors), others):
        if a != b:
            differ = (y[a] != y[b]).sum()
            expected[place, min(differ, 1) if exclusive else differ] += 1
    found = np.concatenate([pairs.counts(part) for part in pairs.blocks()])
    np.testing.assert_array_equal(found, expected)


def test_pairs_are_drawn_among_labelled_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    y, known = labels(60, 2), np.arange(60) % 3 > 0
    whole = draw_pairs(y, known, exclusive=False, anchors=0)
    assert whole.anchors.tolist() == whole.others.tolist() == np.flatnonzero(known).tolist()
    monkeypatch.setattr(negatives, "OTHERS", 25)
    some = draw_pairs(y, known, exclusive=False, anchors=7, seed=1)
    for drawn, count in ((some.anchors, 7), (some.others, 25)):
        assert len(set(drawn)) == count and known[drawn].all() and (np.diff(drawn) > 0).all()
    assert some.anchors.tolist() != draw_pairs(y, known, False, 7, seed=2).anchors.tolist()


def test_close_labels_of_a_data_set_are_those_of_all_pairs() -> None:
    """All pairs but those of a sample with itself; samples without labels have no say."""
    draw = np.random.default_rng(3)
    y = (draw.random((80, 24)) < 0.4).astype(int)
    known = draw.random(80) < 0.8
    rows = np.flatnonzero(known)
    pairs = [int((y[a] != y[b]).sum()) for a, b in product(rows, rows) if a != b]
    share = [np.mean([pair <= most for pair in pairs]) for most in range(25)]
    expected = max(most for most in range(25) if most == 0 or share[most] <= 0.01)
    assert expected > 0
    y[~known] = 0  # as if all were alike
    assert close_label_difference(y, known, exclusive=False) == expected
    assert close_label_difference(y, np.zeros(80, bool), exclusive=False) == 0
