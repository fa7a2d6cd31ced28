"""A search of a method in one fold: what its trials vary, and which one validation rows choose."""

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

from heron.config.errors import Held, StudyError, TrainingError
from heron.config.experiment import CLASSIFIERS, Config, load_config, parse_config
from heron.config.overrides import override
from heron.config.sections import Section, check, read_tree
from heron.studies.reproduction import is_done, refuse_clashes
from heron.studies.study import DIGITS, Range, Values, draw
from heron.training.tracking import read_result

OWN = "own"  # names the experiment as it stands, without a method applied
VALIDATION = 0.2  # share of the labelled rows, where the experiment sets none aside
VALIDATION_PREFIX = "validation_"
LOG = "log.txt"
MIN_TAU = 0.003  # as `config.terms.Temperature` allows


class Space(Section):
    """Ranges that the trials of a search draw from, as a file of `configs/tuning/` states them.

    A key without a range keeps the experiment's value.
    """

    rate: Range | None = None  # factors of `optim.lr`
    dropout: Range | None = None  # replaces the dropout of every encoder that has one
    weight: Range | None = None  # factors of the weight of each term that trains no classifier
    tau: Range | None = None  # factors of the temperature of each term that has one
    vary: dict[str, Values] = {}  # further keys, with the values or the range of each

    def draw(self, config: Config, seed: int, trial: int) -> dict[str, Any]:
        """Returns a trial's changes to the experiment, by dotted key; trial 0 changes nothing.

        Each value is drawn with (seed, trial, key), so that methods that share an option get the
        same value.
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

    def _ranges(self, config: Config) -> Iterator[tuple[str, float | None, Values]]:
        """Yields each key that varies, the base value of a factor (or None), and the range."""
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

    def experiment(self, method: str, fold: int | None) -> Config:
        """Returns a method's experiment, before any search; fold None is the experiment's own.

        In fold k the run's seed is the experiment's plus k.
        """
        method_name = None if method == OWN else method
        refuse_clashes(self.overrides, ["run.dir", "run.resume", "evaluate.test"])
        base = load_config(self.config, self.overrides, method_name)
        tree = base.model_dump(mode="json")
        if fold is not None:
            refuse_clashes(self.overrides, ["data.protocol.fold"])
            tree["data"]["protocol"]["fold"] = fold
            tree["seed"] = base.seed + fold
        tree["data"]["protocol"]["validation"] = base.data.protocol.validation or VALIDATION
        tree["evaluate"] |= {"test": False, "baselines": False, "map": "never"}
        if "threshold" not in base.evaluate.model_fields_set:
            tree["evaluate"]["threshold"] = "fitted"  # one number suits some methods and not others
        tree |= {"run": {"dir": str(self.out), "resume": "auto"}, "tracking": []}
        return parse_config(tree)

    def trial(self, experiment: Config, number: int, folder: Path) -> "SearchTrial":
        """Returns a trial of a method's experiment, whose run lies in `folder`."""
        values = self.space.draw(experiment, self.seed, number)
        tree = experiment.model_dump(mode="json")
        for key, value in values.items():
            override(tree, f"{key}={json.dumps(value)}")
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
) -> tuple[SearchTrial, list[dict[str, Any]]]:
    """Runs those trials of a method in a fold that have no result yet, in a folder.

    Their output goes to its log.txt; only the best trial keeps its checkpoints. Returns the best
    trial by the validation rows, the first of equals; and a row per trial with its number, its
    values and its `validation` score, or None and the `error`.

    Raises a StudyError if the experiment has no such score, a TrainingError if no trial has the
    score, and Stopped after a signal, with the state of the current run saved.
    """
    trials = [settings.trial(experiment, number, folder) for number in range(settings.trials)]
    rows: list[dict[str, Any]] = []
    for trial in trials:
        row: dict[str, Any] = {"trial": trial.number, "values": trial.values, "error": None}
        try:
            row["validation"] = _score(run(trial.config, folder / LOG), settings.score)
        except Held:
            raise
        except TrainingError as error:  # such as a loss that is not finite, at too high a rate
            row |= {"validation": None, "error": str(error)}
        outcome = row["error"] or f"{settings.score} {row['validation']:.4f}"
        name = f"{folder.relative_to(settings.out)} {trial.number:03}"
        print(f"{name} ({trial.description}): {outcome}", flush=True)
        rows.append(row)
    scores = [-math.inf if row["validation"] is None else row["validation"] for row in rows]
    if max(scores) == -math.inf:
        raise TrainingError(f"{folder}: no trial has a score; the first: {rows[0]['error']}")
    best = scores.index(max(scores))
    for number, trial in enumerate(trials):
        if number != best:
            shutil.rmtree(Path(trial.config.run.dir) / "checkpoints", ignore_errors=True)
    return trials[best], rows


def run(config: Config, log: Path) -> dict[str, Any]:
    """Returns the result of a run, training it first where it has none."""
    # Imported here, as they load slowly.
    from heron.api.job import pretrain
    from heron.models.networks import with_pretrained_configs

    model = with_pretrained_configs(config.model)  # as the run saves it
    config = config.model_copy(update={"model": model})
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
    scores = [key for key in result if key.startswith(VALIDATION_PREFIX)]
    names = sorted(key.removeprefix(VALIDATION_PREFIX) for key in scores)
    if name not in names:  # nor in any other trial: a StudyError ends the search at the first
        raise StudyError(
            f"the validation rows have no score '{name}'; found {', '.join(names) or 'none'}; "
            "expected one of them: --score"
        )
    value = result[f"{VALIDATION_PREFIX}{name}"]
    if value is None:
        raise TrainingError(f"the validation rows' {name} is no number: they lack a class or label")
    return float(value)
