"""Some test rows with their nearest neighbours, as pictures where the data have any."""

import base64
from dataclasses import dataclass
from io import BytesIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from heron.pipeline.data.reader import Reader
from heron.pipeline.evaluation.evaluator import Predictions
from heron.shards.show import DRAWN

ANCHORS, NEIGHBOURS = 6, 5
SIDE = 96  # of a picture, in pixels


@dataclass(frozen=True)
class Example:
    """A row, its picture as base64 of a PNG, or "", and how it compares with its anchor.

    Attributes:
        key: of the row.
        picture: base64 of a PNG; "" where there is none.
        labels: those that the row has.
        cosine: of its features with the anchor's; 1 of the anchor itself.
        more: labels that the row has and the anchor has not.
        fewer: labels that the anchor has and the row has not.
    """

    key: str
    picture: str
    labels: list[str]
    cosine: float
    more: list[str]
    fewer: list[str]


def nearest_rows(embedding: Predictions, reader: Reader, stored: str | None) -> list[list[Example]]:
    """Returns a few rows spread over those embedded, each followed by its nearest neighbours.

    Args:
        embedding: rows with features; the neighbours are the nearest of these by cosine.
        reader: reads pictures and names labels.
        stored: the view of pictures; None: there are none.
    """
    hidden = embedding.hidden
    assert hidden is not None
    length = np.linalg.norm(hidden, axis=1, keepdims=True)
    vectors = hidden / np.where(length > 0, length, 1)
    count = min(ANCHORS, len(vectors))
    anchors = np.unique(np.linspace(0, len(vectors) - 1, count + 2).astype(int)[1:-1])
    found = []
    for anchor in anchors.tolist():
        cosine = vectors @ vectors[anchor]
        cosine[anchor] = np.inf
        near = np.argsort(-cosine)[: NEIGHBOURS + 1]
        cosine[anchor] = 1
        found.append(_examples(near, cosine, embedding, reader, stored))
    return found


def _examples(
    near: NDArray[np.int64],
    cosine: NDArray[np.float32],
    embedding: Predictions,
    reader: Reader,
    stored: str | None,
) -> list[Example]:
    rows, names = embedding.rows[near], reader.manifest.labels.names
    held = embedding.y[near] == 1
    pictures = reader.read(stored, rows) if stored else [None] * len(rows)

    def called(chosen: NDArray[np.bool_]) -> list[str]:
        return [names[a] for a in np.flatnonzero(chosen).tolist()]

    return [
        Example(
            key,
            _png(pixels) if pixels is not None else "",
            called(has),
            float(cosine[near[i]]),
            called(has & ~held[0]),
            called(held[0] & ~has),
        )
        for i, (key, pixels, has) in enumerate(
            zip(reader.sample_keys(rows), pictures, held, strict=True)
        )
    ]


def picture_view(reader: Reader) -> str | None:
    """Returns the first stored view of pictures in 1 or 3 channels; None where there is none."""
    views = reader.manifest.views
    return next((v.name for v in views if v.kind == "image" and v.shape[2] in DRAWN), None)


def _png(pixels: NDArray[np.uint8]) -> str:
    image = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    scale = SIDE / max(image.size)
    # Small pictures are enlarged without smoothing, so that a reader sees what the encoder saw.
    how = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS
    image = image.resize([max(1, round(side * scale)) for side in image.size], how)
    out = BytesIO()
    image.save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()
