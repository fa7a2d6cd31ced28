"""What studies of one experiment have measured of its step."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from launch.studies.rows import Results, Row
from launch.studies.scaling import Measured
from launch.studies.workload import Setting, Workload
from pipeline.errors import StudyError


@dataclass(frozen=True)
class Points:
    """What studies have measured of one workload.

    Attributes:
        workload: of all of them.
        measured: each setting once, the mean of its repeats.
        left_out: how many rows are not in it, and why; empty where all are.
    """

    workload: Workload
    measured: Sequence[Measured]
    left_out: str = ""

    @classmethod
    def of(cls, studies: Sequence[Results]) -> "Points":
        """The points of some studies.

        Raises:
            StudyError: no row can be used; says why not.
        """
        found: dict[Setting, list[Row]] = {}
        notes: list[str] = []
        workload: Workload | None = None
        for results, row in ((one, row) for one in studies for row in one.done):
            try:
                own = _usable(row)
                workload = workload or own
                if own.identity != workload.identity:
                    raise StudyError(_differs(workload, own))
            except StudyError as fault:
                notes.append(f"trial {row.trial} of {results.folder.name}: {fault}")
                continue
            found.setdefault(_setting(row, own), []).append(row)
        left_out = (
            f"Left out of the scaling model: {len(notes)} of the trials; the first: {notes[0]}"
            if notes
            else ""
        )
        if workload is None:
            raise StudyError(left_out or "No trial is done: no scaling model")
        order = sorted(found, key=lambda s: (s.world, s.rows, s.stage))
        measured = [
            Measured(
                s,
                float(np.mean([row.number("step_s") for row in found[s]])),
                float(np.mean([row.number("peak_memory_bytes") for row in found[s]])),
            )
            for s in order
        ]
        return cls(workload, measured, left_out)


def _usable(row: Row) -> Workload:
    """The workload of a row whose step was measured, and is in one piece."""
    if "step_s" not in row.measured or row.batch is None:
        raise StudyError("no step was measured")
    if row.get("peak_memory_bytes") is None:
        raise StudyError("its memory was not measured: it went on after its last step")
    found = Workload.of_run(row.run)
    if found.config.train.micro_batch is not None:
        raise StudyError("its steps are cut into micro-batches")
    return found


def _setting(row: Row, workload: Workload) -> Setting:
    """How a row's step was laid out."""
    assert row.batch is not None
    batch = workload.config.data.batch
    labelled: int
    if isinstance(batch.labelled, int):
        labelled = batch.labelled + workload.config.negatives.mine
    elif isinstance(batch.unlabelled, int):
        labelled = row.batch - batch.unlabelled
    else:
        labelled = row.batch
    strategy = str(row.values.get("strategy", "ddp"))
    stage = int(strategy[-1]) if strategy.startswith("zero") else 0
    return Setting(row.workers, labelled, row.batch - labelled, stage)


def _differs(one: Workload, other: Workload) -> str:
    """Where two workloads differ, for a message."""
    names = [name for name, part in one.identity.items() if part != other.identity[name]]
    return f"other than the first in {', '.join(names)}"
