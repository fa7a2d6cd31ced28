"""Small experiments that the tests run whole."""

from pathlib import Path
from typing import Any

from heron.experiment.config import Config, parse_config

FRAMES: dict[str, Any] = {
    "seed": 3,
    "data": {
        "build": {"source": "frames", "train": 300, "test": 70, "classes": 4, "seed": 1},
        "protocol": {"labelled": 60, "test": "test"},
        "batch": {"labelled": 10, "unlabelled": 21},
        "views": [{"stored": "view1", "augment": ["noise"]}, {"stored": "view2"}],
        "standardise": True,
        "window_rows": 64,
    },
    "model": {
        "encoder": {"kind": "mlp", "widths": [16, 12], "dropout": 0.2},
        "projection_width": 8,
    },
    "objective": {
        "cross_entropy": {"weight": 1.0},
        "weighted_unsupervised": {"weight": 0.5, "tau": 0.5},
        "weighted_supervised": {"weight": 0.2, "tau": 0.5, "ramp_epochs": 1},
    },
    "optim": {"kind": "lars", "lr": 0.05, "momentum": 0.9, "warmup_epochs": 1},
    "train": {"epochs": 2, "steps": 5, "cpu_threads": 1, "precision": "fp32"},
    "evaluate": {"batch": 32, "map_rows": 20},
}


def merge(tree: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The tree with some leaves replaced; a change to None takes a key out."""
    merged = {key: value for key, value in tree.items() if key not in changes}
    for key, value in changes.items():
        nested = isinstance(value, dict) and isinstance(tree.get(key), dict)
        if value is not None:
            merged[key] = merge(tree[key], value) if nested else value
    return merged


def frames(folder: Path, name: str = "run", **changes: Any) -> Config:
    """A run on a few hundred frames: two views, both streams, uneven batches."""
    places = {"run": {"dir": str(folder / name)}, "data": {"path": str(folder / "frames")}}
    return parse_config(merge(merge(FRAMES, places), changes))
