"""The nearest samples of anchors, exact or from an index, and how their labels relate."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from heron.base.errors import RetrievalError
from heron.base.workers import ALONE, Executor, Result
from heron.evaluation.knn import Vectors, without_own
from heron.evaluation.negatives import (
    RELATIONS,
    LabelPairs,
    Numbers,
    draw_pairs,
    hard_difference,
    label_difference,
    relation,
)
from heron.retrieval.embeddings import Embeddings, Layer
from heron.retrieval.exact import Block, map_in_order, nearest_of, unit_vectors

if TYPE_CHECKING:
    from heron.retrieval.index import Index

KS = 1, 2, 5, 10, 20, 50
EXAMPLES = 12  # pairs shown


@dataclass(frozen=True)
class Question:
    """What is measured."""

    layer: Layer = "hidden"  # whose vectors' cosine says what is near
    k: int = 10  # neighbours that count for hard negatives and confused labels
    anchors: int = 2000  # drawn from the samples with labels; 0: all of these
    seed: int = 0  # of all random draws


@dataclass(frozen=True)
class NearPairs:
    """Anchors with their nearest neighbours; see `heron.evaluation.negatives` for the terms."""

    question: Question
    embeddings: Embeddings
    pairs: LabelPairs  # of the anchors and the others that represent all
    counts: Numbers  # how many others differ in 0, 1, ... labels, [anchors, differences]
    close: int  # the largest label difference of close labels; 0: only equal ones are close
    hard: Numbers  # the least label difference of hard negatives, above `close`, [anchors]
    ks: tuple[int, ...]  # the numbers of nearest neighbours to compute rates for
    numbers: Numbers  # the nearest neighbours, [anchors, greatest k]
    cosine: Vectors  # of each with its anchor
    difference: Numbers  # of their labels
    notes: list[str]  # what was left out, and why
    executor: Executor  # of all that is measured block by block

    @property
    def relation(self) -> Numbers:
        """The index in `RELATIONS` of each neighbour."""
        return relation(self.difference, self.close, self.hard[:, None])

    def examples(self, name: str) -> list[tuple[int, int]]:
        """Returns rows and columns of the most similar pairs of a relation, no sample twice.

        Close labels count as `false`.
        """
        k = self.question.k
        names = ["false", "close"] if name == "false" else [name]
        matches = np.isin(self.relation[:, :k], [RELATIONS.index(name) for name in names])
        flat_indices = np.flatnonzero(matches)
        flat_indices = flat_indices[np.argsort(-self.cosine[:, :k].reshape(-1)[flat_indices])]
        chosen: list[tuple[int, int]] = []
        used: set[int] = set()
        for flat_index in flat_indices.tolist():
            row, column = divmod(flat_index, k)
            pair = {int(self.pairs.anchors[row]), int(self.numbers[row, column])}
            if not pair & used and len(chosen) < EXAMPLES:
                used |= pair
                chosen.append((row, column))
        return chosen


@dataclass(frozen=True)
class _Measure:
    """Measures the pairs of a block of anchors and the others, in any process."""

    function: Callable[..., Any]
    embeddings: Embeddings
    unlabelled: LabelPairs  # without labels
    layers: Sequence[Layer]
    views: int

    def __call__(self, block: Block) -> Any:
        rows = slice(*block)
        anchors = self._vectors(self._pairs.anchors[rows])
        return self.function(self._pairs, rows, anchors, self._others)

    def _vectors(self, numbers: Numbers) -> list[Vectors]:
        return [unit_vectors(self.embeddings, x, numbers, self.views) for x in self.layers]

    @cached_property  # a process keeps these from block to block, and those of the pairs
    def _others(self) -> list[Vectors]:
        return self._vectors(self._pairs.others)

    @cached_property
    def _pairs(self) -> LabelPairs:
        return replace(self.unlabelled, targets=self.embeddings.samples.targets)


def measure_blocks(
    executor: Executor,
    embeddings: Embeddings,
    pairs: LabelPairs,
    function: Callable[[LabelPairs, slice, list[Vectors], list[Vectors]], Result],
    layers: Sequence[Layer] = (),
    views: int = 1,
) -> list[Result]:
    """Returns what a function, which can be pickled, gives for each block of anchors.

    It gets the pairs, the block, and of each layer the unit vectors of its anchors and of the
    others: see `unit_vectors`. Blocks are items of an executor, and results in their order.
    """
    unlabelled = replace(pairs, targets=pairs.targets[:0])
    job = _Measure(function, embeddings, unlabelled, layers, views)
    blocks = [Block(block.start, block.stop) for block in pairs.blocks()]
    return map_in_order(executor, job, blocks)


def _counts(pairs: LabelPairs, block: slice, *_: Any) -> Numbers:
    return pairs.counts(block)


def find_neighbours(
    embeddings: Embeddings,
    question: Question,
    index: "Index | None" = None,
    executor: Executor = ALONE,
) -> NearPairs:
    """Finds the nearest labelled samples of randomly drawn anchors, exactly or with an index.

    Blocks of anchors are items of an executor, which reads the embeddings where it works. Raises a
    RetrievalError if there are no labels or all are the same, k is too large, the index is of other
    embeddings or another layer, or vectors have no direction.
    """
    samples = embeddings.samples
    labelled = np.flatnonzero(samples.known) if samples.names else np.empty(0, np.int64)
    notes = _check_question(embeddings, question, labelled)
    pairs = draw_pairs(
        samples.targets, samples.known, samples.exclusive, question.anchors, question.seed
    )
    anchors, others = pairs.anchors, pairs.others
    if len(others) < len(labelled):
        notes.append(
            f"random pairs and sums over negatives use {len(others):,} samples, a random subset "
            f"of {len(labelled):,}"
        )
    counts = np.concatenate(measure_blocks(executor, embeddings, pairs, _counts))
    if not counts[:, 1:].any():
        raise RetrievalError(
            f"all labelled samples in {embeddings.where} have the same labels, so none is a "
            "negative of another; embed more of the data set"
        )
    close = samples.close_difference
    ks = tuple(k for k in sorted({*KS, question.k}) if k < len(labelled))
    if len(ks) < len({*KS, question.k}):
        notes.append(f"rates stop at k = {ks[-1]}: only {len(labelled):,} samples have labels")
    if index is None:
        numbers, cosine = nearest_of(
            embeddings, question.layer, anchors, ks[-1], samples.known, executor
        )
    else:
        numbers, cosine = _of_index(index, embeddings, question.layer, anchors, ks[-1])
    return NearPairs(
        question=question,
        embeddings=embeddings,
        pairs=pairs,
        counts=counts,
        close=close,
        hard=np.maximum(hard_difference(counts), close + 1),
        ks=ks,
        numbers=numbers,
        cosine=cosine,
        difference=label_difference(pairs.targets, anchors[:, None], numbers, pairs.exclusive),
        notes=notes,
        executor=executor,
    )


def _check_question(embeddings: Embeddings, question: Question, labelled: Numbers) -> list[str]:
    """Refuses a question without an answer; returns notes on what is answered only in part."""
    count = len(labelled)
    embeddings.layer(question.layer)
    if count < 2:
        raise RetrievalError(
            f"{embeddings.where}: {count} of {len(embeddings):,} samples have labels"
            f"{' and the views' * bool(embeddings.compares)}, and false negatives need at least "
            "two; embed a data set with labels"
        )
    if not 1 <= question.k < count:
        raise RetrievalError(
            f"--k must be 1 to {count - 1:,}, because {count:,} samples have labels, got "
            f"{question.k}"
        )
    if question.anchors < 0:
        raise RetrievalError(
            f"anchors must be at least 1, or 0 for all samples, got {question.anchors}"
        )
    notes = []
    if (unlabelled := len(embeddings) - count) > 0:
        lacking = " or without one of the views" * bool(embeddings.compares)
        notes.append(
            f"{unlabelled:,} samples without labels{lacking} are excluded, also as neighbours"
        )
    if question.anchors > count:
        notes.append(f"only {count:,} samples have labels, fewer than {question.anchors:,} anchors")
    return notes


def _of_index(
    index: "Index", embeddings: Embeddings, layer: Layer, anchors: Numbers, k: int
) -> tuple[Numbers, Vectors]:
    """Returns an index's neighbours in its order; cosines are computed from the embeddings."""
    if embeddings.compares:
        raise RetrievalError(
            f"the index compares whole vectors, not those of {embeddings.compares}; remove "
            "--index to search exactly"
        )
    index.check(embeddings)
    if index.manifest.layer != layer:
        raise RetrievalError(
            f"the index has the layer '{index.manifest.layer}', not '{layer}'; pass --layer "
            f"{index.manifest.layer}, or remove --index to search exactly"
        )
    samples = embeddings.samples
    allowed = None if samples.known.all() else np.asarray(samples.known)
    near = index.search(embeddings.take(layer, anchors), k + 1, allowed=allowed).numbers
    near = near[without_own(near, anchors)].reshape(len(anchors), k)
    if (near < 0).any():
        key = samples.key(int(anchors[(near < 0).any(1)][0]))
        raise RetrievalError(
            f"the index found fewer than {k} neighbours of '{key}', and the report needs that "
            "many; remove --index to search exactly"
        )
    queries, cosine = unit_vectors(embeddings, layer, anchors)[0], np.empty(near.shape, np.float32)
    for column in range(k):  # column by column: all vectors may not fit into memory
        vectors = unit_vectors(embeddings, layer, near[:, column])[0]
        cosine[:, column] = np.einsum("nd,nd->n", queries, vectors)
    return near, cosine
