"""A run's folder, held by one run at a time: two would write over each other's checkpoints."""

import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Self

from heron.pipeline.config.errors import Held, Stopped, TrainingError
from heron.pipeline.distributed.collectives import gather_objects, rank
from heron.pipeline.distributed.watchdog import Watchdog

LOCK = ".lock"
WAIT_S = 60.0  # for a run that was killed elsewhere and has not ended yet
LOOK_S = 0.1
WITHOUT = errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS  # of a file system that has no locks


class Hold:
    """Holds a run's folder until it is left, or its process ends in any way.

    It is as good as the file system's `flock`: one that locks for a machine alone, or not at all,
    does not tell of a run on another machine.
    """

    def __init__(self, folder: Path) -> None:
        """Nothing is held yet."""
        self._folder = folder
        self._lock: IO[str] | None = None

    def take(self, watchdog: Watchdog, stop: Callable[[], object] = lambda: False) -> None:
        """Take the folder on the main process; every process must call it.

        Args:
            watchdog: is told that waiting may take long.
            stop: whether not to wait any longer: a signal came.

        Raises:
            Held, Stopped, TrainingError: on every process; see `acquire`.
        """
        fault: TrainingError | Stopped | None = None
        if rank() == 0:
            try:
                with watchdog.busy():
                    self.acquire(stop)
            except (TrainingError, Stopped) as error:
                fault = error
        if (fault := gather_objects(fault)[0]) is not None:
            raise fault

    def acquire(self, stop: Callable[[], object] = lambda: False) -> None:
        """Take the folder; it is made where it is not there.

        Raises:
            Held: another run still has it after `WAIT_S` seconds.
            Stopped: it is not to be waited for any longer.
            TrainingError: nothing can be written to it.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = (self._folder / LOCK).open("a+")
            self._wait(self._lock, stop)
            self._lock.truncate(0)
            self._lock.write(f"process {os.getpid()} on {socket.gethostname()}")
            self._lock.flush()
        except OSError as error:
            raise TrainingError(
                f"{self._folder} cannot be held by a run: {error}; expected a folder that can be "
                "written to: make room, or choose another run.dir"
            ) from error

    def _wait(self, lock: IO[str], stop: Callable[[], object]) -> None:
        until = time.monotonic() + WAIT_S
        told = False
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.seek(0)
                who = lock.read().strip() or "a run that does not say which"
            except OSError as error:
                if error.errno not in WITHOUT:
                    raise
                print(f"{self._folder} has no locks ({error}): see to it that one run is in it")
                return
            else:
                return
            if time.monotonic() >= until:
                raise Held(
                    f"{self._folder} is still held by {who}, after {WAIT_S:.0f} s; expected one "
                    "run in a folder: wait for its end, or choose another run.dir"
                )
            if not told:
                print(f"{self._folder} is held by {who}; waiting for its end", flush=True)
                told = True
            if stop():
                raise Stopped(f"a signal came while {self._folder} was held by {who}")
            time.sleep(LOOK_S)

    def __enter__(self) -> Self:
        """What lets go when it is left."""
        return self

    def __exit__(self, *error: object) -> None:
        """Let go; the file stays, as another may wait on it."""
        if self._lock is not None:
            self._lock.close()
