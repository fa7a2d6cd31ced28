"""A comparison of methods over folds: the results of each fold, and a table with intervals."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pandas as pd
import torch
from pydantic_core import to_json

from heron.base.artefact import Artefact, Fingerprint, fingerprint, parse_json
from heron.base.errors import StudyError
from heron.data.label_files import chosen_files
from heron.data.options import without_locations
from heron.data.reader import Reader
from heron.data.rows import Roles, Rows
from heron.data.views import Views
from heron.evaluation.evaluator import Evaluator, Predictions
from heron.evaluation.scikit import Kind as Kind
from heron.evaluation.scikit import Matrix, raw_inputs, tune
from heron.experiment.config import CLASSIFIERS, Config
from heron.experiment.open_data import open_data
from heron.studies.engine import Batch, Job
from heron.studies.repeats import Interval, corrected_interval, mean_std, mean_std_count
from heron.studies.search import SearchSettings, SearchTrial, search
from heron.studies.text import markdown, write_files
from heron.training.pretrained import from_pretrained

RESULTS = "results"  # folder with the results of each method and fold
RAW = "raw features"
LabelledInputs = tuple[Any, Matrix]  # inputs [rows, columns] and labels [rows, labels]
SCORES_SHOWN = {  # by whether classes exclude each other; the requested score comes first
    True: ("accuracy", "f1_macro", "auc_macro"),
    False: ("auc_macro", "map", "f1_weighted"),
}


@dataclass(frozen=True)
class FoldResult:
    """A predictor as it was chosen and tested in one fold."""

    name: str  # such as `herocon`, or `logistic on herocon`
    pretrained: bool  # whether the objective has a term besides the classifier's
    validation: float  # score on the validation rows, by which it was chosen
    scores: Mapping[str, float | None]  # on the test rows, which are read once, after the choice
    chosen: dict[str, Any]  # the chosen trial's changes to the experiment, or its options
    trials: list[dict[str, Any]]  # number, values and validation score of each


Scored = tuple[FoldResult, str]  # and what is printed of it


class SavedResults(Artefact):
    """The file of one method's results in one fold; a score that is not finite is null."""

    description: ClassVar[str] = "the results of a part of a comparison"
    error: ClassVar[type[StudyError]] = StudyError
    remedy: ClassVar[str] = "restore the file, or remove it and run again"
    versions: ClassVar[tuple[int, ...]] = (1,)

    format: Literal[1] = 1
    plan: Fingerprint
    rows: list[FoldResult]


def load_or_compute(
    settings: SearchSettings,
    reader: Reader,
    experiment: Config,
    name: str,
    kinds: Sequence[Kind],
    compute: Callable[[], Job[list[FoldResult]]],
) -> Job[list[FoldResult]]:
    """Returns the results of the job `compute`, from the file `name`.json where there is one.

    Raises a StudyError if the file is damaged or belongs to another search.
    """
    path = settings.out / RESULTS / f"{name}.json"
    sampler = [] if settings.sampler == "random" else [settings.sampler]
    tree: dict[str, Any] = {
        "experiment": experiment.model_dump(mode="json", exclude={"run"}),
        "data": reader.manifest.fingerprint,
        "space": settings.space.tree(experiment),
        "search": [settings.trials, settings.seed, settings.score, *sampler, *kinds],
        "scikit-learn": "by folds",  # formerly by the validation rows' score, or log-loss
    }
    tree["experiment"]["data"] = without_locations(tree["experiment"]["data"])
    if chosen := chosen_files(experiment.data.protocol):
        tree |= chosen
    plan = fingerprint(tree)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = yield from compute()
        finite = parse_json(to_json(rows, inf_nan_mode="null"))
        SavedResults.model_validate({"plan": plan, "rows": finite}).write(path)
    saved = SavedResults.read(path)
    if saved.plan != plan:
        raise StudyError(
            f"{path} has results of another experiment, data set or search; choose another --out, "
            "or add --overwrite, which moves the whole folder aside"
        )
    return saved.rows


def score_method(
    settings: SearchSettings, experiment: Config, name: str, folder: Path, kinds: Sequence[Kind]
) -> Job[list[FoldResult]]:
    """Searches a method in a fold, and tests its best trial and scikit-learn's on its features."""
    best, trials = yield from search(settings, experiment, folder)
    pretrained = any(term not in CLASSIFIERS for term in experiment.objective.terms())
    test = partial(_test, settings.score, best, trials, name, pretrained, kinds)
    (results,) = yield Batch({f"the test of {folder}": test}, _tell)
    return [result for result, _ in results]


def score_raw(
    settings: SearchSettings, experiment: Config, kind: Kind, name: str
) -> Job[list[FoldResult]]:
    """Tunes a scikit-learn classifier on the raw inputs of a fold, and tests the best."""
    (results,) = yield Batch({name: partial(measure_raw, settings.score, experiment, kind)}, _tell)
    return [result for result, _ in results]


