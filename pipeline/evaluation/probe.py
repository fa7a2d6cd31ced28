"""A linear probe: how well a linear classifier on frozen features tells the labels apart."""

import warnings
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

ITERATIONS = 1000


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
    return classify(inputs, y, queries, exclusive, 1.0, ITERATIONS)


def classify(
    x: NDArray[np.float64],
    y: NDArray[np.float32],
    queries: NDArray[np.float64],
    exclusive: bool,
    c: float,
    iterations: int,
) -> NDArray[np.float32]:
    """Returns probabilities [queries, labels] by logistic regression with an L2 penalty of 1 / c.

    A class without examples has probability 0; a label that all rows share is predicted as it is.
    """
    return fit_logistic(x, y, exclusive, c, iterations)(queries)


def fit_logistic(
    x: NDArray[np.float64], y: NDArray[np.float32], exclusive: bool, c: float, iterations: int
) -> Callable[[NDArray[np.float64]], NDArray[np.float32]]:
    """Returns what gives `classify`'s probabilities [queries, labels] of queries."""
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
