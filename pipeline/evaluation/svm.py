"""Support vector machines on features, as graph embeddings are scored."""

import numpy as np
from numpy.typing import NDArray

STRENGTHS = [10.0**power for power in range(-3, 4)]  # C, as InfoGraph's code has them
FOLDS = 5  # of the training rows, in which C is chosen


def support_vectors(
    features: NDArray[np.float32], y: NDArray[np.float32], others: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Trains support vector machines with an RBF kernel, and predicts other rows.

    Features are taken as they are. C is that of the best accuracy over 5 stratified folds of the
    training rows, or as many as the rarest class has rows; gamma is scikit-learn's `scale`. The
    same input gives the same numbers; all is computed in float64.

    Args:
        features: of the training rows, [rows, width].
        y: their classes as 0/1, [rows, classes].
        others: features of the rows to predict, [others, width].

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
