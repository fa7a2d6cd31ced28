"""Near samples and what their labels say: false negatives, hard negatives, confused labels.

An unsupervised loss pushes an anchor from every other sample. Those with the anchor's labels are
false negatives, pushed wrongly; those near it with labels far from its own are hard negatives,
which teach most.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from heron.pipeline.config.errors import RetrievalError
from heron.pipeline.negatives.estimates import Estimate, bootstrap
from heron.pipeline.negatives.histograms import BINS, bins
from heron.pipeline.retrieval.embeddings import Embeddings, Layer
from heron.pipeline.retrieval.nearest import nearest, unit
from heron.pipeline.retrieval.samples import Samples

if TYPE_CHECKING:
    from heron.pipeline.retrieval.index import Index

KS = 1, 2, 5, 10, 20, 50
OTHERS = 20_000  # samples that stand for all where anchors are compared with random ones
CELLS = 2**22  # pairs that are in memory at a time
RARE = 0.01  # share of random pairs that count as close in label space, at most
EXAMPLES = 12  # pairs and labels that stand for all
EXPECTED = 10  # random pairs that two labels are swapped in, at least, to compare with
RELATIONS = "false", "close", "neither", "hard"


@dataclass(frozen=True)
class Pairs:
    """Anchors against others, some anchors at a time; never as a whole.

    A pair has a level: in how many labels the two differ, or 0 and 1 where classes exclude each
    other; `scale` times `Samples.label_distance`. An anchor with itself has the level `own`.

    Attributes:
        samples: of both.
        anchors: their numbers, [anchors]; all have labels.
        others: samples that stand for all with labels, [others].
    """

    samples: Samples
    anchors: NDArray[np.int64]
    others: NDArray[np.int64]

    @property
    def scale(self) -> int:
        """The level of the label distance 1."""
        return 1 if self.samples.exclusive else len(self.samples.names)

    @property
    def own(self) -> int:
        """The level of an anchor with itself."""
        return self.scale + 1

    def blocks(self) -> Iterator[slice]:
        """Anchors by number, so many that their pairs fit into memory."""
        size = max(1, CELLS // max(len(self.others), 1))
        for first in range(0, len(self.anchors), size):
            yield slice(first, min(first + size, len(self.anchors)))

    def levels(self, part: slice) -> NDArray[np.int64]:
        """The levels of some anchors with all others, [anchors of part, others]."""
        mine = self.samples.targets[self.anchors[part]].astype(np.float32)
        theirs = self._others
        both = mine @ theirs.T
        differ = np.rint(mine.sum(1)[:, None] + theirs.sum(1) - 2 * both).astype(np.int64)
        if self.samples.exclusive:
            np.minimum(differ, 1, out=differ)
        differ[self.anchors[part][:, None] == self.others] = self.own
        return np.asarray(differ)

    @cached_property
    def _others(self) -> NDArray[np.float32]:
        return np.asarray(self.samples.targets[self.others], np.float32)

    def draw(self, count: int, seed: int) -> NDArray[np.int64]:
        """For each anchor places of random others that are not itself, [anchors, count]."""
        place = np.full(len(self.samples), len(self.others))
        place[self.others] = np.arange(len(self.others))
        shape = len(self.anchors), count
        drawn = np.random.default_rng(seed).integers(len(self.others) - 1, size=shape)
        return np.asarray(drawn + (drawn >= place[self.anchors][:, None]))


def sums(level: NDArray[np.int64], count: int, values: NDArray[Any] | None = None) -> NDArray[Any]:
    """Sum values [rows, columns] (or count) by level, row by row: [rows, count]."""
    rows = len(level)
    cells = (level + count * np.arange(rows)[:, None]).reshape(-1)
    weights = None if values is None else values.reshape(-1)
    return np.bincount(cells, weights, rows * count).reshape(rows, count)


@dataclass(frozen=True)
class Question:
    """What is measured.

    Attributes:
        layer: in which neighbours are near, by cosine.
        k: neighbours that are looked at for hard negatives and confused labels.
        anchors: how many, drawn from the samples with labels; 0: all of these.
        seed: of every draw.
    """

    layer: Layer = "hidden"
    k: int = 10
    anchors: int = 2000
    seed: int = 0


@dataclass(frozen=True)
class Confusion:
    """Which labels neighbours lack, and which they have instead.

    Attributes:
        precision: share of the k nearest of anchors with a label that have it too, [names].
        base: the same share of random others, [names].
        swapped: pairs whose anchor has a and not b, and whose neighbour has b and not a, [a, b];
            with classes the diagonal holds the pairs that agree.
        expected: of as many random pairs, [a, b].
    """

    precision: Estimate
    base: NDArray[np.float64]
    swapped: NDArray[np.int64]
    expected: NDArray[np.float64]


@dataclass(frozen=True)
class Negatives:
    """What `measure` found.

    Attributes:
        question: that was asked.
        pairs: the anchors and the others that stand for all.
        close: level up to which labels are close: 0, the same labels, or a little more.
        far: level from which labels are far.
        levels: how many pairs of anchors and others are at each level, [scale + 1].
        ks: how many nearest neighbours the rates are of.
        rates: by `same`, `close` and `distance`: share of false negatives among the k nearest and
            their mean label distance, [ks], and the same of random others, [].
        numbers: the nearest neighbours, [anchors, greatest k].
        cosine: their similarity.
        level: their level.
        histograms: pairs by cosine in `BINS` from -1 to 1, of `same`, `close`, `others`, `hard`.
        confusion: of labels, among the k nearest.
        notes: what was left out, and why.
    """

    question: Question
    pairs: Pairs
    close: int
    far: int
    levels: NDArray[np.int64]
    ks: tuple[int, ...]
    rates: dict[str, tuple[Estimate, Estimate]]
    numbers: NDArray[np.int64]
    cosine: NDArray[np.float32]
    level: NDArray[np.int64]
    histograms: dict[str, NDArray[np.int64]]
    confusion: Confusion
    notes: list[str]

    @property
    def relation(self) -> NDArray[np.int64]:
        """Of each neighbour its number in `RELATIONS`."""
        bounds = [self.level == 0, self.level <= self.close, self.level < self.far]
        return np.select(bounds, [0, 1, 2], 3)

    @property
    def hard_share(self) -> float:
        """The share of hard negatives among the k nearest."""
        return float((self.level[:, : self.question.k] >= self.far).mean())


def measure(embeddings: Embeddings, question: Question, index: "Index | None" = None) -> Negatives:
    """Compare anchors with their nearest neighbours and with random others.

    Labels are close up to the largest distance that at most 1 % of random pairs are within, and
    the same labels always are: with forty labels hardly two samples agree in all. They are far
    from the median of random pairs on: such a neighbour shares no more labels with the anchor than
    a sample that is picked blindly. Where classes exclude each other any other class is far.

    Args:
        embeddings: of samples, some of which have labels; the others are left out.
        question: what to measure.
        index: of the same embeddings, to take the neighbours from; None: exact ones.

    Raises:
        RetrievalError: there are no labels or all are the same, k is too large, the index is of
            other embeddings or another layer, or vectors have no direction.
    """
    samples, seed = embeddings.samples, question.seed
    labelled = np.flatnonzero(samples.known) if samples.names else np.empty(0, np.int64)
    notes = _check(embeddings, question, labelled)
    generator = np.random.default_rng(seed)
    anchors = _some(labelled, question.anchors or len(labelled), generator)
    pairs = Pairs(samples, anchors, _some(labelled, OTHERS, generator))
    if len(pairs.others) < len(labelled):
        notes.append(
            f"random pairs and sums over negatives are of {len(pairs.others):,} samples, drawn "
            f"from {len(labelled):,}"
        )
    found = [sums(pairs.levels(part), pairs.own + 1)[:, :-1] for part in pairs.blocks()]
    levels = np.concatenate(found)
    close, far = thresholds(levels.sum(0), embeddings)
    ks = tuple(k for k in sorted({*KS, question.k}) if k < len(labelled))
    if len(ks) < len({*KS, question.k}):
        notes.append(f"rates are of k up to {ks[-1]}: {len(labelled):,} samples have labels")
    numbers, cosine = nearest(embeddings, question.layer, anchors, ks[-1], index)
    distance = samples.label_distance(anchors[:, None], numbers)
    level = np.rint(distance * pairs.scale).astype(np.int64)
    histograms = _similarity(embeddings, question.layer, pairs, close)
    hard = cosine[:, : question.k][level[:, : question.k] >= far]
    histograms["hard"] = np.bincount(bins(hard), minlength=BINS)
    rates = _rates(levels, level, ks, close, seed)
    confusion = _confusion(pairs, numbers[:, : question.k], seed)
    return Negatives(
        question, pairs, close, far, levels.sum(0), ks, rates, numbers, cosine, level, histograms,
        confusion, notes,
    )  # fmt: skip


def thresholds(levels: NDArray[np.int64], embeddings: Embeddings) -> tuple[int, int]:
    """The levels up to which labels are close and from which they are far: see `measure`.

    Args:
        levels: random pairs at each level.
        embeddings: named in the error.

    Raises:
        RetrievalError: all pairs are at level 0.
    """
    if not levels[1:].any():
        raise RetrievalError(
            f"all samples with labels in {embeddings.folder} have the same ones; expected two "
            "classes or more, to tell negatives from positives; embed more of the data set"
        )
    share = np.cumsum(levels) / levels.sum()
    close = max(0, int(np.searchsorted(share, RARE, side="right")) - 1)
    beyond = close + 1 + int(np.flatnonzero(levels[close + 1 :])[0])
    return close, max(beyond, int(np.searchsorted(share, 0.5)))


def examples(found: Negatives, relation: str) -> list[tuple[int, int]]:
    """The most similar pairs of a relation as rows and columns of `numbers`, no sample twice.

    `false` takes close labels where no two are the same.
    """
    wanted = found.relation[:, : found.question.k] == RELATIONS.index(relation)
    if relation == "false":
        wanted |= found.level[:, : found.question.k] <= found.close
    places = np.flatnonzero(wanted)
    places = places[np.argsort(-found.cosine[:, : found.question.k].reshape(-1)[places])]
    chosen: list[tuple[int, int]] = []
    used: set[int] = set()
    for place in places.tolist():
        row, column = divmod(place, wanted.shape[1])
        two = {int(found.pairs.anchors[row]), int(found.numbers[row, column])}
        if not two & used:
            used |= two
            chosen.append((row, column))
        if len(chosen) == EXAMPLES:
            break
    return chosen


def worst(found: Negatives) -> list[tuple[int, int, int, float]]:
    """Labels a, b that are swapped most above chance: with the pairs, and the expected number."""
    confusion = found.confusion
    enough = confusion.expected >= EXPECTED
    if found.pairs.samples.exclusive:
        np.fill_diagonal(enough, False)
    ratio = np.where(enough, confusion.swapped / np.where(enough, confusion.expected, 1), -1)
    order = np.argsort(-ratio, axis=None, kind="stable")[:EXAMPLES].tolist()
    pairs = [divmod(place, len(ratio)) for place in order]
    return [
        (a, b, int(confusion.swapped[a, b]), float(confusion.expected[a, b]))
        for a, b in pairs
        if enough[a, b]
    ]


def _check(embeddings: Embeddings, question: Question, labelled: NDArray[np.int64]) -> list[str]:
    """Refuse a question that has no answer; what of it cannot be answered as asked."""
    count = len(labelled)
    embeddings.layer(question.layer)
    if count < 2:
        raise RetrievalError(
            f"{embeddings.folder}: {count} of {len(embeddings):,} samples have labels; expected "
            "two at least, to tell false negatives; embed a data set with labels"
        )
    if not 1 <= question.k < count:
        raise RetrievalError(
            f"k is {question.k}; expected 1 to {count - 1:,}, since {count:,} samples have "
            "labels; give another --k"
        )
    if question.anchors < 0:
        raise RetrievalError(
            f"{question.anchors} anchors; expected a number of them, or 0 for all samples"
        )
    notes = []
    if (without := len(embeddings) - count) > 0:
        notes.append(f"{without:,} samples without labels are left out, as neighbours too")
    if question.anchors > count:
        notes.append(f"{question.anchors:,} anchors were asked for; {count:,} samples have labels")
    return notes


def _some(
    numbers: NDArray[np.int64], count: int, generator: np.random.Generator
) -> NDArray[np.int64]:
    if count >= len(numbers):
        return numbers
    return np.sort(generator.choice(numbers, count, replace=False))


def _similarity(
    embeddings: Embeddings, layer: Layer, pairs: Pairs, close: int
) -> dict[str, NDArray[np.int64]]:
    """Cosines of anchors and others by their labels, as histograms."""
    samples = pairs.samples
    mine, theirs = (
        unit(embeddings.take(layer, numbers), samples, numbers)
        for numbers in (pairs.anchors, pairs.others)
    )
    tier, total = tiers(pairs, close), np.zeros(4 * BINS, np.int64)
    for part in pairs.blocks():
        cells = BINS * tier[pairs.levels(part)] + bins(mine[part] @ theirs.T)
        total += np.bincount(cells.reshape(-1), minlength=4 * BINS)
    same, near, others, _ = total.reshape(4, BINS)
    return {"same": same, "close": same + near, "others": others}


def tiers(pairs: Pairs, close: int) -> NDArray[np.int64]:
    """Of every level: 0 the same labels, 1 close ones, 2 others, 3 the anchor itself."""
    level = np.arange(pairs.own + 1)
    return np.select([level == 0, level <= close, level < pairs.own], [0, 1, 2], 3)


def _rates(
    levels: NDArray[np.int64], level: NDArray[np.int64], ks: tuple[int, ...], close: int, seed: int
) -> dict[str, tuple[Estimate, Estimate]]:
    """Shares of false negatives and mean label distances, of the nearest and of random others."""
    scale = levels.shape[1] - 1
    by_level = np.arange(scale + 1)
    measures = {"same": by_level == 0, "close": by_level <= close, "distance": by_level / scale}
    size = np.tile(np.array(ks, np.float64), (len(level), 1))
    rates = {}
    for name, value in measures.items():
        near = np.cumsum(value[level], axis=1, dtype=np.float64)[:, np.array(ks) - 1]
        chance = bootstrap(levels @ value.astype(np.float64), levels.sum(1), seed)
        rates[name] = bootstrap(near, size, seed), chance
    return rates


def _confusion(pairs: Pairs, numbers: NDArray[np.int64], seed: int) -> Confusion:
    """Which labels the nearest neighbours lack, and which they have instead."""
    targets, names = pairs.samples.targets, len(pairs.samples.names)
    mine = targets[pairs.anchors].astype(np.float32)
    theirs = targets[pairs.others].astype(np.float32)
    kept = np.zeros((len(mine), names), np.float32)
    swapped = np.zeros((names, names))
    size = max(1, CELLS // (numbers.shape[1] * names))
    for first in range(0, len(mine), size):
        part = slice(first, first + size)
        y, near = mine[part, None], targets[numbers[part]].astype(np.float32)
        kept[part] = (y * near).sum(1)
        swapped += ((y * (1 - near)).reshape(-1, names)).T @ (near * (1 - y)).reshape(-1, names)
    there = np.isin(pairs.anchors, pairs.others)
    others = len(theirs) - there  # how many, without the anchor itself
    count = mine.sum(0)
    base = (mine * ((theirs.sum(0) - mine * there[:, None]) / others[:, None])).sum(0)
    chance = ((mine.T @ (1 - mine)) * (theirs.T @ (1 - theirs)).T) * (numbers.size / others.sum())
    if pairs.samples.exclusive:
        np.fill_diagonal(swapped, kept.sum(0))
        np.fill_diagonal(chance, base * numbers.shape[1])
    return Confusion(
        bootstrap(kept, mine * numbers.shape[1], seed),
        np.divide(base, count, out=np.full(names, np.nan), where=count > 0),
        np.rint(swapped).astype(np.int64),
        chance.astype(np.float64),
    )
