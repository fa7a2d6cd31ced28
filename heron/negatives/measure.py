"""Measures the labels of near samples: false and hard negatives, similarity, confusion."""

import math
from functools import partial
from typing import Any

import numpy as np

from heron.evaluation.knn import Vectors
from heron.evaluation.negatives import BLOCK_PAIRS, RELATIONS, LabelPairs, Numbers, relation
from heron.negatives.estimates import (
    BIN_CENTERS,
    BINS,
    Estimate,
    bins,
    bootstrap,
    more_similar,
    quantiles,
)
from heron.negatives.neighbours import NearPairs, measure_blocks

SHARES = np.array([0.05, 0.25, 0.5, 0.75, 0.95])  # quantiles of a cosine
MERGED_BINS = 20  # bins of a histogram that are drawn as one
MIN_EXPECTED = 10  # random pairs with two labels swapped that a comparison needs, at least
MAX_LISTED = 12  # pairs of labels


def measure_labels(near: NearPairs) -> dict[str, Any]:
    """Compares near pairs with random ones; keys are those of `negatives.json` (see `docs`)."""
    pairs, k = near.pairs, near.question.k
    is_hard = near.relation[:, :k] == RELATIONS.index("hard")
    histograms = _histograms(near)
    histograms["hard"] = np.bincount(bins(near.cosine[:, :k][is_hard]), minlength=BINS)
    similarity = {name: _describe(counts) for name, counts in histograms.items()}
    hard_median, positives = similarity["hard"]["quantiles"][0.5], histograms["close"]
    return {
        "thresholds": {
            "close": near.close / pairs.max_difference,
            "far": float(np.median(near.hard)) / pairs.max_difference,
        },
        "random_pairs_by_distance": {
            "distance": np.arange(pairs.max_difference + 1) / pairs.max_difference,
            "pairs": near.counts.sum(0),
        },
        "false_negatives": {"k": near.ks} | _rates(near),
        "hard_share": float(is_hard.mean()),
        "similarity": similarity,
        "closer_than_random": more_similar(histograms["close"], histograms["others"]),
        "positives_below_hard": positives[hard_median > BIN_CENTERS].sum()
        / max(positives.sum(), 1),
        "confusion": _confusion(near, near.numbers[:, :k]),
    }


def _histograms(near: NearPairs) -> dict[str, Numbers]:
    """Returns histograms of the cosine of anchors and others, by how their labels relate."""
    function, layers = partial(_histogram, near.close), [near.question.layer]
    counts = measure_blocks(near.executor, near.embeddings, near.pairs, function, layers)
    same, close, far, _ = np.sum(counts, 0).reshape(4, BINS)
    return {"same": same, "close": same + close, "others": far}


def _histogram(
    close: int, pairs: LabelPairs, block: slice, anchors: list[Vectors], others: list[Vectors]
) -> Numbers:
    """Returns the histogram of a block by relation, [4 * BINS]."""
    group = relation(pairs.differences(block), close, pairs.max_difference + 1)
    cells = BINS * group + bins(anchors[0][0] @ others[0][0].T)
    return np.bincount(cells.reshape(-1), minlength=4 * BINS)


def _describe(counts: Numbers) -> dict[str, Any]:
    return {
        "pairs": int(counts.sum()),
        "mean": float(np.average(BIN_CENTERS, weights=counts)) if counts.any() else math.nan,
        "quantiles": dict(zip(SHARES.tolist(), quantiles(counts, SHARES).tolist(), strict=True)),
        "histogram": counts.reshape(-1, MERGED_BINS).sum(1),
    }


def _rates(near: NearPairs) -> dict[str, dict[str, Estimate]]:
    """Returns rates of false negatives and mean label distances, of the nearest and of others."""
    differences, seed = np.arange(near.pairs.max_difference + 1), near.question.seed
    measures = {  # value of each label difference
        "same": differences == 0,
        "close": differences <= near.close,
        "distance": differences / differences[-1],
    }
    ks = np.array(near.ks)
    neighbours = np.tile(ks.astype(np.float64), (len(near.counts), 1))
    rates = {}
    for name, value in measures.items():
        sums = np.cumsum(value[near.difference], axis=1, dtype=np.float64)[:, ks - 1]
        random_sums = near.counts @ value.astype(np.float64)
        rates[name] = {
            "near": bootstrap(sums, neighbours, seed),
            "random": bootstrap(random_sums, near.counts.sum(1), seed),
        }
    return rates


def _confusion(near: NearPairs, numbers: Numbers) -> dict[str, Any]:
    """Returns which labels neighbours lack, and which they have instead.

    `precision` [labels] is the share of the k nearest of the anchors with a label that also have
    it, `random` the same for random others. `swapped` [a, b] counts pairs whose anchor has a and
    not b while the neighbour has b and not a (for classes, the diagonal counts pairs that agree),
    and `expected` is its value for as many random pairs.
    """
    pairs, targets = near.pairs, near.pairs.targets
    anchors, others = (targets[n].astype(np.float32) for n in (pairs.anchors, pairs.others))
    k, labels = numbers.shape[1], targets.shape[1]
    shared, swapped = np.zeros((len(anchors), labels), np.float32), np.zeros((labels, labels))
    size = max(1, BLOCK_PAIRS // (k * labels))
    for start in range(0, len(anchors), size):
        block = slice(start, start + size)
        y_anchor, y_near = anchors[block, None], targets[numbers[block]].astype(np.float32)
        shared[block] = (y_anchor * y_near).sum(1)
        swapped += (y_anchor * (1 - y_near)).reshape(-1, labels).T @ (
            y_near * (1 - y_anchor)
        ).reshape(-1, labels)
    is_other = np.isin(pairs.anchors, pairs.others)  # then the anchor itself does not count
    other_counts = len(others) - is_other
    share = (others.sum(0) - anchors * is_other[:, None]) / other_counts[:, None]
    shared_by_chance, count = (anchors * share).sum(0, dtype=np.float64), anchors.sum(0)
    expected = ((anchors.T @ (1 - anchors)) * (others.T @ (1 - others)).T).astype(np.float64)
    expected *= numbers.size / other_counts.sum()
    if pairs.exclusive:
        np.fill_diagonal(swapped, shared.sum(0))
        np.fill_diagonal(expected, shared_by_chance * k)
    return {
        "precision": bootstrap(shared, anchors * k, near.question.seed),
        "random": np.divide(shared_by_chance, count, out=np.full(labels, np.nan), where=count > 0),
        "swapped": np.rint(swapped).astype(np.int64),
        "expected": expected,
        "worst": _worst(near, swapped, expected),
    }


def _worst(near: NearPairs, swapped: Any, expected: Any) -> list[dict[str, Any]]:
    """Returns the pairs of labels that are swapped most often, relative to chance."""
    names, comparable = near.embeddings.samples.names, expected >= MIN_EXPECTED
    if near.pairs.exclusive:
        np.fill_diagonal(comparable, False)
    ratio = np.divide(swapped, expected, out=np.full(expected.shape, -1.0), where=comparable)
    order = np.argsort(-ratio, axis=None, kind="stable")[:MAX_LISTED].tolist()
    return [
        {
            "anchor": names[a],
            "neighbour": names[b],
            "pairs": round(swapped[a, b]),
            "expected": expected[a, b],
        }
        for a, b in (divmod(flat_index, len(names)) for flat_index in order)
        if comparable[a, b]
    ]
