"""One experiment's step on any number of processes: what it exchanges, holds, and took."""

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from heron.launch.studies.results import BATCH, Results
from heron.pipeline.config.errors import CheckpointError, ConfigError, StudyError
from heron.pipeline.config.experiment import Config, load_run_config
from heron.pipeline.config.terms import Term
from heron.pipeline.data.plan import shares
from heron.pipeline.distributed.exchange import ShardSizes
from heron.pipeline.distributed.traffic import FLOAT, Exchange, exchanges
from heron.pipeline.models.heterogeneous import Heterogeneous
from heron.pipeline.objectives.objective import Objective
from heron.pipeline.training.pretrained import locate
from heron.pipeline.training.signature import Signature
from heron.shards.manifest import load_manifest

SLOTS = {"adam": 2, "adamw": 2}  # numbers that an optimiser keeps of a parameter; of SGD momentum
HELD = 3  # times a gathered vector lies in memory: itself, its gradient, and on its way back


@dataclass(frozen=True)
class Setting:
    """How a step is laid out: processes, rows of the global batch, and ZeRO's stage (0 of DDP)."""

    world: int
    labelled: int
    unlabelled: int
    stage: int = 0

    @property
    def sizes(self) -> ShardSizes:
        """The rows of every process."""
        return ShardSizes(shares(self.labelled, self.world), shares(self.unlabelled, self.world))

    @property
    def rows(self) -> int:
        """Of the global batch."""
        return self.labelled + self.unlabelled

    @property
    def share(self) -> int:
        """Rows of the process that has most."""
        return max(self.sizes.rows)


class Measured(NamedTuple):
    """A step's seconds and a process's peak bytes (NaN: unknown), the means of repeats."""

    setting: Setting
    seconds: float
    memory: float = math.nan


