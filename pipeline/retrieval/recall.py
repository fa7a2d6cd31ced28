"""Recall against exact search, and the cheapest setting of an index that reaches a target."""

import time
from collections.abc import Callable, Iterable

import numpy as np

from heron.pipeline.config.extras import require
from heron.pipeline.config.sections import Share
from heron.pipeline.evaluation.knn import Numbers, Vectors, exact_nearest, without_own
from heron.shards.artefact import Count, Record

faiss = require("faiss", "an index")
GAIN = 0.002  # a doubled setting that gains less, twice running, has reached what the codes allow
NEAR_BEST = 0.005  # where the target is out of reach
STEP = 1.15  # settings nearer than this are not told apart
PAIRS = 4096  # of vectors that are compared at a time


class RecallPoint(Record):
    """Recall of one setting (nprobe, efSearch), and the milliseconds that a query took."""

    setting: Count
    recall: Share
    ms: float


class Recall(Record):
    """Recall@k of held-out queries, as `ExactSearch.recall` defines it.

    `value` is that of the chosen setting; `reached` says whether it is the target or more.
    """

    k: Count
    queries: Count
    target: Share
    value: Share
    reached: bool
    curve: list[RecallPoint]


class ExactSearch:
    """The exact neighbours of held-out queries, and how far another search agrees.

    The vector of a query lies in the index, for every sample must be found: it is taken out of
    both answers, and k + 1 are asked for. "Held out" is of what trains k-means and codes.
    """

    def __init__(
        self,
        take: Callable[[Numbers], Vectors],  # the vectors of some samples, as they are compared
        blocks: Iterable[tuple[int, Vectors]],  # all of them, with the number of each block's first
        query_numbers: Numbers,  # of samples
        k: int,  # neighbours of each, at most the number of vectors less one
        metric: int,  # of FAISS
        gpu: bool = False,
    ) -> None:
        """Searches block by block."""
        self.take, self.query_numbers, self.k = take, query_numbers, k
        self.product = faiss.is_similarity_metric(metric)
        self.queries = take(query_numbers)
        numbered = ((start + np.arange(len(block)), block) for start, block in blocks)
        # Of the k nearest of each query; scores are inner products or squared distances.
        self.numbers, self.scores = exact_nearest(
            numbered, self.queries, query_numbers, k, metric, gpu
        )

    def recall(self, found: Numbers) -> float:
        """Returns recall@k: the share of the exact k nearest that are in `found` [queries, k + 1].

        By numbers, as usual; and a sample that is as near as the k-th nearest, within float32's
        rounding, is right as well: among equal vectors exact search takes any.
        """
        found = found[without_own(found, self.query_numbers)].reshape(-1, self.k)
        right = (found[:, :, None] == self.numbers[:, None, :]).any(2)
        rows, columns = np.nonzero(~right & (found >= 0))
        for first in range(0, len(rows), PAIRS):
            row, column = rows[first : first + PAIRS], columns[first : first + PAIRS]
            a = self.queries[row].astype(np.float64)
            b = self.take(found[row, column]).astype(np.float64)
            slack = 1e-6 * ((a * a).sum(1) + (b * b).sum(1))
            if self.product:
                right[row, column] = (a * b).sum(1) >= self.scores[row, -1] - slack
            else:
                right[row, column] = ((a - b) ** 2).sum(1) <= self.scores[row, -1] + slack
        return float(right.mean())

    def tune(
        self,
        search: Callable[[Vectors, int, int], Numbers],  # of queries, k and a setting
        least: int,  # setting to begin with
        most: int,  # the largest setting
        target: float,  # of recall@k
        coded: bool = False,  # codes bound the recall, so that it may stop rising before `most`
    ) -> tuple[int, Recall]:
        """Finds the cheapest setting whose recall is the target; else the cheapest near the best.

        Settings are doubled up to the target, then the last interval is halved.
        """
        curve: dict[int, RecallPoint] = {}

        def reaches(setting: int) -> bool:
            if setting not in curve:
                begin = time.perf_counter()
                found = search(self.queries, self.k + 1, setting)
                ms = 1e3 * (time.perf_counter() - begin) / len(self.query_numbers)
                value = round(self.recall(found), 6)
                curve[setting] = RecallPoint(setting=setting, recall=value, ms=round(ms, 5))
            return curve[setting].recall >= target

        low = high = least
        while not reaches(high) and high < most:
            values = [point.recall for point in curve.values()]
            # Recall rises slowly at first, so a small gain tells nothing below a half.
            if coded and len(values) > 2 and values[-1] >= 0.5 and values[-1] - values[-3] < GAIN:
                break
            low, high = high, min(2 * high, most)
        if reached := reaches(high):
            while high > max(low + 1, low * STEP):
                middle = (low + high) // 2
                low, high = (low, middle) if reaches(middle) else (middle, high)
        else:
            best = max(point.recall for point in curve.values())
            high = min(s for s, point in curve.items() if point.recall >= best - NEAR_BEST)
        return high, Recall(
            k=self.k,
            queries=len(self.query_numbers),
            target=target,
            value=curve[high].recall,
            reached=reached,
            curve=[curve[setting] for setting in sorted(curve)],
        )
