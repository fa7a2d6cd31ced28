"""scikit-learn's logistic regression, random forest and boosting, tuned on held-out rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from heron.base.errors import ConfigError
from heron.data.rows import Rows
from heron.evaluation.evaluator import Columns, Evaluator, Predictions
from heron.evaluation.metrics import label_auc
from heron.evaluation.probe import by_labels, fit_logistic

Kind = Literal["logistic", "forest", "boosting"]
KINDS: tuple[Kind, ...] = ("logistic", "forest", "boosting")
NAMES = {
    "logistic": "logistic regression",
    "forest": "random forest",
    "boosting": "gradient boosting",
}
Matrix = NDArray[np.float32]
Predict = Callable[[NDArray[Any]], Matrix]  # from rows [rows, views, width] to [rows, labels]
Options = dict[str, float]

FOLDS = 5
MOST_ROWS = 4000  # that options are chosen by; the chosen ones are fitted to all rows
COMPONENTS = 1000  # the principal ones of the inputs, at most
START, LAST = -2, 8  # powers of ten: the C that is tried first, and those at the ends
ITERATIONS = 300
TREES, TUNING_TREES = 200, 50
LEAVES = (3.0, 10.0, 30.0)  # fewest rows of a leaf that are tried after 1
FACTORS = (2.0, 4.0, 8.0)  # times the square root of the columns, tried after 1
WIDE = 1000  # columns, beyond which a split considers no more than their square root
ROUNDS, TUNING_ROUNDS = 100, 30  # of boosting
BOOSTED = 100  # columns, of more than which boosting sees as many principal components
LEAST = 1e-7  # a probability of 0 counts as this one in a logarithm
ROWS = 4096  # predicted at a time
MAX_TOKENS = 4096  # columns of a text at most


@dataclass(frozen=True)
class Tuned:
    """A classifier with the options that lose least on held-out rows.

    Attributes:
        predict: returns probabilities [rows, labels] for rows [rows, views, width].
        options: the chosen ones.
        loss: of the chosen options; of logistic regression the mean log-loss of held-out rows and
            labels; of a forest 1 - accuracy, or 1 - AUC where a row may have several labels.
        tried: every combination of options, with its loss.
        edge: what lies at the edge of what can be tried; "" if nothing does.
    """

    predict: Predict
    options: Options
    loss: float
    tried: list[tuple[Options, float]]
    edge: str = ""


def tune(
    kind: Kind,
    x: NDArray[Any],
    y: Matrix,
    exclusive: bool,
    held: tuple[NDArray[Any], Matrix] | None = None,
) -> Tuned:
    """Fits a classifier whose options are chosen on held-out rows.

    Either a row is its views side by side, or each view is a row of its own, as views may share an
    encoder, and the probabilities of a row's views are averaged (`shared` is 1).

    Logistic regression on standardised inputs is chosen by log-loss, a proper score of
    probabilities: its `c`, the inverse weight of the L2 penalty, is followed by factors of ten on
    both sides until the log-loss rises.

    A forest has 200 trees; its leaves have `leaf` rows or more, and a split considers `factor`
    times the square root of the columns. Both begin at scikit-learn's own, 1, and are changed for
    as long as accuracy (of one class per row) or AUC rises by more than a standard error over the
    folds: log-loss would prefer large leaves, whose probabilities are mild and which rank worse.

    Boosting adds 100 trees of 8 leaves, one after the other (HistGradientBoostingClassifier), of
    more than 100 columns on as many principal components. Its `leaf`, 5, and its learning rate
    `rate`, .1, are chosen in the same way.

    Args:
        kind: `logistic`, `forest` or `boosting`.
        x: training rows [rows, views, width]; views of unlike widths are one view.
        y: labels as 0/1, [rows, labels]; NaN is unknown. A label that is the same in all training
            rows is predicted as it is.
        exclusive: a row has exactly one label.
        held: the rows, and their labels, that choose the options: where `x` are features of a
            network that has seen `y`, folds of the same rows would be too easy. None: five folds of
            the training rows, each with about the same share of every combination of labels.
    """
    import scipy.optimize  # noqa: F401  # so that its BLAS is there to be limited
    import sklearn.linear_model  # noqa: F401
    from threadpoolctl import threadpool_limits

    chosen = np.sort(np.random.default_rng(0).permutation(len(x))[:MOST_ROWS])
    parts = [(x[chosen], y[chosen], *held)] if held else folds(x[chosen], y[chosen])
    layouts = (0.0, 1.0) if x.shape[1] > 1 else (0.0,)
    with threadpool_limits(1):  # many small fits: threads that wait for others cost more than all
        if kind == "logistic":
            tried, (options, loss) = _search_logistic(layouts, parts, exclusive)
        else:
            tried, (options, loss) = _search_trees(kind, layouts, parts, exclusive)
    at_end = kind == "logistic" and abs(round(np.log10(options["c"]))) == LAST
    edge = f"the best C, {options['c']:g}, is the last one tried" if at_end else ""
    with threadpool_limits(1 if len(x) <= MOST_ROWS else None):
        if kind == "logistic":
            predict = _fit_logistic(x, y, exclusive, options)
        else:
            predict = _fit_trees(kind, x, y, exclusive, options)
    return Tuned(predict, options, loss, tried, edge)


Tried = list[tuple[Options, float]]  # with their losses
# Rows and labels, held-out rows and labels.
Part = tuple[NDArray[Any], Matrix, NDArray[Any], Matrix]


def folds(x: NDArray[Any], y: Matrix) -> list[Part]:
    """Deals the rows out in the order of their labels, shuffled among equal ones."""
    if len(x) < 2:
        return []
    shuffled = np.random.default_rng(0).permutation(len(x))
    order = shuffled[np.lexsort(np.nan_to_num(y[shuffled], nan=0.5).T)]
    fold = np.empty(len(x), int)
    fold[order] = np.arange(len(x)) % min(FOLDS, len(x))
    return [(x[fold != f], y[fold != f], x[fold == f], y[fold == f]) for f in np.unique(fold)]


def log_loss(probability: NDArray[Any], y: Matrix, exclusive: bool) -> float:
    """Returns the mean of −log of the probability of what is true, over rows and known labels."""
    p = probability.astype(np.float64)
    if exclusive:
        return float(-np.log(np.maximum((p * y).sum(1), LEAST)).mean())
    true = np.where(y == 1, p, 1 - p)[~np.isnan(y)]
    return float(-np.log(np.maximum(true, LEAST)).mean()) if len(true) else 0.0


def _rows(x: NDArray[Any], options: Options) -> NDArray[Any]:
    """Returns [rows, views * width], or [rows * views, width] where views are rows of their own."""
    return x.reshape(-1, x.shape[2]) if options["shared"] else x.reshape(len(x), -1)


def _averaged(by_view: Matrix, rows: int) -> Matrix:
    """Averages the probabilities [rows * views, labels] of a row's views, or of the row itself."""
    return np.asarray(by_view.reshape(rows, -1, by_view.shape[1]).mean(1))