@dataclass(eq=False)
class Workload:
    """The step of an experiment, whatever its batch.

    Attributes:
        config: the experiment.
        shapes: of one sample of each view.
        labels: width of a row's labels.
        levels: of hierarchical labels.
    """

    config: Config
    shapes: list[list[int]]
    labels: int
    levels: int

    @classmethod
    def of_run(cls, run: Path) -> "Workload":
        """Returns the workload of a run, from its newest checkpoint.

        Raises a StudyError where none can be read, or a term exchanges what is not modelled.
        """
        try:
            checkpoint = locate(run)
            shapes = Signature.read(checkpoint).shapes
            labels = int(json.loads((checkpoint / "model.json").read_text())["labels"])
            config = load_run_config(checkpoint / "config.yaml")
        except (CheckpointError, ConfigError, OSError, ValueError, KeyError) as error:
            raise StudyError(f"{run}: its step cannot be told: {error}") from None
        levels, objective = 0, Objective(config.objective.terms())
        if remembering := [
            name for name, t in objective.terms.items() if type(t).memory is not Term.memory
        ]:
            raise StudyError(
                f"the scaling model does not know what the memory of {' and '.join(remembering)} "
                "exchanges; expected terms that remember nothing from step to step"
            )
        if "paths" in objective.needs.labelled:
            levels = len(load_manifest(config.data.paths[0]).labels.levels or [])
        return cls(config, shapes, labels, levels)

    @cached_property
    def objective(self) -> Objective:
        """The experiment's terms."""
        return Objective(self.config.objective.terms())

    @cached_property
    def model(self) -> Heterogeneous:
        """The model, for its shapes alone: it holds no numbers."""
        terms, names = self.objective.terms, self.config.data.view_names
        model = Heterogeneous(self.config.model, self.shapes, self.labels, terms, names)
        return model.to("meta")

    @cache  # noqa: B019 - a workload lives as long as its report
    def exchanges(self, setting: Setting) -> list[Exchange]:
        """Returns what the processes exchange in a step: see `distributed.traffic.exchanges`."""
        given = self.objective, self.model, self.shapes, setting.sizes, self.labels, self.levels
        return exchanges(*given, by_ring=self.config.distributed.exchange == "ring")

    def counted(self, setting: Setting) -> dict[str, int]:
        """Returns the bytes that a process holds, as far as they are counted.

        By the stage of ZeRO (Rajbhandari et al. 2020, section 5, with float32 for its halves): 1
        shares out the optimiser's state, 2 the gradients too, 3 the weights too. DeepSpeed keeps
        the optimiser's part of the weights once more. `gathered` is the negative set: see `HELD`;
        of what goes round a ring, two processes' rows.
        """
        stage, optim = setting.stage, self.config.optim
        every = FLOAT * sum(parameter.numel() for parameter in self.model.parameters())
        part = every // setting.world
        slots = SLOTS.get(optim.kind, 1 if optim.momentum else 0)
        moved = [e for e in self.exchanges(setting) if e.part == "gathers"]
        back = {e.what for e in moved if e.kind == "scattered"}
        held = sum(e.bytes * (HELD if e.what in back else 1) for e in moved if e.kind == "gathered")
        return {
            "weights": (part if stage >= 3 else every) + (part if stage else 0),
            "gradients": part if stage >= 2 else every,
            "optimiser": slots * (part if stage >= 1 else every),
            "gathered": setting.world * held
            + 2 * max((e.bytes for e in moved if e.kind == "passed"), default=0),
        }

    def setting(self, trial: pd.Series) -> Setting:
        """Returns the setting of a trial of this experiment, of which any batch may be labelled."""
        batch, rows = self.config.data.batch, int(trial[BATCH])
        labelled = rows
        if isinstance(batch.labelled, int):
            labelled = batch.labelled + self.config.negatives.mine
        elif isinstance(batch.unlabelled, int):
            labelled = rows - batch.unlabelled
        strategy = str(trial.get("strategy", "ddp"))
        stage = int(strategy[-1]) if strategy.startswith("zero") else 0
        return Setting(int(trial["workers"]), labelled, rows - labelled, stage)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What workloads that are measured together have in common."""
        same: dict[str, Any] = {"model": True, "objective": True, "optim": {"kind"}}
        same |= {"data": {"views"}, "train": {"precision", "micro_batch", "cpu_threads"}}
        return self.config.model_dump(mode="json", include=same) | {"shapes": self.shapes}


def measured_points(studies: Sequence[Results]) -> tuple[Workload, list[Measured], str]:
    """Returns what studies of one experiment have measured of its step, each setting once.

    Returns:
        The workload of all of them; the points; how many trials are not in them, and why (empty
        where all are). A StudyError says why no trial can be used.
    """
    repeats: dict[Setting, list[tuple[float, float]]] = defaultdict(list)
    notes: list[str] = []
    first: Workload | None = None
    for results in studies:
        for name, trial in results.done.iterrows():
            try:
                workload = _workload(trial, results.folder)
                first = first or workload
                known, other = first.identity, workload.identity
                if differing := [key for key in known if known[key] != other[key]]:
                    raise StudyError(f"other than the first in {', '.join(differing)}")
            except StudyError as fault:
                notes.append(f"trial {name} of {results.folder.name}: {fault}")
                continue
            measured = trial["step_s"], trial["peak_memory_bytes"]
            repeats[workload.setting(trial)].append(measured)
    many = f"Left out of the scaling model: {len(notes)} of the trials; the first: "
    left_out = many + notes[0] if notes else ""
    if first is None:
        raise StudyError(left_out or "No trial is done: no scaling model")
    order = sorted(repeats, key=lambda one: (one.world, one.rows, one.stage))
    return first, [Measured(one, *map(float, np.mean(repeats[one], 0))) for one in order], left_out


def _workload(trial: pd.Series, folder: Path) -> Workload:
    """Returns the workload of a trial whose step was measured, and is in one piece."""
    if trial.get("step_s") is None or trial.get(BATCH) is None:
        raise StudyError("no step was measured")
    if trial.get("peak_memory_bytes") is None:
        raise StudyError("its memory was not measured: it went on after its last step")
    workload = Workload.of_run(folder / trial["run"])
    if workload.config.train.micro_batch is not None:
        raise StudyError("its steps are cut into micro-batches")
    return workload
