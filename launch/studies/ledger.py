"""What a study's folder says: the study, and a row for each trial that has ended."""

import fcntl
import json
import os
import statistics
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from heron.launch.studies.study import Study, dump_study
from heron.launch.studies.trials import Trial
from heron.pipeline.config.errors import ConfigError
from heron.pipeline.config.sections import read_tree
from heron.pipeline.training.run_lock import NO_LOCKS
from heron.pipeline.training.tracking import read_metrics
from heron.shards.atomic import atomic_write

STUDY, ROWS = "study.yaml", "trials.jsonl"
WARM = 3  # first steps, which are slower than the others
LOCK = ".lock"
FREE = ("concurrent", "retries")  # may change between two starts of a study


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Refuses, by a ConfigError, that two drivers work in a study's folder; see docs/studies.md."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{out} is being worked in by another heron study; wait for its end, or choose "
                "another --out"
            ) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            print(f"{out} has no locks ({error}): see to it that one heron study works in it")
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
        self.rows = {row["trial"]: row for row in read_metrics(out / ROWS)}

    def begin(self) -> None:
        """Writes the study into its folder: trials begin, nothing refuses them any more."""
        self.out.mkdir(parents=True, exist_ok=True)
        with atomic_write(self.out / STUDY) as stream:
            stream.write(dump_study(self.study).encode())
        write_rows(self.out / ROWS, self.rows.values())  # without a row that was cut short

    def append(
        self,
        trial: Trial,
        status: str,
        error: str | None = None,
        rung: int | None = None,
        **more: Any,
    ) -> dict[str, Any]:
        """Adds the row of a trial that has ended, and returns it: see docs/studies.md.

        Args:
            trial: with the values that it ended with.
            status: done, failed, or stopped by the scheduler.
            error: why it failed.
            rung: steps after which it was stopped early.
            more: further keys of the row.
        """
        path, failed = trial.run / "result.json", status == "failed"
        result = json.loads(path.read_text()) if path.exists() and not failed else None
        launched = {"workers": trial.workers, "strategy": trial.strategy}
        row = {
            "trial": trial.name,
            "status": status,
            "error": error,
            "values": launched | {"seed": trial.config().seed} | trial.values,
            "command": trial.command(rung),
            "run": str(trial.run.relative_to(self.out)),
            "result": result,
            "measured": None if failed else measure(trial.run, result),
            **more,
        }
        with (self.out / ROWS).open("ab", buffering=0) as stream:  # one write: all of it, or none
            stream.write((json.dumps(row) + "\n").encode())
            os.fsync(stream.fileno())
        self.rows[trial.name] = row
        return row

    def forget_failed(self) -> None:
        """Takes the failed trials' rows out, so that they run again once the study begins."""
        self.rows = {name: row for name, row in self.rows.items() if row["status"] != "failed"}


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes the lines of a JSONL file, all or none of them."""
    with atomic_write(path) as stream:
        stream.writelines((json.dumps(row) + "\n").encode() for row in rows)


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
    return {
        **{ours: statistics.median(row[key] for row in counted) for key, ours in names.items()},
        "peak_memory_bytes": (result or {}).get("peak_memory_bytes"),
        "counted_steps": len(counted),
    }
