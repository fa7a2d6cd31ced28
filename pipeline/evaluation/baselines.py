"""What simpler methods reach on the same labels: logistic regression, and the plain network."""

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

FOLDS = 5
COMPONENTS = (50, 150, 1000)  # the last is all that a few hundred labelled rows have
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
    """Returns scores of the baselines on a run's test rows; every process must call it.

    The plain network is the experiment with the classifier's term alone, trained by the same code
    in the run's folder `plain`. It is left out where the experiment has no such term, and is the
    run itself where it has no other. Scores are named `plain_...` and `logistic_...`, beside what
    cross-validation chose.
    """
    if not len(roles.test) or not len(roles.labelled):
        return {}
    baselines = {}
    if config.evaluate.baselines != "plain":
        baselines = {f"logistic_{k}": v for k, v in _logistic_scores(evaluator, roles).items()}
    alone = plain(config)
    if alone is None:
        return baselines
    same = alone.objective == config.objective
    reached = scores if same else train(alone)
    return baselines | {f"plain_{k}": reached[k] for k in scores if k in reached}


def plain(config: Config) -> Config | None:
    """Returns the experiment with the classifier's term alone; None where it has no such term.

    It has no projections, so that it is asked for nothing of them.
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
    """Returns heads and lines of a table of a run's scores, which has a `name`, and its baselines'.

    Of several results, a seed each, they are means and standard deviations. None without scores.
    """
    rows = {name: "", f"{name}, validation": "validation_", "the plain network": "plain_"}
    rows["logistic regression"] = "logistic_"
    found = {
        (title, score): [one[prefix + score] for one in results if prefix + score in one]
        for title, prefix in rows.items()
        for score in SUMMARISED
    }
    scores = [k for k in SUMMARISED if any(found[title, k] for title in rows)]
    lines = [
        [title, *(_mean_std(found[title, k]) for k in scores)]
        for title in rows
        if any(found[title, k] for k in scores)
    ]
    return (["", *scores], lines) if lines else None


def _mean_std(values: Sequence[float]) -> str:
    if not values:
        return ""
    spread = f" ± {np.std(values, ddof=1):.4f}" if len(values) > 1 else ""
    return f"{np.mean(values):.4f}{spread}"


def logistic_regression(
    x: NDArray[Any],  # of the training rows, [rows, views, width]; of unlike widths one view
    y: NDArray[np.float32],  # 0/1, [rows, labels]; one that all rows share is predicted as it is
    others: NDArray[Any],  # of the rows to predict, [others, views, width]
    exclusive: bool,  # of the labels a row has one: one multinomial classifier
) -> tuple[NDArray[np.float32], dict[str, float]]:
    """Trains logistic regression on the principal components of standardised inputs.

    A row is its views side by side, or each view is a row of its own and the mean of their
    probabilities is the row's: the views then share the weights, as they may share an encoder. This
    choice, the number of components and C are those of the best mean AUC over labels of the rows
    that each of 5 folds of the training rows holds out; all is fitted without them. Returns
    probabilities [others, labels], and `components`, `c` and `shared` (0 or 1) as chosen.
    """
    from sklearn.model_selection import KFold  # here and below: it takes as long as half of torch

    layouts = (False,) if x.shape[1] == 1 else (False, True)
    choices = list(product(layouts, COMPONENTS, STRENGTHS))
    held = {choice: np.zeros_like(y) for choice in choices}
    if len(x) > 1:
        for train, rest in KFold(min(FOLDS, len(x)), shuffle=True, random_state=0).split(x):
            predictions = _predict(x[train], y[train], x[rest], exclusive, choices)
            for choice, probability in zip(choices, predictions, strict=True):
                held[choice][rest] = probability
    means = {choice: multi_label_scores(out, y, 0.5)["auc_macro"] for choice, out in held.items()}
    best = max(choices, key=lambda choice: means[choice])
    (probability,) = _predict(x, y, others, exclusive, [best])
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
    others: NDArray[Any],
    exclusive: bool,
    choices: Sequence[Choice],
) -> Iterator[NDArray[np.float32]]:
    """Yields the probabilities [others, labels] of each choice in turn."""
    fitted: dict[bool, tuple[Matrix, Matrix]] = {}
    predicted: dict[Choice, NDArray[np.float32]] = {}
    for shared, k, c in choices:
        views = x.shape[1] if shared else 1
        if shared not in fitted:
            fitted[shared] = _components(*(a.reshape(len(a) * views, -1) for a in (x, others)))
        inputs, queries = (rows[:, :k] for rows in fitted[shared])
        choice = shared, inputs.shape[1], c  # few rows have fewer components than k
        if choice not in predicted:
            predict = fit_logistic(inputs, y.repeat(views, 0), exclusive, c, ITERATIONS)
            predicted[choice] = predict(queries).reshape(len(others), views, -1).mean(1)
        yield predicted[choice]


def _components(x: NDArray[Any], others: NDArray[Any]) -> tuple[Matrix, Matrix]:
    """Returns both in the principal components of the first, the largest first."""
    from sklearn.decomposition import PCA
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    if not np.ptp(x, 0).any():  # one row, or rows that are alike: there is no component
        return np.zeros((len(x), 1)), np.zeros((len(others), 1))
    pca = PCA(min(max(COMPONENTS), *x.shape), svd_solver="full")
    components = make_pipeline(StandardScaler(), pca).fit(x)
    return components.transform(x), components.transform(others)


def _logistic_scores(evaluator: Evaluator, roles: Roles) -> dict[str, float]:
    """Returns scores of logistic regression on the inputs; the main process computes them."""
    scores: dict[str, float] = {}
    if rank() == 0:
        with evaluator.watchdog.busy():
            asked = [roles.labelled, roles.test, *([roles.validation] if evaluator.fits else [])]
            labelled, test, *validation = map(evaluator.inputs, asked)
            if len(labelled.y) and len(test.y):
                assert labelled.hidden is not None
                others = [one.hidden for one in (test, *validation) if one.hidden is not None]
                shapes = evaluator.views.shapes
                views = len(shapes) if len({tuple(shape) for shape in shapes}) == 1 else 1
                probability, chosen = logistic_regression(
                    labelled.hidden.reshape(len(labelled.y), views, -1),
                    labelled.y,
                    np.concatenate(others).reshape(sum(map(len, others)), views, -1),
                    evaluator.exclusive,
                )
                parts = np.split(probability, [len(test.y)])
                fitted = [replace(one, probability=parts[1]) for one in validation]
                threshold = evaluator.threshold(fitted[0] if fitted else None)
                test = replace(test, probability=parts[0])
                scores = evaluator.score(test, threshold) | chosen
    shared: dict[str, float] = broadcast_object(scores)
    return shared
