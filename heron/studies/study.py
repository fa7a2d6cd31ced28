"""A study as its YAML file states it: a base experiment, what varies and what is measured."""

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, model_validator

from heron.base.artefact import Count
from heron.base.errors import ConfigError
from heron.base.sections import Natural, PathText, Section, check, dump_yaml, read_tree
from heron.experiment.config import Config
from heron.experiment.overrides import parse_override

Strategy = Literal["ddp", "fsdp", "zero0", "zero1", "zero2", "zero3"]
SET_BY_STUDY = ("run.dir", "run.resume")  # keys of a trial that the study sets
LAUNCHED = ("workers", "strategy")  # may vary between trials, but are no keys of an experiment
OPTIONS = (*LAUNCHED, "gpus", "cpus_per_worker", "concurrent", "retries")  # the study's own
MAX_TRIALS = 100_000  # of a study; also the most rungs of a population
Trials = Annotated[Natural, Field(le=MAX_TRIALS)]
FACTOR = 4  # of ASHA and Hyperband, where a search states none
CASES = "cases"  # names the case among the drawn values of a trial
DIGITS = 4  # significant, of a drawn number: a command then holds the exact number


class Range(Section):
    """Numbers between two bounds, drawn uniformly or log-uniformly."""

    low: float
    high: float
    log: bool = False

    @model_validator(mode="after")
    def _check_bounds(self) -> "Range":
        if not self.low < self.high:
            raise ValueError(f"low must be below high, got {self.low} and {self.high}")
        if self.log and self.low <= 0:
            raise ValueError(f"low must be above 0 with log: true, got {self.low}")
        return self

    def draw(self, random: np.random.Generator) -> float:
        """Draws a number of the range, rounded to four digits."""
        if self.log:
            value = float(np.exp(random.uniform(np.log(self.low), np.log(self.high))))
        else:
            value = float(random.uniform(self.low, self.high))
        return self.clip(value)

    def clip(self, value: float) -> float:
        """Returns the value rounded to four digits and clipped to the range."""
        return min(max(float(f"{value:.{DIGITS}g}"), self.low), self.high)


Values = Annotated[list[Any], Field(min_length=1)] | Range


def draw(values: Values, random: np.random.Generator) -> Any:
    """Draws a number of a range, or an element of a list."""
    if isinstance(values, Range):
        return values.draw(random)
    return values[int(random.integers(len(values)))]


SCHEDULES: dict[str, dict[str, bool]] = {  # options of each scheduler, by whether they are needed
    "none": {},
    "asha": {"steps": True, "grace_steps": True, "factor": False},
    "pbt": {"steps": True, "every_steps": True, "seed": False},
    "median": {"steps": True, "every_steps": True, "grace_steps": False},
}
SCHEDULES["async_hyperband"] = SCHEDULES["asha"] | {"brackets": False, "seed": False}
SAMPLES: dict[str, dict[str, bool]] = {
    "grid": {},
    "random": {"trials": True, "seed": False},
    "optuna": {"trials": True, "seed": False, "startup_trials": False},
}


