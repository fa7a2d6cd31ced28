"""Mines hard negatives during training: tables of near rows with far labels."""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self
from uuid import uuid4

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError

from heron.base.artefact import FileSum, describe_errors
from heron.base.atomic import atomic_write, naming, save_json
from heron.base.errors import CheckpointError, TrainingError
from heron.base.extras import require
from heron.data.options import Negatives
from heron.data.rows import Rows
from heron.data.streams import MinedStream, table_name
from heron.distributed.collectives import gather_if_any, on_main, rank
from heron.evaluation.evaluator import Evaluator
from heron.evaluation.negatives import LabelPairs, hard_difference, label_difference
from heron.models.heterogeneous import Heterogeneous
from heron.training import checkpoint

SHARED = "meeting"  # a file that shows whether all processes see the same folder
SEARCHED_PER_HARD = 8  # neighbours searched per hard negative, as not all of them have far labels
SAMPLE = 1000  # rows, roughly, that the median label distance is computed over


@dataclass
class Miner:
    """Refreshes the tables that a `MinedStream` reads.

    All processes embed the labelled rows with the weights of that step; a thread of the main
    process then searches them while training goes on, and has `every_steps` steps to finish.
    """

    config: Negatives
    stream: MinedStream  # its candidate rows are embedded
    evaluator: Evaluator  # embeds them
    checkpoints: Path  # of the run: tables that resuming one of them would need are kept
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    _work: Future[None] | None = None

    def begin(self, step: int) -> None:
        """Prepares the folder for a run that starts or resumes at a step; all processes call it.

        The tables of an earlier run are set aside, as its checkpoints are. Raises a CheckpointError
        if a table that the next steps need is missing or damaged, or not all processes see the
        folder; a MissingPackage without FAISS; and a RetrievalError if `negatives.gpu` is set, and
        FAISS has no GPU.
        """
        require("faiss", "negatives.mine")
        if self.config.gpu:
            from heron.evaluation.knn import require_gpus  # which loads FAISS

            require_gpus()
        folder = self.stream.folder
        token = on_main(lambda: self._prepare(step))
        try:
            sees_folder = (folder / SHARED).read_text() == token
        except OSError:
            sees_folder = False
        blind_rank = "" if sees_folder else f"rank {rank()}"
        if blind_rank := next(filter(None, gather_if_any(blind_rank)), ""):
            raise CheckpointError(
                f"{folder} is not the same folder for all processes: {blind_rank} cannot see what "
                "rank 0 wrote there; put run.dir on a disk that all machines share"
            )

    def _prepare(self, step: int) -> str:
        """Returns the new text of `SHARED`; CheckpointError for a table that a step needs."""
        folder, every, token = self.stream.folder, self.config.every_steps, uuid4().hex
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("step-*"):
            if _step(path) > step:
                path.unlink()  # left by a run that went beyond this step
        for table_step in sorted({(step // every - 1) * every, step // every * every}):
            if table_step > 0 and (fault := _damage(folder / table_name(table_step))):
                raise CheckpointError(
                    f"{fault}; the batches after step {step} need it; restore it, or run with "
                    "run.resume=never to start over"
                )
        with naming(folder / SHARED):
            (folder / SHARED).write_text(token)
        return token

    def __enter__(self) -> Self:
        """Returns the miner; leaving the context stops it."""
        return self

    def __exit__(self, *error: object) -> None:
        """Releases the reading processes that wait for a table, and stops mining."""
        self.stream.ended.set()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def wait(self, t: int) -> None:
        """Waits until the table that batch t needs is there; raises as `finish` does."""
        if t % self.config.every_steps == 0:
            self.finish()

    def finish(self) -> None:
        """Waits for the table that is being made; TrainingError if it could not be made."""
        work, self._work = self._work, None
        if work is not None:
            with self.evaluator.watchdog.busy():
                work.result()

    def refresh(self, model: Heterogeneous, step: int) -> None:
        """Embeds the labelled rows after a step, and starts a table; every process must call it.

        Raises a TrainingError if embeddings are not finite.
        """
        self.finish()
        predicted = self.evaluator.predict(model, self.stream.candidates, hidden=True)
        assert predicted.hidden is not None
        if not np.isfinite(predicted.hidden).all():
            raise TrainingError(
                f"step {step}: embeddings of labelled rows are not finite, so hard negatives "
                "cannot be mined; look at the loss of the steps before"
            )
        if rank() == 0:
            self._work = self._thread.submit(
                self._make_table, step, predicted.rows, predicted.hidden, predicted.y
            )

    def _make_table(
        self, step: int, rows: Rows, hidden: NDArray[np.float32], y: NDArray[np.float32]
    ) -> None:
        """Writes a table, and removes tables that no batch after a checkpoint needs."""
        candidates, every = self.stream.candidates, self.config.every_steps
        table = np.full((len(candidates), self.config.nearest), -1, np.int64)
        mined = mine(
            hidden,
            y,
            rows,
            nearest=self.config.nearest,
            exclusive=self.evaluator.exclusive,
            gpu=self.config.gpu,
        )
        table[np.searchsorted(candidates, rows)] = mined  # unreadable rows keep -1
        path = self.stream.folder / table_name(step)
        path.unlink(missing_ok=True)
        with atomic_write(path) as stream:
            np.save(stream, table)
        save_json(path.with_suffix(".json"), FileSum.of(path).model_dump())
        oldest = min([step, *map(_step, checkpoint.complete_checkpoints(self.checkpoints))])
        for old in self.stream.folder.glob("step-*.npy"):
            if _step(old) < (oldest // every - 1) * every:
                old.with_suffix(".json").unlink(missing_ok=True)
                old.unlink()


def mine(
    hidden: NDArray[np.float32],  # embeddings, [rows, dim]
    y: NDArray[np.float32],  # labels as 0/1, [rows, labels]
    rows: Rows,  # numbers of the rows, [rows]
    nearest: int,  # number of hard negatives per row
    exclusive: bool,  # whether a row has one class
    gpu: bool = False,  # search on a GPU: see `evaluation.knn.exact_nearest`
) -> Rows:
    """Returns the numbers of the nearest hard negatives of every row, [rows, nearest].

    `heron.evaluation.negatives` defines hard; the median is over a fixed sample of the rows.
    `SEARCHED_PER_HARD` times `nearest` neighbours are searched; -1 fills rows with fewer hard ones.
    """
    from heron.evaluation.knn import exact_nearest, faiss  # only mining needs FAISS

    faiss.omp_set_num_threads(torch.get_num_threads())
    unit = hidden / np.maximum(np.linalg.norm(hidden, axis=1, keepdims=True), 1e-12)
    numbers = np.arange(len(rows))
    pairs = LabelPairs(y, exclusive, numbers, numbers[:: max(1, len(rows) // SAMPLE)])
    mined = np.full((len(rows), nearest), -1, np.int64)
    for block in pairs.blocks():
        anchors = numbers[block]
        k = min(len(rows) - 1, SEARCHED_PER_HARD * nearest)
        near, _ = exact_nearest([(numbers, unit)], unit[block], anchors, k, gpu=gpu)
        threshold = hard_difference(pairs.counts(block))
        is_hard = label_difference(y, anchors[:, None], near, exclusive) >= threshold[:, None]
        hard_first = np.argsort(~is_hard, axis=1, kind="stable")[:, :nearest]
        selected = rows[np.take_along_axis(near, hard_first, 1)]
        selected = np.where(np.take_along_axis(is_hard, hard_first, 1), selected, -1)
        mined[block, : selected.shape[1]] = selected
    return mined


def _step(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def _damage(table: Path) -> str:
    """Returns what is wrong with a table, or ""."""
    try:
        record = table.with_suffix(".json").read_bytes()
        return FileSum.model_validate_json(record, strict=True).fault(table)
    except OSError as error:
        return f"cannot read {table}: {error}"
    except ValidationError as error:
        return f"{table.with_suffix('.json')}: {describe_errors(error)}"
