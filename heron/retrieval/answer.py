"""Answers a query: which samples may be hits, and the nearest of them."""

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from heron.base.errors import RetrievalError
from heron.evaluation.negatives import hard_difference
from heron.retrieval.filters import filter_mask
from heron.retrieval.samples import Samples

if TYPE_CHECKING:  # loads FAISS, which `heron --help` does without
    from heron.retrieval.index import Index
    from heron.retrieval.some_views import SomeViews

Flags = NDArray[np.bool_]
Relation = Literal["neighbours", "hard", "false"]
RELATIONS: tuple[Relation, ...] = get_args(Relation)


@dataclass(frozen=True)
class Query:
    """What to find neighbours of."""

    number: int | None  # of the sample; None if the query is no single sample of the index
    key: str  # of the sample; of a file or a vector, its name
    labels: list[str]  # of the sample, by name; empty if it is no sample
    vector: str  # where its vector comes from, in words
    examples: list[int] = field(default_factory=list)  # the samples whose mean is the query
    predicted: dict[str, float] = field(default_factory=dict)  # each label's share of the voters
    voters: int = 0  # nearest labelled samples that labels are predicted from
    compares: str = ""  # which views are compared with which, in words; "": all with the same

    @property
    def sample_numbers(self) -> list[int]:
        """The numbers of the samples that make up the query."""
        return self.examples if self.number is None else [self.number]


@dataclass(frozen=True)
class Hit:
    """A sample of the answer."""

    number: int  # of the sample in the index
    key: str
    score: float  # cosine or inner product, larger is nearer; Euclidean distance, smaller is nearer
    labels: list[str]  # by name
    label_distance: float | None  # `Samples.label_distance` to the query; None if one lacks labels


