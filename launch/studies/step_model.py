"""A model of a step's time and memory on any number of processes, fitted to measured steps.

    step = compute(b) + contrast(b, N) + exchange(P)
    compute  = fixed + row b              seconds; b rows of a process, forward and backward
    contrast = pair b N                   b anchors against the N rows of the global batch
    exchange = latency S + W / bandwidth  S messages one after another, W bytes over the wire

`fixed`, `row` and `pair` are fitted to steps of one process at several batches, where N = b;
`latency` and `bandwidth` to those of several, or given. Of n bytes over P processes (Thakur,
Rabenseifner and Gropp 2005, "Optimization of Collective Communication Operations in MPICH",
section 4; Patarasuk and Yuan 2009 for the ring):

    all-gather, reduce-scatter  W = (P - 1) n, n of one process;  S = P - 1 in a ring
    all-reduce                  W = 2 n (P - 1) / P;              S = 2 (P - 1) in a ring

With recursive doubling, and with trees, W is the same and log2 P takes the place of P - 1 in S.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from heron.launch.studies.workload import Setting, Workload
from heron.pipeline.distributed.traffic import Exchange

FEWEST = 3  # batches of one process that tell rows from pairs, and something to be judged by
DISTINCT = 100.0  # condition number up to which two columns are told apart
BACKWARD = 2 / 3  # of compute: the part that an exchange of gradients can hide behind


class Measured(NamedTuple):
    """A setting whose step was measured.

    Attributes:
        setting: how it was laid out.
        seconds: of a step, the mean of its repeats.
        memory: bytes of a process at its peak; NaN where it was not measured.
    """

    setting: Setting
    seconds: float
    memory: float


class Link(NamedTuple):
    """What joins a process to the others: seconds a message, and seconds a byte."""

    latency: float
    per_byte: float

    @classmethod
    def of(cls, gbps: float, microseconds: float) -> "Link":
        """Converts Gbit/s and microseconds."""
        return cls(1e-6 * microseconds, 8e-9 / gbps)

    def seconds(self, moved: Sequence[Exchange], setting: Setting, ring: bool) -> float:
        """Returns the time of exchanges one after another."""
        return self.latency * messages(moved, setting, ring) + self.per_byte * wire(moved, setting)


def messages(moved: Sequence[Exchange], setting: Setting, ring: bool) -> float:
    """Returns messages one after another, S: in a ring, or with recursive doubling and trees."""
    hops = setting.world - 1 if ring else math.ceil(math.log2(setting.world))
    return float(sum(hops * _passes(one, setting) * one.calls for one in moved))


def wire(moved: Sequence[Exchange], setting: Setting) -> float:
    """Returns the bytes that a process sends, W; as many come in."""
    sent = 0.0
    for one in moved:
        size = one.bytes if one.of_parts else _passes(one, setting) * one.bytes / setting.world
        sent += (setting.world - 1) * size
    return sent


def _passes(one: Exchange, setting: Setting) -> int:
    """Returns the rounds of P - 1 messages.

    An all-reduce is a reduce-scatter and an all-gather. So is the exchange of ZeRO 1 and 2, of
    gradients and then of weights; ZeRO 3 gathers the weights twice, forward and backward
    (Rajbhandari et al. 2020, section 7).
    """
    if one.of_parts:
        return 1
    return 3 if one.kind == "gradients" and setting.stage == 3 else 2


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
    """The model with its constants.

    Attributes:
        workload: whose bytes are predicted.
        fixed: seconds of a step, whatever its rows.
        row: seconds of a row of a process.
        pair: seconds of a pair of rows.
        link: fitted to several processes, which are taken to talk in rings; None: none were
            measured.
    """

    workload: Workload
    fixed: float
    row: float
    pair: float
    link: Link | None = None

    def step(
        self, setting: Setting, link: Link | None = None, ring: bool = False, overlap: float = 0.0
    ) -> Step:
        """Predicts a step.

        Args:
            setting: its processes and rows.
            link: in place of the one that was measured.
            ring: every collective goes round a ring; else log2 P messages deep.
            overlap: share of the exchange of gradients that backward hides, from 0 to 1; of it
                no more than backward takes, two thirds of compute.
        """
        compute = self.fixed + self.row * setting.share
        contrast = self.pair * setting.share * setting.rows
        link = link or self.link
        if setting.world == 1 or link is None:
            return Step(compute, contrast)
        moved: dict[str, list[Exchange]] = {"gathers": [], "norm": [], "gradients": []}
        for one in self.workload.exchanges(setting):
            norm = one.what in ("moments", "sums")
            moved["norm" if norm else "gathers" if one.of_parts else "gradients"].append(one)
        parts = {name: link.seconds(of, setting, ring) for name, of in moved.items()}
        parts["gradients"] -= min(overlap * parts["gradients"], BACKWARD * compute)
        return Step(compute, contrast, **parts)


def fit(
    workload: Workload, points: Sequence[Measured], pair: float | None = None
) -> StepModel | str:
    """Fits the constants by least squares on relative errors, none below 0.

    A constant that the points cannot tell from another is left at 0, the later one of each list:
    row, pair, fixed; latency, bandwidth.

    Args:
        workload: whose bytes are predicted.
        points: each setting once.
        pair: seconds that were measured of a pair of rows, which then is not fitted.

    Returns:
        The model; or, in words, what is missing.
    """
    alone = [p for p in points if p.setting.world == 1]
    shares = sorted({p.setting.share for p in alone})
    if len(shares) < FEWEST:
        measured = ", ".join(f"{n:,}" for n in shares) or "none"
        return (
            f"The scaling model takes what a row and what a pair of rows cost from one process at "
            f"{FEWEST} batches or more; found {measured}. configs/studies/one-worker.yaml measures "
            "them; --points adds its folder."
        )
    seconds = np.array([p.seconds for p in alone])
    rows = np.array([[p.setting.share, p.setting.share * p.setting.rows, 1.0] for p in alone])
    if pair is None:
        row, pair, fixed = _least_squares(rows, seconds, seconds)
    else:
        left = np.maximum(0.0, seconds - pair * rows[:, 1])
        row, fixed = _least_squares(rows[:, [0, 2]], left, seconds)
    model = StepModel(workload, fixed, row, pair)
    several = [p for p in points if p.setting.world > 1]
    if not several:
        return model
    seconds = np.array([p.seconds for p in several])
    left = np.maximum(0.0, seconds - [model.step(p.setting).total for p in several])
    moved = [(workload.exchanges(p.setting), p.setting) for p in several]
    columns = np.array([[messages(*one, ring=True), wire(*one)] for one in moved])
    link = Link(*_least_squares(columns, left, seconds))
    return StepModel(workload, fixed, row, pair, link)


def fit_without_each(
    workload: Workload, points: Sequence[Measured], pair: float | None = None
) -> list[StepModel | None]:
    """Returns for each point the model that is fitted to the others; None: they are too few."""
    models = (fit(workload, [*points[:i], *points[i + 1 :]], pair) for i in range(len(points)))
    return [None if isinstance(model, str) else model for model in models]


class Memory(NamedTuple):
    """Bytes of a process beside what is counted: `base`, and `row` of a row of its own."""

    base: float
    row: float

    def bytes(self, workload: Workload, setting: Setting) -> float:
        """Returns what a process holds in all: see `Workload.held`."""
        return self.base + self.row * setting.share + workload.held(setting)


def fit_memory(workload: Workload, points: Sequence[Measured]) -> Memory | str:
    """Fits the base and what a row takes; or says why not."""
    known = [p for p in points if math.isfinite(p.memory)]
    if len({p.setting.share for p in known}) < FEWEST:
        return (
            f"No model of memory: what a row takes is told by {FEWEST} shares of a process or more."
        )
    rows = np.array([[1.0, p.setting.share] for p in known])
    memory = np.array([p.memory for p in known])
    left = memory - [workload.held(p.setting) for p in known]
    return Memory(*_least_squares(rows, left, memory))


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
