"""A study's folder as one table, and what is read off it: curves, grids, the best setting."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from heron.launch.repeats import describe
from heron.launch.studies.ledger import AGAIN, ROWS, STUDY, Row, read_rows, refuse_other_run
from heron.launch.studies.study import Study, load_study
from heron.launch.studies.text import NEGATIVES, is_number, mean_std, plain, short
from heron.launch.studies.trials import TRIALS, plan
from heron.pipeline.config.errors import ConfigError, StudyError
from heron.pipeline.training.tracking import read_metrics
from heron.shards.errors import shown

REPEATS = ["seed", "data.protocol.fold", "data.protocol.seed"]  # what a repeat differs in
BATCH, SHARE = "batch", "batch / workers"
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

    The table has a line for each trial that has ended, indexed by its number; None: there is none.
    Columns are `status`, the keys that are varied, `batch` (rows of a step), `negatives` (HeroCon's
    |N_i|: the others of them), `batch / workers`, the names of `measured` and of `result`, `error`,
    `command` and `run`.
    """

    folder: Path
    study: Study
    table: pd.DataFrame
    keys: Sequence[str]  # columns that are varied, or could have been
    notes: Sequence[str] = ()  # what a reader has to know about the table

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
        folders = sorted(p for p in self.folder.glob(f"{TRIALS}/*") if p.is_dir())
        under_way = [p.name for p in folders if f"{TRIALS}/{p.name}" not in {*self.table["run"]}]
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


def less_is_better(name: str) -> bool:
    """Whether the best of a column is the least: of times, memory, bytes and losses."""
    return name.endswith(LESS) and not name.endswith("_per_s")


def is_cost(name: str) -> bool:
    """Whether a column is, by its name, a time, memory, bytes, a loss or a rate."""
    # a law is fitted to these alone: a score has an upper bound, which no law has
    return name.endswith(LESS)  # rates do: `_per_s` ends with `_s`


def points(curves: pd.DataFrame) -> pd.DataFrame:
    """Returns `mean`, `std` (n - 1 below; NaN of one) and `count` by columns `curve` and `x`."""
    repeats = curves.groupby(["curve", "x"], sort=False)["y"]
    return pd.DataFrame(describe(repeats)).reset_index()


def natural_x(results: Results, x: str) -> str:
    """Returns |N_i| in place of the rows of a stream, where only those vary; else x."""
    table = results.done
    streams = x in ("data.batch.unlabelled", "data.batch.labelled")
    if not (streams and len(table) and BATCH in table and table[BATCH].notna().all()):
        return x
    return x if dividers(results, table, x) else NEGATIVES


def follows(table: pd.DataFrame, known: Sequence[str], key: str) -> bool:
    """Whether the value of a key follows from those of others: it tells no two trials apart."""
    text = table[[*dict.fromkeys([*known, key])]].map(plain)
    return bool((text.groupby(list(known))[key].nunique() == 1).all())


def dividers(results: Results, table: pd.DataFrame, x: str | None = None) -> list[str]:
    """Returns the keys that tell trials apart, beside x: the study's group, then what it leaves."""
    group = results.study.measure.group
    keys = [group] if group is not None and group in results.varied and group != x else []
    for key in results.varied:
        known = keys if x is None else [x, *keys]
        if key not in known and not (known and follows(table, known, key)):
            keys.append(key)
    return keys


def curves(results: Results, x: str, y: str) -> pd.DataFrame:
    """Returns every curve of y over x, of the trials that are done: a line for each repeat.

    Columns are `curve`, what tells it from the others (empty where it is the only one), `x` and
    `y`; where every x is a number, lines are in order of x.
    """
    table = results.done[results.done[x].notna()]
    at = table[x].map(lambda value: float(value) if is_number(value) else plain(value))
    return _repeats(_names(table, dividers(results, table, x)), at, numbers(table, y))


def worker_curves(results: Results, y: str) -> pd.DataFrame:
    """Returns curves of y over workers at a fixed global batch, and at a fixed share of each.

    Of trials that differ in nothing else, those of one global batch make a curve, and those of as
    many rows a worker; a curve has two numbers of workers or more. See `curves` for the columns.
    """
    if BATCH not in results.done:
        return pd.DataFrame(columns=["curve", "x", "y"])
    table = results.done[results.done[BATCH].notna()]
    others = [k for k in results.varied if k != "workers" and not k.startswith("data.batch.")]
    rest = _names(table, others).map(lambda name: f", {name}" if name else "")
    scaled = []
    for column, text in ((BATCH, "{:,} rows in all"), (SHARE, "{:,.0f} rows a worker")):
        names = table[column].map(text.format) + rest
        scaled.append(_repeats(names, table["workers"], numbers(table, y)))
    both = pd.concat(scaled, ignore_index=True)
    return both[both.groupby("curve")["x"].transform("nunique") > 1]


