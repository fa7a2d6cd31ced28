"""Decodes pictures once, at the smallest size that the views need."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

from heron.config.data import ModelView
from heron.config.errors import ConfigError
from heron.shards.errors import format_shape
from heron.shards.manifest import View
from heron.shards.picture import JPEG, PNG, is_plain_jpeg, pixels, read_header

AUGMENTATIONS = {
    "vector": ("noise",),
    "image": ("crop", "color", "flip", "blur"),
    "graph": ("drop_nodes", "perturb_edges", "mask_nodes", "subgraph"),
    "text": ("none of these, but the dotted path of your own",),
}
DRAFTS = (8, 4, 2)  # divisors of the size at which scaled decoding is faster than full decoding


@dataclass(frozen=True)
class PictureDecoder:
    """Decodes the pictures of a stored view to one size.

    Attributes:
        stored: height, width and channels in the manifest, -1 where they vary.
        shape: height, width and channels of the output.
        draft: whether JPEGs may be decoded at a fraction of their size.
    """

    stored: tuple[int, ...]
    shape: tuple[int, ...]
    varying: bool = False
    draft: bool = True
    dtype = "uint8"
    vocabulary = 0

    def decode(self, data: bytes, out: NDArray[np.uint8]) -> None:
        """Decodes the bytes of one picture into `out`, of `shape`.

        Raises ValueError for no picture, a damaged one, or a size other than the manifest's.
        """
        if not self.varying and is_plain_jpeg(data):
            min_size = self.shape[:2] if self.shape != self.stored else (0, 0)
            with suppress(ValueError):  # the fault is found below
                decoded = simplejpeg.decode_jpeg(
                    data, min_height=min_size[0], min_width=min_size[1], buffer=out
                )
                if decoded.shape == self.shape:
                    return
        whole = None if data.startswith((JPEG, PNG)) else pixels(data)
        size = read_header(data)[1:] if whole is None else whole.shape[:2]
        if not self.varying and size != self.stored[:2]:
            raise ValueError(f"is {_size_text(size)}; the manifest says {_size_text(self.stored)}")
        out[:] = self.fit(pixels(data, self._least(size)) if whole is None else whole)

    def _least(self, size: Sequence[int]) -> Sequence[int]:
        """Returns the least height and width at which a JPEG of `size` is decoded; 0: its own."""
        if not self.varying:
            return self.shape[:2] if self.shape != self.stored else (0, 0)
        drafts = DRAFTS if self.draft else ()
        divisor = next((d for d in drafts if min(size) >= d * self.shape[0]), 1)
        return [-(-n // divisor) if divisor > 1 else 0 for n in size]

    def fit(self, picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Resamples a decoded picture to `shape`; if sizes vary, cuts its central square first.

        Raises ValueError if it has neither `shape` nor the stored shape.
        """
        stored = (*picture.shape[:2], self.stored[2]) if self.varying else self.stored
        if picture.shape not in (stored, self.shape) or picture.ndim != 3 or 0 in picture.shape:
            expected = "any × any" if self.varying else _size_text(self.stored)
            raise ValueError(
                f"is {format_shape(picture.shape)}; expected {expected} × {self.stored[2]}"
            )
        if self.varying:
            height, width = picture.shape[:2]
            side = min(height, width)
            top, left = (height - side) // 2, (width - side) // 2
            picture = picture[top : top + side, left : left + side]
        height, width = self.shape[:2]
        if picture.shape[:2] == (height, width):
            return picture
        resized = Image.fromarray(picture).resize((width, height), Image.Resampling.BICUBIC)
        return np.asarray(resized)


def input_shape(stored: View, view: ModelView, vocabulary: int = 0) -> tuple[int, ...]:
    """Returns the shape of a sample as the model sees it; ConfigError if the options do not fit.

    It is (width,) of vectors, (height, width, channels) of pictures, (tokens, vocabulary) of texts,
    or (nodes, edges, 2, labels) of graphs.
    """
    image = stored.kind == "image"
    for augmentation in view.augment:
        name = augmentation.name
        if augmentation.own:
            continue
        if name not in (supported := AUGMENTATIONS[stored.kind]):
            raise ConfigError(
                f"data.views: augmentation '{name}' does not fit {stored.kind} view "
                f"'{view.stored}'; {stored.kind}s take {', '.join(supported)}"
            )
        if name == "color" and stored.shape[2] != 3:
            raise ConfigError(
                f"data.views: augmentation 'color' needs three channels, but '{view.stored}' has "
                f"{stored.shape[2]}; leave it out"
            )
    if not image:
        if view.size is not None:
            raise ConfigError(
                f"data.views: size is {view.size}, but '{view.stored}' holds {stored.kind}s; leave "
                "it out"
            )
        if stored.kind == "graph":
            nodes, edges, labels = stored.shape
            return nodes, edges, 2, labels
        return (view.tokens, vocabulary) if stored.kind == "text" else stored.shape
    if view.size is None and -1 in stored.shape:
        raise ConfigError(
            f"data.views: the pictures of '{view.stored}' are of several sizes; expected a size "
            "for the model's input, such as size: 224"
        )
    height, width = view.size or stored.shape[:2]
    return height, width, stored.shape[2]


def picture_decoder(
    stored: View, views: Sequence[ModelView], draft: bool, decode_size: int | None
) -> PictureDecoder:
    """Returns the decoder of stored pictures from which the model's `views` are made.

    A draft is decoded at 1/2, 1/4 or 1/8 of its size: the smallest at which no view is enlarged,
    neither its smallest crop nor, without crops, the full picture. Raises ConfigError if
    `data.decode_size` is less than a view's size.
    """
    if -1 in stored.shape:
        needed = max(max(view.size) for view in views if view.size is not None)
        side = decode_size or math.ceil(needed * 8 / 7)  # 256 for 224, as is usual
        if side < needed:
            raise ConfigError(
                f"data.decode_size is {side}, less than the views' size of {needed}; "
                f"expected at least {needed}"
            )
        return PictureDecoder(stored.shape, (side, side, stored.shape[2]), True, draft)
    scale = max((_scale(view, stored.shape) for view in views), default=1.0)
    divisor = next((d for d in DRAFTS if d * scale <= 1), 1) if draft else 1
    height, width = (-(-n // divisor) for n in stored.shape[:2])
    return PictureDecoder(stored.shape, (height, width, stored.shape[2]))


def _scale(view: ModelView, stored: Sequence[int]) -> float:
    """Returns the smallest factor of a picture's sides at which the view is not enlarged."""
    height, width = stored[:2]
    rows, columns = view.size or (height, width)
    crops = [augmentation.crop for augmentation in view.augment if augmentation.crop is not None]
    if not crops:
        return max(rows / height, columns / width)
    area = min(crop.area[0] for crop in crops) * height * width
    shapes = [ratio * columns / rows for crop in crops for ratio in crop.ratio]
    return max(
        max(
            rows / min(height, math.sqrt(area / shape)),
            columns / min(width, math.sqrt(area * shape)),
        )
        for shape in shapes
    )


def _size_text(size: Sequence[int]) -> str:
    return " × ".join(map(str, size[:2]))
