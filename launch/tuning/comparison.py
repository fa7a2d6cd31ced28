"""A comparison of methods over folds: what each fold has found, and a table with intervals."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pandas as pd
import torch
from pydantic_core import to_json

from heron.launch.repeats import Interval, corrected_interval, describe, mean_std
from heron.launch.studies.text import markdown, write_files
from heron.launch.tuning.search import Asked, search
from heron.pipeline.config.data import without_places
from heron.pipeline.config.errors import StudyError
from heron.pipeline.config.experiment import CLASSIFIERS, Config
from heron.pipeline.data.plan import Rows
from heron.pipeline.data.protocol import Roles
from heron.pipeline.data.reader import Reader
from heron.pipeline.data.streams import open_streams
from heron.pipeline.data.views import Views
from heron.pipeline.evaluation.evaluator import Evaluator, Predictions
from heron.pipeline.evaluation.scikit import Kind, Matrix, candidate, fit, raw_inputs
from heron.pipeline.training.pretrained import from_pretrained
from heron.shards.artefact import Artefact, Fingerprint, fingerprint, parse_json

RESULTS = "results"  # folder of what the parts of a comparison have found
RAW = "raw features"
Part = tuple[Any, Matrix]  # inputs [rows, columns] and labels [rows, labels]
SHOWN = {  # by whether classes exclude each other; the score that was asked for stands first
    True: ("accuracy", "f1_macro", "auc_macro"),
    False: ("auc_macro", "map", "f1_weighted"),
}


@dataclass(frozen=True)
class FoldResult:
    """A way to predict, as it was chosen and tested in one fold."""

    name: str  # such as `herocon`, or `logistic on herocon`
    pretrained: bool  # whether a term other than the classifier's had a part in it
    validation: float  # the score that it was chosen by, of the validation rows
    scores: Mapping[str, float | None]  # of the test rows, which are read once, after the choice
    chosen: dict[str, Any]  # what the chosen trial changes of the experiment, or its options
    trials: list[dict[str, Any]]  # of each its number, values and validation score


class Found(Artefact):
    """What a part of a comparison has found, as its file keeps it; a score not finite is null."""

    what: ClassVar[str] = "the results of a part of a comparison"
    error: ClassVar[type[StudyError]] = StudyError
    again: ClassVar[str] = "bring the file back, or take it away and run again"
    versions: ClassVar[tuple[int, ...]] = (1,)

    format: Literal[1] = 1
    plan: Fingerprint
    rows: list[FoldResult]


def kept(
    asked: Asked,
    reader: Reader,
    experiment: Config,
    name: str,
    kinds: Sequence[Kind],
    work: Callable[[], list[FoldResult]],
) -> list[FoldResult]:
    """Returns what a part of a comparison has found, from its file, or else by doing the work.

    Raises a StudyError where the file is damaged, or of another search.
    """
    path = asked.out / RESULTS / f"{name}.json"
    tree: dict[str, Any] = {
        "experiment": experiment.model_dump(mode="json", exclude={"run"}),
        "data": reader.manifest.fingerprint,
        "space": asked.space.model_dump(mode="json"),
        "search": [asked.trials, asked.seed, asked.score, *kinds],
    }
    tree["experiment"]["data"] = without_places(tree["experiment"]["data"])
    plan = fingerprint(tree)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        finite = parse_json(to_json(work(), inf_nan_mode="null"))
        Found.model_validate({"plan": plan, "rows": finite}).write(path)
    found = Found.read(path)
    if found.plan != plan:
        raise StudyError(
            f"{path} is of another experiment, data set or search; expected the same; choose "
            "another --out, or take the folder away"
        )
    return found.rows


def score_method(
    asked: Asked, experiment: Config, name: str, folder: Path, kinds: Sequence[Kind]
) -> list[FoldResult]:
    """Searches a method in a fold, tests what it chose, and scikit-learn's on its features."""
    best, trials = search(asked, experiment, folder)
    evaluator, roles = _open(best.config)
    model = from_pretrained(best.config.run.dir)
    model.precision = best.config.train.precision
    _, scores = evaluator.evaluate(model, roles)
    pretrained = any(term not in CLASSIFIERS for term in experiment.objective.terms())
    reached = trials[best.number]["validation"]
    rows = [FoldResult(name, pretrained, reached, scores, best.values, trials)]
    if kinds:
        found = [evaluator.predict(model, of, hidden=True) for of in _parts(roles)]
        parts = [(one.hidden, one.y) for one in found]
        for kind in kinds:
            rows.append(_scikit(asked, evaluator, kind, parts, f"{kind} on {name}", pretrained))
    return rows


