"""An index on disk: a FAISS index, a manifest that describes it, and the sample of each vector."""

import math
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from heron.base.artefact import MANIFEST
from heron.base.atomic import new_folder
from heron.base.errors import RetrievalError
from heron.base.extras import require
from heron.evaluation.knn import Numbers, Vectors, require_gpus
from heron.retrieval.build import build_index
from heron.retrieval.embeddings import Embeddings, Layer
from heron.retrieval.filters import filter_mask
from heron.retrieval.index_files import (
    FAISS_METRICS,
    INDEX,
    REBUILD_INDEX,
    IndexManifest,
    read_faiss,
    rotation,
    set_default,
)
from heron.retrieval.index_plan import KINDS, Kind, Metric, RequestedKind
from heron.retrieval.locations import Fetched
from heron.retrieval.map import SampleMap
from heron.retrieval.samples import Samples
from heron.retrieval.vectors import prepare_vectors, vectors_in_memory
from heron.shards.store import is_remote

faiss = require("faiss", "an index")
CPU_ONLY: tuple[Kind, ...] = "hnsw", "rabitq"


class Neighbours(NamedTuple):
    """The nearest samples of each query, nearest first.

    Attributes:
        numbers: numbers of samples, int64 [queries, k]; -1 where fewer than k are allowed.
        scores: float32 [queries, k]: cosine or inner product, larger is nearer; or the Euclidean
            distance, smaller is nearer; NaN where there is no sample. In an index of codes they
            are computed from the codes.
    """

    numbers: Numbers
    scores: Vectors


