"""Views that were exchanged, and blocks of rows that are out of step, are found."""

from typing import Any

import numpy as np
import pytest
from sklearn.metrics import average_precision_score

from heron.audit.pairs import Shift, score_pairs


def views(rows: int = 600, seed: int = 0) -> tuple[Any, Any]:
    """Two views of unlike widths that share six hidden numbers, in clusters."""
    random = np.random.default_rng(seed)
    shared = np.repeat(random.normal(size=(rows // 20, 6)), 20, 0) + random.normal(size=(rows, 6))
    first, second = (shared @ random.normal(size=(6, width)) for width in (12, 20))
    noise = 0.5 * random.normal(size=(rows, 32))
    return (first + noise[:, :12]).astype(np.float32), (second + noise[:, 12:]).astype(np.float32)


def exchanged(second: Any, share: float, seed: int = 1) -> tuple[Any, Any]:
    rows = np.random.default_rng(seed).permutation(len(second))[: int(share * len(second)) // 2 * 2]
    found, wrong = second.copy(), np.zeros(len(second), bool)
    found[rows], wrong[rows] = second[np.roll(rows, len(rows) // 2)], True
    return found, wrong


@pytest.mark.parametrize("share", [0.02, 0.1])
def test_exchanged_views_rank_first_and_are_counted(share: float) -> None:
    first, second = views()
    given, wrong = exchanged(second, share)
    found = score_pairs(first, given)
    assert average_precision_score(wrong, found.suspicion) > 0.9
    assert 0.3 * wrong.sum() < found.estimate.errors < 1.3 * wrong.sum()
    listed = np.argsort(-found.suspicion)[: found.estimate.errors]
    recall = wrong[listed].sum() / wrong.sum()
    assert found.estimate.low <= recall <= found.estimate.high
    assert not found.shifts


def test_right_pairs_are_left_alone() -> None:
    found = score_pairs(*views())
    assert found.estimate.errors <= 3 and not found.shifts


@pytest.mark.parametrize(
    "shift", [Shift(100, 160, 3), Shift(200, 500, -7), Shift(0, 40, 1), Shift(300, 450, 100)]
)
def test_a_block_out_of_step_is_one_finding(shift: Shift) -> None:
    first, second = views()
    given = second.copy()
    given[shift.start : shift.stop] = second[shift.start + shift.by : shift.stop + shift.by]
    found = score_pairs(first, given)
    (one,) = found.shifts
    assert one.by == shift.by
    assert abs(one.start - shift.start) <= 1 and abs(one.stop - shift.stop) <= 1
    assert found.estimate.errors <= 5
    home = found.home[shift.start : shift.stop] - np.arange(shift.start, shift.stop)
    assert (home == shift.by).mean() > 0.5


@pytest.mark.parametrize("rows", [400, 1200])
def test_rows_in_the_order_of_their_classes_are_in_step(rows: int) -> None:
    """Neighbours are as near as the own view there: nothing can be out of step."""
    shifts = []
    for seed in range(4):
        random = np.random.default_rng(seed)
        shared = np.repeat(random.normal(size=(10, 6)), rows // 10, 0)
        first, second = (
            (shared @ random.normal(size=(6, 10)) + 0.3 * random.normal(size=(rows, 10)))
            for _ in range(2)
        )
        shifts += score_pairs(first.astype(np.float32), second.astype(np.float32)).shifts
    assert not shifts


def test_frames_that_change_slowly_are_in_step() -> None:
    random, shifts = np.random.default_rng(0), []
    for _ in range(4):
        frames = random.normal(size=(500, 6))
        for row in range(1, 500):
            frames[row] = 0.9 * frames[row - 1] + 0.4 * frames[row]
        first, second = (
            (frames @ random.normal(size=(6, 10)) + 0.2 * random.normal(size=(500, 10)))
            for _ in range(2)
        )
        shifts += score_pairs(first.astype(np.float32), second.astype(np.float32)).shifts
    assert not shifts


def test_two_blocks_are_two_findings() -> None:
    first, second = views()
    given = second.copy()
    given[50:110], given[300:420] = second[52:112], second[295:415]
    shifts = score_pairs(first, given).shifts
    assert [shift.by for shift in shifts] == [2, -5]
