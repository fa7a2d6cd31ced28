"""Small tars without an index, and the batches of a stream of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from heron.data.batches import Batch, batches, worker_count
from heron.data.endless import EndlessStreams
from heron.experiment.config import Config, parse_config
from heron.experiment.open_data import open_data, open_process_batches
from tests.experiments import merge
from tests.shards import others

WIDTH, ROWS, TARS = 6, 10, 4  # of a vector, of a tar


def vectors(first: int, count: int, label: bool = True) -> list[dict[str, Any]]:
    """Samples whose vector begins with their number."""
    return [
        {"__key__": f"{n:06d}", "npy": np.full(WIDTH, n, np.float32)}
        | ({"cls": n % 3} if label else {})
        for n in range(first, first + count)
    ]


def config(folder: Path, **data: Any) -> Config:
    tree = {
        "run": {"dir": str(folder.parent / "run")},
        "data": {
            "webdataset": {
                "labelled": f"{folder}/a-{{00..03}}.tar",
                "samples_per_epoch": 40,
                "shuffle": 8,
                "vector": {"npy": WIDTH},
                "label": "cls",
                "classes": 3,
            },
            "batch": {"labelled": 8},
            "views": [{"stored": "vector", "augment": ["noise"]}, {"stored": "vector"}],
        },
        "model": {"encoder": {"kind": "mlp", "widths": [8]}, "projection_width": 4},
        "objective": {"cross_entropy": {}, "weighted_unsupervised": {}},
        "train": {"steps": 3, "cpu_threads": 1},
    }
    return parse_config(merge(tree, {"data": data}))


def both(folder: Path, **stream: Any) -> dict[str, Any]:
    """Two streams, one of them without labels."""
    more = {"unlabelled": [f"{folder}/b-{{00..01}}.tar", f"{folder}/b-{{02..03}}.tar"]}
    return {"webdataset": more | stream, "batch": {"labelled": 7, "unlabelled": 5}}


def opened(config: Config) -> EndlessStreams:
    streams = open_data(config)
    assert isinstance(streams, EndlessStreams)
    return streams


def steps(config: Config, count: int, rank: int = 0, world: int = 1, start: int = 0) -> list[Batch]:
    """Copies of the first batches of a process: their memory is used again."""
    source = open_process_batches(open_data(config), config, rank, world, start)
    found = batches(source, start, start + count, worker_count(config.data))
    return [batch.to(torch.device("cpu"))._map_tensors(torch.clone) for batch in found]


def numbers(found: Sequence[Batch]) -> list[int]:
    return [int(x) for batch in found for x in batch.stored["vector"][:, 0]]


def payload(value: Any, number: int) -> bytes:
    """A text, or an array; None: a vector of a number."""
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, np.ndarray):
        return others.npy(value)
    return others.npy(value or [number] * WIDTH, "float32")
