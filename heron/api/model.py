"""A trained model for use from Python: raw rows in, embeddings and predictions out."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from heron.base.errors import InputError
from heron.data.batches import Batch
from heron.data.input_rows import InputRows, InputView
from heron.data.views import Views
from heron.experiment.config import Config, load_saved
from heron.models.heterogeneous import Heterogeneous
from heron.retrieval.embedding_model import ExportLayer, LayerModel, no_layer
from heron.retrieval.embeddings import Layer
from heron.training import pretrained, saved
from heron.training.signature import Signature


class Model:
    """A pretrained network with the preprocessing of its inputs; see `from_pretrained`.

    Attributes:
        network: the `nn.Module` of encoders, projectors and classifier. It takes standardised
            tensors, and can be fine-tuned like any module.
        config: the experiment that trained it.
        signature: its inputs: views with shapes and statistics, and the names of the labels.
        labels: names of the classes or labels, one for each column of `predict`.
        views: names of the stored views that `encode` and `predict` take.
        layers: the layers that `encode` can return, with their widths.
    """

    def __init__(
        self,
        network: Heterogeneous,
        config: Config,
        signature: Signature,
        device: torch.device,
        origin: Path | None = None,
    ) -> None:
        """Combines a network with its signature; use `from_pretrained` instead."""
        self.network, self.config, self.signature = network.to(device), config, signature
        self._origin = origin
        self.labels: list[str] = signature.label_names
        self._model = LayerModel(self.network, Views(signature, config.data, device))
        self.views: list[str] = self._model.stored
        inputs = {entry.view.name: entry for entry in signature.inputs}
        self._inputs = {name: inputs[name] for name in self.views}
        self.layers: dict[Layer, int] = self._model.widths

    def __repr__(self) -> str:
        """Returns the views and layers with their widths, and the number of labels."""
        views = ", ".join(f"{name} [{self.signature.view(name).extent}]" for name in self.views)
        layers = ", ".join(f"{name} [{width}]" for name, width in self.layers.items())
        return f"Model(views: {views}; layers: {layers}; {len(self.labels)} labels)"

    def encode(
        self,
        views: Mapping[str, InputRows] | InputRows,
        layer: Layer = "hidden",
        batch_size: int | None = None,
    ) -> NDArray[np.float32]:
        """Embeds raw rows, as `heron embed` embeds the rows of a data set.

        Vectors are standardised with the mean and standard deviation of the training data if the
        run did so (`data.standardise`); pictures are resized to the model's size and scaled to
        [0, 1]. Nothing is augmented, and dropout is off.

        Args:
            views: raw rows by the name of the stored view, for some or all of `Model.views`; a
                model of one view also takes the rows alone. A view that is not given is treated as
                training treats a missing one: its features are zeros, and with P of V views given
                `hidden` is V / P of the others' features. A view of vectors takes numbers [rows,
                width]; a view of pictures takes uint8 [rows, height, width, channels], or a list of
                pictures, each an array or the bytes of a file; a view of texts takes a list of
                strings; a view of graphs takes a list of pairs: the labels of the nodes [nodes],
                and the edges [edges, 2] as node numbers from 0, in one direction or both.
            layer: `hidden`, the classifier's input; `projection`, z of each view; `weight`,
                HeroCon's H(z) of each view (Eq. 6). The last two are unit vectors of the views,
                concatenated.
            batch_size: number of rows computed at a time; None: that of the run's evaluation.

        Returns:
            The embeddings [rows, dim], in the order of the rows; dim is `Model.layers[layer]`.

        Raises:
            InputError: the model has no such layer or view, no view is given, the model does not
                take these shapes, types or values, or an embedding is not finite.
        """
        if layer not in self.layers:
            raise no_layer(layer, self.layers)

        def embed(batch: Batch) -> Tensor:
            return self._model.forward(batch, [layer])[layer]

        return self._map(views, embed, self.layers[layer], f"layer '{layer}'", batch_size)

    def predict(
        self, views: Mapping[str, InputRows] | InputRows, batch_size: int | None = None
    ) -> NDArray[np.float32]:
        """Returns the classifier's probabilities of raw rows, [rows, labels].

        In a multi-label problem each label has its own probability (sigmoid); the probabilities of
        exclusive classes sum to 1 (softmax). `Model.labels` names the columns.

        Args:
            views: raw rows, as for `encode`.
            batch_size: number of rows computed at a time; None: that of the run's evaluation.

        Raises:
            InputError: the model has no classifier, or for the reasons of `encode`.
        """
        exclusive = self.signature.label_kind != "multi_label"
        return self._classify(
            views, partial(torch.softmax, dim=1) if exclusive else torch.sigmoid, batch_size
        )

    def logits(
        self, views: Mapping[str, InputRows] | InputRows, batch_size: int | None = None
    ) -> NDArray[np.float32]:
        """Returns the classifier's logits of raw rows, [rows, labels]; see `predict`."""
        return self._classify(views, Tensor.float, batch_size)

    def _classify(
        self,
        views: Mapping[str, InputRows] | InputRows,
        activation: Callable[[Tensor], Tensor],
        batch_size: int | None,
    ) -> NDArray[np.float32]:
        if self.network.classifier is None:
            terms = ", ".join(self.config.objective.terms())
            raise InputError(
                f"the model has no classifier, because its objective is {terms}; add a term that "
                "trains one, such as bce or cross_entropy, or train your own on what `encode` "
                "returns"
            )

        def classify(batch: Batch) -> Tensor:
            return activation(self._model.layer(self._model.features(batch), "logits").float())

        return self._map(views, classify, len(self.labels), "the prediction", batch_size)

    def save_pretrained(self, folder: str | Path, overwrite: bool = False) -> None:
        """Writes a folder that `from_pretrained` opens anywhere, without the run and its data set.

        It holds `model.safetensors`; `config.yaml`, without paths and addresses of this machine;
        `model.json`, which describes the inputs, with mean and standard deviation; `README.md`, a
        model card that you may edit, with the run's scores if the weights are still the run's; and
        `manifest.json`, with size and sha256 of the files that `from_pretrained` reads. With
        `overwrite`, what the folder holds is moved aside, to `NAME-1`.

        Raises:
            CheckpointError: the folder is not empty, and `overwrite` is false.
            OSError: the folder cannot be written.
        """
        parts = self.network, self.config, self.signature, self._origin
        saved.save(Path(folder), *parts, overwrite=overwrite)

    def push_to_hub(self, repository: str, private: bool | None = None) -> None:
        """Publishes the model on the Hugging Face hub, as `save_pretrained` writes it.

        Args:
            repository: `org/name` or `org/name@branch`; it is created if it does not exist. An
                existing model card is kept.
            private: whether a new repository is private; None: the organisation's default.

        Raises:
            CheckpointError: the hub refuses the upload, for which it wants a token (`HF_TOKEN`, or
                `hf auth login`).
            MissingPackage: `huggingface_hub` is not installed.
        """
        saved.parse_address(repository)
        with TemporaryDirectory() as scratch:
            folder = Path(scratch) / "model"
            address = f"{saved.SCHEME}{repository.removeprefix(saved.SCHEME)}"
            saved.save(folder, self.network, self.config, self.signature, self._origin, address)
            saved.publish(folder, repository, private)

    def export(
        self,
        out: str | Path,
        format: Literal["torch", "onnx"] = "torch",
        layer: ExportLayer = "hidden",
        overwrite: bool = False,
    ) -> None:
        """Writes one file that computes a layer from raw rows without Heron: see `api.export`."""
        from heron.api.export import export  # the exporters take seconds to load

        export(self.network, self.config.data, self.signature, Path(out), format, layer, overwrite)

    @torch.inference_mode()
    def _map(
        self,
        rows: Mapping[str, InputRows] | InputRows,
        compute: Callable[[Batch], Tensor],
        width: int,
        name: str,
        batch_size: int | None,
    ) -> NDArray[np.float32]:
        """Applies `compute` to rows, batch by batch, in evaluation mode; `name` is for messages."""
        views = self._open_views(rows)
        size = self.config.evaluate.batch if batch_size is None else batch_size
        if size < 1:
            raise InputError(f"batch_size must be at least 1, or None, got {size}")
        count = len(next(iter(views.values())))
        missing = {name: x for name, x in self._inputs.items() if name not in views}
        out = np.empty((count, width), np.float32)
        training = [module for module in self.network.modules() if module.training]
        self.network.eval()
        try:
            for start in range(0, count, size):
                stop = min(start + size, count)
                stored = {
                    name: torch.from_numpy(entry.blank(stop - start))
                    for name, entry in missing.items()
                }
                stored |= {v: torch.from_numpy(x.read(start, stop)) for v, x in views.items()}
                keys = torch.zeros(stop - start, dtype=torch.int64)  # evaluation draws no numbers
                present = self._model.present(views, len(keys))
                batch = Batch(stored, torch.empty(0, 0), keys, keys, [len(keys)], present=present)
                computed = compute(batch.to(self._model.views.device))
                out[start:stop] = computed.float().cpu().numpy()
        finally:
            for module in training:  # not modules that the user has set to eval
                module.training = True
        if len(bad := np.flatnonzero(~np.isfinite(out).all(1))):
            raise InputError(
                f"{name} of {len(bad):,} rows has NaN or infinite values, first in row {bad[0]}; "
                "check the values of these rows"
            )
        return out

    def _open_views(self, rows: Mapping[str, InputRows] | InputRows) -> dict[str, InputView]:
        """Checks raw rows, and returns those of each view that the model sees."""
        if not isinstance(rows, Mapping):
            if len(self.views) > 1:
                raise InputError(
                    f"rows are of one view, but the model sees {', '.join(self.views)}; say which "
                    f"one it is: {{{self.views[0]!r}: ...}}, or pass more of them"
                )
            rows = {self.views[0]: rows}
        known = [entry.view.name for entry in self.signature.inputs]
        rows = {name: x for name, x in rows.items() if name in self.views or name not in known}
        self._model.present(rows, 0)  # refuses unknown names, and no names at all
        draft, views = self.config.data.draft, dict[str, InputView]()
        for name, x in rows.items():
            entry = self._inputs[name]
            views[name] = InputView(entry.view, entry.decoder(draft), x)
        counts = {name: len(view) for name, view in views.items()}
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"{count:,} of '{name}'" for name, count in counts.items())
            raise InputError(f"all views must have the same number of rows, got {listed}")
        return views


