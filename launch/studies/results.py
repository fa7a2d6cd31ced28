"""Reads a study's folder as one table: what was varied, what was measured, what failed."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from heron.launch.studies.ledger import AGAIN, ROWS, STUDY, Row, read_rows, refuse_other_run
from heron.launch.studies.study import Study, load_study
from heron.launch.studies.trials import TRIALS, plan
from heron.pipeline.config.errors import ConfigError, StudyError
from heron.pipeline.training.tracking import read_metrics
from heron.shards.errors import shown

REPEATS = ["seed", "data.protocol.fold", "data.protocol.seed"]  # what a repeat differs in
BATCH, NEGATIVES, SHARE = "batch", "negatives", "batch / workers"
OF_ROWS = ["status", "error", "command", "run"]  # columns that are neither varied nor measured
LESS = ("_s", "seconds", "_bytes", "loss", "bytes_per_step")  # of which less is better


def _cells(row: Row, folder: Path) -> dict[str, Any]:
    """Returns a trial's cells by column; of two of one name the first counts."""
    result, measured = row.result or {}, row.measured or {}
    workers = row.values.get("workers", result.get("world_size", 1))
    if type(workers) is not int or workers < 1:
        raise StudyError(f"{folder}: trial {row.trial} has {shown(workers)} workers; {AGAIN}")
    more: dict[str, Any] = {"workers": workers}
    for line in read_metrics(folder / row.run / "metrics.jsonl"):
        counted = (line.get("samples_per_s") or 0.0) * (line.get("seconds") or 0.0)
        if counted and math.isfinite(counted):  # as the step counted them
            rows = round(counted)
            more |= {BATCH: rows, NEGATIVES: rows - 1, SHARE: rows / workers}
            break
    cells = {"status": row.status, **row.values}
    for part in (more, measured, result):
        cells |= {k: v for k, v in part.items() if v is not None and k not in cells}
    return cells | {"error": row.error, "command": row.command, "run": row.run}


@dataclass(frozen=True)
class Results:
    """What a study has left, finished or not.

    Attributes:
        folder: where it lies.
        study: what it was asked to find.
        table: a line for each trial that has ended, indexed by its number; None: there is none.
            Columns are `status`, the keys that are varied, `batch` (rows of a step), `negatives`
            (HeroCon's |N_i|: the others of them), `batch / workers`, the names of `measured` and of
            `result`, `error`, `command` and `run`.
        keys: columns that are varied, or could have been.
        notes: what a reader has to know about the table.
    """

    folder: Path
    study: Study
    table: pd.DataFrame
    keys: Sequence[str]
    notes: Sequence[str] = ()

    @cached_property
    def done(self) -> pd.DataFrame:
        """The trials that ran to their end."""
        return self.table[self.table["status"] == "done"]

    @cached_property
    def several(self) -> list[str]:
        """Keys that have several values."""
        return [k for k in self.keys if self.table[k].dropna().map(plain).nunique() > 1]

    @property
    def varied(self) -> list[str]:
        """Keys that have several values, repeats not among them."""
        return [key for key in self.several if key not in REPEATS]

    @property
    def progress(self) -> str:
        """How far the study is, as a sentence."""
        counts, planned = self.table["status"].value_counts(), len(plan(self.study))
        text = f"{len(self.done)} trial{'' if len(self.done) == 1 else 's'} done"
        text += "".join(f", {counts[s]} {s}" for s in ("failed", "stopped") if s in counts)
        runs = {(self.folder / run).resolve() for run in self.table["run"]}
        folders = sorted(p for p in self.folder.glob(f"{TRIALS}/*") if p.is_dir())
        under_way = [p.name for p in folders if p.resolve() not in runs]
        if planned > len(self.table) or under_way:
            text = f"The study is not finished: {text}"
            text += f" of {planned}" if planned > len(self.table) else ""
            text += f"; without a row yet: {', '.join(under_way)}" if under_way else ""
        return f"{text}."

    def refuse_unknown(self, names: Sequence[str]) -> None:
        """Raises a StudyError that names a column that no trial has, and those that there are."""
        known = [*self.table.drop(columns=OF_ROWS).dropna(axis=1, how="all")]
        for name in names:
            if len(self.done) and name not in known:
                raise StudyError(
                    f"{self.folder}: no trial has '{name}'; found {', '.join(known)}; expected one "
                    "of them, in measure.x and measure.y of the study, or by --x and --y"
                )

    def least(self, name: str) -> bool:
        """Whether the least of a column is best, by the study or else by the column's name."""
        measure = self.study.measure
        return measure.mode == "min" if name == measure.score else less_is_better(name)


def read_results(folder: Path) -> Results:
    """Reads a study's folder, also while it is still running.

    Raises a StudyError where the folder is no study, a file is missing, or a line is damaged.
    """
    study = _study(folder)
    path = folder / ROWS
    if not path.exists():
        raise StudyError(
            f"{path}: no such file; expected a line a finished trial; no trial has ended yet, or "
            "the file was lost: run the study again, which keeps what is done"
        )
    by_trial: dict[str, Row] = {}
    notes = []
    for number, row in read_rows(path):
        refuse_other_run(row, folder, f"{path}, line {number}")
        if row.fingerprint is None:
            notes.append(f"Trial {row.trial} has no fingerprint: an earlier edition wrote its row.")
        if row.trial in by_trial:
            notes.append(f"Trial {row.trial} is there twice; its last row counts (line {number}).")
        by_trial[row.trial] = row
    names = sorted(by_trial)
    cells = [_cells(by_trial[name], folder) for name in names]
    bare = None if cells else OF_ROWS
    table = pd.DataFrame(cells, index=names, columns=bare, dtype=object)
    keys = list(dict.fromkeys(key for name in names for key in by_trial[name].values))
    return Results(folder, study, table.where(table.notna(), None), keys, notes)


def _study(folder: Path) -> Study:
    path = folder / STUDY
    if not path.is_file():
        files = sorted(p.name for p in folder.glob("*")) if folder.is_dir() else []
        raise StudyError(
            f"{folder} is no study: it has no {STUDY}; found {', '.join(files[:5]) or 'nothing'}; "
            "expected the folder that `heron study ... --out` wrote"
        )
    try:
        return load_study(path)
    except ConfigError as error:
        reason = " ".join(str(error).split())
        raise StudyError(
            f"{path} cannot be read: {reason}; run the study again, in a folder of its own"
        ) from None


def numbers(table: pd.DataFrame, name: str) -> pd.Series:
    """Returns a column as floats, NaN where a trial has no finite number."""
    column = table[name] if name in table else pd.Series(math.nan, table.index)
    return column.map(lambda v: v if is_number(v) else math.nan).astype(float)


def is_number(value: Any) -> bool:
    """Whether a cell is a finite number; a truth is none."""
    return isinstance(value, int | float) and type(value) is not bool and math.isfinite(value)


def less_is_better(name: str) -> bool:
    """Whether the best of a column is the least: of times, memory, bytes and losses."""
    return name.endswith(LESS) and not name.endswith("_per_s")


def is_cost(name: str) -> bool:
    """Whether a column is, by its name, a time, memory, bytes, a loss or a rate."""
    # a law is fitted to these alone: a score has an upper bound, which no law has
    return name.endswith((*LESS, "_per_s"))


def plain(value: Any) -> str:
    """Returns a value as text, as it is typed on the command line."""
    return json.dumps(value) if isinstance(value, list | dict | bool) else str(value)
