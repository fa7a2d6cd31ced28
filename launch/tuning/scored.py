"""What a fold of a comparison has found: a row for each method, and for scikit-learn's on it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from pydantic_core import to_json

from heron.launch.tuning.search import Asked, Say, search
from heron.pipeline.config.errors import StudyError
from heron.pipeline.config.experiment import CLASSIFIERS, Config
from heron.pipeline.data.protocol import Roles
from heron.pipeline.data.streams import open_streams
from heron.pipeline.data.views import Views
from heron.pipeline.evaluation.baselines import Inputs, Kind, candidate, fit, raw_inputs
from heron.pipeline.evaluation.evaluator import Evaluator, Predictions
from heron.pipeline.training.pretrained import from_pretrained
from heron.shards.artefact import Artefact, Fingerprint, parse_json

RAW = "raw features"
Part = tuple[Inputs, Inputs]  # inputs [rows, columns] and labels [rows, labels]


@dataclass(frozen=True)
class Row:
    """A way to predict, as it was chosen and tested in one fold.

    Attributes:
        name: of the row, such as `herocon`, or `logistic on herocon`.
        pretrained: whether a term other than the classifier's had a part in it.
        validation: the score that it was chosen by, of the validation rows.
        scores: of the test rows, which are read once, after the choice.
        chosen: what the chosen trial changes of the experiment, or its options.
        trials: of each trial its number, values and validation score.
    """

    name: str
    pretrained: bool
    validation: float
    scores: Mapping[str, float | None]
    chosen: dict[str, Any]
    trials: list[dict[str, Any]]


class Found(Artefact):
    """What a part of a comparison has found, as its file keeps it: the plan's fingerprint, rows."""

    what: ClassVar[str] = "the results of a part of a comparison"
    error: ClassVar[type[StudyError]] = StudyError
    again: ClassVar[str] = "bring the file back, or take it away and run again"
    versions: ClassVar[tuple[int, ...]] = (1,)

    format: Literal[1] = 1
    plan: Fingerprint
    rows: list[Row]

    @classmethod
    def of(cls, plan: str, rows: Sequence[Row]) -> Self:
        """Returns what is to be kept of some rows; a score that is not finite is null."""
        finite = parse_json(to_json(rows, inf_nan_mode="null"))
        return cls.model_validate({"plan": plan, "rows": finite})


def score_method(
    asked: Asked, experiment: Config, name: str, folder: Path, kinds: Sequence[Kind], say: Say
) -> list[Row]:
    """Searches a method in a fold, tests what it chose, and scikit-learn's on its features."""
    best, trials = search(asked, experiment, folder, say)
    evaluator, roles = open_trained(best.config)
    model = from_pretrained(best.config.run.dir)
    model.precision = best.config.train.precision
    _, scores = evaluator.evaluate(model, roles)
    pretrained = any(term not in CLASSIFIERS for term in experiment.objective.terms())
    reached = trials[best.number]["validation"]
    rows = [Row(name, pretrained, reached, scores, best.values, trials)]
    if kinds:
        parts = [_hidden(evaluator.predict(model, of, hidden=True)) for of in _asked(roles)]
        for kind in kinds:
            known = f"{kind} on {name}", pretrained
            rows.append(score_scikit(asked, evaluator, kind, parts, *known, say))
    return rows


def score_raw(asked: Asked, experiment: Config, kind: Kind, say: Say) -> list[Row]:
    """Searches one of scikit-learn's on the raw inputs of a fold, and tests what it chose."""
    evaluator, roles = open_trained(experiment)
    parts = [raw_inputs(evaluator, rows) for rows in _asked(roles)]
    return [score_scikit(asked, evaluator, kind, parts, f"{kind} on {RAW}", False, say)]


def score_scikit(
    asked: Asked,
    evaluator: Evaluator,
    kind: Kind,
    parts: Sequence[Part],
    name: str,
    pretrained: bool,
    say: Say,
) -> Row:
    """Searches one of scikit-learn's on some features, as often as a method, and tests the best.

    Args:
        asked: how often, and by which score.
        evaluator: scores.
        kind: which.
        parts: inputs and labels of the labelled, the validation and the test rows.
        name: of the row.
        pretrained: see `Row`.
        say: is told what was chosen.
    """
    (x, y), (others, held), (queries, truth) = parts
    best: tuple[float, int, float, Any] | None = None
    trials: list[dict[str, Any]] = []
    for trial in range(asked.trials):
        options = candidate(kind, asked.seed, trial)
        predict = fit(kind, options, x, y, evaluator.exclusive)
        predictions = _predictions(predict(others), held)
        threshold = evaluator.threshold(predictions)
        reached = evaluator.score(predictions, threshold)[asked.score]
        trials.append({"trial": trial, "values": options, "validation": reached, "error": None})
        if best is None or reached > best[0]:
            best = reached, trial, threshold, predict
    assert best is not None
    reached, number, threshold, predict = best
    scores = evaluator.score(_predictions(predict(queries), truth), threshold)
    say(f"{name}: trial {number}, {asked.score} {reached:.4f}")
    return Row(name, pretrained, reached, scores, trials[number]["values"], trials)


def open_trained(config: Config) -> tuple[Evaluator, Roles]:
    """Returns what scores a run's model, and the run's rows by role."""
    streams = open_streams(config)
    views = Views(streams.reader, config.data, torch.device("cpu"))
    return Evaluator(streams.reader, views, config.evaluate), streams.roles


def _asked(roles: Roles) -> tuple[Any, ...]:
    return roles.labelled, roles.validation, roles.test


def _hidden(predictions: Predictions) -> Part:
    assert predictions.hidden is not None
    return predictions.hidden, predictions.y


def _predictions(probability: Inputs, y: Inputs) -> Predictions:
    return Predictions(probability, None, y, np.arange(len(y)))
