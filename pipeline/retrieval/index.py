"""An index on disk: FAISS behind a manifest that says what it holds, and the sample of each row."""

import math
import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from heron.pipeline.config.errors import RetrievalError
from heron.pipeline.config.extras import require
from heron.pipeline.evaluation.knn import Numbers, Vectors, require_gpus
from heron.pipeline.retrieval.embeddings import Embeddings, Layer
from heron.pipeline.retrieval.faiss_files import FAISS_METRICS, read_faiss
from heron.pipeline.retrieval.filters import passing
from heron.pipeline.retrieval.in_memory import vectors_in_memory
from heron.pipeline.retrieval.index_manifest import AGAIN, INDEX, IndexManifest, rotation
from heron.pipeline.retrieval.kinds import KINDS, Asked, Kind, Metric, Plan
from heron.pipeline.retrieval.samples import Samples
from heron.shards.artefact import MANIFEST

faiss = require("faiss", "an index")
TINY = float(np.finfo(np.float32).tiny)  # a square below this has lost its digits
CPU_ONLY: tuple[Kind, ...] = "hnsw", "rabitq"


class Neighbours(NamedTuple):
    """The nearest samples of some queries, the nearest first.

    Attributes:
        numbers: of samples, int64 [queries, k]; -1 where fewer than k are allowed.
        scores: float32 [queries, k]: cosine or inner product, larger is nearer; or the Euclidean
            distance, smaller is nearer; NaN where there is no sample. Of a kind with codes they
            are those of the coded vectors.
    """

    numbers: Numbers
    scores: Vectors


