"""An index on disk: FAISS behind a manifest that says what it holds, and the sample of each row."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any, Literal, Self

import faiss
import numpy as np
from numpy.typing import ArrayLike, NDArray

from heron.pipeline.config.errors import RetrievalError
from heron.pipeline.retrieval.embeddings import Embeddings
from heron.pipeline.retrieval.index_manifest import (
    AGAIN,
    IndexManifest,
    check_file,
    load_index_manifest,
)
from heron.pipeline.retrieval.kinds import Metric, Plan
from heron.pipeline.retrieval.samples import Samples

INDEX = "index.faiss"
NUMBERS = {"inner_product": faiss.METRIC_INNER_PRODUCT, "euclidean": faiss.METRIC_L2}
TINY = float(np.finfo(np.float32).tiny)  # a square below this has lost its digits
SETTINGS = {"flat": "", "ivf": "nprobe", "ivfpq": "nprobe", "hnsw": "efSearch"}

Numbers = NDArray[np.int64]
Vectors = NDArray[np.float32]


@dataclass(frozen=True)
class Neighbours:
    """The nearest samples of some queries, the nearest first.

    Attributes:
        numbers: of samples, int64 [queries, k]; -1 where fewer than k are allowed.
        scores: float32 [queries, k]: cosine or inner product, larger is nearer; or the Euclidean
            distance, smaller is nearer; NaN where there is no sample. Those of `ivfpq` are of the
            coded vectors.
    """

    numbers: Numbers
    scores: Vectors


class Index:
    """An open index; searches may run in several threads.

    Attributes:
        folder: where it lies.
        manifest: what it holds.
        samples: the sample of each vector.
    """

    def __init__(
        self, folder: Path, manifest: IndexManifest, samples: Samples, faiss_index: Any
    ) -> None:
        """Hold what `open` has checked."""
        self.folder, self.manifest, self.samples = folder, manifest, samples
        self.faiss, self._lock = faiss_index, Lock()
        self.gpu: Any = None
        self.setting = next(iter(manifest.search.values()), 0)
        set_default(faiss_index, manifest.kind, self.setting)

    @classmethod
    def open(cls, folder: str | Path, verify: bool = True, gpu: bool = False) -> Self:
        """Open a folder that `heron index` wrote.

        Args:
            folder: of the index.
            verify: compare all files with their checksums, a pass over all bytes; their sizes are
                always compared. FAISS is handed no file that fails.
            gpu: search without a filter on all GPUs, where faiss-gpu is installed and sees some;
                unmeasured. `hnsw` stays on the processor.

        Raises:
            RetrievalError: there is no index, or a file is foreign, truncated or altered.
        """
        folder = Path(folder)
        manifest = load_index_manifest(folder)
        for name, file in manifest.files.items():
            check_file(folder / name, file, verify)
        samples = Samples.load(folder)
        held = read_faiss(folder / INDEX, manifest.plan)
        if fault := mismatch(held, manifest, len(samples)):
            raise RetrievalError(f"{folder}: {fault}; {AGAIN}")
        found = cls(folder, manifest, samples, held)
        if gpu and manifest.kind != "hnsw" and gpus():
            found.gpu = faiss.index_cpu_to_all_gpus(held)
        return found

    def __len__(self) -> int:
        """How many vectors."""
        return self.manifest.count

    def check(self, embeddings: Embeddings) -> None:
        """Refuse embeddings that are not those of the index.

        Raises:
            RetrievalError: they come of another checkpoint, or are of other samples.
        """
        mine, other = self.manifest, embeddings.manifest
        kept = self.manifest.files["keys.npy"].sha256
        pairs = [
            ("checkpoint", mine.checkpoint, other.checkpoint),
            ("data", mine.data_sha256, other.data_sha256),
            ("keys", kept, other.samples.get("keys.npy", "none")),
            ("dimension", str(mine.dim), str(embeddings.layer(mine.layer).dim)),
            ("manifest", mine.embeddings_sha256, embeddings.sha256),
        ]
        if differ := [f"{name} {b[:12]}, not {a[:12]}" for name, a, b in pairs if a != b]:
            raise RetrievalError(
                f"{embeddings.folder} is not what {self.folder} was built from: "
                f"{'; '.join(differ)}; expected the embeddings {mine.embeddings}; {AGAIN}"
            )

    def search(
        self, vectors: ArrayLike, k: int, allowed: NDArray[np.bool_] | None = None
    ) -> Neighbours:
        """The k nearest samples of each vector, of those allowed.

        Without a filter the index is searched with the setting of its manifest. With one, all
        that are allowed are compared where they are few; else the setting grows as the share of
        the allowed falls, for neighbours are then as much further off. Where k exist and fewer
        were found, the setting doubles until they are.

        Args:
            vectors: [queries, dim], float32, not normalised.
            k: neighbours of each.
            allowed: which samples may be found, bool [N]; None: all.

        Raises:
            RetrievalError: a vector has another dimension, is not finite, or is zero under
                cosine; k is not between 1 and N; the filter is of another length.
        """
        queries = self._queries(vectors)
        if not 1 <= k <= len(self):
            raise RetrievalError(
                f"k is {k}; expected 1 to {len(self):,}, the number of vectors in {self.folder}"
            )
        if allowed is None:
            scores, numbers = (self.gpu or self.faiss).search(queries, k)
            self._widen(queries, self.setting, None, k, numbers, scores)
        else:
            numbers, scores = self._filtered(queries, k, allowed)
        return Neighbours(numbers, self._scores(numbers, scores))

    def _filtered(
        self, queries: Vectors, k: int, allowed: NDArray[np.bool_]
    ) -> tuple[Numbers, Vectors]:
        if allowed.shape != (len(self),) or allowed.dtype != np.bool_:
            raise RetrievalError(
                f"a filter is {allowed.dtype} {list(allowed.shape)}; expected bool "
                f"[{len(self)}], a flag for each sample of {self.folder}"
            )
        there = int(allowed.sum())
        if there == 0:
            numbers = np.full((len(queries), k), -1, np.int64)
            return numbers, np.zeros(numbers.shape, np.float32)
        selector = faiss.IDSelectorBitmap(np.packbits(allowed, bitorder="little"))
        setting = self._setting(there / len(self))
        scores, numbers = self._run(queries, k, setting, selector)
        self._widen(queries, setting, selector, min(k, there), numbers, scores)
        return numbers, scores

    def _setting(self, share: float) -> int:
        """The setting where a share of the samples is allowed; 0: compare with all of them.

        A share s of N vectors is compared for a query without a filter. With one, neighbours are
        1 / share times as rare, and s N / share are looked at; all that are allowed are share N.
        They are compared, which is exact as well, where they are fewer: share^2 <= s.
        """
        kind, plan = self.manifest.kind, self.manifest.plan
        if kind == "flat":
            return 0
        if kind == "hnsw":
            scanned = min(1.0, 2 * plan.links * self.setting / len(self))
        else:
            scanned = self.setting / plan.lists
        return 0 if share * share <= scanned else math.ceil(self.setting / share)

    def _widen(
        self,
        queries: Vectors,
        setting: int,
        selector: Any,
        there: int,
        numbers: Numbers,
        scores: Vectors,
    ) -> None:
        """Search again, in place, for queries that got fewer neighbours than there are."""
        last = numbers[:, there - 1]
        while setting and len(last) and last.min() < 0:
            short = np.flatnonzero(last < 0)
            setting *= 2
            if self.manifest.kind == "hnsw":
                setting = 0 if 2 * self.manifest.plan.links * setting >= len(self) else setting
            elif setting >= self.manifest.plan.lists:
                setting = 0
            found = self._run(queries[short], numbers.shape[1], setting, selector)
            scores[short], numbers[short] = found

    def _run(
        self, queries: Vectors, k: int, setting: int, selector: Any
    ) -> tuple[Vectors, Numbers]:
        """Search with a setting; 0 compares with all. FAISS borrows `selector`."""
        index, chosen = self.faiss, {} if selector is None else {"sel": selector}
        if self.manifest.kind == "flat":
            params = faiss.SearchParameters(**chosen)
        elif self.manifest.kind == "hnsw" and not setting:
            index, params = self._storage, faiss.SearchParameters(**chosen)
        elif self.manifest.kind == "hnsw":
            params = faiss.SearchParametersHNSW(efSearch=setting, **chosen)
        else:
            lists = self.manifest.plan.lists
            params = faiss.SearchParametersIVF(nprobe=min(setting or lists, lists), **chosen)
        found: tuple[Vectors, Numbers] = index.search(queries, k, params=params)
        return found

    @cached_property
    def _storage(self) -> Any:
        """The vectors of HNSW, a flat index."""
        return faiss.downcast_index(self.faiss.storage)

    def _queries(self, vectors: ArrayLike) -> Vectors:
        with np.errstate(over="ignore"):  # what float32 cannot hold is infinite, and refused
            found = np.asarray(vectors, np.float32)
        if found.ndim != 2 or found.shape[1] != self.manifest.dim:
            raise RetrievalError(
                f"queries are {list(found.shape)}; expected [queries, {self.manifest.dim}], "
                f"vectors of layer '{self.manifest.layer}' as in {self.folder}"
            )
        return prepared(found, self.manifest.normalised, lambda row: f"query {row}")

    def _scores(self, numbers: Numbers, scores: Vectors) -> Vectors:
        """FAISS's scores as ours: it gives squared distances, and any number for none."""
        if self.manifest.metric == "euclidean":
            np.sqrt(np.maximum(scores, 0, out=scores), out=scores)
        elif self.manifest.compared_by == "euclidean":
            np.subtract(1, scores / 2, out=scores)
        if numbers.size and numbers[:, -1].min() < 0:  # the last goes missing first
            scores[numbers < 0] = np.nan
        return scores

    def vectors(self, numbers: NDArray[np.int64]) -> Vectors:
        """Some vectors as the index holds them, float32 [numbers, dim].

        They are unit vectors under cosine, and those of `ivfpq` are what the codes stand for.

        Raises:
            RetrievalError: there is no such number.
        """
        numbers = np.ascontiguousarray(numbers, np.int64)
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < len(self):
            raise RetrievalError(
                f"numbers {numbers.min()} to {numbers.max()}; expected 0 to {len(self) - 1}, "
                f"those of the vectors in {self.folder}"
            )
        if self.manifest.kind in ("ivf", "ivfpq"):
            with self._lock:  # where each vector lies is worked out at the first call: 8 N bytes
                self.faiss.make_direct_map()
        found: Vectors = self.faiss.reconstruct_batch(numbers)
        return found


