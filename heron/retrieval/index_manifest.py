"""The manifest of an index: what it holds, how it was made, and its recall."""

from functools import lru_cache
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from heron.config.errors import RetrievalError
from heron.evaluation.knn import Vectors
from heron.retrieval.embeddings import Layer, LayerRecord, Width
from heron.retrieval.kinds import Compared, Kind, Metric, Plan, compared_by
from heron.retrieval.map import MAP, MapRecord
from heron.retrieval.recall import Recall
from heron.retrieval.samples import FILES
from heron.shards.artefact import Artefact, Count, FileSum, Fingerprint, Record, Sha256

INDEX = "index.faiss"
REBUILD_INDEX = "build the index again with `heron index`"
Setting = Annotated[int, Field(ge=1, le=2**31 - 1)]  # FAISS's nprobe or efSearch


class Prefix(Record):
    """The leading dimensions of a layer's vectors: Matryoshka embeddings (Kusupati et al. 2022).

    Of a layer of several views they are the first `width` of each, side by side. Projections and
    weights, which are unit vectors, are normalised again, view by view.
    """

    width: Width
    views: Width  # of the layer
    dim: Width  # of the whole layer
    unit: bool

    @classmethod
    def choose(cls, width: int, layer: Layer, record: LayerRecord) -> "Prefix":
        """Returns the prefix of a layer; raises a RetrievalError if the layer is narrower."""
        full_width = record.dim // record.views
        if not 1 <= width <= full_width:
            raise RetrievalError(
                f"width is {width}; expected 1 to {full_width}, as many numbers as layer '{layer}' "
                "has of a view; give another --width, or none for all"
            )
        return cls(width=width, views=record.views, dim=record.dim, unit=layer != "hidden")

    def of(self, vectors: Vectors) -> Vectors:
        """Returns the prefixes of whole vectors [rows, dim]: [rows, views * width]."""
        prefixes = vectors.reshape(len(vectors), self.views, -1)[:, :, : self.width]
        scale = np.ones((len(vectors), self.views, 1), np.float32)
        if self.unit:
            norms = np.linalg.norm(prefixes, axis=2, keepdims=True)
            scale = np.where(norms > 0, norms, scale)
        return np.asarray(prefixes / scale, np.float32).reshape(len(vectors), -1)


class IndexManifest(Artefact):
    """What an index holds, how it was made, and its recall.

    `cosine` is the inner product of unit vectors: `normalised` says that the vectors were divided
    by their length, as queries are. `compared_by` is what FAISS computes: for unit vectors the
    distance gives the same order, cos = 1 - distance^2 / 2, and codes find far more by it, as an
    inner product prefers codes that are longer than the vector they stand for. `rabitq` rotates
    vectors and queries by `seed`: see `rotation`. Fields that say where the vectors come from are
    "" if the vectors were given in memory.
    """

    description: ClassVar[str] = "the manifest of an index"
    error: ClassVar[type[RetrievalError]] = RetrievalError
    remedy: ClassVar[str] = REBUILD_INDEX
    versions: ClassVar[tuple[int, ...]] = (2,)

    format: Literal[2]
    kind: Kind
    metric: Metric
    normalised: bool
    compared_by: Compared
    layer: Layer
    dim: Width
    prefix: Prefix | None = None  # the part of the layer's vectors that is indexed
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
    search: dict[str, Setting]  # reaches the target of recall
    recall: Recall | None
    map: MapRecord | None = None  # coordinates in the plane, unless there is no map
    seconds: dict[str, float]  # per step of the build
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
        for name, actual, expected in pairs:
            if actual != expected:
                raise ValueError(f"{name}: {actual}, expected {expected}")
        return self


@lru_cache(maxsize=4)
def rotation(dim: int, seed: int) -> Vectors:
    """Returns a random rotation, orthogonal [dim, dim], determined by the seed.

    RaBitQ's bound holds for randomly rotated vectors (Gao and Long 2024, section 3.1): one bit per
    dimension says little of a vector whose norm is in few of them.
    """
    noise = np.random.default_rng(seed).standard_normal((dim, dim))
    q, r = np.linalg.qr(noise)
    matrix = np.asarray(q * np.sign(np.diag(r)), np.float32)  # these signs make q unique
    matrix.setflags(write=False)
    return matrix
