"""Embeddings made of arrays, with no model and no data set; and runs made without training."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from numpy.typing import NDArray
from safetensors.torch import save_file

from heron.base.artefact import MANIFEST, FileSum
from heron.data.dataset import open_reader
from heron.experiment.config import parse_config
from heron.losses.objective import build_losses
from heron.models.heterogeneous import Heterogeneous
from heron.retrieval.embeddings import (
    FORMAT,
    Embeddings,
    EmbeddingsManifest,
    Layer,
    LayerRecord,
    Part,
    part_name,
)
from heron.retrieval.samples import Samples
from heron.training.signature import Signature
from tests.experiments import FRAMES, merge

PARTS = 2  # files a layer, so that reading crosses from one to the next


def samples(
    targets: NDArray[Any],
    names: Sequence[str],
    kind: str = "multi_label",
    keys: Sequence[str] | None = None,
    known: NDArray[np.bool_] | None = None,
) -> Samples:
    """Samples `s000`, `s001`, ... with these labels, unless they are given keys."""
    count = len(targets)
    named = keys or [f"s{number:03d}" for number in range(count)]
    there = np.ones(count, bool) if known is None else known
    labels = np.where(there[:, None], targets, 0).astype(np.uint8)
    as_bytes = np.array([key.encode() for key in named], np.bytes_)
    return Samples(as_bytes, np.arange(count, dtype=np.int64), labels, there, list(names), kind)


def clustered(count: int, dim: int = 16, seed: int = 0) -> NDArray[np.float32]:
    """Vectors of many lengths about thirty centres."""
    draw = np.random.default_rng(seed)
    centres = draw.normal(size=(30, dim))
    found = centres[np.arange(count) % 30] + 0.4 * draw.normal(size=(count, dim))
    return (found * draw.uniform(0.5, 2, (count, 1))).astype(np.float32)


def unlabelled(folder: Path, vectors: NDArray[Any], **more: Any) -> Embeddings:
    """Embeddings of one layer, with one label that all have."""
    return embeddings(folder, {"hidden": vectors}, np.ones((len(vectors), 1)), ["a"], **more)


def embeddings(
    folder: Path,
    vectors: Mapping[Layer, NDArray[Any]],
    targets: NDArray[Any],
    names: Sequence[str],
    kind: str = "multi_label",
    keys: Sequence[str] | None = None,
    known: NDArray[np.bool_] | None = None,
    views: int = 1,
    **manifest: Any,
) -> Embeddings:
    """Write a folder of embeddings, in two parts, and open it.

    Args:
        folder: to write.
        vectors: of each layer, [N, dim].
        targets: 0/1, [N, names].
        names: of the labels.
        kind: of the labels.
        keys: of the samples; by default `s000`, `s001`, ...
        known: which samples have labels; by default all.
        views: of each layer, side by side in its vectors.
        manifest: other values of the manifest, such as `checkpoint`, `run`, `data`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made = samples(targets, names, kind, keys, known)
    starts = np.linspace(0, len(made), PARTS + 1).astype(int).tolist()
    parts, layers = [], {}
    for number, (first, last) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        files = dict[Layer, FileSum]()
        for layer, array in vectors.items():
            part = np.ascontiguousarray(array[first:last], np.float32)
            path = folder / part_name(layer, number)
            path.parent.mkdir(exist_ok=True)
            np.save(path, part, allow_pickle=False)
            files[layer] = FileSum.of(path)
            layers[layer] = LayerRecord(dim=array.shape[1], dtype="float32", views=views)
        parts.append(Part(count=last - first, files=files))
    known_values: dict[str, Any] = {
        "run": "runs/made",
        "checkpoint": "c" * 64,
        "data": "data/made",
        "data_fingerprint": f"sha256:{'d' * 64}",
        "precision": "fp32",
    }
    EmbeddingsManifest(
        format=FORMAT,
        rows=len(made),
        layers=layers,
        parts=parts,
        samples=made.save(folder),
        lost={},
        **(known_values | manifest),
    ).write(folder / MANIFEST)
    return Embeddings.open(folder)


def run(folder: Path, data: Path, changes: dict[str, Any], seed: int = 0) -> Path:
    """A checkpoint of a model as it is initialised, with statistics of batch norm of its own.

    Args:
        folder: to write.
        data: shards that there are.
        changes: of the configuration `tests.experiments.FRAMES`.
        seed: of the weights.
    """
    places = {"run": {"dir": str(folder)}, "data": {"path": str(data), "build": None}}
    tree = merge(merge(FRAMES, places), changes)
    config = parse_config(tree)
    signature = Signature.of(open_reader(config.data), config.data.views)
    shapes, labels = signature.shapes, signature.labels
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        terms, names = build_losses(config.objective), config.data.view_names
        model = Heterogeneous(config.model, shapes, labels, terms, names)
        for name, values in model.named_buffers():
            if name.endswith("running_mean"):
                values.uniform_(-0.1, 0.1)
            if name.endswith("running_var"):
                values.uniform_(0.01, 0.02)
    folder.mkdir(parents=True)
    weights = {name: values.contiguous() for name, values in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors")
    (folder / "model.json").write_text(signature.text())
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    return folder