def _by_rows(predict: Callable[[NDArray[Any]], Matrix], options: Options, labels: int) -> Predict:
    """Returns `predict` for rows of several views, of which it sees some thousands at a time."""

    def predict_rows(x: NDArray[Any]) -> Matrix:
        parts = [x[at : at + ROWS] for at in range(0, len(x), ROWS)]
        found = [_averaged(predict(_rows(part, options)), len(part)) for part in parts]
        return np.concatenate([np.zeros((0, labels), np.float32), *found])

    return predict_rows


def _search_logistic(
    layouts: Sequence[float], parts: Sequence[Part], exclusive: bool
) -> tuple[Tried, tuple[Options, float]]:
    power, tried = START, []
    for shared in layouts:
        options = {"shared": shared}
        projected = []
        for x, y, held, _ in parts:
            project = projection(rows := _rows(x, options))
            labels = y.repeat(len(rows) // len(y), 0)
            projected.append((project(rows), project(_rows(held, options)), labels))
        loss = partial(_logistic_loss, parts, projected, exclusive)
        losses = descend(loss, power) if parts else {power: 0.0}
        tried += [(options | {"c": 10.0**at}, value) for at, value in losses.items()]
        power = min(losses, key=lambda at: losses[at])  # is near that of the other layout
    return tried, min(tried, key=lambda pair: pair[1])


def _logistic_loss(
    parts: Sequence[Part], projected: Sequence[tuple[Any, ...]], exclusive: bool, power: int
) -> float:
    losses = []
    for (rows, queries, labels), (*_, truth) in zip(projected, parts, strict=True):
        found = fit_logistic(rows, labels, exclusive, 10.0**power, ITERATIONS)(queries)
        losses.append(log_loss(_averaged(found, len(truth)), truth, exclusive))
    return float(np.average(losses, weights=[len(truth) for *_, truth in parts]))


def descend(loss: Callable[[int], float], start: int) -> dict[int, float]:
    """Returns the losses of powers of ten around `start`, on both sides until they do not fall."""
    tried = {start: loss(start)}
    for step in (-1, 1):
        at = start
        while abs(at) < LAST and (at == start or tried[at] < tried[at - step]):
            at += step
            tried[at] = loss(at)
    return tried


def _fit_logistic(x: NDArray[Any], y: Matrix, exclusive: bool, options: Options) -> Predict:
    rows = _rows(x, options)
    project = projection(rows)
    labels = y.repeat(len(rows) // len(y), 0)
    fitted = fit_logistic(project(rows), labels, exclusive, options["c"], ITERATIONS)
    return _by_rows(lambda queries: fitted(project(queries)), options, y.shape[1])


def projection(
    x: NDArray[Any], components: int = COMPONENTS
) -> Callable[[NDArray[Any]], NDArray[np.float64]]:
    """Returns the projection on the principal components of standardised `x`, largest first."""
    from sklearn.decomposition import PCA  # here: scikit-learn takes half as long as torch
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    if not np.ptp(x, 0).any():  # one row, or equal rows: there is no component
        return lambda rows: np.zeros((len(rows), 1))
    pca = PCA(min(components, *x.shape), svd_solver="full")
    pipeline = make_pipeline(StandardScaler(), pca).fit(x.astype(np.float64))
    return lambda rows: pipeline.transform(rows.astype(np.float64))


def _search_trees(
    kind: Kind, layouts: Sequence[float], parts: Sequence[Part], exclusive: bool
) -> tuple[Tried, tuple[Options, float]]:
    """Changes one option at a time, and keeps a change if it beats the noise between folds."""
    wide = bool(parts) and parts[0][0].shape[2] > WIDE
    best: Options = {"shared": 0.0, "factor": 1.0, "leaf": 1.0}
    ladders = [("shared", layouts[1:]), ("factor", () if wide else FACTORS), ("leaf", LEAVES)]
    if kind == "boosting":
        best = {"shared": 0.0, "rate": 0.1, "leaf": 5.0}
        ladders = [("shared", layouts[1:]), ("leaf", (20.0,)), ("rate", (0.3,))]
    least = _tree_losses(kind, parts, exclusive, best)
    tried = [(best, _mean(least))]
    for name, values in ladders if parts else ():
        for value in values:
            options = best | {name: value}
            losses = _tree_losses(kind, parts, exclusive, options)
            tried.append((options, _mean(losses)))
            gain = least - losses
            error = gain.std(ddof=1) / np.sqrt(len(gain)) if len(gain) > 1 else 0.0
            if not _mean(gain) > error:
                break
            best, least = options, losses
    return tried, (best, _mean(least))


def _mean(values: NDArray[np.float64]) -> float:
    return float(np.nanmean(values)) if (~np.isnan(values)).any() else 0.0


def _tree_losses(
    kind: Kind, parts: Sequence[Part], exclusive: bool, options: Options
) -> NDArray[np.float64]:
    """Returns for each fold 1 - accuracy, or 1 - AUC averaged over the labels that differ in it."""
    losses = []
    for x, y, held, truth in parts:
        found = _fit_trees(kind, x, y, exclusive, options, tuning=True)(held)
        if exclusive:
            losses.append(float((found.argmax(1) != truth.argmax(1)).mean()))
        else:
            losses.append(1 - _mean(np.array(label_auc(found, truth))))
    return np.array(losses)


def _fit_trees(
    kind: Kind, x: NDArray[Any], y: Matrix, exclusive: bool, options: Options, tuning: bool = False
) -> Predict:
    rows = _rows(x, options)
    labels = y.repeat(len(rows) // len(y), 0)
    if kind == "forest":
        trees = TUNING_TREES if tuning else TREES
        predict = _forest(rows, labels, exclusive, options, trees)
    else:
        rounds = TUNING_ROUNDS if tuning else ROUNDS
        predict = _boosting(rows, labels, exclusive, options, rounds)
    return _by_rows(predict, options, y.shape[1])


def _boosting(
    x: NDArray[Any], y: Matrix, exclusive: bool, options: Options, rounds: int
) -> Callable[[NDArray[Any]], Matrix]:
    """Fits trees of 8 leaves one after the other: for each label, or for all classes at once."""
    from sklearn.ensemble import HistGradientBoostingClassifier

    project: Callable[[NDArray[Any]], NDArray[Any]] = np.asarray
    if x.shape[1] > BOOSTED:
        project = projection(x, BOOSTED)
    inputs, fitted = project(x), list[Any]()
    for labels in [y.argmax(1)] if exclusive else y.T:
        known = np.isfinite(labels)
        rows, target = inputs[known], labels[known].astype(int)
        if len(present := np.unique(target)) < 2:  # a number: the value that all rows have
            fitted.append(float(present[0]) if len(present) else 0.5)
            continue
        model = HistGradientBoostingClassifier(
            learning_rate=options["rate"], max_iter=rounds, max_leaf_nodes=8, random_state=0,
            min_samples_leaf=int(options["leaf"]), early_stopping=False,
        )  # fmt: skip
        fitted.append(model.fit(rows, target))
    return by_labels(fitted, y.shape[1], exclusive, project)


def _forest(x: NDArray[Any], y: Matrix, exclusive: bool, options: Options, trees: int) -> Predict:
    from sklearn.ensemble import RandomForestClassifier

    if not (known := ~np.isnan(y)).all():  # one forest per label, of the rows where it is known
        forests = [
            _forest(x[has], y[has, a : a + 1], False, options, trees) if has.any() else None
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
    model = RandomForestClassifier(
        trees,
        max_features=min(1.0, options["factor"] / np.sqrt(x.shape[1])),
        min_samples_leaf=int(options["leaf"]),
        n_jobs=torch.get_num_threads(),
        random_state=0,
    ).fit(x, targets)
    model.set_params(n_jobs=1)  # several threads would add up the trees in any order

    def predict(rows: NDArray[Any]) -> Matrix:
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


def raw_inputs(evaluator: Evaluator, rows: Rows) -> Predictions:
    """Returns all stored views side by side, each once, as `hidden` [rows, columns], and labels.

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
                f"view '{view.stored}' has graphs, and baselines need columns of numbers; set "
                "evaluate.baselines to false"
            )
        if kind == "text":
            columns = partial(_counts, evaluator.reader.vocabulary(view.stored))
        transforms.setdefault(view.stored, (place, columns))
    return evaluator.inputs(rows, dict(transforms.values()))


def _counts(vocabulary: int, tokens: NDArray[np.int32]) -> Matrix:
    """Counts the tokens of each row, [rows, tokens]; -1 is padding."""
    width = min(vocabulary, MAX_TOKENS)
    counts = np.zeros((len(tokens), width), np.float32)
    row, position = np.nonzero(tokens >= 0)
    np.add.at(counts, (row, tokens[row, position] % width), 1)
    return counts
