"""The neighbours of a sample, a file or a vector in an index: all of them, hard ones, false ones.

Retriever.open("indexes/faces").by_key("000123", 10, where="Smiling and not Male").hits
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from heron.base.artefact import MANIFEST
from heron.base.errors import HeronError, RetrievalError
from heron.retrieval.answer import Answer, Flags, Query, Relation, find_answer
from heron.retrieval.embeddings import Embeddings, choose_data, compared
from heron.retrieval.file_reader import File
from heron.retrieval.index import Index
from heron.retrieval.index_plan import CODED
from heron.retrieval.samples import Samples
from heron.retrieval.some_views import SomeViews
from heron.shards.manifest import load_manifest
from heron.shards.store import is_remote

VOTERS = 10  # nearest samples that a file's labels are predicted from

if TYPE_CHECKING:  # both load torch, which a query by key does without
    from heron.retrieval.file_encoder import FileEncoder
    from heron.retrieval.pictures import SamplePictures


class Retriever:
    """Answers queries over one index; several threads may share it.

    A query returns the `k` nearest samples that pass the filter `where`, such as "Smiling and not
    Male" (see `filters.parse`), and that have a `relation` to it:

    - `neighbours`: any sample.
    - `hard`: samples whose labels are far from the query's.
    - `false`: samples with the query's labels, or close ones: false negatives, which an
      unsupervised loss repels. If there are none, the nearest in label space are returned instead.

    `among` further restricts the candidates: a flag per sample, [N]; None allows all.

    Attributes:
        index: the index that is searched.
        embeddings: what it was built from; None if they are missing or have changed since.
    """

    def __init__(
        self,
        index: Index,
        embeddings: Embeddings | None,
        missing_reason: str = "",
        run: str | Path | None = None,
        data: str | Path | None = None,
        trust_code: bool = False,
    ) -> None:
        """Takes what `open` has opened; `missing_reason` says why there are no embeddings."""
        self._trust_code = trust_code
        self.index, self.embeddings, self._missing_reason = index, embeddings, missing_reason
        self.run = index.manifest.run if run is None else str(run)
        self._user_run = run is not None  # the user named the run, not just the index's manifest
        self._user_data = None if data is None else str(data)
        self.data = self._user_data or index.manifest.data
        self._lock = Lock()  # the shards' readers are not thread-safe: they keep an LRU of files

    @classmethod
    def open(
        cls,
        index: str | Path,
        embeddings: str | Path | None = None,
        run: str | Path | None = None,  # whose model encodes files
        data: str | Path | None = None,  # the shards that hold the pictures
        verify: bool = True,  # compare the checksums of index and embeddings
        gpu: bool = False,  # run unfiltered searches on GPUs: see `Index.open`
        trust_code: bool = False,  # import the classes that the run names: see `load_saved`
    ) -> Self:
        """Opens an index, and the embeddings that it was built from if they are still there.

        Embeddings, run and data default to those that the index names; model and shards are opened
        when a query needs them. Remote shards and embeddings must be given here: they are not
        fetched just because an index names them. Raises a RetrievalError if there is no sound
        index, its embeddings were altered, or `embeddings` are not those of the index.
        """
        opened = Index.open(index, verify, gpu)
        if embeddings is None and not opened.manifest.embeddings:
            return cls(opened, None, "it was built from vectors in memory", run, data, trust_code)
        user_named = embeddings is not None
        if embeddings is None:
            embeddings = named = opened.manifest.embeddings
            reason = f"{named} is only fetched if you name it: --embeddings {named}"
            if not is_remote(named):
                path = Path(named) / MANIFEST
                reason = "" if path.exists() else f"{path} does not exist"
            if reason:
                return cls(opened, None, reason, run, data, trust_code)
        opened_embeddings = Embeddings.open(embeddings, verify)
        try:
            opened.check(opened_embeddings)
        except RetrievalError as fault:
            if user_named:
                raise
            return cls(opened, None, str(fault), run, data, trust_code)
        return cls(opened, opened_embeddings, "", run, data, trust_code)

    @property
    def samples(self) -> Samples:
        """The samples that are searched."""
        return self.index.samples

    def by_key(
        self,
        key: str,
        k: int = 10,
        where: str = "",
        relation: Relation = "neighbours",
        far: float | None = None,
        among: Flags | None = None,
    ) -> Answer:
        """Returns the samples nearest to the sample with a key.

        `far` is the least label distance of a hard negative; `heron.evaluation.negatives` gives
        the default. Raises a RetrievalError if there is no such sample, k or filter; nothing passes
        the filter; or the relation needs labels and the query has none.
        """
        number = self.samples.find(key)
        vector, origin = self.vector(number)
        labels = self.samples.label_names(number)
        query = Query(number, self.samples.key(number), labels, origin, compares=self._compares)
        return find_answer(self.index, query, vector, k, where, relation, far, among)

    def by_keys(
        self, keys: Sequence[str], k: int = 10, where: str = "", among: Flags | None = None
    ) -> Answer:
        """Returns the samples nearest to the mean of several, which are not among the hits.

        Under cosine each example counts as a unit vector. The query has the labels that all share.
        Raises a RetrievalError if there is no such sample, k or filter, or nothing passes.
        """
        if not keys:
            raise RetrievalError("there are no keys; pass the key of at least one sample")
        numbers = list(dict.fromkeys(self.samples.find(key) for key in keys))
        rows, origins = zip(*(self.vector(number) for number in numbers), strict=True)
        vectors, prefix = np.stack(rows), self.index.manifest.prefix
        if prefix is not None and vectors.shape[1] == prefix.dim:  # compare as the index does
            vectors = prefix.of(vectors)
        if self.index.manifest.normalised:
            vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-30)
        shared = self.samples.targets[numbers].all(0)
        query = Query(
            None,
            ", ".join(self.samples.key(number) for number in numbers),
            [self.samples.names[i] for i in np.flatnonzero(shared)],
            f"the mean of {len(numbers)} samples, from {origins[0]}",
            numbers,
            compares=self._compares,
        )
        return find_answer(self.index, query, vectors.mean(0), k, where, "neighbours", None, among)

    def by_text(
        self,
        text: str,
        k: int = 10,
        where: str = "",
        relation: Relation = "neighbours",
        among: Flags | None = None,
    ) -> Answer:
        """Returns the samples whose other views are nearest to a text: see `FileEncoder.text`.

        Raises a RetrievalError if the model sees no text, the index is not of projections, or as
        `by_file`.
        """
        compares = "the text with the other views of each sample"
        origin = f"the text, by the model of {self.run}"
        query = Query(None, text, [], origin, compares=compares)
        with self._lock:
            vector = self._encoder.text(text)
        return find_answer(self.index, query, vector, k, where, relation, among=among)

    def by_file(
        self,
        file: File | Mapping[str, File],
        k: int = 10,
        where: str = "",
        relation: Relation = "neighbours",  # the others need labels, and a file has none
        name: str | None = None,  # of the file in the answer; by default its path
        row: int = 0,  # the row to take, if the file is an array of rows
        among: Flags | None = None,
        across: bool = False,  # compare with the views that are not given, instead of the same ones
    ) -> Answer:
        """Returns the samples nearest to a file, by the model whose embeddings are indexed.

        `file` is the path or the bytes of a picture or an npy file of vector rows, or a mapping
        from names of stored views to files, of all views or of some. Of some, these are compared
        with the same views of each sample (see `SomeViews`); or, with `across`, with the others,
        by projections. The labels are predicted from the nearest neighbours: see `predict`.

        Raises a RetrievalError if it is no such file or view, the model is not that of the index,
        or as `by_key`; a CheckpointError without a model; a ShardError without data to give shapes
        and statistics.
        """
        files = list(file.values()) if isinstance(file, Mapping) else [file]
        paths = [str(path) for path in files if not isinstance(path, bytes)]
        with self._lock:
            found = self._encoder(file, row)
            vector = self._encoder.across(found) if across else found.vector
        searched: Index | SomeViews = self.index
        if across:
            compares = f"{', '.join(found.given)} with {', '.join(found.others)} of each sample"
        else:
            compares = found.compares
        if not across and found.compared is not None:
            searched = SomeViews.of(self.index, self.embeddings, found.compared)
            vector = vector / np.float32(found.scale)
        predicted, voters = self.predict(vector, searched)
        name, origin = name or ", ".join(paths) or "a file", f"the model of {self.run}"
        query = Query(None, name, [], origin, [], predicted, voters, compares)
        return find_answer(searched, query, vector, k, where, relation, among=among)

    def predict(
        self, vector: NDArray[Any], searched: "Index | SomeViews | None" = None
    ) -> tuple[dict[str, float], int]:
        """Predicts the labels of a vector; returns each with its share, and the number of voters.

        Labels are those that at least half of the nearest `VOTERS` labelled samples have; of
        exclusive classes, the most frequent one.
        """
        samples = self.samples
        voters = min(VOTERS, int(samples.known.sum()))
        if not samples.names or not voters:
            return {}, 0
        labelled = None if samples.known.all() else np.asarray(samples.known)
        searched = searched or self.index
        nearest = searched.search(vector[None], voters, allowed=labelled).numbers[0]
        nearest = nearest[nearest >= 0]
        voters, shares = len(nearest), samples.targets[nearest].mean(0)
        order = np.argsort(-shares, kind="stable").tolist()
        predicted = order[:1] if samples.exclusive else [i for i in order if shares[i] >= 0.5]
        return {samples.names[i]: float(shares[i]) for i in predicted}, voters

    def by_vector(
        self,
        vector: NDArray[Any],
        k: int = 10,
        where: str = "",
        relation: Relation = "neighbours",
        name: str = "a vector",
    ) -> Answer:
        """Returns the samples nearest to a vector of the index's layer, float [dim].

        Raises a RetrievalError if it is no such vector, or as `by_key`.
        """
        if vector.ndim != 1 or vector.dtype.kind not in "fiu":
            raise RetrievalError(
                f"{name} must be numbers of shape ({self.index.manifest.dim},), one row, got "
                f"{vector.dtype} {vector.shape}"
            )
        return find_answer(
            self.index, Query(None, name, [], "as given"), vector, k, where, relation
        )

    def vector(self, number: int) -> tuple[NDArray[np.float32], str]:
        """Returns the vector of a sample, [dim], and where it comes from, in words."""
        manifest, numbers = self.index.manifest, np.array([number])
        if self.embeddings is not None:
            vector = self.embeddings.take(manifest.layer, numbers)[0]
            return vector, f"the embeddings of {self.embeddings.where}"
        kind = manifest.kind
        lossy = f", decoded from codes ({kind} is lossy)" if kind in CODED else ""
        return self.index.vectors(numbers)[0], f"the index{lossy}, because {self._missing_reason}"

    @property
    def _compares(self) -> str:
        """What a query by samples compares, in words, if the data set lacks a view of the model."""
        manifest = self.index.manifest
        return compared(manifest.views, [], manifest.missing)

    @property
    def takes_text(self) -> bool:
        """Whether the index can be searched by text: see `by_text`."""
        manifest = self.index.manifest
        if manifest.layer != "projection" or not manifest.checkpoint:
            return False
        return any(view.kind == "text" for view in load_manifest(self._shards).views)

    def files(self, arguments: Sequence[str], row: int = 0) -> dict[str, Path]:
        """Parses `PATH` or `VIEW=PATH`, once or more, into files by view."""
        with self._lock:
            return self._encoder.files(arguments, row)

    def encode(self, file: File | Mapping[str, File], row: int = 0) -> NDArray[np.float32]:
        """Returns the embedding of a file, [dim], by training's rule for views without one."""
        with self._lock:
            return self._encoder(file, row).vector

    @cached_property
    def _encoder(self) -> "FileEncoder":
        from heron.retrieval.file_encoder import FileEncoder

        if not self.index.manifest.checkpoint:
            raise RetrievalError(
                f"{self.index.where} was built from vectors in memory and has no model; query by "
                "a key or a vector, and encode files with `Model.encode`"
            )
        precision = None if self.embeddings is None else self.embeddings.manifest.precision
        manifest, code = self.index.manifest, self._trust_code
        return FileEncoder.open(self.run, self._shards, manifest, precision, self._user_run, code)

    def picture(self, number: int, view: str = "") -> Image.Image | None:
        """Returns a sample's picture of a view: see `SamplePictures.of`."""
        with self._lock:
            return self._pictures.of(self.samples, number, view)

    def values(self, numbers: Iterable[int]) -> dict[int, dict[str, str | list[float]]]:
        """Returns samples' texts and numbers of the model's views: see `SamplePictures.values`."""
        names: Collection[str] = ()
        with suppress(HeronError, OSError):  # without a model, of all views
            names = self.inputs
        with self._lock:
            return {n: self._pictures.values(self.samples, n, names) for n in numbers}

    @property
    def picture_views(self) -> list[str]:
        """The views that samples may have pictures of; raises as `picture` does."""
        self.picture(0)  # raises unless the shards are there
        return [*self._pictures.views]

    @cached_property
    def inputs(self) -> dict[str, str]:
        """The kind of each view that a query by files may give: see `file_encoder.input_kinds`."""
        from heron.retrieval.file_encoder import input_kinds

        return input_kinds(self.run, self._shards, self._trust_code)

    @cached_property
    def _pictures(self) -> "SamplePictures":
        from heron.retrieval.pictures import SamplePictures

        return SamplePictures.open(self._shards, self.run, self._user_run, self._trust_code)

    @property
    def _shards(self) -> str:
        if not self.data:
            raise RetrievalError(
                f"{self.index.where} was built from vectors in memory and has no data set; pass "
                "the shards of the vectors with --data"
            )
        return choose_data(self._user_data, self.index.manifest.data, self.index.where)