def score_raw(asked: Asked, experiment: Config, kind: Kind) -> list[FoldResult]:
    """Searches one of scikit-learn's on the raw inputs of a fold, and tests what it chose."""
    evaluator, roles = _open(experiment)
    parts = [raw_inputs(evaluator, rows) for rows in _parts(roles)]
    return [_scikit(asked, evaluator, kind, parts, f"{kind} on {RAW}", False)]


def _scikit(
    asked: Asked,
    evaluator: Evaluator,
    kind: Kind,
    parts: Sequence[Part],
    name: str,
    pretrained: bool,
) -> FoldResult:
    """Searches one of scikit-learn's on some features, as often as a method, and tests the best.

    `parts` are inputs and labels of the labelled, the validation and the test rows.
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
    print(f"{name}: trial {number}, {asked.score} {reached:.4f}", flush=True)
    return FoldResult(name, pretrained, reached, scores, trials[number]["values"], trials)


def _open(config: Config) -> tuple[Evaluator, Roles]:
    """Returns what scores a run's model, and the run's rows by role."""
    streams = open_streams(config)
    views = Views(streams.reader, config.data, torch.device("cpu"))
    return Evaluator(streams.reader, views, config.evaluate), streams.roles


def _parts(roles: Roles) -> tuple[Any, ...]:
    return roles.labelled, roles.validation, roles.test


def _predictions(probability: Matrix, y: Matrix) -> Predictions:
    return Predictions(probability, None, y, np.arange(len(y)))


def shared_rows(labelled: Sequence[Rows], test: Sequence[Rows]) -> float:
    """Returns how much two folds have in common, from 0 to 1, as the correlation of their scores.

    It is the lesser of two shares, averaged over pairs of folds: of the training rows, and of the
    test rows. Where nine tenths are drawn for training it is about Nadeau and Bengio's share of the
    test rows; where a few labelled rows are drawn, and the others tested, the share of these few;
    and 0 for the disjoint labelled folds of `data.protocol.folds`.
    """
    pairs = list(combinations(range(len(labelled)), 2))
    if not pairs:
        return 0.0
    shares = [
        [len(np.intersect1d(rows[i], rows[j])) / max(1, len(rows[i])) for i, j in pairs]
        for rows in (labelled, test)
    ]
    return float(min(map(np.mean, shares)))


@dataclass(frozen=True)
class Comparison:
    """Rows of the table, each with what every fold found."""

    title: str  # of the data set and how much was searched
    score: str  # that choices were made by, and differences are of
    exclusive: bool  # whether classes exclude each other
    folds: Sequence[int]  # numbers of the folds that all rows have
    rows: Mapping[str, Sequence[FoldResult]]  # of each fold in order, by the name of the row
    shared: float  # see `shared_rows`

    @property
    def plain(self) -> str | None:
        """The plain network: the first method without a term beside the classifier's."""
        return next(
            (n for n, r in self.rows.items() if not r[0].pretrained and " on " not in n), None
        )

    @property
    def against(self) -> str:
        """The row that the others are set against: the plain network, or else the first."""
        return self.plain or next(iter(self.rows))

    def of(self, name: str, score: str) -> pd.Series:
        """Returns a row's test score in each fold."""
        return pd.Series([row.scores.get(score) for row in self.rows[name]], dtype=float)

    def _cell(self, name: str, score: str) -> str:
        """Returns mean and deviation as text, and of how many folds where some lack the score."""
        mean, std, count = describe(self.of(name, score))
        some = f" (n = {count:g})" if 0 < count < len(self.folds) else ""
        return mean_std(mean, std) + some

    def less(self, name: str, other: str) -> Interval:
        """Returns a row less another, over the folds where both have the score."""
        return corrected_interval(
            self.of(name, self.score) - self.of(other, self.score), self.shared
        )

    def first(self, pretrained: bool) -> str | None:
        """Returns the row, with or without pretraining, that the validation rows put first."""
        names = [name for name, rows in self.rows.items() if rows[0].pretrained == pretrained]
        means = {n: np.mean([row.validation for row in self.rows[n]]) for n in names}
        return max(names, key=lambda name: means[name], default=None)

    def verdicts(self) -> list[str]:
        """Returns sentences that answer: does pretraining help on these data?

        It helps where it is above the row without pretraining that the validation rows put first,
        and above the one that tests best too: few validation rows may have chosen badly.
        """
        ours, theirs = self.first(True), self.first(False)
        lines = []
        if ours and theirs:
            found = self.less(ours, theirs)
            told = (
                f"{ours} less {theirs}, each the first of its kind by the validation rows, is "
                f"{found.shown} of {self.score}"
            )
            hardest = max(
                (name for name, rows in self.rows.items() if not rows[0].pretrained),
                key=lambda name: self.of(name, self.score).mean(),
            )
            if found.sign > 0 and (harder := self.less(ours, hardest)).sign <= 0:
                found, theirs = harder, hardest
                told += f", but less {hardest}, which tests best of those without, {harder.shown}"
            begin = {
                1: "Pretraining helps on these data",
                0: "Pretraining makes no difference that these folds show",
                -1: "Pretraining does not help on these data",
            }[found.sign]
            lines.append(f"{begin}: {told}; take {ours if found.sign > 0 else theirs}.")
        if self.plain and self.plain != theirs:
            for name, rows in self.rows.items():
                if rows[0].pretrained and " on " not in name:
                    found = self.less(name, self.plain)
                    word = {1: "above", 0: "not told from", -1: "below"}[found.sign]
                    lines.append(f"{name} is {word} the plain network: {found.shown}.")
        return lines

    def markdown(self) -> str:
        """Returns the table and the sentences."""
        against, shown = self.against, dict.fromkeys([self.score, *SHOWN[self.exclusive]])
        heads = ["", *shown, "validation", f"{self.score} less {against}"]
        lines = []
        for name, rows in self.rows.items():
            scores = [self._cell(name, score) for score in shown]
            validation = f"{np.mean([row.validation for row in rows]):.4f}"
            less = "–" if name == against else self.less(name, against).shown
            lines.append([name, *scores, validation, less])
        first, *_, last = [*self.folds, self.folds[-1]]
        folds = f"fold {first}" if first == last else f"folds {first} to {last}"
        how = (
            f"Mean ± standard deviation of the test rows over {folds}; choices by "
            f"{self.score} of the validation rows. In brackets the 95 % interval of the mean "
            "paired difference (Nadeau and Bengio's corrected t; the folds share "
            f"{self.shared:.2f} of their rows)."
        )
        verdicts = "\n".join(self.verdicts())
        return f"{self.title}\n\n{markdown(heads, lines)}\n{how}\n\n{verdicts}\n"

    def write(self, out: Path) -> str:
        """Writes compare.md and compare.json, and returns the text."""
        text, against = self.markdown(), self.against
        tree = {
            "title": self.title,
            "score": self.score,
            "folds": self.folds,
            "shared": self.shared,
            "verdicts": self.verdicts(),
            "rows": {
                name: {"folds": rows, "less": self.less(name, against) if name != against else None}
                for name, rows in self.rows.items()
            },
        }
        data = to_json(tree, indent=1, inf_nan_mode="null") + b"\n"
        write_files(out, {"compare.md": text.encode(), "compare.json": data})
        return text
