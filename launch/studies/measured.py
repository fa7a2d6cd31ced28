"""What studies of one experiment have measured of its step."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from heron.launch.studies.rows import BATCH, Results, Row
from heron.launch.studies.step_model import Measured
from heron.launch.studies.workload import Setting, Workload
from heron.pipeline.config.errors import StudyError


@dataclass(frozen=True)
class Points:
    """What studies have measured of one workload.

    Attributes:
        workload: of all of them.
        measured: each setting once, the mean of its repeats.
        left_out: how many trials are not in it, and why; empty where all are.
    """

    workload: Workload
    measured: Sequence[Measured]
    left_out: str = ""

    @classmethod
    def of(cls, studies: Sequence[Results]) -> "Points":
        """Returns the points of some studies.

        Raises:
            StudyError: no trial can be used; says why not.
        """
        repeats: dict[Setting, list[tuple[float, float]]] = {}
        notes: list[str] = []
        first: Workload | None = None
        for results, row in ((one, row) for one in studies for row in one.done):
            cells = row.columns(results.folder)
            try:
                workload = _workload(cells, results, row)
                first = first or workload
                if differing := first.differs_in(workload):
                    raise StudyError(f"other than the first in {', '.join(differing)}")
            except StudyError as fault:
                notes.append(f"trial {row.trial} of {results.folder.name}: {fault}")
                continue
            strategy = str(row.values.get("strategy", "ddp"))
            stage = int(strategy[-1]) if strategy.startswith("zero") else 0
            labelled = workload.labelled_of(cells[BATCH])
            setting = Setting(row.workers, labelled, cells[BATCH] - labelled, stage)
            repeats.setdefault(setting, []).append((cells["step_s"], cells["peak_memory_bytes"]))
        left_out = (
            f"Left out of the scaling model: {len(notes)} of the trials; the first: {notes[0]}"
            if notes
            else ""
        )
        if first is None:
            raise StudyError(left_out or "No trial is done: no scaling model")
        order = sorted(repeats, key=lambda s: (s.world, s.rows, s.stage))
        measured = [Measured(s, *map(float, np.mean(repeats[s], 0))) for s in order]
        return cls(first, measured, left_out)


def _workload(cells: dict[str, object], results: Results, row: Row) -> Workload:
    """Returns the workload of a trial whose step was measured, and is in one piece."""
    if "step_s" not in (row.measured or {}) or BATCH not in cells:
        raise StudyError("no step was measured")
    if "peak_memory_bytes" not in cells:
        raise StudyError("its memory was not measured: it went on after its last step")
    workload = Workload.of_run(results.folder / row.run)
    if workload.config.train.micro_batch is not None:
        raise StudyError("its steps are cut into micro-batches")
    return workload
