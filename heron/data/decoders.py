"""Decoders of stored views: the shape and dtype of a row, and how its bytes are decoded."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from heron.config.data import Data
from heron.config.errors import ConfigError
from heron.data.graphs import GraphDecoder
from heron.data.pictures import PictureDecoder, input_shape, picture_decoder
from heron.data.texts import TextDecoder, text_decoder
from heron.shards.index import array_at
from heron.shards.manifest import Manifest, View

TOKENS = 77  # of a text, by default


@dataclass(frozen=True)
class VectorDecoder:
    """Decodes a vector stored as a member of its own; vectors in blocks are copied instead."""

    shape: tuple[int, ...]
    varying = False  # only pictures may have several sizes
    dtype = "float32"
    vocabulary = 0

    def decode(self, data: bytes, out: NDArray[np.float32]) -> None:
        """Writes the vector of an npy file to `out`, of `shape`.

        Raises ValueError or ShardError if it has another format, shape or dtype, or is not finite.
        """
        array = array_at(np.frombuffer(data, np.uint8), 0, len(data), "is no vector")
        if (array.shape, array.dtype) != (out.shape, out.dtype):
            raise ValueError(f"is {array.dtype} {array.shape}; expected {out.dtype} {out.shape}")
        if not np.isfinite(array).all():
            raise ValueError("has a NaN or infinite value; expected finite ones")
        out[:] = array


Decoder = VectorDecoder | PictureDecoder | TextDecoder | GraphDecoder


def stored_decoder(view: View) -> Decoder:
    """Returns the decoder of a view as it is stored."""
    if view.kind == "vector":
        return VectorDecoder(view.shape)
    if view.kind == "graph":
        return GraphDecoder(view.shape)
    if view.kind == "text":
        return TextDecoder(TOKENS)
    return PictureDecoder(view.shape, view.shape)


def decoder_for_views(manifest: Manifest, stored: View, data: Data) -> Decoder:
    """Returns a decoder for the model's views, at their size; ConfigError where they do not fit."""
    views = [view for view in data.views if view.stored == stored.name]
    for view in views:
        input_shape(stored, view)
    if stored.kind == "text":
        if len({(view.tokens, view.tokenizer) for view in views}) > 1:
            raise ConfigError(
                f"data.views: two views of the text '{stored.name}' differ in tokens or "
                "tokenizer; expected the same in both"
            )
        return text_decoder(views[0], stored.field)
    if stored.kind == "image":
        in_blocks = manifest.block_rows is not None  # of raw pixels: nothing is decoded
        return picture_decoder(stored, views, data.draft and not in_blocks, data.decode_size)
    return stored_decoder(stored)
