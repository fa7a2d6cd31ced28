"""Checkpoints that are whole or not there, and go on under any strategy and number of processes."""

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from heron.pipeline.config.errors import CheckpointError, ConfigError
from heron.pipeline.config.experiment import Config, load_run_config
from heron.pipeline.distributed.collectives import gather_objects, rank
from heron.pipeline.distributed.strategy import State
from heron.pipeline.distributed.watchdog import Watchdog

COMPLETE = "COMPLETE"
FORMAT = 3
FIRST_EDITION = 2  # has one memory, momentum.safetensors, under no name
UNREADABLE = OSError, RuntimeError, ValueError, KeyError, TypeError, SafetensorError


@dataclass(frozen=True)
class Position:
    """Where a run stands: `step` global batches are done; with the plan that is everything."""

    step: int
    epoch: int
    step_in_epoch: int


@dataclass(frozen=True)
class Snapshot:
    """The state of a run at a step: gathered tensors, whichever processes had what of them.

    Random numbers are a function of (seed, epoch, row), and batches of the plan, so that no
    generator and no loader has a state.

    Attributes:
        position: where it stands.
        model: parameters and buffers by name.
        optimizer: what the optimiser keeps, as NAME/KEY: see `Strategy.optimizer_state`.
        memories: of the terms, as TERM/NAME: see `Objective.memory_state`.
    """

    position: Position
    model: State
    optimizer: State
    memories: State


def keep(
    folder: Path,
    snapshot: Snapshot,
    texts: dict[str, str],
    newest: int,
    watchdog: Watchdog,
) -> None:
    """Writes a snapshot on the main process; every process must call it.

    Args:
        folder: the run's `checkpoints/`.
        snapshot: in full on the main process.
        texts: files beside the tensors, by name: config.yaml, model.json.
        newest: how many of the newest checkpoints stay.
        watchdog: waits while this writes.

    Raises:
        CheckpointError: on every process, when it could not be written; those before stay.
    """
    fault = ""
    if rank() == 0:
        try:
            with watchdog.busy():
                save(folder, snapshot, texts, newest)
        except OSError as error:
            earlier = complete(folder)
            fault = (
                f"the checkpoint of step {snapshot.position.step} could not be written to "
                f"{folder}: {error}; the last one is {earlier[-1] if earlier else 'none'}; "
                "make room, and run again with run.resume=auto to go on from there"
            )
    if fault := gather_objects(fault)[0]:
        raise CheckpointError(fault)


def save(folder: Path, snapshot: Snapshot, texts: dict[str, str], newest: int) -> Path:
    """Writes a checkpoint: under a temporary name, marked complete, then renamed.

    Returns:
        The checkpoint's folder, `step-00000200`; `latest` points at it.
    """
    final = folder / f"step-{snapshot.position.step:08d}"
    partial = folder / f".{final.name}.part"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        for name in ("model", "optimizer", "memories"):
            tensors = {key: value.contiguous() for key, value in getattr(snapshot, name).items()}
            save_file(tensors, partial / f"{name}.safetensors")
        for name, text in texts.items():
            (partial / name).write_text(text)
        files = {path.name: _sha256(path) for path in sorted(partial.iterdir())}
        state = {"format": FORMAT, "position": vars(snapshot.position), "sha256": files}
        (partial / "state.json").write_text(json.dumps(state, indent=1))
        for path in partial.iterdir():
            _flush(path)
        (partial / COMPLETE).touch()
        _flush(partial)
    except SafetensorError as error:  # a full disk, in the words of safetensors
        shutil.rmtree(partial, ignore_errors=True)
        raise OSError(str(error)) from None
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    link = folder / ".latest.part"
    link.unlink(missing_ok=True)
    link.symlink_to(final.name)
    link.replace(folder / "latest")
    _flush(folder)
    for old in complete(folder)[:-newest]:
        (old / COMPLETE).unlink()
        shutil.rmtree(old, ignore_errors=True)  # somebody may be reading it
    return final


def set_aside(folder: Path, files: str = f"step-*/{COMPLETE}") -> Path | None:
    """Moves the checkpoints of an earlier run away, so that a new run neither mixes nor loses them.

    Returns:
        Where they are now, `checkpoints-1`, or None when there were none of such `files`.
    """
    if not any(folder.glob(files)):
        return None
    number = 1
    while (aside := folder.with_name(f"{folder.name}-{number}")).exists():
        number += 1
    folder.rename(aside)
    return aside


