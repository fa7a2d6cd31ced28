"""False and hard negatives, defined once: for mining, the report, `heron query` and the web page.

An anchor is compared with the *others*: all other samples that have labels.

- Near is a matter of the cosine of embeddings; far is a matter of labels.
- The *label difference* of two samples is the number of labels in which they differ, and their
  *label distance* the share of the labels: HeroCon's dist(y_i, y_j) / c (Eq. 7). Where classes
  exclude each other, both are 0 or 1.
- A *false negative* has the anchor's labels, or *close* ones: up to the largest distance that at
  most 1 % of random pairs have. An unsupervised loss pushes it away wrongly. Where labels are few
  or exclude each other, close means the same; where they are many, hardly two samples agree in all.
- A *hard negative* is near, and its label distance is the median of the anchor's others or more,
  and above 0: it shares no more labels with the anchor than a sample that is picked blindly. Half
  of a random batch is as far, however many labels there are and however rare they are. Where
  classes exclude each other, every other class is far.
- An *easy negative* is as far and is not near. It teaches little; nothing looks for it.

The report and queries call the k nearest near; mining looks at eight times as many as it keeps.
Where the others are too many, the median is over a sample of them, which each caller states.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

RELATIONS = "false", "close", "neither", "hard"  # of a near sample to its anchor
ANCHORS, OTHERS = 2_000, 20_000  # samples that stand for all where labels of pairs are compared
RARE = 0.01  # share of random pairs whose labels are close, at most
CELLS = 2**22  # pairs of samples that are in memory at a time
LABELS = 2**24  # labels that are compared at a time

Numbers = NDArray[np.int64]


def label_difference(
    targets: NDArray[Any], these: Numbers, those: Numbers, exclusive: bool
) -> Numbers:
    """Returns in how many labels samples differ; 0 or 1 where classes exclude each other.

    `targets` are 0/1, [samples, labels]; `these`, `those` numbers of samples; shapes broadcast.
    """
    a, b = np.broadcast_arrays(these, those)
    out = np.empty(a.shape, np.int64)
    flat, size = out.reshape(-1), max(1, LABELS // max(1, targets.shape[1]))
    for start in range(0, a.size, size):
        block = slice(start, start + size)
        differ = targets[a.flat[block]] != targets[b.flat[block]]
        flat[block] = differ.any(1) if exclusive else differ.sum(1)
    return out


def hard_difference(counts: Numbers) -> Numbers:
    """Returns the least label difference of a hard negative of each anchor, [...].

    `counts` [..., differences] says how many others of an anchor differ in 0, 1, ... labels. Where
    none differs, the answer is the largest difference.
    """
    median = np.cumsum(counts, -1) > counts.sum(-1, keepdims=True) / 2
    far = median & (counts > 0)
    far[..., 0] = False
    return np.asarray(np.where(far.any(-1), far.argmax(-1), counts.shape[-1] - 1))


def close_difference(counts: Numbers) -> int:
    """Returns the largest label difference of close labels; `counts` is of random pairs."""
    share = np.cumsum(counts) / counts.sum()
    return max(0, int(np.searchsorted(share, RARE, side="right")) - 1)


def relation(difference: Numbers, close: int, hard: Numbers | int) -> Numbers:
    """Returns the place in `RELATIONS` of near samples; `hard` is above `close` and broadcasts."""
    return (difference > 0).astype(np.int64) + (difference > close) + (difference >= hard)


def row_sums(cells: Numbers, count: int, values: NDArray[Any] | None = None) -> NDArray[Any]:
    """Returns sums of values (or counts) by cell 0 to `count` - 1, row by row: [rows, count]."""
    flat = (cells + count * np.arange(len(cells))[:, None]).reshape(-1)
    weights = None if values is None else values.reshape(-1)
    return np.bincount(flat, weights, len(cells) * count).reshape(-1, count)


@dataclass(frozen=True)
class LabelPairs:
    """All pairs of anchors and others, some anchors at a time; never all in memory."""

    targets: NDArray[Any]  # 0/1, [samples, labels]
    exclusive: bool  # whether a sample has one class
    anchors: Numbers  # of samples, [anchors]
    others: Numbers  # of samples that stand for all, in order, [others]; anchors may be among them

    @property
    def largest(self) -> int:
        """The label difference at the label distance 1; one more stands for the anchor itself."""
        return 1 if self.exclusive else self.targets.shape[1]

    def blocks(self) -> Iterator[slice]:
        """Yields anchors, so many at a time that their pairs fit into memory."""
        size = max(1, CELLS // max(len(self.others), 1))
        for start in range(0, len(self.anchors), size):
            yield slice(start, min(start + size, len(self.anchors)))

    def differences(self, block: slice) -> Numbers:
        """Returns the label differences of some anchors, [anchors of the block, others]."""
        anchors, others = self.targets[self.anchors[block]].astype(np.float32), self._others
        differ = anchors.sum(1)[:, None] + others.sum(1) - 2 * (anchors @ others.T)
        differ = np.minimum(np.rint(differ).astype(np.int64), self.largest)
        differ[self.anchors[block][:, None] == self.others] = self.largest + 1
        return np.asarray(differ)

    @cached_property
    def _others(self) -> NDArray[np.float32]:
        return np.asarray(self.targets[self.others], np.float32)

    def counts(self, block: slice) -> Numbers:
        """Returns how many others differ in 0, 1, ... labels, [anchors, differences]."""
        return row_sums(self.differences(block), self.largest + 2)[:, :-1]


def draw_pairs(
    targets: NDArray[Any],
    known: NDArray[np.bool_],
    exclusive: bool,
    anchors: int = ANCHORS,
    seed: int = 0,
) -> LabelPairs:
    """Returns the pairs of some drawn anchors and `OTHERS`; 0 anchors: all samples with labels."""
    labelled, generator = np.flatnonzero(known), np.random.default_rng(seed)
    drawn = [
        np.sort(generator.choice(labelled, count, replace=False))
        if count < len(labelled)
        else labelled
        for count in (anchors or len(labelled), OTHERS)
    ]
    return LabelPairs(targets, exclusive, *drawn)


def close_in(targets: NDArray[Any], known: NDArray[np.bool_], exclusive: bool) -> int:
    """Returns the largest label difference of close labels among samples, whoever asks.

    `targets` are 0/1, [samples, labels]; `known` says which samples have labels. The pairs are of
    one fixed draw, so that queries, the page and the report mean the same.
    """
    pairs = draw_pairs(targets, known, exclusive)
    counts = sum((pairs.counts(block).sum(0) for block in pairs.blocks()), np.int64(0))
    return close_difference(np.asarray(counts)) if np.any(counts) else 0
