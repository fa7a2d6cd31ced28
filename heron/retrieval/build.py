"""Builds an index from embeddings: checks, trains, adds in blocks, measures; all or nothing."""

import shutil
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from heron.base.artefact import MANIFEST, FileSum
from heron.base.atomic import Kept, kept_in_cache, locked, naming, new_folder
from heron.base.errors import RetrievalError
from heron.base.extras import require
from heron.base.workers import ALONE, Executor
from heron.evaluation.knn import Numbers, Vectors, require_gpus
from heron.retrieval.embeddings import FORMAT, Embeddings, Layer
from heron.retrieval.index_files import (
    INDEX,
    IndexManifest,
    Prefix,
    kept_beside,
    read_faiss,
    rotation,
    set_default,
)
from heron.retrieval.index_plan import (
    CODED,
    METRICS,
    MapKind,
    Metric,
    Plan,
    RequestedKind,
    choose_plan,
    compared_by,
)
from heron.retrieval.inverted_file import assign, train, trained, write_lists
from heron.retrieval.locations import Output
from heron.retrieval.map import MAP, draw_map
from heron.retrieval.recall import ExactSearch, Recall
from heron.retrieval.vectors import LayerVectors, VectorsInMemory

faiss = require("faiss", "an index")
MAX_EF = 4096  # the largest efSearch that is tried
QUERY_BLOCK = 256  # queries searched at a time: FAISS keeps nprobe numbers for each


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
    executor: Executor = ALONE,  # assigns vectors to lists, a part of the embeddings an item
    map: MapKind = "pca",  # of all samples, for the page
    progress: bool = True,
    overwrite: bool = False,  # move what `out` holds aside
) -> IndexManifest:
    """Builds an index of a layer of embeddings, measures its recall, and returns its manifest.

    Queries and training sample are drawn without overlap. Queries are in the index, as every sample
    is; each is left out of its own neighbours.

    If it is interrupted, a call with the same embeddings and settings goes on: see `_keep`.

    Raises a MissingPackage if a map by UMAP needs it, and a RetrievalError if a vector is not
    finite, or zero under cosine; keys repeat; the embeddings were altered; the budget is too small;
    `out` is not empty; or FAISS lacks GPUs.
    """
    count = len(embeddings)
    _refuse_missing(map, gpu)  # before the work rather than after it
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
    with _place(out, overwrite) as (work, folder):
        seconds: dict[str, float] = {}
        kept = _keep(folder, vectors, plan, seed, held_out, gpu)
        index = make(vectors, plan, training, work / INDEX, seconds, gpu, executor, kept)
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


def _keep(
    folder: Path, vectors: LayerVectors, plan: Plan, seed: int, held_out: int, gpu: bool
) -> Kept | None:
    """Opens what is kept of an inverted file, trained and assigned, until the index is there.

    It belongs to all that decides the lists of vectors. Nothing is kept of vectors in memory.
    """
    embeddings = vectors.embeddings
    if not plan.lists or not isinstance(embeddings, Embeddings):
        return None
    chosen = {"kind", "lists", "subvectors", "bits", "training"}
    made_from = {
        "embeddings": embeddings.manifest.fingerprint,
        "views": embeddings.compares or "all",
        "layer": vectors.layer,
        "metric": vectors.metric,
        "width": vectors.prefix and vectors.prefix.width,
        "seed": seed,
        "queries": held_out,
        "gpu": gpu,
        "faiss": faiss.__version__,
    } | plan.model_dump(mode="json", include=chosen)
    return Kept(folder, made_from)


@contextmanager
def _place(out: str | Path, overwrite: bool) -> Iterator[tuple[Path, Path]]:
    """Gives a folder that becomes `out`, or whose files are put there; and one of what is kept."""
    output = Output(out)
    if output.folder is not None:
        kept = kept_beside(output.folder)
        with new_folder(output.folder, overwrite, RetrievalError) as work:
            yield work, kept
    else:
        kept = kept_in_cache("index", out)
        with locked(output, output.lock):
            output.claim(overwrite, lambda names: MANIFEST not in names and INDEX in names)
            with output.writing(MANIFEST) as work:
                yield work, kept
    shutil.rmtree(kept, ignore_errors=True)


def _refuse_missing(map: MapKind, gpu: bool) -> None:
    if map == "umap":
        require("umap", "a map by UMAP")
    if gpu:
        require_gpus()


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
    executor: Executor = ALONE,
    kept: Kept | None = None,
) -> Any:
    """Trains, adds and writes; returns the FAISS index, memory-mapped if the plan says so."""
    if plan.kind == "hnsw":
        index = vectors.empty_index(plan)
        with _timed(seconds, "add"):
            for _, block in vectors.blocks("add"):
                index.add(block)
        with _timed(seconds, "write"), naming(path, path):
            try:
                faiss.write_index(index, str(path))
            except RuntimeError as fault:  # whatever the reason is
                raise OSError(f"{path}: {' '.join(str(fault).split())}") from None
        return index
    if plan.kind == "flat":
        with _timed(seconds, "add"):
            write_flat(path, vectors, plan)
    else:
        with _timed(seconds, "train"):
            index = trained(kept, plan, lambda: train(vectors, plan, training, gpu))
        with _timed(seconds, "assign"):
            assigned = assign(index, vectors, gpu, executor, kept)
        with _timed(seconds, "add"):
            write_lists(path, index, vectors.blocks("add"), assigned)
        del index, assigned
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
    with naming(path, path), path.open("wb") as stream:
        stream.write(header)
        for _, block in vectors.blocks("add"):
            stream.write(block.data)


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
