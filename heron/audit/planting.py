"""How many labels are wrong, and how many of them are found: by faults that are planted.

Labels are changed in a copy, evenly and in the way that labels look wrong; how high these rank says
how many others are there, and which share of them a list holds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import betabinom

from heron.audit.labels import LabelModel, Labels, suspicion
from heron.evaluation.knn import Numbers

PLANTED = 200  # faults of each of the two ways, at least, where the rows allow it
SHARE = 0.01  # of the labels that is changed at once, so that the models stay as they are
ROUNDS = 10  # of planting, at most
MOST = 2000  # changed at once
EVEN = 0.1  # of the second faults, drawn as the first are
TOP = 0.2  # of the planted faults that must rank above a place, for it to tell how many there are


@dataclass(frozen=True)
class Estimate:
    """What the planted faults say.

    Attributes:
        errors: how many labels are wrong: the least number that explains, at every place of the
            list, how many labels rank above it.
        planted: how many faults were planted.
        found: how many of them rank among the first `errors` labels.
        low, high: the 95 % interval of the share of wrong labels among these: both the planted
            faults and the wrong labels are few.
    """

    errors: int
    planted: int
    found: int
    low: float
    high: float

    @property
    def recall(self) -> float:
        """The share of the planted faults that was found."""
        return self.found / self.planted if self.planted else float("nan")


def estimate(
    model: LabelModel, y: Labels, probability: Labels, given: Labels, seed: int
) -> Estimate:
    """Plants faults in two ways: evenly over all labels, and of the kinds that labels look wrong.

    A kind is a class that is taken for another, or a label's 0 or 1 that is taken for the other.
    Nobody knows which way the wrong labels went, so the interval holds both. `given` is the
    suspicion of each label: see `labels.suspicion`. A class is changed the more often, the less
    suspicious it is: where many are wrong, a changed wrong one is no fault like the others.
    """
    trust = 1 - np.nan_to_num(given.reshape(-1), nan=1.0) if model.exclusive else None
    kinds = Kinds(y, model.exclusive, trust)
    even = kinds.even()
    scores = [_plant(model, y, kinds, even, given, [seed, 0])]
    count = max(len(scores[0]), 50)
    top = np.argsort(-np.nan_to_num(given.reshape(-1), nan=-1.0), kind="stable")[:count]
    top = top[np.isfinite(given.reshape(-1)[top])]
    seen = np.bincount(kinds.suspected(probability, top), minlength=len(even))
    pattern = np.where(even > 0, seen, 0)
    if pattern.sum():
        pattern = (1 - EVEN) * pattern / pattern.sum() + EVEN * even / even.sum()
        scores.append(_plant(model, y, kinds, pattern, given, [seed, 1]))
    return judge(scores, given[np.isfinite(given)], model.exclusive)


def _plant(
    model: LabelModel,
    y: Labels,
    kinds: "Kinds",
    pattern: NDArray[np.float64],
    given: Labels,
    seed: Sequence[int],
) -> NDArray[np.float32]:
    """Returns the suspicion of each planted fault."""
    count = min(MOST, max(1, int(SHARE * np.isfinite(given).sum())))
    scores = []
    for number in range(min(ROUNDS, -(-PLANTED // count))):
        changed, at = kinds.plant(pattern, count, np.random.default_rng([*seed, number]))
        found = suspicion(model.probabilities(changed), changed, model.exclusive)
        scores.append(found.reshape(-1)[at])
    return np.concatenate(scores)


def judge(
    scores: Sequence[NDArray[np.float32]], given: NDArray[np.float32], apart: bool = False
) -> Estimate:
    """Compares the suspicion of faults, planted in some ways, with that of all given labels.

    With `apart` the ways are not mixed, and the one that explains most says how many are wrong.
    """
    high = np.concatenate(scores).astype(np.float64)
    every = -np.sort(-given.astype(np.float64))
    errors = max(_least(some, every) for some in (scores if apart else [high]))
    if not errors:
        return Estimate(0, len(high), 0, 0.0, 1.0)
    least, ends = every[errors - 1], []
    for some in scores:
        found = int((some >= least).sum())
        odds = found + 0.5, len(some) - found + 0.5
        ends.append(betabinom.ppf([0.025, 0.975], errors, *odds) / errors)
    low, up = float(min(e[0] for e in ends)), float(max(e[1] for e in ends))
    return Estimate(errors, len(high), int((high >= least).sum()), low, up)


def _least(planted: NDArray[Any], every: NDArray[np.float64]) -> int:
    """Returns how many wrong labels explain, at each place of the list, those that are there."""
    high = -np.sort(-planted.astype(np.float64))
    places = np.arange(max(1, int(TOP * len(high))), len(high) + 1)
    above = np.searchsorted(-every, -high[places - 1], side="right")
    return int(min(len(every), (above * len(high) / places).min()))


@dataclass(frozen=True)
class Kinds:
    """The kinds of faults: what a label is, and what it is taken for.

    Of exclusive classes, kind `true * classes + given`; else `2 * label + true`. `trust` says how
    readily each label is changed (None: all alike).
    """

    y: Labels
    exclusive: bool
    trust: NDArray[np.float32] | None = None

    @property
    def labels(self) -> int:
        """How many labels there are."""
        return int(self.y.shape[1])

    @cached_property
    def _values(self) -> Numbers:
        """The kind that each known label would be if it were changed; of a class, its number."""
        if self.exclusive:
            return np.asarray(self.y.argmax(1))
        return (2 * np.arange(self.labels) + np.nan_to_num(self.y).astype(np.int64)).reshape(-1)

    @cached_property
    def _known(self) -> NDArray[np.bool_]:
        return np.isfinite(self.y[:, 0] if self.exclusive else self.y.reshape(-1))

    @cached_property
    def _counts(self) -> Numbers:
        most = self.labels * (1 if self.exclusive else 2)
        return np.bincount(self._values[self._known], minlength=most)

    def even(self) -> NDArray[np.float64]:
        """Returns the pattern that changes each label with equal probability, [kinds]."""
        if not self.exclusive:
            return self._counts.astype(np.float64)
        there = np.repeat(self._counts[:, None], self.labels, 1) / max(1, self.labels - 1)
        np.fill_diagonal(there, 0)
        return there.reshape(-1)

    def suspected(self, probability: Labels, cells: Numbers) -> Numbers:
        """Returns the kind of some labels, if they are wrong and truly what is likely."""
        if not self.exclusive:
            return np.asarray(self._values[cells] ^ 1)
        likely = np.where(self.y[cells] == 1, -1, probability[cells]).argmax(1)
        return np.asarray(likely * self.labels + self._values[cells])

    def plant(
        self, pattern: NDArray[np.float64], count: int, random: np.random.Generator
    ) -> tuple[Labels, Numbers]:
        """Changes labels of a copy; returns it, and which labels they are."""
        changed, shares = self.y.copy(), pattern
        if self.exclusive:
            shares = pattern.reshape(self.labels, self.labels)
            pattern = shares.sum(1)
        odds = np.where(self._known, (pattern / np.maximum(self._counts, 1))[self._values], 0)
        if self.trust is not None and (odds * self.trust).any():
            odds = odds * self.trust
        at = random.choice(len(odds), min(count, int((odds > 0).sum())), False, odds / odds.sum())
        kind = self._values[at]
        if not self.exclusive:
            changed.reshape(-1)[at] = 1 - changed.reshape(-1)[at]
            return changed, at
        taken = [random.choice(self.labels, p=shares[a] / shares[a].sum()) for a in kind.tolist()]
        changed[at] = 0
        changed[at, taken] = 1
        return changed, at
