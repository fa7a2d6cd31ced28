"""The watchdog leaves no thread behind; for a process that stands still see test_kills.py."""

import threading
import time

import pytest

from heron.pipeline.distributed import watchdog
from heron.pipeline.distributed.watchdog import Watchdog


class SlowStore:
    """A store that is being asked when the run ends."""

    asked = threading.Event()

    def set(self, *_: str) -> None:
        self.asked.set()
        time.sleep(0.3)

    def check(self, _: list[str]) -> bool:
        return False


def test_no_thread_is_left_in_the_store_when_the_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter would abort with it, after all was done (status 134)."""
    monkeypatch.setattr(watchdog, "world_size", lambda: 2)
    monkeypatch.setattr(watchdog, "default_store", lambda _: SlowStore())
    before = set(threading.enumerate())
    with Watchdog(0.5) as watched:
        watched.start()
        assert SlowStore.asked.wait(5)
    assert set(threading.enumerate()) == before
