"""Trials of a method in one fold: trained one after the other, compared by validation rows."""

import contextlib
import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heron.launch.reproduce import is_done, refuse_clashes
from heron.launch.tuning.space import Space
from heron.pipeline.config.errors import Held, TrainingError
from heron.pipeline.config.experiment import Config, load_config, parse_config
from heron.pipeline.config.sections import override
from heron.pipeline.training.tracking import read_result

OWN = "own"  # the method that the experiment is as it stands
VALIDATION = 0.2  # share of the labelled rows, where the experiment keeps none
PREFIX = "validation_"
LOG = "log.txt"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Asked:
    """What a search is asked to do, for all its folds and methods.

    Attributes:
        config: the experiment's file.
        overrides: of it.
        space: what varies.
        trials: of each method in each fold; the first is the experiment as it stands.
        seed: of the draws of values.
        score: that trials are compared by, on the validation rows; more is better.
        out: folder of all that is made.
    """

    config: Path
    overrides: Sequence[str]
    space: Space
    trials: int
    seed: int
    score: str
    out: Path

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
        tree["run"] = {"dir": str(self.out), "resume": "auto"}
        tree |= {"tracking": []}
        return parse_config(tree)

    def trial(self, experiment: Config, number: int, folder: Path) -> "Trial":
        """Returns a trial of a method's experiment."""
        values = self.space.draw(experiment, self.seed, number)
        tree = experiment.model_dump(mode="json")
        for key, value in values.items():
            override(tree, f"{key}={json.dumps(value)}")
        tree["run"]["dir"] = str(folder / f"{number:03}")
        return Trial(number, values, parse_config(tree))


@dataclass(frozen=True)
class Trial:
    """A run of a search: its number, what it changes of the experiment, and all it runs with."""

    number: int
    values: dict[str, Any]
    config: Config

    @property
    def shown(self) -> str:
        """Its values, as they are typed."""
        return ", ".join(f"{key}={value}" for key, value in self.values.items()) or "as it stands"


def search(
    asked: Asked, experiment: Config, folder: Path, say: Say
) -> tuple[Trial, list[dict[str, Any]]]:
    """Runs the trials of a method that are not there yet; the losers' checkpoints are deleted.

    Args:
        asked: what to search.
        experiment: of the method, in a fold.
        folder: of its runs; what they print goes to log.txt in it.
        say: is told of each trial.

    Returns:
        The trial that is best by the validation rows, the first of equals; and of each trial its
        number, its values and its `validation` score, or None and the `error`.

    Raises:
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
        say(f"{folder.relative_to(asked.out)} {trial.number:03} ({trial.shown}): {reached}")
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
    if name not in known:
        raise TrainingError(
            f"the validation rows have no score '{name}'; found {', '.join(known) or 'none'}; "
            "expected one of them: --score"
        )
    value = result[f"{PREFIX}{name}"]
    if value is None:
        raise TrainingError(f"the validation rows' {name} is no number: they lack a class or label")
    return float(value)
