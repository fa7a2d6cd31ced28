"""Which labels look wrong: what features, neighbours and a row's other labels say of each."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import expit, logit, softmax
from threadpoolctl import threadpool_limits

from heron.evaluation.knn import Numbers, Vectors
from heron.evaluation.probe import fit_logistic
from heron.evaluation.scikit import START, descend, log_loss, projection

Labels = NDArray[np.float32]  # 0/1, NaN where unknown, [rows, labels]
Predict = Callable[[NDArray[np.float64]], Labels]  # from rows to probabilities
FOLDS = 5
TUNED = 2000  # rows that choose the penalty
FITTED = 20_000  # rows that each model is fitted to, at most
COMPONENTS = 256  # principal ones of the features, at most
ITERATIONS = 300
TEMPERATURE = 0.1  # of votes: a neighbour counts exp(cosine / this)
CONTEXT_C = 0.1  # inverse penalty of the models that weigh a label's sources
OTHERS = 200  # labels of a row that such a model sees, at most
SHARES = np.linspace(0, 1, 11)  # tried: how much votes count beside probabilities of classes
MANY_CLASSES = "The number of unique classes is greater"  # than half of the rows
LEAST, FLOOR = 1e-3, 0.02  # added to a probability and to a vote before their logarithms
ROWS = 65_536  # predicted at a time
VOTES = 2**24  # of neighbours on labels, counted at a time
FEW = 4000  # rows, of fewer than which all is computed on one thread


@dataclass(frozen=True)
class Near:
    """The nearest others of each row."""

    numbers: Numbers  # of rows, [rows, k]
    cosine: Vectors  # [rows, k]
    group: NDArray[np.int64] | None = None  # of each row, whose members have no vote on it, [rows]

    @cached_property
    def weights(self) -> Vectors:
        """What each neighbour's vote counts, [rows, k]; those of a row sum to 1, or are all 0."""
        raw = np.exp((self.cosine - self.cosine.max(1, keepdims=True)) / TEMPERATURE)
        if self.group is not None:
            raw = raw * (self.group[self.numbers] != self.group[:, None])
        total = raw.sum(1, keepdims=True)
        return np.asarray(raw / np.where(total > 0, total, 1), np.float32)

    @property
    def heard(self) -> NDArray[np.bool_]:
        """Which rows have a neighbour with a vote, [rows, 1]."""
        return np.asarray(self.weights.any(1))[:, None]

    def votes(self, y: Labels) -> Labels:
        """Returns the share of a row's neighbours, by weight, that have each label; else 1/2."""
        found = np.empty_like(y)
        size = max(1, VOTES // self.numbers.shape[1] // y.shape[1])
        for start in range(0, len(y), size):
            block = slice(start, start + size)
            theirs, weights = y[self.numbers[block]], self.weights[block]
            known = np.einsum("rk,rkl->rl", weights, ~np.isnan(theirs))
            have = np.einsum("rk,rkl->rl", weights, np.nan_to_num(theirs))
            found[block] = np.divide(have, known, out=np.full_like(have, 0.5), where=known > 0)
        return found


@dataclass(frozen=True)
class LabelModel:
    """How probable each label of a row is, by models that have not seen the row's labels.

    Each row belongs to one of five folds, whole groups to one fold. (1) Logistic regression on the
    features' principal components, fitted to the other folds, predicts the rows of a fold. (2) The
    ten nearest others vote, by exp(cosine / 0.1), without those of the row's group. (3) Of
    exclusive classes, log probabilities and votes are averaged with the weights that fit the given
    classes best; where a row has several labels, a logistic regression per label, fitted to the
    other folds, weighs the logarithms of the odds of both and the row's other labels. The first
    step is that of confident learning (Northcutt et al. 2021, section 3); the third uses what it
    leaves out.
    """

    x: NDArray[np.float64]  # [rows, width]
    near: Near
    fold: NDArray[np.int64]  # [rows]
    exclusive: bool
    c: float  # the inverse penalty of the first step

    @classmethod
    def of(
        cls,
        features: Vectors,
        y: Labels,
        exclusive: bool,
        near: Near,
        groups: NDArray[np.int64] | None = None,
        seed: int = 0,
    ) -> "LabelModel":
        """Chooses folds and penalty. `groups` [rows] are of rows that belong together."""
        random = np.random.default_rng(seed)
        names, group = np.unique(
            np.arange(len(y)) if groups is None else groups, return_inverse=True
        )
        fold = (random.permutation(len(names)) % FOLDS)[group]
        some = np.sort(random.permutation(len(y))[:FITTED])
        project = projection(features[some], COMPONENTS)
        starts = range(0, len(y), ROWS)
        x = np.concatenate([project(features[start : start + ROWS]) for start in starts])
        chosen = np.sort(random.permutation(len(y))[:TUNED])
        c = _choose_c(x[chosen], y[chosen], fold[chosen], exclusive)
        return cls(x, Near(near.numbers, near.cosine, group), fold, exclusive, c)

    def probabilities(self, y: Labels) -> Labels:
        """Returns the probability of each label of each row, [rows, labels]."""
        weigh = self._averaged if self.exclusive else self._in_context
        few = 1 if len(y) <= FEW else None  # rows: threads wait more than they save
        with threadpool_limits(few), warnings.catch_warnings():
            warnings.filterwarnings("ignore", MANY_CLASSES)
            return weigh(self.out_of_fold(y), self.near.votes(y), y)

    def _splits(self, seed: int) -> list[tuple[Numbers, Numbers]]:
        """Returns of each fold the rows that are fitted, and those that are predicted."""
        splits = []
        for number in range(FOLDS):
            others = np.flatnonzero(self.fold != number)
            some = np.random.default_rng([seed, number]).permutation(others)[:FITTED]
            splits.append((np.sort(some), np.flatnonzero(self.fold == number)))
        return splits

    def out_of_fold(self, y: Labels) -> Labels:
        """Returns what logistic regression alone says of each label: the first step."""
        found = np.empty_like(y)
        for fitted, rows in self._splits(0):
            predict = _fit(self.x[fitted], y[fitted], self.exclusive, self.c)
            for start in range(0, len(rows), ROWS):
                block = rows[start : start + ROWS]
                found[block] = predict(self.x[block])
        return found

    def _averaged(self, alone: Labels, votes: Labels, y: Labels) -> Labels:
        """Averages the logarithms of both, with the weights of the least log-loss."""
        logarithms = np.log(alone + LEAST), np.log(votes + FLOOR)

        heard = self.near.heard

        def mixed(share: float) -> Labels:
            weight = share * heard
            both = (1 - weight) * logarithms[0] + weight * logarithms[1]
            return np.asarray(softmax(both, axis=1), np.float32)

        return mixed(min(SHARES, key=lambda share: log_loss(mixed(share), y, True)))

    def _in_context(self, alone: Labels, votes: Labels, y: Labels) -> Labels:
        """Weighs what speaks for a label: probability, votes, and the row's other labels."""
        mean = np.nansum(y, 0) / np.maximum(np.isfinite(y).sum(0), 1)
        centred = np.nan_to_num(y - mean)
        votes = np.where(self.near.heard, votes, mean)
        found, splits = np.empty_like(y), self._splits(1)
        own = logit(np.clip(alone, 1e-6, 1 - 1e-6)), logit(0.9 * votes + 0.05)
        for label in range(y.shape[1]):
            others = _others(centred, label)
            sources = np.column_stack([own[0][:, label], own[1][:, label], centred[:, others]])
            sources = sources.astype(np.float64)
            spread = sources.std(0)
            sources = (sources - sources.mean(0)) / np.where(spread > 0, spread, 1)
            target = y[:, [label]]
            for fitted, rows in splits:
                predict = fit_logistic(
                    sources[fitted], target[fitted], False, CONTEXT_C, ITERATIONS
                )
                found[rows, label] = predict(sources[rows])[:, 0]
        return found


def _choose_c(x: NDArray[np.float64], y: Labels, fold: NDArray[np.int64], exclusive: bool) -> float:
    """Returns the power of ten whose models predict the other folds' labels best."""

    def loss(power: int) -> float:
        losses = []
        for number in np.unique(fold):
            held = fold == number
            predict = _fit(x[~held], y[~held], exclusive, 10.0**power)
            losses.append(log_loss(predict(x[held]), y[held], exclusive))
        return float(np.mean(losses))

    with threadpool_limits(1):
        losses = descend(loss, START)
    return 10.0 ** min(losses, key=lambda power: losses[power])


def _fit(x: NDArray[np.float64], y: Labels, exclusive: bool, c: float) -> Predict:
    return fit_logistic(x, y, True, c, ITERATIONS) if exclusive else _fit_labels(x, y, c)


def _fit_labels(x: NDArray[np.float64], y: Labels, c: float) -> Predict:
    """Fits what `fit_logistic` fits label by label, in one minimisation of the sum of the losses.

    Their sum has its minimum where each of them has, and a step is one product of matrices.
    """
    known, targets = np.isfinite(y), np.nan_to_num(y).astype(np.float64)
    share = targets.sum(0) / np.maximum(known.sum(0), 1)
    share[~known.any(0)] = 0.5
    constant = (share == 0) | (share == 1) | ~known.any(0)
    weight = c * (known & ~constant)

    def loss(flat: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        matrix = flat.reshape(x.shape[1] + 1, -1)
        z = x @ matrix[:-1] + matrix[-1]
        error = weight * (expit(z) - targets)
        slope = np.vstack([x.T @ error + matrix[:-1], error.sum(0)])
        total = (weight * (np.logaddexp(0, z) - targets * z)).sum() + (matrix[:-1] ** 2).sum() / 2
        return float(total), slope.reshape(-1)

    start = np.zeros((x.shape[1] + 1, y.shape[1]))
    start[-1] = logit(np.clip(share, 1e-6, 1 - 1e-6))
    options = {"maxiter": ITERATIONS, "maxcor": 20}
    found = minimize(loss, start.reshape(-1), jac=True, method="L-BFGS-B", options=options)
    matrix = found.x.reshape(start.shape)

    def predict(rows: NDArray[np.float64]) -> Labels:
        probability = expit(rows @ matrix[:-1] + matrix[-1])
        return np.asarray(np.where(constant, share, probability), np.float32)

    return predict


def _others(centred: Labels, label: int) -> Sequence[int]:
    """Returns the other labels, or the 200 that go with a label most."""
    together = np.abs(centred.T @ centred[:, label])
    together[label] = -1
    chosen = np.argsort(-together, kind="stable")[: min(OTHERS, len(together) - 1)]
    return sorted(chosen.tolist())


def suspicion(probability: Labels, y: Labels, exclusive: bool) -> Labels:
    """Returns how improbable each given label is, 0 to 1.

    [rows, 1] for exclusive classes, else [rows, labels], NaN where a label is unknown.
    """
    if exclusive:
        return np.asarray(1 - (probability * y).sum(1, keepdims=True))
    return np.asarray(np.where(y == 1, 1 - probability, np.where(y == 0, probability, np.nan)))
