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

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from heron.launch.studies.workload import Measured, Setting, Workload
from heron.pipeline.config.errors import StudyError
from heron.pipeline.distributed.traffic import Exchange

FEWEST = 3  # batches of one process that tell rows from pairs, and something to be judged by
DISTINCT = 100.0  # condition number up to which two columns are told apart
BACKWARD = 2 / 3  # of compute: the part that an exchange of gradients can hide behind


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

        Args:
            setting: its processes and rows.
            ring: every collective goes round a ring; else log2 P messages deep.
            overlap: share of the exchange of gradients that backward hides, from 0 to 1; of it
                no more than backward takes, two thirds of compute.
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
    pair, fixed; latency, bytes; base, row in memory. A given `pair`, in seconds, is not fitted.

    Raises:
        StudyError: what a row costs cannot be told; says what is missing.
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
