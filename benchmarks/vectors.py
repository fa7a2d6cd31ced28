"""Drawn vectors and their embeddings folder; and `auto` on a million of them, within a budget."""

import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch
from numpy.typing import NDArray

from heron.base.artefact import MANIFEST, FileSum
from heron.retrieval.build import build_index
from heron.retrieval.embeddings import (
    FORMAT,
    Embeddings,
    EmbeddingsManifest,
    LayerRecord,
    Part,
    part_name,
)
from heron.retrieval.index import Index
from heron.retrieval.samples import Samples

CLUSTERS, INNER = 1000, 16  # Gaussians, and dimensions that each extends in
PART_ROWS = 65_536


def draw(rows: int, dim: int, seed: int = 0) -> Iterator[NDArray[np.float32]]:
    """Vectors of the mixture, a part at a time: centre + plane z + noise."""
    rng = np.random.default_rng(seed)
    inner = min(INNER, dim)
    centres = rng.standard_normal((CLUSTERS, dim), dtype=np.float32)
    planes = rng.standard_normal((64, inner, dim), dtype=np.float32) / np.sqrt(np.float32(inner))
    for first in range(0, rows, PART_ROWS):
        count = min(PART_ROWS, rows - first)
        cluster = rng.integers(0, CLUSTERS, count)
        out = centres[cluster] + 0.05 * rng.standard_normal((count, dim), dtype=np.float32)
        for number, plane in enumerate(planes):
            rows_of_plane = np.flatnonzero(cluster % len(planes) == number)
            out[rows_of_plane] += (
                0.6 * rng.standard_normal((len(rows_of_plane), inner), dtype=np.float32) @ plane
            )
        yield out


def write_embeddings(
    folder: Path,
    rows: int,
    dim: int,
    data: str = "drawn",
    keys: Sequence[str] = (),
    labels: int = 0,
) -> None:
    """Writes a folder of drawn vectors, as `heron embed` would for shards with these keys.

    With labels, each sample has some, the first of them most often.
    """
    (folder / "hidden").mkdir(parents=True)
    part_records = []
    for number, vectors in enumerate(draw(rows, dim)):
        path = folder / part_name("hidden", number)
        np.save(path, vectors, allow_pickle=False)
        part_records.append(Part(count=len(vectors), files={"hidden": FileSum.of(path)}))
    key_texts = keys or [f"{row:08d}" for row in range(rows)]
    share = np.linspace(0.6, 0.05, labels)
    targets = (np.random.default_rng(2).random((rows, labels)) < share).astype(np.uint8)
    samples = Samples(
        np.array(key_texts, np.bytes_),
        np.arange(rows, dtype=np.int64),
        targets,
        np.full(rows, bool(labels)),
        [f"label {number}" for number in range(labels)],
        "multi_label" if labels else "none",
    )
    EmbeddingsManifest(
        format=FORMAT,
        run="drawn",
        checkpoint="0" * 64,
        data=data,
        data_fingerprint=f"sha256:{'0' * 64}",
        precision="fp32",
        rows=rows,
        layers={"hidden": LayerRecord(dim=dim, dtype="float32", views=1)},
        parts=part_records,
        samples=samples.save(folder),
        lost={},
    ).write(folder / MANIFEST)


def index_million(folder: Path, out: Path, budget: int) -> dict[str, Any]:
    """Build with `auto` within a budget; bytes, recall and times."""
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    embeddings = Embeddings.open(folder)
    queries = next(draw(1024, embeddings.layer("hidden").dim, seed=1))
    faiss.knn(queries, queries, 2)  # what FAISS and BLAS allocate once
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    build_index(embeddings, out, memory_bytes=budget, progress=False)
    index = Index.open(out, verify=False)
    peak = resident("VmHWM") - before
    manifest, seconds = index.manifest, []
    assert manifest.recall is not None
    for first in range(0, len(queries), 64):
        begin = time.perf_counter()
        index.search(queries[first : first + 64], 10)
        seconds.append(time.perf_counter() - begin)
    return {
        "kind": manifest.kind,
        "why": manifest.plan.why,
        "predicted": manifest.plan.build_bytes,
        "peak": peak,
        "open": manifest.plan.index_bytes,
        "recall": manifest.recall.value,
        "target": manifest.recall.target,
        "setting": ", ".join(f"{name} {value}" for name, value in manifest.search.items()),
        "ms": 1e3 * statistics.median(seconds) / 64,
        "seconds": manifest.seconds,
    }


def resident(field: str) -> int:
    """Returns bytes of this process: `VmRSS` is the current size, `VmHWM` the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024
