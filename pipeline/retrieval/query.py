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
from heron.pipeline.negatives.definition import hard_difference
from heron.pipeline.retrieval.answer import RELATIONS, Answer, Hit, Query, Relation
from heron.pipeline.retrieval.embeddings import Embeddings
from heron.pipeline.retrieval.filters import parse
from heron.pipeline.retrieval.given import File
from heron.pipeline.retrieval.index import Index
from heron.pipeline.retrieval.samples import Samples

if TYPE_CHECKING:  # both load torch, which a query by key does without
    from heron.pipeline.retrieval.encode import Encoder
    from heron.pipeline.retrieval.pictures import Pictures

LOSSY = ("ivfpq",)  # kinds of index that hold codes, of which vectors are only estimated


class Retriever:
    """Answers queries over one index; made once, asked often, by several threads if need be.

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
        """Put together what `open` finds.

        Args:
            index: to search.
            embeddings: the vectors of its samples, or None: then the index gives them.
            without: why there are no embeddings.
            run: folder of the run or checkpoint; by default the index's.
            data: folder or URL of the shards; by default the index's.
        """
        self.index, self.embeddings, self._without = index, embeddings, without
        self.run = index.manifest.run if run is None else str(run)
        self.data = index.manifest.data if data is None else str(data)
        self._lock = Lock()  # the shards' readers keep open files in an order of use

    @classmethod
    def open(
        cls,
        index: str | Path,
        embeddings: str | Path | None = None,
        run: str | Path | None = None,
        data: str | Path | None = None,
    ) -> Self:
        """Open an index, and the embeddings that it was built of where they are there.

        Model and shards are opened when a query needs them.

        Args:
            index: its folder.
            embeddings: their folder; by default the one that the index names, if it still is.
            run: the run whose model encodes files; by default the one that the index names.
            data: the shards that pictures are in; by default those that the index names.

        Raises:
            RetrievalError: there is no sound index, or `embeddings` are not those of the index.
        """
        opened = Index.open(Path(index))
        try:
            found = Embeddings.open(embeddings or opened.manifest.embeddings)
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
    ) -> Answer:
        """The samples nearest to one of them.

        Args:
            key: of the sample.
            k: how many to find.
            where: a filter by label, such as "Smiling and not Male": see `filters.parse`.
            relation: `neighbours`: any; `hard`: those whose labels are far from the query's;
                `false`: those with the very same labels, which an unsupervised loss pushes apart
                wrongly, its false negatives.
            far: the label distance from which on a neighbour is hard; by default that of
                `pipeline.negatives.definition`.

        Raises:
            RetrievalError: no such sample, k or filter; nothing passes the filter; or the relation
                needs labels that the query has not.
        """
        number = self.samples.find(key)
        vector, origin = self.vector(number)
        query = Query(number, key, self.samples.label_names(number), origin)
        return self._answer(query, vector, k, where, relation, far)

    def by_file(
        self,
        file: File | Mapping[str, File],
        k: int = 10,
        where: str = "",
        relation: Relation = "neighbours",
        name: str | None = None,
        row: int = 0,
    ) -> Answer:
        """The samples nearest to a file, encoded by the model whose embeddings are indexed.

        Args:
            file: path or bytes of a JPEG, a PNG or an npy file of vector rows; where the model
                sees several stored views, one of each by the view's name.
            k: how many to find.
            where: a filter by label.
            relation: `neighbours`; a file has no labels that others could be told by.
            name: what the answer calls it; by default the path.
            row: of an array of rows.

        Raises:
            RetrievalError: it is no such file, the model is another than that of the index, or as
                `by_key`.
            CheckpointError: there is no model.
            ShardError: there is no data set, whose shapes and statistics the model's input has.
        """
        files = list(file.values()) if isinstance(file, Mapping) else [file]
        paths = [str(one) for one in files if not isinstance(one, bytes)]
        query = Query(None, name or ", ".join(paths) or "a file", [], f"the model of {self.run}")
        return self._answer(query, self.encode(file, row), k, where, relation)

    def by_vector(
        self,
        vector: NDArray[Any],
        k: int = 10,
        where: str = "",
        relation: Relation = "neighbours",
        name: str = "a vector",
    ) -> Answer:
        """The samples nearest to a vector of the index's layer.

        Args:
            vector: float [dim].
            k: how many to find.
            where: a filter by label.
            relation: `neighbours`; a vector has no labels that others could be told by.
            name: what the answer calls it.

        Raises:
            RetrievalError: it is no such vector, or as `by_key`.
        """
        if vector.ndim != 1 or vector.dtype.kind not in "fiu":
            raise RetrievalError(
                f"{name} is {vector.dtype} {vector.shape}; expected "
                f"({self.index.manifest.dim},), numbers; give one row"
            )
        with np.errstate(over="ignore"):  # what is too large becomes infinite, which is refused
            asked = vector.astype(np.float32)
        return self._answer(Query(None, name, [], "as given"), asked, k, where, relation)

    def vector(self, number: int) -> tuple[NDArray[np.float32], str]:
        """The vector of a sample, [dim], and where it comes from, in words."""
        manifest = self.index.manifest
        if self.embeddings is not None:
            found = self.embeddings.one(manifest.layer, number)
            return found, f"the embeddings of {self.embeddings.folder}"
        found = self.index.vectors(np.array([number]))[0]
        lossy = f", decoded from codes ({manifest.kind} is lossy)" if manifest.kind in LOSSY else ""
        return found, f"the index{lossy}, as {self._without}"

    def files(self, asked: Sequence[str]) -> dict[str, Path]:
        """Texts such as `PATH`, or `VIEW=PATH` of each view, as a file of each view that is seen.

        Raises:
            RetrievalError: the views of the files are not those that the model sees.
        """
        with self._lock:
            return self._encoder.files(asked)

    def encode(self, file: File | Mapping[str, File], row: int = 0) -> NDArray[np.float32]:
        """The embedding of a file, [dim]; see `by_file`."""
        with self._lock:
            return self._encoder(file, row)

    @cached_property
    def _encoder(self) -> "Encoder":
        from heron.pipeline.retrieval.encode import Encoder

        known = self.index.manifest
        precision = None if self.embeddings is None else self.embeddings.manifest.precision
        return Encoder.open(
            self.run, self.data, known.layer, known.checkpoint, known.data_sha256, precision
        )

    def picture(self, number: int) -> Image.Image | None:
        """The picture of a sample, RGB, as the shards have it; None where there are only vectors.

        Raises:
            RetrievalError: the shards are others by now, or the picture cannot be read.
            ShardError: they are missing or damaged.
        """
        with self._lock:
            return self._pictures.of(self.samples, number)

    @cached_property
    def _pictures(self) -> "Pictures":
        from heron.pipeline.retrieval.pictures import Pictures

        return Pictures.open(self.data, self.run)

    def _answer(
        self,
        query: Query,
        vector: NDArray[np.float32],
        k: int,
        where: str,
        relation: Relation,
        far: float | None = None,
    ) -> Answer:
        others = len(self.samples) - (query.number is not None)
        if not 1 <= k <= others:
            raise RetrievalError(
                f"k is {k:,}; expected 1 to {others:,}, as the index holds {len(self.samples):,} "
                f"samples{' with the query' if query.number is not None else ''}"
            )
        mask, far = self._mask(query, where, relation, far)
        if mask is None:  # one more than asked for, as the query is most likely among them
            allowed = others
            found = self.index.search(vector[None], k + len(self.samples) - others)
        else:
            allowed = int(mask.sum())
            found = self.index.search(vector[None], min(k, allowed), mask)
        numbers, scores = found.numbers[0], found.scores[0]
        kept = (numbers >= 0) & (numbers != (-1 if query.number is None else query.number))
        hits = self._hits(query, numbers[kept][:k], scores[kept][:k])
        metric = self.index.manifest.metric
        return Answer(query, hits, k, allowed, where, relation, far, metric)

    def _hits(
        self, query: Query, numbers: NDArray[np.int64], scores: NDArray[np.float32]
    ) -> list[Hit]:
        distances: list[float | None] = [None] * len(numbers)
        if query.number is not None:
            apart = self.samples.label_distance(np.array([query.number]), numbers).tolist()
            distances = [None if np.isnan(distance) else distance for distance in apart]
        return [
            Hit(number, self.samples.key(number), score, self.samples.label_names(number), distance)
            for number, score, distance in zip(
                numbers.tolist(), scores.tolist(), distances, strict=True
            )
        ]

    def _mask(
        self, query: Query, where: str, relation: Relation, far: float | None
    ) -> tuple[NDArray[np.bool_] | None, float | None]:
        """Which samples are allowed, never the query, [N], or None for all; and what is far."""
        mask = None
        if where.strip():
            asked = parse(where, self.samples.names)
            mask = asked.mask(self.samples)
            if not mask.any():
                raise RetrievalError(
                    f"no sample passes the filter {where!r}; found {asked.counts(self.samples)} of "
                    f"{int(self.samples.known.sum()):,} labelled samples; ask for less"
                )
            if query.number is not None:
                mask[query.number] = False
        related, far = self._related(query, relation, far)
        both = mask if related is None else related if mask is None else mask & related
        if both is None:
            return None, None
        if not both.any():
            found = [f"{int(mask.sum()):,} others pass {where!r}"] if mask is not None else []
            if related is not None:
                how = "its very labels" if far is None else f"a label distance of {far:.4g} or more"
                found.append(f"{int(related.sum()):,} others have {how} (relation '{relation}')")
            raise RetrievalError(
                f"'{query.key}' has no other sample to choose from: {', '.join(found)}; expected "
                "one at least; ask for less"
            )
        return both, far

    def _related(
        self, query: Query, relation: Relation, far: float | None
    ) -> tuple[NDArray[np.bool_] | None, float | None]:
        """Which samples stand in a relation to the query, [N], or None for all."""
        if relation not in RELATIONS:
            raise RetrievalError(f"unknown relation '{relation}'; expected {', '.join(RELATIONS)}")
        if far is not None and (relation != "hard" or not 0 < far <= 1):
            raise RetrievalError(
                f"far is {far} with relation '{relation}'; expected above 0 and at most 1, a label "
                "distance, with relation 'hard'"
            )
        if relation == "neighbours":
            return None, None
        number, samples = query.number, self.samples
        if number is None or not samples.known[number]:
            what = "is no sample, and" if number is None else "is a sample that"
            raise RetrievalError(
                f"'{query.key}' {what} has no labels; relation '{relation}' needs a query with "
                "labels; ask for neighbours, or by the key of another sample"
            )
        apart = samples.label_distance(np.array([number]), np.arange(len(samples)))
        apart[number] = np.nan  # NaN is no distance, and compares as false
        if relation == "false":
            return apart == 0, None
        if far is None:
            largest = 1 if samples.exclusive else len(samples.names)
            differ = np.rint(apart[~np.isnan(apart)] * largest).astype(np.int64)
            hard = hard_difference(np.bincount(differ, minlength=largest + 1))
            far = float(np.float32(hard / largest))  # as the distances are
        return apart >= far, far
