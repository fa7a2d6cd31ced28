"""The trials of a study: which values each has, what it overrides, and the command of it.

Values that optuna's TPE suggests are in a journal: what was suggested once is never asked again.
"""

import itertools
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
from typing_extensions import TypedDict

from heron.config.errors import ConfigError, StudyError, TrainingError
from heron.config.experiment import Config, load_config
from heron.config.extras import require
from heron.config.overrides import as_typed
from heron.config.sections import Plain
from heron.config.shipped import ACCELERATE, JOB, find_config
from heron.distributed.cluster import Node
from heron.shards.artefact import Count, Fingerprint, fingerprint
from heron.shards.atomic import atomic_write
from heron.studies.study import CASES, LAUNCHED, Range, Strategy, Study, Values, draw
from heron.training.tracking import Metrics, read_lines

JOURNAL = "suggestions.jsonl"  # a line per trial, written before the trial starts
STARTUP = 10  # random trials before the first suggestion, where the search states no number


class Suggestion(TypedDict):
    """A line of `JOURNAL`."""

    trial: Count
    values: Plain
    search: Fingerprint  # of what was searched, and how


class Told(NamedTuple):
    """What optuna is told of a trial."""

    values: Mapping[str, Any]
    score: float | None = None  # higher is better; None or no finite number: it failed
    steps: int | None = None  # at which it was stopped early
    running: bool = False


@dataclass(frozen=True)
class Tpe:
    """The tree-structured Parzen estimator of optuna (Bergstra et al. 2011), by ask and tell.

    A suggestion depends on (`seed`, trial) and on what has been told, not on the process that asks,
    so that nothing of optuna's own state is saved.
    """

    folder: Path  # of the journal
    ranges: Mapping[str, Values]
    seed: int

    def journal(self) -> dict[int, dict[str, Any]]:
        """Returns the values of each trial so far; a StudyError if another search wrote them."""
        lines = read_lines(self.folder / JOURNAL, Suggestion)
        if any(line["search"] != self._fingerprint() for line in lines):
            raise StudyError(
                f"{self.folder / JOURNAL} belongs to another search (other ranges or another "
                "seed); choose another --out, or add --overwrite"
            )
        return {line["trial"]: line["values"] for line in lines}

    def write(self, number: int, values: Mapping[str, Any]) -> None:
        """Adds a trial to the journal, unless it is there."""
        known = self.journal()
        self.folder.mkdir(parents=True, exist_ok=True)
        lines = [
            {"trial": trial, "values": own, "search": self._fingerprint()}
            for trial, own in (known if number in known else known | {number: values}).items()
        ]
        with atomic_write(self.folder / JOURNAL) as stream:
            stream.writelines((json.dumps(line) + "\n").encode() for line in lines)

    def suggest(self, number: int, told: Sequence[Told]) -> dict[str, Any]:
        """Asks for the values of a trial, telling of the others; MissingPackage without optuna."""
        optuna: Any = require("optuna", "the sampler optuna")
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        kinds = {key: _distribution(optuna, values) for key, values in self.ranges.items()}
        seed = int(np.random.SeedSequence([self.seed, number]).generate_state(1)[0])
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=1)
        study = optuna.create_study(sampler=sampler, direction="maximize")
        for trial in told:
            if (params := self._params(trial.values)) is not None:
                outcome = _outcome(optuna.trial.TrialState, trial)
                one = optuna.trial.create_trial(params=params, distributions=kinds, **outcome)
                study.add_trial(one)
        params = study.ask(kinds).params
        return {
            key: values.clip(params[key]) if isinstance(values, Range) else values[params[key]]
            for key, values in self.ranges.items()
        }

    def _params(self, values: Mapping[str, Any]) -> dict[str, Any] | None:
        """Returns the values as optuna has them: a number, or the place in a list; or None."""
        params: dict[str, Any] = {}
        for key, choices in self.ranges.items():
            if isinstance(choices, Range):
                if not choices.low <= values.get(key, math.nan) <= choices.high:
                    return None
                params[key] = float(values[key])
            elif values.get(key) not in choices:
                return None
            else:
                params[key] = choices.index(values[key])
        return params

    def _fingerprint(self) -> str:
        ranges = {
            key: values.model_dump() if isinstance(values, Range) else values
            for key, values in self.ranges.items()
        }
        return fingerprint({"ranges": ranges, "seed": self.seed})


def _distribution(optuna: Any, values: Values) -> Any:
    if isinstance(values, Range):
        kind = optuna.distributions.FloatDistribution
        return kind(values.low, values.high, log=values.log)
    return optuna.distributions.CategoricalDistribution(range(len(values)))


def _outcome(state: Any, trial: Told) -> dict[str, Any]:
    if trial.running:
        return {"state": state.RUNNING}
    if trial.score is None or not math.isfinite(trial.score):
        return {"state": state.FAIL}
    if trial.steps is not None:
        return {"state": state.PRUNED, "intermediate_values": {trial.steps: trial.score}}
    return {"value": trial.score}


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
        requested = [_amount(n * largest.workers, kind) for kind, n in needs.items()]
        available = [_amount(int(sum(node.get(kind, 0) for node in nodes)), kind) for kind in needs]
        raise TrainingError(
            f"trial {largest.name} asks for {_amount(largest.workers, 'worker')}, "
            f"{' and '.join(requested)}; the cluster has {' and '.join(available)} on "
            f"{_amount(len(nodes), 'node')}, room for {room}; use fewer workers, run the small "
            "version with --small, or join a larger cluster with --address"
        )
    return min(room // largest.workers, study.concurrent or room)


def _amount(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