def complete(folder: Path) -> list[Path]:
    """Returns complete checkpoints, oldest first."""
    return sorted(path.parent for path in folder.glob(f"step-*/{COMPLETE}"))


def resume(folder: Path, config: Config) -> tuple[Snapshot | None, list[str]]:
    """Returns the newest undamaged checkpoint on every process; every process must call it.

    Returns:
        The snapshot, or None when there is no checkpoint at all; and a line for each that is newer
        and damaged.

    Raises:
        CheckpointError: it was made with a configuration under which the run would go on
            otherwise, or all are damaged, or not all processes see it.
    """
    lines: list[str] = []
    chosen = ""
    candidates = complete(folder) if rank() == 0 else []
    while candidates and not chosen:
        path = candidates.pop()
        if fault := damage(path):
            lines.append(
                f"{path} is damaged ({fault}); "
                + (
                    f"going on from {candidates[-1].name}, the one before"
                    if candidates
                    else "it was the last"
                )
            )
        else:
            chosen = path.name
    chosen, lines = gather_objects((chosen, lines))[0]
    if lines and not chosen:
        raise CheckpointError(
            f"{'; '.join(lines)}; bring one back, or run with run.resume=never to begin anew"
        )
    snapshot, fault = None, ""
    if chosen:
        try:
            snapshot = load(folder / chosen, config)
        except CheckpointError as error:
            fault = str(error)
    for number, other in enumerate(gather_objects(fault)):
        if other:
            raise CheckpointError(fault or f"rank {number}: {other}")
    return snapshot, lines


def damage(path: Path) -> str:
    """Returns what of a checkpoint is not what was written, or "": a pass over its bytes."""
    try:
        written = json.loads((path / "state.json").read_text())["sha256"]
        altered = [name for name, sum_ in written.items() if _sha256(path / name) != sum_]
    except UNREADABLE as error:
        return f"{type(error).__name__}: {error}"
    return f"{', '.join(altered)} is not what was written" if altered else ""


def load(path: Path, config: Config) -> Snapshot:
    """Reads a checkpoint to go on with under a configuration; nothing of it is unpickled.

    Raises:
        CheckpointError: it was made with a configuration under which the run would go on
            otherwise, or it cannot be read.
    """
    remedy = f"run with {path / 'config.yaml'}, or with run.resume=never"
    try:
        made_with = load_run_config(path / "config.yaml")
    except ConfigError as error:
        raise CheckpointError(f"{path} cannot be read: {error}; {remedy}") from None
    if differing := _differences(_decisive(made_with), _decisive(config)):
        raise CheckpointError(
            f"{path} was made with another configuration: {'; '.join(differing)}; {remedy}"
        )
    try:
        state: dict[str, Any] = json.loads((path / "state.json").read_text())
        if state["format"] not in (FORMAT, FIRST_EDITION):
            expected = f"{FIRST_EDITION} or {FORMAT}"
            raise ValueError(f"it has format {state['format']}; expected {expected}")
        old = state["format"] == FIRST_EDITION
        memories = path / ("momentum.safetensors" if old else "memories.safetensors")
        return Snapshot(
            Position(**state["position"]),
            load_file(path / "model.safetensors"),
            load_file(path / "optimizer.safetensors"),
            {} if old and not memories.exists() else load_file(memories),
        )
    except UNREADABLE as error:
        raise CheckpointError(f"{path} cannot be read: {error}; {remedy}") from None


def _decisive(config: Config) -> dict[str, Any]:
    """Returns what decides how a run goes on: not its folder, its length or how it is watched."""
    tree = config.model_dump(mode="json", exclude={"run", "evaluate", "train"})
    where = "path", "build", "workers", "verify", "cache", "storage_options"
    for key in (*where, "on_error", "max_bad_fraction"):
        del tree["data"][key]
    kept = "precision", "micro_batch", *(("epochs",) if config.optim.schedule == "cosine" else ())
    tree["train"] = {key: getattr(config.train, key) for key in kept}
    return tree


def _differences(saved: Any, current: Any, key: str = "") -> list[str]:
    """Returns the leaves in which two trees differ, as 'key is X, not Y'."""
    if isinstance(saved, dict) and isinstance(current, dict):
        names = sorted(saved.keys() | current.keys())
        pairs = [(saved.get(n), current.get(n), f"{key}.{n}".strip(".")) for n in names]
        return [line for pair in pairs for line in _differences(*pair)]
    return [] if saved == current else [f"{key} is {saved}, not {current}"]


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """Waits until the disk has what was written."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
