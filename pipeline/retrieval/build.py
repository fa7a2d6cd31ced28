"""From embeddings to an index: checked, trained, added in blocks, measured; whole or not at all."""

import fcntl
import operator
import os
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from heron.pipeline.config.errors import RetrievalError
from heron.pipeline.retrieval.embeddings import Embeddings, Layer
from heron.pipeline.retrieval.index import (
    INDEX,
    NUMBERS,
    SETTINGS,
    Index,
    Numbers,
    Vectors,
    compared_by,
    gpus,
    prepared,
    read_faiss,
    set_default,
)
from heron.pipeline.retrieval.index_manifest import FORMAT, File, IndexManifest, check_file
from heron.pipeline.retrieval.kinds import (
    BLOCK,
    METRICS,
    POINTS,
    Asked,
    Metric,
    Plan,
    Shape,
    choose,
)
from heron.pipeline.retrieval.recall import Recall, Truth
from heron.pipeline.retrieval.samples import FILES, Samples
from heron.shards.atomic import save_json
from heron.shards.manifest import MANIFEST
from heron.shards.progress import progress_bar
from heron.shards.sources.base import sha256

LOCK = ".lock"
MOST_EF = 4096  # the largest efSearch that is tried
QUERY_BLOCK = 256  # queries searched at a time: FAISS keeps nprobe numbers for each


@dataclass(frozen=True)
class Source:
    """A layer of embeddings as FAISS gets it."""

    embeddings: Embeddings
    layer: Layer
    metric: Metric

    @property
    def dim(self) -> int:
        """Of a vector."""
        return self.embeddings.layer(self.layer).dim

    def blocks(self, what: str = "", progress: bool = False) -> Iterator[tuple[int, Vectors]]:
        """The number of the first and the vectors, some at a time, checked; under a bar."""
        settings: dict[str, Any] = {"desc": what, "unit": "vector", "disable": not progress}
        with progress_bar(total=len(self.embeddings), **settings) as bar:
            for start, block in self.embeddings.blocks(self.layer, BLOCK):
                yield start, self._prepared(block, partial(operator.add, start))
                bar.update(len(block))

    def take(self, numbers: Numbers) -> Vectors:
        """The vectors of some samples, checked; some at a time, so that they are held once."""
        found = np.empty((len(numbers), self.dim), np.float32)
        for first in range(0, len(numbers), BLOCK):
            mine = numbers[first : first + BLOCK]
            block = self.embeddings.take(self.layer, mine)
            found[first : first + BLOCK] = self._prepared(block, mine.__getitem__)
        return found

    def _prepared(self, vectors: Vectors, number: Callable[[int], int]) -> Vectors:
        def name(row: int) -> str:
            return f"'{self.embeddings.samples.key(int(number(row)))}'"

        return prepared(vectors, self.metric == "cosine", name)


