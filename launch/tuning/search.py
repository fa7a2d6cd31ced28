"""A search of a method in one fold: what its trials vary, and which validation rows put first."""

import contextlib
import json
import math
import shutil
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from heron.launch.reproduce import is_done, refuse_clashes
from heron.launch.studies.study import DIGITS, Range, Values, draw
from heron.pipeline.config.errors import Held, StudyError, TrainingError
from heron.pipeline.config.experiment import CLASSIFIERS, Config, load_config, parse_config
from heron.pipeline.config.sections import Section, check, override, read_tree
from heron.pipeline.training.tracking import read_result

OWN = "own"  # the method that the experiment is as it stands
VALIDATION = 0.2  # share of the labelled rows, where the experiment keeps none
PREFIX = "validation_"
LOG = "log.txt"
LEAST_TAU = 0.003  # see `config.terms.Temperature`


class Space(Section):
    """Ranges that the trials of a search are drawn from, as a file of `configs/tuning/` has them.

    What has no range stays as the experiment has it.
    """

    rate: Range | None = None  # factors of `optim.lr`
    dropout: Range | None = None  # of every encoder that has one, in place of the experiment's
    weight: Range | None = None  # factors of the weight of each term that trains no classifier
    tau: Range | None = None  # factors of the temperature of each term that has one
    vary: dict[str, Values] = {}  # further keys, and the values or the range of each

    def draw(self, config: Config, seed: int, trial: int) -> dict[str, Any]:
        """Returns what a trial changes of an experiment, by dotted key; none of trial 0.

        A number is drawn with (seed, trial, key), so that methods that share an option are given
        the same.
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
                changes[key] = max(changes[key], LEAST_TAU)
        return changes

    def _ranges(self, config: Config) -> Iterator[tuple[str, float | None, Values]]:
        """Yields the keys that vary, the value that a factor is of, and the range."""
        tree = config.model_dump(mode="json")
        if self.rate:
            yield "optim.lr", config.optim.lr, self.rate
        encoders = dict(config.model.encoder_of(name) for name in config.data.view_names)
        for name, encoder in encoders.items():
            if self.dropout and hasattr(encoder, "dropout"):
                yield f"{name}.dropout", None, self.dropout
        for name, options in tree["objective"].items():
            if self.weight and name not in CLASSIFIERS and options.get("weight"):
                yield f"objective.{name}.weight", options["weight"], self.weight
            if self.tau and options.get("tau"):
                yield f"objective.{name}.tau", options["tau"], self.tau
        for key, values in self.vary.items():
            yield key, None, values


def load_space(path: Path) -> Space:
    """Reads a file of ranges; ConfigError where it is missing or does not fit."""
    return check(Space, read_tree(path, "ranges", "rate"), f"ranges {path}")


@dataclass(frozen=True)
class Asked:
    """What a search is asked to do, for all its folds and methods."""

    config: Path  # the experiment's file
    overrides: Sequence[str]
    space: Space
    trials: int  # of each method in each fold; the first is the experiment as it stands
    seed: int  # of the draws of values
    score: str  # that trials are compared by, on the validation rows; more is better
    out: Path  # folder of all that is made

    def experiment(self, method: str, fold: int | None) -> Config:
        """Returns a method's experiment in a fold, None being its own, before any search.

        In fold k the run's seed is k more than the experiment's.
        """
        named = None if method == OWN else method
        refuse_clashes(self.overrides, ["run.dir", "run.resume", "evaluate.test"])
        base = load_config(self.config, self.overrides, named)
        tree = base.model_dump(mode="json")
        if fold is not None:
            refuse_clashes(self.overrides, ["data.protocol.fold"])
            tree["data"]["protocol"]["fold"] = fold
            tree["seed"] = base.seed + fold
        tree["data"]["protocol"]["validation"] = base.data.protocol.validation or VALIDATION
        tree["evaluate"] |= {"test": False, "baselines": False, "map": "never"}
        tree |= {"run": {"dir": str(self.out), "resume": "auto"}, "tracking": []}
        return parse_config(tree)

    def trial(self, experiment: Config, number: int, folder: Path) -> "SearchTrial":
        """Returns a trial of a method's experiment."""
        values = self.space.draw(experiment, self.seed, number)
        tree = experiment.model_dump(mode="json")
        for key, value in values.items():
            override(tree, f"{key}={json.dumps(value)}")
        tree["run"]["dir"] = str(folder / f"{number:03}")
        return SearchTrial(number, values, parse_config(tree))


