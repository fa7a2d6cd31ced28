"""Decoders of stored views: the shape and dtype of a row, and how its bytes are decoded."""

from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heron.base.errors import ConfigError, short_repr
from heron.data.graphs import GraphDecoder
from heron.data.options import Data, ModelView
from heron.data.pictures import PictureDecoder, input_shape, picture_decoder
from heron.shards.index import array_at
from heron.shards.manifest import Manifest, View
from heron.shards.texts import read_text

TOKENS = 77  # of a text, by default
BYTES = "bytes"  # a tokenizer without a file: a start token, then a token for each byte of the text
START, FIRST = 0, 1  # its ids of the start token, and of byte 0
NONE = -1  # no token
MAX_BYTES = 2**25  # of a tokenizer's file


@dataclass(frozen=True)
class TextDecoder:
    """Decodes the bytes of a text into token ids.

    Attributes:
        tokens: tokens of a row; longer texts are truncated, shorter ones padded with -1.
        tokenizer: `bytes`, or the content of a tokenizer.json.
        field: field of the JSON object that holds the text, or None for plain texts.
    """

    tokens: int
    tokenizer: str = BYTES
    field: str | None = None
    varying = False  # only pictures may have several sizes
    dtype = "int32"

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state to pickle for a loader worker, without the loaded tokenizer."""
        return {"tokens": self.tokens, "tokenizer": self.tokenizer, "field": self.field}

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a row."""
        return (self.tokens,)

    @cached_property
    def _loaded_tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(self.tokenizer)
        tokenizer.no_padding()
        tokenizer.enable_truncation(self.tokens)
        return tokenizer

    @cached_property
    def vocabulary(self) -> int:
        """The number of ids up to the largest one, including unused ids."""
        if self.tokenizer == BYTES:
            return FIRST + 256
        return 1 + max(self._loaded_tokenizer.get_vocab().values(), default=-1)

    def decode(self, data: bytes, out: NDArray[np.int32]) -> None:
        """Writes a text's ids to `out`, [tokens]; ValueError if it has none or is no text."""
        text = read_text(data, self.field)
        if self.tokenizer == BYTES:
            ids = [START, *(FIRST + byte for byte in text.encode())][: self.tokens]
        else:
            ids = self._loaded_tokenizer.encode(text).ids
        if not ids:
            raise ValueError(f"is {short_repr(text)}, which has no tokens; some text is needed")
        out[: len(ids)] = ids
        out[len(ids) :] = NONE


def text_decoder(view: ModelView, field: str | None) -> TextDecoder:
    """Returns the decoder of a view's texts; ConfigError if its tokenizer cannot be read."""
    try:
        decoder = TextDecoder(view.tokens, _tokenizer_text(view.tokenizer), field)
        decoder.vocabulary  # noqa: B018 - loads the tokenizer
    except Exception as error:  # tokenizers raises plain Exception
        raise ConfigError(
            f"data.views: cannot read tokenizer {view.tokenizer} of '{view.stored}' ({error}); "
            f"use a tokenizer.json, or {BYTES}"
        ) from None
    return decoder


@cache
def _tokenizer_text(tokenizer: str) -> str:
    if tokenizer == BYTES:
        return BYTES
    with Path(tokenizer).open("rb") as stream:
        text = stream.read(MAX_BYTES + 1)
    if len(text) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES:,} bytes")
    return text.decode()


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
        array = array_at(np.frombuffer(data, np.uint8), 0, len(data), "is not a vector")
        if (array.shape, array.dtype) != (out.shape, out.dtype):
            raise ValueError(f"must be {out.dtype} {out.shape}, got {array.dtype} {array.shape}")
        if not np.isfinite(array).all():
            raise ValueError("has NaN or infinite values")
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
    """Returns a decoder to the size of the model's views; ConfigError if a view does not fit."""
    views = [view for view in data.views if view.stored == stored.name]
    for view in views:
        input_shape(stored, view)
    if stored.kind == "text":
        if len({(view.tokens, view.tokenizer) for view in views}) > 1:
            raise ConfigError(
                f"data.views: two views of the text '{stored.name}' must have the same tokens and "
                "tokenizer"
            )
        return text_decoder(views[0], stored.field)
    if stored.kind == "image":
        in_blocks = manifest.block_rows is not None  # of raw pixels: nothing is decoded
        return picture_decoder(stored, views, data.draft and not in_blocks, data.decode_size)
    return stored_decoder(stored)
