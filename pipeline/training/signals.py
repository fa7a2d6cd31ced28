"""Signals that ask a run to save and stop: those of a scheduler, and Ctrl-C."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, parent_process, resource_tracker
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, Self

SIGNALS = signal.SIGTERM, signal.SIGUSR1
SAME_S = 1.0  # a launcher passes on the Ctrl-C that the terminal has sent to all its processes
TOLD = b"\nCtrl-C: the run saves after this step and stops; once more, and it stops at once\n"


class StopSignals:
    """While it is open, SIGTERM and SIGUSR1 only leave a note, which the training loop reads.

    So does the first Ctrl-C while a loop is `saving`; the second, or one where none is, interrupts.

    Attributes:
        came: the name of the signal that came, or "".
    """

    def __init__(self, workers: bool) -> None:
        """Listens to nothing yet; `workers`: schedulers will signal reading processes as well."""
        self.came = ""
        self._workers, self._saving, self._at = workers, False, 0.0
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
            # Where it is ignored, as in the background, something else tells of it, or nobody.
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def asked(self) -> bool:
        """Returns whether a signal has come."""
        return bool(self.came)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """While it is open, a loop reads the note that Ctrl-C leaves."""
        self._saving = True
        try:
            yield
        finally:
            self._saving = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came, self._at = signal.Signals(number).name, time.monotonic()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.came and time.monotonic() - self._at < SAME_S:
            return
        if self.came or not self._saving:
            raise KeyboardInterrupt
        self._note(number, frame)
        os.write(2, TOLD)  # a handler may not print: what it interrupts may be printing

    def __exit__(self, *error: object) -> None:
        """Stops listening."""
        for number, handler in self._before.items():
            signal.signal(number, handler)


def follow_parent() -> None:
    """Makes a reading process leave when the training process is gone, and not at a signal."""
    for number in (*SIGNALS, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    if (parent := parent_process()) is not None:
        threading.Thread(target=_wait_for, args=[parent], daemon=True).start()


def _wait_for(parent: BaseProcess) -> None:
    parent.join()
    os._exit(0)
