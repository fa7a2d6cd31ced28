"""A trained model over a data set: the layers that it computes, and its predictions."""

import hashlib
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from heron.base.errors import InputError, RetrievalError
from heron.data.batches import Batch
from heron.data.dataset import load_or_assign_roles, open_reader
from heron.data.options import Data
from heron.data.protocol import assign, drop_partial, hide_labels
from heron.data.reader import Reader
from heron.data.rows import Roles, Rows
from heron.data.views import Views
from heron.distributed.collectives import on_all
from heron.evaluation.evaluator import Evaluator, Predictions
from heron.experiment.config import Config, load_saved, parse_config
from heron.models.heterogeneous import Features, Heterogeneous
from heron.retrieval.embeddings import Layer, Role, ViewRecord, used
from heron.retrieval.samples import Samples
from heron.shards.manifest import load_manifest
from heron.shards.store import is_remote
from heron.training.backbone import published, read_backbone
from heron.training.launch import start_processes
from heron.training.pretrained import from_pretrained, locate
from heron.training.signature import Signature

ExportLayer = Literal["hidden", "projection", "logits"]  # that a file of an exported model computes


def refuse_options(data: Data, trusted: bool) -> None:
    """Refuses a run's storage options for remote data unless the user gave them or the run.

    An endpoint among `data.storage_options` would be sent the user's own credentials.
    """
    remote = [path for path in data.paths if is_remote(path)]
    if data.storage_options and remote and not trusted:
        raise RetrievalError(
            f"the run reads {remote[0]} with data.storage_options "
            f"{', '.join(data.storage_options)}, which could send your credentials elsewhere; add "
            "data.storage_options to the command line of `heron embed`, or pass your own --run, "
            "or a folder of the shards with --data"
        )


ROLES: tuple[Role, ...] = get_args(Role)

# With a `data.path` of the caller's, the manifest there says everything, not the run's settings.
DROP_RUN_DATA = {
    "data.webdataset": "null",
    "data.sources": "null",
    "data.protocol.hide_views": "{}",
    "data.protocol.hide_labels": "0",
}


def load_for_data(folder: Path, overrides: Sequence[str], trust_code: bool = False) -> Config:
    """Returns a checkpoint's experiment; a new `data.path` drops what binds it to its data set.

    `trust_code`: see `load_saved`. Raises a ConfigError if an override does not fit.
    """
    keys = {override.partition("=")[0] for override in overrides}
    if "data.path" not in keys:
        return load_saved(folder, overrides, trust_code)

    def load(dropped: Mapping[str, str]) -> Config:
        settings = [f"{key}={value}" for key, value in dropped.items() if key not in keys]
        return load_saved(folder, [*settings, *overrides], trust_code)

    config = load(DROP_RUN_DATA)
    if config.data.path == load_saved(folder, (), trust_code).data.path:
        return config
    return load(DROP_RUN_DATA | {"data.roles": "null", "data.fingerprint": "null"})