@dataclass(frozen=True)
class SearchTrial:
    """A run of a search: its number, what it changes of the experiment, and all it runs with."""

    number: int
    values: dict[str, Any]
    config: Config

    @property
    def shown(self) -> str:
        """Its values, as they are typed."""
        return ", ".join(f"{key}={value}" for key, value in self.values.items()) or "as it stands"


def search(
    asked: Asked, experiment: Config, folder: Path
) -> tuple[SearchTrial, list[dict[str, Any]]]:
    """Runs the trials of a method in a fold that are not there yet, in a folder.

    What they print goes to log.txt in it; the losers' checkpoints are deleted.

    Returns:
        The trial that is best by the validation rows, the first of equals; and of each trial its
        number, its values and its `validation` score, or None and the `error`.

    Raises:
        StudyError: the experiment has no such score.
        TrainingError: no trial has the score.
        Stopped: a signal came, and the state of the run under way is saved.
    """
    trials = [asked.trial(experiment, number, folder) for number in range(asked.trials)]
    rows: list[dict[str, Any]] = []
    for trial in trials:
        row: dict[str, Any] = {"trial": trial.number, "values": trial.values, "error": None}
        try:
            row["validation"] = _score(run(trial.config, folder / LOG), asked.score)
        except Held:
            raise
        except TrainingError as error:  # such as a loss that is not finite, at too high a rate
            row |= {"validation": None, "error": str(error)}
        reached = row["error"] or f"{asked.score} {row['validation']:.4f}"
        name = f"{folder.relative_to(asked.out)} {trial.number:03}"
        print(f"{name} ({trial.shown}): {reached}", flush=True)
        rows.append(row)
    reached = [-math.inf if row["validation"] is None else row["validation"] for row in rows]
    if max(reached) == -math.inf:
        raise TrainingError(f"{folder}: no trial has a score; the first: {rows[0]['error']}")
    best = reached.index(max(reached))
    for number, trial in enumerate(trials):
        if number != best:
            shutil.rmtree(Path(trial.config.run.dir) / "checkpoints", ignore_errors=True)
    return trials[best], rows


def run(config: Config, log: Path) -> dict[str, Any]:
    """Returns the result of a run, which is trained where it is not there yet."""
    from heron.pipeline.models.networks import described  # here and below: they take a while
    from heron.pipeline.pretrain import pretrain

    config = config.model_copy(update={"model": described(config.model)})  # as the run keeps it
    folder = Path(config.run.dir)
    if not is_done(config):
        folder.mkdir(parents=True, exist_ok=True)
        with (
            log.open("a", buffering=1) as stream,
            contextlib.redirect_stdout(stream),
            contextlib.redirect_stderr(stream),
        ):
            pretrain(config)
    return read_result(folder / "result.json")


def _score(result: dict[str, Any], name: str) -> float:
    known = sorted(key.removeprefix(PREFIX) for key in result if key.startswith(PREFIX))
    if name not in known:  # in no trial: a StudyError ends the search at the first
        raise StudyError(
            f"the validation rows have no score '{name}'; found {', '.join(known) or 'none'}; "
            "expected one of them: --score"
        )
    value = result[f"{PREFIX}{name}"]
    if value is None:
        raise TrainingError(f"the validation rows' {name} is no number: they lack a class or label")
    return float(value)
