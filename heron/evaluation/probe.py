"""Probes: how well frozen features tell labels apart, by linear classifiers or support vectors."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

ITERATIONS = 1000
STRENGTHS = [10.0**power for power in range(-3, 4)]  # C, as InfoGraph's code has them
FOLDS = 5  # of the training rows, in which C is chosen


def linear_probe(
    features: NDArray[np.float32],
    y: NDArray[np.float32],
    query_features: NDArray[np.float32],
    exclusive: bool,
) -> NDArray[np.float32]:
    """Trains logistic regression on standardised features, and predicts other rows.

    Features are standardised by the training rows; the classifier is scikit-learn's, with its L2
    penalty of C = 1. A class or label that no training row has, or all have, is predicted with
    probability 0 or 1. Everything is computed in float64 and deterministic; the fit stops after
    1,000 iterations, converged or not.

    Args:
        features: of the training rows, [rows, width].
        y: their labels as 0/1, [rows, labels]; unknown labels, NaN, are ignored.
        query_features: of the rows to predict, [queries, width].
        exclusive: train one multinomial classifier; otherwise one per label.

    Returns:
        Probabilities, [queries, labels].
    """
    from sklearn.preprocessing import StandardScaler  # here: most runs need no probe

    scaler = StandardScaler().fit(features.astype(np.float64))
    inputs, queries = (scaler.transform(x.astype(np.float64)) for x in (features, query_features))
    return fit_logistic(inputs, y, exclusive, 1.0, ITERATIONS)(queries)


def fit_logistic(
    x: NDArray[np.float64], y: NDArray[np.float32], exclusive: bool, c: float, iterations: int
) -> Callable[[NDArray[np.float64]], NDArray[np.float32]]:
    """Fits with an L2 penalty of 1 / c; returns a function from rows to probabilities.

    These are [queries, labels]: 0 for a class without examples, 1 for a label that all rows share.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    targets = [y.argmax(1)] if exclusive else list(y.T)
    fitted: list[LogisticRegression | float] = []  # a number: the value that all rows have
    for labels in targets:
        known = np.isfinite(labels)
        rows, target = (x if known.all() else x[known]), labels[known].astype(int)
        if not len(target):
            fitted.append(0.5)  # no row knows it
            continue
        if len(present := np.unique(target)) == 1:
            fitted.append(float(present[0]))
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            fitted.append(LogisticRegression(C=c, max_iter=iterations).fit(rows, target))

    return by_labels(fitted, y.shape[1], exclusive)


def by_labels(
    fitted: Sequence[Any],  # a classifier of classes, or one for each label; a number: its value
    labels: int,
    exclusive: bool,
    project: Callable[[NDArray[Any]], NDArray[Any]] = np.asarray,
) -> Callable[[NDArray[Any]], NDArray[np.float32]]:
    """Returns the function from rows to probabilities [rows, labels] of fitted classifiers."""

    def predict(rows: NDArray[Any]) -> NDArray[np.float32]:
        queries = project(rows)
        probability = np.zeros((len(queries), labels), np.float32)
        for column, model in enumerate(fitted):
            if isinstance(model, float):
                probability[:, int(model) if exclusive else column] = 1.0 if exclusive else model
            elif exclusive:
                probability[:, model.classes_] = model.predict_proba(queries)
            else:
                probability[:, column] = model.predict_proba(queries)[:, 1]
        return probability

    return predict


def support_vectors(
    features: NDArray[np.float32],  # of the training rows, [rows, width]
    y: NDArray[np.float32],  # their classes as 0/1, [rows, classes]
    query_features: NDArray[np.float32],  # features of the rows to predict, [queries, width]
) -> NDArray[np.float32]:
    """Trains support vector machines with an RBF kernel, and predicts other rows.

    Features are not scaled. C is chosen by accuracy over 5 stratified folds of the training rows,
    fewer if the rarest class has fewer rows; gamma is scikit-learn's `scale`. All is float64 and
    deterministic. Returns scores [queries, classes], the softmax of the decision function, in which
    the predicted class is greatest; a class without training rows has 0.
    """
    from sklearn.model_selection import GridSearchCV  # here: most runs need none
    from sklearn.svm import SVC

    out = np.zeros((len(query_features), y.shape[1]), np.float32)
    classes = y.argmax(1)
    present, counts = np.unique(classes, return_counts=True)
    if len(present) == 1:
        out[:, present[0]] = 1
        return out
    x, queries = features.astype(np.float64), query_features.astype(np.float64)
    model = SVC(C=1.0, break_ties=True)
    if (folds := min(FOLDS, int(counts.min()))) > 1:
        model = GridSearchCV(model, {"C": STRENGTHS}, cv=folds, scoring="accuracy")
    decision = model.fit(x, classes).decision_function(queries)
    if len(present) == 2:
        decision = np.stack([-decision, decision], 1) / 2
    shares = np.exp(decision - decision.max(1, keepdims=True))
    out[:, present] = shares / shares.sum(1, keepdims=True)
    return out
