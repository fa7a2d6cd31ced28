"""Some test rows with their nearest neighbours, as pictures where the data have any."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from heron.pipeline.data.reader import Reader
from heron.pipeline.evaluation.evaluator import Predictions
from heron.pipeline.report.pages import png
from heron.shards.show import DRAWABLE_CHANNELS

ANCHORS, NEIGHBOURS = 6, 5
SIDE = 96  # of a picture, in pixels


@dataclass(frozen=True)
class Example:
    """A row, and how it compares with its anchor."""

    key: str
    picture: str  # base64 of a PNG; "" where there is none
    labels: list[str]  # those that the row has
    cosine: float  # of its features with the anchor's; 1 of the anchor itself
    more: list[str]  # labels that the row has and the anchor has not
    fewer: list[str]  # labels that the anchor has and the row has not


def nearest_rows(embedding: Predictions, reader: Reader) -> list[list[Example]]:
    """Returns a few rows spread over those embedded, each followed by its nearest by cosine.

    Pictures are those of the first stored view of pictures in 1 or 3 channels.
    """
    hidden, views = embedding.hidden, reader.manifest.views
    assert hidden is not None
    length = np.linalg.norm(hidden, axis=1, keepdims=True)
    vectors = hidden / np.where(length > 0, length, 1)
    count = min(ANCHORS, len(vectors))
    anchors = np.unique(np.linspace(0, len(vectors) - 1, count + 2).astype(int)[1:-1])
    stored = next(
        (v.name for v in views if v.kind == "image" and v.shape[2] in DRAWABLE_CHANNELS), None
    )
    found = []
    for anchor in anchors.tolist():
        cosine = vectors @ vectors[anchor]
        cosine[anchor] = np.inf
        near = np.argsort(-cosine)[: NEIGHBOURS + 1]
        cosine[anchor] = 1
        found.append(_examples(near, cosine[near], embedding, reader, stored))
    return found


def _examples(
    near: NDArray[np.int64],  # places of the anchor and of its nearest among those embedded
    cosine: NDArray[np.float32],  # of each with the anchor
    embedding: Predictions,
    reader: Reader,
    stored: str | None,  # the view of pictures; None: there are none
) -> list[Example]:
    rows, names = embedding.rows[near], reader.manifest.labels.names
    labels = [[names[a] for a in np.flatnonzero(has).tolist()] for has in embedding.y[near] == 1]
    pictures = [""] * len(rows)
    if stored:
        there = reader.present(rows, [stored])[:, 0].tolist()
        pictures = [
            _png(p) if t else "" for p, t in zip(reader.read(stored, rows), there, strict=True)
        ]
    each = zip(reader.sample_keys(rows), pictures, labels, cosine.tolist(), strict=True)
    return [
        Example(
            key,
            picture,
            has,
            score,
            more=[name for name in has if name not in labels[0]],
            fewer=[name for name in labels[0] if name not in has],
        )
        for key, picture, has, score in each
    ]


def _png(pixels: NDArray[np.uint8]) -> str:
    image = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    scale = SIDE / max(image.size)
    # Small pictures are enlarged without smoothing, so that a reader sees what the encoder saw.
    how = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS
    return png(image.resize([max(1, round(side * scale)) for side in image.size], how))
