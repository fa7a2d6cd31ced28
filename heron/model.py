"""A trained model for use from Python: raw rows in; embeddings and predictions out."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from heron.pipeline.config.errors import (
    CheckpointError,
    ConfigError,
    InputError,
    RetrievalError,
)
from heron.pipeline.config.experiment import Config, load_run_config
from heron.pipeline.data.batches import Batch
from heron.pipeline.data.dataset import open_reader
from heron.pipeline.data.given_rows import GivenRows, GivenView, refuse_names
from heron.pipeline.data.views import Views
from heron.pipeline.models.heterogeneous import Heterogeneous
from heron.pipeline.retrieval.embeddings import Layer
from heron.pipeline.retrieval.layers import LayerModel, refuse_options
from heron.pipeline.training import hub, pretrained, saved
from heron.pipeline.training.checkpoint import STATE, CheckpointManifest
from heron.pipeline.training.signature import Signature
from heron.shards.errors import ShardError
from heron.shards.store import is_remote

ExportLayer = Literal["hidden", "projection", "logits"]


class Model:
    """A pretrained network with what its inputs need; `from_pretrained` returns one.

    Attributes:
        network: the `nn.Module`: encoders, projectors, classifier. It takes standardised tensors;
            fine-tune it as any module.
        config: the experiment that it was trained by.
        labels: names of the classes or labels, one a column of `predict`.
        views: names of the stored views that `encode` and `predict` take.
        layers: the layers that `encode` returns, and their widths.
    """

    def __init__(
        self,
        network: Heterogeneous,
        config: Config,
        signature: Signature,
        device: torch.device,
        origin: Path | None = None,
    ) -> None:
        """Puts a network and its signature together; see `from_pretrained`."""
        self.network, self.config, self.signature = network.to(device), config, signature
        self._origin = origin
        self.labels: list[str] = signature.label_names
        self._model = LayerModel(self.network, Views(signature, config.data, device))
        self.views: list[str] = self._model.stored
        self.layers: dict[Layer, int] = self._model.widths

    def __repr__(self) -> str:
        """Returns what goes in and what comes out."""
        views = ", ".join(f"{name} [{self.signature.view(name).extent}]" for name in self.views)
        layers = ", ".join(f"{name} [{width}]" for name, width in self.layers.items())
        return f"Model(views: {views}; layers: {layers}; {len(self.labels)} labels)"

    def encode(
        self,
        views: Mapping[str, GivenRows] | GivenRows,
        layer: Layer = "hidden",
        batch_size: int | None = None,
    ) -> NDArray[np.float32]:
        """Embeds raw rows, as `heron embed` embeds the rows of a data set.

        Vectors are standardised with mean and standard deviation of the training data where the
        run did so (`data.standardise`), pictures brought to the model's size and scaled to [0, 1].
        Nothing is augmented, and dropout is off.

        Args:
            views: rows by the name of the stored view, for each of `Model.views`; of a model of
                one view the rows alone will do. They are raw, as the shards hold them: numbers
                [rows, width] for vectors; uint8 [rows, height, width, channels] for pictures, or a
                list with a picture each, as an array or as the bytes of a JPEG or PNG; a list of
                texts; a list of graphs, each the labels of its nodes [nodes] and its edges
                [edges, 2], pairs of nodes from 0, in one direction or both.
            layer: `hidden`, the features that the classifier sees; `projection`, z of each view;
                `weight`, HeroCon's H(z) of each view (Eq. 6). The last two are unit vectors of
                the views, side by side.
            batch_size: rows at a time; None: as many as the run's evaluation.

        Returns:
            [rows, dim], in the order of the rows; dim is `Model.layers[layer]`.

        Raises:
            InputError: views, shapes, types or values are not what the model takes, or an
                embedding is not finite.
        """
        if layer not in self.layers:
            raise no_layer(layer, self.layers)

        def embed(batch: Batch) -> Tensor:
            return self._model.forward(batch, [layer])[layer]

        return self._map(views, embed, self.layers[layer], f"layer '{layer}'", batch_size)

    def predict(
        self, views: Mapping[str, GivenRows] | GivenRows, batch_size: int | None = None
    ) -> NDArray[np.float32]:
        """Returns the classifier's probabilities of raw rows, [rows, labels].

        Several labels have a probability each (sigmoid); the probabilities of exclusive classes
        sum to 1 (softmax). Columns are named by `Model.labels`.

        Args:
            views: as `encode` takes them.
            batch_size: rows at a time; None: as many as the run's evaluation.

        Raises:
            InputError: the model has no classifier, or as `encode`.
        """
        exclusive = self.signature.label_kind != "multi_label"
        return self._classified(
            views, partial(torch.softmax, dim=1) if exclusive else torch.sigmoid, batch_size
        )

    def logits(
        self, views: Mapping[str, GivenRows] | GivenRows, batch_size: int | None = None
    ) -> NDArray[np.float32]:
        """Returns the classifier's outputs of raw rows before `predict`'s sigmoid or softmax."""
        return self._classified(views, Tensor.float, batch_size)

    def _classified(
        self,
        views: Mapping[str, GivenRows] | GivenRows,
        change: Callable[[Tensor], Tensor],
        batch_size: int | None,
    ) -> NDArray[np.float32]:
        """Returns what a function makes of the classifier's outputs in float32."""
        if self.network.classifier is None:
            terms = ", ".join(self.config.objective.terms())
            raise InputError(
                f"the model has no classifier: its objective is {terms}; expected a term that "
                "trains one, such as bce or cross_entropy; train your own on what `encode` returns"
            )

        def classify(batch: Batch) -> Tensor:
            return change(self._model.layer(self._model.features(batch), "logits").float())

        return self._map(views, classify, len(self.labels), "the prediction", batch_size)

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes a folder that `from_pretrained` opens anywhere, without the run and its data set.

        It holds `model.safetensors`, `config.yaml` (without paths and addresses of this machine),
        `model.json` (what the inputs are, with mean and standard deviation), `README.md` (a model
        card, which you may edit) and `manifest.json` with size and sha256 of the files that are
        read. The run's scores are told where the weights are still those of the run.

        Raises:
            CheckpointError: something lies in the folder.
            OSError: it cannot be written.
        """
        saved.save(Path(folder), self.network, self.config, self.signature, self._origin)

    def push_to_hub(self, repository: str, private: bool | None = None) -> None:
        """Publishes the model on Hugging Face's hub, as `save_pretrained` writes it.

        Args:
            repository: `org/name`, which is made where it is not there, or `org/name@branch`. A
                model card that is there already stays as it is.
            private: whether a new repository is private; None: as the organisation has it.

        Raises:
            CheckpointError: the hub refuses it: it needs a token (`HF_TOKEN`, or `hf auth login`).
            MissingPackage: `huggingface_hub` is not installed.
        """
        hub.parse(repository)
        with TemporaryDirectory() as scratch:
            folder = Path(scratch) / "model"
            where = f"{hub.SCHEME}{repository.removeprefix(hub.SCHEME)}"
            known = self.config, self.signature, self._origin
            saved.save(folder, self.network, *known, where)
            hub.publish(folder, repository, private)

    def export(
        self,
        out: str | Path,
        format: Literal["torch", "onnx"] = "torch",
        layer: ExportLayer = "hidden",
    ) -> None:
        """Writes one file that computes a layer of raw rows without Heron: see `heron.export`."""
        from heron.export import export  # the exporters take seconds to load

        export(self, Path(out), format, layer)

    @torch.inference_mode()
    def _map(
        self,
        given: Mapping[str, GivenRows] | GivenRows,
        compute: Callable[[Batch], Tensor],
        width: int,
        what: str,
        batch_size: int | None,
    ) -> NDArray[np.float32]:
        """Computes something of rows, some at a time, in evaluation mode."""
        views = self._given(given)
        size = self.config.evaluate.batch if batch_size is None else batch_size
        if size < 1:
            raise InputError(f"batch_size is {size}; expected 1 or more rows, or None")
        count = len(next(iter(views.values())))
        out = np.empty((count, width), np.float32)
        training = [module for module in self.network.modules() if module.training]
        self.network.eval()
        try:
            for start in range(0, count, size):
                stop = min(start + size, count)
                stored = {n: torch.from_numpy(rows.read(start, stop)) for n, rows in views.items()}
                keys = torch.zeros(stop - start, dtype=torch.int64)  # evaluation draws no numbers
                batch = Batch(stored, torch.empty(0, 0), keys, keys, [len(keys)])
                found = compute(batch.to(self._model.views.device))
                out[start:stop] = found.float().cpu().numpy()
        finally:
            for module in training:  # and not those that the user has frozen
                module.training = True
        if len(bad := np.flatnonzero(~np.isfinite(out).all(1))):
            raise InputError(
                f"{what} of {len(bad):,} rows is not finite, the first row {bad[0]}; expected "
                "finite numbers; look at the values of these rows"
            )
        return out

    def _given(self, given: Mapping[str, GivenRows] | GivenRows) -> dict[str, GivenView]:
        """Returns the rows of each view that is seen."""
        if not isinstance(given, Mapping):
            if len(self.views) > 1:
                raise InputError(
                    f"rows of one view, but the model sees {', '.join(self.views)}; expected a "
                    f"mapping with rows of each: {{{', '.join(f'{v!r}: ...' for v in self.views)}}}"
                )
            given = {self.views[0]: given}
        refuse_names(given, self.views, [one.view.name for one in self.signature.inputs])
        inputs = {one.view.name: one for one in self.signature.inputs}
        draft, found = self.config.data.draft, dict[str, GivenView]()
        for name in self.views:
            found[name] = GivenView(inputs[name].view, inputs[name].decoder(draft), given[name])
        counts = {name: len(rows) for name, rows in found.items()}
        if len(set(counts.values())) > 1:
            told = ", ".join(f"{count:,} of '{name}'" for name, count in counts.items())
            raise InputError(f"rows: {told}; expected as many of each view: a row is one sample")
        return found


def from_pretrained(
    path: str | Path, data: str | Path | None = None, device: str | torch.device = "cpu"
) -> Model:
    """Returns a trained model, ready to encode raw rows; its data set need not be there.

    Args:
        path: the folder of a run, whose newest complete checkpoint is taken, of a checkpoint, or
            of a model that `save_pretrained` wrote; or `hf://org/name`, with `@revision` or not, of
            such a model on Hugging Face's hub. Its configuration may name classes by dotted path:
            they come from your own Python path, never from the folder.
        data: shards that the model was trained on. Only checkpoints that were written before
            Heron kept the inputs' statistics beside the weights need them; by default those that
            the run names.
        device: where the model computes, such as "cuda".

    Raises:
        CheckpointError: there is no checkpoint, it was altered or cannot be read, or neither it nor
            a data set says what its inputs are.
        MissingPackage: `hf://` needs `huggingface_hub`, which is not installed.
    """
    folder = pretrained.locate(hub.fetch(str(path)) if str(path).startswith(hub.SCHEME) else path)
    network = pretrained.from_pretrained(folder)
    config, signature = load_run_config(folder / "config.yaml"), Signature.read(folder)
    if not signature.inputs:
        signature = _of_data(folder, config, None if data is None else str(data))
    return Model(network, config, signature, torch.device(device), folder)


def no_layer(layer: str, found: Iterable[str]) -> InputError:
    """Returns the error of a layer that a model does not have."""
    return InputError(
        f"the model has no layer '{layer}'; found {', '.join(found)}; expected one of them"
    )


def _of_data(folder: Path, config: Config, data: str | None) -> Signature:
    """Returns the signature that a checkpoint of an earlier version lacks, out of its data set."""
    where, wanted = data or config.data.path, ""
    if (folder / STATE).exists():
        wanted = CheckpointManifest.read(folder / STATE).data
    fault = "it is fetched only when you give it"
    if data is not None or not is_remote(where):
        try:
            known = config.data.at(where)
            refuse_options(known, own=False)
            reader = open_reader(known)
            if wanted in ("", found := reader.manifest.fingerprint):
                return Signature.of(reader, config.data.views)
            fault = f"its fingerprint is {found[:19]}, not {wanted[:19]}"
        except (ShardError, ConfigError, RetrievalError) as error:
            fault = str(error)
    raise CheckpointError(
        f"{folder} is of an earlier version, which left shapes and statistics of its inputs with "
        f"the data set, and {where} cannot be taken for it: {fault}; expected the shards that it "
        "was trained on; give them: from_pretrained(path, data=...)"
    )
