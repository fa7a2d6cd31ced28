"""The inputs and outputs of a model: model.json, beside the weights."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from heron.base.artefact import MAX_MANIFEST_BYTES, Record, describe_errors, parse_json
from heron.base.errors import CheckpointError
from heron.data.decoders import Decoder, TextDecoder, VectorDecoder
from heron.data.graphs import GraphDecoder
from heron.data.options import ModelView
from heron.data.pictures import PictureDecoder, input_shape
from heron.data.reader import Reader
from heron.shards.manifest import View

SIGNATURE = "model.json"
LabelKind = Literal["multi_label", "multi_class", "hierarchical", "complementary", "none"]


class Text(Record):
    """How texts are read: see `data.decoders.TextDecoder`."""

    tokens: int = Field(ge=1, le=2**14)
    tokenizer: str


class StoredInput(Record):
    """A stored view that the model sees.

    `view` is its entry in the manifest of the training data, with mean and std; `decoded` is the
    height, width and channels of decoded pictures, None of other views; `text` reads texts.
    """

    view: View
    decoded: tuple[int, int, int] | None
    text: Text | None = None

    def decoder(self, draft: bool = False) -> Decoder | None:
        """Returns the decoder, None for vectors; `draft`: see `data.draft`."""
        if self.view.kind == "graph":
            return GraphDecoder(self.view.shape)
        if self.text is not None:
            return TextDecoder(self.text.tokens, self.text.tokenizer)
        if self.decoded is None:
            return None
        return PictureDecoder(self.view.shape, self.decoded, -1 in self.view.shape, draft)

    def blank(self, rows: int) -> NDArray[Any]:
        """Returns zeros in the place of rows that lack the view."""
        decoder = self.decoder() or VectorDecoder(self.view.shape)
        return np.zeros((rows, *decoder.shape), decoder.dtype)


class Signature(BaseModel):
    """Inputs and outputs of a model, so that it can be used without its data set.

    `shapes` are of a sample of each view as the model sees it, `labels` is the width of the
    classifier.
    """

    model_config = ConfigDict(frozen=True)

    shapes: list[list[int]]
    labels: int
    inputs: list[StoredInput]
    label_kind: LabelKind
    label_names: list[str]

    @classmethod
    def of(cls, reader: Reader, views: Sequence[ModelView]) -> Self:
        """Returns the signature of a model that sees these views of an open data set."""
        names = dict.fromkeys(view.stored for view in views)
        stored = {name: reader.view(name) for name in names}
        labels = reader.manifest.labels
        tree = {
            "shapes": [
                list(input_shape(stored[view.stored], view, reader.vocabulary(view.stored)))
                for view in views
            ],
            "labels": len(labels.names),
            "inputs": [
                {
                    "view": view,
                    "decoded": reader.decoders[name].shape if view.kind == "image" else None,
                    # How to read texts, wherever the tokenizer of the data set is.
                    "text": {"tokens": decoder.tokens, "tokenizer": decoder.tokenizer}
                    if isinstance(decoder := reader.decoders[name], TextDecoder)
                    else None,
                }
                for name, view in stored.items()
            ],
            "label_kind": labels.kind,
            "label_names": labels.names,
        }
        return cls.model_validate(tree)

    @classmethod
    def read(cls, checkpoint: Path) -> Self:
        """Reads the signature of a checkpoint; CheckpointError where it cannot be read."""
        path = checkpoint / SIGNATURE
        try:
            with path.open("rb") as stream:
                return cls.model_validate(parse_json(stream.read(MAX_MANIFEST_BYTES + 1)))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"cannot read {path}: {describe_errors(error)}; restore it, or pass another "
                "checkpoint"
            ) from None

    def refuse_other_tokenizers(self, checkpoint: Path) -> None:
        """Raises a CheckpointError where a checkpoint was trained with another tokenizer."""
        texts = {stored.view.name: stored.text for stored in Signature.read(checkpoint).inputs}
        for stored in self.inputs:
            if texts.get(stored.view.name, stored.text) != stored.text:
                raise CheckpointError(
                    f"{checkpoint} was trained with another tokenizer of the texts of "
                    f"'{stored.view.name}'; restore that one, or run with run.resume=never"
                )

    def text(self) -> str:
        """Returns the content of model.json."""
        return json.dumps(self.model_dump(mode="json"))

    def vocabulary(self, name: str) -> int:
        """Returns the number of token ids of a stored view of texts; 0 of other views."""
        decoders = [stored.decoder() for stored in self.inputs if stored.view.name == name]
        (decoder,) = decoders or [None]
        return decoder.vocabulary if isinstance(decoder, TextDecoder) else 0

    def view(self, name: str) -> View:
        """Returns the entry of a stored view; CheckpointError where the model does not see it.

        A configuration that was edited beside its weights may name another view.
        """
        views = {stored.view.name: stored.view for stored in self.inputs}
        if name not in views:
            raise CheckpointError(
                f"config.yaml has the stored view '{name}', but {SIGNATURE} has only "
                f"{', '.join(views)}; restore the checkpoint as it was written"
            )
        return views[name]
