"""The watchdog leaves no thread behind; for a process that stands still see test_kills.py."""

import threading
import time
from collections import Counter
from contextlib import nullcontext

import pytest

from heron.base.errors import LOST
from heron.distributed import watchdog
from heron.distributed.watchdog import Watchdog


class SlowStore:
    """A store that is being asked when the run ends."""

    asked = threading.Event()

    def set(self, *_: str) -> None:
        self.asked.set()
        time.sleep(0.3)

    def add(self, *_: object) -> int:
        return 0

    def check(self, _: list[str]) -> bool:
        return False


class Asked:
    """A store that counts what it is asked, by who asks."""

    def __init__(self) -> None:
        self.asked = Counter[str]()
        self.values: dict[str, str] = {}
        self.who = ""

    def _count(self) -> None:
        self.asked[self.who] += 1

    def set(self, key: str, value: str) -> None:
        self._count()
        self.values[key] = value

    def get(self, key: str) -> bytes:
        self._count()
        return self.values[key].encode()

    def check(self, keys: list[str]) -> bool:
        self._count()
        return all(key in self.values for key in keys)

    def add(self, key: str, amount: int) -> int:
        self._count()
        self.values[key] = str(int(self.values.get(key, "0")) + amount)
        return int(self.values[key])


class Ring:
    """Watchdogs of many processes in one, that talk in turns; one second goes by in a round."""

    def __init__(self, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store, self.now, self.at = Asked(), 1000.0, 0
        monkeypatch.setattr(watchdog, "world_size", lambda: world)
        monkeypatch.setattr(watchdog, "rank", lambda: self.at)
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.dogs = [Watchdog(60) for _ in range(world)]
        monkeypatch.setattr(Watchdog, "_pause", 1.0)

    def turn(self, silent: set[int] | frozenset[int] = frozenset(), moving: bool = True) -> None:
        self.now += 1
        for number, dog in enumerate(self.dogs):
            self.at = number
            if number not in silent:
                self.store.who = str(self.at)
                if moving:
                    dog.beat(dog.step + 1)
                dog._round(self.store, "here")

    def report(self, rank: int) -> str:
        self.at = rank
        return self.dogs[rank].report()


def test_a_round_is_as_many_messages_in_any_number_of_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = {}
    for world in (2, 16, 512):
        ring = Ring(world, monkeypatch)
        ring.turn()
        ring.store.asked.clear()
        ring.turn()
        asked[world] = max(ring.store.asked.values())
    assert asked == dict.fromkeys((2, 16, 512), 5)


def test_all_hear_who_is_silent_and_whether_anyone_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with processes 3 to 5 is gone; the last of the others finds all three."""
    ring = Ring(9, monkeypatch)
    for _ in range(3):
        ring.turn()
    assert "silent" not in ring.store.values and ring.report(0).count("rank") == 2
    gone = {3, 4, 5}
    for _ in range(12):
        ring.turn(gone, moving=False)
    for rank in (0, 1, 2, 6, 8):
        found = ring.report(rank)
        for other in gone:
            assert f"rank {other} on " in found and ", at step 3, was last heard" in found
        assert ring.now - ring.dogs[rank]._others >= 11  # as all stood still
    ring.dogs[7].beat()
    ring.turn(gone, moving=False)
    ring.turn(gone, moving=False)
    assert {ring.now - ring.dogs[rank]._others for rank in (0, 1, 2, 6, 8)} <= {0, 1}
    assert ring.now - ring.dogs[7]._others >= 13  # which was itself
    for _ in range(3):
        ring.turn()
    assert "rank 4" not in ring.report(1)


def test_no_thread_is_left_in_the_store_when_the_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter would abort with it, after all was done (status 134)."""
    monkeypatch.setattr(watchdog, "world_size", lambda: 2)
    monkeypatch.setattr(watchdog, "default_store", lambda _: SlowStore())
    before = set(threading.enumerate())
    with Watchdog(0.5) as watched:
        watched.start()
        assert SlowStore.asked.wait(5)
    # Threads of an earlier test may end meanwhile: only a new one is the watchdog's.
    assert not set(threading.enumerate()) - before


@pytest.mark.parametrize("way", ["steps", "busy"])
def test_it_waits_while_something_moves_and_no_longer(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], way: str
) -> None:
    """Steps, or one long piece of work, for twice the time that nothing may move."""
    left = threading.Event()
    monkeypatch.setattr(watchdog, "leave", lambda status: left.set() if status == LOST else None)
    with Watchdog(0.4) as watched:
        watched.start()
        with watched.busy() if way == "busy" else nullcontext():
            for step in range(8):
                if way == "steps":
                    watched.beat(step)
                assert not left.wait(0.1)
        began = time.monotonic()
        assert left.wait(5) and time.monotonic() - began > 0.3
    step = 7 if way == "steps" else 0
    said = capfd.readouterr().err
    assert "error: nothing has moved for 0.4 s: this is rank 0 on " in said
    assert f" at step {step}; run again with run.resume=auto" in said
