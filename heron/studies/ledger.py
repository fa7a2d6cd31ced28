"""A study's folder on disk: the study, and a row for each trial that has ended."""

import json
import os
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from heron.base.artefact import (
    Fingerprint,
    Sha256,
    describe_errors,
    fingerprint,
    parse_json,
    sha256,
)
from heron.base.atomic import aside_name, atomic_write, naming
from heron.base.errors import ConfigError, StudyError
from heron.base.sections import Plain, check, read_tree
from heron.base.shipped import find_config
from heron.distributed.agreement import differences
from heron.experiment.config import dump_config, load_config
from heron.studies.study import Study, dump_study
from heron.studies.trials import Trial
from heron.training.tracking import read_metrics, read_result

STUDY, BASE = "study.yaml", "base.yaml"  # the latter: the experiment that trials began with
ROWS = "trials.jsonl"
REMEDY = "remove the line and run the study again: it runs the trials without a line"
WARM_UP_STEPS = 3  # are slower than the others, and not measured
MAY_CHANGE = ("concurrent", "retries")  # between two starts of a study


class Row(BaseModel):
    """A trial that has ended, as a line of trials.jsonl: see docs/studies.md."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    trial: str
    status: Literal["done", "failed", "stopped"]
    error: str | None = None
    values: Plain
    command: str
    run: Annotated[str, Field(pattern=r"^trials/\w+$")]  # within the study's folder
    result: Plain | None = None
    result_sha256: Sha256 | None = None
    measured: Plain | None = None
    lineage: list[Plain] | None = None
    fingerprint: Fingerprint


def read_rows(path: Path, resumed: bool = False) -> list[tuple[int, Row]]:
    """Returns the rows of a study with their line numbers; none if the file does not exist.

    With `resumed`, a truncated last line is left out. Raises a StudyError if a line is damaged or
    was changed.
    """
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            tree = parse_json(line)
            row = Row.model_validate(tree)
        except ValueError as error:
            if resumed and number == len(lines):
                break
            raise StudyError(f"{where} is damaged: {describe_errors(error)}; {REMEDY}") from None
        if row.fingerprint != (expected := fingerprint(tree)):
            raise StudyError(
                f"{where} is damaged: the fingerprint of trial {row.trial} is {row.fingerprint}, "
                f"but the line's values give {expected}; {REMEDY}"
            )
        rows.append((number, row))
    return rows


def refuse_other_run(row: Row, folder: Path, where: str) -> None:
    """Raises a StudyError if the run's result.json exists and is not the row's."""
    file = folder / row.run / "result.json"
    if row.result_sha256 and file.is_file() and (digest := sha256(file)) != row.result_sha256:
        raise StudyError(
            f"{where}: the result.json of trial {row.trial} had the sha256 "
            f"{row.result_sha256[:12]}…, but that of {file} is {digest[:12]}…; restore the run, "
            f"or {REMEDY}"
        )


class Ledger:
    """The rows of the trials of a study that have ended, by name, in its folder `out`."""

    def __init__(self, study: Study, out: Path) -> None:
        """Reads the rows in the folder; ConfigError if it holds another study. Writes nothing."""
        self.study, self.out = study, out
        if (out / STUDY).exists():
            tree = study.model_dump(mode="json")
            saved = check(Study, read_tree(out / STUDY, "study", "base"), f"study {out / STUDY}")
            before = saved.model_dump(mode="json")
            differing = [
                f"{key} is {before[key]}, not {tree[key]}"
                for key in tree
                if before[key] != tree[key] and key not in MAY_CHANGE
            ]
            if differing:
                raise ConfigError(
                    f"{out} has another study: {'; '.join(differing)}; choose another --out, or "
                    f"add --overwrite, which moves it to {aside_name(out)}"
                )
        self.started: set[str] = set()  # names of the trials that were started
        self.rows: dict[str, dict[str, Any]] = {}
        for _, row in read_rows(out / ROWS, resumed=True):
            self.rows[row.trial] = row.model_dump(exclude_unset=True)

    def begin(self) -> None:
        """Writes the study and its rows, once all checks have passed and trials may start.

        Raises a ConfigError where the experiment's file is no longer the one that trials began
        with: rows of two experiments would be compared.
        """
        base = load_config(find_config(self.study.base), ["run.dir=."])  # each trial sets its own
        if (self.out / BASE).exists():
            began = load_config(self.out / BASE).model_dump(mode="json", exclude={"run"})
            if changes := differences(began, base.model_dump(mode="json", exclude={"run"})):
                raise ConfigError(
                    f"{self.study.base} has changed since the study in {self.out} began: "
                    f"{'; '.join(changes)}; restore it from {self.out / BASE}, choose another "
                    f"--out, or add --overwrite, which moves the study to {aside_name(self.out)}"
                )
        self.out.mkdir(parents=True, exist_ok=True)
        with atomic_write(self.out / BASE) as stream:
            stream.write(dump_config(base).encode())
        with atomic_write(self.out / STUDY) as stream:
            stream.write(dump_study(self.study).encode())
        write_rows(self.out / ROWS, self.rows.values())  # a truncated one was dropped

    def append(
        self,
        trial: Trial,
        status: str,
        error: str | None = None,
        rung: int | None = None,
    ) -> dict[str, Any]:
        """Adds the row of a trial that has ended, and returns it: see docs/studies.md.

        The trial has its final values; `rung` is the step at which it was stopped early.
        """
        path, failed = trial.run / "result.json", status == "failed"
        result = read_result(path) if path.exists() and not failed else None
        launched = {"workers": trial.workers, "strategy": trial.strategy}
        row: dict[str, Any] = {
            "trial": trial.name,
            "status": status,
            "error": error,
            "values": launched | {"seed": trial.config().seed} | trial.values,
            "command": trial.command(rung),
            "run": str(trial.run.relative_to(self.out)),
            "result": result,
            "result_sha256": None if result is None else sha256(path),
            "measured": None if failed else measure(trial.run, result),
        }
        if self.study.search.scheduler == "pbt" and not failed:
            row["lineage"] = trial.lineage()
        row["fingerprint"] = fingerprint(row)
        path = self.out / ROWS
        with naming(path, path), path.open("ab", buffering=0) as stream:  # one write is atomic
            stream.write((json.dumps(row) + "\n").encode())
            os.fsync(stream.fileno())
        self.rows[trial.name] = row
        return row

    def forget_failed(self) -> None:
        """Removes the rows of failed trials, so that they run again."""
        self.rows = {name: row for name, row in self.rows.items() if row["status"] != "failed"}


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes a JSONL file atomically; a number that is not finite becomes null."""
    finite = (json.loads(json.dumps(row), parse_constant=lambda _: None) for row in rows)
    with atomic_write(path) as stream:
        stream.writelines((json.dumps(row) + "\n").encode() for row in finite)


def measure(run: Path, result: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Returns medians over a run's steps without the first few; None if it has no steps.

    They are `step_s`, `data_wait_s` in seconds; `samples_per_s` over all processes. Beside them are
    `peak_memory_bytes` of the main process, and `counted_steps`, the number of steps.
    """
    steps = [row for row in read_metrics(run / "metrics.jsonl") if "loss" in row]
    counted = steps[min(WARM_UP_STEPS, len(steps) - 1) :] if steps else []
    if not counted:
        return None
    names = {"seconds": "step_s", "samples_per_s": "samples_per_s", "data_wait_s": "data_wait_s"}
    medians: dict[str, Any] = {}
    for key, name in names.items():
        values = [row[key] for row in counted if row.get(key) is not None]
        medians[name] = statistics.median(values) if values else None
    medians["peak_memory_bytes"] = (result or {}).get("peak_memory_bytes")
    return medians | {"counted_steps": len(counted)}
