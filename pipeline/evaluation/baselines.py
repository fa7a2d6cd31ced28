"""Baselines on the same labels: logistic regression, and the plain network."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heron.pipeline.config.experiment import CLASSIFIERS, Config, parse_config
from heron.pipeline.data.protocol import Roles
from heron.pipeline.distributed.collectives import broadcast_object, rank
from heron.pipeline.evaluation.evaluator import Evaluator
from heron.pipeline.evaluation.metrics import Scores, multi_label_scores
from heron.pipeline.evaluation.probe import fit_logistic
from heron.shards.terminal import print_lines

FOLDS = 5
COMPONENTS = (50, 150, 1000)  # the last means all, for a few hundred labelled rows
STRENGTHS = (1e-3, 1e-2, 1e-1, 1.0)  # C, the inverse of the L2 penalty's weight
SUMMARISED = ("auc_macro", "f1_weighted", "accuracy", "knn_f1_weighted", "knn_accuracy")
ITERATIONS = 300

Matrix = NDArray[np.float64]
Choice = tuple[bool, int, float]  # whether views share weights, components, C


def compare(
    config: Config,
    evaluator: Evaluator,
    roles: Roles,  # the labelled rows train, the test rows are scored
    scores: Scores,  # of the run itself
    train: Callable[[Config], Mapping[str, Any]],  # trains, and returns what result.json holds
) -> Scores:
    """Scores the baselines on a run's test rows; every process must call it.

    The plain network is the experiment with the classifier's term alone, trained by the same code
    in the run's subfolder `plain`; it exists if the experiment has that term and another. Scores
    are named `plain_...` and `logistic_...`, the latter with the options that cross-validation
    chose.
    """
    if not len(roles.test) or not len(roles.labelled):
        return {}
    baselines = {}
    if config.evaluate.baselines != "plain":
        if rank() == 0:  # it may take minutes
            print_lines("baselines: logistic regression, tuned on the labelled rows")
        baselines = {f"logistic_{k}": v for k, v in _logistic_scores(evaluator, roles).items()}
    plain_config = plain(config)
    if plain_config is None:
        return baselines
    same = plain_config.objective == config.objective
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
    rows["logistic regression"] = "logistic_"
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


def logistic_regression(
    x: NDArray[Any],  # training rows, [rows, views, width]; views of unlike widths as one view
    y: NDArray[np.float32],  # 0/1, [rows, labels]; a label that all rows share is predicted as is
    queries: NDArray[Any],  # rows to predict, [queries, views, width]
    exclusive: bool,  # a row has exactly one label: train one multinomial classifier
) -> tuple[NDArray[np.float32], dict[str, float]]:
    """Trains logistic regression on the principal components of standardised inputs.

    Either a row is its views side by side, or each view is a row of its own, sharing weights as
    views may share an encoder, and the probabilities of a row's views are averaged. This choice,
    the number of components and C are chosen by the mean AUC over labels in 5-fold cross-validation
    of the training rows. Returns probabilities [queries, labels], and the chosen `components`, `c`
    and `shared` (0 or 1).
    """
    from sklearn.model_selection import KFold  # imported late: it takes half as long as torch

    layouts = (False,) if x.shape[1] == 1 else (False, True)
    choices = list(product(layouts, COMPONENTS, STRENGTHS))
    held_out = {choice: np.zeros_like(y) for choice in choices}
    if len(x) > 1:
        for train, held_rows in KFold(min(FOLDS, len(x)), shuffle=True, random_state=0).split(x):
            predictions = _predict(x[train], y[train], x[held_rows], exclusive, choices)
            for choice, probability in zip(choices, predictions, strict=True):
                held_out[choice][held_rows] = probability
    means = {
        choice: multi_label_scores(out, y, 0.5)["auc_macro"] for choice, out in held_out.items()
    }
    best = max(choices, key=lambda choice: means[choice])
    (probability,) = _predict(x, y, queries, exclusive, [best])
    shared, k, c = best
    rows = len(x) * (x.shape[1] if shared else 1)
    return probability, {
        "components": min(k, rows, x.size // rows),
        "c": c,
        "shared": float(shared),
    }


def _predict(
    x: NDArray[Any],
    y: NDArray[np.float32],
    queries: NDArray[Any],
    exclusive: bool,
    choices: Sequence[Choice],
) -> Iterator[NDArray[np.float32]]:
    """Yields the probabilities [queries, labels] of each choice in turn."""
    fitted: dict[bool, tuple[Matrix, Matrix]] = {}
    predicted: dict[Choice, NDArray[np.float32]] = {}
    for shared, k, c in choices:
        views = x.shape[1] if shared else 1
        if shared not in fitted:
            fitted[shared] = _components(*(a.reshape(len(a) * views, -1) for a in (x, queries)))
        inputs, query_components = (rows[:, :k] for rows in fitted[shared])
        choice = shared, inputs.shape[1], c  # few rows have fewer components than k
        if choice not in predicted:
            predict = fit_logistic(inputs, y.repeat(views, 0), exclusive, c, ITERATIONS)
            predicted[choice] = predict(query_components).reshape(len(queries), views, -1).mean(1)
        yield predicted[choice]


def _components(x: NDArray[Any], queries: NDArray[Any]) -> tuple[Matrix, Matrix]:
    """Projects both onto the principal components of `x`, the largest first."""
    from sklearn.decomposition import PCA
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    if not np.ptp(x, 0).any():  # one row, or equal rows: there is no component
        return np.zeros((len(x), 1)), np.zeros((len(queries), 1))
    pca = PCA(min(max(COMPONENTS), *x.shape), svd_solver="full")
    components = make_pipeline(StandardScaler(), pca).fit(x)
    return components.transform(x), components.transform(queries)


def _logistic_scores(evaluator: Evaluator, roles: Roles) -> dict[str, float]:
    """Scores logistic regression on the inputs; the main process computes it for all."""
    scores: dict[str, float] = {}
    if rank() == 0:
        with evaluator.watchdog.busy():
            asked = [roles.labelled, roles.test, *([roles.validation] if evaluator.fits else [])]
            labelled, test, *validation = map(evaluator.inputs, asked)
            if len(labelled.y) and len(test.y):
                assert labelled.hidden is not None
                query_inputs = [
                    predictions.hidden
                    for predictions in (test, *validation)
                    if predictions.hidden is not None
                ]
                shapes = evaluator.views.shapes
                views = len(shapes) if len({tuple(shape) for shape in shapes}) == 1 else 1
                probability, chosen = logistic_regression(
                    labelled.hidden.reshape(len(labelled.y), views, -1),
                    labelled.y,
                    np.concatenate(query_inputs).reshape(sum(map(len, query_inputs)), views, -1),
                    evaluator.exclusive,
                )
                split = np.split(probability, [len(test.y)])
                fitted = [replace(predictions, probability=split[1]) for predictions in validation]
                threshold = evaluator.threshold(fitted[0] if fitted else None)
                test = replace(test, probability=split[0])
                scores = evaluator.score(test, threshold) | chosen
    broadcast: dict[str, float] = broadcast_object(scores)
    return broadcast
