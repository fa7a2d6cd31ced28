"""The trials of a study: which values each has, what it overrides, and the command of it."""

import itertools
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import yaml

from launch.studies.study import LAUNCHED, Grid, Range, Strategy, Study
from pipeline.config import Config, load_config
from pipeline.errors import ConfigError
from shards.manifest import MANIFEST

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
        """The run's folder in the study's."""
        return out / TRIALS / self.name


def plan(study: Study) -> list[Trial]:
    """The trials in the order in which they start: of a grid the last key varies fastest.

    A drawn trial has values of its own, drawn with (`seed`, number): more trials leave those
    before as they are.
    """
    search = study.search
    if isinstance(search, Grid):
        lists = [[(key, v) for v in _listed(values)] for key, values in study.vary.items()]
        chosen = [
            case | dict(pairs)
            for case in study.cases or [{}]
            for pairs in itertools.product(*lists)
        ]
    else:
        chosen = []
        for number in range(search.trials):
            random = np.random.default_rng([search.seed, number])
            case = study.cases[int(random.integers(len(study.cases)))] if study.cases else {}
            drawn = {key: _draw(values, random) for key, values in study.vary.items()}
            chosen.append(case | drawn)
    width = max(3, len(str(len(chosen) - 1)))
    return [
        Trial(
            f"{number:0{width}}",
            values,
            _workers(values, study.workers),
            _strategy(values, study.strategy),
        )
        for number, values in enumerate(chosen)
    ]


def overrides(
    study: Study, trial: Trial, values: Mapping[str, Any] | None = None, rung: int | None = None
) -> list[str]:
    """What a person would type for this trial, without `run.dir`.

    Args:
        study: that the trial is of.
        trial: see `plan`.
        values: instead of the trial's own, where a search has changed them.
        rung: steps to end after, where trials are compared on their way.
    """
    tree = study.set | {
        key: value
        for key, value in (trial.values if values is None else values).items()
        if key not in LAUNCHED
    }
    if rung is not None:
        tree["train.steps"] = rung
    if not study.gpus:  # each worker has CPUs of its own, and its threads no more than those
        tree.setdefault("train.cpu_threads", study.cpus_per_worker)
    return [f"{key}={_typed(value)}" for key, value in tree.items()]


def configure(
    study: Study,
    trial: Trial,
    out: Path,
    values: Mapping[str, Any] | None = None,
    rung: int | None = None,
) -> Config:
    """The configuration that a trial runs with.

    Raises:
        ConfigError: the values do not fit the experiment; says which trial.
    """
    if rung is None:
        rung = study.rungs[-1]
    own = [f"run.dir={trial.folder(out)}", "run.resume=auto"]
    try:
        return load_config(study.base, [*overrides(study, trial, values, rung), *own])
    except ConfigError as error:
        shown = ", ".join(f"{key}={_typed(value)}" for key, value in trial.values.items())
        raise ConfigError(f"trial {trial.name} ({shown}) of {study.base}: {error}") from None


def check(study: Study, trials: Sequence[Trial], out: Path) -> list[Config]:
    """Every trial's configuration, before the first starts; see `configure` for the errors."""
    return [configure(study, trial, out) for trial in trials]


def refuse_missing_data(study: Study, configs: Sequence[Config]) -> None:
    """Raise a ConfigError that says how to get it, where data is neither there nor can be made."""
    for path in dict.fromkeys(c.data.path for c in configs if c.data.build is None):
        if "://" not in path and not (Path(path) / MANIFEST).exists():
            how = study.data or f"see the first lines of {study.base}"
            raise ConfigError(f"{path} holds no shards, and the study trains on them; {how}")


def command(
    study: Study,
    trial: Trial,
    out: Path,
    values: Mapping[str, Any] | None = None,
    rung: int | None = None,
) -> str:
    """The shell command that makes this run again, in a folder of its own, outside of the study.

    Args:
        study: that the trial is of.
        trial: see `plan`.
        out: the study's folder.
        values: instead of the trial's own, where a search has changed them.
        rung: steps to end after, where it was stopped early.
    """
    words = ["accelerate", "launch", *_launcher(study, trial), "pipeline/pretrain.py"]
    words += ["--config", study.base]
    words += overrides(study, trial, values, rung or study.rungs[-1])
    return shlex.join([*words, f"run.dir={out / AGAIN / trial.name}"])


def _launcher(study: Study, trial: Trial) -> list[str]:
    """Which of the accelerate configurations does what a worker's environment asks for."""
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


def _listed(values: Any) -> list[Any]:
    assert isinstance(values, list)  # `Study` refuses a grid over a range
    return values


def _draw(values: Any, random: np.random.Generator) -> Any:
    if isinstance(values, Range):
        return values.draw(random)
    return values[int(random.integers(len(values)))]


def _workers(values: Mapping[str, Any], default: int) -> int:
    found = values.get("workers", default)
    if type(found) is not int or found < 1:
        raise ConfigError(f"workers is {found!r}; expected a number of processes, 1 or more")
    return found


def _strategy(values: Mapping[str, Any], default: str) -> str:
    found, known = values.get("strategy", default), get_args(Strategy)
    if found not in known:
        raise ConfigError(f"strategy is {found!r}; expected one of {', '.join(known)}")
    return str(found)


def _typed(value: Any) -> str:
    """A value as it is typed in an override."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**9)
    return text.removesuffix("...\n").strip()