def _test(
    score: str,
    best: SearchTrial,
    trials: list[dict[str, Any]],
    name: str,
    pretrained: bool,
    kinds: Sequence[Kind],
) -> list[Scored]:
    """Tests the best trial of a search, and classifiers of scikit-learn on its features."""
    evaluator, roles = _open(best.config)
    model = from_pretrained(best.config.run.dir, trust_code=True)
    model.precision = best.config.train.precision
    _, scores = evaluator.evaluate(model, roles)
    validation = trials[best.number]["validation"]
    results = [(FoldResult(name, pretrained, validation, scores, best.values, trials), "")]
    if kinds:
        predictions = [evaluator.predict(model, rows, hidden=True) for rows in _row_sets(roles)]
        splits = [(p.hidden, p.y) for p in predictions]
        for kind in kinds:
            row_name = f"{kind} on {name}"
            results.append(_tune_scikit(evaluator, score, kind, splits, row_name, pretrained, True))
    return results


def measure_raw(score: str, experiment: Config, kind: Kind) -> list[Scored]:
    """Returns the result of a scikit-learn classifier on the raw inputs of a fold."""
    evaluator, roles = _open(experiment)
    splits = [(p.hidden, p.y) for p in (raw_inputs(evaluator, r) for r in _row_sets(roles))]
    name = f"{kind} on {RAW}"
    return [_tune_scikit(evaluator, score, kind, splits, name, False, False)]


def _tell(name: str, results: Sequence[Scored]) -> None:
    for _, line in results:
        if line:
            print(line, flush=True)


def _tune_scikit(
    evaluator: Evaluator,
    score: str,
    kind: Kind,
    splits: Sequence[LabelledInputs],
    name: str,
    pretrained: bool,
    trained_on: bool,
) -> Scored:
    """Tunes a scikit-learn classifier on held-out rows, and tests the best: see `scikit.tune`.

    `splits` are inputs and labels of the labelled, the validation and the test rows. `trained_on`:
    the inputs are features of a network that has seen the labels of the labelled rows, so that the
    validation rows choose the options, and not folds.
    """
    (x, y), (x_validation, y_validation), (x_test, y_test) = (
        (x.reshape(len(x), 1, -1), y) for x, y in splits
    )
    held = (x_validation, y_validation) if trained_on else None
    tuned = tune(kind, x, y, evaluator.exclusive, held)
    predictions = _predictions(tuned.predict(x_validation), y_validation)
    threshold = evaluator.threshold(predictions)
    validation = evaluator.score(predictions, threshold)[score]
    scores = evaluator.score(_predictions(tuned.predict(x_test), y_test), threshold)
    edge = f"; {tuned.edge}" if tuned.edge else ""
    line = f"{name}: loss {tuned.loss:.4f}, {score} {validation:.4f}{edge}"
    trials: list[dict[str, Any]] = [
        {"trial": n, "values": options, "loss": loss, "error": None}
        for n, (options, loss) in enumerate(tuned.tried)
    ]
    return FoldResult(name, pretrained, validation, scores, tuned.options, trials), line


def _open(config: Config) -> tuple[Evaluator, Roles]:
    streams = open_data(config)
    views = Views(streams.reader, config.data, torch.device("cpu"))
    return Evaluator(streams.reader, views, config.evaluate), streams.roles


def _row_sets(roles: Roles) -> tuple[Any, ...]:
    return roles.labelled, roles.validation, roles.test


def _predictions(probability: Matrix, y: Matrix) -> Predictions:
    return Predictions(probability, None, y, np.arange(len(y)))