def prepared(vectors: NDArray[np.float32], unit: bool, name: Callable[[int], str]) -> Vectors:
    """Vectors as FAISS gets them: finite, contiguous, of length 1 if asked; [rows, dim].

    Args:
        vectors: float32 [rows, dim]; they stay as they are.
        unit: divide by the length.
        name: of a row, for messages.

    Raises:
        RetrievalError: rows are not finite, or zero where they must have a direction; names them.
    """
    with np.errstate(all="ignore"):
        squares = np.asarray(np.vecdot(vectors, vectors), np.float32)
    least = TINY if unit else 0.0
    if len(squares) and not (squares.min() >= least and squares.max() < np.inf):  # or NaN
        if not np.isfinite(squares).all():
            raise _fault(~np.isfinite(squares), "not finite, or too large to square", name)
        raise _fault(squares < least, "zero, which has no cosine", name)
    if not unit:
        return np.ascontiguousarray(vectors)
    return np.divide(vectors, np.sqrt(squares)[:, None], dtype=np.float32)


def _fault(bad: NDArray[np.bool_], what: str, name: Callable[[int], str]) -> RetrievalError:
    rows = np.flatnonzero(bad)
    named = ", ".join(name(int(row)) for row in rows[:5]) + (", ..." if len(rows) > 5 else "")
    return RetrievalError(
        f"{len(rows)} of {len(bad)} vectors are {what}: {named}; expected finite vectors"
        + (", none of them zero" if "zero" in what else "")
        + "; leave these samples out, or look at the model that made them"
    )


