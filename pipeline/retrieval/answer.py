"""What was asked of an index, and what was found."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

Relation = Literal["neighbours", "hard", "false"]
RELATIONS: tuple[Relation, ...] = get_args(Relation)


@dataclass(frozen=True)
class Query:
    """What was asked for."""

    number: int | None  # of the sample; None where it is none of the index
    key: str  # of the sample; of a file or a vector, its name
    labels: list[str]  # of the sample, by name; none of what is no sample
    vector: str  # where its vector comes from, in words
    examples: list[int] = field(
        default_factory=list
    )  # numbers of several samples that are asked for as one
    predicted: dict[str, float] = field(default_factory=dict)  # labels' share among the nearest
    voters: int = 0  # nearest labelled samples that labels are predicted from


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
