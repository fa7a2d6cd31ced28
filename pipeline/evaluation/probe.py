"""Probes: how well frozen features tell labels apart, by linear classifiers or support vectors."""

import warnings
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

ITERATIONS = 1000
STRENGTHS = [10.0**power for power in range(-3, 4)]  # C, as InfoGraph's code has them
FOLDS = 5  # of the training rows, in which C is chosen


def linear_probe(
    features: NDArray[np.float32],
    y: NDArray[np.float32],
    others: NDArray[np.float32],
    exclusive: bool,
) -> NDArray[np.float32]:
    """Trains logistic regression on standardised features, and predicts other rows.

    Mean and standard deviation are those of the training rows; the classifier is scikit-learn's,
    with its L2 penalty of C = 1. A class or a label that the training rows tell nothing about is
    predicted as they have it: one that is on none or on all of them, with probability 0 or 1. The
    same input gives the same numbers; all is computed in float64, and a fit that still improves
    after 1,000 iterations is taken as it stands.

    Args:
        features: of the training rows, [rows, width].
        y: their labels as 0/1, [rows, labels]; a label that is unknown, NaN, trains nothing.
        others: features of the rows to predict, [others, width].
        exclusive: train one multinomial classifier; else one a label.

    Returns:
        Probabilities, [others, labels].
    """
    from sklearn.preprocessing import StandardScaler  # here: most runs need no probe

    scaler = StandardScaler().fit(features.astype(np.float64))
    inputs, queries = (scaler.transform(x.astype(np.float64)) for x in (features, others))
    return fit_logistic(inputs, y, exclusive, 1.0, ITERATIONS)(queries)


def fit_logistic(
    x: NDArray[np.float64], y: NDArray[np.float32], exclusive: bool, c: float, iterations: int
) -> Callable[[NDArray[np.float64]], NDArray[np.float32]]:
    """Returns what gives probabilities [queries, labels], by an L2 penalty of 1 / c.

    A class without examples has probability 0; a label that all rows share is predicted as it is.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    targets = [y.argmax(1)] if exclusive else list(y.T)
    fitted: list[LogisticRegression | float] = []  # a value: that of all rows
    for labels in targets:
        known = np.isfinite(labels)
        rows, target = (x if known.all() else x[known]), labels[known].astype(int)
        if not len(target):
            fitted.append(0.5)  # nothing is known of it
            continue
        if len(present := np.unique(target)) == 1:
            fitted.append(float(present[0]))
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            fitted.append(LogisticRegression(C=c, max_iter=iterations).fit(rows, target))

    def predict(queries: NDArray[np.float64]) -> NDArray[np.float32]:
        probability = np.zeros((len(queries), y.shape[1]), np.float32)
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
    others: NDArray[np.float32],  # features of the rows to predict, [others, width]
) -> NDArray[np.float32]:
    """Trains support vector machines with an RBF kernel, and predicts other rows.

    Features are taken as they are. C is that of the best accuracy over 5 stratified folds of the
    training rows, or as many as the rarest class has rows; gamma is scikit-learn's `scale`. The
    same input gives the same numbers; all is computed in float64.

    Returns:
        Scores that sum to 1 over the classes, the predicted one's the greatest, [others, classes]:
        the softmax of the decision function. A class without training rows has 0.
    """
    from sklearn.model_selection import GridSearchCV  # here: most runs need none
    from sklearn.svm import SVC

    out = np.zeros((len(others), y.shape[1]), np.float32)
    classes = y.argmax(1)
    present, counts = np.unique(classes, return_counts=True)
    if len(present) == 1:
        out[:, present[0]] = 1
        return out
    x, queries = features.astype(np.float64), others.astype(np.float64)
    model = SVC(C=1.0, break_ties=True)
    if (folds := min(FOLDS, int(counts.min()))) > 1:
        model = GridSearchCV(model, {"C": STRENGTHS}, cv=folds, scoring="accuracy")
    decision = model.fit(x, classes).decision_function(queries)
    if len(present) == 2:
        decision = np.stack([-decision, decision], 1) / 2
    shares = np.exp(decision - decision.max(1, keepdims=True))
    out[:, present] = shares / shares.sum(1, keepdims=True)
    return out
