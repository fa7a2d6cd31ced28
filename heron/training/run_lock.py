"""Locks a run's folder: two runs in it would overwrite each other's checkpoints."""

import fcntl
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Self

from heron.base.atomic import NO_LOCKS, POLL_S, take_lock
from heron.base.errors import Held, Stopped, TrainingError

if TYPE_CHECKING:  # `holder` is used without torch
    from heron.distributed.watchdog import Watchdog

LOCK = ".lock"
WAIT_S = 60.0  # for a run that was killed and has not ended yet


def holder(folder: Path) -> str | None:
    """Returns the holder of a run's folder, "" if it is unnamed, or None where there is none.

    It probes with a shared lock, which other probes do not conflict with, and releases it at once.
    """
    try:
        file = (folder / LOCK).open(errors="replace")
    except FileNotFoundError:
        return None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read(1000).strip()
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
    return None


class RunLock:
    """Locks a run's folder until the context is left, or the process ends in any way.

    The lock is as good as the file system's `flock`: where that locks within one machine only, or
    not at all, a run on another machine goes unnoticed.
    """

    def __init__(self, folder: Path) -> None:
        """Locks nothing yet: see `acquire`."""
        self._folder = folder
        self._file: IO[str] | None = None

    def acquire(self, watchdog: "Watchdog", stop: Callable[[], object] = lambda: False) -> None:
        """Creates and locks the folder on the main process; every process calls it.

        `stop` returns whether a signal was received, which ends the wait for the lock. Every
        process raises Held if another run still has the folder after `WAIT_S` seconds, Stopped if
        `stop` returned true, or TrainingError if nothing can be written to the folder.
        """
        from heron.distributed.collectives import on_main

        def lock() -> None:
            with watchdog.busy():
                self._lock(stop)

        on_main(lock)

    def move(self, work: Callable[[], str]) -> str:
        """Calls `work`, which may move the folder aside, and locks the one in its place.

        Returns what `work` does. Only the main process calls it, with the lock.
        """
        moved, said = self._file, work()
        if said:
            self._lock(lambda: False)
            if moved is not None:
                moved.close()  # a run that waits for it then finds the new one
        return said

    def _lock(self, stop: Callable[[], object]) -> None:
        deadline, announced = time.monotonic() + WAIT_S, False

        def held(owner: str) -> None:
            nonlocal announced
            if time.monotonic() >= deadline:
                raise Held(
                    f"{self._folder} is still in use by {owner} after {WAIT_S:.0f} s, and a folder "
                    "takes one run at a time; wait until it ends, or choose another run.dir"
                )
            if not announced:
                print(f"{self._folder} is in use by {owner}; waiting until it ends", flush=True)
            announced = True
            if stop():
                raise Stopped(f"a signal came while {self._folder} was in use by {owner}")
            time.sleep(POLL_S)

        try:
            self._file = take_lock(self._folder / LOCK, "only one run uses it", held)
        except OSError as error:
            raise TrainingError(
                f"cannot lock {self._folder} for a run: {error}; it must be writable: free some "
                "space, or choose another run.dir"
            ) from error

    def __enter__(self) -> Self:
        """Returns the lock; `acquire` locks."""
        return self

    def __exit__(self, *error: object) -> None:
        """Unlocks the folder, and leaves nothing there: see `take_lock`."""
        if self._file is not None:
            with suppress(OSError):
                (self._folder / LOCK).unlink()
            self._file.close()
