"""A linear probe: how well a linear classifier on frozen features tells the labels apart."""

import warnings

import numpy as np
from numpy.typing import NDArray

_ITERATIONS = 1000


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
        y: their labels as 0/1, [rows, labels].
        others: features of the rows to predict, [others, width].
        exclusive: train one multinomial classifier; else one a label.

    Returns:
        Probabilities, [others, labels].
    """
    from sklearn.preprocessing import StandardScaler  # here: most runs need no probe

    scaler = StandardScaler().fit(features.astype(np.float64))
    inputs, queries = (scaler.transform(x.astype(np.float64)) for x in (features, others))
    if exclusive:
        return _classify(inputs, y.argmax(1), queries, y.shape[1])
    columns = [_classify(inputs, label.astype(np.int64), queries, 2)[:, 1] for label in y.T]
    return np.stack(columns, 1)


def _classify(
    inputs: NDArray[np.float64],
    classes: NDArray[np.int64],
    queries: NDArray[np.float64],
    count: int,
) -> NDArray[np.float32]:
    """Returns probabilities [queries, count] of classes 0 to count - 1; some may not occur."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    probability = np.zeros((len(queries), count), np.float32)
    present = np.unique(classes)
    if len(present) == 1:
        probability[:, present] = 1.0
        return probability
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model = LogisticRegression(max_iter=_ITERATIONS).fit(inputs, classes)
    probability[:, model.classes_] = model.predict_proba(queries)
    return probability
