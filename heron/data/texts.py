"""Decodes UTF-8 texts into token ids, truncated to a fixed number."""

from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heron.config.data import ModelView
from heron.config.errors import ConfigError
from heron.shards.errors import short_repr
from heron.shards.texts import read_text

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
            raise ValueError(f"is {short_repr(text)}, which makes no token; expected some text")
        out[: len(ids)] = ids
        out[len(ids) :] = NONE


def text_decoder(view: ModelView, field: str | None) -> TextDecoder:
    """Returns the decoder of a view's texts; ConfigError if its tokenizer cannot be read."""
    try:
        decoder = TextDecoder(view.tokens, _tokenizer_text(view.tokenizer), field)
        decoder.vocabulary  # noqa: B018 - loads the tokenizer
    except Exception as error:  # tokenizers raises plain Exception
        raise ConfigError(
            f"data.views: tokenizer {view.tokenizer} of '{view.stored}' cannot be read ({error}); "
            f"expected a tokenizer.json, or {BYTES}"
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
