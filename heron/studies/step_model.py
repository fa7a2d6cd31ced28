"""One model of a step: its time and a process's memory, on any number of processes.

    step = compute(b) + contrast(b, N) + exchange(P)
    compute  = fixed + row b              seconds; b rows of a process, forward and backward
    contrast = pair b N                   b anchors against the N rows of the global batch
    exchange = latency S + per_byte W     S messages one after another, W bytes over the wire
    memory   = base + row_bytes b + counted     bytes; see `Workload.counted_bytes`

The first three rates are fitted to steps of one process at several batches, where N = b; those of
the link are fitted to steps of several processes, or assumed. The costs of n bytes over P processes
are (Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective Communication Operations in
MPICH", section 4; Patarasuk and Yuan 2009 for the ring):

    all-gather, reduce-scatter  W = (P - 1) n, n of one process;  S = P - 1 in a ring
    a round of a ring of keys   W = (P - 1) n, n of one process;  S = P - 1
    all-reduce                  W = 2 n (P - 1) / P;              S = 2 (P - 1) in a ring

With recursive doubling, and with trees, W is the same and log2 P takes the place of P - 1 in S.
"""

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

from heron.config.errors import CheckpointError, ConfigError, StudyError
from heron.config.experiment import Config, load_run_config
from heron.config.terms import Term
from heron.data.plan import even_sizes
from heron.distributed.traffic import FLOAT, Exchange, exchanges
from heron.models.heterogeneous import Heterogeneous
from heron.objectives.exchange import ShardSizes
from heron.objectives.objective import Objective
from heron.shards.manifest import load_manifest
from heron.studies.results import BATCH, Results
from heron.training.pretrained import locate
from heron.training.signature import Signature

OPTIMISER_SLOTS = {"adam": 2, "adamw": 2}  # state per parameter; SGD keeps its momentum
GATHERED_COPIES = 3  # of a vector in memory: itself, its gradient, and the one being sent back
MIN_BATCHES = 3  # of one process: enough to tell rows from pairs, with one left to judge by
MAX_CONDITION = 100.0  # up to which the columns of a fit count as distinct
BACKWARD_SHARE = 2 / 3  # of compute: what an exchange of gradients can overlap with


@dataclass(frozen=True)
class Setting:
    """The layout of a step: processes, rows of the global batch, and the ZeRO stage (0: DDP)."""

    world: int
    labelled: int
    unlabelled: int
    stage: int = 0

    @property
    def sizes(self) -> ShardSizes:
        """Rows of every process."""
        return ShardSizes(
            even_sizes(self.labelled, self.world), even_sizes(self.unlabelled, self.world)
        )

    @property
    def rows(self) -> int:
        """Rows of the global batch."""
        return self.labelled + self.unlabelled

    @property
    def local_rows(self) -> int:
        """Rows of the process that has the most."""
        return max(self.sizes.rows)


class MeasuredStep(NamedTuple):
    """A step's seconds and a process's peak bytes (NaN: unknown), as means of repeats."""

    setting: Setting
    seconds: float
    memory: float = math.nan


