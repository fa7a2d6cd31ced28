"""Atomic checkpoints, from which any strategy and number of processes can resume."""

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from heron.base.artefact import Artefact, Count, FileName, FileSum, Fingerprint
from heron.base.atomic import naming
from heron.base.errors import CheckpointError, ConfigError, ShardError
from heron.data.options import without_locations
from heron.distributed.agreement import differences, versions
from heron.distributed.collectives import broadcast_object, broadcast_tensors, rank
from heron.distributed.watchdog import Watchdog
from heron.experiment.config import Config, load_saved
from heron.training.strategy import SCALER, State, _entries_of

COMPLETE = "COMPLETE"
STATE = "state.json"  # the manifest
FORMAT: Literal[4] = 4
FILES = "model", "optimizer", "memories"  # of tensors, in every checkpoint
WEIGHTS = "weights"  # the file of the trained weights where the model has others: see `Snapshot`
AVERAGE = "average"  # the file of their average where the model is the best so far
TENSORS = *FILES, AVERAGE, "best"  # of a snapshot
UNREADABLE = OSError, RuntimeError, ValueError, KeyError, TypeError, SafetensorError
ANEW = "run with run.resume=never to start over"


@dataclass(frozen=True)
class Position:
    """A run's position: `step` global batches are done; the plan derives the rest from it."""

    step: Count
    epoch: Count
    step_in_epoch: Count


@dataclass(frozen=True)
class BestSoFar:
    """The best evaluation of a run.

    Attributes:
        name: of the score of the validation rows.
        score: null: it was not defined.
        step: steps after which the run had it; of equal ones the last.
        seen: steps after which the run was last evaluated.
        misses: evaluations since the score was last raised.
    """

    name: str
    score: float | None
    step: Count
    seen: Count
    misses: Count


@dataclass(frozen=True)
class Snapshot:
    """The state of a run at a step, gathered from all processes.

    Random numbers are a function of (seed, epoch, row), and batches of the plan, so no generator
    and no loader has a state.

    Attributes:
        model: parameters and buffers by name.
        optimizer: its state, as NAME/KEY: see `Strategy.optimizer_state`.
        memories: those of the terms, as TERM/NAME: see `Objective.memory_state`.
        data: the fingerprint of the data set that it was trained on.
        average: like `model`, that of `train.ema`; {} without one.
        best: like `model`, that of the best evaluation, `found`; {} without one.
    """

    position: Position
    model: State
    optimizer: State
    memories: State
    data: str = ""
    average: State = field(default_factory=dict)
    best: State = field(default_factory=dict)
    found: BestSoFar | None = None

    def tensors(self) -> dict[str, State]:
        """Returns the tensors of each file; `model` is what others load: the best, or the average.

        `weights` has the trained ones where `model` has others.
        """
        files = {"model": self.model, "optimizer": self.optimizer, "memories": self.memories}
        if kept := self.best or self.average:
            files |= {"model": kept, WEIGHTS: self.model}
        return files | ({AVERAGE: self.average} if self.best and self.average else {})


class CheckpointManifest(Artefact):
    """A checkpoint's files, the run's position, and the data and versions it was trained on.

    Attributes:
        best: the evaluation whose weights are the model; null: the last weights are.
    """

    description: ClassVar[str] = "the manifest of a checkpoint"
    error: ClassVar[type[CheckpointError]] = CheckpointError
    remedy: ClassVar[str] = f"restore it, or {ANEW}"
    versions: ClassVar[tuple[int, ...]] = (FORMAT,)

    format: Literal[4]
    position: Position
    files: dict[FileName, FileSum]
    data: Fingerprint | Literal[""]
    made_with: dict[str, str]
    best: BestSoFar | None = None

    def fault(self, folder: Path) -> str:
        """Returns how a checkpoint's folder differs from what was written, or ""."""
        step = f"step-{self.position.step:08d}"
        if folder.name.startswith("step-") and folder.name != step:
            return f"it is in {folder.name}, but its position is that of {step}"
        required = [*(f"{name}.safetensors" for name in FILES), "config.yaml", "model.json"]
        if missing := [name for name in required if name not in self.files]:
            return f"{STATE} lists no {', '.join(missing)}"
        faults = [text for name, file in self.files.items() if (text := file.fault(folder / name))]
        return "; ".join(faults).replace(f"{folder}/", "")