def check_data(data: Data, overrides: Sequence[str]) -> None:
    """Refuses a data set that is missing, or remote and named only by the run.

    A run's configuration need not be trusted: it starts no build and no download.
    """
    remote = [path for path in data.paths if is_remote(path)]
    if remote and not any(override.startswith("data.path=") for override in overrides):
        raise RetrievalError(
            f"the run uses the data set {remote[0]}, which is only fetched if you name it; add "
            f"data.path={remote[0]} to the command line"
        )
    own_options = any(override.startswith("data.storage_options") for override in overrides)
    refuse_options(data, own_options)
    if data.build is not None and "://" not in data.path and not Path(data.path).exists():
        options = [f"--{key}={value}" for key, value in data.build.items() if key != "source"]
        command = ["heron", "shards", "build", str(data.build.get("source")), "--out", data.path]
        raise RetrievalError(
            f"{data.path}, the data set of the run, does not exist; set data.path to another one, "
            f"or, if you trust the run, build it with: {shlex.join(command + options)}"
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

    def present(self, given: Collection[str], rows: int) -> Tensor | None:
        """Returns which views rows have that come with some stored views; None: all of them.

        The flags are [rows, views]. Raises an InputError, in one line, if `given` are none, or not
        among the stored views.
        """
        unknown = [name for name in given if name not in self.stored]
        if unknown or not given:
            fault = f"no view named '{unknown[0]}'" if unknown else "no view is given"
            raise InputError(f"{fault}; pass one or more of {', '.join(self.stored)}")
        flags = [name in given for name in self.stored_by_view]
        return None if all(flags) else torch.tensor(flags).expand(rows, -1)

    def columns(self, layer: Layer, present: Tensor) -> NDArray[np.bool_]:
        """Returns which numbers of a layer's vectors are of the views of a row, [dim]."""
        widths = self.model.widths[: self.model.classified]
        if layer != "hidden":
            widths = [self.model.projection_width] * self.model.classified
        return np.repeat(present.cpu().numpy(), widths)

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
        return {layer: self.layer(features, layer, batch.present) for layer in layers}

    @staticmethod
    def layer(
        features: Features, layer: Layer | Literal["logits"], present: Tensor | None = None
    ) -> Tensor:
        """Returns one layer of the features, [rows, dim]; zeros for views that are missing."""
        if layer in ("hidden", "logits"):
            return features[layer][0]
        heads = features["projections" if layer == "projection" else "weights"]
        if present is not None:  # H of a projection that is zeros is not
            heads = [head * present[:, [view]] for view, head in enumerate(heads)]
        return torch.cat([normalize(head, dim=1) for head in heads], 1)


@dataclass(frozen=True)
class EmbeddingModel(LayerModel):
    """A model in evaluation, with its data set."""

    reader: Reader

    @property
    def missing(self) -> list[str]:
        """The stored views that the model sees and the data set lacks."""
        return [name for name in self.stored if name in self.reader.absent]

    @property
    def view_records(self) -> list[ViewRecord]:
        """The views that the classifier sees, in order."""
        pairs = zip(self.stored_by_view, self.model.widths, strict=False)
        return [ViewRecord(stored=name, width=width) for name, width in pairs]

    @property
    def used(self) -> str:
        """What is used of the views, in a line, if the data set lacks some; else ""."""
        given = [name for name in self.stored if name not in self.missing]
        return used(given, self.missing, self.reader.store)

    @classmethod
    def open(
        cls, checkpoint: Path, config: Config, device: torch.device, trust_code: bool = False
    ) -> Self:
        """Opens the model of a checkpoint, and the data set of `config`.

        The data set may lack some of the views that the model was trained on. `trust_code`: see
        `pretrained.from_pretrained`. Raises a RetrievalError if the others have other shapes, or
        the classifier sees none of them, and the errors of opening model and data.
        """
        signature = Signature.read(checkpoint)
        reader = open_reader(config.data, [stored.view for stored in signature.inputs])
        views = Views(reader, config.data, device)
        expected, shapes = signature.shapes, [list(s) for s in views.shapes]
        if expected != shapes:
            raise RetrievalError(
                f"the views of {reader.store} have the shapes {shapes}, but the model of "
                f"{checkpoint} was trained on {expected}; use data of those shapes (data.path, or "
                "--data of a query), or set data.views"
            )
        model = from_pretrained(checkpoint, trust_code)
        model.precision = config.train.precision
        opened = cls(model.to(device), views, reader)
        if opened.missing == opened.stored:
            raise RetrievalError(
                f"{reader.store} has none of {', '.join(opened.stored)}, which are all that the "
                f"model of {checkpoint} sees; use data with at least one of them"
            )
        return opened


def open_run(
    run: str | Path, overrides: Sequence[str], trust_code: bool, threads: int | None = None
) -> tuple[EmbeddingModel, Config, Path]:
    """Opens the model of a run and its data set in every process of a launch: see `embed.embed`.

    Also returns the experiment and the folder of the checkpoint. `threads` is how many it has
    unless the experiment has its own number.
    """
    checkpoint = locate(run)
    config = load_for_data(checkpoint, overrides, trust_code)
    if threads is not None and not config.train.cpu_threads:
        train = config.train.model_copy(update={"cpu_threads": threads})
        config = config.model_copy(update={"train": train})
    device = start_processes(config).device
    on_all(lambda: check_data(config.data, overrides))
    model = on_all(lambda: EmbeddingModel.open(checkpoint, config, device, trust_code))
    return model, config, checkpoint


def open_encoder(words: str, data: str, view: str = "") -> tuple[EmbeddingModel, str, Config]:
    """Opens any encoder as a model of one view of a data set, without training.

    `words` name it: see `backbone.published`. `view` is needed where several are of its kind. Also
    returns the sha256 of its weights, and the experiment that stands for it. Raises a
    RetrievalError without such a view, and the errors of opening encoder and data.
    """
    encoder = read_backbone(published(words, "--encoder"), "frozen", "--encoder")
    kinds = {stored.name: stored.kind for stored in load_manifest(data).views}
    fitting = [name for name, kind in kinds.items() if kind == encoder.kind]
    if view not in fitting if view else len(fitting) != 1:
        listed = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
        found = f"view '{view}' is not one" if view else f"{len(fitting)} of them fit"
        remedy = " or ".join(f"--view {name}" for name in fitting) or "other data"
        raise RetrievalError(
            f"--encoder {words} needs a view of kind {encoder.kind}, and {data} has {listed}: "
            f"{found}; use {remedy}"
        )
    seen: dict[str, Any] = {"stored": view or fitting[0], "size": encoder.side}
    if encoder.tokenizer is not None:
        seen["tokenizer"] = encoder.tokenizer
    experiment = {
        "run": {"dir": "encoder"},
        "data": {"path": data, "views": [seen], "batch": {"labelled": 1, "unlabelled": 1}},
        "model": {"encoder": encoder.encoder},
        "objective": {"supcon": {"weight": 1}},  # no part of it is built
    }
    config = parse_config(experiment)
    device, reader = start_processes(config).device, open_reader(config.data)
    views = Views(reader, config.data, device)
    labels = len(reader.manifest.labels.names)
    with torch.random.fork_rng():  # heads that no feature needs may be missing, and are drawn
        torch.manual_seed(0)
        model = Heterogeneous(config.model, views.shapes, labels, {}, config.data.view_names)
    model.eval()
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        bits: torch.Tensor = value.contiguous().flatten().view(dtype=torch.uint8)  # bfloat16, too
        digest.update(name.encode() + bits.numpy().tobytes())
    return EmbeddingModel(model.to(device), views, reader), digest.hexdigest(), config


def no_layer(layer: str, layers: Iterable[str]) -> InputError:
    """Returns the error for a layer that is not among a model's layers."""
    return InputError(f"the model has no layer '{layer}', only {', '.join(layers)}")


def predict_rows(
    run: str | Path,  # folder of a run or a checkpoint; need not be trusted: see `embed.embed`
    overrides: Sequence[str] = (),  # of its configuration
    data: str | None = None,  # folder of shards, or a URL; None: the run's data set
    split: str | None = None,  # rows of one split; None: of all
    role: Role | None = None,  # rows of one role by the run's protocol, in its split; None: all
    trust_code: bool = False,  # see `embed.embed`
) -> tuple[list[str], Predictions, list[str], str]:
    """Predicts rows with a run's newest checkpoint, or with a checkpoint; see `heron predict`.

    Returns keys of the rows, their predictions, the names of the labels, and what views are used:
    see `EmbeddingModel.used`. Raises the errors of `embed.embed`, and an InputError if there is no
    classifier, and the data set is not the run's own, on which a probe could be trained.
    """
    overrides = [*overrides, *([] if data is None else [f"data.path={data}"])]
    other_data = any(override.startswith("data.path=") for override in overrides)
    opened, config, checkpoint = open_run(run, overrides, trust_code)
    reader, model = opened.reader, opened.model
    if model.classifier is None and other_data:
        raise InputError(
            f"the model of {checkpoint} has no classifier, and a probe can only be trained on the "
            "run's own data set; predict rows of that, or use a run with a term such as "
            "cross_entropy"
        )
    rows = chosen_rows(reader, config, split, role)
    labelled = np.empty(0, np.int64)
    if model.classifier is None:
        labelled = load_or_assign_roles(reader, config.data).labelled
    options = config.evaluate.model_copy(update={"knn": None, "cross_view": False, "probe": "auto"})
    predictions = Evaluator(reader, opened.views, options).predictors(model, labelled, rows)[0][""]
    keys, names = reader.sample_keys(predictions.rows), reader.manifest.labels.names
    return keys, predictions, names, opened.used


def read_samples(reader: Reader, rows: Rows) -> Samples:
    """Returns keys and labels of some rows of a data set."""
    labels = reader.manifest.labels
    known = reader.is_labelled(rows)
    if labels.kind == "complementary":  # the class is known if all others are ruled out
        known &= reader.targets(rows).sum(1) == len(labels.names) - 1
    if reader.may_lack_labels:  # a row counts as labelled only if all its labels are known
        known &= (reader.labels(rows) != labels.unlabelled_value).all(1)
    targets = np.zeros((len(rows), len(labels.names)), np.uint8)
    if known.any():
        targets[known] = reader.ground_truth(rows[known])
    keys = np.array([key.encode() for key in reader.sample_keys(rows)], np.bytes_)
    return Samples(keys, rows, targets, known, labels.names, labels.kind)


def chosen_rows(reader: Reader, config: Config, split: str | None, role: Role | None) -> Rows:
    """Returns the rows of a split or of a role in the run's protocol, in order; None: of all.

    Raises a RetrievalError if there is no such role, or no row.
    """
    if role is not None:
        if role not in ROLES:
            raise RetrievalError(f"role must be one of {', '.join(ROLES)}, got '{role}'")
        roles = _roles(reader, config.data, split or config.data.split)
        rows = roles.rows_of(role)
    elif split is not None:
        rows = reader.split_rows(split)
    else:
        rows = np.arange(reader.starts[-1])
    if not len(rows):
        chosen = {"role": role, "split": split}
        names = ", ".join(f"{name} {value}" for name, value in chosen.items() if value is not None)
        raise RetrievalError(
            f"{config.data.path} has no rows{f' with {names}' if names else ''}; use another "
            "--role or --split; `heron shards show` counts the rows of each split"
        )
    return np.sort(rows).astype(np.int64)


def _roles(reader: Reader, data: Data, split: str) -> Roles:
    """Returns the roles of a split's rows, without the partial rows that training drops."""
    roles = assign(reader, split, data.protocol)
    if data.protocol.partial_rows == "keep":
        return roles
    seen = list(dict.fromkeys(view.stored for view in data.views))
    if data.protocol.hide_labels:  # such rows count as partial; samples keep all of their labels
        reader = open_reader(data, [reader.view(name) for name in seen])
        hide_labels(reader, roles.labelled, data.protocol)
    return drop_partial(reader, roles, seen, data.protocol)
