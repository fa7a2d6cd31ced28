"""A study's folder as rows: what was varied, what was measured, what failed."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from launch.studies.ledger import ROWS, STUDY
from launch.studies.study import Study, load_study
from launch.studies.trials import TRIALS, plan
from pipeline.errors import ConfigError, StudyError
from pipeline.tracking import read_metrics

STATUSES = ("done", "failed", "stopped")
REPEATS = ("seed", "data.protocol.fold", "data.protocol.seed")  # what a repeat differs in
BATCH, NEGATIVES, SHARE = "batch", "negatives", "batch / workers"
LESS = ("_s", "seconds", "_bytes", "loss", "bytes_per_step")  # of which less is better


@dataclass(frozen=True)
class Row:
    """One trial.

    Attributes:
        trial: its number, as text.
        status: `done`, `failed`, or `stopped` by a scheduler before its end.
        error: of a failed one.
        values: what was varied, by dotted key.
        command: runs the same again.
        run: the folder of its run.
        result: what the run's result.json holds, or nothing.
        measured: medians over its steps, or nothing.
    """

    trial: str
    status: str
    error: str | None
    values: Mapping[str, Any]
    command: str
    run: Path
    result: Mapping[str, Any]
    measured: Mapping[str, Any]

    @cached_property
    def batch(self) -> int | None:
        """Rows of the global batch, as a step of the run counted them; None: it left no step."""
        for line in read_metrics(self.run / "metrics.jsonl"):
            if "samples_per_s" in line and "seconds" in line:
                return round(float(line["samples_per_s"]) * float(line["seconds"]))
        return None

    @property
    def workers(self) -> int:
        """Processes of the run."""
        found = self.values.get("workers", self.result.get("world_size", 1))
        return int(found)

    def get(self, name: str) -> Any:
        """A column's value, None where the row has none.

        Args:
            name: a key that is varied, a name of `measured` or of `result`, or one of `batch`
                (rows of a step), `negatives` (HeroCon's |N_i|: the others of them) and
                `batch / workers`.
        """
        if name in self.values:
            return self.values[name]
        if name in (BATCH, NEGATIVES, SHARE):
            if self.batch is None:
                return None
            share = self.batch / self.workers
            return {BATCH: self.batch, NEGATIVES: self.batch - 1, SHARE: share}[name]
        found = self.measured.get(name)
        return self.result.get(name) if found is None else found

    def number(self, name: str) -> float:
        """A column's value as a number, NaN where there is none."""
        found = self.get(name)
        return float(found) if isinstance(found, int | float) else math.nan


@dataclass(frozen=True)
class Results:
    """What a study has left, finished or not.

    Attributes:
        folder: where it lies.
        study: what it was asked to find.
        rows: a trial each, in order of their numbers; of one that is there twice, the last.
        notes: what a reader has to know about the rows.
    """

    folder: Path
    study: Study
    rows: Sequence[Row]
    notes: Sequence[str] = field(default_factory=list)

    @property
    def done(self) -> list[Row]:
        """The rows that ran to their end."""
        return [row for row in self.rows if row.status == "done"]

    @property
    def planned(self) -> int:
        """How many trials there will be."""
        return len(plan(self.study))

    @property
    def under_way(self) -> list[str]:
        """Trials that have a folder and no row yet."""
        known = {row.run.resolve() for row in self.rows}
        folders = sorted(p for p in self.folder.glob(f"{TRIALS}/*") if p.is_dir())
        return [p.name for p in folders if p.resolve() not in known]

    @cached_property
    def varied(self) -> list[str]:
        """Keys that have several values, repeats not among them."""
        return [key for key in self.keys if key not in REPEATS and len(self.distinct(key)) > 1]

    @cached_property
    def keys(self) -> list[str]:
        """Keys that are varied, or could have been."""
        return list(dict.fromkeys(key for row in self.rows for key in row.values))

    def distinct(self, key: str) -> list[Any]:
        """The values of a column, each once, in order of the rows."""
        found = {plain(row.get(key)): row.get(key) for row in self.rows}
        return [value for value in found.values() if value is not None]

    def refuse_unknown(self, names: Sequence[str]) -> None:
        """Say so where no row has a column.

        Raises:
            StudyError: names the column, and those that there are.
        """
        known = [BATCH, NEGATIVES, SHARE, *self.keys]
        known += [k for row in self.rows for k in (*row.measured, *row.result)]
        for name in names:
            if self.done and all(row.get(name) is None for row in self.rows):
                raise StudyError(
                    f"{self.folder}: no trial has '{name}'; found "
                    f"{', '.join(dict.fromkeys(known))}; expected one of them, in measure.x and "
                    "measure.y of the study, or by --x and --y"
                )


def read_results(folder: Path) -> Results:
    """Read a study's folder, also while it is still running.

    Raises:
        StudyError: the folder is no study, a file is missing, or a line is damaged.
    """
    study = _study(folder)
    path = folder / ROWS
    if not path.exists():
        raise StudyError(
            f"{path}: no such file; expected a line a finished trial; no trial has ended yet, or "
            "the file was lost: run the study again, which keeps what is done"
        )
    rows: dict[str, Row] = {}
    notes = []
    for number, row in _lines(path):
        if row.trial in rows:
            notes.append(f"Trial {row.trial} is there twice; its last row counts (line {number}).")
        rows[row.trial] = row
    return Results(folder, study, [rows[name] for name in sorted(rows)], notes)


def _study(folder: Path) -> Study:
    path = folder / STUDY
    if not path.is_file():
        found = sorted(p.name for p in folder.glob("*")) if folder.is_dir() else []
        raise StudyError(
            f"{folder} is no study: it has no {STUDY}; found {', '.join(found[:5]) or 'nothing'}; "
            "expected the folder that `heron study ... --out` wrote"
        )
    try:
        return load_study(path)
    except (ConfigError, UnicodeDecodeError) as error:
        said = " ".join(str(error).split())
        raise StudyError(
            f"{path} cannot be read: {said}; run the study again, in a folder of its own"
        ) from None


def _lines(path: Path) -> Iterator[tuple[int, Row]]:
    remedy = "take the line out, and run the study again: it runs what has no row"
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            tree = json.loads(line)
        except ValueError as error:
            raise StudyError(f"{where} is damaged ({error}); expected JSON; {remedy}") from None
        if not isinstance(tree, dict):
            raise StudyError(f"{where} holds {type(tree).__name__}; expected an object; {remedy}")
        kinds = {"trial": str, "status": str, "values": dict, "command": str, "run": str}
        for name, kind in kinds.items():
            if not isinstance(tree.get(name), kind):
                raise StudyError(
                    f"{where}: '{name}' is {tree.get(name)!r}; expected {kind.__name__}; {remedy}"
                )
        for name in ("result", "measured"):
            if not isinstance(tree.get(name), dict | None):
                raise StudyError(
                    f"{where}: '{name}' is {tree[name]!r}; expected an object or null; {remedy}"
                )
        if tree["status"] not in STATUSES:
            expected = ", ".join(STATUSES)
            raise StudyError(
                f"{where}: 'status' is {tree['status']!r}; expected one of {expected}; {remedy}"
            )
        yield (
            number,
            Row(
                tree["trial"],
                tree["status"],
                tree.get("error"),
                tree["values"],
                tree["command"],
                path.parent / tree["run"],
                tree.get("result") or {},
                tree.get("measured") or {},
            ),
        )


def less_is_better(name: str) -> bool:
    """Whether the best of a column is the least: of times, memory, bytes and losses."""
    return name.endswith(LESS) and not name.endswith("_per_s")


def is_cost(name: str) -> bool:
    """Whether a column is, by its name, a time, memory, bytes, a loss or a rate.

    To these a law may be fitted; a score has an upper bound, which no power and no polynomial has.
    """
    return name.endswith((*LESS, "_per_s"))


def plain(value: Any) -> str:
    """A value as text, as it is typed on the command line."""
    return json.dumps(value) if isinstance(value, list | dict | bool) else str(value)
