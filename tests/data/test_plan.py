"""The order of rows is a function of (seed, epoch, canonical streams) and of nothing else."""

import numpy as np
import pytest

from heron.pipeline.config.errors import ConfigError
from heron.pipeline.data.plan import Stream, default_streams, share, shares


def stream(batch: int = 12, canonical: int = 4, window: int = 1000, seed: int = 0) -> Stream:
    shards = [np.arange(0, 40), np.arange(40, 55), np.arange(55, 101)]
    return Stream("unlabelled", shards, batch, seed, canonical, window)


def test_an_epoch_is_every_row_once_but_for_less_than_a_batch() -> None:
    plan = stream()
    for epoch in range(3):
        steps = range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch)
        seen = np.concatenate([plan.at(t) for t in steps])
        assert len(seen) == len(set(seen.tolist())) == 101 - plan.left_over
        assert plan.left_over < plan.batch
        everything = np.sort(np.concatenate(plan.order(epoch)))
        assert everything.tolist() == list(range(101))


def test_epochs_and_seeds_differ_and_repeat() -> None:
    assert stream().at(3).tolist() == stream().at(3).tolist()
    assert stream().at(0).tolist() != stream(seed=1).at(0).tolist()
    assert stream().at(0).tolist() != stream().at(stream().steps_per_epoch).tolist()


def test_any_batch_can_be_asked_for_without_those_before() -> None:
    forward = stream()
    straight = [forward.at(t).tolist() for t in range(20)]
    assert [stream().at(t).tolist() for t in reversed(range(20))] == straight[::-1]


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_shares_are_contiguous_and_differ_by_one(world: int) -> None:
    batch = stream().at(5)
    parts = [batch[share(12, rank, world)] for rank in range(world)]
    assert np.concatenate(parts).tolist() == batch.tolist()
    assert shares(12, world) == [len(part) for part in parts]
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_small_window_moves_no_row_far() -> None:
    plan = Stream("unlabelled", [np.arange(1000)], 10, 0, 2, window=20)
    for part in plan.order(0):
        moved = np.abs(part - np.arange(part.min(), part.min() + len(part)))
        assert 0 < moved.max() < 20


def test_a_process_touches_few_shards() -> None:
    """Contiguous canonical streams: half of the processes see about half of the shards."""
    shards = [np.arange(i * 64, (i + 1) * 64) for i in range(32)]
    plan = Stream("unlabelled", shards, 64, 0, 64, window=64)
    mine = [plan.at(t)[share(64, 0, 8)] for t in range(plan.steps_per_epoch)]
    assert len({row // 64 for rows in mine for row in rows.tolist()}) <= 32 // 8 + 1


def test_default_number_of_streams() -> None:
    assert [default_streams(b) for b in (512, 120, 2287, 121, 1)] == [64, 60, 1, 11, 1]


def test_bad_plans_name_the_remedy() -> None:
    with pytest.raises(ConfigError, match="is 102, but there are 101 unlabelled rows; expected at"):
        stream(batch=102)
    with pytest.raises(ConfigError, match="5, which does not divide .* = 12; the nearest .* is 4"):
        stream(canonical=5)
