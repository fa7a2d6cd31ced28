"""The neighbours of a sample, a file or a vector in an index: all of them, hard ones, false ones.

Retriever.open("indexes/faces").by_key("000123", 10, where="Smiling and not Male").hits
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from heron.pipeline.config.errors import RetrievalError
from heron.pipeline.retrieval.answer import (
    Allowed,
    Answer,
    Flags,
    Hit,
    Query,
    Relation,
    allowed_samples,
)
from heron.pipeline.retrieval.embeddings import Embeddings, shards_of
from heron.pipeline.retrieval.given import File
from heron.pipeline.retrieval.index import Index
from heron.pipeline.retrieval.kinds import CODED
from heron.pipeline.retrieval.samples import Samples
from heron.shards.artefact import MANIFEST
from heron.shards.manifest import load_manifest

VOTERS = 10  # nearest samples that a file's labels are predicted from

if TYPE_CHECKING:  # both load torch, which a query by key does without
    from heron.pipeline.retrieval.encode import FileEncoder
    from heron.pipeline.retrieval.pictures import SamplePictures


class Retriever:
    """Answers queries over one index; made once, asked often, by several threads if need be.

    A query asks for `k` samples that pass the filter `where`, such as "Smiling and not Male" (see
    `filters.parse`), and stand in a `relation` to it:

    - `neighbours`: any.
    - `hard`: those whose labels are far from the query's.
    - `false`: those with its labels, or close ones: false negatives, which an unsupervised loss
      repels. Where there are none, the nearest in label space are found instead.

    `among` are flags of the samples to choose from, [N], beside the filter; None: all.

    Attributes:
        index: that is searched.
        embeddings: that it was built of; None where they are not there, or are others by now.
    """

    def __init__(
        self,
        index: Index,
        embeddings: Embeddings | None,
        without: str = "",
        run: str | Path | None = None,
        data: str | Path | None = None,
    ) -> None:
        """Puts together what `open` finds; `without` says why there are no embeddings."""
        self.index, self.embeddings, self._without = index, embeddings, without
        self.run = index.manifest.run if run is None else str(run)
        self._own = run is not None  # not one that an index of others names
        self._given = None if data is None else str(data)
        self.data = self._given or index.manifest.data
        self._lock = Lock()  # the shards' readers keep open files in an order of use

    @classmethod
    def open(
        cls,
        index: str | Path,
        embeddings: str | Path | None = None,
        run: str | Path | None = None,  # whose model encodes files
        data: str | Path | None = None,  # the shards that pictures are in
        verify: bool = True,  # compare the checksums of index and embeddings
        gpu: bool = False,  # search without a filter on GPUs: see `Index.open`
    ) -> Self:
        """Opens an index, and the embeddings that it was built of where they are there.

        Embeddings, run and data are by default those that the index names; model and shards are
        opened when a query needs them. Shards at an address must be given: they are not fetched
        because an index says so.

        Raises:
            RetrievalError: there is no sound index, its embeddings were altered, or `embeddings`
                are not those of the index.
        """
        opened = Index.open(Path(index), verify, gpu)
        if embeddings is None and not opened.manifest.embeddings:
            return cls(opened, None, "it was built of vectors in memory", run, data)
        where = Path(embeddings or opened.manifest.embeddings)
        if embeddings is None and not (where / MANIFEST).exists():
            gone = f"{where / MANIFEST} cannot be read: it is not there"
            return cls(opened, None, gone, run, data)
        found = Embeddings.open(where, verify)
        try:
            opened.check(found)
        except RetrievalError as fault:
            if embeddings is not None:
                raise
            return cls(opened, None, str(fault), run, data)
        return cls(opened, found, "", run, data)

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
        """Returns the samples nearest to one of them.

        `far` is the label distance from which on a neighbour is hard; by default that of
        `pipeline.negatives.definition`.

        Raises:
            RetrievalError: no such sample, k or filter; nothing passes the filter; or the relation
                needs labels that the query has not.
        """
        number = self.samples.find(key)
        vector, origin = self.vector(number)
        query = Query(number, key, self.samples.label_names(number), origin)
        return self._answer(query, vector, k, where, relation, far, among)

    def by_keys(
        self, keys: Sequence[str], k: int = 10, where: str = "", among: Flags | None = None
    ) -> Answer:
        """Returns the samples nearest to the mean of some of them, which are not among the hits.

        Under cosine each example counts as a unit vector. The query has the labels that all have.

        Raises:
            RetrievalError: no such sample, k or filter; or nothing passes the filter.
        """
        if not keys:
            raise RetrievalError("there are no keys; expected the key of one sample at least")
        numbers = list(dict.fromkeys(self.samples.find(key) for key in keys))
        rows, origins = zip(*(self.vector(number) for number in numbers), strict=True)
        vectors, prefix = np.stack(rows), self.index.manifest.prefix
        if prefix is not None and vectors.shape[1] == prefix.dim:  # as they are compared
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
        )
        return self._answer(query, vectors.mean(0), k, where, "neighbours", None, among)

    def by_text(
        self,
        text: str,
        k: int = 10,
        where: str = "",
        relation: Relation = "neighbours",
        among: Flags | None = None,
    ) -> Answer:
        """Returns the samples whose other views are nearest to a text: see `FileEncoder.text`.

        Raises:
            RetrievalError: the model sees no text, the index is not of projections, or as
                `by_file`.
        """
        query = Query(None, text, [], f"the text, by the model of {self.run}")
        with self._lock:
            vector = self._encoder.text(text)
        return self._answer(query, vector, k, where, relation, among=among)

    def by_file(
        self,
        file: File | Mapping[str, File],
        k: int = 10,
        where: str = "",
        relation: Relation = "neighbours",  # a file has no labels that others could be told by
        name: str | None = None,  # what the answer calls it; by default the path
        row: int = 0,  # of an array of rows
        among: Flags | None = None,
    ) -> Answer:
        """Returns the samples nearest to a file, by the model whose embeddings are indexed.

        Its labels are predicted from its nearest neighbours: see `predict`.
        `file` is the path or the bytes of a JPEG, a PNG or an npy file of vector rows; where the
        model sees several stored views, one of each by the view's name.

        Raises:
            RetrievalError: it is no such file, the model is another than that of the index, or as
                `by_key`.
            CheckpointError: there is no model.
            ShardError: there is no data set, whose shapes and statistics the model's input has.
        """
        files = list(file.values()) if isinstance(file, Mapping) else [file]
        paths = [str(one) for one in files if not isinstance(one, bytes)]
        vector = self.encode(file, row)
        predicted, voters = self.predict(vector)
        named, origin = name or ", ".join(paths) or "a file", f"the model of {self.run}"
        query = Query(None, named, [], origin, [], predicted, voters)
        return self._answer(query, vector, k, where, relation, among=among)

    def predict(self, vector: NDArray[Any]) -> tuple[dict[str, float], int]:
        """Returns the labels that half of a vector's nearest have, with their share, and how many.

        Of classes the most frequent one. Neighbours are the nearest `VOTERS` with labels.
        """
        samples = self.samples
        most = min(VOTERS, int(samples.known.sum()))
        if not samples.names or not most:
            return {}, 0
        known = None if samples.known.all() else np.asarray(samples.known)
        near = self.index.search(vector[None], most, allowed=known).numbers[0]
        shares = samples.targets[near[near >= 0]].mean(0)
        order = np.argsort(-shares, kind="stable").tolist()
        chosen = order[:1] if samples.exclusive else [i for i in order if shares[i] >= 0.5]
        return {samples.names[i]: float(shares[i]) for i in chosen}, most

    def by_vector(
        self,
        vector: NDArray[Any],
        k: int = 10,
        where: str = "",
        relation: Relation = "neighbours",
        name: str = "a vector",
    ) -> Answer:
        """Returns the samples nearest to a vector of the index's layer, float [dim].

        Raises:
            RetrievalError: it is no such vector, or as `by_key`.
        """
        if vector.ndim != 1 or vector.dtype.kind not in "fiu":
            raise RetrievalError(
                f"{name} is {vector.dtype} {vector.shape}; expected "
                f"({self.index.manifest.dim},), numbers; give one row"
            )
        return self._answer(Query(None, name, [], "as given"), vector, k, where, relation)

    def vector(self, number: int) -> tuple[NDArray[np.float32], str]:
        """Returns the vector of a sample, [dim], and where it comes from, in words."""
        manifest, numbers = self.index.manifest, np.array([number])
        if self.embeddings is not None:
            found = self.embeddings.take(manifest.layer, numbers)[0]
            return found, f"the embeddings of {self.embeddings.folder}"
        kind = manifest.kind
        lossy = f", decoded from codes ({kind} is lossy)" if kind in CODED else ""
        return self.index.vectors(numbers)[0], f"the index{lossy}, as {self._without}"

    @property
    def takes_text(self) -> bool:
        """Whether the samples can be asked for by words: see `by_text`."""
        manifest = self.index.manifest
        if manifest.layer != "projection" or not manifest.checkpoint:
            return False
        return any(view.kind == "text" for view in load_manifest(self._shards).views)

    def files(self, asked: Sequence[str]) -> dict[str, Path]:
        """Reads `PATH`, or `VIEW=PATH` of each view, as a file of each view that the model sees."""
        with self._lock:
            return self._encoder.files(asked)

    def encode(self, file: File | Mapping[str, File], row: int = 0) -> NDArray[np.float32]:
        """Returns the embedding of a file, [dim]; see `by_file`."""
        with self._lock:
            return self._encoder(file, row)

    @cached_property
    def _encoder(self) -> "FileEncoder":
        from heron.pipeline.retrieval.encode import FileEncoder

        if not self.index.manifest.checkpoint:
            raise RetrievalError(
                f"{self.index.folder} was built of vectors in memory, and names no model; expected "
                "a query by a key or a vector; encode files with `Model.encode`"
            )
        precision = None if self.embeddings is None else self.embeddings.manifest.precision
        return FileEncoder.open(self.run, self._shards, self.index.manifest, precision, self._own)

    def picture(self, number: int) -> Image.Image | None:
        """Returns the picture of a sample, RGB, or None where it has none.

        Raises:
            RetrievalError: the shards are others by now, or the picture cannot be read.
            ShardError: they are missing or damaged.
        """
        with self._lock:
            return self._pictures.of(self.samples, number)

    @property
    def has_pictures(self) -> bool:
        """Whether the samples have pictures, though some may lack theirs; raises as `picture`."""
        self.picture(0)  # of the shards that are there
        return self._pictures.view is not None

    @cached_property
    def _pictures(self) -> "SamplePictures":
        from heron.pipeline.retrieval.pictures import SamplePictures

        return SamplePictures.open(self._shards, self.run, self._own)

    @property
    def _shards(self) -> str:
        if not self.data:
            raise RetrievalError(
                f"{self.index.folder} was built of vectors in memory, and names no data set; "
                "expected the shards that the vectors are of; give them: --data"
            )
        return shards_of(self._given, self.index.manifest.data, self.index.folder)

    def _answer(
        self,
        query: Query,
        vector: NDArray[Any],
        k: int,
        where: str,
        relation: Relation,
        far: float | None = None,
        among: Flags | None = None,
    ) -> Answer:
        own = query.own
        others = len(self.samples) - len(own)
        if not 1 <= k <= others:
            raise RetrievalError(
                f"k is {k:,}; expected 1 to {others:,}, as the index holds {len(self.samples):,} "
                f"samples{' with the query' if own else ''}"
            )
        chosen = allowed_samples(self.samples, query, where, relation, far, among)
        if instead := chosen.apart is not None:
            hits = self._nearest_labels(query, vector, k, chosen)
        else:
            # Without a mask more than asked for, as the query is most likely among them.
            most = k + len(own) if chosen.mask is None else min(k, chosen.count)
            found = self.index.search(vector[None], most, allowed=chosen.mask)
            numbers, scores = found.numbers[0], found.scores[0]
            kept = (numbers >= 0) & ~np.isin(numbers, own)
            hits = self._hits(query, numbers[kept][:k], scores[kept][:k])
        rest = chosen.far, self.index.manifest.metric, chosen.close, instead
        return Answer(query, hits, k, chosen.count or others, where, relation, *rest)

    def _nearest_labels(
        self, query: Query, vector: NDArray[Any], k: int, chosen: Allowed
    ) -> list[Hit]:
        """Returns the k nearest in label space; those as far in it by their vectors."""
        assert chosen.apart is not None and chosen.mask is not None
        hits: list[Hit] = []
        for distance in np.unique(chosen.apart[chosen.mask]):
            level = chosen.mask & (chosen.apart == distance)
            most = min(k - len(hits), int(level.sum()))
            found = self.index.search(vector[None], most, allowed=level)
            hits += self._hits(query, found.numbers[0], found.scores[0])
            if len(hits) >= k:
                break
        return hits

    def _hits(
        self, query: Query, numbers: NDArray[np.int64], scores: NDArray[np.float32]
    ) -> list[Hit]:
        samples = self.samples
        apart = np.full(len(numbers), np.nan, np.float32)
        if query.number is not None:
            apart = samples.label_distance(np.array([query.number]), numbers)
        return [
            Hit(
                number,
                samples.key(number),
                score,
                samples.label_names(number),
                None if np.isnan(distance) else distance,
            )
            for number, score, distance in zip(
                numbers.tolist(), scores.tolist(), apart.tolist(), strict=True
            )
        ]
