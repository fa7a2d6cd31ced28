"""A trained model for use from Python: raw rows in; embeddings and predictions out."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

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
from heron.pipeline.data.given_rows import GivenRows, GivenView, refuse_names
from heron.pipeline.data.pictures import PictureDecoder
from heron.pipeline.data.streams import open_reader
from heron.pipeline.data.views import Views
from heron.pipeline.models.heterogeneous import Heterogeneous
from heron.pipeline.retrieval.embeddings import Layer
from heron.pipeline.retrieval.layers import LayerModel, refuse_options
from heron.pipeline.training import pretrained
from heron.pipeline.training.checkpoint import STATE, CheckpointManifest
from heron.pipeline.training.signature import Signature
from heron.shards.errors import ShardError
from heron.shards.store import is_remote


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
        self, network: Heterogeneous, config: Config, signature: Signature, device: torch.device
    ) -> None:
        """Puts a network and its signature together; see `from_pretrained`."""
        self.network, self.config, self.signature = network.to(device), config, signature
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
                list with a picture each, as an array or as the bytes of a JPEG or PNG.
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
            raise InputError(
                f"the model has no layer '{layer}'; found {', '.join(self.layers)}; expected one "
                "of them"
            )

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
        if self.network.classifier is None:
            terms = ", ".join(self.config.objective.terms())
            raise InputError(
                f"the model has no classifier: its objective is {terms}; expected a term that "
                "trains one, such as bce or cross_entropy; train your own on what `encode` returns"
            )
        exclusive = self.signature.label_kind != "multi_label"

        def classify(batch: Batch) -> Tensor:
            logits = self._model.features(batch)["logits"][0].float()
            return logits.softmax(1) if exclusive else logits.sigmoid()

        return self._map(views, classify, len(self.labels), "the prediction", batch_size)

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
        count, size = len(next(iter(views.values()))), batch_size or self.config.evaluate.batch
        out = np.empty((count, width), np.float32)
        training = self.network.training
        self.network.eval()
        try:
            for start, batch in self._batches(views, count, size):
                out[start : start + size] = compute(batch).float().cpu().numpy()
        finally:
            self.network.train(training)
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
            view, shape = inputs[name].view, inputs[name].decoded
            varying = -1 in view.shape
            decoder = None if shape is None else PictureDecoder(view.shape, shape, varying, draft)
            found[name] = GivenView(view, decoder, given[name])
        counts = {name: len(rows) for name, rows in found.items()}
        if len(set(counts.values())) > 1:
            told = ", ".join(f"{count:,} of '{name}'" for name, count in counts.items())
            raise InputError(f"rows: {told}; expected as many of each view: a row is one sample")
        return found

    def _batches(
        self, views: dict[str, GivenView], count: int, size: int
    ) -> Iterator[tuple[int, Batch]]:
        for start in range(0, count, size):
            stop = min(start + size, count)
            stored = {n: torch.from_numpy(rows.read(start, stop)) for n, rows in views.items()}
            keys = torch.zeros(stop - start, dtype=torch.int64)  # evaluation draws no numbers
            batch = Batch(stored, torch.empty(0, 0), keys, keys, [len(keys)])
            yield start, batch.to(self._model.views.device)


def from_pretrained(
    path: str | Path, data: str | Path | None = None, device: str | torch.device = "cpu"
) -> Model:
    """Returns a trained model, ready to encode raw rows; its data set need not be there.

    Args:
        path: the folder of a run, whose newest complete checkpoint is taken, or of a checkpoint.
        data: shards that the model was trained on. Only checkpoints that were written before
            Heron kept the inputs' statistics beside the weights need them; by default those that
            the run names.
        device: where the model computes, such as "cuda".

    Raises:
        CheckpointError: there is no checkpoint, it cannot be read, or neither it nor a data set
            says what its inputs are.
    """
    folder = pretrained.locate(path)
    network = pretrained.from_pretrained(folder)
    config, signature = load_run_config(folder / "config.yaml"), Signature.read(folder)
    if not signature.inputs:
        signature = _of_data(folder, config, None if data is None else str(data))
    return Model(network, config, signature, torch.device(device))


def _of_data(folder: Path, config: Config, data: str | None) -> Signature:
    """Returns the signature that a checkpoint of an earlier version lacks, out of its data set."""
    where, wanted = data or config.data.path, ""
    if (folder / STATE).exists():
        wanted = CheckpointManifest.read(folder / STATE).data
    fault = "it is fetched only when you give it"
    if data is not None or not is_remote(where):
        try:
            known = config.data.model_copy(update={"path": where})
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
