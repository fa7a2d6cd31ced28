"""Checkpoints that are whole or not there, and hold the position as well as the weights."""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim import Optimizer

from pipeline.config import Config, load_config
from pipeline.errors import CheckpointError

COMPLETE = "COMPLETE"


@dataclass(frozen=True)
class Position:
    """Where a run stands: `step` global batches are done; with the plan that is everything."""

    step: int
    epoch: int
    step_in_epoch: int


def save(
    folder: Path,
    position: Position,
    model: nn.Module,
    optimizer: Optimizer,
    config: str,
    keep: int,
    momentum: nn.Module | None = None,
) -> Path:
    """Write a checkpoint: under a temporary name, marked complete, then renamed.

    Args:
        folder: the run's `checkpoints/`.
        position: where the run stands.
        model: unwrapped.
        optimizer: its state is stored with `torch.save` and loaded with `weights_only`.
        config: the resolved configuration as YAML.
        keep: how many of the newest checkpoints stay.
        momentum: the momentum encoder with its queue, where a term has one.

    Returns:
        The checkpoint's folder, `step-00000200`; `latest` points at it.
    """
    final = folder / f"step-{position.step:08d}"
    part = folder / f".{final.name}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    _write(model, part / "model.safetensors")
    if momentum is not None:
        _write(momentum, part / "momentum.safetensors")
    torch.save(optimizer.state_dict(), part / "optimizer.pt")
    (part / "config.yaml").write_text(config)
    (part / "state.json").write_text(json.dumps({"format": 1, "position": vars(position)}))
    for path in part.iterdir():
        _flush(path)
    (part / COMPLETE).touch()
    _flush(part)
    shutil.rmtree(final, ignore_errors=True)
    part.rename(final)
    link = folder / ".latest.part"
    link.unlink(missing_ok=True)
    link.symlink_to(final.name)
    link.replace(folder / "latest")
    _flush(folder)
    for old in complete(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def set_aside(folder: Path) -> Path | None:
    """Move the checkpoints of an earlier run away, so that a new run neither mixes nor loses them.

    Returns:
        Where they are now, `checkpoints-1`, or None when there were none.
    """
    if not complete(folder):
        return None
    number = 1
    while (aside := folder.with_name(f"{folder.name}-{number}")).exists():
        number += 1
    folder.rename(aside)
    return aside


def complete(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path.parent for path in folder.glob(f"step-*/{COMPLETE}"))


def load(
    path: Path,
    model: nn.Module,
    optimizer: Optimizer,
    config: Config,
    momentum: nn.Module | None = None,
) -> Position:
    """Put a checkpoint into a model, an optimiser, and the momentum encoder where there is one.

    Raises:
        CheckpointError: it was made with a configuration under which the run would go on
            otherwise, or it cannot be read.
    """
    remedy = f"run with {path / 'config.yaml'}, or with run.resume=never"
    made_with = load_config(path / "config.yaml")
    if differing := _differences(_decisive(made_with), _decisive(config)):
        raise CheckpointError(
            f"{path} was made with another configuration: {'; '.join(differing)}; {remedy}"
        )
    try:
        state: dict[str, Any] = json.loads((path / "state.json").read_text())
        model.load_state_dict(load_file(path / "model.safetensors"))
        stored = torch.load(path / "optimizer.pt", map_location="cpu", weights_only=True)
        optimizer.load_state_dict(stored)
        if momentum is not None:
            momentum.load_state_dict(load_file(path / "momentum.safetensors"))
        return Position(**state["position"])
    except (OSError, RuntimeError, ValueError, KeyError, SafetensorError, UnpicklingError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; {remedy}") from None


def _decisive(config: Config) -> dict[str, Any]:
    """What decides how a run goes on: not where it lies, how long it is, or how it is watched."""
    tree = config.model_dump(mode="json", exclude={"run", "evaluate", "train"})
    where = "path", "build", "workers", "verify", "cache", "storage_options"
    for key in (*where, "on_error", "max_bad_fraction"):
        del tree["data"][key]
    if config.optim.schedule == "cosine":
        tree["train"] = {"epochs": config.train.epochs}
    return tree


def _differences(found: Any, wanted: Any, key: str = "") -> list[str]:
    """The leaves in which two trees differ, as 'key is X, not Y'."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        names = sorted(found.keys() | wanted.keys())
        pairs = [(found.get(n), wanted.get(n), f"{key}.{n}".strip(".")) for n in names]
        return [line for pair in pairs for line in _differences(*pair)]
    return [] if found == wanted else [f"{key} is {found}, not {wanted}"]


def _write(module: nn.Module, path: Path) -> None:
    save_file({k: v.contiguous() for k, v in module.state_dict().items()}, path)


def _flush(path: Path) -> None:
    """Have the disk hold what was written."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
