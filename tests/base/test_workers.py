"""Worker processes: each item once, and an end at once, whatever happens."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from heron.base.errors import ShardError, SourceError
from heron.base.workers import Processes, in_order


def work(item: str) -> tuple[str, int]:
    """What an item asks for."""
    if item == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if item == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if item == "leave":
        os._exit(3)
    if item == "bug":
        raise KeyError(item)
    if item == "fault":
        raise SourceError("a.txt: wrong")
    time.sleep(600 if item == "sleep" else 0)
    return item.upper(), os.getpid()


@pytest.mark.parametrize("workers", [1, 2])
def test_every_item_once(workers: int) -> None:
    items = list("abcdefg")
    found = dict(Processes(workers).map(work, items))
    assert {item: result[0] for item, result in found.items()} == {i: i.upper() for i in items}
    used = {process for _, process in found.values()}
    assert os.getpid() not in used if workers == 2 else used == {os.getpid()}
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("item", "fault", "message"),
    [
        (
            "die",
            ShardError,
            r"^die: the process .* ended by SIGKILL \(was memory short\?\); run the",
        ),
        ("leave", ShardError, "^leave: the process that worked on it ended with status 3; .*run"),
        ("fault", SourceError, "^a.txt: wrong$"),
        ("bug", KeyError, "^'bug'"),
    ],
)
def test_a_fault_ends_all(item: str, fault: type[Exception], message: str) -> None:
    with pytest.raises(fault, match=message) as raised:
        list(Processes(2).map(work, ["sleep", item]))
    notes = getattr(raised.value, "__notes__", [])
    assert ["raise KeyError(item)" in note for note in notes] == [True] * (item == "bug")
    assert not multiprocessing.active_children()


def test_results_in_the_order_of_the_items() -> None:
    asked = list[int]()

    def arriving() -> Iterator[tuple[int, str]]:
        for item in (2, 0, 1, 3):
            asked.append(item)
            yield item, str(item)

    found = in_order(range(4), arriving())
    assert next(found) == (0, "0") and asked == [2, 0]  # as soon as it can be
    assert list(found) == [(1, "1"), (2, "2"), (3, "3")]


def alone(item: str) -> str:
    """What a machine has memory for in one process, and not in two."""
    if multiprocessing.parent_process() is not None:
        os.kill(os.getpid(), signal.SIGKILL)
    return item.upper()


def test_fewer_workers_go_on() -> None:
    with pytest.raises(ShardError, match="command again, with fewer --workers if memory is short"):
        list(Processes(2).map(alone, ["a", "b"]))
    assert dict(Processes(1).map(alone, ["a", "b"])) == {"a": "A", "b": "B"}


def test_who_goes_on_no_further_leaves_no_process() -> None:
    with closing(Processes(2).map(work, ["a", "sleep"])) as found:
        assert next(found)[0] == "a"
        assert len(multiprocessing.active_children()) == 2
    assert not multiprocessing.active_children()


SLEEPY = """
import signal
from heron.base.workers import Processes
from tests.base.test_workers import work
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what begins the tests may ignore it
    for _, (_, process) in Processes(2).map(work, ["a", "b", "sleep", "sleep"]):
        print(process, flush=True)
"""


def test_an_interrupt_from_the_terminal_ends_all_at_once(tmp_path: Path) -> None:
    (tmp_path / "sleepy.py").write_text(SLEEPY)
    run = subprocess.Popen(
        [sys.executable, str(tmp_path / "sleepy.py")],
        env=os.environ | {"PYTHONPATH": os.getcwd()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that the signal goes to its processes, as from a terminal
    )
    limit = threading.Timer(60, os.killpg, (run.pid, signal.SIGKILL))
    limit.start()
    assert run.stdout is not None
    workers = [int(run.stdout.readline()) for _ in "ab"]
    time.sleep(0.2)  # the last items are sent
    began = time.monotonic()
    os.killpg(run.pid, signal.SIGINT)
    _, said = run.communicate()
    limit.cancel()
    assert time.monotonic() - began < 20
    assert said.rstrip().endswith("KeyboardInterrupt") and said.count("Traceback") == 1, said
    for worker in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(worker, 0)


def test_a_stopped_worker_keeps_no_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not act on SIGTERM, and what ended the others waited for it for ever."""
    monkeypatch.setattr("heron.base.workers.END_S", 0.5)
    with pytest.raises(KeyError, match="bug"):
        list(Processes(2).map(work, ["stop", "bug"]))
    assert not multiprocessing.active_children()
