"""One model of a step: its time and a process's memory, on any number of processes.

    step = compute(b) + contrast(b, N) + exchange(P)
    compute  = fixed + row b              seconds; b rows of a process, forward and backward
    contrast = pair b N                   b anchors against the N rows of the global batch
    exchange = latency S + per_byte W     S messages one after another, W bytes over the wire
    memory   = base + row_bytes b + counted     bytes; see `Workload.counted`

The first three rates are fitted to steps of one process at several batches, where N = b; those of
the link to steps of several, or given. Of n bytes over P processes (Thakur, Rabenseifner and Gropp
2005, "Optimization of Collective Communication Operations in MPICH", section 4; Patarasuk and Yuan
2009 for the ring):

    all-gather, reduce-scatter  W = (P - 1) n, n of one process;  S = P - 1 in a ring
    a round of a ring of keys   W = (P - 1) n, n of one process;  S = P - 1
    all-reduce                  W = 2 n (P - 1) / P;              S = 2 (P - 1) in a ring

With recursive doubling, and with trees, W is the same and log2 P takes the place of P - 1 in S.
"""

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import nnls

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
FEWEST = 3  # batches of one process that tell rows from pairs, and something to be judged by
DISTINCT = 100.0  # condition number up to which two columns are told apart
BACKWARD = 2 / 3  # of compute: the part that an exchange of gradients can hide behind


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
    """The step of an experiment, whatever its batch."""

    config: Config
    shapes: list[list[int]]  # of one sample of each view
    labels: int  # width of a row's labels
    levels: int = 0  # of hierarchical labels

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
        workload = cls(config, shapes, labels)
        terms = workload.objective.terms
        if remembering := [n for n, term in terms.items() if type(term).memory is not Term.memory]:
            raise StudyError(
                f"the scaling model does not know what the memory of {' and '.join(remembering)} "
                "exchanges; expected terms that remember nothing from step to step"
            )
        if "paths" in workload.objective.needs.labelled:
            workload.levels = len(load_manifest(config.data.paths[0]).labels.levels or [])
        return workload

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
        half = self.config.train.precision == "bf16"
        return exchanges(*given, half=half, by_ring=self.config.distributed.exchange == "ring")

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
        like = {"ddp": "zero0", "fsdp": "zero3"}  # FSDP2 parts what ZeRO's third stage does
        stage = int(like.get(strategy, strategy).removeprefix("zero"))
        return Setting(int(trial["workers"]), labelled, rows - labelled, stage)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What workloads that are measured together have in common."""
        same: dict[str, Any] = {"model": True, "objective": True, "optim": {"kind"}}
        same |= {"data": {"views"}, "train": {"precision", "micro_batch", "cpu_threads"}}
        return self.config.model_dump(mode="json", include=same) | {"shapes": self.shapes}


def measured_points(studies: Sequence[Results]) -> tuple[Workload, list[Measured], str]:
    """Returns the workload of studies of one experiment, and what they have measured of its step.

    That is each setting once; and how many trials are not in it, and why (empty where all are). A
    StudyError says why no trial can be used.
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


class Step(NamedTuple):
    """A predicted step, in seconds, by its parts; `gathers`, `norm`, `gradients` are exchanged."""

    compute: float
    contrast: float
    gathers: float = 0.0
    norm: float = 0.0
    gradients: float = 0.0

    @property
    def total(self) -> float:
        """The sum of the parts."""
        return sum(self)


@dataclass(frozen=True)
class StepModel:
    """The rates of a workload's step; those of link and memory are NaN where none were measured."""

    workload: Workload
    fixed: float
    row: float
    pair: float
    latency: float = math.nan
    per_byte: float = math.nan
    base: float = math.nan
    row_bytes: float = math.nan

    def step(self, setting: Setting, ring: bool = False, overlap: float = 0.0) -> Step:
        """Predicts a step; without rates of a link, one that exchanges nothing.

        With `ring` every collective goes round a ring, else it is log2 P messages deep. `overlap`
        is the share of the exchange of gradients that backward hides, from 0 to 1; of it no more
        than backward takes, two thirds of compute.
        """
        compute = self.fixed + self.row * setting.share
        contrast = self.pair * setting.share * setting.rows
        if setting.world == 1 or math.isnan(self.latency):
            return Step(compute, contrast)
        parts: dict[str, float] = defaultdict(float)
        for one in self.workload.exchanges(setting):
            messages, sent = cost([one], setting, ring)
            parts[one.part] += self.latency * messages + self.per_byte * sent
        parts["gradients"] -= min(overlap * parts["gradients"], BACKWARD * compute)
        return Step(compute, contrast, **parts)

    def memory(self, setting: Setting) -> float:
        """Predicts the bytes that a process holds at its peak."""
        counted = sum(self.workload.counted(setting).values())
        return self.base + self.row_bytes * setting.share + counted


