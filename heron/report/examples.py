"""Some test rows with their nearest neighbours, with pictures if the data have any."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from heron.data.reader import Reader
from heron.evaluation.evaluator import Predictions
from heron.report.pages import png
from heron.shards.show import DRAWABLE_CHANNELS

ANCHORS, NEIGHBOURS = 6, 5
SIDE = 96  # the longest side of a picture, in pixels


@dataclass(frozen=True)
class Example:
    """A row, and how it compares with its anchor."""

    key: str
    picture: str  # base64 of a PNG; "" without one
    labels: list[str]
    cosine: float  # of its features with the anchor's; 1 for the anchor itself
    more: list[str]  # labels that the row has and the anchor lacks
    fewer: list[str]  # labels that the anchor has and the row lacks


def nearest_rows(embedding: Predictions, reader: Reader) -> list[list[Example]]:
    """Returns a few evenly spaced rows, each followed by its nearest neighbours by cosine.

    The pictures come from the first stored view of images with 1 or 3 channels.
    """
    hidden, views = embedding.hidden, reader.manifest.views
    assert hidden is not None
    length = np.linalg.norm(hidden, axis=1, keepdims=True)
    vectors = hidden / np.where(length > 0, length, 1)
    count = min(ANCHORS, len(vectors))
    anchors = np.unique(np.linspace(0, len(vectors) - 1, count + 2).astype(int)[1:-1])
    drawable = (v for v in views if v.kind == "image" and v.shape[2] in DRAWABLE_CHANNELS)
    stored = next((view.name for view in drawable), None)
    groups = []
    for anchor in anchors.tolist():
        cosine = vectors @ vectors[anchor]
        cosine[anchor] = np.inf
        near = np.argsort(-cosine)[: NEIGHBOURS + 1]
        cosine[anchor] = 1
        groups.append(_examples(near, cosine[near], embedding, reader, stored))
    return groups


def _examples(
    near: NDArray[np.int64],  # positions in `embedding` of the anchor and its nearest neighbours
    cosine: NDArray[np.float32],  # of each with the anchor
    embedding: Predictions,
    reader: Reader,
    stored: str | None,  # the view of pictures; None if there is none
) -> list[Example]:
    rows, names = embedding.rows[near], reader.manifest.labels.names
    labels = [[names[a] for a in np.flatnonzero(has).tolist()] for has in embedding.y[near] == 1]
    pictures = [""] * len(rows)
    if stored:
        present = reader.present(rows, [stored])[:, 0].tolist()
        pictures = [
            _png(pixels) if is_present else ""
            for pixels, is_present in zip(reader.read(stored, rows), present, strict=True)
        ]
    columns = zip(reader.sample_keys(rows), pictures, labels, cosine.tolist(), strict=True)
    return [
        Example(
            key,
            picture,
            names_of_row,
            score,
            more=[name for name in names_of_row if name not in labels[0]],
            fewer=[name for name in labels[0] if name not in names_of_row],
        )
        for key, picture, names_of_row, score in columns
    ]


def _png(pixels: NDArray[np.uint8]) -> str:
    image = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    scale = SIDE / max(image.size)
    # Small pictures are enlarged without smoothing, so that the report shows what the encoder saw.
    method = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS
    return png(image.resize([max(1, round(side * scale)) for side in image.size], method))
