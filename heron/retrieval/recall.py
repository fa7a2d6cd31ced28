"""Recall against exact search, and the cheapest setting of an index that reaches a target."""

import time
from collections.abc import Callable, Iterable

import numpy as np

from heron.base.artefact import Count, Record
from heron.base.extras import require
from heron.base.sections import Share
from heron.evaluation.knn import Numbers, Vectors, exact_nearest, without_own

faiss = require("faiss", "an index")
MIN_GAIN = 0.002  # two doublings in a row that gain less have reached what the codes allow
NEAR_BEST = 0.005  # accepted loss of recall if the target is out of reach
STEP = 1.15  # the search stops when two settings are within this factor
BLOCK_PAIRS = 4096  # pairs of vectors compared at a time


class RecallPoint(Record):
    """Recall of one setting (nprobe or efSearch), and the milliseconds per query."""

    setting: Count
    recall: Share
    ms: float


class Recall(Record):
    """Recall@k of held-out queries, as `ExactSearch.recall` defines it.

    `value` is the recall of the chosen setting; `reached` says whether it meets the target.
    """

    k: Count
    queries: Count
    target: Share
    value: Share
    reached: bool
    curve: list[RecallPoint]


class ExactSearch:
    """The exact neighbours of held-out queries, to measure another search against.

    Queries are held out of the training of k-means and codes only. They are in the index, as
    every sample is, so searches return k + 1 neighbours, and the query is taken out of them.
    """

    def __init__(
        self,
        take: Callable[[Numbers], Vectors],  # returns the vectors of some samples
        blocks: Iterable[tuple[int, Vectors]],  # all vectors, with the number of each block's first
        query_numbers: Numbers,  # numbers of the samples that are queries
        k: int,  # neighbours per query, at most the number of vectors less one
        metric: int,  # FAISS's number of it
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

    def recall(self, neighbours: Numbers) -> float:
        """Returns recall@k: the share of the exact k nearest that a search has found.

        `neighbours` are its results, [queries, k + 1]. A sample as near as the k-th nearest, within
        float32 rounding, is right as well, as exact search takes any among equal vectors.
        """
        neighbours = neighbours[without_own(neighbours, self.query_numbers)].reshape(-1, self.k)
        correct = (neighbours[:, :, None] == self.numbers[:, None, :]).any(2)
        rows, columns = np.nonzero(~correct & (neighbours >= 0))
        for first in range(0, len(rows), BLOCK_PAIRS):
            row, column = rows[first : first + BLOCK_PAIRS], columns[first : first + BLOCK_PAIRS]
            a = self.queries[row].astype(np.float64)
            b = self.take(neighbours[row, column]).astype(np.float64)
            tolerance = 1e-6 * ((a * a).sum(1) + (b * b).sum(1))
            if self.product:
                correct[row, column] = (a * b).sum(1) >= self.scores[row, -1] - tolerance
            else:
                correct[row, column] = ((a - b) ** 2).sum(1) <= self.scores[row, -1] + tolerance
        return float(correct.mean())

    def tune(
        self,
        search: Callable[[Vectors, int, int], Numbers],  # takes queries, k and a setting
        lowest: int,  # setting to begin with
        highest: int,  # setting to end with
        target: float,  # of recall@k
        coded: bool = False,  # codes bound the recall: it may stop rising before `highest`
    ) -> tuple[int, Recall]:
        """Finds the cheapest setting that reaches the target; else the cheapest near the best.

        The setting is doubled until it reaches the target, then found by bisection.
        """
        curve: dict[int, RecallPoint] = {}

        def reaches(setting: int) -> bool:
            if setting not in curve:
                begin = time.perf_counter()
                neighbours = search(self.queries, self.k + 1, setting)
                ms = 1e3 * (time.perf_counter() - begin) / len(self.query_numbers)
                value = round(self.recall(neighbours), 6)
                curve[setting] = RecallPoint(setting=setting, recall=value, ms=round(ms, 5))
            return curve[setting].recall >= target

        low = high = lowest
        while not reaches(high) and high < highest:
            values = [point.recall for point in curve.values()]
            # Recall rises slowly at first: below a half, a small gain tells nothing.
            if (
                coded
                and len(values) > 2
                and values[-1] >= 0.5
                and values[-1] - values[-3] < MIN_GAIN
            ):
                break
            low, high = high, min(2 * high, highest)
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
