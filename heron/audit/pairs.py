"""Which rows have views that do not belong together, and blocks of rows that are out of step."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from heron.audit.labels import FITTED, FOLDS
from heron.audit.planting import Estimate, judge
from heron.evaluation.knn import Numbers, Vectors, exact_nearest, unit_rows

COMPONENTS = 64  # in which two views are compared, at most
RIDGE = 0.1  # added to a view's variances of 1
K = 10  # others that say how near a row is to anything
COMPARED = 50_000  # rows that a row is compared with, at most
PLANTED = 2000  # pairs that are drawn of different rows
LEAST_BLOCK = 3  # rows of a shift
SMALL = 32  # offsets to both sides that are always tried
FREQUENT = 20  # others, which rows share with where their second view belongs
DRAWN = 20  # times that each row draws an offset, to see what chance gives
CHANCE = 2.0  # times the most that chance gave, which a shift must gain
BLOCKED = -1e3  # gain of a row that no block may hold


@dataclass(frozen=True)
class Shift:
    """Rows, in the order of their keys, whose second view belongs to another row.

    From `start` to `stop` - 1 the second view of row i is that of row i + `by`.
    """

    start: int
    stop: int
    by: int


@dataclass(frozen=True)
class Pairs:
    """How well two views of each row go together, in the order of the keys.

    Attributes:
        suspicion: how much nearer both views are to those of others than to each other, [rows].
        cosine: of both views of each row, in their canonical variables, [rows].
        home: the row whose first view is nearest to a row's second, [rows].
        shifts: blocks of rows that are out of step; their rows do not count in `estimate`.
        estimate: how many pairs are wrong, by pairs of different rows.
    """

    suspicion: NDArray[np.float32]
    cosine: NDArray[np.float32]
    home: Numbers
    shifts: list[Shift]
    estimate: Estimate


def score_pairs(first: Vectors, second: Vectors, seed: int = 0) -> Pairs:
    """Scores pairs of views, [rows, width] each, rows in the order of their keys.

    Views of any kinds are made comparable by canonical correlations with a ridge of 0.1, five
    times, each time fitted to four fifths of the rows and used for the last. The suspicion of a
    pair is r(a) + r(b) - 2 cos(a, b), in which r is the mean cosine of a view with the ten other
    views that are nearest to it: CSLS (Conneau et al. 2018, Eq. 2) with its sign turned.
    """
    random = np.random.default_rng(seed)
    fold = random.permutation(len(first)) % FOLDS
    views = _standard(first), _standard(second)
    suspicion, planted = np.empty(len(first), np.float32), []
    home, own = np.empty(len(first), np.int64), np.empty(len(first), np.float32)
    compared = np.sort(random.permutation(len(first))[:COMPARED])
    firsts, seconds = list[Vectors](), np.empty((len(first), 0), np.float32)
    for number in range(FOLDS):
        rows = np.flatnonzero(fold == number)
        fitted = random.permutation(np.flatnonzero(fold != number))[:FITTED]
        maps = _canonical(views[0][fitted], views[1][fitted])
        mapped = [unit_rows(view @ matrix) for view, matrix in zip(views, maps, strict=True)]
        a, b = (view[rows] for view in mapped)
        k = min(K, len(compared) - 1)
        r_a = exact_nearest([(compared, mapped[1][compared])], a, rows, k)[1].mean(1)
        near, cosine = exact_nearest([(compared, mapped[0][compared])], b, rows, k)
        r_b, home[rows], own[rows] = cosine.mean(1), near[:, 0], (a * b).sum(1)
        suspicion[rows] = r_a + r_b - 2 * own[rows]
        i, j = random.integers(len(rows), size=(2, PLANTED // FOLDS))
        i, j = i[i != j], j[i != j]
        planted.append(r_a[i] + r_b[j] - 2 * (a[i] * b[j]).sum(1))
        firsts.append(mapped[0])
        seconds = (
            mapped[1] if number == 0 else np.where((fold == number)[:, None], mapped[1], seconds)
        )
    similarity = _Similarity(firsts, seconds, fold)
    shifts = find_shifts(similarity, own, suspicion, home, random)
    alone = np.ones(len(first), bool)
    for shift in shifts:
        alone[shift.start : shift.stop] = False
    estimate = judge([np.concatenate(planted).astype(np.float32)], suspicion[alone])
    return Pairs(suspicion, own, home, shifts, estimate)


@dataclass(frozen=True)
class _Similarity:
    """The cosine of a row's second view with another's first, by the map of the row's fold."""

    firsts: list[Vectors]  # all rows by the map of each fold
    seconds: Vectors  # each row by the map of its own
    fold: NDArray[np.int64]

    def at(self, rows: Numbers, others: Numbers) -> NDArray[np.float32]:
        """Returns the cosines of pairs, [rows]."""
        found = np.empty(len(rows), np.float32)
        for number, first in enumerate(self.firsts):
            part = np.flatnonzero(self.fold[rows] == number)
            found[part] = np.einsum("rd,rd->r", self.seconds[rows[part]], first[others[part]])
        return found


