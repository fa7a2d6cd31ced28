"""Defines false and hard negatives for mining, the report, `heron query` and the web page.

An anchor is compared with the *others*: all other samples that have labels.

- "Near" refers to the cosine of embeddings, "far" to labels.
- The *label difference* of two samples is the number of labels in which they differ, and their
  *label distance* the share of the labels: HeroCon's dist(y_i, y_j) / c (Eq. 7). For exclusive
  classes both are 0 or 1.
- A *false negative* has the anchor's labels, or *close* ones: up to the largest distance within
  which at most 1 % of random pairs lie. An unsupervised loss wrongly pushes it away. With few or
  exclusive labels, close means equal; with many labels, hardly any two samples agree in all.
- A *hard negative* is near, and its label distance is at least the median over the anchor's others,
  and above 0: it shares no more labels with the anchor than a random sample. Half of a random batch
  is as far, however many labels there are and however rare they are. With exclusive classes, every
  other class is far.
- An *easy negative* is as far but not near. It teaches little, and nothing searches for it.

The report and queries call the k nearest near; mining considers eight times as many as it keeps.
If the others are too many, the median is over a sample of them, which each caller states.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

RELATIONS = "false", "close", "neither", "hard"  # of a near sample to its anchor
ANCHORS, OTHERS = 2_000, 20_000  # samples drawn to represent all when labels of pairs are compared
MAX_CLOSE_SHARE = 0.01  # share of random pairs whose labels are close, at most
BLOCK_PAIRS = 2**22  # pairs of samples in memory at a time
BLOCK_LABELS = 2**24  # labels compared at a time

Numbers = NDArray[np.int64]


def label_difference(
    targets: NDArray[Any], first: Numbers, second: Numbers, exclusive: bool
) -> Numbers:
    """Returns the number of labels in which samples differ; 0 or 1 if classes are exclusive.

    `targets` are 0/1, [samples, labels]; `first` and `second` are numbers of samples, of shapes
    that broadcast.
    """
    a, b = np.broadcast_arrays(first, second)
    out = np.empty(a.shape, np.int64)
    flat, size = out.reshape(-1), max(1, BLOCK_LABELS // max(1, targets.shape[1]))
    for start in range(0, a.size, size):
        block = slice(start, start + size)
        differ = targets[a.flat[block]] != targets[b.flat[block]]
        flat[block] = differ.any(1) if exclusive else differ.sum(1)
    return out


def hard_difference(counts: Numbers) -> Numbers:
    """Returns the least label difference of a hard negative of each anchor, [...].

    `counts` [..., differences] says how many others of an anchor differ in 0, 1, ... labels. If
    none differs, the result is the largest difference.
    """
    above_median = np.cumsum(counts, -1) > counts.sum(-1, keepdims=True) / 2
    far = above_median & (counts > 0)
    far[..., 0] = False
    return np.asarray(np.where(far.any(-1), far.argmax(-1), counts.shape[-1] - 1))


def close_difference(counts: Numbers) -> int:
    """Returns the largest label difference of close labels; `counts` is of random pairs."""
    share = np.cumsum(counts) / counts.sum()
    return max(0, int(np.searchsorted(share, MAX_CLOSE_SHARE, side="right")) - 1)


def relation(difference: Numbers, close: int, hard: Numbers | int) -> Numbers:
    """Returns the index in `RELATIONS` of near samples; `hard` is above `close` and broadcasts."""
    return (difference > 0).astype(np.int64) + (difference > close) + (difference >= hard)


def row_sums(cells: Numbers, count: int, values: NDArray[Any] | None = None) -> NDArray[Any]:
    """Returns each row's sums of values (or counts) by cell, 0 to `count` - 1: [rows, count]."""
    flat = (cells + count * np.arange(len(cells))[:, None]).reshape(-1)
    weights = None if values is None else values.reshape(-1)
    return np.bincount(flat, weights, len(cells) * count).reshape(-1, count)


@dataclass(frozen=True)
class LabelPairs:
    """All pairs of anchors and others, a block of anchors at a time; never all in memory."""

    targets: NDArray[Any]  # 0/1, [samples, labels]
    exclusive: bool  # whether a sample has one class
    anchors: Numbers  # numbers of samples, [anchors]
    others: Numbers  # sorted numbers of samples that represent all, [others]; may include anchors

    @property
    def max_difference(self) -> int:
        """The label difference at the label distance 1; one more marks the anchor itself."""
        return 1 if self.exclusive else self.targets.shape[1]

    def blocks(self) -> Iterator[slice]:
        """Yields slices of anchors whose pairs fit into memory."""
        size = max(1, BLOCK_PAIRS // max(len(self.others), 1))
        for start in range(0, len(self.anchors), size):
            yield slice(start, min(start + size, len(self.anchors)))

    def differences(self, block: slice) -> Numbers:
        """Returns the label differences of a block of anchors, [anchors of the block, others]."""
        anchors = self.targets[self.anchors[block]].astype(np.float32)
        others = self._other_targets
        differ = anchors.sum(1)[:, None] + others.sum(1) - 2 * (anchors @ others.T)
        differ = np.minimum(np.rint(differ).astype(np.int64), self.max_difference)
        differ[self.anchors[block][:, None] == self.others] = self.max_difference + 1
        return np.asarray(differ)

    @cached_property
    def _other_targets(self) -> NDArray[np.float32]:
        return np.asarray(self.targets[self.others], np.float32)

    def counts(self, block: slice) -> Numbers:
        """Returns how many others differ in 0, 1, ... labels, [anchors, differences]."""
        return row_sums(self.differences(block), self.max_difference + 2)[:, :-1]


def draw_pairs(
    targets: NDArray[Any],
    known: NDArray[np.bool_],
    exclusive: bool,
    anchors: int = ANCHORS,
    seed: int = 0,
) -> LabelPairs:
    """Returns pairs of randomly drawn anchors and `OTHERS`; 0 anchors: all labelled samples."""
    labelled, generator = np.flatnonzero(known), np.random.default_rng(seed)
    drawn = [
        np.sort(generator.choice(labelled, count, replace=False))
        if count < len(labelled)
        else labelled
        for count in (anchors or len(labelled), OTHERS)
    ]
    return LabelPairs(targets, exclusive, *drawn)


def close_label_difference(targets: NDArray[Any], known: NDArray[np.bool_], exclusive: bool) -> int:
    """Returns the largest label difference of close labels among samples.

    `targets` are 0/1, [samples, labels]; `known` says which samples have labels. The draw of pairs
    is fixed, so that queries, the page and the report agree.
    """
    pairs = draw_pairs(targets, known, exclusive)
    counts = sum((pairs.counts(block).sum(0) for block in pairs.blocks()), np.int64(0))
    return close_difference(np.asarray(counts)) if np.any(counts) else 0
