"""Runs as their folders tell of them: what state each is in, how far, with what scores."""

import os
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from heron.pipeline.config.errors import ConfigError, StudyError, TrainingError
from heron.pipeline.config.experiment import move_renamed
from heron.pipeline.config.sections import leaves, read_tree
from heron.pipeline.training.run_lock import LOCK, holder
from heron.pipeline.training.tracking import FACTS, START, Metrics, read_result
from heron.shards.artefact import parse_json

TAIL = 2**18  # bytes of metrics.jsonl that are read, from its end
MOST = 20_000  # runs that are listed
DEEPEST = 8  # folders within folders
SIGNS = START, "metrics.jsonl", "result.json", LOCK  # one of them beside a config.yaml
SCORED = b"test/", b"validation/"  # begins the names of scores in metrics.jsonl
INSIDE = "checkpoints", "tensorboard", "wandb", "mlflow", "dvclive"  # of a run; no run lies there
COLUMNS = (
    *("name", "state", "step", "steps", "loss", "started", "seconds", "host", "version"),
    *("fingerprint", "fault"),
)
NO_SCORES = {*FACTS, "auc_labels", "folder", "config", *COLUMNS}

Run = dict[str, Any]


class Start(BaseModel):
    """What run.json may say."""

    model_config = ConfigDict(strict=True)

    steps: float | None = None
    started: str | None = None
    host: str | None = None
    version: str | None = None
    fingerprint: str | None = None


def find_runs(folders: Sequence[Path]) -> Iterator[Path]:
    """Yields the folders of runs at or below some folders, each in the order of names.

    Links are not followed.

    Raises:
        StudyError: a folder is not there, or more than `MOST` runs are.
    """
    for folder in folders:
        if not folder.is_dir():
            raise StudyError(f"{folder} is no folder; expected one that runs lie in: see run.dir")
    found = (run for folder in folders for run in _below(folder, DEEPEST))
    yield from islice(found, MOST)
    if next(found, None) is not None:
        raise StudyError(
            f"more than {MOST:,} runs are in {', '.join(map(str, folders))}; expected no more: "
            "name the folders further down"
        )


def _below(folder: Path, levels: int) -> Iterator[Path]:
    try:
        with os.scandir(folder) as entries:
            files = {e.name: e.is_dir(follow_symlinks=False) for e in entries}
    except OSError:
        files = {}
    is_run = "config.yaml" in files and any(name in files for name in SIGNS)
    inside = INSIDE if is_run else ()
    if is_run:
        yield folder
    for name in sorted(name for name, is_folder in files.items() if is_folder and levels):
        if not name.startswith((".", *inside)):
            yield from _below(folder / name, levels - 1)


def read_run(folder: Path, name: str) -> Run:
    """Returns what a run's folder tells: `COLUMNS`, and its scores by their names.

    `state` is `living` (a process has its lock), `ended` (there is a result), `stopped` (all steps
    that it made are saved), `dead` (some are not, or none was made) or `damaged`, with the `fault`.
    """
    run: Run = dict.fromkeys(COLUMNS) | {"name": name, "folder": str(folder)}
    try:
        for path in (folder / file for file in ("config.yaml", *SIGNS)):
            if path.exists() and not path.is_file():  # one that waits for a writer would hang
                raise ValueError(f"{path} is no file; expected one, as a run wrote it")
        owner = holder(folder)
        start = _start(folder / START)
        run |= start
        step, rows = _last_rows(folder / "metrics.jsonl")
        saved = _saved(folder / "checkpoints")
        run |= rows | {"step": step}
        if run["started"] and (folder / "metrics.jsonl").exists():
            began = datetime.fromisoformat(run["started"]).timestamp()
            run["seconds"] = max(0.0, (folder / "metrics.jsonl").stat().st_mtime - began)
        if owner is not None:
            run |= {"state": "living"}
            if " on " in owner:
                run["host"] = owner.rpartition(" on ")[2]
        elif (folder / "result.json").exists():
            result = read_result(folder / "result.json", ["steps", "train_seconds"])
            run |= {key: value for key, value in result.items() if _is_score(key, value)}
            run |= {"state": "ended", "steps": result["steps"], "seconds": result["train_seconds"]}
            run |= {key: result.get(key) for key in ("version", "fingerprint")}
        else:
            run["state"] = "stopped" if step and step == saved else "dead"
    except (TrainingError, OSError, ValueError, OverflowError) as fault:
        run |= {"state": "damaged", "fault": " ".join(str(fault).split())}
    return run


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the configuration of a run by dotted keys; none where it cannot be read."""
    if not (folder / "config.yaml").is_file():
        return {}
    try:
        tree = read_tree(folder / "config.yaml")
        move_renamed(tree)
    except ConfigError:
        return {}
    return dict(leaves(tree))


def _start(path: Path) -> Run:
    """Returns what run.json says; runs of the edition before it have none."""
    if not path.exists():
        return {}
    start = Start.model_validate(read_result(path, ["steps"], Start))
    if start.started is not None:
        datetime.fromisoformat(start.started).astimezone(UTC)
    return start.model_dump()


def _last_rows(path: Path) -> tuple[int, Run]:
    """Returns how many steps metrics.jsonl tells of, and its last loss and scores."""
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - TAIL))
            lines = stream.read(TAIL).split(b"\n")
    except FileNotFoundError:
        return 0, {}
    if size > TAIL:
        del lines[0]  # its beginning is not there
    last: Run = {}
    step = 0
    scored = False
    for line in reversed(lines[:-1]):  # what follows the last end of a line was cut short
        if "loss" in last and (scored or not any(b'"' + of in line for of in SCORED)):
            continue  # a line that is not read cannot take long
        if not line.strip():
            continue
        try:
            row = Metrics.model_validate(parse_json(line)).model_dump()
        except ValueError as fault:
            reason = str(fault).splitlines()[0]
            raise ValueError(f"{path} has a damaged line near its end: {reason}") from None
        scores = {k.removeprefix("test/"): v for k, v in row.items() if k.startswith("test/")}
        named = {k.replace("/", "_", 1): v for k, v in row.items() if k.startswith("validation/")}
        scores |= named
        scores = {key: value for key, value in scores.items() if _is_score(key, value)}
        if scores and not scored:
            last |= scores
            scored = True
        if "loss" in row and "loss" not in last:
            last["loss"], step = row["loss"], row["step"] + 1
    return step, last


def _saved(checkpoints: Path) -> int | None:
    """Returns the step of the newest complete checkpoint."""
    names = (path.parent.name for path in checkpoints.glob("step-*/COMPLETE"))
    steps = (name.removeprefix("step-") for name in names)
    return max((int(step) for step in steps if step.isdecimal()), default=None)


def _is_score(key: str, value: Any) -> bool:
    return key not in NO_SCORES and (value is None or type(value) in (int, float))
