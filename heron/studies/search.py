"""A search of a method in one fold: what its trials vary, and which one validation rows choose."""

import json
import math
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from heron.base.errors import ConfigError, Held, StudyError, TrainingError
from heron.base.sections import Section, Share, check, leaves, read_tree
from heron.experiment.config import CLASSIFIERS, Config, load_config, parse_config
from heron.experiment.overrides import override
from heron.studies.engine import Batch, Job, refuse_clashes, train
from heron.studies.study import DIGITS, Range, Values, draw
from heron.studies.suggestions import Told, Tpe

OWN = "own"  # names the experiment as it stands, without a method applied
# Overrides that would give a method other rows to be judged by, and those that do not.
ROWS = (
    "seed=",
    *(f"data.{key}" for key in ("path", "sources", "split", "roles", "build", "protocol")),
)
LESS = "data.protocol.leave_out", "data.protocol.label_weights"
VALIDATION = 0.2  # share of the labelled rows, where the experiment sets none aside
VALIDATION_PREFIX = "validation_"
LOG = "log.txt"
STARTUP = 4  # trials before the first that optuna suggests: the experiment, and three draws
MIN_TAU = 0.003  # as `losses.terms.Temperature` allows
Areas = Annotated[list[Annotated[float, Field(gt=0, le=1)]], Field(min_length=1)]


class Space(Section):
    """Ranges that the trials of a search draw from, as a file of `configs/tuning/` states them.

    A key without a range keeps the experiment's value.
    """

    rate: Range | None = None  # factors of `optim.lr`
    dropout: Range | None = None  # replaces the dropout of every encoder that has one
    weight: Range | None = None  # factors of the weight of each term that trains no classifier
    tau: Range | None = None  # factors of the temperature of each term that has one
    crop: Areas | None = None  # smallest areas of the crops, which all views have alike
    flip: list[Share] | None = None  # probabilities of the mirror images of these crops
    vary: dict[str, Values] = {}  # further keys, with the values or the range of each

    def draw(self, config: Config, seed: int, trial: int) -> dict[str, Any]:
        """Returns a trial's changes to the experiment, by dotted key; trial 0 changes nothing.

        Each value is drawn with (seed, trial, key), so that methods that share an option get the
        same value. `apply` sets them.
        """
        if trial == 0:
            return {}
        changes: dict[str, Any] = {}
        for key, base, values in self._ranges(config):
            random = np.random.default_rng([seed, trial, zlib.crc32(key.encode())])
            changes[key] = draw(values, random)
            if base is not None:
                changes[key] = float(f"{base * changes[key]:.{DIGITS}g}")
            if key.endswith(".tau"):
                changes[key] = max(changes[key], MIN_TAU)
        return changes

    def absolute(self, config: Config) -> dict[str, Values]:
        """Returns the range or the values of each key that varies, factors times their base."""
        found: dict[str, Values] = {}
        for key, base, values in self._ranges(config):
            if base is not None and isinstance(values, Range):
                least = MIN_TAU if key.endswith(".tau") else -math.inf
                low, high = (
                    max(float(f"{base * x:.{DIGITS}g}"), least) for x in (values.low, values.high)
                )
                values = values.model_copy(update={"low": low, "high": high})
            found[key] = values
        return found

    def tree(self, config: Config) -> dict[str, Any]:
        """Returns the ranges as plain values, without crops where they vary none."""
        varied = {key for key in _crops(config) if getattr(self, key)}
        return self.model_dump(mode="json", exclude={"crop", "flip"} - varied)

    def standing(self, config: Config) -> dict[str, Any]:
        """Returns the experiment's own value of each key that varies."""
        leaves_of = dict(leaves(config.model_dump(mode="json"), into_lists=False))
        leaves_of |= _crops(config)
        return {key: leaves_of.get(key) for key, _, _ in self._ranges(config)}

    def _ranges(self, config: Config) -> Iterator[tuple[str, float | None, Values]]:
        """Yields each key that varies, the base value of a factor (or None), and the range."""
        tree = config.model_dump(mode="json")
        if self.rate:
            yield "optim.lr", config.optim.lr, self.rate
        encoders = dict(config.model.encoder_of(name) for name in config.data.view_names)
        for name, encoder in encoders.items():
            if self.dropout and hasattr(encoder, "dropout") and getattr(encoder, "widths", True):
                yield f"{name}.dropout", None, self.dropout
        for name, options in tree["objective"].items():
            if self.weight and name not in CLASSIFIERS and options.get("weight"):
                yield f"objective.{name}.weight", options["weight"], self.weight
            if self.tau and options.get("tau"):
                yield f"objective.{name}.tau", options["tau"], self.tau
        standing = _crops(config)
        for key, shares in {"crop": self.crop, "flip": self.flip}.items():
            if key in standing and shares:
                yield key, None, sorted({*shares, standing[key]})
        for key, values in self.vary.items():
            yield key, None, values


