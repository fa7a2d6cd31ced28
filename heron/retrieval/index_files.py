"""The files of an index: its manifest, FAISS's file, and the folder that they appear in at once."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from heron.base.artefact import Artefact, Count, FileSum, Fingerprint, Record, Sha256
from heron.base.errors import RetrievalError
from heron.base.extras import require
from heron.evaluation.knn import Vectors
from heron.retrieval.embeddings import Layer, LayerRecord, Width
from heron.retrieval.index_plan import Compared, Kind, Metric, Plan, code_bytes, compared_by
from heron.retrieval.map import MAP, MapRecord
from heron.retrieval.recall import Recall
from heron.retrieval.samples import FILES

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
                f"width must be 1 to {full_width}, the width of a view in layer '{layer}', got "
                f"{width}; use another --width, or none for all"
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
    views: list[str] = []  # stored views that the vectors have numbers of, if known
    missing: list[str] = []  # those that the data set lacks: zeros
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
            ("dim modulo subvectors", self.dim % (plan.subvectors or 1), 0),
            ("dim", self.dim, self.prefix.width * self.prefix.views if self.prefix else self.dim),
            ("files", sorted(self.files), sorted([INDEX, *FILES, *[MAP] * (self.map is not None)])),
        ]
        for name, actual, expected in pairs:
            if actual != expected:
                raise ValueError(f"{name}: {actual} instead of {expected}")
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


faiss = require("faiss", "an index")
FAISS_METRICS = {"inner_product": faiss.METRIC_INNER_PRODUCT, "euclidean": faiss.METRIC_L2}
CLASSES: dict[Kind, tuple[type[Any], ...]] = {
    "flat": (faiss.IndexFlat, faiss.IndexFlatIP, faiss.IndexFlatL2),
    "ivf": (faiss.IndexIVFFlat,),
    "sq8": (faiss.IndexIVFScalarQuantizer,),
    "rabitq": (faiss.IndexIVFRaBitQ,),
    "ivfpq": (faiss.IndexIVFPQ,),
    "hnsw": (faiss.IndexHNSWFlat,),
}
QUERY_BITS = 4  # per dimension of a query, when RaBitQ first compares signs: FAISS's default
_faiss_lock = Lock()  # FAISS's limits are global to the process


@contextmanager
def _limits(size: int) -> Iterator[None]:
    """Makes FAISS refuse arrays of more than `size` bytes, or loops of more turns, in a file."""
    names = "deserialization_vector_byte_limit", "deserialization_loop_limit"
    with _faiss_lock:
        before = {name: getattr(faiss, f"get_{name}")() for name in names}
        try:
            for name in names:
                getattr(faiss, f"set_{name}")(size)
            yield
        finally:
            for name, limit in before.items():
                getattr(faiss, f"set_{name}")(limit)


def read_faiss(path: Path, plan: Plan) -> Any:
    """Reads a FAISS index, or maps it: pages are then read when a search needs them.

    Raises a RetrievalError if FAISS cannot read it, an array in it would be larger than the file,
    or it does not match the plan.
    """
    flags = faiss.IO_FLAG_SKIP_PRECOMPUTE_TABLE
    if plan.mapped and plan.lists:
        flags |= faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY
    elif plan.mapped:
        flags |= faiss.IO_FLAG_MMAP_IFC
    try:
        with _limits(path.stat().st_size):
            index = faiss.read_index(str(path), flags)
        fault = _mismatch(index, plan)
        if plan.table and not fault:  # outside the limits: the table may be larger than the file
            index.precompute_table()
    except (RuntimeError, MemoryError) as error:
        text = " ".join(str(error).split())
        fault = f"FAISS {faiss.__version__} cannot read it: {text}"
    if fault:
        raise RetrievalError(f"{path}: {fault}; {REBUILD_INDEX}")
    return index


def parse_faiss(data: bytes, plan: Plan) -> Any | None:
    """Returns the FAISS index in bytes that were kept; None if they are not of this plan."""
    try:
        with _limits(len(data)):
            array, flags = np.frombuffer(data, np.uint8), faiss.IO_FLAG_SKIP_PRECOMPUTE_TABLE
            index = faiss.deserialize_index(array, flags)
    except RuntimeError:
        return None
    return None if _mismatch(index, plan) else index


def set_default(faiss_index: Any, plan: Plan, setting: int) -> None:
    """Sets the default nprobe or efSearch of a FAISS index, if its kind has one."""
    if plan.setting:
        faiss.ParameterSpace().set_index_parameter(faiss_index, plan.setting, setting)


def _mismatch(index: Any, plan: Plan) -> str:
    """Returns how a FAISS index differs from its plan, or ""."""
    if type(index) not in CLASSES[plan.kind]:
        expected = CLASSES[plan.kind][0].__name__
        return f"it is a {type(index).__name__}, but kind {plan.kind} needs {expected}"
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
            *_flat_properties(quantizer, "centroids", index, plan.lists),
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
            ("bytes of a code in the quantizer", index.sq.code_size, index.code_size),
        ]
    if plan.kind == "rabitq":
        pairs += [
            ("bits", index.rabitq.nb_bits, plan.bits),
            ("dimensions of the codes", index.rabitq.d, index.d),
            ("bytes of a code in the quantizer", index.rabitq.code_size, index.code_size),
            ("the metric of the codes", index.rabitq.metric_type, index.metric_type),
            ("bits of a query", index.qb, QUERY_BITS),
        ]
    if plan.links:
        pairs += [
            ("links", index.hnsw.nb_neighbors(0), 2 * plan.links),
            *_flat_properties(faiss.downcast_index(index.storage), "stored", index, index.ntotal),
        ]
    if plan.kind == "flat":
        pairs += _flat_properties(index, "flat", index, index.ntotal)
    return "; ".join(
        f"{name}: {actual} instead of {expected}"
        for name, actual, expected in pairs
        if actual != expected
    )


def _flat_properties(flat: Any, role: str, index: Any, count: int) -> list[tuple[str, Any, Any]]:
    """Returns properties of a flat index within another: name, actual and expected value."""
    return [
        (f"whether {role} vectors are flat", type(flat) in CLASSES["flat"], True),
        (f"{role} vectors", flat.ntotal, count),
        (f"dimensions of {role} vectors", flat.d, index.d),
        (f"the metric of {role} vectors", flat.metric_type, index.metric_type),
        (f"bytes of {role} vectors", flat.code_size, 4 * index.d),
    ]


def kept_beside(out: Path) -> Path:
    """Returns the hidden folder beside `out` that keeps what a killed build has done."""
    return out.resolve().with_name(f".{out.resolve().name}.kept")
