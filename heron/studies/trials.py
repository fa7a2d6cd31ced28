"""The trials of a study: which values each has, what it overrides, and the command of it."""

import itertools
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
from typing_extensions import TypedDict

from heron.base.artefact import Count
from heron.base.errors import ConfigError, TrainingError
from heron.base.sections import Plain
from heron.base.shipped import ACCELERATE, JOB, find_config
from heron.base.terminal import counted
from heron.distributed.cluster import Node
from heron.experiment.config import Config, load_config
from heron.experiment.overrides import as_typed
from heron.studies.study import CASES, LAUNCHED, Strategy, Study, draw
from heron.studies.suggestions import STARTUP, Told, Tpe
from heron.training.tracking import Metrics, read_lines

TRIALS = "trials"  # in a study's folder: the trials' runs
RERUNS = "again"  # in a study's folder: where a row's command puts its run
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}  # has accelerate use FSDP2
RUNGS = "rungs.jsonl"  # in a run's folder: its scores at each rung
LINEAGE = "lineage.jsonl"  # in a run's folder: whose weights it took over, and with which values

Takeover = TypedDict("Takeover", {"step": Count, "from": str, "values": Plain})  # of LINEAGE


@dataclass(frozen=True)
class Trial:
    """A run of a study in the folder `out`; its name is its number, such as 003."""

    study: Study
    out: Path
    name: str
    values: dict[str, Any]

    @property
    def run(self) -> Path:
        """The run's folder."""
        return self.out / TRIALS / self.name

    @property
    def workers(self) -> int:
        """Number of processes that train together."""
        return int(self.values.get("workers", self.study.workers))

    @property
    def strategy(self) -> str:
        """The parallelism that they train with."""
        return str(self.values.get("strategy", self.study.strategy))

    @property
    def launch_strategy(self) -> str:
        """The strategy that is launched: DDP in place of FSDP2 for a single process."""
        return "ddp" if (self.strategy, self.workers) == ("fsdp", 1) else self.strategy

    @property
    def description(self) -> str:
        """Its values, as `key=value, ...`."""
        return ", ".join(f"{key}={as_typed(value)}" for key, value in self.values.items())

    def scores(self) -> dict[int | None, dict[str, Any]]:
        """Returns the run's scores so far, by rung."""
        lines = read_lines(self.run / RUNGS, Metrics)
        return {
            line["step"]: {k: math.nan if v is None else v for k, v in line.items()}
            for line in lines
        }

    def lineage(self) -> list[dict[str, Any]]:
        """Returns the run's takeovers of weights: the step, the donor, and its values from then."""
        return read_lines(self.run / LINEAGE, Takeover)

    def current(self) -> "Trial":
        """Returns the trial with the values of its last takeover, if any."""
        takeovers = self.lineage()
        return replace(self, values=dict(takeovers[-1]["values"])) if takeovers else self

    def overrides(self, rung: int | None = None) -> list[str]:
        """Returns the overrides of this trial, up to a rung or its end, without `run.dir`."""
        tree = self.study.set | {k: v for k, v in self.values.items() if k not in LAUNCHED}
        if (steps := rung or self.study.search.rungs[-1]) is not None:
            tree["train.steps"] = steps
        if not self.study.gpus:  # a worker uses no more than its CPUs
            tree.setdefault("train.cpu_threads", self.study.cpus_per_worker)
        return [f"{key}={as_typed(value)}" for key, value in tree.items()]

    def config(self, rung: int | None = None) -> Config:
        """Returns the trial's configuration; a ConfigError names the trial if it is invalid."""
        own = [f"run.dir={as_typed(str(self.run))}", "run.resume=auto"]
        try:
            return load_config(find_config(self.study.base), [*self.overrides(rung), *own])
        except ConfigError as error:
            where = f"trial {self.name} ({self.description}) of {self.study.base}"
            raise ConfigError(f"{where}: {error}") from None

    def command(self, rung: int | None = None) -> str:
        """Returns the shell command that repeats this run, in a folder of its own."""
        words = ["accelerate", "launch", *self._launcher(), "-m", JOB]
        if self.launch_strategy == "fsdp" and not self.study.gpus:  # on CPUs no option selects it
            words = ["env", *(f"{name}={value}" for name, value in FSDP.items()), *words]
        words += ["--config", self.study.base, *self.overrides(rung)]
        run_dir = as_typed(str(self.out / RERUNS / self.name))
        return shlex.join([*words, f"run.dir={run_dir}"])

    def _launcher(self) -> list[str]:
        """Returns options of `accelerate launch` that are equivalent to a worker's environment."""
        gpus, processes = self.study.gpus, ["--num_processes", str(self.workers)]
        if not self.launch_strategy.startswith("zero"):
            if self.workers == 1:
                device = [] if gpus else ["--cpu"]
                return [*device, "--config_file", f"{ACCELERATE}/single_gpu.yaml"]
            file = self.launch_strategy if gpus else "cpu"
            return ["--config_file", f"{ACCELERATE}/{file}.yaml", *processes]
        stage = self.strategy.removeprefix("zero")
        file = f"zero{max(int(stage), 1)}" if gpus else "cpu_zero2"
        zero_stage = [] if file.endswith(stage) else ["--zero_stage", stage]
        return ["--config_file", f"{ACCELERATE}/{file}.yaml", *zero_stage, *processes]


