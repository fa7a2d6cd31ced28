"""Inverted files: training centroids and codes, assigning vectors to lists, writing the lists."""

import hashlib
import math
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heron.base.atomic import Kept, naming
from heron.base.errors import RetrievalError
from heron.base.extras import require
from heron.base.terminal import Bar
from heron.base.workers import ALONE, Executor
from heron.evaluation.knn import Numbers, Vectors
from heron.retrieval.index_files import parse_faiss
from heron.retrieval.index_plan import BLOCK, MAX_POINTS, PQ_SAMPLE, Plan
from heron.retrieval.vectors import LayerVectors

faiss = require("faiss", "an index")
TRAINED = "trained"  # the name under which an empty inverted file is kept


def train(vectors: LayerVectors, plan: Plan, training: Numbers, gpu: bool = False) -> Any:
    """Returns an empty inverted file with trained centroids, and codes if its kind has them."""
    index = vectors.empty_index(plan)
    if plan.kind == "ivfpq":
        index.pq.cp.max_points_per_centroid = MAX_POINTS
        index.use_precomputed_table = -1  # it is not searched before it is read again
    if gpu:  # keep a reference: FAISS only borrows the index that it clusters with
        flat = faiss.index_cpu_to_all_gpus(faiss.IndexFlat(index.d, index.metric_type))
        index.clustering_index = flat
    sample = vectors.take(training)
    if plan.kind in ("sq8", "rabitq"):
        _train_codes(index, sample)
    else:
        index.train(sample)
    index.clustering_index = None
    return index


def _train_codes(index: Any, sample: Vectors) -> None:
    """Trains centroids, then codes on the residuals of a subsample."""
    # `index.train` takes the residuals of 100,000 vectors or of all, which need more memory than
    # the index does.
    index.train_q1(len(sample), faiss.swig_ptr(sample), False, index.metric_type)
    subsample = np.ascontiguousarray(sample[:: math.ceil(len(sample) / PQ_SAMPLE)])
    lists = np.ascontiguousarray(index.quantizer.search(subsample, 1)[1][:, 0])
    residuals = np.empty_like(subsample)
    pointers = map(faiss.swig_ptr, (subsample, residuals, lists))
    index.quantizer.compute_residual_n(len(subsample), *pointers)
    index.train_encoder(len(subsample), *map(faiss.swig_ptr, (residuals, lists)))
    index.is_trained = True


def trained(kept: Kept | None, plan: Plan, train: Callable[[], Any]) -> Any:
    """Returns a trained, empty inverted file: the kept one, or a new one, which is then kept."""
    data = kept and kept.get(TRAINED)
    if data and (index := parse_faiss(data, plan)) is not None:
        return index
    index = train()
    if kept:
        kept.put(TRAINED, faiss.serialize_index(index).tobytes())
    return index


@dataclass(frozen=True)
class _Assigner:
    """Finds the list of every vector of a part, in any process."""

    vectors: LayerVectors
    quantizer: NDArray[np.uint8]  # FAISS's bytes of the centroids
    gpu: bool

    def __call__(self, number: int) -> NDArray[np.int32]:
        """Returns the list of each vector of a part."""
        vectors, found = self.vectors, [np.empty(0, np.int32)]
        for start, block in vectors.embeddings.blocks(vectors.layer, BLOCK, number):
            checked = vectors.prepare(block, np.arange(start, start + len(block)))
            found.append(self._centroids.search(checked, 1)[1][:, 0].astype(np.int32))
        return np.concatenate(found)

    @cached_property  # a process keeps it from part to part
    def _centroids(self) -> Any:
        index = faiss.deserialize_index(self.quantizer)
        return faiss.index_cpu_to_all_gpus(index) if self.gpu else index


