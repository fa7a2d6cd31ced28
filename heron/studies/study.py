"""A study as its YAML file states it: a base experiment, what varies and what is measured."""

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, model_validator

from heron.config.errors import ConfigError
from heron.config.experiment import Config
from heron.config.overrides import parse_override
from heron.config.sections import Natural, PathText, Section, check, dump_yaml, read_tree
from heron.shards.artefact import Count

Strategy = Literal["ddp", "fsdp", "zero0", "zero1", "zero2", "zero3"]
SET_BY_STUDY = ("run.dir", "run.resume")  # keys of a trial that the study sets
LAUNCHED = ("workers", "strategy")  # may vary between trials, but are no keys of an experiment
OPTIONS = (*LAUNCHED, "gpus", "cpus_per_worker", "concurrent", "retries")  # the study's own
MAX_TRIALS = 100_000  # of a study; also the most rungs of a population
Trials = Annotated[Natural, Field(le=MAX_TRIALS)]
DIGITS = 4  # significant, of a drawn number: a command then holds the exact number


class Range(Section):
    """Numbers between two bounds, drawn uniformly or log-uniformly."""

    low: float
    high: float
    log: bool = False

    @model_validator(mode="after")
    def _check_bounds(self) -> "Range":
        if not self.low < self.high:
            raise ValueError(f"from {self.low} to {self.high}; expected low below high")
        if self.log and self.low <= 0:
            raise ValueError(f"low is {self.low} with log: true; expected it above 0")
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


class Grid(Section):
    """Every combination of the values."""

    kind: Literal["grid"] = "grid"


class Random(Section):
    """Trials whose values are drawn independently, with (`seed`, trial)."""

    kind: Literal["random"]
    trials: Trials
    seed: Count = 0


class Asha(Section):
    """Random trials that are stopped early where others are better (Li et al. 2020).

    Trials are compared after `grace_steps` steps, after `factor` times as many, and so on; of the
    trials that reached such a rung the best `1 / factor` continue, to `steps` at most.
    """

    kind: Literal["asha"]
    trials: Trials
    seed: Count = 0
    steps: Natural
    grace_steps: Natural
    factor: Annotated[Natural, Field(ge=2)] = 4

    @model_validator(mode="after")
    def _check_steps(self) -> "Asha":
        if self.grace_steps > self.steps:
            raise ValueError(
                f"grace_steps is {self.grace_steps} and steps {self.steps}; expected no more"
            )
        return self


class Pbt(Section):
    """Population based training (Jaderberg et al. 2017).

    Every `every_steps` steps the worst quarter takes over weights of the best quarter, and
    perturbs its values.
    """

    kind: Literal["pbt"]
    trials: Annotated[Trials, Field(ge=2)]
    seed: Count = 0
    steps: Natural
    every_steps: Natural


Search = Annotated[Grid | Random | Asha | Pbt, Field(discriminator="kind")]


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
    search: Search = Grid()
    workers: Natural = 1
    strategy: Strategy = "ddp"
    gpus: bool = False
    cpus_per_worker: Natural = 1
    concurrent: Natural | None = None
    retries: Count = 1
    measure: Measure

    @property
    def rungs(self) -> list[int | None]:
        """Steps after which trials are compared, the last their end; None: the experiment's end."""
        match self.search:
            case Asha(steps=steps, grace_steps=first, factor=factor):
                all_rungs = (first * factor**i for i in itertools.count())
                return [*itertools.takewhile(lambda n: n < steps, all_rungs), steps]
            case Pbt(steps=steps, every_steps=interval):
                return [*range(interval, steps, interval), steps]
        return [None]

    @model_validator(mode="after")
    def _check(self) -> "Study":
        for fault in self._faults():
            raise ValueError(fault)
        return self

    def _faults(self) -> Iterator[str]:
        case, kind = self.cases[0] if self.cases else {}, self.search.kind
        for other in self.cases:
            if other.keys() != case.keys():
                keys = f"{sorted(case)} and {sorted(other)}"
                yield f"cases have the keys {keys}; expected the same in every case"
        keys_of = {"vary": [*self.vary], "cases": [*case], "set": [*self.set]}
        for key in itertools.chain(*keys_of.values()):
            sections = [section for section, keys in keys_of.items() if key in keys]
            if key in SET_BY_STUDY:
                yield f"{key} is given to each trial by the study; take it out"
            if key in LAUNCHED and key in self.set:
                yield f"set has '{key}', which is no key of an experiment; write {key}: ..."
            if len(sections) > 1:
                yield f"{key} is given twice, in {' and '.join(sections)}; keep one of them"
        if not (self.vary or case):
            yield "nothing varies; expected values in vary or cases"
        if kind == "grid":
            trials = len(self.cases or [{}])
            for key, values in self.vary.items():
                if isinstance(values, Range):
                    yield (
                        f"vary.{key} is a range, and a grid has no end of numbers; expected a "
                        "list, or search: {kind: random, trials: 20}"
                    )
                else:
                    trials *= len(values)
            if trials > MAX_TRIALS:
                yield f"the grid has {trials} trials; expected {MAX_TRIALS} at most: vary less"
        if (
            isinstance(self.search, Pbt)
            and self.search.steps // self.search.every_steps > MAX_TRIALS
        ):
            yield f"search compares trials more than {MAX_TRIALS} times; raise every_steps"
        if isinstance(self.search, Asha | Pbt):
            if self.measure.score is None:
                yield f"search {kind} compares trials; expected measure.score: f1_weighted"
            if "train.steps" in {*self.vary, *case, *self.set}:
                yield f"search.steps says how long a trial of {kind} is; drop train.steps"
        if kind == "pbt" and (self.cases or self.vary.keys() & {*LAUNCHED}):
            yield (
                "search pbt changes values of a run that is under way; expected keys of the "
                "experiment in vary, and no cases, workers or strategy"
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
        raise ConfigError(f"study {path} has no small version; expected a section 'small:'")
    if not isinstance(small_keys, dict | None):
        raise ConfigError(f"study {path}: small is {small_keys!r}; expected keys of the study")
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
                    f"override of {key}: {other} differs between trials, in {where} of the "
                    "study; expected another key, or change the study's file"
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