def build_index(
    embeddings: Embeddings,
    out: str | Path,
    *,
    layer: Layer = "hidden",
    kind: Asked = "auto",
    metric: Metric = "cosine",
    memory_bytes: int | None = None,
    recall: float = 0.95,
    k: int = 10,
    queries: int = 1000,
    seed: int = 0,
    progress: bool = True,
) -> Index:
    """Build an index of a layer of embeddings, and measure its recall.

    Queries and training sample are drawn from the embeddings by `seed`, without overlap. Queries
    are in the index, as every sample is; each is left out of its own neighbours.

    Args:
        embeddings: to index.
        out: folder to make; it appears when it is whole.
        layer: of the embeddings.
        kind: of index; see `choose`.
        metric: cosine is the inner product of unit vectors.
        memory_bytes: the budget; None: half of what the machine has free.
        recall: target of recall@k, for which nprobe or efSearch is chosen.
        k: neighbours that recall is measured on, at most N - 1.
        queries: that it is measured on, at most a tenth of the vectors.
        seed: of the draw.
        progress: show bars.

    Raises:
        RetrievalError: a vector is not finite, or zero under cosine; keys are there twice; a file
            of the embeddings was altered; the budget is too small; `out` holds something.
    """
    out, count = Path(out), len(embeddings)
    if metric not in METRICS:
        raise RetrievalError(f"unknown metric '{metric}'; expected {', '.join(METRICS)}")
    if not 0 < recall <= 1 or k < 1 or queries < 1:
        raise RetrievalError(
            f"recall {recall}, k {k}, queries {queries}; expected a target of recall in (0, 1], "
            "and at least one neighbour and query to measure it on"
        )
    if not count:
        raise RetrievalError(f"{embeddings.folder} has no vectors; expected some to index")
    source = Source(embeddings, layer, metric)
    held_out = min(queries, max(1, count // 10))
    plan = choose(kind, _shape(source, held_out), memory_bytes)
    embeddings.samples.refuse_duplicates()
    order = np.random.default_rng(seed).permutation(count)
    own = np.sort(order[:held_out])
    training = np.sort(order[held_out : held_out + plan.training])
    del order
    with _folder(out) as work:
        watch = Stopwatch()
        held = make(source, plan, training, work, watch, progress)
        setting, measured = measure(held, source, plan, own, min(k, count - 1), recall)
        watch.lap("recall")
        for name in FILES:
            shutil.copyfile(embeddings.folder / name, work / name)
        files = {
            path.name: File(bytes=path.stat().st_size, sha256=sha256(path))
            for path in sorted(work.iterdir())
            if path.name != LOCK
        }
        for name, digest in embeddings.manifest.samples.items():
            size = files[name].bytes
            check_file(embeddings.folder / name, File(bytes=size, sha256=digest))
        watch.lap("checksums")
        known = embeddings.manifest
        manifest = IndexManifest(
            format=FORMAT,
            kind=plan.kind,
            metric=metric,
            normalised=metric == "cosine",
            compared_by=compared_by(metric, plan.kind),
            layer=layer,
            dim=source.dim,
            count=count,
            checkpoint=known.checkpoint,
            embeddings=str(embeddings.folder),
            embeddings_sha256=embeddings.sha256,
            run=known.run,
            data=known.data,
            data_sha256=known.data_sha256,
            plan=plan,
            seed=seed,
            faiss=faiss.__version__,
            search={SETTINGS[plan.kind]: setting} if plan.kind != "flat" else {},
            recall=measured,
            seconds=watch.seconds,
            files=files,
        )
        save_json(work / MANIFEST, manifest.model_dump(mode="json"))
    return Index(out, manifest, Samples.load(out), held)


class Stopwatch:
    """Seconds of each step."""

    def __init__(self) -> None:
        """Start."""
        self.seconds: dict[str, float] = {}
        self._at = time.perf_counter()

    def lap(self, name: str) -> None:
        """Since the last lap, under a name."""
        now = time.perf_counter()
        self.seconds[name] = round(self.seconds.get(name, 0.0) + now - self._at, 4)
        self._at = now


def make(
    source: Source, plan: Plan, training: Numbers, work: Path, watch: Stopwatch, progress: bool
) -> Any:
    """Train, add and write; FAISS's index, which for a mapped one holds its file mapped."""
    metric, dim, path = faiss_metric(source, plan), source.dim, work / INDEX
    if plan.kind == "hnsw":
        held = faiss.IndexHNSWFlat(dim, plan.links, metric)
        for _, block in source.blocks("add", progress):
            held.add(block)
        watch.lap("add")
        faiss.write_index(held, str(path))
        watch.lap("write")
        return held
    if plan.kind == "flat":
        write_flat(path, source.blocks("add", progress), len(source.embeddings), dim, metric)
    else:
        trained = train(source, plan, training)
        watch.lap("train")
        assigned = assign(trained, source, progress)
        watch.lap("assign")
        write_lists(path, trained, source.blocks("add", progress), assigned)
        del trained, assigned
    watch.lap("add")
    held = read_faiss(path, plan)
    watch.lap("read")
    return held


def faiss_metric(source: Source, plan: Plan) -> int:
    """FAISS's number of what it computes."""
    return int(NUMBERS[compared_by(source.metric, plan.kind)])


def write_flat(
    path: Path, blocks: Iterator[tuple[int, Vectors]], count: int, dim: int, metric: int
) -> None:
    """Write the file of a flat index a block at a time, as `faiss.write_index` would.

    FAISS keeps all vectors in memory until it writes them. Its file is a header, then the
    vectors: that of an empty index is taken, and the number of vectors (at byte 8) and of values
    (its last 8 bytes) are filled in. Tests compare the file with FAISS's.
    """
    header = bytearray(faiss.serialize_index(faiss.IndexFlat(dim, metric)).tobytes())
    struct.pack_into("<q", header, 8, count)
    struct.pack_into("<Q", header, len(header) - 8, count * dim)
    with path.open("wb") as stream:
        stream.write(header)
        for _, block in blocks:
            stream.write(block.data)


def train(source: Source, plan: Plan, training: Numbers) -> Any:
    """An inverted file with centroids, and codes where it has them; k-means on GPUs if any."""
    metric, dim = faiss_metric(source, plan), source.dim
    quantizer = faiss.IndexFlat(dim, metric)
    if plan.kind == "ivf":
        held = faiss.IndexIVFFlat(quantizer, dim, plan.lists, metric)
    else:
        held = faiss.IndexIVFPQ(quantizer, dim, plan.lists, plan.subvectors, plan.bits, metric)
        held.pq.cp.max_points_per_centroid = POINTS
        held.use_precomputed_table = -1  # it is not searched before it is read again
    held.own_fields = True  # the quantizer lives and ends with it
    quantizer.this.disown()
    on_gpus = faiss.index_cpu_to_all_gpus(faiss.IndexFlat(dim, metric)) if gpus() else None
    if on_gpus is not None:
        held.clustering_index = on_gpus
    held.train(source.take(training))
    held.clustering_index = None
    return held


def assign(held: Any, source: Source, progress: bool) -> Numbers:
    """The list of every vector, int64 [N]; on GPUs if any."""
    quantizer = faiss.index_cpu_to_all_gpus(held.quantizer) if gpus() else held.quantizer
    assigned = np.empty(len(source.embeddings), np.int64)
    for start, block in source.blocks("assign", progress):
        assigned[start : start + len(block)] = quantizer.search(block, 1)[1][:, 0]
    return assigned


def write_lists(
    path: Path, held: Any, blocks: Iterator[tuple[int, Vectors]], assigned: Numbers
) -> None:
    """Write the file of an inverted file a block at a time, as `faiss.write_index` would.

    FAISS keeps the lists in memory until it writes them, and a list that grows doubles its room.
    Its file is the trained index, then the size of each list, then for each list the codes and
    the numbers of its vectors. The size of every list is known from `assigned`, and so is the
    place of every code. Tests compare the file with FAISS's.

    Args:
        path: of the file.
        held: trained, and empty.
        blocks: all vectors, with the number of the first of each block.
        assigned: the list of every vector.
    """
    header = bytearray(faiss.serialize_index(held).tobytes())
    struct.pack_into("<q", header, 8, len(assigned))
    empty = struct.pack("<4sQQ4sQ", b"ilar", held.nlist, held.code_size, b"sprs", 0)
    if not header.endswith(empty):
        raise RetrievalError(
            f"FAISS {faiss.__version__} writes inverted files in a way that this version of heron "
            "does not know; expected that of FAISS 1.15; install faiss-cpu 1.15"
        )
    header[-len(empty) :] = struct.pack(
        "<4sQQ4sQ", b"ilar", held.nlist, held.code_size, b"full", held.nlist
    )
    sizes = np.bincount(assigned, minlength=held.nlist).astype("<u8")
    entry = held.code_size + 8
    codes_at = len(header) + sizes.nbytes + np.concatenate([[0], np.cumsum(sizes[:-1])]) * entry
    numbers_at = codes_at + sizes * held.code_size
    with path.open("wb") as stream:
        stream.write(header + sizes.tobytes())
        stream.flush()
        file = stream.fileno()
        for start, block in blocks:
            lists = assigned[start : start + len(block)]
            codes = np.empty((len(block), held.code_size), np.uint8)
            held.encode_vectors(len(block), *map(faiss.swig_ptr, (block, lists, codes)))
            order = np.argsort(lists, kind="stable")
            codes, numbers = codes[order], (order + start).astype("<i8")
            present, firsts = np.unique(lists[order], return_index=True)
            for number, first, last in zip(
                present.tolist(), firsts.tolist(), [*firsts.tolist()[1:], len(block)], strict=True
            ):
                os.pwrite(file, codes[first:last].data, int(codes_at[number]))
                os.pwrite(file, numbers[first:last].data, int(numbers_at[number]))
                codes_at[number] += (last - first) * held.code_size
                numbers_at[number] += (last - first) * 8


def measure(
    held: Any, source: Source, plan: Plan, own: Numbers, k: int, target: float
) -> tuple[int, Recall | None]:
    """The setting that reaches the target of recall, and the curve; None for a single vector."""
    least, most = {"flat": (0, 0), "hnsw": (16, MOST_EF)}.get(plan.kind, (1, plan.lists))
    if not k:
        return least, None

    def search(queries: Vectors, k: int, setting: int) -> Numbers:
        set_default(held, plan.kind, setting)
        cut = range(0, len(queries), QUERY_BLOCK)
        return np.concatenate([held.search(queries[i : i + QUERY_BLOCK], k)[1] for i in cut])

    truth = Truth(source.take, source.blocks(), own, k, faiss_metric(source, plan))
    return truth.tune(search, least, most, target, plan.kind == "ivfpq")


def _shape(source: Source, held_out: int) -> Shape:
    known = source.embeddings.manifest
    size = np.dtype(source.embeddings.layer(source.layer).dtype).itemsize
    return Shape(
        count=len(source.embeddings),
        dim=source.dim,
        part_bytes=max(part.count for part in known.parts) * source.dim * size,
        held_out=held_out,
        euclidean=source.metric != "inner_product",
    )


@contextmanager
def _folder(out: Path) -> Iterator[Path]:
    """A hidden folder beside `out`, which gets that name when all went well, else is removed.

    What a killed build left is removed by the next; one that still runs holds its lock.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RetrievalError(
            f"{out} is there already; expected a new or an empty folder; give another --out, or "
            "remove it"
        )
    work = out.with_name(f".{out.name}.part")
    work.mkdir(parents=True, exist_ok=True)
    lock = os.open(work / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RetrievalError(
                f"{work} is being written by another build; wait for it, or give another --out"
            ) from None
        for path in work.iterdir():
            if path.name != LOCK:
                path.unlink()
        try:
            yield work
            if out.exists():
                out.rmdir()
            work.rename(out)
            (out / LOCK).unlink()  # held until now: no other build has come between
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
    finally:
        os.close(lock)