def _crops(config: Config) -> dict[str, float]:
    """Returns `crop` and `flip` of an experiment, where all crops of its views have the same.

    A frozen network would embed all rows again for each of them.
    """
    if config.frozen_views:
        return {}
    steps = [step for view in config.data.views for step in view.model_dump()["augment"]]
    crops = [step["crop"] for step in steps if "crop" in step]
    found = {"crop": {c["area"][0] for c in crops if c["area"][1] == 1}}
    alike = len({c["area"][1] for c in crops}) == 1
    found["flip"] = {c["flip"] for c in crops if not any("flip" in step for step in steps)}
    return {key: of.pop() for key, of in found.items() if alike and len(of) == 1}


def apply(values: Mapping[str, Any], tree: dict[str, Any]) -> None:
    """Sets the values of a trial in an experiment's tree: dotted keys, `crop` and `flip`."""
    crops = [s["crop"] for v in tree["data"]["views"] for s in v["augment"] if "crop" in s]
    for key, value in values.items():
        if key == "crop":
            for crop in crops:
                crop["area"] = [value, crop["area"][1]]
        elif key == "flip":
            for crop in crops:
                crop["flip"] = value
        else:
            override(tree, f"{key}={json.dumps(value)}")


def load_space(path: Path) -> Space:
    """Reads a file of ranges; ConfigError if it is missing or not valid."""
    return check(Space, read_tree(path, "ranges", "rate"), f"ranges {path}")


@dataclass(frozen=True)
class SearchSettings:
    """Settings of a search, common to all its folds and methods."""

    config: Path  # the experiment's file
    overrides: Sequence[str]
    space: Space
    trials: int  # per method and fold; the first is the experiment as it stands
    seed: int  # of the draws of values
    score: str  # that ranks trials, on the validation rows; higher is better
    out: Path  # folder of all outputs
    sampler: Literal["random", "optuna"] = "random"

    def experiment(self, method: str, fold: int | None) -> Config:
        """Returns a method's experiment, before any search; fold None is the experiment's own.

        In fold k the run's seed is the experiment's plus k. A method may have overrides of its own:
        `own+data.protocol.leave_out=decisions.csv`.
        """
        name, *own = re.split(r"\+(?=[a-z_][\w.-]*=)", method)
        if rows := [text for text in own if text.startswith(ROWS) and not text.startswith(LESS)]:
            raise ConfigError(
                f"{rows[0]}: methods are judged by the same rows, so a method alone cannot change "
                f"this; it may have {' or '.join(LESS)}"
            )
        overrides = [*self.overrides, *own]
        refuse_clashes(overrides, ["run.dir", "run.resume", "evaluate.test"])
        base = load_config(self.config, overrides, None if name == OWN else name)
        tree = base.model_dump(mode="json")
        if fold is not None:
            refuse_clashes(overrides, ["data.protocol.fold"])
            tree["data"]["protocol"]["fold"] = fold
            tree["seed"] = base.seed + fold
        tree["data"]["protocol"]["validation"] = base.data.protocol.validation or VALIDATION
        tree["evaluate"] |= {"test": False, "baselines": False, "map": "never"}
        if "threshold" not in base.evaluate.model_fields_set:
            tree["evaluate"]["threshold"] = "fitted"  # one number suits some methods and not others
        tree |= {"run": {"dir": str(self.out), "resume": "auto"}, "tracking": []}
        return parse_config(tree)

    def trial(
        self,
        experiment: Config,
        number: int,
        folder: Path,
        trials: "Sequence[SearchTrial]" = (),
        rows: Sequence[Mapping[str, Any]] = (),
    ) -> "SearchTrial":
        """Returns a trial of a method's experiment, whose run lies in `folder`.

        Optuna is told of earlier `trials` and their `rows`, and suggests each from the `STARTUP`th
        on; before, and by default, values are drawn.
        """
        values = self.space.draw(experiment, self.seed, number)
        if self.sampler == "optuna":
            tpe = Tpe(folder, self.space.absolute(experiment), self.seed)
            if number >= STARTUP and tpe.ranges:
                base = self.space.standing(experiment)
                told = [
                    Told(base | trial.values, row["validation"])
                    for trial, row in zip(trials, rows, strict=True)
                ]
                known = tpe.journal()
                values = known[number] if number in known else tpe.suggest(number, told)
            tpe.write(number, values)
        tree = experiment.model_dump(mode="json")
        apply(values, tree)
        tree["run"]["dir"] = str(folder / f"{number:03}")
        return SearchTrial(number, values, parse_config(tree))


