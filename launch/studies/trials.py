"""The trials of a study: which values each has, what it overrides, and the command of it."""

import itertools
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
from typing_extensions import TypedDict

from heron.launch.pretrain import JOB
from heron.launch.studies.study import LAUNCHED, Grid, Strategy, Study, draw
from heron.pipeline.config.errors import ConfigError
from heron.pipeline.config.experiment import Config, load_config
from heron.pipeline.config.sections import Plain, as_typed
from heron.pipeline.config.shipped import ACCELERATE, find_config
from heron.pipeline.training.tracking import Metrics, read_lines
from heron.shards.artefact import Count

TRIALS = "trials"  # of a study's folder: the trials' own
AGAIN = "again"  # where a row's command leaves its run, beside the study's
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}  # what asks accelerate for FSDP2
RUNGS = "rungs.jsonl"  # in a run's folder: what it scored where trials are compared
LINEAGE = "lineage.jsonl"  # in a run's folder: whose weights it took over, and its values then

Taken = TypedDict("Taken", {"step": Count, "from": str, "values": Plain})  # of LINEAGE


@dataclass(frozen=True)
class Trial:
    """A run of a study, whose folder is `out`; the name is its number (003)."""

    study: Study
    out: Path
    name: str
    values: dict[str, Any]

    @property
    def run(self) -> Path:
        """The run's folder in the study's."""
        return self.out / TRIALS / self.name

    @property
    def workers(self) -> int:
        """Processes that train together."""
        return int(self.values.get("workers", self.study.workers))

    @property
    def strategy(self) -> str:
        """That they train under."""
        return str(self.values.get("strategy", self.study.strategy))

    @property
    def launched(self) -> str:
        """The strategy that is asked for: of one process there is nothing for FSDP2 to part."""
        return "ddp" if (self.strategy, self.workers) == ("fsdp", 1) else self.strategy

    @property
    def description(self) -> str:
        """Its values, as `key=value, ...`."""
        return ", ".join(f"{key}={as_typed(value)}" for key, value in self.values.items())

    def scores(self) -> dict[int | None, dict[str, Any]]:
        """Returns what the run has scored so far, by the rung."""
        lines = read_lines(self.run / RUNGS, Metrics)
        return {
            line["step"]: {k: math.nan if v is None else v for k, v in line.items()}
            for line in lines
        }

    def lineage(self) -> list[dict[str, Any]]:
        """Returns what the run has taken over: at which step, from whom, and its values then."""
        return read_lines(self.run / LINEAGE, Taken)

    def current(self) -> "Trial":
        """Returns the trial with the values that it came to, where it has taken over another's."""
        past = self.lineage()
        return replace(self, values=dict(past[-1]["values"])) if past else self

    def overrides(self, rung: int | None = None) -> list[str]:
        """Returns what a person would type for this trial, to a rung or the end, but `run.dir`."""
        tree = self.study.set | {k: v for k, v in self.values.items() if k not in LAUNCHED}
        if (steps := rung or self.study.rungs[-1]) is not None:
            tree["train.steps"] = steps
        if not self.study.gpus:  # each worker has CPUs of its own, and its threads no more
            tree.setdefault("train.cpu_threads", self.study.cpus_per_worker)
        return [f"{key}={as_typed(value)}" for key, value in tree.items()]

    def config(self, rung: int | None = None) -> Config:
        """Returns what the trial runs with; a ConfigError says which trial's values do not fit."""
        own = [f"run.dir={as_typed(str(self.run))}", "run.resume=auto"]
        try:
            return load_config(find_config(self.study.base), [*self.overrides(rung), *own])
        except ConfigError as error:
            where = f"trial {self.name} ({self.description}) of {self.study.base}"
            raise ConfigError(f"{where}: {error}") from None

    def command(self, rung: int | None = None) -> str:
        """Returns the shell command that makes this run again, in a folder outside of the study."""
        words = ["accelerate", "launch", *self._launcher(), "-m", JOB]
        if self.launched == "fsdp" and not self.study.gpus:  # which no option asks for on CPUs
            words = ["env", *(f"{name}={value}" for name, value in FSDP.items()), *words]
        words += ["--config", self.study.base, *self.overrides(rung)]
        again = as_typed(str(self.out / AGAIN / self.name))
        return shlex.join([*words, f"run.dir={again}"])

    def _launcher(self) -> list[str]:
        """Returns the accelerate configuration that does what a worker's environment asks for."""
        gpus, several = self.study.gpus, ["--num_processes", str(self.workers)]
        if not self.launched.startswith("zero"):
            if self.workers == 1:
                here = [] if gpus else ["--cpu"]
                return [*here, "--config_file", f"{ACCELERATE}/single_gpu.yaml"]
            file = self.launched if gpus else "cpu"
            return ["--config_file", f"{ACCELERATE}/{file}.yaml", *several]
        stage = self.strategy.removeprefix("zero")
        file = f"zero{max(int(stage), 1)}" if gpus else "cpu_zero2"
        other = [] if file.endswith(stage) else ["--zero_stage", stage]
        return ["--config_file", f"{ACCELERATE}/{file}.yaml", *other, *several]


def plan(study: Study, out: Path = Path()) -> list[Trial]:
    """Returns the trials in the order in which they start: of a grid the last key varies fastest.

    A drawn trial has values of its own, drawn with (`seed`, number): more trials leave those
    before as they are. Raises a ConfigError where a number of workers, or a strategy, is none.
    """
    search, cases = study.search, study.cases or [{}]
    chosen = []
    if isinstance(search, Grid):
        lists = [list(values) for values in study.vary.values()]  # a grid over a range is refused
        for case, values in itertools.product(cases, itertools.product(*lists)):
            chosen.append(case | dict(zip(study.vary, values, strict=True)))
    else:
        for number in range(search.trials):
            random = np.random.default_rng([search.seed, number])
            case = draw(cases, random) if study.cases else {}
            chosen.append(case | {key: draw(among, random) for key, among in study.vary.items()})
    width = max(3, len(str(len(chosen) - 1)))
    for values in chosen:
        workers, strategy = values.get("workers", 1), values.get("strategy", "ddp")
        if type(workers) is not int or workers < 1:
            raise ConfigError(f"workers is {workers!r}; expected a number of processes, 1 or more")
        if strategy not in (known := get_args(Strategy)):
            raise ConfigError(f"strategy is {strategy!r}; expected one of {', '.join(known)}")
    return [Trial(study, out, f"{n:0{width}}", values) for n, values in enumerate(chosen)]


def refuse_missing_data(study: Study, configs: Sequence[Config]) -> None:
    """Raises a ConfigError that says how to get data that is not there and cannot be made."""
    for config in configs:
        config.data.refuse_missing(
            study.data or f"see the first lines of {find_config(study.base)}"
        )
