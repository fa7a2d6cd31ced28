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
ROWS = 4096  # predicted at a time
MAX_TOKENS = 4096  # columns of a text at most


def candidate(kind: Kind, seed: int, trial: int) -> dict[str, Any]:
    """Draws the options of a trial from (seed, trial); trial 0 has scikit-learn's defaults.

    Logistic regression: `C`, log-uniform from 1e-4 to 1e4. Forest: the share of columns that a
    split considers, log-uniform from .02 to 1, and the minimum rows of a leaf, from 1 to 16.
    """
    draw = np.random.default_rng([seed, trial, zlib.crc32(kind.encode())])
    if kind == "logistic":
        return {"C": 1.0 if trial == 0 else float(f"{10 ** draw.uniform(-4, 4):.4g}")}
    if trial == 0:
        return {"max_features": "sqrt", "min_samples_leaf": 1}
    share = float(f"{0.02 ** draw.uniform(0, 1):.4g}")
    return {"max_features": share, "min_samples_leaf": int(2 ** draw.integers(0, 5))}


def fit(kind: Kind, options: dict[str, Any], x: Matrix, y: Matrix, exclusive: bool) -> Predict:
    """Fits a classifier with options of `candidate` to x [rows, columns] and y 0/1 [rows, labels].

    Returns a function from other rows to their probabilities [rows, labels]. A label that is equal
    in all training rows is predicted as it is. `exclusive`: a row has exactly one label.
    """
    classifier = _logistic if kind == "logistic" else _forest
    predict = classifier(x, y, exclusive, options)
    return lambda rows: np.concatenate(
        [predict(rows[at : at + ROWS]) for at in range(0, len(rows), ROWS)]
    )


def _logistic(x: Matrix, y: Matrix, exclusive: bool, options: dict[str, Any]) -> Predict:
    """Standardises; more columns than rows are rotated into as many as rows, without loss."""
    from sklearn.decomposition import PCA
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    rotation = [PCA(len(x), svd_solver="full")] if x.shape[1] > len(x) > 1 else []
    features = make_pipeline(StandardScaler(), *rotation).fit(x.astype(np.float64))
    inputs = features.transform(x.astype(np.float64))
    predict = fit_logistic(inputs, y, exclusive, options["C"], ITERATIONS)
    return lambda rows: predict(features.transform(rows.astype(np.float64)))


def _forest(x: Matrix, y: Matrix, exclusive: bool, options: dict[str, Any]) -> Predict:
    from sklearn.ensemble import RandomForestClassifier

    if not (known := ~np.isnan(y)).all():  # one forest per label, of the rows where it is known
        forests = [
            _forest(x[has], y[has, a : a + 1], False, options) if has.any() else None
            for a, has in enumerate(known.T)
        ]
        return lambda rows: np.concatenate(
            [
                forest(rows) if forest else np.full((len(rows), 1), 0.5, np.float32)
                for forest in forests
            ],
            1,
        )
    targets = y.argmax(1) if exclusive else y.astype(int)
    targets = targets.ravel() if y.shape[1] == 1 else targets
    model = RandomForestClassifier(TREES, random_state=0, **options).fit(x, targets)

    def predict(rows: Matrix) -> Matrix:
        found = np.zeros((len(rows), y.shape[1]), np.float32)
        if exclusive:
            found[:, model.classes_] = model.predict_proba(rows)
            return found
        forests, classes = model.predict_proba(rows), model.classes_
        if y.shape[1] == 1:  # scikit-learn makes one column a vector
            forests, classes = [forests], [classes]
        for column, (shares, values) in enumerate(zip(forests, classes, strict=True)):
            found[:, column] = shares @ (np.asarray(values) == 1)
        return found

    return predict


def raw_inputs(evaluator: Evaluator, rows: Rows) -> tuple[Matrix, Matrix]:
    """Returns all stored views side by side, each once, [rows, columns], and labels as 0/1.

    Vectors are standardised if the experiment does so; pictures have the size of their view and
    values in [0, 1]; a text becomes token counts (ids modulo 4,096). `data.on_error: skip` leaves
    out unreadable rows. A view that a row lacks gets the mean of the other rows.
    """
    transforms: dict[str, tuple[int, Columns]] = {}
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
        transforms.setdefault(view.stored, (place, columns))
    inputs = evaluator.inputs(rows, dict(transforms.values()))
    assert inputs.hidden is not None
    return inputs.hidden, inputs.y


def _counts(vocabulary: int, tokens: NDArray[np.int32]) -> Matrix:
    """Counts the tokens of each row, [rows, tokens]; -1 is padding."""
    width = min(vocabulary, MAX_TOKENS)
    counts = np.zeros((len(tokens), width), np.float32)
    row, position = np.nonzero(tokens >= 0)
    np.add.at(counts, (row, tokens[row, position] % width), 1)
    return counts
