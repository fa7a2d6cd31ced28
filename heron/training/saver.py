"""Writes a run's checkpoints while it trains on."""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Self

from heron.base.errors import CheckpointError
from heron.distributed.collectives import broadcast_object, rank
from heron.distributed.watchdog import Watchdog
from heron.losses.objective import Objective
from heron.training import checkpoint
from heron.training.checkpoint import Position, Snapshot, complete_checkpoints
from heron.training.kept_weights import Kept
from heron.training.strategy import Strategy, copies_on_main


class Saver:
    """Writes a run's checkpoints one at a time; training waits only for the copy of its state.

    The first process writes. Its fault is raised on every process, by `wait`.
    """

    def __init__(
        self, folder: Path, newest: int, data: str, texts: dict[str, str], watchdog: Watchdog
    ) -> None:
        """Keeps the `newest` newest checkpoints of `folder`.

        `data` is the fingerprint of the data set; `texts` are files beside the tensors, by name.
        """
        self._folder, self._newest, self._data = folder, newest, data
        self._texts, self._watchdog = texts, watchdog
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._step, self._gathered = 0, Event()
        self._work: Future[None] | None = None

    def __enter__(self) -> Self:
        """Returns the saver; leaving the context lets the last checkpoint be written."""
        return self

    def __exit__(self, *error: object) -> None:
        """Waits for the thread, unless Ctrl-C ends the run at once; raises nothing of its own."""
        if error[0] is not KeyboardInterrupt and self._work:
            self._settle(self._work)
        self._thread.shutdown(wait=False)

    def _settle(self, work: Future[None]) -> BaseException | None:
        """Returns the fault of a checkpoint, or None where it is on disk."""
        self._gathered.wait()  # and not busy: another process may be gone
        with self._watchdog.busy():
            return work.exception()

    def begin(
        self, position: Position, strategy: Strategy, objective: Objective, kept: Kept
    ) -> None:
        """Copies a run's state, and starts to write it; every process must call it.

        It waits for the checkpoint before, so that host memory never holds two copies, and raises
        as `wait` does.
        """
        self.wait()
        optimizer = strategy.optimizer_state(position.step)
        states = [strategy.model_state(), optimizer, kept.average.state(), kept.best.state()]
        memories, found = copies_on_main(objective.memory_state()), kept.best.found
        gathered = self._gathered = Event()

        def write() -> None:
            try:
                full = [strategy.in_full(state) for state in states]
            finally:
                gathered.set()
            if rank() == 0:
                trained, moments, average, best = full
                parts = trained, moments, memories, self._data, average, best
                snapshot = Snapshot(position, *parts, found)
                checkpoint.save(self._folder, snapshot, self._texts, self._newest)

        self._step, self._work = position.step, self._thread.submit(write)

    def failed(self) -> bool:
        """Returns whether this process could not write its last checkpoint."""
        work = self._work
        return work is not None and work.done() and work.exception() is not None

    def wait(self) -> None:
        """Waits until the last checkpoint is on disk; every process must call it.

        Raises CheckpointError on every process if it could not be written; earlier ones stay.
        """
        work, self._work = self._work, None
        if work is None:  # on every process
            return
        fault, error = "", self._settle(work)
        if isinstance(error, OSError):
            earlier = complete_checkpoints(self._folder)
            fault = (
                f"cannot write the checkpoint of step {self._step} to {self._folder}: {error}; "
                f"last checkpoint: {earlier[-1] if earlier else 'none'}; free some space, and run "
                "again with run.resume=auto to continue from there"
            )
        elif error is not None:
            raise error
        if fault := broadcast_object(fault):
            raise CheckpointError(fault)
