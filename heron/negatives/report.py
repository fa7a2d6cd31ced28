"""Writes the report on negatives: an HTML page, its numbers as JSON, and the pairs as Parquet."""

import math
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pydantic_core
from PIL import Image

from heron.config.errors import RetrievalError
from heron.evaluation.collapse import collapsed
from heron.evaluation.negatives import RELATIONS
from heron.negatives import figures
from heron.negatives.estimates import Estimate
from heron.negatives.measure import MIN_EXPECTED, measure_labels
from heron.negatives.neighbours import NearPairs, Question, find_neighbours
from heron.negatives.repulsion import Temperatures, measure_repulsion, near_weights
from heron.report import pages
from heron.report.links import ADDRESS, PageLinks
from heron.retrieval.embeddings import Embeddings, choose_data
from heron.retrieval.pictures import SamplePictures
from heron.shards.atomic import atomic_write
from heron.shards.errors import ShardError
from heron.shards.set_aside import make_room, refuse_taken

if TYPE_CHECKING:
    from heron.retrieval.index import Index

MAX_MATRIX_LABELS = 200  # labels up to which the confusion matrices are written to the JSON
MAX_SIDE = 192  # of a picture, in pixels, at most
PAGE = Path(__file__).parent / "page"


def report(
    embeddings: Embeddings,
    question: Question,
    out: Path,
    index: "Index | None" = None,
    data: str | None = None,
    address: str = ADDRESS,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Writes report.html, negatives.json and pairs.parquet; returns what JSON holds.

    Neighbours are taken from `index`, which must be of the same embeddings, if it is given; `data`
    names the shards with the pictures if they are not those that the embeddings name. Pairs and
    confused labels link to the page of `heron serve` at `address`. Raises a RetrievalError if the
    question has no answer, or index or data are of other samples, and a ShardError if `data` is no
    data set, the disk is full, or a picture cannot be read. What `out` holds is refused or, with
    `overwrite`, moved aside.
    """
    refuse_taken(out, overwrite, RetrievalError)
    links = PageLinks(address)
    pictures, no_pictures = find_pictures(embeddings, data)  # first, so that it fails early
    near, manifest = find_neighbours(embeddings, question, index), embeddings.manifest
    temperatures = Temperatures.of_run(manifest.run)
    repulsion, notes = measure_repulsion(near, temperatures)
    recall = index.manifest.recall if index else None
    neighbours = "exact"
    if index:
        quality = f"recall@{recall.k} {recall.value:.4f}" if recall else "recall not measured"
        neighbours = f"of the index {index.folder} ({index.manifest.kind}), {quality}"
    numbers = {
        "embeddings": str(embeddings.folder),
        "checkpoint": manifest.checkpoint,
        "run": manifest.run,
        "data": manifest.data,
        "samples": len(embeddings),
        "labelled": int(embeddings.samples.known.sum()),
        "question": question,
        "anchors": len(near.pairs.anchors),
        "others": len(near.pairs.others),
        "neighbours": neighbours,
        "recall": {"k": recall.k, "value": recall.value} if recall else None,
        "labels": {"kind": embeddings.samples.kind, "names": embeddings.samples.names},
        **measure_labels(near),
        **repulsion,
        "left_out": [*near.notes, *notes, *filter(None, [no_pictures])],
    }
    page = render(near, numbers, pictures, links)
    confusion = numbers["confusion"]
    if len(embeddings.samples.names) > MAX_MATRIX_LABELS:
        confusion = confusion | {"swapped": None, "expected": None}
    make_room(out, overwrite, RetrievalError)
    out.mkdir(parents=True, exist_ok=True)
    with atomic_write(out / "pairs.parquet") as stream:
        pq.write_table(tabulate(near, temperatures), stream)
    with atomic_write(out / "negatives.json") as stream:
        stream.write(to_json(numbers | {"confusion": confusion}))
    with atomic_write(out / "report.html") as stream:
        stream.write(page.encode())
    return numbers


def to_json(value: Any) -> bytes:
    """Returns JSON: dataclasses as mappings, arrays as lists, non-finite numbers as null."""
    return pydantic_core.to_json(
        value, indent=1, inf_nan_mode="null", fallback=lambda array: array.tolist()
    )


def tabulate(near: NearPairs, temperatures: Temperatures) -> pa.Table:
    """Returns a table with a row for each anchor and neighbour."""
    anchors, k = near.numbers.shape
    g = near_weights(near, temperatures)
    keys = pa.array(near.embeddings.samples.keys.tolist(), pa.binary()).cast(pa.string())
    distance = (near.difference.reshape(-1) / near.pairs.max_difference).astype(np.float32)
    columns: dict[str, Any] = {
        "anchor": keys.take(pa.array(np.repeat(near.pairs.anchors, k))),
        "neighbour": keys.take(pa.array(near.numbers.reshape(-1))),
        "rank": np.tile(np.arange(1, k + 1, dtype=np.int32), anchors),
        "similarity": near.cosine.reshape(-1),
        "label_distance": distance,
        "g": pa.nulls(near.numbers.size, pa.float32()) if g is None else g.reshape(-1),
        "relation": pa.array(RELATIONS).take(pa.array(near.relation.reshape(-1))),
    }
    return pa.table(columns)


def render(
    near: NearPairs, numbers: dict[str, Any], pictures: SamplePictures | None, links: PageLinks
) -> str:
    """Returns the page as HTML: figures and tables, each with its findings in sentences."""
    precision, chance = numbers["confusion"]["precision"], numbers["confusion"]["random"]
    lift = precision.value / np.where(chance > 0, chance, np.nan)
    return pages.render(
        "report.html",
        PAGE,
        {"percent": percent, "number": number},
        name=f"Negatives of {near.embeddings.folder.resolve().name}",
        exclusive=near.pairs.exclusive,
        expected=MIN_EXPECTED,
        figures=figures.draw(numbers, near.pairs.exclusive, links),
        sheets={relation: _sheet(near, relation, pictures) for relation in ("hard", "false")},
        common=lambda pairs: Counter(n for p in pairs for n in p["both"]).most_common(1),
        collapsed=collapsed(numbers["collapse"]),
        lift=lift,
        order=[int(a) for a in np.argsort(lift) if np.isfinite(lift[a])],
        g_ends=_ends(numbers["weight"]),
        links=links,
        **numbers,
    )


def _ends(weight: dict[str, Any] | None) -> list[float]:
    """Returns the mean g of the least and of the most similar pairs."""
    if weight is None:
        return []
    points = np.flatnonzero(weight["pairs"] >= min(figures.MIN_PAIRS, weight["pairs"].max()))
    return list(weight["by_label"].value[points[[-1, 0]]].tolist())


def _sheet(near: NearPairs, relation: str, pictures: SamplePictures | None) -> list[dict[str, Any]]:
    """Returns near pairs with the labels that they share and those that only one has."""
    samples, pairs = near.embeddings.samples, []
    for row, column in near.examples(relation):
        numbers = int(near.pairs.anchors[row]), int(near.numbers[row, column])
        left, right = (samples.label_names(number) for number in numbers)
        images = [(samples.key(n), pictures.of(samples, n)) for n in numbers] if pictures else []
        pairs.append(
            {
                "keys": [samples.key(number) for number in numbers],
                "pictures": [(key, _thumbnail(image)) for key, image in images if image],
                "cosine": float(near.cosine[row, column]),
                "distance": float(near.difference[row, column] / near.pairs.max_difference),
                "rank": column + 1,
                "both": [name for name in left if name in right],
                "left": [name for name in left if name not in right],
                "right": [name for name in right if name not in left],
            }
        )
    return pairs


def _thumbnail(picture: Image.Image) -> str:
    """Shrinks a picture in place, and returns it as a PNG in base64."""
    picture.thumbnail((MAX_SIDE, MAX_SIDE), Image.Resampling.LANCZOS)
    return pages.png(picture)


def find_pictures(
    embeddings: Embeddings, data: str | None = None
) -> tuple[SamplePictures | None, str]:
    """Returns the pictures of the samples, or None and why there are none; see `report`."""
    manifest = embeddings.manifest
    try:
        shards = choose_data(data, manifest.data, embeddings.folder)
        pictures = SamplePictures.open(shards, manifest.run, trusted=False)
        pictures.of(embeddings.samples, 0)  # raises if the shards are others
        if pictures.views:
            return pictures, ""
        return None, "pictures: the data set has no view of images"
    except (RetrievalError, ShardError, OSError) as fault:
        if data is not None:
            raise
        return None, f"pictures: {fault}; --data names the data set if it was moved"


def percent(share: "float | Estimate") -> str:
    """Formats a share in per cent, to three digits; an estimate with its interval."""
    if isinstance(share, Estimate):
        value, low, high = (percent(float(v)) for v in (share.value, share.low, share.high))
        return value if value == "–" else f"{value} ({low.removesuffix(' %')} to {high})"
    if not math.isfinite(share):
        return "–"
    return f"{np.format_float_positional(100 * share, 3, fractional=False, trim='-')} %"


def number(estimate: Estimate, digits: int = 3) -> str:
    """Formats an estimate with its interval."""
    if not math.isfinite(estimate.value):
        return "–"
    value, low, high = (f"{v:.{digits}f}" for v in (estimate.value, estimate.low, estimate.high))
    return f"{value} ({low} to {high})"