def find_shifts(
    similarity: _Similarity,
    own: NDArray[np.float32],
    suspicion: NDArray[np.float32],
    home: Numbers,
    random: np.random.Generator,
) -> list[Shift]:
    """Finds blocks of rows whose second view is, by one offset, that of another row.

    What a row gains by an offset is how much nearer its second view is to the first view of the row
    that is so far away than to its own. A block is where the gains of an offset have the greatest
    sum (Kadane's maximal segment). It is a shift if that is twice what a block gains where each row
    draws an offset of its own, near or far, 20 times each, and a row of it gains at least half of
    what one in step would lose. Tried are all offsets up to 32, and the 20 that most suspicious
    rows have to their home.
    """
    count, shifts, free = len(own), list[Shift](), np.ones(len(own), bool)

    def best(by: int) -> tuple[float, int, int]:
        inside = np.arange(max(0, -by), min(count, count - by))
        gain = np.full(count, BLOCKED)
        gain[inside] = similarity.at(inside, inside + by) - own[inside]
        total, start, stop = _best_segment(np.where(free, gain, BLOCKED))
        others = np.delete(gain, np.s_[start:stop])
        others = others[others > BLOCKED]
        lost = -others.mean() if len(others) else 0.0  # by a row that is in step
        return (total, start, stop) if total > (stop - start) * lost / 2 > 0 else (0.0, 0, 0)

    def chance(most: int) -> float:
        rows = np.arange(count)
        steps = random.integers(1, most + 1, count) * random.choice((-1, 1), count)
        gain = similarity.at(rows, (rows + steps) % count) - own
        return _best_segment(gain.astype(np.float64))[0]

    drawn = [chance(most) for most in (SMALL, count - 1) for _ in range(DRAWN)]
    least = CHANCE * max(1e-3, *drawn)
    rows = np.flatnonzero((suspicion > 0) & (home != np.arange(count)))
    common = Counter((home[rows] - rows).tolist()).most_common(FREQUENT)
    small = [by for by in range(-SMALL, SMALL + 1) if by and abs(by) < count]
    tried = dict.fromkeys([*(by for by, times in common if times >= LEAST_BLOCK), *small])
    while tried:
        gains = {by: best(by) for by in tried}
        by = max(gains, key=lambda one: gains[one][0])
        gain, start, stop = gains[by]
        if gain < least or stop - start < LEAST_BLOCK:
            break
        shifts.append(Shift(start, stop, by))
        free[start:stop] = False
        tried = dict.fromkeys(one for one, (gain, *_) in gains.items() if gain >= least)
    return sorted(shifts, key=lambda shift: shift.start)


def _best_segment(gain: NDArray[np.float64]) -> tuple[float, int, int]:
    """Returns the greatest sum of consecutive gains, the first of them and the one after."""
    sums = np.concatenate([[0.0], np.cumsum(gain)])
    lowest = np.minimum.accumulate(sums)
    stop = int(np.argmax(sums - lowest))
    return float(sums[stop] - lowest[stop]), int(np.argmin(sums[: stop + 1])), stop


def _standard(view: Vectors) -> Vectors:
    spread = view.std(0, dtype=np.float64)
    return np.asarray((view - view.mean(0)) / np.where(spread > 0, spread, 1), np.float32)


def _canonical(a: Vectors, b: Vectors) -> tuple[Vectors, Vectors]:
    """Returns maps of both views to their canonical variables, each times the root of its r."""
    a_white, b_white = _whitening(a), _whitening(b)
    u, r, v = np.linalg.svd(a_white.T @ (a.astype(np.float64).T @ b / len(a)) @ b_white)
    width, root = min(COMPONENTS, len(r)), np.sqrt(r)
    maps = a_white @ (u[:, :width] * root[:width]), b_white @ (v[:width].T * root[:width])
    return maps[0].astype(np.float32), maps[1].astype(np.float32)


def _whitening(view: Vectors) -> NDArray[np.float64]:
    """Returns the inverse root of a view's covariance, with the ridge."""
    covariance = view.astype(np.float64).T @ view / len(view) + RIDGE * np.eye(view.shape[1])
    values, vectors = np.linalg.eigh(covariance)
    return np.asarray((vectors / np.sqrt(values)) @ vectors.T)
