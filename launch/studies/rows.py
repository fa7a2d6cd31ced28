"""Reads a study's folder as a table: what was varied, what was measured, what failed."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from pydantic import BaseModel, ConfigDict, ValidationError

from heron.launch.studies.ledger import ROWS, STUDY
from heron.launch.studies.study import Study, load_study
from heron.launch.studies.trials import TRIALS, plan
from heron.pipeline.config.errors import ConfigError, StudyError
from heron.pipeline.training.tracking import read_metrics

REPEATS = ["seed", "data.protocol.fold", "data.protocol.seed"]  # what a repeat differs in
BATCH, NEGATIVES, SHARE = "batch", "negatives", "batch / workers"
LESS = ("_s", "seconds", "_bytes", "loss", "bytes_per_step")  # of which less is better


class Row(BaseModel):
    """A trial that has ended, as a line of trials.jsonl: see docs/studies.md."""

    model_config = ConfigDict(strict=True, frozen=True)

    trial: str
    status: Literal["done", "failed", "stopped"]
    error: str | None = None
    values: dict[str, Any]
    command: str
    run: str
    result: dict[str, Any] | None = None
    measured: dict[str, Any] | None = None

    @property
    def workers(self) -> int:
        """Processes of the run."""
        return int(self.values.get("workers", (self.result or {}).get("world_size", 1)))

    def columns(self, folder: Path) -> dict[str, Any]:
        """Returns the trial's cells by column; a key that is varied goes before its like.

        Args:
            folder: of the study.
        """
        cells = dict(self.values)
        if (batch := _batch(folder / self.run)) is not None:
            cells |= {BATCH: batch, NEGATIVES: batch - 1, SHARE: batch / self.workers}
        for part in (self.measured or {}, self.result or {}):
            cells |= {k: v for k, v in part.items() if v is not None and k not in cells}
        return cells


@dataclass(frozen=True)
class Results:
    """What a study has left, finished or not.

    Attributes:
        folder: where it lies.
        study: what it was asked to find.
        rows: a trial each, in order of their numbers; of one that is there twice, the last.
        table: their cells, a line for each trial, indexed by its number. Columns are the keys that
            are varied, `batch` (rows of a step), `negatives` (HeroCon's |N_i|: the others of them),
            `batch / workers`, and the names of `measured` and of `result`; None: there is none.
        notes: what a reader has to know about the rows.
    """

    folder: Path
    study: Study
    rows: Sequence[Row]
    table: pd.DataFrame
    notes: Sequence[str] = ()

    @property
    def done(self) -> list[Row]:
        """The rows that ran to their end."""
        return [row for row in self.rows if row.status == "done"]

    @property
    def finished(self) -> pd.DataFrame:
        """The table of the rows that ran to their end."""
        return self.table.loc[[row.trial for row in self.done]]

    @property
    def planned(self) -> int:
        """How many trials there will be."""
        return len(plan(self.study))

    @property
    def under_way(self) -> list[str]:
        """Trials that have a folder and no row yet."""
        known = {(self.folder / row.run).resolve() for row in self.rows}
        folders = sorted(p for p in self.folder.glob(f"{TRIALS}/*") if p.is_dir())
        return [p.name for p in folders if p.resolve() not in known]

    @cached_property
    def keys(self) -> list[str]:
        """Keys that are varied, or could have been."""
        return list(dict.fromkeys(key for row in self.rows for key in row.values))

    @cached_property
    def several(self) -> list[str]:
        """Keys that have several values."""
        return [k for k in self.keys if self.table[k].dropna().map(plain).nunique() > 1]

    @property
    def varied(self) -> list[str]:
        """Keys that have several values, repeats not among them."""
        return [key for key in self.several if key not in REPEATS]

    def refuse_unknown(self, names: Sequence[str]) -> None:
        """Refuses a column that no trial has.

        Raises:
            StudyError: names the column, and those that there are.
        """
        known = [name for name in self.table if self.table[name].notna().any()]
        for name in names:
            if self.done and name not in known:
                raise StudyError(
                    f"{self.folder}: no trial has '{name}'; found {', '.join(known)}; expected one "
                    "of them, in measure.x and measure.y of the study, or by --x and --y"
                )


def read_results(folder: Path) -> Results:
    """Reads a study's folder, also while it is still running.

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
    by_trial: dict[str, Row] = {}
    notes = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        row = _row(line, f"{path}, line {number}")
        if row.trial in by_trial:
            notes.append(f"Trial {row.trial} is there twice; its last row counts (line {number}).")
        by_trial[row.trial] = row
    rows = [by_trial[name] for name in sorted(by_trial)]
    cells = [row.columns(folder) for row in rows]
    table = pd.DataFrame(cells, index=[row.trial for row in rows], dtype=object)
    return Results(folder, study, rows, table.where(table.notna(), None), notes)


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
    except (ConfigError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise StudyError(
            f"{path} cannot be read: {reason}; run the study again, in a folder of its own"
        ) from None


def _row(line: bytes, where: str) -> Row:
    try:
        return Row.model_validate_json(line)
    except ValidationError as error:
        fault = error.errors()[0]
        missing, name = fault["type"] == "missing", ".".join(map(str, fault["loc"]))
        value = f"{name} is {'missing' if missing else repr(fault['input'])}: " if name else ""
        raise StudyError(
            f"{where} is damaged: {value}{fault['msg'][0].lower()}{fault['msg'][1:]}; take the "
            "line out, and run the study again: it runs what has no row"
        ) from None


def _batch(run: Path) -> int | None:
    """Returns the rows of the global batch as a step of the run counted them, if it left any."""
    for line in read_metrics(run / "metrics.jsonl"):
        if "samples_per_s" in line and "seconds" in line:
            return round(float(line["samples_per_s"]) * float(line["seconds"]))
    return None


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
    """Whether a column is, by its name, a time, memory, bytes, a loss or a rate.

    To these a law may be fitted; a score has an upper bound, which no power and no polynomial has.
    """
    return name.endswith((*LESS, "_per_s"))


def plain(value: Any) -> str:
    """Returns a value as text, as it is typed on the command line."""
    return json.dumps(value) if isinstance(value, list | dict | bool) else str(value)