@dataclass(frozen=True)
class SearchTrial:
    """A run of a search: its number, its changes to the experiment, and its full configuration."""

    number: int
    values: dict[str, Any]
    config: Config

    @property
    def description(self) -> str:
        """Its values, as `key=value, ...`."""
        return ", ".join(f"{key}={value}" for key, value in self.values.items()) or "as it stands"


def search(
    settings: SearchSettings, experiment: Config, folder: Path
) -> Job[tuple[SearchTrial, list[dict[str, Any]]]]:
    """Runs those trials of a method in a fold that have no result yet, in a folder.

    Random trials are independent of each other; each that optuna suggests follows those before it.
    Their output goes to its log.txt; only the best trial keeps its checkpoints. Returns the best
    trial by the validation rows, the first of equals; and a row per trial with its number, its
    values and its `validation` score, or None and the `error`.

    Raises a StudyError if the experiment has no such score, a TrainingError if no trial has the
    score, and Stopped after a signal, with the state of the current run saved.
    """
    optuna = settings.sampler == "optuna"
    trials, rows = list[SearchTrial](), list[dict[str, Any]]()
    while len(trials) < settings.trials:
        first = len(trials)
        last = (first + 1 if first >= STARTUP else STARTUP) if optuna else settings.trials
        for number in range(first, min(last, settings.trials)):
            trials.append(settings.trial(experiment, number, folder, trials, rows))
        calls = {
            str(trial.number): partial(_attempt, trial, folder / LOG, settings.score)
            for trial in trials[first:]
        }
        rows += yield Batch(calls, partial(_tell, settings, folder, trials))
    scores = [-math.inf if row["validation"] is None else row["validation"] for row in rows]
    if max(scores) == -math.inf:
        raise TrainingError(f"{folder}: no trial has a score; the first: {rows[0]['error']}")
    best = scores.index(max(scores))
    for number, trial in enumerate(trials):
        if number != best:
            shutil.rmtree(Path(trial.config.run.dir) / "checkpoints", ignore_errors=True)
    return trials[best], rows


def _attempt(trial: SearchTrial, log: Path, score: str) -> dict[str, Any]:
    """Returns the row of a trial, which is run if it has no result."""
    row: dict[str, Any] = {"trial": trial.number, "values": trial.values, "error": None}
    try:
        return row | {"validation": _score(train(trial.config, log), score)}
    except Held:
        raise
    except TrainingError as error:  # such as a loss that is not finite, at too high a rate
        return row | {"validation": None, "error": str(error)}


def _tell(
    settings: SearchSettings, folder: Path, trials: Sequence[SearchTrial], name: str, row: Any
) -> None:
    outcome = row["error"] or f"{settings.score} {row['validation']:.4f}"
    trial = f"{folder.relative_to(settings.out)} {row['trial']:03}"
    print(f"{trial} ({trials[row['trial']].description}): {outcome}", flush=True)


def _score(result: dict[str, Any], name: str) -> float:
    scores = [key for key in result if key.startswith(VALIDATION_PREFIX)]
    names = sorted(key.removeprefix(VALIDATION_PREFIX) for key in scores)
    if name not in names:  # nor in any other trial: a StudyError ends the search at the first
        raise StudyError(
            f"the validation rows have no score '{name}', only {', '.join(names) or 'none'}; set "
            "--score to one of them"
        )
    value = result[f"{VALIDATION_PREFIX}{name}"]
    if value is None:
        raise TrainingError(
            f"the validation rows' {name} is NaN, because a class or label is missing there"
        )
    return float(value)
