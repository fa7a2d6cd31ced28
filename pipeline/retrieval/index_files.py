"""The files of an index: its manifest, and FAISS's, read within limits, compared with its plan."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from heron.pipeline.config.errors import RetrievalError
from heron.pipeline.config.extras import require
from heron.pipeline.evaluation.knn import Vectors
from heron.pipeline.retrieval.embeddings import Layer, LayerRecord, Width
from heron.pipeline.retrieval.kinds import Compared, Kind, Metric, Plan, code_bytes, compared_by
from heron.pipeline.retrieval.map import MAP, MapRecord
from heron.pipeline.retrieval.recall import Recall
from heron.pipeline.retrieval.samples import FILES
from heron.shards.artefact import Artefact, Count, FileSum, Fingerprint, Record, Sha256

faiss = require("faiss", "an index")
INDEX = "index.faiss"
AGAIN = "build the index again with `heron index`"
FAISS_METRICS = {"inner_product": faiss.METRIC_INNER_PRODUCT, "euclidean": faiss.METRIC_L2}
CLASSES: dict[Kind, tuple[type[Any], ...]] = {
    "flat": (faiss.IndexFlat, faiss.IndexFlatIP, faiss.IndexFlatL2),
    "ivf": (faiss.IndexIVFFlat,),
    "sq8": (faiss.IndexIVFScalarQuantizer,),
    "rabitq": (faiss.IndexIVFRaBitQ,),
    "ivfpq": (faiss.IndexIVFPQ,),
    "hnsw": (faiss.IndexHNSWFlat,),
}
QUERY_BITS = 4  # of a number, by which RaBitQ looks at the signs first: FAISS's default
_lock = Lock()  # FAISS's limits are the process's
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


@contextmanager
def _limits(size: int) -> Iterator[None]:
    """Has FAISS refuse, while it reads, an array or a loop of more than so many bytes or turns."""
    names = "deserialization_vector_byte_limit", "deserialization_loop_limit"
    with _lock:
        before = {name: getattr(faiss, f"get_{name}")() for name in names}
        try:
            for name in names:
                getattr(faiss, f"set_{name}")(size)
            yield
        finally:
            for name, limit in before.items():
                getattr(faiss, f"set_{name}")(limit)


def read_faiss(path: Path, plan: Plan) -> Any:
    """Reads FAISS's index, or maps it: pages are then read when a search asks for them.

    No array of it may be larger than the file.

    Raises:
        RetrievalError: FAISS cannot read it, or it is not of the plan.
    """
    flags = faiss.IO_FLAG_SKIP_PRECOMPUTE_TABLE
    if plan.mapped and plan.lists:
        flags |= faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY
    elif plan.mapped:
        flags |= faiss.IO_FLAG_MMAP_IFC
    try:
        with _limits(path.stat().st_size):
            found = faiss.read_index(str(path), flags)
        fault = _difference(found, plan)
        if plan.table and not fault:  # which may be larger than the file
            found.precompute_table()
    except (RuntimeError, MemoryError) as error:
        text = " ".join(str(error).split())
        fault = f"FAISS {faiss.__version__} cannot read it: {text}"
    if fault:
        raise RetrievalError(f"{path}: {fault}; {AGAIN}")
    return found


def _difference(index: Any, plan: Plan) -> str:
    """Returns what of FAISS's index is not of the plan, or ""."""
    if type(index) not in CLASSES[plan.kind]:
        wanted = CLASSES[plan.kind][0].__name__
        return f"it is a {type(index).__name__}; expected {wanted}, as its kind is {plan.kind}"
    pairs = []
    if plan.lists:
        quantizer, inverted = faiss.downcast_index(index.quantizer), index.invlists
        pairs += [
            ("lists", index.nlist, plan.lists),
            ("lists with vectors", inverted.nlist, plan.lists),
            ("bytes of a code", inverted.code_size, index.code_size),
            (
                "bytes of a code of the plan",
                index.code_size,
                code_bytes(plan.kind, index.d, plan.subvectors, plan.bits),
            ),
            ("vectors in lists", inverted.compute_ntotal(), index.ntotal),
            *_vectors(quantizer, "centroids", index, plan.lists),
        ]
    if plan.subvectors:
        pairs += [
            ("subvectors", index.pq.M, plan.subvectors),
            ("bits", index.pq.nbits, plan.bits),
            ("dimensions of the codes", index.pq.d, index.d),
            ("centroids of the codes", index.pq.centroids.size(), index.d * index.pq.ksub),
        ]
    if plan.kind == "sq8":
        pairs += [
            ("the type of the codes", index.sq.qtype, faiss.ScalarQuantizer.QT_8bit),
            ("dimensions of the codes", index.sq.d, index.d),
            ("bytes that the codes are read by", index.sq.code_size, index.code_size),
        ]
    if plan.kind == "rabitq":
        pairs += [
            ("bits", index.rabitq.nb_bits, plan.bits),
            ("dimensions of the codes", index.rabitq.d, index.d),
            ("bytes that the codes are read by", index.rabitq.code_size, index.code_size),
            ("the metric of the codes", index.rabitq.metric_type, index.metric_type),
            ("bits of a query", index.qb, QUERY_BITS),
        ]
    if plan.links:
        pairs += [
            ("links", index.hnsw.nb_neighbors(0), 2 * plan.links),
            *_vectors(faiss.downcast_index(index.storage), "stored", index, index.ntotal),
        ]
    if plan.kind == "flat":
        pairs += _vectors(index, "flat", index, index.ntotal)
    return "; ".join(
        f"{name}: {found}, expected {wanted}" for name, found, wanted in pairs if found != wanted
    )


def _vectors(flat: Any, what: str, index: Any, count: int) -> list[tuple[str, Any, Any]]:
    """Returns what must be the same of a flat index within another: found, and expected."""
    return [
        (f"whether {what} vectors are flat", type(flat) in CLASSES["flat"], True),
        (f"{what} vectors", flat.ntotal, count),
        (f"dimensions of {what} vectors", flat.d, index.d),
        (f"the metric of {what} vectors", flat.metric_type, index.metric_type),
        (f"bytes of {what} vectors", flat.code_size, 4 * index.d),
    ]
