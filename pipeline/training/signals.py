"""Signals that ask a run to save and stop: what a scheduler sends before it takes a machine."""

import os
import signal
import threading
from multiprocessing import forkserver, parent_process, resource_tracker
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, Self

SIGNALS = signal.SIGTERM, signal.SIGUSR1


class StopSignals:
    """While it is open, SIGTERM and SIGUSR1 only leave a note, which the training loop reads.

    Attributes:
        came: the name of the signal that came, or "".
    """

    def __init__(self, workers: bool) -> None:
        """Listens to nothing yet; `workers`: schedulers will signal reading processes as well."""
        self.came = ""
        self._workers = workers
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        """Listens; only a main thread can, so elsewhere nothing ever comes."""
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
            if self._workers:  # what is started now does not hear what is ignored now
                forkserver.ensure_running()
                resource_tracker.ensure_running()
            for number in SIGNALS:
                signal.signal(number, self._note)
        return self

    def asked(self) -> bool:
        """Returns whether a signal has come."""
        return bool(self.came)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = signal.Signals(number).name

    def __exit__(self, *error: object) -> None:
        """Stops listening."""
        for number, handler in self._before.items():
            signal.signal(number, handler)


def follow_parent() -> None:
    """Makes a reading process leave when the training process is gone, and not at a signal."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if (parent := parent_process()) is not None:
        threading.Thread(target=_wait_for, args=[parent], daemon=True).start()


def _wait_for(parent: BaseProcess) -> None:
    parent.join()
    os._exit(0)
