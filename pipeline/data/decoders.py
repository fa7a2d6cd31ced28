"""What a row of each stored view is in memory, and what decodes it."""

import hashlib
from collections.abc import Callable

from heron.pipeline.data.graphs import GraphDecoder
from heron.pipeline.data.pictures import PictureDecoder
from heron.pipeline.data.texts import TextDecoder
from heron.shards.manifest import View

TOKENS = 77  # of a text, where nobody says how many
Decoder = PictureDecoder | TextDecoder | GraphDecoder


class Decoders:
    """Decoders of views by name: those that are set, and for the others as they are stored."""

    def __init__(self, view: Callable[[str], View]) -> None:
        """Of the views that `view` finds by name."""
        self._view = view
        self._set: dict[str, Decoder] = {}

    def __setitem__(self, name: str, decoder: Decoder) -> None:
        """Sets the decoder of a view of texts, or of pictures that are not decoded as stored."""
        self._set[name] = decoder

    def __getitem__(self, name: str) -> Decoder:
        """Returns what decodes the pictures, texts or graphs of a view."""
        view = self._view(name)
        if view.kind == "graph":
            return GraphDecoder(view.shape)
        if view.kind == "text":
            return self._set.get(name) or TextDecoder(TOKENS)
        return self._set.get(name) or PictureDecoder(view.shape, view.shape)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of one row of a view, decoded."""
        return self[name].shape

    def dtype(self, name: str) -> str:
        """Returns the type of the numbers of a view, decoded."""
        view = self._view(name)
        return view.dtype if view.kind == "vector" else self[name].dtype

    def vocabulary(self, name: str) -> int:
        """Returns how many token ids the texts of a view have; 0 of other views."""
        decoder = self[name]
        return decoder.vocabulary if isinstance(decoder, TextDecoder) else 0

    @property
    def varying(self) -> bool:
        """Whether a view holds pictures of several sizes."""
        return any(decoder.varying for decoder in self._set.values())

    @property
    def tokenizers(self) -> dict[str, str]:
        """The sha256 of what makes tokens of each view of texts."""
        return {
            name: hashlib.sha256(decoder.tokenizer.encode()).hexdigest()
            for name, decoder in self._set.items()
            if isinstance(decoder, TextDecoder)
        }