class Search(Section):
    """Which values trials have, and which trials end early: see docs/studies.md.

    `grid` takes every combination, `random` draws with (`seed`, trial), and `optuna` draws the
    first `startup_trials` so and has its TPE suggest the others. `asha` compares trials after
    `grace_steps`, after `factor` times as many and so on; `async_hyperband` does so in `brackets`,
    whose first comparisons lie further apart; `median` compares every `every_steps`, from
    `grace_steps` on; `pbt` exchanges weights every `every_steps`. All of them train to `steps`.
    """

    sampler: Literal["grid", "random", "optuna"] = "grid"
    scheduler: Literal["none", "asha", "pbt", "median", "async_hyperband"] = "none"
    trials: Trials | None = None
    seed: Count | None = None
    startup_trials: Natural | None = None
    steps: Natural | None = None
    grace_steps: Natural | None = None
    every_steps: Natural | None = None
    factor: Annotated[Natural, Field(ge=2)] | None = None
    brackets: Natural | None = None

    @model_validator(mode="after")
    def _check_options(self) -> "Search":
        options = SAMPLES[self.sampler] | SCHEDULES[self.scheduler]
        who = f"sampler {self.sampler} with scheduler {self.scheduler}"
        for key in self.model_fields_set - {"sampler", "scheduler"}:
            if key not in options and getattr(self, key) is not None:
                raise ValueError(f"{key} is not an option of {who}; remove it")
        for key, needed in options.items():
            if needed and getattr(self, key) is None:
                raise ValueError(f"{key} is missing; {who} needs it: add {key}: 20")
        if (self.sampler, self.scheduler) == ("optuna", "pbt"):
            raise ValueError(
                "sampler optuna does not work with scheduler pbt, which changes the values of "
                "running trials itself; use sampler: random"
            )
        if self.grace_steps and self.steps and self.grace_steps > self.steps:
            raise ValueError(
                f"grace_steps must be at most steps, {self.steps}, got {self.grace_steps}"
            )
        return self

    @property
    def description(self) -> str:
        """Its sampler and scheduler."""
        return self.sampler + (f" and {self.scheduler}" if self.scheduler != "none" else "")

    @property
    def rungs(self) -> list[int | None]:
        """Steps after which trials are compared, the last their end; None: the experiment's end."""
        first, last, every = self.grace_steps or 1, self.steps, self.every_steps
        if last is None:
            return [None]
        if every:
            return [*(n for n in range(every, last, every) if n >= first), last]
        all_rungs = (first * (self.factor or FACTOR) ** i for i in itertools.count())
        return [*itertools.takewhile(lambda n: n < last, all_rungs), last]


class Measure(Section):
    """The report's figures: `y` over `x`, one line per value of `group`, and `fits` of costs.

    A name is a key that varies, a name in result.json, or a measure of the steps. `score` ranks
    the trials.
    """

    x: str
    y: Annotated[list[str], Field(min_length=1)]
    group: str | None = None
    fits: list[Literal["power", "linear", "quadratic"]] = []
    score: str | None = None
    mode: Literal["max", "min"] = "max"

    def worth(self, score: float | None) -> float:
        """Returns the score so that higher is better; -inf for NaN or None."""
        if score is None or math.isnan(score):
            return -math.inf
        return score if self.mode == "max" else -score


class Study(Section):
    """Many runs of one experiment.

    The values of `vary` are combined with each other and with each of `cases`, which are values
    that belong together. `set` holds the overrides of all trials. `workers` and `strategy` go to
    the launcher, all other keys to the experiment. `data` says how to get the data.
    """

    title: str
    base: PathText
    data: str | None = None
    set: dict[str, Any] = {}
    vary: dict[str, Values] = {}
    cases: list[dict[str, Any]] = []
    search: Search = Search()
    workers: Natural = 1
    strategy: Strategy = "ddp"
    gpus: bool = False
    cpus_per_worker: Natural = 1
    concurrent: Natural | None = None
    retries: Count = 1
    measure: Measure

    @property
    def ranges(self) -> dict[str, Values]:
        """What varies: the values or the range of each key, and the cases."""
        return ({CASES: self.cases} if self.cases else {}) | self.vary

    @property
    def planned(self) -> int:
        """Number of trials."""
        if self.search.sampler != "grid":
            return self.search.trials or 0
        return math.prod(len(v) for v in self.ranges.values() if isinstance(v, list))

    @model_validator(mode="after")
    def _check(self) -> "Study":
        for fault in self._faults():
            raise ValueError(fault)
        return self

    def _faults(self) -> Iterator[str]:
        case = self.cases[0] if self.cases else {}
        for other in self.cases:
            if other.keys() != case.keys():
                keys = f"{sorted(case)} and {sorted(other)}"
                yield f"all cases must have the same keys, got {keys}"
        keys_of = {"vary": [*self.vary], "cases": [*case], "set": [*self.set]}
        for key in itertools.chain(*keys_of.values()):
            sections = [section for section, keys in keys_of.items() if key in keys]
            if key in SET_BY_STUDY:
                yield f"{key} is set by the study for each trial; remove it"
            if key in LAUNCHED and key in self.set:
                yield f"set has '{key}', which is not a key of an experiment; write {key}: ..."
            if len(sections) > 1:
                yield f"{key} is set in both {' and '.join(sections)}; remove one of them"
        if not (self.vary or case):
            yield "nothing varies; add values to vary or cases"
        search = self.search
        if search.sampler == "grid":
            for key, values in self.vary.items():
                if isinstance(values, Range):
                    yield (
                        f"vary.{key} is a range, and a grid needs a list; list the values, or "
                        "write search: {sampler: random, trials: 20}"
                    )
            if self.planned > MAX_TRIALS:
                yield f"a grid must have at most {MAX_TRIALS} trials, got {self.planned}; vary less"
        if search.steps and search.every_steps and search.steps // search.every_steps > MAX_TRIALS:
            yield f"search compares trials more than {MAX_TRIALS} times; raise every_steps"
        compared = search.scheduler if search.steps else search.sampler
        if (search.steps or search.sampler == "optuna") and self.measure.score is None:
            yield f"search {compared} compares trials; add measure.score, e.g. score: f1_weighted"
        if search.steps and "train.steps" in {*self.vary, *case, *self.set}:
            yield f"search.steps is the length of a trial of {compared}; remove train.steps"
        if search.scheduler == "pbt" and (self.cases or self.planned < 2):
            yield "search pbt needs 2 trials or more, and no cases; put their keys into vary"
        if search.scheduler == "pbt" or search.sampler == "optuna":
            for key in (key for key in LAUNCHED if key in {*self.vary, *case}):
                yield (
                    f"search {search.description} varies only keys of the experiment; set {key} "
                    "for all trials, or use sampler: grid without pbt"
                )