def grid(results: Results, y: str) -> pd.DataFrame | None:
    """Returns the mean of y over the two keys that are varied (NaN of none); None if no grid.

    Where no trial that is done has a y there is none either.
    """
    table = results.table
    keys = [k for k in results.varied if table[k][table[k].map(is_number)].nunique() > 1]
    if len(keys) != 2 or len(results.varied) != 2:
        return None
    across, down = keys
    table = table[table[keys].map(is_number).all(axis=1)]
    columns, lines = (sorted(table[key].unique()) for key in keys)
    if 2 * len(table[keys].drop_duplicates()) < len(columns) * len(lines):
        return None
    done = table[table["status"] == "done"]
    means = numbers(done, y).groupby([done[down], done[across]]).mean().unstack()
    if means.isna().all(axis=None):
        return None
    return means.reindex(index=lines, columns=columns).rename_axis(index=down, columns=across)


class Best(NamedTuple):
    """The best setting of a study by a column, over the repeats that it has."""

    setting: str  # what is varied, as text; empty where nothing but repeats is
    trials: list[str]  # its repeats, by name
    mean: float
    std: float  # n - 1 below; NaN of one repeat
    left_out: int  # how many settings have too few repeats to be compared

    def shown(self, name: str) -> str:
        """Returns it in words, by the column's name."""
        value = f"{short(name)} {mean_std(self.mean, self.std, len(self.trials))}"
        trials = f"trial{'s' * (len(self.trials) > 1)} {', '.join(self.trials)}"
        text = f"{value}: {trials}{f' ({self.setting})' if self.setting else ''}"
        if self.left_out:
            text += f"; {self.left_out} of too few repeats not compared"
        return text


def best(results: Results, name: str) -> Best | None:
    """Returns the setting of the best mean of a column over repeats; None where no trial has it.

    A mean of few repeats is the more likely to be best by luck: a setting is compared that has half
    as many as that of the most, and two where any has. Trials that failed or were stopped do not
    count.
    """
    values, settings = numbers(results.done, name).dropna(), _settings(results)
    if values.empty:
        return None
    found = describe(values.groupby(settings[values.index], sort=False))
    needed = max(found["count"].max() / 2, min(2, found["count"].max()))
    most = found[found["count"] >= needed]
    first = most["mean"].idxmin() if results.least(name) else most["mean"].idxmax()
    trials = [str(trial) for trial in values.index if settings[trial] == first]
    mean, std = most.loc[first, ["mean", "std"]]
    return Best(str(first), trials, float(mean), float(std), len(found) - len(most))


def by_setting(results: Results, y: str) -> pd.DataFrame:
    """Returns y of the trials that are done: a column a setting, a line a repeat; NaN of none."""
    repeats = [key for key in results.several if key in REPEATS]
    parts = {"setting": _settings(results), "repeat": _names(results.done, repeats)}
    return pd.DataFrame(parts | {y: numbers(results.done, y)}).pivot_table(y, "repeat", "setting")


def _settings(results: Results) -> pd.Series:
    """Returns what is varied in each trial that is done, as text, without its repeats."""
    return _names(results.done, dividers(results, results.done))


def _repeats(names: pd.Series, x: pd.Series, y: pd.Series) -> pd.DataFrame:
    """Returns a line for each y that there is, curve by curve, in order of x if it is a number."""
    lines = pd.DataFrame({"curve": names, "x": x, "y": y}).dropna(subset="y").infer_objects()
    if not pd.api.types.is_numeric_dtype(lines["x"]):
        return lines
    by_curve = lines.assign(order=lines["curve"].factorize()[0])
    return by_curve.sort_values(["order", "x"]).drop(columns="order")


def _names(table: pd.DataFrame, keys: Sequence[str]) -> pd.Series:
    """Returns the values of keys as text, which tells a trial's curve from others."""
    names = [
        ", ".join(f"{short(key)} {plain(row[key])}" for key in keys) for _, row in table.iterrows()
    ]
    return pd.Series(names, table.index, dtype=object)
