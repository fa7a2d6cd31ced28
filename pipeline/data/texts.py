"""Texts as token ids: read as UTF-8, cut to so many tokens."""

from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heron.pipeline.config.data import ModelView
from heron.pipeline.config.errors import ConfigError
from heron.shards.errors import shown
from heron.shards.texts import read_text

BYTES = "bytes"  # the tokenizer that needs no file: a start token, then each byte of the text
START, FIRST = 0, 1  # its ids: of the start, and of byte 0
NONE = -1  # where there is no token
LARGEST = 2**25  # bytes of a tokenizer's file


@dataclass(frozen=True)
class TextDecoder:
    """Makes token ids of the bytes of a text.

    Attributes:
        tokens: of a row; longer texts are cut, shorter ones end in -1.
        tokenizer: `bytes`, or the content of a tokenizer.json.
        field: of the JSON object that holds the text, if one does.
    """

    tokens: int
    tokenizer: str = BYTES
    field: str | None = None
    varying = False  # as of pictures, which have several sizes
    dtype = "int32"

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a reading process is given."""
        return {"tokens": self.tokens, "tokenizer": self.tokenizer, "field": self.field}

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a row."""
        return (self.tokens,)

    @cached_property
    def _library(self) -> Any:
        from tokenizers import Tokenizer

        made = Tokenizer.from_str(self.tokenizer)
        made.no_padding()
        made.enable_truncation(self.tokens)
        return made

    @cached_property
    def vocabulary(self) -> int:
        """How many ids there are: up to the last one, where some between are of no token."""
        if self.tokenizer == BYTES:
            return FIRST + 256
        return 1 + max(self._library.get_vocab().values(), default=-1)

    def decode(self, data: bytes, out: NDArray[np.int32]) -> None:
        """Writes the token ids of a text to `out`, [tokens].

        Raises:
            ValueError: it is no text (see `read_text`), or makes no token.
        """
        text = read_text(data, self.field)
        if self.tokenizer == BYTES:
            ids = [START, *(FIRST + byte for byte in text.encode())][: self.tokens]
        else:
            ids = self._library.encode(text).ids
        if not ids:
            raise ValueError(f"is {shown(text)}, which makes no token; expected some text")
        out[: len(ids)] = ids
        out[len(ids) :] = NONE


def text_decoder(view: ModelView, field: str | None) -> TextDecoder:
    """Returns what reads the texts of a view.

    Raises:
        ConfigError: its tokenizer cannot be read.
    """
    try:
        decoder = TextDecoder(view.tokens, _content(view.tokenizer), field)
        decoder.vocabulary  # noqa: B018 - it reads the tokenizer
    except Exception as error:  # tokenizers raises that class itself
        raise ConfigError(
            f"data.views: tokenizer {view.tokenizer} of '{view.stored}' cannot be read ({error}); "
            f"expected a tokenizer.json, or {BYTES}"
        ) from None
    return decoder


@cache
def _content(tokenizer: str) -> str:
    if tokenizer == BYTES:
        return BYTES
    with Path(tokenizer).open("rb") as stream:
        text = stream.read(LARGEST + 1)
    if len(text) > LARGEST:
        raise ValueError(f"it has more than {LARGEST:,} bytes")
    return text.decode()