def cost(moved: Sequence[Exchange], setting: Setting, ring: bool) -> tuple[float, float]:
    """Returns messages one after another, S, and the bytes that a process sends, W.

    An all-reduce is a reduce-scatter and an all-gather. So is the exchange of ZeRO 1 and 2, of
    gradients and then of weights; ZeRO 3 gathers the weights twice, forward and backward
    (Rajbhandari et al. 2020, section 7).
    """
    others = setting.world - 1
    hops = others if ring else math.ceil(math.log2(setting.world))
    messages = sent = 0.0
    for one in moved:
        passes, size = 1, float(one.bytes)
        if not one.of_parts:
            passes = 3 if one.kind == "gradients" and setting.stage == 3 else 2
            size /= setting.world
        messages += one.calls if one.kind == "passed" else hops * passes * one.calls
        sent += others * passes * size
    return messages, sent


def fit(workload: Workload, points: Sequence[Measured], pair: float | None = None) -> StepModel:
    """Fits the rates by least squares on relative errors, none below 0.

    A rate that the points cannot tell from another is left at 0, the later one of each list: row,
    pair, fixed; latency, bytes; base, row in memory. A given `pair`, in seconds, is not fitted. A
    StudyError says what is missing where what a row costs cannot be told.
    """
    alone = [p for p in points if p.setting.world == 1]
    shares = sorted({p.setting.share for p in alone})
    if len(shares) < FEWEST:
        measured = ", ".join(f"{n:,}" for n in shares) or "none"
        raise StudyError(
            f"The scaling model takes what a row and what a pair of rows cost from one process at "
            f"{FEWEST} batches or more; found {measured}. configs/studies/one-worker.yaml measures "
            "them; --points adds its folder"
        )
    seconds = np.array([p.seconds for p in alone])
    rows = np.array([[p.setting.share, p.setting.share * p.setting.rows, 1.0] for p in alone])
    if pair is None:
        row, pair, fixed = _least_squares(rows, seconds, seconds)
    else:
        left = np.maximum(0.0, seconds - pair * rows[:, 1])
        row, fixed = _least_squares(rows[:, [0, 2]], left, seconds)
    model = StepModel(workload, fixed, row, pair)
    if several := [p for p in points if p.setting.world > 1]:
        seconds = np.array([p.seconds for p in several])
        left = np.maximum(0.0, seconds - [model.step(p.setting).total for p in several])
        costs = [cost(workload.exchanges(p.setting), p.setting, ring=True) for p in several]
        latency, per_byte = _least_squares(np.array(costs), left, seconds)
        model = replace(model, latency=latency, per_byte=per_byte)
    known = [p for p in points if math.isfinite(p.memory)]
    if len({p.setting.share for p in known}) >= FEWEST:
        memory = np.array([p.memory for p in known])
        left = memory - [sum(workload.counted(p.setting).values()) for p in known]
        columns = np.array([[1.0, p.setting.share] for p in known])
        base, row_bytes = _least_squares(columns, left, memory)
        model = replace(model, base=base, row_bytes=row_bytes)
    return model


def fit_without_each(
    workload: Workload, points: Sequence[Measured], pair: float | None = None
) -> list[StepModel | None]:
    """Returns for each point the model that is fitted to the others; None: they are too few."""
    models: list[StepModel | None] = []
    for i in range(len(points)):
        try:
            models.append(fit(workload, [*points[:i], *points[i + 1 :]], pair))
        except StudyError:
            models.append(None)
    return models


def _least_squares(
    rows: NDArray[np.float64], wanted: NDArray[np.float64], of: NDArray[np.float64]
) -> list[float]:
    """Returns constants, none below 0, with the least squares of errors relative to `of`.

    A column that leaves none over to judge by, or that those before it nearly make up, gets 0.
    """
    matrix = rows / of[:, None]
    lengths = np.linalg.norm(matrix, axis=0)
    unit = matrix / np.where(lengths > 0, lengths, 1.0)
    kept: list[int] = []
    for column in range(matrix.shape[1]):
        tried = [*kept, column]
        judged = len(rows) > len(tried) and np.linalg.cond(unit[:, tried]) < DISTINCT
        if lengths[column] > 0 and (not kept or judged):
            kept = tried
    constants = np.zeros(matrix.shape[1])
    constants[kept] = nnls(unit[:, kept], wanted / of)[0] / lengths[kept]
    return [float(value) for value in constants]
