"""scikit-learn's logistic regression and random forest, on raw inputs or on a model's features."""

import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from heron.pipeline.config.errors import ConfigError
from heron.pipeline.data.plan import Rows
from heron.pipeline.evaluation.evaluator import Columns, Evaluator
from heron.pipeline.evaluation.probe import fit_logistic

Kind = Literal["logistic", "forest"]
Matrix = NDArray[np.float32]
Predict = Callable[[Matrix], Matrix]
ITERATIONS, TREES = 500, 200
ROWS = 4096  # that are predicted at a time
MAX_TOKENS = 4096  # columns of a text, at most


def candidate(kind: Kind, seed: int, trial: int) -> dict[str, Any]:
    """Returns the options of a trial, drawn with (seed, trial); scikit-learn's own of trial 0.

    `C` of logistic regression from 1e-4 to 1e4, evenly in its logarithm; of a forest the share of
    columns that a split looks at, from .02 to 1, and the least rows of a leaf, from 1 to 16.
    """
    draw = np.random.default_rng([seed, trial, zlib.crc32(kind.encode())])
    if kind == "logistic":
        return {"C": 1.0 if trial == 0 else float(f"{10 ** draw.uniform(-4, 4):.4g}")}
    if trial == 0:
        return {"max_features": "sqrt", "min_samples_leaf": 1}
    share = float(f"{0.02 ** draw.uniform(0, 1):.4g}")
    return {"max_features": share, "min_samples_leaf": int(2 ** draw.integers(0, 5))}


def fit(kind: Kind, options: dict[str, Any], x: Matrix, y: Matrix, exclusive: bool) -> Predict:
    """Fits a classifier with options of `candidate`: x [rows, columns], y 0/1 [rows, labels].

    Returns what gives probabilities [rows, labels] of other rows. A label or a class that the rows
    tell nothing about is predicted as they have it; `exclusive` says that a row has one label.
    """
    classifier = _logistic if kind == "logistic" else _forest
    predict = classifier(x, y, exclusive, options)
    return lambda rows: np.concatenate(
        [predict(rows[at : at + ROWS]) for at in range(0, len(rows), ROWS)]
    )


def _logistic(x: Matrix, y: Matrix, exclusive: bool, options: dict[str, Any]) -> Predict:
    """Standardises; more columns than rows are turned into as many as rows, which loses nothing."""
    from sklearn.decomposition import PCA
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    turned = [PCA(len(x), svd_solver="full")] if x.shape[1] > len(x) > 1 else []
    features = make_pipeline(StandardScaler(), *turned).fit(x.astype(np.float64))
    inputs = features.transform(x.astype(np.float64))
    predict = fit_logistic(inputs, y, exclusive, options["C"], ITERATIONS)
    return lambda rows: predict(features.transform(rows.astype(np.float64)))


def _forest(x: Matrix, y: Matrix, exclusive: bool, options: dict[str, Any]) -> Predict:
    from sklearn.ensemble import RandomForestClassifier

    if not (known := ~np.isnan(y)).all():  # of unknown labels, a forest each, of rows that know it
        each = [
            _forest(x[has], y[has, a : a + 1], False, options) if has.any() else None
            for a, has in enumerate(known.T)
        ]
        return lambda rows: np.concatenate(
            [one(rows) if one else np.full((len(rows), 1), 0.5, np.float32) for one in each], 1
        )
    targets = y.argmax(1) if exclusive else y.astype(int)
    targets = targets.ravel() if y.shape[1] == 1 else targets
    model = RandomForestClassifier(TREES, random_state=0, **options).fit(x, targets)

    def predict(rows: Matrix) -> Matrix:
        found = np.zeros((len(rows), y.shape[1]), np.float32)
        if exclusive:
            found[:, model.classes_] = model.predict_proba(rows)
            return found
        each, classes = model.predict_proba(rows), model.classes_
        if y.shape[1] == 1:  # scikit-learn makes one column a vector
            each, classes = [each], [classes]
        for column, (shares, values) in enumerate(zip(each, classes, strict=True)):
            found[:, column] = shares @ (np.asarray(values) == 1)
        return found

    return predict


def raw_inputs(evaluator: Evaluator, rows: Rows) -> tuple[Matrix, Matrix]:
    """Returns each stored view, side by side and each once, [rows, columns], and labels as 0/1.

    Vectors are standardised where the experiment's are, pictures are of the size of their view and
    in [0, 1], a text is how often it has each token (numbers from 4,096 on begin anew). Rows that
    cannot be read are left out where `data.on_error` is "skip"; a view that a row lacks has the
    means over those that have it.
    """
    made: dict[str, tuple[int, Columns]] = {}
    for place, view in enumerate(evaluator.views.views):
        kind = evaluator.reader.view(view.stored).kind
        columns: Columns = np.asarray
        if kind == "graph":
            raise ConfigError(
                f"'{view.stored}' holds graphs, which are no columns of numbers; expected no "
                "baselines"
            )
        if kind == "text":
            columns = partial(_counts, evaluator.reader.vocabulary(view.stored))
        made.setdefault(view.stored, (place, columns))
    found = evaluator.inputs(rows, dict(made.values()))
    assert found.hidden is not None
    return found.hidden, found.y


def _counts(vocabulary: int, tokens: NDArray[np.int32]) -> Matrix:
    """Returns how often each row has each token, [rows, tokens]; -1 is none."""
    width = min(vocabulary, MAX_TOKENS)
    counts = np.zeros((len(tokens), width), np.float32)
    row, place = np.nonzero(tokens >= 0)
    np.add.at(counts, (row, tokens[row, place] % width), 1)
    return counts