def plan(study: Study, out: Path = Path()) -> list[Trial]:
    """Returns the trials in the order in which they start; in a grid the last key varies fastest.

    Random values are drawn with (`seed`, number), so that adding trials leaves earlier ones as they
    are. Of a search by optuna it has the random ones and those that were suggested so far; see
    `suggest`. Raises a ConfigError for an invalid number of workers or strategy.
    """
    search, ranges = study.search, study.ranges
    all_values: list[dict[str, Any]] = []
    if search.sampler == "grid":
        lists = [values for values in ranges.values() if isinstance(values, list)]
        all_values += [
            dict(zip(ranges, values, strict=True)) for values in itertools.product(*lists)
        ]
    else:
        optuna = search.sampler == "optuna"
        known = tpe(study, out).journal() if optuna else {}
        drawn = min(study.planned, search.startup_trials or STARTUP) if optuna else study.planned
        for number in range(max(drawn, len(known))):
            random = np.random.default_rng([search.seed or 0, number])
            values = {key: draw(choices, random) for key, choices in ranges.items()}
            all_values.append(known.get(number, values))
    for values in all_values:
        flat = _flat(values)
        workers, strategy = flat.get("workers", 1), flat.get("strategy", "ddp")
        if type(workers) is not int or workers < 1:
            raise ConfigError(f"workers must be an integer of 1 or more, got {workers!r}")
        if strategy not in (strategies := get_args(Strategy)):
            raise ConfigError(f"strategy must be one of {', '.join(strategies)}, got {strategy!r}")
    return [_trial(study, out, number, values) for number, values in enumerate(all_values)]


def tpe(study: Study, out: Path) -> Tpe:
    """Returns the sampler of a study that searches by optuna."""
    return Tpe(out, study.ranges, study.search.seed or 0)


def suggest(trials: Sequence[Trial], rows: Mapping[str, Mapping[str, Any]]) -> Trial:
    """Returns the trial after some, by optuna, which is told the rows of those that ended."""
    study, out = trials[0].study, trials[0].out
    told = []
    for trial in trials:
        row = rows.get(trial.name)
        result = (row and row["result"]) or {}
        score = study.measure.worth(result.get(study.measure.score))
        steps = result["steps"] if row and row["status"] == "stopped" else None
        told.append(Told(_nested(trial), score, steps, running=row is None))
    return _trial(study, out, len(trials), tpe(study, out).suggest(len(trials), told))


def journal(trial: Trial) -> None:
    """Writes down a trial of a search by optuna, which is about to start."""
    tpe(trial.study, trial.out).write(int(trial.name), _nested(trial))


def _nested(trial: Trial) -> dict[str, Any]:
    """Returns a trial's values with those of the case below `CASES`: the reverse of `_flat`."""
    case = {key: trial.values[key] for key in (trial.study.cases or [{}])[0]}
    rest = {key: value for key, value in trial.values.items() if key not in case}
    return ({CASES: case} if case else {}) | rest


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values with those of the case beside the others."""
    return {**values.get(CASES, {}), **{k: v for k, v in values.items() if k != CASES}}


def _trial(study: Study, out: Path, number: int, values: Mapping[str, Any]) -> Trial:
    width = max(3, len(str(study.planned - 1)))
    return Trial(study, out, f"{number:0{width}}", _flat(values))


def refuse_missing_data(study: Study, configs: Sequence[Config]) -> None:
    """Raises a ConfigError that says how to get data that is missing and cannot be made."""
    for config in configs:
        config.data.refuse_missing(
            study.data or f"see the first lines of {find_config(study.base)}"
        )


def resources_per_worker(study: Study) -> dict[str, int]:
    """Returns the resources that a worker requests."""
    return {"CPU": study.cpus_per_worker} | ({"GPU": 1} if study.gpus else {})


def trials_at_once(study: Study, trials: Sequence[Trial], nodes: Sequence[Node]) -> int:
    """Returns how many trials run at once: as many of the largest as the nodes hold, or fewer.

    Raises a TrainingError with requested and available resources if a trial would wait forever.
    """
    needs, largest = resources_per_worker(study), max(trials, key=lambda trial: trial.workers)
    room = sum(min(int(node.get(kind, 0) // n) for kind, n in needs.items()) for node in nodes)
    if largest.workers > room:
        requested = [counted(n * largest.workers, kind) for kind, n in needs.items()]
        available = [counted(int(sum(node.get(kind, 0) for node in nodes)), kind) for kind in needs]
        raise TrainingError(
            f"trial {largest.name} asks for {counted(largest.workers, 'worker')}, "
            f"{' and '.join(requested)}; the cluster has {' and '.join(available)} on "
            f"{counted(len(nodes), 'node')}, room for {room}; use fewer workers, run the small "
            "version with --small, or join a larger cluster with --address"
        )
    return min(room // largest.workers, study.concurrent or room)