@dataclass(eq=False)
class Workload:
    """The training step of an experiment, at any batch size."""

    config: Config
    shapes: list[list[int]]  # of one sample, by view
    labels: int  # width of a row's labels
    levels: int = 0  # of hierarchical labels

    @classmethod
    def of_run(cls, run: Path) -> "Workload":
        """Returns the workload of a run, from its newest checkpoint.

        Raises a StudyError if none can be read, or if a term's exchange is not modelled.
        """
        try:
            checkpoint = locate(run)
            signature = Signature.read(checkpoint)
            config = load_run_config(checkpoint / "config.yaml")
        except (CheckpointError, ConfigError, OSError, ValueError) as error:
            raise StudyError(f"{run}: its step cannot be told: {error}") from None
        workload = cls(config, signature.shapes, signature.labels)
        terms = workload.objective.terms
        with_memory = [n for n, term in terms.items() if type(term).memory is not Term.memory]
        if with_memory:
            raise StudyError(
                f"the scaling model does not know what the memory of {' and '.join(with_memory)} "
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
        """The model on the meta device: shapes without numbers."""
        terms, names = self.objective.terms, self.config.data.view_names
        model = Heterogeneous(self.config.model, self.shapes, self.labels, terms, names)
        return model.to("meta")

    @cache  # noqa: B019 - a workload lives as long as its report
    def exchanges(self, setting: Setting) -> list[Exchange]:
        """Returns the exchanges of a step: see `distributed.traffic.exchanges`."""
        return exchanges(
            self.objective,
            self.model,
            self.shapes,
            setting.sizes,
            self.labels,
            self.levels,
            half=self.config.train.precision == "bf16",
            by_ring=self.config.distributed.exchange == "ring",
        )

    def counted_bytes(self, setting: Setting) -> dict[str, int]:
        """Returns the bytes of a process's memory that can be counted, by use.

        Stages of ZeRO (Rajbhandari et al. 2020, section 5, with float32 for its halves): 1 shards
        the optimiser's state, 2 the gradients too, 3 the weights too. DeepSpeed keeps a second copy
        of the optimiser's shard of the weights. `gathered` is the negative set, some of it in
        `GATHERED_COPIES`; of rows that go round a ring it has two processes' share.
        """
        stage, optim = setting.stage, self.config.optim
        full = FLOAT * sum(parameter.numel() for parameter in self.model.parameters())
        shard = full // setting.world
        slots = OPTIMISER_SLOTS.get(optim.kind, 1 if optim.momentum else 0)
        moved = [e for e in self.exchanges(setting) if e.category == "gathers"]
        sent_back = {e.content for e in moved if e.kind == "scattered"}
        gathered = [e for e in moved if e.kind == "gathered"]
        held = sum(e.bytes * (GATHERED_COPIES if e.content in sent_back else 1) for e in gathered)
        return {
            "weights": (shard if stage >= 3 else full) + (shard if stage else 0),
            "gradients": shard if stage >= 2 else full,
            "optimiser": slots * (shard if stage >= 1 else full),
            "gathered": setting.world * held
            + 2 * max((e.bytes for e in moved if e.kind == "passed"), default=0),
        }

    def setting(self, trial: pd.Series) -> Setting:
        """Returns a trial's setting; all rows are labelled unless a stream has a fixed size."""
        batch, rows = self.config.data.batch, int(trial[BATCH])
        labelled = rows
        if isinstance(batch.labelled, int):
            labelled = batch.labelled + self.config.negatives.mine
        elif isinstance(batch.unlabelled, int):
            labelled = rows - batch.unlabelled
        strategy = str(trial.get("strategy", "ddp"))
        zero_stages = {"ddp": "zero0", "fsdp": "zero3"}  # FSDP2 shards what ZeRO's third stage does
        stage = int(zero_stages.get(strategy, strategy).removeprefix("zero"))
        return Setting(int(trial["workers"]), labelled, rows - labelled, stage)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The settings that workloads must share to be fitted together."""
        include: dict[str, Any] = {"model": True, "objective": True, "optim": {"kind"}}
        include |= {"data": {"views"}, "train": {"precision", "micro_batch", "cpu_threads"}}
        return self.config.model_dump(mode="json", include=include) | {"shapes": self.shapes}


def measured_points(studies: Sequence[Results]) -> tuple[Workload, list[MeasuredStep], str]:
    """Returns the workload of studies of one experiment, one measured step per setting, and a note.

    The note says which trials are left out, and why. Raises a StudyError if no trial can be used.
    """
    repeats: dict[Setting, list[tuple[float, float]]] = defaultdict(list)
    notes: list[str] = []
    first: Workload | None = None
    for results in studies:
        for name, trial in results.done.iterrows():
            try:
                workload = _workload(trial, results.folder)
                first = first or workload
                expected, identity = first.identity, workload.identity
                if differing := [key for key in expected if expected[key] != identity[key]]:
                    raise StudyError(f"other than the first in {', '.join(differing)}")
            except StudyError as fault:
                notes.append(f"trial {name} of {results.folder.name}: {fault}")
                continue
            measured = trial["step_s"], trial["peak_memory_bytes"]
            repeats[workload.setting(trial)].append(measured)
    left_out = ""
    if notes:
        left_out = (
            f"Left out of the scaling model: {len(notes)} of the trials; the first: {notes[0]}"
        )
    if first is None:
        raise StudyError(left_out or "No trial is done: no scaling model")
    settings = sorted(repeats, key=lambda setting: (setting.world, setting.rows, setting.stage))
    points = [MeasuredStep(s, *map(float, np.mean(repeats[s], 0))) for s in settings]
    return first, points, left_out


def _workload(trial: pd.Series, folder: Path) -> Workload:
    """Returns the workload of a trial; StudyError if its whole step was not measured."""
    if trial.get("step_s") is None or trial.get(BATCH) is None:
        raise StudyError("no step was measured")
    if trial.get("peak_memory_bytes") is None:
        raise StudyError("its memory was not measured: it went on after its last step")
    workload = Workload.of_run(folder / trial["run"])
    if workload.config.train.micro_batch is not None:
        raise StudyError("its steps are cut into micro-batches")
    return workload


class Step(NamedTuple):
    """The seconds of a predicted step, by part; `gathers`, `norm`, `gradients` are exchanges."""

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
    """The rates of a workload's step; those of link and memory are NaN if not measured."""

    workload: Workload
    fixed: float
    row: float
    pair: float
    latency: float = math.nan
    per_byte: float = math.nan
    base: float = math.nan
    row_bytes: float = math.nan

    def step(self, setting: Setting, ring: bool = False, overlap: float = 0.0) -> Step:
        """Predicts a step, without exchange where the rates of the link are unknown.

        With `ring` every collective goes round a ring, else it is log2 P messages deep. `overlap`
        is the share of the gradients' exchange, from 0 to 1, that backward hides: at most as much
        as backward takes, two thirds of compute.
        """
        compute = self.fixed + self.row * setting.local_rows
        contrast = self.pair * setting.local_rows * setting.rows
        if setting.world == 1 or math.isnan(self.latency):
            return Step(compute, contrast)
        parts: dict[str, float] = defaultdict(float)
        for exchange in self.workload.exchanges(setting):
            messages, sent = cost([exchange], setting, ring)
            parts[exchange.category] += self.latency * messages + self.per_byte * sent
        parts["gradients"] -= min(overlap * parts["gradients"], BACKWARD_SHARE * compute)
        return Step(compute, contrast, **parts)

    def memory(self, setting: Setting) -> float:
        """Predicts the peak bytes of a process."""
        counted = sum(self.workload.counted_bytes(setting).values())
        return self.base + self.row_bytes * setting.local_rows + counted


def cost(moved: Sequence[Exchange], setting: Setting, ring: bool) -> tuple[float, float]:
    """Returns the number of successive messages, S, and the bytes that a process sends, W.

    An all-reduce is a reduce-scatter and an all-gather. So is the exchange of ZeRO 1 and 2, of
    gradients and then of weights; ZeRO 3 gathers the weights twice, forward and backward
    (Rajbhandari et al. 2020, section 7).
    """
    others = setting.world - 1
    hops = others if ring else math.ceil(math.log2(setting.world))
    messages = sent = 0.0
    for exchange in moved:
        passes, size = 1, float(exchange.bytes)
        if not exchange.is_partitioned:
            passes = 3 if exchange.kind == "gradients" and setting.stage == 3 else 2
            size /= setting.world
        messages += exchange.calls if exchange.kind == "passed" else hops * passes * exchange.calls
        sent += others * passes * size
    return messages, sent


def fit(workload: Workload, points: Sequence[MeasuredStep], pair: float | None = None) -> StepModel:
    """Fits the rates by least squares on relative errors, none below 0.

    Of rates that the points cannot tell apart, the later of each list stays 0: row, pair, fixed;
    latency, per_byte; base, row_bytes. A given `pair`, in seconds, is not fitted. Raises a
    StudyError that names the measurements missing if the cost of a row cannot be fitted.
    """
    alone = [p for p in points if p.setting.world == 1]
    batches = sorted({p.setting.local_rows for p in alone})
    if len(batches) < MIN_BATCHES:
        measured = ", ".join(f"{n:,}" for n in batches) or "none"
        raise StudyError(
            f"The scaling model takes what a row and what a pair of rows cost from one process at "
            f"{MIN_BATCHES} batches or more; found {measured}. configs/studies/one-worker.yaml "
            "measures them; --points adds its folder"
        )
    seconds = np.array([p.seconds for p in alone])
    settings = [p.setting for p in alone]
    columns = np.array([[s.local_rows, s.local_rows * s.rows, 1.0] for s in settings])
    if pair is None:
        row, pair, fixed = _least_squares(columns, seconds, seconds)
    else:
        remaining = np.maximum(0.0, seconds - pair * columns[:, 1])
        row, fixed = _least_squares(columns[:, [0, 2]], remaining, seconds)
    model = StepModel(workload, fixed, row, pair)
    if several := [p for p in points if p.setting.world > 1]:
        seconds = np.array([p.seconds for p in several])
        remaining = np.maximum(0.0, seconds - [model.step(p.setting).total for p in several])
        costs = [cost(workload.exchanges(p.setting), p.setting, ring=True) for p in several]
        latency, per_byte = _least_squares(np.array(costs), remaining, seconds)
        model = replace(model, latency=latency, per_byte=per_byte)
    with_memory = [p for p in points if math.isfinite(p.memory)]
    if len({p.setting.local_rows for p in with_memory}) >= MIN_BATCHES:
        memory = np.array([p.memory for p in with_memory])
        remaining = memory - [sum(workload.counted_bytes(p.setting).values()) for p in with_memory]
        columns = np.array([[1.0, p.setting.local_rows] for p in with_memory])
        base, row_bytes = _least_squares(columns, remaining, memory)
        model = replace(model, base=base, row_bytes=row_bytes)
    return model


def fit_without_each(
    workload: Workload, points: Sequence[MeasuredStep], pair: float | None = None
) -> list[StepModel | None]:
    """Returns for each point the model fitted to the others, or None where those are too few."""
    models: list[StepModel | None] = []
    for i in range(len(points)):
        try:
            models.append(fit(workload, [*points[:i], *points[i + 1 :]], pair))
        except StudyError:
            models.append(None)
    return models


def _least_squares(
    columns: NDArray[np.float64], targets: NDArray[np.float64], scale: NDArray[np.float64]
) -> list[float]:
    """Returns non-negative constants c that minimise the sum of ((columns c - targets) / scale)².

    A column gets 0 if it would leave no degree of freedom, or nearly depends on earlier columns.
    """
    matrix = columns / scale[:, None]
    lengths = np.linalg.norm(matrix, axis=0)
    unit = matrix / np.where(lengths > 0, lengths, 1.0)
    kept: list[int] = []
    for column in range(matrix.shape[1]):
        tried = [*kept, column]
        distinct = len(columns) > len(tried) and np.linalg.cond(unit[:, tried]) < MAX_CONDITION
        if lengths[column] > 0 and (not kept or distinct):
            kept = tried
    constants = np.zeros(matrix.shape[1])
    constants[kept] = nnls(unit[:, kept], targets / scale)[0] / lengths[kept]
    return [float(value) for value in constants]