def load_study(path: str | Path, small: bool = False, overrides: Sequence[str] = ()) -> Study:
    """Reads a study; its section `small` holds the keys that differ in its small version.

    Overrides are `key=value` of every trial; for a key in `vary`, the values that it takes; for
    one of `OPTIONS`, how trials are run. Raises a ConfigError if the file is missing or no YAML
    mapping, or if a key or value is not valid in either version.
    """
    tree = read_tree(path, "study", "base")
    small_keys = tree.pop("small", None)
    check(Study, tree, f"study {path}")
    if small_keys is None and small:
        raise ConfigError(
            f"study {path} has no small version; remove --small, or add a section 'small:'"
        )
    if not isinstance(small_keys, dict | None):
        raise ConfigError(f"study {path}: small must have keys of the study, got {small_keys!r}")
    small_tree = tree | (small_keys or {})
    check(Study, small_tree, f"study {path}, small")
    return check(Study, _override(small_tree if small else tree, overrides), f"study {path}")


def _override(tree: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Returns the tree with each override in `vary`, where its key varies, or else in `set`."""
    varied, fixed = dict(tree.get("vary", {})), dict(tree.get("set", {}))
    case_keys = {key for case in tree.get("cases", []) for key in case}
    changed = {**tree}
    for key, value in (_value_of(text, varied) for text in overrides):
        for other in [*case_keys, *(varied.keys() - {key})]:
            if f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}."):
                where = "cases" if other in case_keys else "vary"
                raise ConfigError(
                    f"cannot override {key}, because {other} differs between trials ({where} of "
                    "the study); edit the study's file instead"
                )
        if key in varied:
            varied[key] = value if isinstance(value, list | dict) else [value]
        else:
            (changed if key in OPTIONS else fixed)[key] = value
    return changed | {"vary": varied, "set": fixed}


def _value_of(text: str, varied: Collection[str]) -> tuple[str, Any]:
    """Returns an override's key and value; of a key that varies, a list or a range of values."""
    key = text.partition("=")[0]
    if key in varied:
        with suppress(ConfigError):
            _, values = parse_override(text)
            if isinstance(values, list | dict):
                return key, values
    return parse_override(text, Study if key in OPTIONS else Config)


def dump_study(study: Study) -> str:
    """Returns the study as YAML, including defaults."""
    return dump_yaml(study.model_dump(mode="json"))