class Index:
    """An open index; searches may run in several threads.

    Attributes:
        folder: where it lies.
        manifest: what it holds.
        samples: the sample of each vector.
        faiss: FAISS's own index.
    """

    def __init__(
        self, folder: Path, manifest: IndexManifest, samples: Samples, faiss_index: Any
    ) -> None:
        """Holds what `open` has checked."""
        self.folder, self.manifest, self.samples = folder, manifest, samples
        self.faiss, self._lock = faiss_index, Lock()
        self.gpu: Any = None
        self.setting = next(iter(manifest.search.values()), 0)
        set_default(faiss_index, manifest.plan, self.setting)

    @classmethod
    def build(
        cls,
        vectors: ArrayLike,
        labels: ArrayLike | None = None,
        label_names: Sequence[str] | None = None,
        keys: Sequence[str] | None = None,
        kind: Asked = "auto",
        metric: Metric = "cosine",
        layer: Layer = "hidden",
        memory_bytes: int | None = None,
        recall: float = 0.95,
        seed: int = 0,
    ) -> "Index":
        """Indexes vectors in memory; `save` keeps what is otherwise gone with the index.

        Its files lie in a temporary folder (TMPDIR) for as long: N dim 4 bytes and more, or, of
        `sq8`, `rabitq` and `ivfpq`, their codes.

        Args:
            vectors: real numbers [N, dim], such as `Model.encode` returns.
            labels: what `where` of a search selects by: class numbers [N], -1 where none is
                known; or 0 and 1 [N, names], a column for each label.
            label_names: of classes or columns, in order; by default their numbers.
            keys: a text for each vector, no two the same; by default its number.
            kind: `flat`, `ivf`, `sq8`, `rabitq`, `binary`, `ivfpq`, `hnsw`, or `auto`: the most
                exact that is fast enough and fits the memory.
            metric: `cosine`, `inner_product` or `euclidean`.
            layer: of the model that made the vectors, for the record.
            memory_bytes: the budget; by default half of what the machine has free.
            recall: target of recall@10, which the index measures on itself.
            seed: of the draw of training sample and queries.

        Raises:
            RetrievalError: vectors, labels and names do not fit each other, a vector is not
                finite, or zero under cosine, or the budget is too small.
        """
        from heron.pipeline.retrieval.build import build_index

        given = vectors_in_memory(vectors, labels, label_names, keys)
        folder = Path(tempfile.mkdtemp(prefix="heron-index-"))
        options: dict[str, Any] = {"memory_bytes": memory_bytes, "recall": recall, "seed": seed}
        options |= {"layer": layer, "kind": kind, "metric": metric, "progress": False}
        try:
            index = build_index(given, folder, **options)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        weakref.finalize(index, shutil.rmtree, folder, ignore_errors=True)
        return index

    def save(self, folder: str | Path) -> None:
        """Writes the index to a new folder, which `Index.open` and `heron query` take.

        Raises:
            RetrievalError: the folder holds something, or is being written.
        """
        from heron.pipeline.retrieval.build import new_folder

        with new_folder(Path(folder)) as work:
            shutil.copytree(self.folder, work, dirs_exist_ok=True)

    @classmethod
    def open(cls, folder: str | Path, verify: bool = True, gpu: bool = False) -> Self:
        """Opens a folder that `heron index` wrote.

        `verify` compares all files with their checksums, once (see `FileSum.fault`); their sizes
        are always compared. FAISS is handed no file that fails. `gpu` searches without a filter on
        all GPUs that faiss-gpu sees (unmeasured).

        Raises:
            RetrievalError: there is no index, or a file is foreign, truncated or altered; or FAISS
                has no GPU, or no search of its kind on one.
        """
        if gpu:
            require_gpus()
        folder = Path(folder)
        remedy = "give a folder that `heron index` wrote"
        manifest = IndexManifest.read(folder / MANIFEST, remedy)
        manifest.check_files(folder, manifest.files, verify)
        samples = Samples.load(folder)
        if gpu and manifest.kind in CPU_ONLY:
            raise RetrievalError(
                f"{folder} is of kind {manifest.kind}, which FAISS searches on no GPU; expected "
                f"one of {', '.join(k for k in KINDS if k not in CPU_ONLY)}; leave --gpu out"
            )
        faiss_index = read_faiss(folder / INDEX, manifest.plan)
        pairs = [
            ("vectors", faiss_index.ntotal, manifest.count),
            ("dimensions", faiss_index.d, manifest.dim),
            ("samples", len(samples), manifest.count),
            ("the metric of FAISS", faiss_index.metric_type, FAISS_METRICS[manifest.compared_by]),
        ]
        if differ := [f"{name}: {a}, expected {b}" for name, a, b in pairs if a != b]:
            raise RetrievalError(f"{folder}: {'; '.join(differ)}; {AGAIN}")
        index = cls(folder, manifest, samples, faiss_index)
        if gpu:
            index.gpu = faiss.index_cpu_to_all_gpus(faiss_index)
        return index

    def __len__(self) -> int:
        """Returns how many vectors there are."""
        return self.manifest.count

    def check(self, embeddings: Embeddings) -> None:
        """Refuses embeddings that are of another checkpoint or other samples (RetrievalError)."""
        mine, other = self.manifest, embeddings.manifest
        whole = mine.prefix.dim if mine.prefix else mine.dim
        pairs = [
            ("checkpoint", mine.checkpoint, other.checkpoint),
            ("data", mine.data_fingerprint, other.data_fingerprint),
            ("keys", mine.files["keys.npy"].sha256, other.samples["keys.npy"].sha256),
            ("dimension", str(whole), str(embeddings.layer(mine.layer).dim)),
            ("fingerprint", mine.embeddings_fingerprint, other.fingerprint),
        ]
        if differ := [f"{name} {b[:19]}, not {a[:19]}" for name, a, b in pairs if a != b]:
            raise RetrievalError(
                f"{embeddings.folder} is not what {self.folder} was built from: "
                f"{'; '.join(differ)}; expected the embeddings {mine.embeddings}; {AGAIN}"
            )

    def search(
        self,
        vectors: ArrayLike,
        k: int = 10,
        where: str = "",
        allowed: NDArray[np.bool_] | None = None,
    ) -> Neighbours:
        """Returns the k nearest samples of each vector, of those that pass the filters.

        Without a filter the index is searched with the setting of its manifest. With one, all
        that are allowed are compared where they are few; else the setting grows as the share of
        the allowed falls, for neighbours are then as much further off. Where k exist and fewer
        were found, the setting doubles until they are.

        Args:
            vectors: float32 [queries, dim], not normalised, or the whole vectors of the layer where
                the index has a prefix of them.
            k: neighbours of each, 1 to N; a query that is in the index is its own nearest.
            where: a filter by label, such as "Beach and not Urban"; see `filters.parse`.
            allowed: a filter by sample, bool [N]; samples must pass both.

        Raises:
            RetrievalError: a vector has another dimension, is not finite, or is zero under
                cosine; k is not between 1 and N; `where` is no filter or passes no sample;
                `allowed` is of another length.
        """
        queries = self._queries(vectors)
        if not isinstance(k, int | np.integer) or not 1 <= k <= len(self):
            raise RetrievalError(
                f"k is {k!r}; expected 1 to {len(self):,}, the number of vectors in the index"
            )
        setting, selector, there = self.setting, None, k
        if allowed is not None and (allowed.shape != (len(self),) or allowed.dtype != np.bool_):
            raise RetrievalError(
                f"a filter is {allowed.dtype} {list(allowed.shape)}; expected bool "
                f"[{len(self)}], a flag for each sample of {self.folder}"
            )
        if where.strip():
            mask = passing(where, self.samples)
            allowed = mask if allowed is None else mask & allowed
        if allowed is not None:
            count = int(allowed.sum())
            if not count:
                none = np.full((len(queries), k), -1, np.int64)
                return Neighbours(none, np.full(none.shape, np.nan, np.float32))
            there = min(k, count)
            selector = faiss.IDSelectorBitmap(np.packbits(allowed, bitorder="little"))
            setting = self._setting(count / len(self))
        if self.gpu is not None and allowed is None:
            scores, numbers = self.gpu.search(queries, k)
        else:
            scores, numbers = self._run(queries, k, setting, selector)
        while setting and len(short := np.flatnonzero(numbers[:, there - 1] < 0)):
            setting = 0 if 2 * setting >= self._largest else 2 * setting
            scores[short], numbers[short] = self._run(queries[short], k, setting, selector)
        return Neighbours(numbers, self._scores(numbers, scores))

    @property
    def _largest(self) -> float:
        """The setting with which about all vectors are compared."""
        plan = self.manifest.plan
        return len(self) / (2 * plan.links) if plan.kind == "hnsw" else plan.lists

    def _setting(self, share: float) -> int:
        """Returns the setting where a share of the samples is allowed; 0 compares with all of them.

        A share s of N vectors is compared for a query without a filter. With one, neighbours are
        1 / share times as rare, and s N / share are looked at; all that are allowed are share N.
        They are compared, which is exact as well, where they are fewer: share^2 <= s.
        """
        if not self.setting or share * share <= self.setting / self._largest:
            return 0
        return math.ceil(self.setting / share)

    def _run(
        self, queries: Vectors, k: int, setting: int, selector: Any
    ) -> tuple[Vectors, Numbers]:
        """Searches with a setting; 0 compares with all. FAISS borrows `selector`."""
        index, plan = self.faiss, self.manifest.plan
        chosen = {} if selector is None else {"sel": selector}
        if plan.lists:
            nprobe = min(setting or plan.lists, plan.lists)
            params = faiss.SearchParametersIVF(nprobe=nprobe, **chosen)
        elif setting:
            params = faiss.SearchParametersHNSW(efSearch=setting, **chosen)
        else:  # HNSW keeps its vectors in a flat index
            index = faiss.downcast_index(index.storage) if plan.kind == "hnsw" else index
            params = faiss.SearchParameters(**chosen)
        found: tuple[Vectors, Numbers] = index.search(queries, k, params=params)
        if not -1 <= found[1].min(initial=-1) <= found[1].max(initial=-1) < len(self):
            raise RetrievalError(
                f"{self.folder / INDEX} holds a vector of number {found[1].max()}; expected 0 to "
                f"{len(self) - 1}; {AGAIN}"
            )
        return found

    def _queries(self, vectors: ArrayLike) -> Vectors:
        given = np.asarray(vectors)
        if given.dtype.kind not in "fiu":
            raise RetrievalError(
                f"queries are {given.dtype} {list(given.shape)}; expected numbers "
                f"[queries, {self.manifest.dim}]"
            )
        with np.errstate(over="ignore"):  # what float32 cannot hold is infinite, and refused
            found = given.astype(np.float32, copy=False)
        prefix = self.manifest.prefix
        if prefix is not None and found.ndim == 2 and found.shape[1] == prefix.dim:
            found = prefix.of(found)
        if found.ndim != 2 or found.shape[1] != self.manifest.dim:
            raise RetrievalError(
                f"queries are {list(found.shape)}; expected [queries, {self.manifest.dim}], "
                f"vectors of layer '{self.manifest.layer}' as in {self.folder}"
            )
        found = prepared(found, self.manifest.normalised, lambda row: f"query {row}")
        return found if self._rotation is None else found @ self._rotation

    @property
    def _rotation(self) -> Vectors | None:
        manifest = self.manifest
        return rotation(manifest.dim, manifest.seed) if manifest.kind == "rabitq" else None

    def _scores(self, numbers: Numbers, scores: Vectors) -> Vectors:
        """Turns FAISS's scores into ours: it gives squared distances, and any number for none."""
        if self.manifest.metric == "euclidean":
            np.sqrt(np.maximum(scores, 0, out=scores), out=scores)
        elif self.manifest.compared_by == "euclidean":
            np.subtract(1, scores / 2, out=scores)
        scores[numbers < 0] = np.nan
        return scores

    def vectors(self, numbers: NDArray[np.int64]) -> Vectors:
        """Returns some vectors as the index holds them, float32 [numbers, dim].

        They are unit vectors under cosine, and of a kind with codes what these stand for: of
        `rabitq` FAISS decodes the signs alone.

        Raises:
            RetrievalError: there is no such number.
        """
        numbers = np.ascontiguousarray(numbers, np.int64)
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < len(self):
            raise RetrievalError(
                f"numbers {numbers.min()} to {numbers.max()}; expected 0 to {len(self) - 1}, "
                f"those of the vectors in {self.folder}"
            )
        try:
            if self.manifest.plan.lists:
                with self._lock:  # the first call works out where each vector lies: 8 N bytes
                    self.faiss.make_direct_map()
            found: Vectors = self.faiss.reconstruct_batch(numbers)
        except RuntimeError as error:  # FAISS refuses numbers beyond N, and one that is not there
            text = " ".join(str(error).split())
            raise RetrievalError(f"{self.folder / INDEX}: {text}; {AGAIN}") from None
        return found if self._rotation is None else found @ self._rotation.T


