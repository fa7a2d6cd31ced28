"""Batches copied to a GPU ahead of their use, with stand-ins for its streams and its memory."""

import threading
from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import Tensor

from heron.data import batches
from heron.data.batches import Batch, on_device

GPU = torch.device("cuda", 1)


class Stream:
    """A stand-in for `torch.cuda.Stream`: notes what is asked of it, in order."""

    def __init__(self, log: list[Any], name: str) -> None:
        self.log, self.name = log, name

    def record_event(self) -> int:
        self.log.append((self.name, "event"))
        return len(self.log)

    def wait_event(self, event: int) -> None:
        self.log.append((self.name, "waits for", event))

    def __enter__(self) -> None:
        self.log.append((self.name, "begins"))

    def __exit__(self, *error: Any) -> None:
        pass


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    log: list[Any] = []
    computing, copying = Stream(log, "computing"), Stream(log, "copying")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: copying)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: computing)

    def pin(batch: Batch) -> Batch:
        log.append(("pinned", threading.current_thread() is threading.main_thread()))
        return batch

    def to(batch: Batch, device: torch.device) -> Batch:
        log.append(("copied", int(batch.indices[0]), device))
        return batch

    monkeypatch.setattr(Batch, "pin_memory", pin)
    monkeypatch.setattr(Batch, "to", to)
    monkeypatch.setattr(
        Tensor, "record_stream", lambda x, stream: log.append((stream.name, "uses", x.shape))
    )
    return log


def made(n: int, closed: list[bool], fails_at: int = -1) -> Generator[Batch, None, None]:
    try:
        for t in range(n):
            if t == fails_at:
                raise ValueError("a damaged shard")
            rows = torch.full((2,), t)
            yield Batch({"x": torch.zeros(2, 3)}, torch.zeros(1, 5), rows, rows, [1, 1])
    finally:
        closed.append(True)


def test_the_next_batch_is_copied_while_the_last_is_used(log: list[Any]) -> None:
    closed: list[bool] = []
    source = on_device(made(3, closed), GPU)
    used = []
    for batch in source:
        used.append(int(batch.indices[0]))
        events = [n for n, entry in enumerate(log, 1) if entry == ("copying", "event")]
        waits = [entry[2] for entry in log if entry[:2] == ("computing", "waits for")]
        assert waits == events[: len(used)]  # every batch's own copy, and no later one
    assert used == [0, 1, 2]
    assert [entry[1] for entry in log if entry[0] == "copied"] == [0, 1, 2]
    assert {entry[2] for entry in log if entry[0] == "copied"} == {GPU}
    assert {entry[1] for entry in log if entry[0] == "pinned"} == {False}  # in the thread
    assert closed == [True]
    uses = [entry[2] for entry in log if entry[:2] == ("computing", "uses")]
    # paths, targets, indices, keys and the view of each batch
    assert sorted(uses) == sorted([(0, 0), (1, 5), (2,), (2,), (2, 3)] * 3)


def test_one_batch_is_copied_ahead_and_no_more(log: list[Any]) -> None:
    closed: list[bool] = []
    source = on_device(made(9, closed), GPU)
    next(source)
    next(source)
    source.close()  # waits for the copy that is under way
    assert [entry[1] for entry in log if entry[0] == "copied"] == [0, 1, 2]
    assert closed == [True]


def test_what_reading_raises_is_raised_at_its_batch(log: list[Any]) -> None:
    closed: list[bool] = []
    source = on_device(made(3, closed, fails_at=1), GPU)
    assert int(next(source).indices[0]) == 0
    with pytest.raises(ValueError, match="a damaged shard"):
        next(source)
    assert closed == [True]


def test_on_a_cpu_batches_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "ThreadPoolExecutor", None)
    closed: list[bool] = []
    assert [int(b.indices[0]) for b in on_device(made(3, closed), torch.device("cpu"))] == [0, 1, 2]
    assert closed == [True]
