"""The watchdog leaves no thread behind; for a process that stands still see test_kills.py."""

import threading
import time
from contextlib import nullcontext

import pytest

from heron.pipeline.config.errors import LOST
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
