"""What a study's folder says: the study, and a row for each trial that has ended."""

import json
import os
import statistics
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from heron.launch.studies.study import Pbt, Study, dump_study
from heron.launch.studies.trials import Trial
from heron.pipeline.config.errors import ConfigError, StudyError
from heron.pipeline.config.sections import Plain, read_tree
from heron.pipeline.training.run_lock import LOCK, try_lock
from heron.pipeline.training.tracking import read_metrics, read_result
from heron.shards.artefact import Fingerprint, Sha256, fingerprint, in_words, parse_json, sha256
from heron.shards.atomic import atomic_write

STUDY = "study.yaml"
ROWS = "trials.jsonl"
AGAIN = "take the line out, and run the study again: it runs what has no row"
WARM = 3  # first steps, which are slower than the others
FREE = ("concurrent", "retries")  # may change between two starts of a study


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
    fingerprint: Fingerprint | None = None  # None: of the edition before there were any


def read_rows(path: Path, resumed: bool = False) -> list[tuple[int, Row]]:
    """Returns the rows of a study with the numbers of their lines; none without the file.

    A study that is `resumed` leaves out a last line that was cut short. Raises a StudyError where a
    line is damaged, or not what was written.
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
            raise StudyError(f"{where} is damaged: {in_words(error)}; {AGAIN}") from None
        if row.fingerprint not in (None, made := fingerprint(tree)):
            raise StudyError(
                f"{where} is damaged: trial {row.trial} has fingerprint {row.fingerprint}, what "
                f"the line says has {made}; {AGAIN}"
            )
        rows.append((number, row))
    return rows


def refuse_other_run(row: Row, folder: Path, where: str) -> None:
    """Raises a StudyError where the run's result.json, if it is there, is not that of the row."""
    file = folder / row.run / "result.json"
    if row.result_sha256 and file.is_file() and (found := sha256(file)) != row.result_sha256:
        raise StudyError(
            f"{where}: trial {row.trial} tells of a result.json of sha256 "
            f"{row.result_sha256[:12]}…, and {file} has {found[:12]}…; expected the row's run: "
            f"bring it back, or {AGAIN}"
        )


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Refuses, by a ConfigError, that two drivers work in a study's folder; see docs/studies.md."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / LOCK).open("w") as lock:
        if not try_lock(lock, out, "one heron study works in it"):
            raise ConfigError(
                f"{out} is being worked in by another heron study; wait for its end, or choose "
                "another --out"
            )
        yield


class Ledger:
    """The rows of the trials of a study that have ended, by name, in its folder `out`."""

    def __init__(self, study: Study, out: Path) -> None:
        """Reads what a folder holds of a study; nothing is written before `begin`.

        Raises a ConfigError where the folder holds another study.
        """
        self.study, self.out = study, out
        if (out / STUDY).exists():
            kept, asked = read_tree(out / STUDY, "study", "base"), study.model_dump(mode="json")
            differing = [
                f"{key} is {kept.get(key)}, not {asked.get(key)}"
                for key in dict.fromkeys([*asked, *kept])
                if kept.get(key) != asked.get(key) and key not in FREE
            ]
            if differing:
                raise ConfigError(
                    f"{out} holds another study: {'; '.join(differing)}; choose another --out, or "
                    "remove it"
                )
        self.begun: set[str] = set()  # names of the trials that were started
        self.rows: dict[str, dict[str, Any]] = {}
        for _, row in read_rows(out / ROWS, resumed=True):
            self.rows[row.trial] = row.model_dump(exclude_unset=True)

    def begin(self) -> None:
        """Writes the study into its folder: trials begin, nothing refuses them any more."""
        self.out.mkdir(parents=True, exist_ok=True)
        with atomic_write(self.out / STUDY) as stream:
            stream.write(dump_study(self.study).encode())
        for row in self.rows.values():  # without one that was cut short; each was whole when read
            row["fingerprint"] = fingerprint(row)
        write_rows(self.out / ROWS, self.rows.values())

    def append(
        self,
        trial: Trial,
        status: str,
        error: str | None = None,
        rung: int | None = None,
    ) -> dict[str, Any]:
        """Adds the row of a trial that has ended, and returns it: see docs/studies.md.

        The trial has the values that it ended with; `rung` is after how many steps it was stopped
        early.
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
        if isinstance(self.study.search, Pbt) and not failed:
            row["lineage"] = trial.lineage()
        row["fingerprint"] = fingerprint(row)
        with (self.out / ROWS).open("ab", buffering=0) as stream:  # one write: all of it, or none
            stream.write((json.dumps(row) + "\n").encode())
            os.fsync(stream.fileno())
        self.rows[trial.name] = row
        return row

    def forget_failed(self) -> None:
        """Takes the failed trials' rows out, so that they run again once the study begins."""
        self.rows = {name: row for name, row in self.rows.items() if row["status"] != "failed"}


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes the lines of a JSONL file, all or none of them; null where a number is not finite."""
    finite = (json.loads(json.dumps(row), parse_constant=lambda _: None) for row in rows)
    with atomic_write(path) as stream:
        stream.writelines((json.dumps(row) + "\n").encode() for row in finite)


def measure(run: Path, result: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Returns medians over a run's steps without the first few; None where there are no steps.

    They are `step_s`, `data_wait_s` in seconds; `samples_per_s` over all processes;
    `peak_memory_bytes` of the main process; `counted_steps`, how many they are.
    """
    steps = [row for row in read_metrics(run / "metrics.jsonl") if "loss" in row]
    counted = steps[min(WARM, len(steps) - 1) :] if steps else []
    if not counted:
        return None
    names = {"seconds": "step_s", "samples_per_s": "samples_per_s", "data_wait_s": "data_wait_s"}
    found: dict[str, Any] = {}
    for key, ours in names.items():
        values = [row[key] for row in counted if row.get(key) is not None]
        found[ours] = statistics.median(values) if values else None
    found["peak_memory_bytes"] = (result or {}).get("peak_memory_bytes")
    return found | {"counted_steps": len(counted)}
