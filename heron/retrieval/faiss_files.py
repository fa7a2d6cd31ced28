"""Reads FAISS's files: within limits, memory-mapped if need be, and checked against their plan."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

from heron.config.errors import RetrievalError
from heron.config.extras import require
from heron.retrieval.index_manifest import REBUILD_INDEX
from heron.retrieval.kinds import Kind, Plan, code_bytes

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
_lock = Lock()  # FAISS's limits are global to the process


@contextmanager
def _limits(size: int) -> Iterator[None]:
    """Makes FAISS refuse arrays of more than `size` bytes, or loops of more turns, in a file."""
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


def set_default(faiss_index: Any, plan: Plan, setting: int) -> None:
    """Sets the default nprobe or efSearch of a FAISS index, if its kind has one."""
    if plan.setting:
        faiss.ParameterSpace().set_index_parameter(faiss_index, plan.setting, setting)


def _mismatch(index: Any, plan: Plan) -> str:
    """Returns how a FAISS index differs from its plan, or ""."""
    if type(index) not in CLASSES[plan.kind]:
        expected = CLASSES[plan.kind][0].__name__
        return f"it is a {type(index).__name__}; expected {expected}, as its kind is {plan.kind}"
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
            *_flat_properties(faiss.downcast_index(index.storage), "stored", index, index.ntotal),
        ]
    if plan.kind == "flat":
        pairs += _flat_properties(index, "flat", index, index.ntotal)
    return "; ".join(
        f"{name}: {actual}, expected {expected}"
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
