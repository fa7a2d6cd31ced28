"""The trials of a study: which values each has, what it overrides, and the command of it."""

import itertools
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import yaml

from heron.launch.studies.study import LAUNCHED, Grid, Range, Strategy, Study
from heron.pipeline.config.errors import ConfigError
from heron.pipeline.config.experiment import Config, load_config
from heron.shards.manifest import MANIFEST

ACCELERATE = "launch/accelerate"
TRIALS = "trials"  # of a study's folder: the trials' own
AGAIN = "again"  # where a row's command leaves its run, beside the study's


@dataclass(frozen=True)
class Trial:
    """A run of a study.

    Attributes:
        name: its number, as of its folder: 003.
        values: of what varies.
        workers: processes that train together.
        strategy: that they train under.
    """

    name: str
    values: dict[str, Any]
    workers: int
    strategy: str

    def folder(self, out: Path) -> Path:
        """Returns the run's folder in the study's."""
        return out / TRIALS / self.name


def plan(study: Study) -> list[Trial]:
    """Returns the trials in the order in which they start: of a grid the last key varies fastest.

    A drawn trial has values of its own, drawn with (`seed`, number): more trials leave those
    before as they are.
    """
    search = study.search
    if isinstance(search, Grid):
        lists = [list(values) for values in study.vary.values()]  # a grid over a range is refused
        chosen = [
            case | dict(zip(study.vary, values, strict=True))
            for case in study.cases or [{}]
            for values in itertools.product(*lists)
        ]
    else:
        chosen = []
        for number in range(search.trials):
            random = np.random.default_rng([search.seed, number])
            case = study.cases[int(random.integers(len(study.cases)))] if study.cases else {}
            drawn = {key: _draw(values, random) for key, values in study.vary.items()}
            chosen.append(case | drawn)
    width = max(3, len(str(len(chosen) - 1)))
    return [_trial(study, f"{n:0{width}}", values) for n, values in enumerate(chosen)]


def _trial(study: Study, name: str, values: dict[str, Any]) -> Trial:
    workers = values.get("workers", study.workers)
    strategy, known = values.get("strategy", study.strategy), get_args(Strategy)
    if type(workers) is not int or workers < 1:
        raise ConfigError(f"workers is {workers!r}; expected a number of processes, 1 or more")
    if strategy not in known:
        raise ConfigError(f"strategy is {strategy!r}; expected one of {', '.join(known)}")
    return Trial(name, values, workers, strategy)


def overrides(study: Study, trial: Trial, rung: int | None = None) -> list[str]:
    """Returns what a person would type for this trial, without `run.dir`.

    Args:
        study: that the trial is of.
        trial: with its values.
        rung: steps to end after, where trials are compared on their way.
    """
    tree = study.set | {k: value for k, value in trial.values.items() if k not in LAUNCHED}
    if rung is not None:
        tree["train.steps"] = rung
    if not study.gpus:  # each worker has CPUs of its own, and its threads no more than those
        tree.setdefault("train.cpu_threads", study.cpus_per_worker)
    return [f"{key}={_typed(value)}" for key, value in tree.items()]


def configure(study: Study, trial: Trial, out: Path, rung: int | None = None) -> Config:
    """Returns the configuration that a trial runs with; see `overrides`.

    Raises:
        ConfigError: the values do not fit the experiment; says which trial.
    """
    if rung is None:
        rung = study.rungs[-1]
    own = [f"run.dir={trial.folder(out)}", "run.resume=auto"]
    try:
        return load_config(study.base, [*overrides(study, trial, rung), *own])
    except ConfigError as error:
        shown = ", ".join(f"{key}={_typed(value)}" for key, value in trial.values.items())
        raise ConfigError(f"trial {trial.name} ({shown}) of {study.base}: {error}") from None


def check(study: Study, trials: Sequence[Trial], out: Path) -> list[Config]:
    """Returns every trial's configuration before the first starts; see `configure` for errors."""
    return [configure(study, trial, out) for trial in trials]


def refuse_missing_data(study: Study, configs: Sequence[Config]) -> None:
    """Raises a ConfigError that says how to get data that is not there and cannot be made."""
    for path in dict.fromkeys(c.data.path for c in configs if c.data.build is None):
        if "://" not in path and not (Path(path) / MANIFEST).exists():
            how = study.data or f"see the first lines of {study.base}"
            raise ConfigError(f"{path} holds no shards, and the study trains on them; {how}")


def command(study: Study, trial: Trial, out: Path, rung: int | None = None) -> str:
    """Returns the shell command that makes this run again, in a folder outside of the study.

    Args:
        study: that the trial is of.
        trial: with its values.
        out: the study's folder.
        rung: steps to end after, where it was stopped early.
    """
    words = ["accelerate", "launch", *_launcher(study, trial), "pipeline/pretrain.py"]
    words += ["--config", study.base]
    words += overrides(study, trial, rung or study.rungs[-1])
    return shlex.join([*words, f"run.dir={out / AGAIN / trial.name}"])


def _launcher(study: Study, trial: Trial) -> list[str]:
    """Returns the accelerate configuration that does what a worker's environment asks for."""
    several = ["--num_processes", str(trial.workers)]
    if trial.strategy == "ddp":
        if trial.workers == 1:
            here = [] if study.gpus else ["--cpu"]
            return [*here, "--config_file", f"{ACCELERATE}/single_gpu.yaml"]
        file = "ddp" if study.gpus else "cpu"
        return ["--config_file", f"{ACCELERATE}/{file}.yaml", *several]
    stage = trial.strategy.removeprefix("zero")
    file = f"zero{max(int(stage), 1)}" if study.gpus else "cpu_zero2"
    other = [] if file.endswith(stage) else ["--zero_stage", stage]
    return ["--config_file", f"{ACCELERATE}/{file}.yaml", *other, *several]


def _draw(values: Any, random: np.random.Generator) -> Any:
    if isinstance(values, Range):
        return values.draw(random)
    return values[int(random.integers(len(values)))]


def _typed(value: Any) -> str:
    """Returns a value as it is typed in an override."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**9)
    return text.removesuffix("...\n").strip()
