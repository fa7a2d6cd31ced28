"""Loss files of every method and strategy: what a refactor must reproduce to the last digit.

    python -m tests.reference_runs OUT [NAME ...]

writes OUT/NAME.json for each named run, or for all. A file holds the values of every step: loss,
terms, gradient norm. `tests/references/` has those that are committed; `tests.compare_losses`
compares two folders.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from heron.api.job import pretrain
from heron.distributed import collectives
from heron.experiment.config import METHODS, Config, load_config
from heron.training.tracking import read_metrics
from tests import ranks
from tests.distributed.test_strategies import STRATEGIES, choose

ROWS, CLASSES = 120, 4
COMPLEMENTARY = "mulco", "ub-", "mse", "gce", "l-uw", "mlcl", "pico", "comco", "plnl"
VALUES = "loss", "gradient_norm", "f1_weighted", "auc_macro"

EXPERIMENT: dict[str, Any] = {
    "seed": 3,
    "data": {
        "split": "all",
        "protocol": {"labelled": 50, "test": "unlabelled"},
        "batch": {"labelled": 10, "unlabelled": 21},
        "views": [{"stored": "view1", "augment": ["noise"]}, {"stored": "view2"}],
        "standardise": True,
        "window_rows": 64,
    },
    "model": {
        "encoder": {"kind": "mlp", "widths": [16, 12], "dropout": 0.2},
        "projection_width": 8,
    },
    "optim": {"kind": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.01},
    "train": {"epochs": 40, "cpu_threads": 1},
    "evaluate": {"batch": 32, "map_rows": 20, "probe": "never"},
}
OPTIONS: dict[str, dict[str, Any]] = {  # so that every part of a method acts within twenty steps
    "pico": {"warmup_epochs": 1, "phi_epochs": 2, "queue": 37},
    "comco": {"warmup_epochs": 1, "neighbour_epochs": 2, "queue": 37},
    "plnl": {
        "pretrain_epochs": 0, "warmup_epochs": 1, "consistency_epochs": 2, "epochs": 1,
        "sure": 0.3, "neighbours": 5,
    },
    "mulco": {"queue": 37, "momentum": 0.9},
    "deepmtmv": {"every_epochs": 2, "widths": [8, 6], "cost": 0.001},
    "hard": {"threshold_epochs": 2},
    "mib": {"beta_epochs": 2},
    "siglip": {"bias": -10.0},
    "weighted_supervised": {"ramp_epochs": 1},
}  # fmt: skip


def data(folder: Path) -> None:
    """Arrays drawn from a seed: two views and one kind of labels a file."""
    random = np.random.default_rng(0)
    classes = random.integers(CLASSES, size=ROWS)
    several = np.stack([classes % 2, classes // 2, random.integers(2, size=ROWS)], 1)
    centres = random.normal(size=(2, CLASSES, 12))
    views = {
        f"view{v + 1}": (centres[v][classes] + random.normal(size=(ROWS, 12))).astype(np.float32)
        for v in range(2)
    }
    kinds: dict[str, Any] = {
        "multi_class": classes,
        "multi_label": several.astype(np.uint8),
        "hierarchical": np.stack([classes // 2, classes], 1),
    }
    for kind, labels in kinds.items():
        np.savez(folder / f"{kind}.npz", labels=labels, **views)


def experiment(folder: Path, method: str, name: str, **train: Any) -> Config:
    """Returns the run of a method on labels that suit it.

    Args:
        folder: where `data` has written.
        method: a name of configs/methods.yaml.
        name: of the run.
        train: options of the section `train`.
    """
    chosen: dict[str, Any] = yaml.safe_load(METHODS.read_text())[method]
    tree: dict[str, Any] = json.loads(json.dumps(EXPERIMENT))
    wrong = method.startswith(COMPLEMENTARY)
    kind = "hierarchical" if method.startswith("hi") else "multi_label"
    kind = "multi_class" if wrong or method == "supcon" else kind
    build = {"source": "arrays", "npz": str(folder / f"{kind}.npz"), "label_kind": kind}
    tree["data"] |= {"path": str(folder / kind), "build": build}
    if wrong:
        tree["data"]["protocol"]["complementary"] = 1
        tree["data"]["batch"]["unlabelled"] = 0
    if wrong or method == "simclr":  # two augmentations of one view, by one encoder
        view = {"stored": "view1", "augment": ["noise"]}
        tree["data"]["views"] = [view, view]
        tree["model"] |= {"shared_encoder": True, "shared_projector": True}
    if method == "plnl":
        tree["model"]["classify_on"] = "first_view"
    tree["objective"] = {"cross_entropy" if kind == "multi_class" else "bce": {"weight": 1.0}}
    for term in chosen.get("terms", {}):
        tree["objective"][term] = {"weight": 0.5} | OPTIONS.get(term, {})
    tree["train"] |= train
    tree["run"] = {"dir": str(folder / name)}
    path = folder / f"{name}.yaml"
    part = folder / f"{name}.{os.getpid()}.part"  # every process writes it
    part.write_text(yaml.safe_dump(tree))
    part.replace(path)
    return load_config(path, method=method)


def values(run: Path) -> list[dict[str, float]]:
    """Returns what a run has recorded of each step and each evaluation that must not change."""
    kept = []
    for row in read_metrics(run / "metrics.jsonl"):
        names = [name for name in row if name.rpartition("/")[2] in VALUES or "loss/" in name]
        kept.append({name: row[name] for name in names})
    return kept


def runs() -> dict[str, tuple[str, str, int, dict[str, Any]]]:
    """Returns every reference run: its method, strategy, processes and options of `train`."""
    found: dict[str, tuple[str, str, int, dict[str, Any]]] = {}
    for method in yaml.safe_load(METHODS.read_text()):
        if method == "infograph":  # of graphs, which these data have not
            continue
        double = {"precision": "fp64"}
        found[method] = method, "ddp", 1, double | {"steps": 20}
        found[f"{method}-2"] = method, "ddp", 2, double | {"steps": 5}
    for strategy in STRATEGIES:  # DeepSpeed holds parameters in float32
        for cut, rows in (("whole", None), ("cut", 8)):
            options = {"steps": 5, "micro_batch": rows}
            found[f"herocon-{strategy}-{cut}"] = "herocon", strategy, 2, options
    return found


def make(folder: str, names: list[str]) -> list[str]:
    """Trains some runs, one after another, on the processes that call it.

    Returns:
        What each has recorded, as JSON.
    """
    made = []
    for name in names:
        method, strategy, world, train = runs()[name]
        assert world == collectives.world_size()
        choose(strategy)
        config = experiment(Path(folder), method, name, **train)
        # Weights and noise in float64 from the first: float32's last digit is the processor's.
        double = config.train.precision == "fp64"
        torch.set_default_dtype(torch.float64 if double else torch.float32)
        try:
            pretrain(config)
        finally:
            torch.set_default_dtype(torch.float32)
        made.append(json.dumps(values(Path(folder) / name), indent=0))
    return made


def write(out: Path, names: list[str]) -> None:
    """Trains some runs and writes what they recorded to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        data(Path(folder))
        for world in (1, 2):
            chosen = [name for name in names if runs()[name][2] == world]
            if not chosen:
                continue
            for name, text in zip(chosen, ranks.run(world, make, folder, chosen)[0], strict=True):
                (out / f"{name}.json").write_text(text + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]), sys.argv[2:] or list(runs()))
