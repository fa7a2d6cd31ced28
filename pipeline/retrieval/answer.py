"""What was asked of an index, which samples it may find, and what was found."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from heron.pipeline.config.errors import RetrievalError
from heron.pipeline.negatives.definition import hard_difference
from heron.pipeline.retrieval.filters import passing
from heron.pipeline.retrieval.samples import Samples

Flags = NDArray[np.bool_]
Relation = Literal["neighbours", "hard", "false"]
RELATIONS: tuple[Relation, ...] = get_args(Relation)


@dataclass(frozen=True)
class Query:
    """What was asked for."""

    number: int | None  # of the sample; None where it is none of the index
    key: str  # of the sample; of a file or a vector, its name
    labels: list[str]  # of the sample, by name; none of what is no sample
    vector: str  # where its vector comes from, in words
    examples: list[int] = field(default_factory=list)  # of several samples, asked for as one
    predicted: dict[str, float] = field(default_factory=dict)  # labels' share among the nearest
    voters: int = 0  # nearest labelled samples that labels are predicted from

    @property
    def own(self) -> list[int]:
        """The numbers of the samples that are asked for."""
        return self.examples if self.number is None else [self.number]


@dataclass(frozen=True)
class Hit:
    """One sample that was found."""

    number: int  # of the sample in the index
    key: str
    score: float  # cosine or inner product, larger is nearer; Euclidean distance, smaller is nearer
    labels: list[str]  # by name
    label_distance: float | None  # `Samples.label_distance` to the query; None where one has none


@dataclass(frozen=True)
class Answer:
    """What was found, nearest first."""

    query: Query  # none of the hits
    hits: list[Hit]  # at most k, fewer only where fewer are allowed
    k: int  # how many were asked for
    allowed: int  # samples to choose from: all but the query that pass the filter and the relation
    where: str  # the filter, or ""
    relation: Relation  # to the query
    far: float | None  # label distance from which on a neighbour is hard; None: another relation
    metric: str  # of the scores
    close: float | None = None  # label distance up to which labels are close; None: as `far`
    instead: bool = False  # no sample has close labels: the hits are the nearest in label space

    def plain(self) -> dict[str, Any]:
        """Returns the answer as plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Allowed:
    """Which samples may be found."""

    mask: Flags | None  # [N]; None: all
    count: int  # of them
    far: float | None
    close: float | None
    apart: NDArray[np.float32] | None = None  # label distances, [N], where none is close


def allowed_samples(
    samples: Samples,
    query: Query,
    where: str,
    relation: Relation,
    far: float | None,
    among: Flags | None,
) -> Allowed:
    """Returns which samples are allowed, never the query, and what is far or close.

    See `Retriever` for what is asked.

    Raises:
        RetrievalError: no such filter, relation or distance; nothing is allowed; or the relation
            needs labels that the query has not.
    """
    masks: dict[str, Flags] = {}  # by what they say
    if where.strip():
        masks[f"pass {where!r}"] = passing(where, samples)
    if among is not None:
        masks["lie in the outline"] = among.copy()
    for mask in masks.values():
        mask[query.own] = False
    if relation not in RELATIONS:
        raise RetrievalError(f"unknown relation '{relation}'; expected {', '.join(RELATIONS)}")
    if far is not None and (relation != "hard" or not 0 < far <= 1):
        raise RetrievalError(
            f"far is {far} with relation '{relation}'; expected above 0 and at most 1, a label "
            "distance, with relation 'hard'"
        )
    close = apart = None
    if relation != "neighbours":
        apart = _label_distances(samples, query, relation)
    if apart is not None and relation == "hard":
        far = _far(apart, samples) if far is None else far
        masks[f"have a label distance of {far:.4g} or more (relation 'hard')"] = apart >= far
    elif apart is not None:
        close = samples.close_distance
        if masks or not np.isnan(apart).all():
            every = np.logical_and.reduce([~np.isnan(apart), *masks.values()])
            if every.any() and not (apart[every] <= close).any():
                return Allowed(every, int(every.sum()), None, close, apart)
        masks[f"have a label distance of {close:.4g} or less (relation 'false')"] = apart <= close
    if not masks:
        return Allowed(None, 0, None, None)
    allowed = np.logical_and.reduce(list(masks.values()))
    if not allowed.any():
        counts = (f"{int(mask.sum()):,} others {what}" for what, mask in masks.items())
        raise RetrievalError(
            f"'{query.key}' has no other sample to choose from: {', '.join(counts)}; expected "
            "one at least; ask for less"
        )
    return Allowed(allowed, int(allowed.sum()), far, close)


def _label_distances(samples: Samples, query: Query, relation: Relation) -> NDArray[np.float32]:
    """Returns the label distances to a query, [N]; NaN for itself and what has no labels."""
    number = query.number
    if number is None or not samples.known[number]:
        what = "is no sample, and" if number is None else "is a sample that"
        raise RetrievalError(
            f"'{query.key}' {what} has no labels; relation '{relation}' needs a query with "
            "labels; ask for neighbours, or by the key of another sample"
        )
    apart = samples.label_distance(np.array([number]), np.arange(len(samples)))
    apart[number] = np.nan  # which compares as false
    return apart


def _far(apart: NDArray[np.float32], samples: Samples) -> float:
    """Returns the least label distance of a hard negative: see `pipeline.negatives.definition`."""
    largest = samples.largest
    differ = np.rint(apart[~np.isnan(apart)] * largest).astype(np.int64)
    hard = hard_difference(np.bincount(differ, minlength=largest + 1))
    far = min(max(int(hard), samples.close + 1), largest)
    return float(np.float32(far / largest))  # as the distances are
