"""Hard negatives back into training: tables of near rows with far labels, made while it goes on."""

import json
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self
from uuid import uuid4

import numpy as np
import torch
from numpy.typing import NDArray

from heron.pipeline.config.errors import CheckpointError, TrainingError
from heron.pipeline.config.experiment import Negatives
from heron.pipeline.data.mined import MinedStream, table_name
from heron.pipeline.data.plan import Rows
from heron.pipeline.distributed.collectives import gather_objects, rank
from heron.pipeline.evaluation.evaluator import Evaluator
from heron.pipeline.models.heterogeneous import Heterogeneous
from heron.pipeline.training.checkpoint import complete
from heron.shards.atomic import atomic_write, save_json
from heron.shards.sources.base import sha256

BLOCK = 4096  # rows that are searched for at a time, at most
CELLS = 2**24  # labels that are compared at a time
MEETING = "meeting"  # a file that tells whether all processes see the folder
SEEN = 8  # so many times the rows of a table are looked at, to find enough with far labels
SAMPLE = 1000  # rows that the median label distance of a row is taken over


@dataclass
class Miner:
    """Refreshes the tables that a `MinedStream` reads.

    The labelled rows are embedded by all processes, by the weights of that step; the index over
    them is built and searched by a thread of the main process while training goes on, and has
    `every_steps` steps for it.

    Attributes:
        config: how often, how many, how far.
        stream: whose rows are embedded.
        evaluator: embeds them.
        checkpoints: of the run: tables that they may go on from stay.
    """

    config: Negatives
    stream: MinedStream
    evaluator: Evaluator
    checkpoints: Path
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    _work: Future[None] | None = None

    def begin(self, step: int) -> None:
        """Make the folder ready for a run that begins or goes on at a step; all call it.

        The tables of an earlier run are set aside, as its checkpoints are.

        Raises:
            CheckpointError: a table that the steps after it need is not there, or not what it was;
                or not all processes see the folder.
        """
        folder, every = self.stream.folder, self.config.every_steps
        fault, token = "", uuid4().hex
        if rank() == 0:
            if not step:
                _set_aside(folder)
            folder.mkdir(parents=True, exist_ok=True)
            for path in folder.glob("step-*"):
                if _step(path) > step:
                    path.unlink()  # of a run that came further
            needed = {(step // every - 1) * every, step // every * every}
            for made_at in sorted(s for s in needed if s > 0):
                fault = fault or _damage(folder / table_name(made_at))
            (folder / MEETING).write_text(token)
        fault, token = gather_objects((fault, token))[0]
        if fault:
            raise CheckpointError(
                f"{fault}; the batches after step {step} are drawn from it; bring it back, or run "
                "with run.resume=never to begin anew"
            )
        try:
            seen = (folder / MEETING).read_text() == token
        except OSError:
            seen = False
        if blind := [n for n, sees in enumerate(gather_objects(seen)) if not sees]:
            raise CheckpointError(
                f"{folder} is not one folder for all processes: rank {blind[0]} does not see what "
                "rank 0 wrote there; expected run.dir on a disk that all machines share"
            )

    def __enter__(self) -> Self:
        """What ends when it is left."""
        return self

    def __exit__(self, *error: object) -> None:
        """Tell the reading processes to wait no more, and mine no more."""
        self.stream.ended.set()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def wait(self, t: int) -> None:
        """Before batch t is asked for: the table that it needs is there, or a fault is raised."""
        if t % self.config.every_steps == 0:
            self.finish()

    def finish(self) -> None:
        """Wait for the table that is being made.

        Raises:
            TrainingError: it could not be made.
        """
        work, self._work = self._work, None
        if work is not None:
            with self.evaluator.watchdog.busy():
                work.result()

    def refresh(self, model: Heterogeneous, step: int) -> None:
        """Embed the labelled rows after a step, where it is due, and begin a table; all call it."""
        if step % self.config.every_steps:
            return
        self.finish()
        found = self.evaluator.predict(model, self.stream.rows, hidden=True)
        assert found.hidden is not None
        if not np.isfinite(found.hidden).all():
            raise TrainingError(
                f"step {step}: embeddings of labelled rows are not finite; hard negatives cannot "
                "be mined; look at the loss of the steps before"
            )
        if rank() == 0:
            given = self.stream.rows, found.rows, found.hidden, found.y
            self._work = self._thread.submit(self._make, step, *given)

    def _make(
        self, step: int, rows: Rows, kept: Rows, hidden: NDArray[np.float32], y: NDArray[np.float32]
    ) -> None:
        exclusive, nearest = self.evaluator.exclusive, self.config.nearest
        table = np.full((len(rows), nearest), -1, np.int64)
        table[np.searchsorted(rows, kept)] = mine(hidden, y, kept, nearest, exclusive)
        path = self.stream.folder / table_name(step)
        path.unlink(missing_ok=True)
        note = path.with_suffix(".json")
        with atomic_write(path) as stream:
            np.save(stream, table)
        save_json(note, {"sha256": sha256(path)})
        every, saved = self.config.every_steps, complete(self.checkpoints)
        oldest = min([step, *(int(path.name.removeprefix("step-")) for path in saved)])
        for old in self.stream.folder.glob("step-*.npy"):
            if _step(old) < (oldest // every - 1) * every:  # no batch after a checkpoint needs it
                old.with_suffix(".json").unlink(missing_ok=True)
                old.unlink()


def mine(
    hidden: NDArray[np.float32],
    y: NDArray[np.float32],
    rows: Rows,
    nearest: int,
    exclusive: bool,
) -> Rows:
    """The nearest rows with far labels of every row: by cosine, exact.

    Far is another class where classes exclude each other; else at least the row's median Hamming
    distance to the rows of the data set, of which a fixed sample is taken.

    Args:
        hidden: embeddings, [rows, dim].
        y: labels as 0/1, [rows, labels].
        rows: numbers of the rows, [rows].
        nearest: how many a row.
        exclusive: whether a row has one class.

    Returns:
        Numbers of rows, nearest first, [rows, nearest]; -1 where there are no more among the
        `SEEN` times as many that were looked at.
    """
    import faiss  # here: only mining needs it

    unit = hidden / np.maximum(np.linalg.norm(hidden, axis=1, keepdims=True), 1e-12)
    faiss.omp_set_num_threads(torch.get_num_threads())
    index = faiss.IndexFlatIP(unit.shape[1])
    index.add(unit)
    seen = min(len(rows), SEEN * nearest + 1)
    sample = y[:: max(1, len(y) // SAMPLE)]
    out = np.full((len(rows), nearest), -1, np.int64)
    classes = y.argmax(1)
    size = min(BLOCK, max(1, CELLS // (seen * (1 if exclusive else y.shape[1]))))
    for first in range(0, len(rows), size):
        block = slice(first, first + size)
        _, near = index.search(unit[block], seen)
        if exclusive:
            far = classes[near] != classes[block, None]
        else:
            differ = (y[near] != y[block, None]).sum(2)
            usual = np.median(_hamming(y[block], sample), axis=1)
            far = differ >= np.maximum(usual, 1)[:, None]
        far &= near != np.arange(first, first + len(near))[:, None]
        order = np.argsort(~far, axis=1, kind="stable")[:, :nearest]
        chosen = np.take_along_axis(far, order, 1)
        found = rows[np.take_along_axis(near, order, 1)]
        out[block, : order.shape[1]] = np.where(chosen, found, -1)
    return out


def _hamming(a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float32]:
    """In how many labels rows differ, [a, b]: of 0/1, by two products."""
    return np.asarray(a @ (1 - b).T + (1 - a) @ b.T, np.float32)


def _set_aside(folder: Path) -> None:
    """Move the tables of an earlier run away: its checkpoints need them."""
    if not any(folder.glob("step-*.npy")):
        return
    number = 1
    while (aside := folder.with_name(f"{folder.name}-{number}")).exists():
        number += 1
    folder.rename(aside)


def _step(table: Path) -> int:
    """After which step a table was mined."""
    return int(table.stem.removeprefix("step-"))


def _damage(table: Path) -> str:
    """What is wrong with a table, or ""."""
    try:
        known = json.loads(table.with_suffix(".json").read_text())["sha256"]
        return "" if sha256(table) == known else f"{table} is not what was written"
    except (OSError, ValueError, KeyError) as error:
        return f"{table} cannot be read: {error}"