class Index:
    """An open index; searches may run in several threads.

    Attributes:
        folder: the folder of its files; of an index behind a URL, the copy on this machine.
        where: the folder or the URL, as messages call it.
        manifest: its description.
        samples: the sample of each vector.
        faiss: the FAISS index itself.
    """

    def __init__(
        self,
        folder: Path,
        manifest: IndexManifest,
        samples: Samples,
        faiss_index: Any,
        fetched: Fetched | None = None,
    ) -> None:
        """Holds what `open` has checked."""
        self.folder, self.manifest, self.samples = folder, manifest, samples
        self.fetched, self.where = fetched, str(fetched or folder)
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
        kind: RequestedKind = "auto",
        metric: Metric = "cosine",
        layer: Layer = "hidden",
        memory_bytes: int | None = None,
        recall: float = 0.95,
        seed: int = 0,
    ) -> Self:
        """Indexes vectors in memory; use `save` to keep the index.

        Until it is garbage-collected its files take up a temporary folder (TMPDIR): N dim 4 bytes
        and more, or the codes for `sq8`, `rabitq` and `ivfpq`.

        Args:
            vectors: real numbers [N, dim], such as `Model.encode` returns.
            labels: what the `where` of a search filters by: class numbers [N], -1 where unknown;
                or 0 and 1 [N, names], a column for each label.
            label_names: names of the classes or columns, in order; by default their numbers.
            keys: a unique text for each vector; by default its number.
            kind: `flat`, `ivf`, `sq8`, `rabitq`, `binary`, `ivfpq`, `hnsw`, or `auto`: the most
                exact that is fast enough and fits the memory.
            metric: `cosine`, `inner_product` or `euclidean`.
            layer: the model's layer that made the vectors, for the record.
            memory_bytes: the memory budget; by default half of what the machine has free.
            recall: target of recall@10, which the index measures on itself.
            seed: seeds the draw of the training sample and of the queries.

        Raises:
            RetrievalError: vectors, labels and names do not fit each other, a vector is not
                finite, or zero under cosine, or the budget is too small.
        """
        source = vectors_in_memory(vectors, labels, label_names, keys)
        folder = Path(tempfile.mkdtemp(prefix="heron-index-"))
        try:
            build_index(
                source,
                folder,
                layer=layer,
                kind=kind,
                metric=metric,
                memory_bytes=memory_bytes,
                recall=recall,
                seed=seed,
                progress=False,
            )
            index = cls.open(folder, verify=False)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        weakref.finalize(index, shutil.rmtree, folder, ignore_errors=True)
        return index

    def save(self, folder: str | Path) -> None:
        """Writes the index to a new folder, for `Index.open` and `heron query`.

        Raises:
            RetrievalError: the folder is not empty.
            InUse: another command is writing it.
        """
        with new_folder(Path(folder), False, RetrievalError) as work:
            shutil.copytree(self.folder, work, dirs_exist_ok=True)

    @classmethod
    def open(cls, folder: str | Path, verify: bool = True, gpu: bool = False) -> Self:
        """Opens a folder that `heron index` wrote, or the URL of one, whose files are fetched.

        File sizes are always checked, and with `verify` checksums too, once (see `FileSum.fault`);
        FAISS never reads a file that fails. `gpu` runs unfiltered searches on all GPUs that
        faiss-gpu sees (unmeasured).

        Raises:
            RetrievalError: there is no index, or a file is foreign, truncated or altered; or FAISS
                has no GPU, or cannot search this kind on one.
        """
        if gpu:
            require_gpus()
        remedy, fetched = "pass a folder that `heron index` wrote", None
        if is_remote(str(folder)):
            fetched = Fetched(str(folder))
            manifest = fetched.manifest(IndexManifest, lambda _: remedy)
            for name, file in manifest.files.items():
                fetched.fetch(name, file)
            folder = fetched.folder
        else:
            folder = Path(folder)
            manifest = IndexManifest.read(folder / MANIFEST, remedy)
            manifest.check_files(folder, manifest.files, verify)
        where = str(fetched or folder)
        samples = Samples.load(folder)
        if gpu and manifest.kind in CPU_ONLY:
            raise RetrievalError(
                f"{where} is of kind {manifest.kind}, which FAISS cannot search on a GPU; remove "
                f"--gpu, or build one of {', '.join(k for k in KINDS if k not in CPU_ONLY)}"
            )
        faiss_index = read_faiss(folder / INDEX, manifest.plan)
        pairs = [
            ("vectors", faiss_index.ntotal, manifest.count),
            ("dimensions", faiss_index.d, manifest.dim),
            ("samples", len(samples), manifest.count),
            ("the metric of FAISS", faiss_index.metric_type, FAISS_METRICS[manifest.compared_by]),
        ]
        if differ := [f"{name}: {a} instead of {b}" for name, a, b in pairs if a != b]:
            raise RetrievalError(f"{where}: {'; '.join(differ)}; {REBUILD_INDEX}")
        index = cls(folder, manifest, samples, faiss_index, fetched)
        if gpu:
            index.gpu = faiss.index_cpu_to_all_gpus(faiss_index)
        return index

    def __len__(self) -> int:
        """Returns how many vectors there are."""
        return self.manifest.count

    def sample_map(self) -> SampleMap | None:
        """Returns the map; None without one, RetrievalError if its file is damaged."""
        return SampleMap.open(self.folder, self.manifest.map, len(self))

    def check(self, embeddings: Embeddings) -> None:
        """Refuses embeddings of another checkpoint or of other samples (RetrievalError)."""
        expected, actual = self.manifest, embeddings.manifest
        layer_dim = expected.prefix.dim if expected.prefix else expected.dim
        pairs = [
            ("checkpoint", expected.checkpoint, actual.checkpoint),
            ("data", expected.data_fingerprint, actual.data_fingerprint),
            ("keys", expected.files["keys.npy"].sha256, actual.samples["keys.npy"].sha256),
            ("dimension", str(layer_dim), str(embeddings.layer(expected.layer).dim)),
            ("fingerprint", expected.embeddings_fingerprint, actual.fingerprint),
        ]
        if differ := [f"{name} {b[:19]}, not {a[:19]}" for name, a, b in pairs if a != b]:
            raise RetrievalError(
                f"{embeddings.where} is not what {self.where} was built from: "
                f"{'; '.join(differ)}; use the embeddings {expected.embeddings}, or {REBUILD_INDEX}"
            )

    def search(
        self,
        vectors: ArrayLike,
        k: int = 10,
        where: str = "",
        allowed: NDArray[np.bool_] | None = None,
    ) -> Neighbours:
        """Returns the k nearest samples of each vector, among those that pass the filters.

        Without a filter the index is searched with the setting of its manifest. With one, all
        allowed samples are compared if they are few; otherwise the setting grows as their share
        falls, since neighbours are then that much farther away. While a query has fewer hits than
        exist, up to k, the setting is doubled for it.

        Args:
            vectors: float32 [queries, dim], not normalised; or the whole vectors of the layer if
                the index has a prefix of them.
            k: neighbours per query, 1 to N; a query that is in the index is its own nearest.
            where: a filter by label, such as "Beach and not Urban"; see `filters.parse`.
            allowed: a filter by sample, bool [N]; samples must pass both filters.

        Raises:
            RetrievalError: a vector has another dimension, is not finite, or is zero under
                cosine; k is not between 1 and N; `where` is no filter or passes no sample; or
                `allowed` has another length.
        """
        queries = self._prepare_queries(vectors)
        if not isinstance(k, int | np.integer) or not 1 <= k <= len(self):
            raise RetrievalError(
                f"k must be 1 to {len(self):,}, the number of vectors in the index, got {k!r}"
            )
        setting, selector, expected_hits = self.setting, None, k
        if allowed is not None and (allowed.shape != (len(self),) or allowed.dtype != np.bool_):
            raise RetrievalError(
                f"allowed must be bool [{len(self)}], one flag for each sample of {self.where}, "
                f"got {allowed.dtype} {list(allowed.shape)}"
            )
        if where.strip():
            mask = filter_mask(where, self.samples)
            allowed = mask if allowed is None else mask & allowed
        if allowed is not None:
            count = int(allowed.sum())
            if not count:
                no_hits = np.full((len(queries), k), -1, np.int64)
                return Neighbours(no_hits, np.full(no_hits.shape, np.nan, np.float32))
            expected_hits = min(k, count)
            selector = faiss.IDSelectorBitmap(np.packbits(allowed, bitorder="little"))
            setting = self._filtered_setting(count / len(self))
        if self.gpu is not None and allowed is None:
            scores, numbers = self.gpu.search(queries, k)
        else:
            scores, numbers = self._run(queries, k, setting, selector)
        while setting and len(short := np.flatnonzero(numbers[:, expected_hits - 1] < 0)):
            setting = 0 if 2 * setting >= self._exhaustive_setting else 2 * setting
            scores[short], numbers[short] = self._run(queries[short], k, setting, selector)
        return Neighbours(numbers, self._scores(numbers, scores))

    @property
    def _exhaustive_setting(self) -> float:
        """The setting at which about all vectors are compared."""
        plan = self.manifest.plan
        return len(self) / (2 * plan.links) if plan.kind == "hnsw" else plan.lists

    def _filtered_setting(self, share: float) -> int:
        """Returns the setting when a share of the samples is allowed; 0 compares with all of them.

        Without a filter a query is compared with s N vectors. With one, neighbours are 1 / share
        times as rare, so s N / share vectors have to be visited, while only share N are allowed.
        Comparing with all of those, which is also exact, is cheaper if share^2 <= s.
        """
        if not self.setting or share * share <= self.setting / self._exhaustive_setting:
            return 0
        return math.ceil(self.setting / share)

    def _run(
        self, queries: Vectors, k: int, setting: int, selector: Any
    ) -> tuple[Vectors, Numbers]:
        """Searches with a setting; 0 compares with all vectors. FAISS only borrows `selector`."""
        index, plan = self.faiss, self.manifest.plan
        selection = {} if selector is None else {"sel": selector}
        if plan.lists:
            nprobe = min(setting or plan.lists, plan.lists)
            params = faiss.SearchParametersIVF(nprobe=nprobe, **selection)
        elif setting:
            params = faiss.SearchParametersHNSW(efSearch=setting, **selection)
        else:  # HNSW stores its vectors in a flat index
            index = faiss.downcast_index(index.storage) if plan.kind == "hnsw" else index
            params = faiss.SearchParameters(**selection)
        scores, numbers = index.search(queries, k, params=params)
        if not -1 <= numbers.min(initial=-1) <= numbers.max(initial=-1) < len(self):
            raise RetrievalError(
                f"{self.folder / INDEX} has a vector of number {numbers.max()}, but numbers go "
                f"from 0 to {len(self) - 1}; {REBUILD_INDEX}"
            )
        return scores, numbers

    def _prepare_queries(self, vectors: ArrayLike) -> Vectors:
        array = np.asarray(vectors)
        if array.dtype.kind not in "fiu":
            raise RetrievalError(
                f"queries must be numbers [queries, {self.manifest.dim}], got {array.dtype} "
                f"{list(array.shape)}"
            )
        with np.errstate(over="ignore"):  # overflow gives infinity, which is refused below
            queries = array.astype(np.float32, copy=False)
        prefix = self.manifest.prefix
        if prefix is not None and queries.ndim == 2 and queries.shape[1] == prefix.dim:
            queries = prefix.of(queries)
        if queries.ndim != 2 or queries.shape[1] != self.manifest.dim:
            raise RetrievalError(
                f"queries must be [queries, {self.manifest.dim}], vectors of layer "
                f"'{self.manifest.layer}' as in {self.where}, got {list(queries.shape)}"
            )
        queries = prepare_vectors(queries, self.manifest.normalised, lambda row: f"query {row}")
        return queries if self._rotation is None else queries @ self._rotation

    @property
    def _rotation(self) -> Vectors | None:
        manifest = self.manifest
        return rotation(manifest.dim, manifest.seed) if manifest.kind == "rabitq" else None

    def _scores(self, numbers: Numbers, scores: Vectors) -> Vectors:
        """Converts FAISS's squared distances to scores, in place; NaN where there is no hit."""
        if self.manifest.metric == "euclidean":
            np.sqrt(np.maximum(scores, 0, out=scores), out=scores)
        elif self.manifest.compared_by == "euclidean":
            np.subtract(1, scores / 2, out=scores)
        scores[numbers < 0] = np.nan
        return scores

    def vectors(self, numbers: NDArray[np.int64]) -> Vectors:
        """Returns some vectors as the index holds them, float32 [numbers, dim].

        Under cosine they are unit vectors. An index of codes returns the decoded vectors: for
        `rabitq` FAISS decodes the signs alone.

        Raises:
            RetrievalError: there is no such number.
        """
        numbers = np.ascontiguousarray(numbers, np.int64)
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < len(self):
            raise RetrievalError(
                f"numbers of vectors must be 0 to {len(self) - 1} in {self.where}, got "
                f"{numbers.min()} to {numbers.max()}"
            )
        try:
            if self.manifest.plan.lists:
                with self._lock:  # the first call builds a map to each vector: 8 N bytes
                    self.faiss.make_direct_map()
            vectors: Vectors = self.faiss.reconstruct_batch(numbers)
        except RuntimeError as error:  # FAISS refuses numbers beyond N, and missing ones
            text = " ".join(str(error).split())
            raise RetrievalError(f"{self.folder / INDEX}: {text}; {REBUILD_INDEX}") from None
        return vectors if self._rotation is None else vectors @ self._rotation.T