def save(folder: Path, snapshot: Snapshot, texts: dict[str, str], newest: int) -> Path:
    """Writes a checkpoint under a temporary name, marks it complete, then renames it.

    `texts` are files beside the tensors, by name. Returns its folder, `step-00000200`; `latest`
    points at it.
    """
    final = folder / f"step-{snapshot.position.step:08d}"
    partial = folder / f".{final.name}.part"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        for name, state in snapshot.tensors().items():
            tensors = {key: value.contiguous() for key, value in state.items()}
            save_tensors(tensors, partial / f"{name}.safetensors")
        for name, text in texts.items():
            with naming(partial / name, partial / name):
                (partial / name).write_text(text)
        CheckpointManifest(
            format=FORMAT,
            position=snapshot.position,
            files={path.name: FileSum.of(path) for path in sorted(partial.iterdir())},
            data=snapshot.data,
            made_with=versions(),
            best=snapshot.found,
        ).write(partial / STATE)
        for path in partial.iterdir():
            _flush(path)
        (partial / COMPLETE).touch()
        _flush(partial)
    except (OSError, ShardError) as error:  # the second where the disk is full
        shutil.rmtree(partial, ignore_errors=True)
        raise OSError(str(error).partition("; ")[0]) from None  # the remedy is another: see `wait`
    old = folder / f".{final.name}.old"
    if final.exists():
        final.rename(old)
    partial.rename(final)
    shutil.rmtree(old, ignore_errors=True)
    link = folder / ".latest.part"
    link.unlink(missing_ok=True)
    link.symlink_to(final.name)
    link.replace(folder / "latest")
    _flush(folder)
    for old in complete_checkpoints(folder)[:-newest]:
        (old / COMPLETE).unlink()
        shutil.rmtree(old, ignore_errors=True)  # another process may be reading it
    return final


def save_tensors(tensors: State, path: Path) -> None:
    """Writes a file of tensors, by their names; errors are those of `naming`."""
    with naming(path, path):
        try:
            save_file(tensors, path)
        except SafetensorError as error:  # whatever the reason is
            raise OSError(f"{path}: {error}") from None


def complete_checkpoints(folder: Path) -> list[Path]:
    """Returns complete checkpoints, oldest first."""
    return sorted(path.parent for path in folder.glob(f"step-*/{COMPLETE}"))


def resume(
    folder: Path, config: Config, data: str, watchdog: Watchdog
) -> tuple[Snapshot | None, list[str]]:
    """Returns the newest undamaged checkpoint on every process; every process must call it.

    Only the first process reads it, and broadcasts it. `config` and `data`, the fingerprint of the
    data set, are of the run that resumes.

    Returns:
        The snapshot, or None where there is no checkpoint at all; and lines about newer checkpoints
            that are damaged, and about allowed differences of configuration, data and versions.

    Raises:
        CheckpointError: on every process: it was made from other data or with a configuration under
            which the run would go on otherwise, or all checkpoints are damaged.
    """
    snapshot, lines, fault = None, list[str](), ""
    if rank() == 0:
        try:
            snapshot, lines = _load_newest(folder, config, data, watchdog)
        except CheckpointError as error:
            fault = str(error)
    facts = (snapshot.position, snapshot.found) if snapshot else None
    facts, lines, fault = broadcast_object((facts, lines, fault))
    if fault:
        raise CheckpointError(fault)
    if facts is None:
        return None, lines
    position, found = facts
    local = snapshot or Snapshot(position, {}, {}, {})
    tensors = {name: broadcast_tensors(getattr(local, name)) for name in TENSORS}
    return Snapshot(position, data=data, found=found, **tensors), lines


def _load_newest(
    folder: Path, config: Config, data: str, watchdog: Watchdog
) -> tuple[Snapshot | None, list[str]]:
    lines, candidates = list[str](), complete_checkpoints(folder)
    if not candidates and (incomplete := sorted(folder.glob("step-*"))):
        lines.append(f"{incomplete[-1]} is not complete: {COMPLETE} is missing")
    while candidates:
        path = candidates.pop()
        with watchdog.busy():
            fault = find_damage(path)
        if not fault:
            return _load_checked(path, config, data, watchdog, lines), lines
        fallback = f"continuing from {candidates[-1].name}, the one before" if candidates else ""
        lines.append(f"{path} is damaged ({fault}); {fallback or 'there is no other checkpoint'}")
    if lines:
        raise CheckpointError(f"{'; '.join(lines)}; restore one, or {ANEW}")
    return None, lines


def _load_checked(
    path: Path, config: Config, data: str, watchdog: Watchdog, lines: list[str]
) -> Snapshot:
    """Reads a checkpoint that a run may resume from; adds allowed differences to `lines`."""
    manifest = CheckpointManifest.read(path / STATE)
    changes = _changes(path, manifest, config, data)
    if changes and config.run.resume != "force":
        raise CheckpointError(
            f"{path} was made with {'; '.join(changes)}; run with {path / 'config.yaml'} and its "
            "data, with run.resume=force to continue anyway, or with run.resume=never"
        )
    with watchdog.busy():
        snapshot = load(path)
    lines += [f"continuing anyway: {path.name} was made with {line}" for line in changes]
    changed = differences(versions(), manifest.made_with)
    if changed:
        lines.append(f"{path.name} was made with other versions: {'; '.join(changed)}")
    return snapshot


