"""Builds an index from embeddings: checks, trains, adds in blocks, measures; all or nothing."""

import math
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from heron.config.errors import RetrievalError
from heron.config.extras import require
from heron.evaluation.knn import Numbers, Vectors, require_gpus
from heron.retrieval.embeddings import FORMAT, Embeddings, Layer
from heron.retrieval.index_files import (
    FAISS_METRICS,
    INDEX,
    IndexManifest,
    Prefix,
    new_folder,
    read_faiss,
    rotation,
    set_default,
)
from heron.retrieval.index_plan import (
    BLOCK,
    CODED,
    MAX_POINTS,
    METRICS,
    PQ_SAMPLE,
    MapKind,
    Metric,
    Plan,
    RequestedKind,
    VectorSet,
    choose_plan,
    compared_by,
)
from heron.retrieval.locations import FolderOutput, open_output
from heron.retrieval.map import MAP, draw_map
from heron.retrieval.recall import ExactSearch, Recall
from heron.retrieval.vectors import VectorsInMemory, prepare_vectors
from heron.shards.artefact import MANIFEST, FileSum
from heron.shards.terminal import Bar

faiss = require("faiss", "an index")
MAX_EF = 4096  # the largest efSearch that is tried
QUERY_BLOCK = 256  # queries searched at a time: FAISS keeps nprobe numbers for each


@dataclass(frozen=True)
class LayerVectors:
    """A layer of embeddings, as it goes into FAISS."""

    embeddings: Embeddings | VectorsInMemory
    layer: Layer
    metric: Metric
    progress: bool = False  # show a bar for each named pass
    prefix: Prefix | None = None  # the part of each vector to index; None: all of it
    rotation: Vectors | None = None  # see `index_files.rotation`

    @property
    def dim(self) -> int:
        """The dimension of a vector."""
        if self.prefix is not None:
            return self.prefix.width * self.prefix.views
        return self.embeddings.layer(self.layer).dim

    def vector_set(self, held_out: int) -> VectorSet:
        """Returns the facts that a plan depends on."""
        return VectorSet(
            count=len(self.embeddings),
            dim=self.dim,
            part_bytes=self.embeddings.part_bytes(self.layer),
            held_out=held_out,
            euclidean=self.metric != "inner_product",
        )

    def blocks(self, name: str = "") -> Iterator[tuple[int, Vectors]]:
        """Yields blocks of checked vectors, each with the number of its first."""
        hidden, count = not (name and self.progress), len(self.embeddings)
        with Bar(count, "vector", name=name, hidden=hidden) as bar:
            for start, block in self.embeddings.blocks(self.layer, BLOCK):
                yield start, self._prepare(block, np.arange(start, start + len(block)))
                bar.update(len(block))

    def take(self, numbers: Numbers) -> Vectors:
        """Returns the checked vectors of some samples, read block by block to bound memory."""
        vectors = np.empty((len(numbers), self.dim), np.float32)
        for first in range(0, len(numbers), BLOCK):
            block_numbers = numbers[first : first + BLOCK]
            block = self.embeddings.take(self.layer, block_numbers)
            vectors[first : first + BLOCK] = self._prepare(block, block_numbers)
        return vectors

    def _prepare(self, vectors: Vectors, numbers: Numbers) -> Vectors:
        samples = self.embeddings.samples
        unit = self.metric == "cosine"
        vectors = vectors if self.prefix is None else self.prefix.of(vectors)
        vectors = prepare_vectors(vectors, unit, lambda row: f"'{samples.key(int(numbers[row]))}'")
        return vectors if self.rotation is None else vectors @ self.rotation

    def empty_index(self, plan: Plan) -> Any:
        """Returns an empty FAISS index for a plan."""
        metric = FAISS_METRICS[compared_by(self.metric, plan.kind)]
        return faiss.index_factory(self.dim, plan.factory, metric)


