"""A trained model and the layers that it computes from stored views."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import torch
from torch import Tensor
from torch.nn.functional import normalize

from heron.config.data import Data
from heron.config.errors import InputError, RetrievalError
from heron.config.experiment import Config
from heron.data.batches import Batch
from heron.data.dataset import open_reader
from heron.data.reader import Reader
from heron.data.views import Views
from heron.models.heterogeneous import Features, Heterogeneous
from heron.retrieval.embeddings import Layer
from heron.shards.store import is_remote
from heron.training.pretrained import from_pretrained
from heron.training.signature import Signature

ExportLayer = Literal["hidden", "projection", "logits"]  # that a file of an exported model computes


def refuse_options(data: Data, trusted: bool) -> None:
    """Refuses a run's storage options for remote data unless the user gave them or the run.

    An endpoint among `data.storage_options` would be sent the user's own credentials.
    """
    remote = [path for path in data.paths if is_remote(path)]
    if data.storage_options and remote and not trusted:
        raise RetrievalError(
            f"the run reads {remote[0]} with data.storage_options {', '.join(data.storage_options)}"
            ", which may lead elsewhere; expected data.storage_options on the command line of "
            "`heron embed`, your own --run, or --data with a folder of the shards"
        )


@dataclass(frozen=True)
class LayerModel:
    """A model in evaluation, with the views that prepare its inputs."""

    model: Heterogeneous
    views: Views

    @property
    def stored(self) -> list[str]:
        """The stored views that the model sees, each once."""
        return list(dict.fromkeys(self.stored_by_view))

    @property
    def stored_by_view(self) -> list[str]:
        """The stored view of each view that the model sees."""
        return [view.stored for view in self.views.views[: self.model.classified]]

    @property
    def widths(self) -> dict[Layer, int]:
        """The layers that the model has, and the width of their vectors."""
        model = self.model
        widths: dict[Layer, int] = {"hidden": model.classified_width}
        if len(model.projectors):
            widths["projection"] = model.projection_width * model.classified
        if hasattr(model, "weight"):  # H, if a term has added it
            widths["weight"] = model.projection_width * model.classified
        return widths

    def features(self, batch: Batch) -> Features:
        """Returns all features that the model computes from stored views, by name."""
        inputs = self.views(batch, train=False, first=self.model.classified)
        features: Features = self.model(inputs, batch.rng_keys, batch.sizes, present=batch.present)
        return features

    @torch.inference_mode()
    def forward(self, batch: Batch, layers: Iterable[Layer]) -> dict[Layer, Tensor]:
        """Returns the layers as embeddings hold them, each [rows, dim].

        Projections and weights of each view are unit vectors, side by side.
        """
        features = self.features(batch)
        return {layer: self.layer(features, layer) for layer in layers}

    @staticmethod
    def layer(features: Features, layer: Layer | Literal["logits"]) -> Tensor:
        """Returns one layer of the features, [rows, dim]."""
        if layer in ("hidden", "logits"):
            return features[layer][0]
        heads = features["projections" if layer == "projection" else "weights"]
        return torch.cat([normalize(head, dim=1) for head in heads], 1)


@dataclass(frozen=True)
class EmbeddingModel(LayerModel):
    """A model in evaluation, with its data set."""

    reader: Reader

    @classmethod
    def open(cls, checkpoint: Path, config: Config, device: torch.device) -> Self:
        """Opens the model of a checkpoint, and the data set of `config`.

        Raises a RetrievalError if the data has other shapes than those that the model was trained
        on, and the errors of opening model and data.
        """
        reader = open_reader(config.data)
        views = Views(reader, config.data, device)
        expected, shapes = Signature.read(checkpoint).shapes, [list(s) for s in views.shapes]
        if expected != shapes:
            raise RetrievalError(
                f"the views of {reader.store} are {shapes}; expected {expected}, which the model "
                f"of {checkpoint} was trained on; give data of those shapes (data.path, or --data "
                "of a query), or set data.views"
            )
        model = from_pretrained(checkpoint)
        model.precision = config.train.precision
        return cls(model.to(device), views, reader)


def no_layer(layer: str, layers: Iterable[str]) -> InputError:
    """Returns the error for a layer that is not among a model's layers."""
    return InputError(
        f"the model has no layer '{layer}'; found {', '.join(layers)}; expected one of them"
    )
