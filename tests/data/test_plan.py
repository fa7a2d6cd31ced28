"""The order of rows is a function of (seed, epoch, canonical streams) and of nothing else."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from heron.base.errors import ConfigError
from heron.data.plan import Stream, _permute, default_streams, even_sizes, even_slice
from heron.data.rows import Listed, Marked

FIRST = [51, 54, 44, 14, 17, 18, 35, 70, 36, 79, 75, 92]
LATER = [69, 72, 65, 43, 82, 85, 53, 8, 0, 19, 35, 27]


def stream(batch: int = 12, canonical: int = 4, window: int = 1000, seed: int = 0) -> Stream:
    shards = [np.arange(0, 40), np.arange(40, 55), np.arange(55, 101)]
    return Stream("unlabelled", Listed.from_shards(shards), batch, seed, canonical, window)


def test_an_epoch_is_every_row_once_but_for_less_than_a_batch() -> None:
    plan = stream()
    for epoch in range(3):
        steps = range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch)
        seen = np.concatenate([plan.batch_rows(t) for t in steps])
        assert len(seen) == len(set(seen.tolist())) == 101 - plan.left_over
        assert plan.left_over < plan.batch
        everything = np.sort(np.concatenate(plan.order(epoch)))
        assert everything.tolist() == list(range(101))


def test_epochs_and_seeds_differ_and_repeat() -> None:
    assert stream().batch_rows(3).tolist() == stream().batch_rows(3).tolist()
    assert stream().batch_rows(0).tolist() != stream(seed=1).batch_rows(0).tolist()
    assert stream().batch_rows(0).tolist() != stream().batch_rows(stream().steps_per_epoch).tolist()


def test_any_batch_can_be_asked_for_without_those_before() -> None:
    forward = stream()
    straight = [forward.batch_rows(t).tolist() for t in range(20)]
    assert [stream().batch_rows(t).tolist() for t in reversed(range(20))] == straight[::-1]


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_shares_are_contiguous_and_differ_by_one(world: int) -> None:
    batch = stream().batch_rows(5)
    parts = [batch[even_slice(12, rank, world)] for rank in range(world)]
    assert np.concatenate(parts).tolist() == batch.tolist()
    assert even_sizes(12, world) == [len(part) for part in parts]
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_small_window_moves_no_row_far() -> None:
    plan = Stream("unlabelled", Listed.from_shards([np.arange(1000)]), 10, 0, 2, window_rows=20)
    for part in plan.order(0):
        moved = np.abs(part - np.arange(part.min(), part.min() + len(part)))
        assert 0 < moved.max() < 20


def test_a_process_touches_few_shards() -> None:
    """Contiguous canonical streams: half of the processes see about half of the shards."""
    shards = [np.arange(i * 64, (i + 1) * 64) for i in range(32)]
    plan = Stream("unlabelled", Listed.from_shards(shards), 64, 0, 64, window_rows=64)
    mine = [plan.batch_rows(t)[even_slice(64, 0, 8)] for t in range(plan.steps_per_epoch)]
    assert len({row // 64 for rows in mine for row in rows.tolist()}) <= 32 // 8 + 1


def test_default_number_of_streams() -> None:
    assert [default_streams(b) for b in (512, 120, 2287, 121, 1)] == [64, 60, 1, 11, 1]


def test_bad_plans_name_the_remedy() -> None:
    with pytest.raises(
        ConfigError, match="is 102, but there are only 101 unlabelled rows; lower it"
    ):
        stream(batch=102)
    with pytest.raises(ConfigError, match="5, which does not divide .* = 12; the nearest .* is 4"):
        stream(canonical=5)


def test_the_order_of_streams_that_fit_the_window_stays() -> None:
    """Published results and the reference losses stand on it."""
    assert stream().batch_rows(0).tolist() == FIRST
    assert stream(seed=3).batch_rows(17).tolist() == LATER


def test_longer_streams_are_shuffled_within_windows() -> None:
    """Any batch without those before, every row once, and few rows ever looked at."""
    plan = long(window=7)
    straight = [plan.batch_rows(t).tolist() for t in range(20)]
    assert [long(window=7).batch_rows(t).tolist() for t in reversed(range(20))] == straight[::-1]
    assert plan.rows_of_batches(np.arange(20)).tolist() == straight
    assert [plan.batch_rows(3, slice(5, 9)).tolist()] == [straight[3][5:9]]
    for epoch in range(2):
        everything = np.concatenate(plan.order(epoch))
        assert np.sort(everything).tolist() == list(range(101))
        first = plan.steps_per_epoch * epoch
        assert straight[first][:3] == plan.order(epoch)[0][:3].tolist()
    assert (
        long(seed=1).batch_rows(0).tolist() != straight[0] != long(window=13).batch_rows(0).tolist()
    )


def long(window: int = 7, seed: int = 0) -> Stream:
    return stream(window=window, seed=seed)


def test_the_bijection_gives_every_place_once_and_each_key_another_order() -> None:
    seen = set()
    for size in (1, 2, 5, 16, 17, 63, 64, 65):
        for key in range(4):
            places = np.arange(size)
            found = _permute(places, np.full(size, size), np.full(size, key))
            assert np.sort(found).tolist() == places.tolist()
            seen.add(tuple(found.tolist()))
    assert len(seen) > 3 + 6 * 4 - 4
    at = _permute(np.arange(4096), np.full(4096, 4096), np.full(4096, 9))
    assert abs(np.corrcoef(at[:-1], at[1:])[0, 1]) < 0.05 > abs(np.corrcoef(at, range(4096))[0, 1])


def test_a_list_and_marks_are_planned_alike(tmp_path: Path) -> None:
    starts, marks = np.array([0, 40, 55, 55, 101]), np.arange(101, dtype=np.uint8) % 3
    np.save(tmp_path / "marks.npy", marks)
    rows = np.flatnonzero(marks & 2)
    listed = Listed.cut(rows, starts)
    marked = pickle.loads(pickle.dumps(Marked(starts, listed.sizes, tmp_path / "marks.npy", 2)))
    assert [part.tolist() for part in marked] == [part.tolist() for part in listed]
    assert marked.all_rows.tolist() == listed.all_rows.tolist() == rows.tolist()
    plans = [Stream("labelled", shards, 6, 0, 3, window_rows=4) for shards in (listed, marked)]
    assert [[p.batch_rows(t).tolist() for t in range(12)] for p in plans[:1]] == [
        [p.batch_rows(t).tolist() for t in range(12)] for p in plans[1:]
    ]
    for shards in (listed, marked, marked.with_bits(2)):
        assert shards.contains(np.array([0, 1, 2, 100, -1])).tolist() == [
            False,
            False,
            True,
            False,
            False,
        ]
        assert list(shards.following(50)) == [*rows[rows > 50], *rows[rows < 50]]
        assert [len(part) for part in shards.shard_range(1, 3)] == [5, 0]
    assert marked.with_bits(3).total == np.count_nonzero(marks)


def test_all_rows_of_shards_take_no_list() -> None:
    """A billion rows in 100,000 shards, on any number of processes."""
    starts = np.arange(100_001) * 10_000
    plan = Stream("unlabelled", Marked(starts, np.diff(starts)), 4096, 0, 64, 16384)
    t = 5 * plan.steps_per_epoch + 123_456
    batch = plan.batch_rows(t)
    assert len(set(batch.tolist())) == 4096 and batch.max() < 10**9
    parts = [plan.batch_rows(t, even_slice(4096, rank, 4096)) for rank in (0, 1, 77, 4095)]
    assert [part.tolist() for part in parts] == [[batch[rank]] for rank in (0, 1, 77, 4095)]
    assert len({row // 10_000 for row in batch.tolist()}) < 64 * 4
    assert not plan._epoch_rows


def test_windows_on_both_sides_of_a_power_of_four() -> None:
    # 129 rows are windows of 64 and 65, and a row of one is drawn beside rows of the other or not.
    for rows, batch, canonical in ((129, 1, 1), (259, 2, 2)):
        plan = Stream(
            "labelled", Listed.from_shards([np.arange(rows)]), batch, 0, canonical, window_rows=100
        )
        steps = plan.steps_per_epoch
        straight = plan.rows_of_batches(np.arange(steps))
        assert len(np.unique(straight)) == steps * batch
        for t in range(steps):
            assert plan.batch_rows(t).tolist() == straight[t].tolist()
            pieces = [plan.batch_rows(t, slice(n, n + 1)) for n in (0, 1)]
            assert [row for piece in pieces for row in piece] == straight[t].tolist()
