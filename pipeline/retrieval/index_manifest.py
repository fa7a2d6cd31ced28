"""The manifest of an index: what it holds, how it was made, and how well it finds."""

from functools import lru_cache
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from heron.pipeline.config.errors import RetrievalError
from heron.pipeline.evaluation.knn import Vectors
from heron.pipeline.retrieval.embeddings import Layer, LayerRecord, Width
from heron.pipeline.retrieval.kinds import Compared, Kind, Metric, Plan, compared_by
from heron.pipeline.retrieval.map import MAP, MapRecord
from heron.pipeline.retrieval.recall import Recall
from heron.pipeline.retrieval.samples import FILES
from heron.shards.artefact import Artefact, Count, FileSum, Fingerprint, Record, Sha256

INDEX = "index.faiss"
AGAIN = "build the index again with `heron index`"
Setting = Annotated[int, Field(ge=1, le=2**31 - 1)]  # FAISS's nprobe or efSearch


class Prefix(Record):
    """The first numbers of a layer's vectors: Matryoshka embeddings (Kusupati et al. 2022).

    Of a layer of several views it is the first `width` numbers of each, side by side. Those of
    projections and weights, which are unit vectors, are made unit vectors again, view by view.
    """

    width: Width
    views: Width  # of the layer
    dim: Width  # of the whole layer
    unit: bool

    @classmethod
    def choose(cls, width: int, layer: Layer, known: LayerRecord) -> "Prefix":
        """Returns the prefix of a layer; raises a RetrievalError where it has fewer numbers."""
        whole = known.dim // known.views
        if not 1 <= width <= whole:
            raise RetrievalError(
                f"width is {width}; expected 1 to {whole}, as many numbers as layer '{layer}' has "
                "of a view; give another --width, or none for all"
            )
        return cls(width=width, views=known.views, dim=known.dim, unit=layer != "hidden")

    def of(self, vectors: Vectors) -> Vectors:
        """Returns the prefixes of whole vectors [rows, dim]: [rows, views * width]."""
        found = vectors.reshape(len(vectors), self.views, -1)[:, :, : self.width]
        scale = np.ones((len(vectors), self.views, 1), np.float32)
        if self.unit:
            lengths = np.linalg.norm(found, axis=2, keepdims=True)
            scale = np.where(lengths > 0, lengths, scale)
        return np.asarray(found / scale, np.float32).reshape(len(vectors), -1)


class IndexManifest(Artefact):
    """What an index holds, how it was made, and how well it finds.

    `cosine` is the inner product of unit vectors: `normalised` says that the vectors were divided
    by their length, as queries are. `compared_by` is what FAISS computes: of unit vectors the
    distance gives the same order, cos = 1 - distance^2 / 2, and codes find far more by it: an
    inner product prefers codes that are longer than the vector they stand for. `rabitq` has
    vectors that are rotated by `seed`, as queries are: see `rotation`. What is "" of
    where the vectors come from is not known: they were given in memory.
    """

    what: ClassVar[str] = "the manifest of an index"
    error: ClassVar[type[RetrievalError]] = RetrievalError
    again: ClassVar[str] = AGAIN
    versions: ClassVar[tuple[int, ...]] = (2,)

    format: Literal[2]
    kind: Kind
    metric: Metric
    normalised: bool
    compared_by: Compared
    layer: Layer
    dim: Width
    prefix: Prefix | None = None  # of the layer's vectors, which is indexed
    count: Count
    checkpoint: Sha256 | Literal[""]  # of the model's weights
    embeddings: str
    embeddings_fingerprint: Fingerprint | Literal[""]
    run: str
    data: str
    data_fingerprint: Fingerprint | Literal[""]
    plan: Plan
    seed: Count
    faiss: str
    search: dict[str, Setting]  # that reaches the target of recall
    recall: Recall | None
    map: MapRecord | None = None  # coordinates in the plane; indexes before it have none
    seconds: dict[str, float]  # what each step took
    files: dict[str, FileSum]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        plan = self.plan
        pairs = [
            ("kind", self.kind, plan.kind),
            ("normalised", self.normalised, self.metric == "cosine"),
            ("compared_by", self.compared_by, compared_by(self.metric, self.kind)),
            ("search", [*self.search], [plan.setting] if plan.setting else []),
            ("subvectors of a dimension", self.dim % (plan.subvectors or 1), 0),
            ("dim", self.dim, self.prefix.width * self.prefix.views if self.prefix else self.dim),
            ("files", sorted(self.files), sorted([INDEX, *FILES, *[MAP] * (self.map is not None)])),
        ]
        for name, found, wanted in pairs:
            if found != wanted:
                raise ValueError(f"{name}: {found}, expected {wanted}")
        return self


@lru_cache(maxsize=4)
def rotation(dim: int, seed: int) -> Vectors:
    """Returns a random rotation, orthogonal [dim, dim], the same for a seed.

    RaBitQ's bound holds for a random rotation of the vectors (Gao and Long 2024, section 3.1): a
    bit a number says little of a vector that has its length in few of them. Distances stay.
    """
    noise = np.random.default_rng(seed).standard_normal((dim, dim))
    q, r = np.linalg.qr(noise)
    found = np.asarray(q * np.sign(np.diag(r)), np.float32)  # with these signs there is one alone
    found.setflags(write=False)
    return found
