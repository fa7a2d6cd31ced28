"""Ways to train on the same batches: the real job, a bare loop, and the input alone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.loaders import FOREVER
from benchmarks.scaling_turns import Gate
from heron.api.job import pretrain
from heron.data.batches import Batch, batches
from heron.data.streams import ShardBatches, Streams
from heron.data.views import Views
from heron.experiment.config import Config, parse_config
from heron.experiment.open_data import open_data
from heron.losses import classification
from heron.losses.objective import build_losses
from heron.losses.supervised import WeightedSupervised, weighted_supervised
from heron.losses.unsupervised import (
    NtXent,
    WeightedUnsupervised,
    nt_xent,
    weighted_unsupervised,
)
from heron.models.heterogeneous import Features, Heterogeneous
from heron.training.optim import build_optimizer
from heron.training.run_log import RunLog

CPU = torch.device("cpu")
LABELLED = 4  # HeroCon: one row in so many of a batch has labels
HEROCON = {
    "bce": {"weight": 1.0},
    "weighted_unsupervised": {"weight": 0.05, "tau": 1.0},
    "weighted_supervised": {"weight": 0.1, "tau": 1.0},
}
SIMCLR = {"nt_xent": {"weight": 1.0, "tau": 0.5}}
FACES = ["crop", "color"]  # what is done to the first view, and to the second


def experiment(
    folder: Path, name: str, method: str, rows: int, batch: int, size: int, model: dict[str, Any]
) -> Config:
    """A run on drawn faces that does not end by itself.

    Args:
        folder: of everything.
        name: of the run.
        method: "herocon" or "simclr".
        rows: faces to train on.
        batch: rows of the global batch.
        size: of a view, in pixels a side.
        model: its section of the configuration.
    """
    herocon = method == "herocon"
    labelled = batch // LABELLED if herocon else 0
    return parse_config(
        {
            "run": {"dir": str(folder / "runs" / name)},
            "data": {
                "path": str(folder / "faces"),
                "build": {"source": "faces", "train": rows, "test": 8, "seed": 0},
                "protocol": {"labelled": max(2, rows // LABELLED), "test": "test"},
                "batch": {"labelled": labelled, "unlabelled": batch - labelled},
                "views": [{"stored": "image", "size": size, "augment": [a]} for a in FACES],
            },
            "model": model,
            "objective": HEROCON if herocon else SIMCLR,
            "optim": {"kind": "lars" if herocon else "sgd", "lr": 0.05, "momentum": 0.9},
            "train": {"epochs": 1_000_000, "cpu_threads": 1},
        }
    )


def pretrain_job(gate: Gate, config: Config) -> None:
    """Runs `pretrain`; the gate is called wherever it logs a step."""
    record = RunLog.step

    def recorded(log: RunLog, row: dict[str, Any]) -> None:
        record(log, row)
        gate(row["loss"])

    run = config.run.model_copy(update={"dir": config.run.dir + gate.suffix})
    with patch.object(RunLog, "step", recorded):
        pretrain(config.model_copy(update={"run": run}))


def build(config: Config, streams: Streams, views: Views) -> Heterogeneous:
    """The model with the initial weights that the main job draws."""
    torch.manual_seed(config.seed)
    labels = len(streams.reader.manifest.labels.names)
    return Heterogeneous(config.model, views.shapes, labels, build_losses(config.objective))


def fed_batches(
    config: Config, streams: Streams, views: Views
) -> Iterator[tuple[Batch, list[Tensor]]]:
    """Yields the batches of the main job, with the model's inputs."""
    source = ShardBatches(streams, config.seed, 0, 1)
    for batch in batches(source, 0, FOREVER, 0):
        yield batch, views(batch, train=True)


def open_run_data(config: Config) -> tuple[Streams, Views]:
    """The data of a run."""
    streams = open_data(config)
    return streams, Views(streams.reader, config.data, CPU)


def input_only(gate: Gate, config: Config) -> None:
    """Only reads the batches and makes the views."""
    for _ in fed_batches(config, *open_run_data(config)):
        gate(0.0)


def bare(gate: Gate, config: Config) -> None:
    """Forward, loss, backward, step; nothing is exchanged, checked, summarised or written."""
    streams, views = open_run_data(config)
    model = build(config, streams, views)
    optimizer = build_optimizer(config.optim, model.parameters())
    for batch, inputs in fed_batches(config, streams, views):
        loss = local_loss(config, model(inputs, batch.rng_keys, batch.sizes), batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        gate(loss)


def local_loss(config: Config, features: Features, batch: Batch) -> Tensor:
    """Returns the objective by the loss functions alone, on this process's rows."""
    terms, z = build_losses(config.objective), features["projections"]
    if isinstance(term := terms.get("nt_xent"), NtXent):
        return nt_xent(z, tau=term.tau)
    u, s = terms["weighted_unsupervised"], terms["weighted_supervised"]
    assert isinstance(u, WeightedUnsupervised) and isinstance(s, WeightedSupervised)
    unsupervised = weighted_unsupervised(z, features["weights"], tau=u.tau)
    targets, count = batch.targets, batch.labelled
    hidden = features["hidden"][0][:count]
    losses = {
        "bce": classification.bce(features["logits"][0][:count], targets, total=count),
        "weighted_unsupervised": unsupervised,
        "weighted_supervised": weighted_supervised(hidden, targets, tau=s.tau),
    }
    weighted = config.objective.terms()
    return torch.stack([weighted[name].weight * loss for name, loss in losses.items()]).sum()