def build_index(
    embeddings: Embeddings | VectorsInMemory,
    out: str | Path,  # a folder that appears once it is complete, or a URL: the manifest is last
    *,
    layer: Layer = "hidden",
    kind: RequestedKind = "auto",  # see `choose_plan`
    metric: Metric = "cosine",  # the inner product of unit vectors
    memory_bytes: int | None = None,  # the budget; None: half of what the machine has free
    recall: float = 0.95,  # target of recall@k, by which nprobe or efSearch is chosen
    k: int = 10,  # neighbours that recall is measured on, at most N - 1
    queries: int = 1000,  # number of queries to measure recall on, at most a tenth of the vectors
    seed: int = 0,  # for drawing queries and training sample
    width: int | None = None,  # leading dimensions of each view's vectors to index; None: all
    gpu: bool = False,  # k-means, lists and the exact search of recall on GPUs (unmeasured)
    map: MapKind = "pca",  # of all samples, for the page
    progress: bool = True,
    overwrite: bool = False,  # move what `out` holds aside
) -> IndexManifest:
    """Builds an index of a layer of embeddings, measures its recall, and returns its manifest.

    Queries and training sample are drawn without overlap. Queries are in the index, as every sample
    is; each is left out of its own neighbours.

    Raises a MissingPackage if a map by UMAP needs it, and a RetrievalError if a vector is not
    finite, or zero under cosine; keys repeat; the embeddings were altered; the budget is too small;
    `out` is not empty; or FAISS lacks GPUs.
    """
    count = len(embeddings)
    if map == "umap":  # fail before the work rather than after it
        require("umap", "a map by UMAP")
    if gpu:
        require_gpus()
    _refuse_options(embeddings, metric, recall, k, queries)
    prefix = None if width is None else Prefix.choose(width, layer, embeddings.layer(layer))
    vectors = LayerVectors(embeddings, layer, metric, progress, prefix)
    held_out = min(queries, max(1, count // 10))
    plan = choose_plan(kind, vectors.vector_set(held_out), memory_bytes)
    if plan.kind == "rabitq":
        vectors = replace(vectors, rotation=rotation(vectors.dim, seed))
    embeddings.samples.refuse_duplicates()
    order = np.random.default_rng(seed).permutation(count)
    query_numbers = np.sort(order[:held_out])
    training = np.sort(order[held_out : held_out + plan.training])
    del order
    with _place(out, overwrite) as work:
        seconds: dict[str, float] = {}
        index = make(vectors, plan, training, work / INDEX, seconds, gpu)
        with _timed(seconds, "recall"):
            setting, measured_recall = measure(
                index, vectors, plan, query_numbers, min(k, count - 1), recall, gpu
            )
        with _timed(seconds, "map"):
            map_record = draw_map(
                map, vectors.take, vectors.blocks("map"), embeddings.samples, work / MAP, seed
            )
        with _timed(seconds, "checksums"):
            written = [INDEX] if map_record is None else [INDEX, MAP]
            files = embeddings.copy_samples(work) | {n: FileSum.of(work / n) for n in written}
        return IndexManifest(
            format=FORMAT,
            kind=plan.kind,
            metric=metric,
            normalised=metric == "cosine",
            compared_by=compared_by(metric, plan.kind),
            layer=layer,
            dim=vectors.dim,
            prefix=prefix,
            count=count,
            **embeddings.origin(),
            plan=plan,
            seed=seed,
            faiss=faiss.__version__,
            search={plan.setting: setting} if plan.setting else {},
            recall=measured_recall,
            map=map_record,
            seconds=seconds,
            files=files,
        ).write(work / MANIFEST)


@contextmanager
def _place(out: str | Path, overwrite: bool) -> Iterator[Path]:
    """Gives a folder that becomes `out`, or whose files are put there."""
    output = open_output(out)
    if isinstance(output, FolderOutput):
        with new_folder(output.folder, overwrite) as work:
            yield work
        return
    output.refuse_taken(overwrite, lambda names: MANIFEST not in names and INDEX in names)
    with output.writing(MANIFEST) as work:
        yield work


def _refuse_options(
    embeddings: Embeddings | VectorsInMemory, metric: Metric, recall: float, k: int, queries: int
) -> None:
    if not len(embeddings):
        raise RetrievalError(f"{embeddings.where} has no vectors to index")
    if metric not in METRICS:
        raise RetrievalError(f"metric must be one of {', '.join(METRICS)}, got '{metric}'")
    if not 0 < recall <= 1 or k < 1 or queries < 1:
        raise RetrievalError(
            "recall must be above 0 and at most 1, and k and queries at least 1, got recall "
            f"{recall}, k {k}, queries {queries}"
        )


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    seconds[name] = round(time.perf_counter() - begin, 4)


def make(
    vectors: LayerVectors,
    plan: Plan,
    training: Numbers,
    path: Path,
    seconds: dict[str, float],
    gpu: bool = False,
) -> Any:
    """Trains, adds and writes; returns the FAISS index, memory-mapped if the plan says so."""
    if plan.kind == "hnsw":
        index = vectors.empty_index(plan)
        with _timed(seconds, "add"):
            for _, block in vectors.blocks("add"):
                index.add(block)
        with _timed(seconds, "write"):
            faiss.write_index(index, str(path))
        return index
    if plan.kind == "flat":
        with _timed(seconds, "add"):
            write_flat(path, vectors, plan)
    else:
        with _timed(seconds, "train"):
            trained = train(vectors, plan, training, gpu)
        with _timed(seconds, "assign"):
            assigned = assign(trained, vectors, gpu)
        with _timed(seconds, "add"):
            write_lists(path, trained, vectors.blocks("add"), assigned)
        del trained, assigned
    with _timed(seconds, "read"):
        return read_faiss(path, plan)


def write_flat(path: Path, vectors: LayerVectors, plan: Plan) -> None:
    """Writes the file of a flat index a block at a time, as `faiss.write_index` would."""
    # FAISS itself keeps all vectors in memory until it writes them. Its file is a header, then the
    # vectors: take the header of an empty index and set the number of vectors (at byte 8) and of
    # values (its last 8 bytes). Tests compare the file with FAISS's.
    header = bytearray(faiss.serialize_index(vectors.empty_index(plan)).tobytes())
    count = len(vectors.embeddings)
    struct.pack_into("<q", header, 8, count)
    struct.pack_into("<Q", header, len(header) - 8, count * vectors.dim)
    with path.open("wb") as stream:
        stream.write(header)
        for _, block in vectors.blocks("add"):
            stream.write(block.data)


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


def assign(index: Any, vectors: LayerVectors, gpu: bool = False) -> Numbers:
    """Returns the inverted list of every vector, int64 [N]."""
    quantizer = faiss.index_cpu_to_all_gpus(index.quantizer) if gpu else index.quantizer
    assigned = np.empty(len(vectors.embeddings), np.int64)
    for start, block in vectors.blocks("assign"):
        assigned[start : start + len(block)] = quantizer.search(block, 1)[1][:, 0]
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
    with path.open("wb") as stream:
        stream.write(header + sizes.tobytes())
        stream.flush()
        for start, block in blocks:
            lists = assigned[start : start + len(block)]
            codes = np.empty((len(block), index.code_size), np.uint8)
            index.encode_vectors(len(block), *map(faiss.swig_ptr, (block, lists, codes)))
            order = np.argsort(lists, kind="stable")
            present, firsts = np.unique(lists[order], return_index=True)
            for list_number, members in zip(present, np.split(order, firsts[1:]), strict=True):
                os.pwrite(stream.fileno(), codes[members].data, int(code_offsets[list_number]))
                numbers = (members + start).astype("<i8")
                os.pwrite(stream.fileno(), numbers.data, int(number_offsets[list_number]))
                code_offsets[list_number] += len(members) * index.code_size
                number_offsets[list_number] += len(members) * 8


def measure(
    index: Any,
    vectors: LayerVectors,
    plan: Plan,
    query_numbers: Numbers,
    k: int,
    target: float,
    gpu: bool = False,
) -> tuple[int, Recall | None]:
    """Returns the setting that reaches the target of recall@k, and the recall.

    The queries are the samples `query_numbers`; a single vector has no recall (None).
    """
    lowest, highest = {"flat": (0, 0), "hnsw": (16, MAX_EF)}.get(plan.kind, (1, plan.lists))
    if not k:
        return lowest, None

    def search(queries: Vectors, k: int, setting: int) -> Numbers:
        set_default(index, plan, setting)
        starts = range(0, len(queries), QUERY_BLOCK)
        return np.concatenate([index.search(queries[i : i + QUERY_BLOCK], k)[1] for i in starts])

    exact = ExactSearch(vectors.take, vectors.blocks(), query_numbers, k, index.metric_type, gpu)
    return exact.tune(search, lowest, highest, target, plan.kind in CODED)