def prepared(vectors: NDArray[np.float32], unit: bool, name: Callable[[int], str]) -> Vectors:
    """Returns vectors as FAISS gets them: finite, contiguous, of length 1 if asked; [rows, dim].

    Raises:
        RetrievalError: rows are not finite, or zero where they must have a direction; `name`
            names a row in the message.
    """
    with np.errstate(all="ignore"):
        squares = np.asarray(np.vecdot(vectors, vectors), np.float32)
    least = TINY if unit else 0.0
    if len(squares) and not (squares.min() >= least and squares.max() < np.inf):  # or NaN
        bad, what, wanted = ~np.isfinite(squares), "not finite, or too large to square", ""
        if not bad.any():
            bad, what, wanted = squares < least, "zero, which has no cosine", ", none of them zero"
        rows = np.flatnonzero(bad).tolist()
        named = ", ".join(map(name, rows[:5])) + (", ..." if len(rows) > 5 else "")
        raise RetrievalError(
            f"{len(rows)} of {len(bad)} vectors are {what}: {named}; expected finite vectors"
            f"{wanted}; leave these samples out, or look at the model that made them"
        )
    if not unit:
        return np.ascontiguousarray(vectors)
    return np.divide(vectors, np.sqrt(squares)[:, None], dtype=np.float32, order="C")


def set_default(faiss_index: Any, plan: Plan, setting: int) -> None:
    """Has FAISS search with a setting where none is given."""
    if plan.setting:
        faiss.ParameterSpace().set_index_parameter(faiss_index, plan.setting, setting)