def assign(
    index: Any,
    vectors: LayerVectors,
    gpu: bool = False,
    executor: Executor = ALONE,
    kept: Kept | None = None,
) -> Numbers:
    """Returns the inverted list of every vector, int64 [N].

    The parts of the embeddings are items of an executor. What it returns is kept, and a part that
    was kept before is not assigned again.
    """
    starts = vectors.embeddings.starts
    assigned, missing = np.empty(starts[-1], np.int64), list[int]()
    quantizer = faiss.serialize_index(index.quantizer)
    name = hashlib.sha256(quantizer).hexdigest()[:16] + "-{}"  # of what is kept of a part
    for part, (first, last) in enumerate(pairwise(starts.tolist())):
        data = (kept and kept.get(name.format(part))) or b""
        lists = np.frombuffer(data if len(data) == 4 * (last - first) else b"", "<i4")
        if len(lists) == last - first and np.all((lists >= 0) & (lists < index.nlist)):
            assigned[first:last] = lists
        else:
            missing.append(part)
    done = len(assigned) - int(np.diff(starts)[missing].sum())
    if kept and kept.goes_on and vectors.progress:
        parts = len(starts) - 1
        print(f"an unfinished index goes on: {parts - len(missing)} of {parts} parts are assigned")
    job = _Assigner(vectors, quantizer, gpu)
    hidden = not vectors.progress
    with (
        closing(executor.map(job, missing)) as results,
        Bar(len(assigned), "vector", start=done, name="assign", hidden=hidden) as bar,
    ):
        for part, lists in results:
            if kept:
                kept.put(name.format(part), lists.astype("<i4").tobytes())
            assigned[starts[part] : starts[part + 1]] = lists
            bar.update(len(lists))
    return assigned


def write_lists(
    path: Path, index: Any, blocks: Iterator[tuple[int, Vectors]], assigned: Numbers
) -> None:
    """Writes the file of an inverted file a block at a time, as `faiss.write_index` would.

    `index` is trained and empty; `assigned` is the list of every vector.
    """
    # FAISS itself keeps the lists in memory until it writes them, and a growing list doubles its
    # room. Its file is the trained index, the size of each list, then for each list the codes and
    # the numbers of its vectors. `assigned` gives the size of every list, and so the offset of
    # every code. Tests compare the file with FAISS's.
    header = bytearray(faiss.serialize_index(index).tobytes())
    struct.pack_into("<q", header, 8, len(assigned))
    empty = struct.pack("<4sQQ4sQ", b"ilar", index.nlist, index.code_size, b"sprs", 0)
    full = struct.pack("<4sQQ4sQ", b"ilar", index.nlist, index.code_size, b"full", index.nlist)
    if not header.endswith(empty):
        raise RetrievalError(
            f"FAISS {faiss.__version__} writes inverted files in a format that this version of "
            "heron does not know; install faiss-cpu 1.15 or faiss-gpu 1.15"
        )
    header[-len(empty) :] = full
    sizes = np.bincount(assigned, minlength=index.nlist).astype("<u8")
    entry_bytes = index.code_size + 8
    code_offsets = (
        len(header) + sizes.nbytes + np.concatenate([[0], np.cumsum(sizes[:-1])]) * entry_bytes
    )
    number_offsets = code_offsets + sizes * index.code_size
    with naming(path, path), path.open("wb") as stream:
        stream.write(header + sizes.tobytes())
        stream.flush()
        for start, block in blocks:
            lists = assigned[start : start + len(block)]
            codes = np.empty((len(block), index.code_size), np.uint8)
            index.encode_vectors(len(block), *map(faiss.swig_ptr, (block, lists, codes)))
            order = np.argsort(lists, kind="stable")
            present, firsts = np.unique(lists[order], return_index=True)
            for list_number, members in zip(present, np.split(order, firsts[1:]), strict=True):
                _put(stream.fileno(), codes[members].tobytes(), int(code_offsets[list_number]))
                numbers = (members + start).astype("<i8").tobytes()
                _put(stream.fileno(), numbers, int(number_offsets[list_number]))
                code_offsets[list_number] += len(members) * index.code_size
                number_offsets[list_number] += len(members) * 8


def _put(descriptor: int, data: bytes, offset: int) -> None:
    """Writes all bytes at a place of a file; a disk that is nearly full takes some, and says so."""
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
