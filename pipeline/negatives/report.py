"""The report on negatives: an HTML page, its numbers as JSON, and the pairs as Parquet."""

import math
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from heron.pipeline.config.errors import RetrievalError
from heron.pipeline.negatives.histograms import mean, more_similar, quantiles
from heron.pipeline.negatives.measure import RELATIONS, Negatives, worst
from heron.pipeline.negatives.page import SHARES, Page
from heron.pipeline.negatives.repulsion import Repulsion, near_weights
from heron.pipeline.retrieval.embeddings import Embeddings
from heron.pipeline.retrieval.pictures import Pictures
from heron.shards.atomic import atomic_write, save_json
from heron.shards.errors import ShardError

if TYPE_CHECKING:
    from heron.pipeline.retrieval.index import Index

LARGEST = 200  # labels whose matrix is written to the JSON


@dataclass(frozen=True)
class Report:
    """What the report is about.

    Attributes:
        embeddings: that were measured.
        found: near pairs and their labels.
        repulsion: what pushes pairs apart.
        index: that neighbours are from; None: they are exact.
        pictures: of the samples, if there are any, and why not: see `find_pictures`.
    """

    embeddings: Embeddings
    found: Negatives
    repulsion: Repulsion
    index: "Index | None" = None
    pictures: tuple[Pictures | None, str] = (None, "")

    def write(self, out: Path) -> Path:
        """Write report.html, negatives.json and pairs.parquet; the path of the first.

        Raises:
            ShardError: the disk is full, or a picture cannot be read.
        """
        out.mkdir(parents=True, exist_ok=True)
        pictures, why = self.pictures
        notes = [*self.found.notes, *self.repulsion.notes, *([why] if why else [])]
        name, manifest = self.embeddings.folder.resolve().name, self.embeddings.manifest
        shown = Page(manifest, self.found, self.repulsion, self._neighbours(), pictures, notes)
        self._pairs(out / "pairs.parquet")
        save_json(out / "negatives.json", plain(self.numbers() | {"left_out": notes}))
        with atomic_write(out / "report.html") as stream:
            stream.write(shown.html(f"Negatives of {name}").encode())
        return out / "report.html"

    def numbers(self) -> dict[str, Any]:
        """All that was measured."""
        found, pairs, known = self.found, self.found.pairs, self.embeddings.manifest
        names, scale = pairs.samples.names, pairs.scale
        confusion = found.confusion
        matrix = len(names) <= LARGEST
        return {
            "embeddings": str(self.embeddings.folder),
            "checkpoint": known.checkpoint,
            "run": known.run,
            "data": known.data,
            "samples": len(self.embeddings),
            "labelled": int(pairs.samples.known.sum()),
            "question": found.question,
            "anchors": len(pairs.anchors),
            "others": len(pairs.others),
            "neighbours": self._neighbours(),
            "recall": None if self.index is None else self._recall(self.index),
            "labels": {"kind": pairs.samples.kind, "names": names},
            "thresholds": {"close": found.close / scale, "far": found.far / scale},
            "random_pairs_by_distance": {
                "distance": np.arange(scale + 1) / scale,
                "pairs": found.levels,
            },
            "false_negatives": {
                "k": found.ks,
                **{name: {"near": a, "random": b} for name, (a, b) in found.rates.items()},
            },
            "hard_share": found.hard_share,
            "similarity": {
                name: {
                    "pairs": int(counts.sum()),
                    "mean": mean(counts),
                    "quantiles": dict(
                        zip(map(str, SHARES), quantiles(counts, SHARES), strict=True)
                    ),
                }
                for name, counts in found.histograms.items()
            },
            "closer_than_random": more_similar(
                found.histograms["close"], found.histograms["others"]
            ),
            "confusion": {
                "precision": confusion.precision,
                "random": confusion.base,
                "swapped": confusion.swapped if matrix else None,
                "expected": confusion.expected if matrix else None,
                "worst": [
                    {"anchor": names[a], "neighbour": names[b], "pairs": n, "expected": e}
                    for a, b, n, e in worst(found)
                ],
            },
            "weight": self.repulsion.weight,
            "temperatures": self.repulsion.temperatures,
            "repulsion": self.repulsion.shares,
            "assumption_1": self.repulsion.assumption,
            "compared_layer": self.repulsion.layer,
            "collapse": self.repulsion.collapse,
        }

    def _neighbours(self) -> str:
        """How neighbours were found, in words."""
        if self.index is None:
            return "exact"
        recall = self._recall(self.index)
        said = f"recall@{recall['k']} {recall['value']:.4f}" if recall else "recall not measured"
        return f"of the index {self.index.folder} ({self.index.manifest.kind}), {said}"

    @staticmethod
    def _recall(index: "Index") -> dict[str, Any] | None:
        recall = index.manifest.recall
        return None if recall is None else {"k": recall.k, "value": recall.value}

    def _pairs(self, path: Path) -> None:
        """Every anchor with its neighbours, a row each."""
        found, pairs = self.found, self.found.pairs
        g = near_weights(self.embeddings, pairs, found.numbers, self.repulsion.temperatures)
        keys, relation = pairs.samples.keys, found.relation
        schema = pa.schema(
            {
                "anchor": pa.string(),
                "neighbour": pa.string(),
                "rank": pa.int32(),
                "similarity": pa.float32(),
                "label_distance": pa.float32(),
                "g": pa.float32(),
                "relation": pa.string(),
            }
        )
        with atomic_write(path) as stream, pq.ParquetWriter(stream, schema) as writer:
            for first in range(0, len(found.numbers), 4096):
                part = slice(first, first + 4096)
                numbers = found.numbers[part]
                count, k = numbers.shape
                anchors = np.repeat(pairs.anchors[part], k)
                columns = [
                    [key.decode() for key in keys[anchors].tolist()],
                    [key.decode() for key in keys[numbers.reshape(-1)].tolist()],
                    np.tile(np.arange(1, k + 1), count),
                    found.cosine[part].reshape(-1),
                    found.level[part].reshape(-1) / pairs.scale,
                    [None] * numbers.size if g is None else g[part].reshape(-1),
                    [RELATIONS[i] for i in relation[part].reshape(-1).tolist()],
                ]
                arrays = [pa.array(c, t) for c, t in zip(columns, schema.types, strict=True)]
                writer.write_table(pa.Table.from_arrays(arrays, schema=schema))


def find_pictures(embeddings: Embeddings, data: str | None = None) -> tuple[Pictures | None, str]:
    """The pictures of the samples, or None and why there are none.

    Args:
        embeddings: of the samples.
        data: the shards, where they are not those that the embeddings name.

    Raises:
        RetrievalError: `data` holds other samples.
        ShardError: `data` is no data set.
    """
    known = embeddings.manifest
    try:
        found = Pictures.open(data or known.data, known.run)
        if found.of(embeddings.samples, 0) is not None:
            return found, ""
        return None, "pictures: the data set has no view of images"
    except (RetrievalError, ShardError, OSError) as fault:
        if data is not None:
            raise
        return None, f"pictures: {fault}; --data names the data set if it was moved"


def plain(value: Any) -> Any:
    """What JSON can hold: arrays as lists, dataclasses as mappings, NaN as null."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
