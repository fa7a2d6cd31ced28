"""The manifest of an index: what it holds, how it was made, and how well it finds."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from heron.pipeline.config.errors import RetrievalError
from heron.pipeline.retrieval.embeddings import Layer, Width
from heron.pipeline.retrieval.kinds import Compared, Kind, Metric, Plan, compared_by
from heron.pipeline.retrieval.map import MAP, MapRecord
from heron.pipeline.retrieval.recall import Recall
from heron.pipeline.retrieval.samples import FILES
from heron.pipeline.retrieval.transform import Prefix
from heron.shards.artefact import Artefact, Count, FileSum, Fingerprint, Sha256

INDEX = "index.faiss"
AGAIN = "build the index again with `heron index`"
Setting = Annotated[int, Field(ge=1, le=2**31 - 1)]  # FAISS's nprobe or efSearch


class IndexManifest(Artefact):
    """What an index holds, how it was made, and how well it finds.

    `cosine` is the inner product of unit vectors: `normalised` says that the vectors were divided
    by their length, as queries are. `compared_by` is what FAISS computes: of unit vectors the
    distance gives the same order, cos = 1 - distance^2 / 2, and codes find far more by it: an
    inner product prefers codes that are longer than the vector they stand for. `rabitq` has
    vectors that are rotated by `seed`, as queries are: see `transform.rotation`. What is "" of
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
