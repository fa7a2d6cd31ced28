"""Runs as their files show them: where they lie, how far each has come, its scores."""

import os
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from heron.base.artefact import describe_errors, parse_json
from heron.base.errors import ConfigError, StudyError, TrainingError
from heron.base.sections import leaves, read_tree
from heron.training.run_lock import LOCK, holder
from heron.training.tracking import FACTS, START, Metrics, read_result

TAIL = 2**18  # bytes of metrics.jsonl that are read, from its end
MAX_RUNS = 20_000  # runs that are listed
RUN_FILES = START, "metrics.jsonl", "result.json", LOCK  # a run has config.yaml and one of them
SCORE_PREFIXES = b"test/", b"validation/"  # of the names of scores in metrics.jsonl
RUN_SUBFOLDERS = "checkpoints", "tensorboard", "wandb", "mlflow", "dvclive"  # hold no runs
FIRST_COLUMNS = "name", "state", "step", "steps", "loss"
LAST_COLUMNS = "started", "seconds", "host", "version", "fingerprint"
COLUMNS = *FIRST_COLUMNS, *LAST_COLUMNS, "fault"
NOT_SCORES = {*FACTS, "auc_labels", "folder", "config", *COLUMNS}

Run = dict[str, Any]


class Start(TypedDict, total=False):
    """The fields of run.json that are read; others are ignored."""

    steps: float | None
    started: str | None
    host: str | None
    version: str | None
    fingerprint: str | None


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """Returns the folders of runs at or below each of some folders, in the order of names.

    Links are not followed. Raises a StudyError if a folder does not exist, or for too many runs.
    """
    for folder in folders:
        if not folder.is_dir():
            raise StudyError(f"{folder} is not a folder; pass one that contains runs (run.dir)")
    all_runs = (run for folder in folders for run in _runs_below(folder))
    run_folders = list(islice(all_runs, MAX_RUNS + 1))
    if len(run_folders) > MAX_RUNS:
        raise StudyError(
            f"{', '.join(map(str, folders))} has more than {MAX_RUNS:,} runs, the limit; pass "
            "subfolders instead"
        )
    return run_folders


def _runs_below(folder: Path) -> Iterator[Path]:
    to_visit = [folder]
    while to_visit:
        folder = to_visit.pop()
        try:
            with os.scandir(folder) as entries:
                is_folder = {e.name: e.is_dir(follow_symlinks=False) for e in entries}
        except OSError:
            continue
        is_run = "config.yaml" in is_folder and any(name in is_folder for name in RUN_FILES)
        if is_run:
            yield folder
        skipped = (".", *RUN_SUBFOLDERS) if is_run else "."
        names = (name for name in is_folder if is_folder[name] and not name.startswith(skipped))
        to_visit += [folder / name for name in sorted(names, reverse=True)]


def read_run(folder: Path) -> Run:
    """Reads a run's folder: returns the values of `COLUMNS`, and its scores by name.

    `state` is `living` (a process holds its lock), `ended` (it has a result), `stopped` (all of its
    steps are saved), `dead` (some are not, or it made none) or `damaged`, with the `fault`.
    """
    run: Run = dict.fromkeys(COLUMNS) | {"name": str(folder), "folder": str(folder)}
    metrics, result = folder / "metrics.jsonl", folder / "result.json"
    try:
        for path in (folder / file for file in ("config.yaml", *RUN_FILES)):
            if path.exists() and not path.is_file():  # a pipe would hang
                raise ValueError(f"{path} is not a file; remove it")
        owner = holder(folder)
        if (folder / START).exists():  # it may have ended before it wrote one
            start = read_result(folder / START, ["steps"], Start)
            run |= {key: start.get(key) for key in Start.__annotations__}
        run |= _last_rows(metrics)
        if run["started"] is not None:
            started = datetime.fromisoformat(run["started"]).astimezone(UTC).timestamp()
            if metrics.exists():
                run["seconds"] = max(0.0, metrics.stat().st_mtime - started)
        if owner is not None:
            run["state"] = "living"
            if " on " in owner:
                run["host"] = owner.rpartition(" on ")[2]
        elif result.exists():
            values = read_result(result, ["steps", "train_seconds"])
            run |= {key: value for key, value in values.items() if is_score(key, value)}
            run |= {"state": "ended", "steps": values["steps"], "seconds": values["train_seconds"]}
            run |= {key: values.get(key) for key in ("version", "fingerprint")}
        else:
            names = (p.parent.name for p in folder.glob("checkpoints/step-*/COMPLETE"))
            steps = (name.removeprefix("step-") for name in names)
            saved_step = max((int(step) for step in steps if step.isdecimal()), default=None)
            run["state"] = "stopped" if run["step"] and run["step"] == saved_step else "dead"
    except (TrainingError, OSError, ValueError, OverflowError) as fault:
        run |= {"state": "damaged", "fault": " ".join(str(fault).split())}
    return run


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the configuration of a run by dotted keys; empty if it cannot be read."""
    if not (folder / "config.yaml").is_file():
        return {}
    try:
        tree = read_tree(folder / "config.yaml")
    except ConfigError:
        return {}
    return dict(leaves(tree))


def _last_rows(path: Path) -> Run:
    """Returns the number of steps in metrics.jsonl, `step`, and its last loss and scores."""
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - TAIL))
            lines = stream.read(TAIL).split(b"\n")
    except FileNotFoundError:
        return {"step": 0}
    if size > TAIL:
        del lines[0]  # cut off by the seek
    step, loss, scores = 0, None, Run()
    for line in reversed(lines[:-1]):  # what follows the last newline is incomplete
        has_scores = any(b'"' + prefix in line for prefix in SCORE_PREFIXES)
        if not line.strip() or (step and (scores or not has_scores)):
            continue  # parsing only what is needed keeps a long tail quick
        try:
            row = Metrics.model_validate(parse_json(line)).model_dump()
        except ValueError as fault:
            reason = describe_errors(fault).splitlines()[0]
            raise ValueError(f"{path} has a damaged line near its end: {reason}") from None
        if "loss" in row and not step:
            loss, step = row["loss"], row["step"] + 1
        if not scores:
            named = {k.removeprefix("test/"): v for k, v in row.items() if k.startswith("test/")}
            named |= {
                k.replace("/", "_", 1): v for k, v in row.items() if k.startswith("validation/")
            }
            scores = {key: value for key, value in named.items() if is_score(key, value)}
    return {"step": step, "loss": loss} | scores


def is_score(key: str, value: Any) -> bool:
    """Returns whether a column of a run is a score, and not a fact of it."""
    return key not in NOT_SCORES and (value is None or type(value) in (int, float))
