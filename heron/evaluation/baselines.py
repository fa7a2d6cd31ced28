"""Baselines on the same labels: logistic regression, a random forest, and the plain network."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heron.config.experiment import CLASSIFIERS, Config, parse_config
from heron.data.rows import Roles
from heron.distributed.collectives import broadcast_object, rank
from heron.evaluation.evaluator import Evaluator, Predictions
from heron.evaluation.metrics import Scores
from heron.evaluation.scikit import KINDS, NAMES, Kind, tune

SUMMARISED = ("auc_macro", "f1_weighted", "accuracy", "knn_f1_weighted", "knn_accuracy")


def compare(
    config: Config,
    evaluator: Evaluator,
    roles: Roles,  # the labelled rows train, the test rows are scored
    scores: Scores,  # of the run itself
    train: Callable[[Config], Mapping[str, Any]],  # trains, and returns what result.json holds
    progress: Callable[[Scores, list[str]], None],  # told of scores, and of baselines to come
    say: Callable[[str], None],  # prints a line
) -> Scores:
    """Scores the baselines on a run's test rows; every process must call it.

    The plain network is the experiment with the classifier's term alone, trained by the same code
    in the run's subfolder `plain`; it exists if the experiment has that term and another. Scores
    are named `plain_...`, `logistic_...` and `forest_...`, the last two with the options that
    cross-validation chose.
    """
    if not len(roles.test) or not len(roles.labelled):
        return {}
    baselines: Scores = {}
    plain_config = plain(config)
    same = plain_config is not None and plain_config.objective == config.objective
    to_come = [] if plain_config is None or same else ["the plain network"]
    if config.evaluate.baselines != "plain":
        progress(baselines, [*NAMES.values(), *to_come])
        baselines = _scikit_scores(evaluator, roles, say)
    if plain_config is None:
        return baselines
    if to_come:
        progress(baselines, to_come)
    plain_scores = scores if same else train(plain_config)
    return baselines | {f"plain_{k}": plain_scores[k] for k in scores if k in plain_scores}


def plain(config: Config) -> Config | None:
    """Returns the experiment with the classifier's term alone; None if it has no such term.

    Settings that need projections are switched off, since it has none.
    """
    tree = config.model_dump(mode="json")
    terms = {k: v for k, v in tree["objective"].items() if k in CLASSIFIERS}
    if not terms:
        return None
    tree["objective"] = terms
    tree["run"]["dir"] = str(Path(config.run.dir) / "plain")
    tree["model"]["matryoshka"] = []
    tree["evaluate"] |= {"baselines": False, "seeds": 1, "cross_view": False}
    return parse_config(tree)


def other_seeds(config: Config) -> list[Config]:
    """Returns the experiment with each further seed of `evaluate.seeds`, in a folder of its own."""
    trees = []
    for seed in range(config.seed + 1, config.seed + config.evaluate.seeds):
        tree = config.model_dump(mode="json")
        tree["seed"], tree["run"]["dir"] = seed, str(Path(config.run.dir) / f"seed-{seed}")
        tree["evaluate"] |= {"seeds": 1, "map": "never"}
        if config.evaluate.baselines:
            tree["evaluate"]["baselines"] = "plain"
        trees.append(tree)
    return [parse_config(tree) for tree in trees]


def summary(
    results: Sequence[Mapping[str, Any]], name: str
) -> tuple[list[str], list[list[str]]] | None:
    """Returns head and rows of a table of the run `name` and its baselines; None without scores.

    For several results, one per seed, cells are means and standard deviations.
    """
    rows = {name: "", f"{name}, validation": "validation_", "the plain network": "plain_"}
    rows |= {NAMES[kind]: f"{kind}_" for kind in KINDS}
    values = {
        (title, score): [result[prefix + score] for result in results if prefix + score in result]
        for title, prefix in rows.items()
        for score in SUMMARISED
    }
    scores = [k for k in SUMMARISED if any(values[title, k] for title in rows)]
    lines = [
        [title, *(_mean_std(values[title, k]) for k in scores)]
        for title in rows
        if any(values[title, k] for k in scores)
    ]
    return (["", *scores], lines) if lines else None


def _mean_std(values: Sequence[float]) -> str:
    if not values:
        return ""
    spread = f" ± {np.std(values, ddof=1):.4f}" if len(values) > 1 else ""
    return f"{np.mean(values):.4f}{spread}"


def _scikit_scores(
    evaluator: Evaluator, roles: Roles, say: Callable[[str], None]
) -> dict[str, float]:
    """Scores scikit-learn's classifiers on the model's inputs; the main process fits them."""
    scores: dict[str, float] = {}
    if rank() == 0:
        with evaluator.watchdog.busy():
            asked = [roles.labelled, roles.test, *([roles.validation] if evaluator.fits else [])]
            labelled, test, *validation = map(evaluator.inputs, asked)
            if len(labelled.y) and len(test.y):
                for kind in KINDS:
                    found = _scores_of(kind, evaluator, say, labelled, test, *validation)
                    scores |= {f"{kind}_{name}": value for name, value in found.items()}
    broadcast: dict[str, float] = broadcast_object(scores)
    return broadcast


def _scores_of(
    kind: Kind,
    evaluator: Evaluator,
    say: Callable[[str], None],
    labelled: Predictions,
    test: Predictions,
    validation: Predictions | None = None,
) -> dict[str, float]:
    """Tunes a classifier on labelled inputs; returns its scores, and the chosen options."""
    say(f"baselines: tuning {NAMES[kind]} on the labelled rows")  # it may take a minute
    shapes = evaluator.views.shapes
    views = len(shapes) if len({tuple(shape) for shape in shapes}) == 1 else 1

    def inputs(predictions: Predictions) -> NDArray[np.float32]:
        assert predictions.hidden is not None
        return predictions.hidden.reshape(len(predictions.y), views, -1)

    def predicted(predictions: Predictions) -> Predictions:
        return replace(predictions, probability=tuned.predict(inputs(predictions)))

    tuned = tune(kind, inputs(labelled), labelled.y, evaluator.exclusive)
    if tuned.edge:
        say(f"baselines: {NAMES[kind]}: {tuned.edge}")
    threshold = evaluator.threshold(predicted(validation) if validation else None)
    return evaluator.score(predicted(test), threshold) | tuned.options
