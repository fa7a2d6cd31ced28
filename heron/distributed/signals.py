"""Signals that make a run save and stop: those of a scheduler, and Ctrl-C."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from types import FrameType
from typing import Any, Self

SIGNALS = signal.SIGTERM, signal.SIGUSR1
REPEAT_S = 1.0  # a launcher repeats the Ctrl-C that the terminal has sent to all its processes
CTRL_C = b"\nCtrl-C: the run saves after this step and stops; once more, and it stops at once\n"


class StopSignals:
    """While it is open, SIGTERM and SIGUSR1 only set a flag, which the training loop reads.

    So does the first Ctrl-C inside `saving`; the second, or one outside, raises KeyboardInterrupt.
    `name` is of the signal that was received, or "".
    """

    def __init__(self, workers: bool) -> None:
        """Handles nothing yet; `workers`: schedulers will signal reading processes as well."""
        self.name = ""
        self._workers, self._saving, self._received_at = workers, False, 0.0
        self._old_handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        """Installs the handlers; in a thread other than the main one nothing is ever received."""
        if threading.current_thread() is threading.main_thread():
            self._old_handlers = {
                number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS
            }
            if self._workers:  # processes started now inherit that the signals are ignored
                forkserver.ensure_running()
                resource_tracker.ensure_running()
            for number in SIGNALS:
                signal.signal(number, self._note)
            # Where SIGINT is ignored, as in a background job, it stays ignored.
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                self._old_handlers[signal.SIGINT] = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def received(self) -> bool:
        """Returns whether a signal has been received."""
        return bool(self.name)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """While it is open, the first Ctrl-C sets the flag: a loop reads it."""
        self._saving = True
        try:
            yield
        finally:
            self._saving = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.name, self._received_at = signal.Signals(number).name, time.monotonic()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.name and time.monotonic() - self._received_at < REPEAT_S:
            return
        if self.name or not self._saving:
            raise KeyboardInterrupt
        self._note(number, frame)
        os.write(2, CTRL_C)  # a handler may not print: it may have interrupted a print

    def __exit__(self, *error: object) -> None:
        """Restores the handlers that were there before."""
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