def shared_rows(labelled: Sequence[Rows], test: Sequence[Rows]) -> float:
    """Returns the share of rows that two folds share, an estimate of their scores' correlation.

    It is the smaller of two shares, each averaged over pairs of folds: of the training rows, and of
    the test rows. Where nine tenths are drawn for training it is about Nadeau and Bengio's share of
    the test rows; where a few labelled rows are drawn and the others tested, it is the share of
    these few; for the disjoint labelled folds of `data.protocol.folds` it is 0.
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
    """The rows of the table, each with the results of every fold."""

    title: str  # the data set, its rows, and the number of trials
    score: str  # ranks trials by validation, and rows by their differences in test
    exclusive: bool  # whether classes exclude each other
    folds: Sequence[int]  # numbers of the folds that all rows have
    rows: Mapping[str, Sequence[FoldResult]]  # results in the order of folds, by row name
    shared: float  # as `shared_rows` returns it

    @property
    def plain_network(self) -> str | None:
        """The first method whose objective has no term but the classifier's."""
        return next(
            (n for n, r in self.rows.items() if not r[0].pretrained and " on " not in n), None
        )

    @property
    def reference(self) -> str:
        """The row that the others are compared with: the plain network, or else the first."""
        return self.plain_network or next(iter(self.rows))

    def test_scores(self, name: str, score: str) -> pd.Series:
        """Returns a row's test score in each fold."""
        return pd.Series([row.scores.get(score) for row in self.rows[name]], dtype=float)

    def _cell(self, name: str, score: str) -> str:
        """Returns mean and deviation as text, and the number of folds where some lack the score."""
        mean, std, count = mean_std_count(self.test_scores(name, score))
        partial = f" (n = {count:g})" if 0 < count < len(self.folds) else ""
        return mean_std(mean, std) + partial

    def difference(self, name: str, other: str) -> Interval:
        """Returns `name` minus `other`, over the folds where both have the score."""
        differences = self.test_scores(name, self.score) - self.test_scores(other, self.score)
        return corrected_interval(differences, self.shared)

    def best_by_validation(self, pretrained: bool) -> str | None:
        """Returns the best row with, or without, pretraining by the mean validation score."""
        names = [name for name, rows in self.rows.items() if rows[0].pretrained == pretrained]
        means = {n: np.mean([row.validation for row in self.rows[n]]) for n in names}
        return max(names, key=lambda name: means[name], default=None)

    def verdict(self) -> tuple[list[str], str]:
        """Returns sentences that say whether pretraining helps on these data, and the row to take.

        It helps where the best row with pretraining by validation is above the best without, and
        above the one without that tests best too: few validation rows may choose badly.
        """
        pretrained, plain = self.best_by_validation(True), self.best_by_validation(False)
        lines, winner = [], pretrained or plain or self.reference
        hardest = max(  # to beat
            (name for name, rows in self.rows.items() if not rows[0].pretrained),
            key=lambda name: self.test_scores(name, self.score).mean(),
            default=self.reference,
        )
        if pretrained and plain:
            interval = self.difference(pretrained, plain)
            evidence = (
                f"{pretrained} less {plain}, each the first of its kind by the validation rows, is "
                f"{interval.description} of {self.score}"
            )
            if interval.sign > 0 and (harder := self.difference(pretrained, hardest)).sign <= 0:
                interval, plain = harder, hardest
                evidence += (
                    f", but less {hardest}, which tests best of those without, {harder.description}"
                )
            verdict = {
                1: "Pretraining helps on these data",
                0: "Pretraining makes no difference that these folds show",
                -1: "Pretraining does not help on these data",
            }[interval.sign]
            winner = pretrained if interval.sign > 0 else plain
            if interval.sign <= 0 and (ahead := self.difference(hardest, plain)).sign > 0:
                # Few validation rows flatter what has the best of many trials on them.
                evidence += f"; {hardest} tests above {plain}: {ahead.description}"
                winner = hardest
            lines.append(f"{verdict}: {evidence}; take {winner}.")
        elif plain:
            if hardest != self.reference:
                ahead = self.difference(hardest, self.reference)
                evidence = (
                    f"{hardest} tests best: {ahead.description} of {self.score} less "
                    f"{self.reference}"
                )
                if ahead.sign > 0:
                    winner = hardest
                elif winner != hardest:
                    evidence += (
                        ", which may be chance, so the test rows decide nothing; the validation "
                        f"rows rank {winner} first"
                    )
                lines.append(f"{evidence}; take {winner}.")
            else:
                winner = hardest
                lines.append(f"{hardest} tests best of {self.score}; take {hardest}.")
        if pretrained and self.plain_network and self.plain_network != plain:
            for name, rows in self.rows.items():
                if rows[0].pretrained and " on " not in name:
                    interval = self.difference(name, self.plain_network)
                    word = {1: "above", 0: "not distinguishable from", -1: "below"}[interval.sign]
                    lines.append(f"{name} is {word} the plain network: {interval.description}.")
        return lines, winner

    def markdown(self) -> str:
        """Returns the table and the verdicts."""
        reference = self.reference
        score_names = dict.fromkeys([self.score, *SCORES_SHOWN[self.exclusive]])
        heads = ["", *score_names, "validation", f"{self.score} less {reference}"]
        lines = []
        for name, rows in self.rows.items():
            scores = [self._cell(name, score) for score in score_names]
            validation = f"{np.mean([row.validation for row in rows]):.4f}"
            is_reference = name == reference
            difference = "–" if is_reference else self.difference(name, reference).description
            lines.append([name, *scores, validation, difference])
        first, *_, last = [*self.folds, self.folds[-1]]
        folds = f"fold {first}" if first == last else f"folds {first} to {last}"
        caption = (
            f"Mean ± standard deviation of the test rows over {folds}; choices by "
            f"{self.score} of the validation rows, of scikit-learn's options by folds. In "
            "brackets the 95 % interval of the mean paired difference (Nadeau and Bengio's "
            f"corrected t; the folds share {self.shared:.2f} of their rows)."
        )
        verdicts = "\n".join(self.verdict()[0])
        return f"{self.title}\n\n{markdown(heads, lines)}\n{caption}\n\n{verdicts}\n"

    def write(self, out: Path) -> str:
        """Writes compare.md and compare.json, and returns the text."""
        text, reference, (verdicts, taken) = self.markdown(), self.reference, self.verdict()
        tree = {
            "title": self.title,
            "score": self.score,
            "folds": self.folds,
            "shared": self.shared,
            "verdicts": verdicts,
            "take": taken,
            "rows": {
                name: {
                    "folds": rows,
                    "less": None if name == reference else self.difference(name, reference),
                }
                for name, rows in self.rows.items()
            },
        }
        data = to_json(tree, indent=1, inf_nan_mode="null") + b"\n"
        write_files(out, {"compare.md": text.encode(), "compare.json": data})
        return text