def _changes(path: Path, manifest: CheckpointManifest, config: Config, data: str) -> list[str]:
    """Returns how a run that resumes differs; CheckpointError for weights of another model."""
    try:
        made_with = load_saved(path, trust_code=None)
    except ConfigError as error:
        raise CheckpointError(f"cannot read {path}: {error}; {ANEW}") from None
    differing = differences(resume_facts(config), resume_facts(made_with))
    if config.run.resume == "force" and any(line.startswith("model.") for line in differing):
        raise CheckpointError(
            f"{path} was made with another model: {'; '.join(differing)}; its weights do not fit, "
            f"even with run.resume=force; run with {path / 'config.yaml'}, or with run.resume=never"
        )
    if made_with.train.ema is not None and f"{WEIGHTS}.safetensors" not in manifest.files:
        raise CheckpointError(f"{path} has no {WEIGHTS}.safetensors, but an average; {ANEW}")
    lines = [f"another configuration: {'; '.join(differing)}"] if differing else []
    if manifest.data not in ("", data):
        lines.append(f"other data: fingerprint {manifest.data}, not {data}")
    return lines


def find_damage(path: Path) -> str:
    """Returns how a checkpoint differs from what was written, or "": see `FileSum.fault`."""
    try:
        return CheckpointManifest.read(path / STATE).fault(path)
    except (CheckpointError, OSError) as error:
        return str(error)


def load(path: Path) -> Snapshot:
    """Reads a checkpoint, without unpickling; CheckpointError if unreadable or altered."""
    manifest = CheckpointManifest.read(path / STATE)
    try:
        if fault := manifest.fault(path):
            raise ValueError(fault)
        tensors = {name: load_file(path / f"{name}.safetensors") for name in FILES}
        name = f"{WEIGHTS}.safetensors"
        if manifest.best and name not in manifest.files:
            raise ValueError(f"it has the best weights, but no {name}")
        if name in manifest.files:
            kept = "best" if manifest.best else AVERAGE
            tensors |= {kept: tensors["model"], "model": load_file(path / name)}
            if f"{AVERAGE}.safetensors" in manifest.files:
                tensors[AVERAGE] = load_file(path / f"{AVERAGE}.safetensors")
            for other in {kept, AVERAGE} & tensors.keys():
                if _shapes(tensors[other]) != _shapes(tensors["model"]):
                    raise ValueError(f"the {other} weights and {name} have not the same tensors")
        _check_scale(tensors["optimizer"], manifest.position.step)
        return Snapshot(manifest.position, data=manifest.data, found=manifest.best, **tensors)
    except UNREADABLE as error:
        raise CheckpointError(f"cannot read {path}: {error}; {ANEW}") from None


def _shapes(state: State) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def _check_scale(optimizer: State, steps: int) -> None:
    """Raises ValueError for a loss scale that no run has written."""
    numbers = _entries_of(optimizer, SCALER)
    ranges = {"scale": (1e-30, 1e30), "streak": (0, steps), "skipped": (0, steps)}
    good = numbers.keys() <= ranges.keys() and all(
        x.numel() == 1 and ranges[n][0] <= x.item() <= ranges[n][1] for n, x in numbers.items()
    )
    if not good or ("scale" in numbers) != ("streak" in numbers):
        raise ValueError(f"optimizer.safetensors has an impossible loss scale: {numbers}")


def resume_facts(config: Config) -> dict[str, Any]:
    """Returns the options that decide how a run goes on: not its folder, end or tracking.

    Of its length only where the learning rate depends on it.
    """
    excluded = {"run", "evaluate", "train", "tracking"}
    tree = config.model_dump(mode="json", exclude=excluded)
    tree["data"] = without_locations(tree["data"])
    storage = "fingerprint", "build", "workers", "verify", "cache", "storage_options"
    for key in (*storage, "on_error", "max_bad_fraction"):
        del tree["data"][key]
    for key in ("leave_out", "label_weights"):  # compared by content: see `refuse_other_files`
        tree["data"]["protocol"].pop(key, None)
    keys = ["precision", "micro_batch", "compile", "ema", "deterministic"]
    if config.optim.schedule == "cosine" or config.train.keep == "best":
        keys += ["epochs", "total_steps"]  # the end is evaluated, too
    if config.train.keep == "best":
        keys += ["keep", "keep_by", "patience", "evaluate_every_steps", "evaluate_every_epochs"]
        judged_by = "threshold", "probe", "probe_by", "knn", "knn_tau"
        tree["evaluate"] = {key: getattr(config.evaluate, key) for key in judged_by}
    tree["train"] = {key: getattr(config.train, key) for key in keys}
    return tree


def _flush(path: Path) -> None:
    """Waits until what was written is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