@dataclass(frozen=True)
class Answer:
    """The hits of a query, nearest first."""

    query: Query  # never among the hits
    hits: list[Hit]  # at most k, fewer only if fewer are allowed
    k: int  # how many hits were requested
    allowed: int  # candidates: samples but the query that pass the filter and have the relation
    where: str  # the filter, or ""
    relation: Relation  # to the query
    far: float | None  # least label distance of a hard negative; None for other relations
    metric: str  # of the scores
    close: float | None = None  # largest label distance of close labels; None unless `false`
    instead: bool = False  # no sample has close labels: the hits are the nearest in label space

    def plain(self) -> dict[str, Any]:
        """Returns the answer as plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Allowed:
    """The samples that may be hits."""

    mask: Flags | None  # [N]; None: all
    count: int  # of the mask; 0 without one
    far: float | None  # see `Answer`
    close: float | None  # see `Answer`
    label_distances: NDArray[np.float32] | None = None  # to the query, [N], if none is close


def allowed_samples(
    samples: Samples,
    query: Query,
    where: str,
    relation: Relation,
    far: float | None,
    among: Flags | None,
) -> Allowed:
    """Returns which samples are allowed, never the query, and what counts as far or close.

    `Retriever` describes the arguments. Raises a RetrievalError for an unknown filter, relation or
    distance, if nothing is allowed, or if the relation needs labels and the query has none.
    """
    masks: dict[str, Flags] = {}  # by what they select, in words
    if where.strip():
        masks[f"pass {where!r}"] = filter_mask(where, samples)
    if among is not None:
        masks["are inside the outline"] = among.copy()
    for mask in masks.values():
        mask[query.sample_numbers] = False
    if relation not in RELATIONS:
        raise RetrievalError(f"relation must be one of {', '.join(RELATIONS)}, got '{relation}'")
    if far is not None and (relation != "hard" or not 0 < far <= 1):
        raise RetrievalError(
            f"far must be a label distance above 0 and at most 1, with relation 'hard', got {far} "
            f"with relation '{relation}'"
        )
    close = distances = None
    if relation != "neighbours":
        distances = _label_distances(samples, query, relation)
    if distances is not None and relation == "hard":
        far = _far(distances, samples) if far is None else far
        masks[f"have a label distance of {far:.4g} or more (relation 'hard')"] = distances >= far
    elif distances is not None:
        close = samples.close_distance
        if masks or not np.isnan(distances).all():
            candidates = np.logical_and.reduce([~np.isnan(distances), *masks.values()])
            if candidates.any() and not (distances[candidates] <= close).any():
                return Allowed(candidates, int(candidates.sum()), None, close, distances)
        masks[f"have a label distance of {close:.4g} or less (relation 'false')"] = (
            distances <= close
        )
    if not masks:
        return Allowed(None, 0, None, None)
    allowed = np.logical_and.reduce(list(masks.values()))
    if not allowed.any():
        counts = (f"{int(mask.sum()):,} others {what}" for what, mask in masks.items())
        raise RetrievalError(
            f"no sample meets every condition for '{query.key}': {', '.join(counts)}; relax one of "
            "them"
        )
    return Allowed(allowed, int(allowed.sum()), far, close)


def _label_distances(samples: Samples, query: Query, relation: Relation) -> NDArray[np.float32]:
    """Returns the label distances to a query, [N]; NaN for itself and for unlabelled samples."""
    number = query.number
    if number is None or not samples.known[number]:
        what = "is not a sample and" if number is None else "is a sample that"
        raise RetrievalError(
            f"'{query.key}' {what} has no labels, which relation '{relation}' needs; ask for "
            "neighbours, or query by the key of another sample"
        )
    distances = samples.label_distance(np.array([number]), np.arange(len(samples)))
    distances[number] = np.nan  # NaN compares as false
    return distances


def _far(distances: NDArray[np.float32], samples: Samples) -> float:
    """Returns the least label distance of a hard negative: see `evaluation.negatives`."""
    largest = samples.max_difference
    differ = np.rint(distances[~np.isnan(distances)] * largest).astype(np.int64)
    hard = hard_difference(np.bincount(differ, minlength=largest + 1))
    far = min(max(int(hard), samples.close_difference + 1), largest)
    return float(np.float32(far / largest))  # as the distances are


def find_answer(
    index: "Index | SomeViews",
    query: Query,
    vector: NDArray[Any],
    k: int,
    where: str,
    relation: Relation,
    far: float | None = None,
    among: Flags | None = None,
) -> Answer:
    """Returns the k nearest samples of a query's vector, [dim]: see `query.Retriever`.

    Raises a RetrievalError for a k that the index cannot give, and as `allowed_samples`.
    """
    query_numbers = query.sample_numbers
    candidates = len(index.samples) - len(query_numbers)
    if not 1 <= k <= candidates:
        raise RetrievalError(
            f"k must be 1 to {candidates:,}, because the index has {len(index.samples):,} "
            f"samples{', including the query' if query_numbers else ''}, got {k:,}"
        )
    allowed = allowed_samples(index.samples, query, where, relation, far, among)
    if allowed.label_distances is not None:
        hits = _nearest_in_label_space(index, query, vector, k, allowed)
    else:
        # Without a mask the query itself is most likely found: ask for that many more.
        n = k + len(query_numbers) if allowed.mask is None else min(k, allowed.count)
        neighbours = index.search(vector[None], n, allowed=allowed.mask)
        numbers, scores = neighbours.numbers[0], neighbours.scores[0]
        is_hit = (numbers >= 0) & ~np.isin(numbers, query_numbers)
        hits = _hits(index.samples, query, numbers[is_hit][:k], scores[is_hit][:k])
    return Answer(
        query=query,
        hits=hits,
        k=k,
        allowed=allowed.count or candidates,
        where=where,
        relation=relation,
        far=allowed.far,
        metric=index.manifest.metric,
        close=allowed.close,
        instead=allowed.label_distances is not None,
    )


def _nearest_in_label_space(
    index: "Index | SomeViews", query: Query, vector: NDArray[Any], k: int, allowed: Allowed
) -> list[Hit]:
    """Returns the k nearest by label distance; ties are ordered by vector similarity."""
    assert allowed.label_distances is not None and allowed.mask is not None
    hits: list[Hit] = []
    for distance in np.unique(allowed.label_distances[allowed.mask]):
        tied = allowed.mask & (allowed.label_distances == distance)
        n = min(k - len(hits), int(tied.sum()))
        neighbours = index.search(vector[None], n, allowed=tied)
        hits += _hits(index.samples, query, neighbours.numbers[0], neighbours.scores[0])
        if len(hits) >= k:
            break
    return hits


def _hits(
    samples: Samples, query: Query, numbers: NDArray[np.int64], scores: NDArray[np.float32]
) -> list[Hit]:
    distances = np.full(len(numbers), np.nan, np.float32)
    if query.number is not None:
        distances = samples.label_distance(np.array([query.number]), numbers)
    return [
        Hit(
            number,
            samples.key(number),
            score,
            samples.label_names(number),
            None if np.isnan(distance) else distance,
        )
        for number, score, distance in zip(
            numbers.tolist(), scores.tolist(), distances.tolist(), strict=True
        )
    ]
