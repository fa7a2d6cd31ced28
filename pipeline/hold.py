"""A run's folder, held by one run at a time: two would write over each other's checkpoints."""

import errno
import fcntl
import os
import socket
import time
from pathlib import Path
from typing import IO, Self

from pipeline.collectives import gather_objects, rank
from pipeline.errors import TrainingError
from pipeline.watchdog import Watchdog

LOCK = ".lock"
WAIT_S = 60.0  # for a run that was killed elsewhere and has not ended yet
LOOK_S = 0.1
WITHOUT = errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS  # of a file system that has no locks


class Hold:
    """Holds a run's folder from `take` until it is left, or its process ends in any way."""

    def __init__(self, folder: Path) -> None:
        """Nothing is held yet."""
        self._folder = folder
        self._lock: IO[str] | None = None

    def take(self, watchdog: Watchdog) -> None:
        """Take the folder on the main process; every process must call it.

        A file system without locks is trusted to have one run in a folder.

        Args:
            watchdog: is told that waiting may take long.

        Raises:
            TrainingError: on every process, when another run still has it after `WAIT_S` seconds.
        """
        fault = ""
        if rank() == 0:
            with watchdog.busy():
                fault = self._wait()
        if fault := gather_objects(fault)[0]:
            raise TrainingError(fault)

    def _wait(self) -> str:
        """Why the folder cannot be had; empty where it can."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = (self._folder / LOCK).open("a+")
        until = time.monotonic() + WAIT_S
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < until:
                    time.sleep(LOOK_S)
                    continue
                self._lock.seek(0)
                who = self._lock.read().strip() or "a run that does not say which"
                return (
                    f"{self._folder} is still held by {who}, after {WAIT_S:.0f} s; expected one "
                    "run in a folder: wait for its end, or choose another run.dir"
                )
            except OSError as error:
                if error.errno not in WITHOUT:
                    raise
            self._lock.truncate(0)
            self._lock.write(f"process {os.getpid()} on {socket.gethostname()}")
            self._lock.flush()
            return ""

    def __enter__(self) -> Self:
        """What lets go when it is left."""
        return self

    def __exit__(self, *error: object) -> None:
        """Let go; the file stays, as another may wait on it."""
        if self._lock is not None:
            self._lock.close()
