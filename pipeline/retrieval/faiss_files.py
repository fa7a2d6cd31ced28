"""FAISS's files: read within limits, mapped where they must be, and compared with their plan."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

from heron.pipeline.config.errors import RetrievalError
from heron.pipeline.config.extras import require
from heron.pipeline.retrieval.index_manifest import AGAIN
from heron.pipeline.retrieval.kinds import Kind, Plan, code_bytes

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
QUERY_BITS = 4  # of a number, by which RaBitQ looks at the signs first: FAISS's default
_lock = Lock()  # FAISS's limits are the process's


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
