"""Recall against exact search, and the cheapest setting of an index that reaches a target."""

import time
from collections.abc import Callable, Iterable

import faiss
import numpy as np
from numpy.typing import NDArray

from heron.pipeline.evaluation.knn import exact_nearest, without_own
from heron.shards.manifest import Record

Numbers = NDArray[np.int64]
Vectors = NDArray[np.float32]
FLAT = 0.002  # a doubled setting that gains less, twice running, has reached what the codes allow
NEAR = 0.005  # of the best, where the target is out of reach
STEP = 1.15  # settings nearer than this are not told apart


class Point(Record):
    """Recall of one setting (nprobe, efSearch), and the milliseconds that a query took."""

    setting: int
    recall: float
    ms: float


class Recall(Record):
    """Recall@k of held-out queries, as `share` defines it.

    `value` is that of the chosen setting; `reached` says whether it is the target or more.
    """

    k: int
    queries: int
    target: float
    value: float
    reached: bool
    curve: list[Point]


class Truth:
    """What exact search says of held-out queries, and how far another search agrees.

    The vector of a query lies in the index, for every sample must be found: it is taken out of
    both answers, and k + 1 are asked for. "Held out" means out of the sample that trains k-means
    and codes.

    Args:
        take: vectors of some samples, as they are compared.
        blocks: all of them.
        own: numbers of the queries.
        k: neighbours of each.
        metric: of FAISS.
    """

    def __init__(
        self,
        take: Callable[[Numbers], Vectors],
        blocks: Iterable[tuple[int, Vectors]],
        own: Numbers,
        k: int,
        metric: int,
    ) -> None:
        """Search exactly, block by block."""
        self.take, self.own, self.k = take, own, k
        self.sign = 1.0 if faiss.is_similarity_metric(metric) else -1.0
        self.queries = take(own)
        numbered = ((start + np.arange(len(block)), block) for start, block in blocks)
        self.numbers, self.scores = exact_nearest(numbered, self.queries, own, k, metric)

    def share(self, found: Numbers) -> float:
        """Recall@k: the share of the exact k nearest that were found.

        By numbers, as usual; and a sample that is as near as the k-th nearest, within float32's
        rounding, is right as well: among equal vectors exact search takes any.

        Args:
            found: [queries, k + 1], with -1 for none.
        """
        found = found[without_own(found, self.own)].reshape(-1, self.k)
        right = (found[:, :, None] == self.numbers[:, None, :]).any(2)
        rows, columns = np.nonzero(~right & (found >= 0))
        for first in range(0, len(rows), 4096):
            row = rows[first : first + 4096]
            column = columns[first : first + 4096]
            a, b = self.queries[row].astype(np.float64), self.take(found[row, column])
            score = (a * b).sum(1) if self.sign > 0 else ((a - b) ** 2).sum(1)
            slack = 1e-6 * ((a * a).sum(1) + (b.astype(np.float64) ** 2).sum(1))
            least = self.sign * self.scores[row, -1]
            right[row, column] = self.sign * score >= least - slack
        return float(right.mean())

    def tune(
        self,
        search: Callable[[Vectors, int, int], Numbers],
        least: int,
        most: int,
        target: float,
        coded: bool = False,
    ) -> tuple[int, Recall]:
        """The cheapest setting whose recall is the target; else the cheapest near the best.

        Settings are doubled up to the target, then the last interval is halved.

        Args:
            search: numbers [queries, k] for queries, k and a setting.
            least: setting to begin with.
            most: the largest setting.
            target: of recall@k.
            coded: whether codes bound the recall, so that it may stop rising before `most`.
        """
        curve: dict[int, Point] = {}

        def reaches(setting: int) -> bool:
            if setting not in curve:
                begin = time.perf_counter()
                found = search(self.queries, self.k + 1, setting)
                ms = 1e3 * (time.perf_counter() - begin) / len(self.own)
                value = self.share(found)
                curve[setting] = Point(setting=setting, recall=round(value, 6), ms=round(ms, 5))
            return curve[setting].recall >= target

        low, high = least, least
        while not reaches(high) and high < most:
            if coded and _levelled(list(curve.values())):
                break
            low, high = high, min(2 * high, most)
        if reached := reaches(high):
            while high > max(low + 1, low * STEP):
                middle = (low + high) // 2
                low, high = (low, middle) if reaches(middle) else (middle, high)
        else:
            best = max(point.recall for point in curve.values())
            high = min(s for s, point in curve.items() if point.recall >= best - NEAR)
        return high, Recall(
            k=self.k,
            queries=len(self.own),
            target=target,
            value=curve[high].recall,
            reached=reached,
            curve=[curve[setting] for setting in sorted(curve)],
        )


def _levelled(curve: list[Point]) -> bool:
    """Whether the last two doublings gained nothing worth having; recall rises slowly at first."""
    if len(curve) < 3 or curve[-1].recall < 0.5:
        return False
    return curve[-1].recall - curve[-3].recall < FLAT
