"""A study as its YAML file states it: a base experiment, what varies, what is measured."""

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, model_validator

from heron.pipeline.config.errors import ConfigError
from heron.pipeline.config.sections import (
    Natural,
    PathText,
    Section,
    check,
    dump_yaml,
    parse_override,
    read_tree,
)
from heron.shards.artefact import Count

Strategy = Literal["ddp", "fsdp", "zero0", "zero1", "zero2", "zero3"]
OWN = ("run.dir", "run.resume")  # of a trial, which the study gives
LAUNCHED = ("workers", "strategy")  # what varies and is no key of the experiment
OPTIONS = (*LAUNCHED, "gpus", "cpus_per_worker", "concurrent", "retries")  # the study's own
MOST = 100_000  # trials of a study, and rungs of a population
Trials = Annotated[Natural, Field(le=MOST)]
DIGITS = 4  # of a drawn number, so that a command holds the number itself


class Range(Section):
    """Numbers between two ends, drawn evenly, or evenly in their logarithm."""

    low: float
    high: float
    log: bool = False

    @model_validator(mode="after")
    def _ends(self) -> "Range":
        if not self.low < self.high:
            raise ValueError(f"from {self.low} to {self.high}; expected low below high")
        if self.log and self.low <= 0:
            raise ValueError(f"low is {self.low} with log: true; expected it above 0")
        return self

    def draw(self, random: np.random.Generator) -> float:
        """Draws a number of the range, of four digits."""
        if self.log:
            drawn = float(np.exp(random.uniform(np.log(self.low), np.log(self.high))))
        else:
            drawn = float(random.uniform(self.low, self.high))
        return self.clip(drawn)

    def clip(self, value: float) -> float:
        """Returns the number of the range that is nearest, of four digits."""
        return min(max(float(f"{value:.{DIGITS}g}"), self.low), self.high)


Values = Annotated[list[Any], Field(min_length=1)] | Range


def draw(among: Values, random: np.random.Generator) -> Any:
    """Draws a number of a range, or one of a list."""
    if isinstance(among, Range):
        return among.draw(random)
    return among[int(random.integers(len(among)))]


class Grid(Section):
    """Every combination of the values."""

    kind: Literal["grid"] = "grid"


class Random(Section):
    """Trials that each have values of their own, drawn with (`seed`, trial)."""

    kind: Literal["random"]
    trials: Trials
    seed: Count = 0


class Asha(Section):
    """Random trials that are stopped early where others are better (Li et al. 2020).

    Trials are compared after `grace_steps` steps, after `factor` times as many, and so on; of
    those that came so far the best `1 / factor` go on, to `steps` at most.
    """

    kind: Literal["asha"]
    trials: Trials
    seed: Count = 0
    steps: Natural
    grace_steps: Natural
    factor: Annotated[Natural, Field(ge=2)] = 4

    @model_validator(mode="after")
    def _order(self) -> "Asha":
        if self.grace_steps > self.steps:
            raise ValueError(
                f"grace_steps is {self.grace_steps} and steps {self.steps}; expected no more"
            )
        return self


class Pbt(Section):
    """Population based training (Jaderberg et al. 2017).

    Every `every_steps` steps the worst quarter takes weights of the best, and perturbed values.
    """

    kind: Literal["pbt"]
    trials: Annotated[Trials, Field(ge=2)]
    seed: Count = 0
    steps: Natural
    every_steps: Natural


Search = Annotated[Grid | Random | Asha | Pbt, Field(discriminator="kind")]


class Measure(Section):
    """What is looked at: `y` over `x`, a line each value of `group`, and the fits wanted of costs.

    A name is one of what varies, of result.json, or of what is measured of the steps. `score` is
    what the best trial is best in.
    """

    x: str
    y: Annotated[list[str], Field(min_length=1)]
    group: str | None = None
    fits: list[Literal["power", "linear", "quadratic"]] = []
    score: str | None = None
    mode: Literal["max", "min"] = "max"

    def worth(self, score: float | None) -> float:
        """Returns a score of which more is better; NaN or None is worth least."""
        if score is None or math.isnan(score):
            return -math.inf
        return score if self.mode == "max" else -score


class Study(Section):
    """Many runs of one experiment.

    The values of `vary` are combined with each other and with every one of `cases`, which are
    values that belong together. `set` holds what all trials override. `workers` and `strategy`
    are launched, all other keys are the experiment's. `data` says how to get the data.
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
                before = itertools.takewhile(
                    lambda n: n < steps, (first * factor**i for i in itertools.count())
                )
                return [*before, steps]
            case Pbt(steps=steps, every_steps=every):
                return [*range(every, steps, every), steps]
        return [None]

    @model_validator(mode="after")
    def _sound(self) -> "Study":
        for fault in self._faults():
            raise ValueError(fault)
        return self

    def _faults(self) -> Iterator[str]:
        """Yields what does not go together."""
        case, kind = self.cases[0] if self.cases else {}, self.search.kind
        for other in self.cases:
            if other.keys() != case.keys():
                keys = f"{sorted(case)} and {sorted(other)}"
                yield f"cases have the keys {keys}; expected the same in every case"
        given = {"vary": [*self.vary], "cases": [*case], "set": [*self.set]}
        for key in itertools.chain(*given.values()):
            places = [place for place, keys in given.items() if key in keys]
            if key in OWN:
                yield f"{key} is given to each trial by the study; take it out"
            if key in LAUNCHED and key in self.set:
                yield f"set has '{key}', which is no key of an experiment; write {key}: ..."
            if len(places) > 1:
                yield f"{key} is given twice, in {' and '.join(places)}; keep one of them"
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
            if trials > MOST:
                yield f"the grid has {trials} trials; expected {MOST} at most: vary less"
        if isinstance(self.search, Pbt) and self.search.steps // self.search.every_steps > MOST:
            yield f"search compares trials more than {MOST} times; raise every_steps"
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
    """Reads a study; its section `small` holds what differs in its small version.

    Overrides are `key=value` of every trial; of a key in `vary`, the values that it takes; of
    `OPTIONS`, how trials are run. Raises a ConfigError where the file is missing or no YAML
    mapping, or a key or value does not fit, in the version asked for or in the other.
    """
    tree = read_tree(path, "study", "base")
    other = tree.pop("small", None)
    check(Study, tree, f"study {path}")
    if other is None and small:
        raise ConfigError(f"study {path} has no small version; expected a section 'small:'")
    if not isinstance(other, dict | None):
        raise ConfigError(f"study {path}: small is {other!r}; expected keys of the study")
    smaller = tree | (other or {})
    check(Study, smaller, f"study {path}, small,")
    return check(Study, _overridden(smaller if small else tree, overrides), f"study {path}")


def _overridden(tree: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Returns the tree with the overrides in `vary`, where a key varies, or else in `set`."""
    varied, fixed = dict(tree.get("vary", {})), dict(tree.get("set", {}))
    cased = {key for case in tree.get("cases", []) for key in case}
    changed = {**tree}
    for key, value in map(parse_override, overrides):
        for other in [*cased, *(varied.keys() - {key})]:
            if f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}."):
                where = "cases" if other in cased else "vary"
                raise ConfigError(
                    f"override of {key}: {other} differs between trials, in {where} of the "
                    "study; expected another key, or change the study's file"
                )
        if key in varied:
            varied[key] = value if isinstance(value, list | dict) else [value]
        else:
            (changed if key in OPTIONS else fixed)[key] = value
    return changed | {"vary": varied, "set": fixed}


def dump_study(study: Study) -> str:
    """Returns the study as YAML, complete: defaults too."""
    return dump_yaml(study.model_dump(mode="json"))