def read_faiss(path: Path, plan: Plan) -> Any:
    """FAISS's index from its file, or mapped from it: pages are then read when a search asks.

    Raises:
        RetrievalError: FAISS cannot read it.
    """
    flags = 0 if plan.table else faiss.IO_FLAG_SKIP_PRECOMPUTE_TABLE
    if plan.mapped and plan.lists:
        flags |= faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY
    elif plan.mapped:
        flags |= faiss.IO_FLAG_MMAP_IFC
    try:
        return faiss.read_index(str(path), flags)
    except RuntimeError as error:
        raise RetrievalError(
            f"{path}: FAISS {faiss.__version__} cannot read it: {error}; {AGAIN}"
        ) from None


def mismatch(held: Any, manifest: IndexManifest, samples: int) -> str:
    """What of FAISS's index or of the samples is not what the manifest says, or ""."""
    pairs = [
        ("vectors", held.ntotal, manifest.count),
        ("dimensions", held.d, manifest.dim),
        ("samples", samples, manifest.count),
        ("the metric of FAISS", held.metric_type, NUMBERS[manifest.compared_by]),
    ]
    differ = [f"{name}: {found}, expected {told}" for name, found, told in pairs if found != told]
    return "; ".join(differ)


def set_default(held: Any, kind: str, setting: int) -> None:
    """Have FAISS search with a setting where none is given."""
    if kind == "hnsw":
        held.hnsw.efSearch = setting
    elif kind != "flat":
        held.nprobe = setting


def compared_by(metric: Metric, kind: str) -> Literal["inner_product", "euclidean"]:
    """What FAISS computes for a metric: see `IndexManifest`."""
    by_distance = metric == "euclidean" or (metric == "cosine" and kind == "ivfpq")
    return "euclidean" if by_distance else "inner_product"


def gpus() -> int:
    """GPUs that FAISS can use: none unless faiss-gpu is installed."""
    return int(faiss.get_num_gpus()) if hasattr(faiss, "StandardGpuResources") else 0