def from_pretrained(
    path: str | Path, device: str | torch.device = "cpu", trust_code: bool = False
) -> Model:
    """Loads a trained model, ready to encode raw rows; its data set is not needed.

    No code of the folder is run, no pickle read and no request sent, but that for `hf://`.

    Args:
        path: the folder of a run (its newest complete checkpoint is taken), of a checkpoint, or of
            a model that `save_pretrained` wrote; or `hf://org/name`, optionally with `@revision`,
            for such a model on the Hugging Face hub.
        device: the device to compute on, such as "cuda".
        trust_code: import the classes that its configuration names by dotted path, and hand all
            of its options to timm and transformers; they are refused otherwise. Files below the
            folder are never run. Classes that this process has imported need no trust: a run of
            your own encoder opens in the script that trained it.

    Raises:
        CheckpointError: there is no checkpoint, it was altered, it cannot be read, or it needs
            `trust_code`.
        MissingPackage: `hf://` needs `huggingface_hub`, which is not installed.
    """
    folder = pretrained.locate(
        saved.fetch(str(path)) if str(path).startswith(saved.SCHEME) else path
    )
    network = pretrained.from_pretrained(folder, trust_code)
    config, signature = load_saved(folder, (), trust_code), Signature.read(folder)
    return Model(network, config, signature, torch.device(device), folder)
