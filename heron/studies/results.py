"""A study's folder as one table, and what is read from it: curves, grids, the best setting."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from heron.base.errors import ConfigError, StudyError, short_repr
from heron.studies.ledger import REMEDY, ROWS, STUDY, Row, read_rows, refuse_other_run
from heron.studies.repeats import mean_std_count
from heron.studies.study import Study, load_study
from heron.studies.text import NEGATIVES, is_number, mean_std, plain, short
from heron.studies.trials import TRIALS
from heron.training.tracking import read_metrics

REPEATS = ["seed", "data.protocol.fold", "data.protocol.seed"]  # keys that only repeats differ in
BATCH, SHARE = "batch", "batch / workers"
ROW_COLUMNS = ["status", "error", "command", "run"]  # columns that are neither varied nor measured
LOWER_IS_BETTER = ("_s", "seconds", "_bytes", "loss", "bytes_per_step")  # endings of column names


def _cells(row: Row, folder: Path) -> dict[str, Any]:
    """Returns a trial's cells by column; where two sources share a name, the first wins."""
    result, measured = row.result or {}, row.measured or {}
    workers = row.values.get("workers", result.get("world_size", 1))
    if type(workers) is not int or workers < 1:
        raise StudyError(f"{folder}: trial {row.trial} has {short_repr(workers)} workers; {REMEDY}")
    derived: dict[str, Any] = {"workers": workers}
    for line in read_metrics(folder / row.run / "metrics.jsonl"):
        batch = (line.get("samples_per_s") or 0.0) * (line.get("seconds") or 0.0)
        if batch and math.isfinite(batch):  # the rows of the first step that was timed
            rows = round(batch)
            derived |= {BATCH: rows, NEGATIVES: rows - 1, SHARE: rows / workers}
            break
    cells = {"status": row.status, **row.values}
    for source in (derived, measured, result):
        cells |= {k: v for k, v in source.items() if v is not None and k not in cells}
    return cells | {"error": row.error, "command": row.command, "run": row.run}


@dataclass(frozen=True)
class Results:
    """The results of a study, finished or not.

    The table has a row per trial that has ended, indexed by its number; None marks a missing cell.
    Columns are `status`, the keys that are varied, `batch` (rows of a step), `negatives` (HeroCon's
    |N_i|: the batch without the anchor), `batch / workers`, the names of `measured` and of
    `result`, `error`, `command` and `run`.
    """

    folder: Path
    study: Study
    table: pd.DataFrame
    keys: Sequence[str]  # columns that are varied, or could have been
    notes: Sequence[str] = ()  # remarks for the reader of the table

    @cached_property
    def done(self) -> pd.DataFrame:
        """The rows of the trials that ran to their end."""
        return self.table[self.table["status"] == "done"]

    @cached_property
    def keys_that_vary(self) -> list[str]:
        """Keys that have several values, repeats among them."""
        return [k for k in self.keys if self.table[k].dropna().map(plain).nunique() > 1]

    @property
    def varied(self) -> list[str]:
        """Keys that have several values, without those of repeats."""
        return [key for key in self.keys_that_vary if key not in REPEATS]

    @property
    def progress(self) -> str:
        """The progress of the study, as a sentence."""
        counts, planned = self.table["status"].value_counts(), self.study.planned
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
        """Raises a StudyError for a column that no trial has; it lists those that exist."""
        columns = [*self.table.drop(columns=ROW_COLUMNS).dropna(axis=1, how="all")]
        for name in names:
            if len(self.done) and name not in columns:
                raise StudyError(
                    f"{self.folder}: no trial has '{name}'; set measure.x and measure.y of the "
                    f"study, or --x and --y, to one of {', '.join(columns)}"
                )

    def lowest_is_best(self, name: str) -> bool:
        """Returns whether the lowest value of a column is best: by the study, or its name."""
        measure = self.study.measure
        return measure.mode == "min" if name == measure.score else lower_is_better(name)


def read_results(folder: Path) -> Results:
    """Reads a study's folder, also while the study is running.

    Raises a StudyError if the folder is no study, a file is missing, or a line is damaged.
    """
    study = _read_study(folder)
    path = folder / ROWS
    if not path.exists():
        raise StudyError(
            f"{path} does not exist: no trial has ended yet, or the file was lost; run the study "
            "again, which keeps finished runs"
        )
    by_trial: dict[str, Row] = {}
    notes = []
    for number, row in read_rows(path):
        refuse_other_run(row, folder, f"{path}, line {number}")
        if row.trial in by_trial:
            notes.append(f"Trial {row.trial} has two rows; the last one counts (line {number}).")
        by_trial[row.trial] = row
    names = sorted(by_trial)
    cells = [_cells(by_trial[name], folder) for name in names]
    columns = None if cells else ROW_COLUMNS
    table = pd.DataFrame(cells, index=names, columns=columns, dtype=object)
    keys = list(dict.fromkeys(key for name in names for key in by_trial[name].values))
    return Results(folder, study, table.where(table.notna(), None), keys, notes)


def _read_study(folder: Path) -> Study:
    path = folder / STUDY
    if not path.is_file():
        files = sorted(p.name for p in folder.glob("*")) if folder.is_dir() else []
        raise StudyError(
            f"{folder} is not a study: it has no {STUDY}, only {', '.join(files[:5]) or 'nothing'}"
            "; pass the folder that `heron study ... --out` wrote"
        )
    try:
        return load_study(path)
    except ConfigError as error:
        reason = " ".join(str(error).split())
        raise StudyError(
            f"cannot read {path}: {reason}; run the study again in a new folder"
        ) from None


def numbers(table: pd.DataFrame, name: str) -> pd.Series:
    """Returns a column as floats, NaN where a trial has no finite number."""
    column = table[name] if name in table else pd.Series(math.nan, table.index)
    return column.map(lambda v: v if is_number(v) else math.nan).astype(float)


def lower_is_better(name: str) -> bool:
    """Returns whether the lowest value of a column is best: of times, memory, bytes and losses."""
    return name.endswith(LOWER_IS_BETTER) and not name.endswith("_per_s")


def is_cost(name: str) -> bool:
    """Returns whether a column is, by its name, a time, memory, bytes, a loss or a rate.

    Laws are fitted to these alone: a score has an upper bound, which no law has.
    """
    return name.endswith(LOWER_IS_BETTER)  # includes rates: `_per_s` ends with `_s`


def points(curves: pd.DataFrame) -> pd.DataFrame:
    """Returns `mean`, `std` (n - 1 below; NaN of one) and `count` by columns `curve` and `x`."""
    repeats = curves.groupby(["curve", "x"], sort=False)["y"]
    return pd.DataFrame(mean_std_count(repeats)).reset_index()


def natural_x(results: Results, x: str) -> str:
    """Returns |N_i| in place of the rows of a stream, where nothing else varies; else x."""
    table = results.done
    is_stream = x in ("data.batch.unlabelled", "data.batch.labelled")
    if not (is_stream and len(table) and BATCH in table and table[BATCH].notna().all()):
        return x
    return x if grouping_keys(results, table, x) else NEGATIVES


def is_determined_by(table: pd.DataFrame, others: Sequence[str], key: str) -> bool:
    """Returns whether the values of other keys determine that of `key` in every trial."""
    text = table[[*dict.fromkeys([*others, key])]].map(plain)
    return bool((text.groupby(list(others))[key].nunique() == 1).all())


def grouping_keys(results: Results, table: pd.DataFrame, x: str | None = None) -> list[str]:
    """Returns the keys besides x that tell trials apart: the study's group first."""
    group = results.study.measure.group
    keys = [group] if group is not None and group in results.varied and group != x else []
    for key in results.varied:
        others = keys if x is None else [x, *keys]
        if key not in others and not (others and is_determined_by(table, others, key)):
            keys.append(key)
    return keys


def curves(results: Results, x: str, y: str) -> pd.DataFrame:
    """Returns every curve of y over x, of the trials that are done: a row per repeat.

    Columns are `curve` (its name, empty for a single curve), `x` and `y`; where every x is a
    number, rows are in order of x.
    """
    table = results.done[results.done[x].notna()]
    xs = table[x].map(lambda value: float(value) if is_number(value) else plain(value))
    return _curve_rows(_names(table, grouping_keys(results, table, x)), xs, numbers(table, y))


def worker_curves(results: Results, y: str) -> pd.DataFrame:
    """Returns curves of y over workers, at a fixed global batch and at a fixed batch per worker.

    A curve takes trials that differ in nothing else, and has two numbers of workers or more.
    Columns are those of `curves`.
    """
    if BATCH not in results.done:
        return pd.DataFrame(columns=["curve", "x", "y"])
    table = results.done[results.done[BATCH].notna()]
    others = [k for k in results.varied if k != "workers" and not k.startswith("data.batch.")]
    suffixes = _names(table, others).map(lambda name: f", {name}" if name else "")
    scaled = []
    for column, template in ((BATCH, "{:,} rows in all"), (SHARE, "{:,.0f} rows a worker")):
        names = table[column].map(template.format) + suffixes
        scaled.append(_curve_rows(names, table["workers"], numbers(table, y)))
    both = pd.concat(scaled, ignore_index=True)
    return both[both.groupby("curve")["x"].transform("nunique") > 1]


def grid(results: Results, y: str) -> pd.DataFrame | None:
    """Returns the mean of y over the two keys that vary, NaN in an empty cell.

    It is None where the trials make no grid, or no trial that is done has a y.
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
    """The best setting of a study by a column, over its repeats."""

    setting: str  # the values that vary, as text; empty where only repeats do
    trials: list[str]  # names of its repeats
    mean: float
    std: float  # n - 1 below; NaN of one repeat
    left_out: int  # number of settings with too few repeats to be compared

    def describe(self, name: str) -> str:
        """Returns a description with the column's name."""
        value = f"{short(name)} {mean_std(self.mean, self.std, len(self.trials))}"
        trials = f"trial{'s' * (len(self.trials) > 1)} {', '.join(self.trials)}"
        text = f"{value}: {trials}{f' ({self.setting})' if self.setting else ''}"
        if self.left_out:
            text += f"; {self.left_out} of too few repeats not compared"
        return text


def best(results: Results, name: str) -> Best | None:
    """Returns the setting of the best mean of a column over repeats; None where no trial has it.

    The fewer repeats, the likelier a mean is best by luck: only settings are compared that have at
    least half the largest number of repeats, and at least two where any has, of trials that are
    done.
    """
    values, settings = numbers(results.done, name).dropna(), _settings(results)
    if values.empty:
        return None
    stats = mean_std_count(values.groupby(settings[values.index], sort=False))
    min_repeats = max(stats["count"].max() / 2, min(2, stats["count"].max()))
    compared = stats[stats["count"] >= min_repeats]
    means = compared["mean"]
    setting = means.idxmin() if results.lowest_is_best(name) else means.idxmax()
    trials = [str(trial) for trial in values.index if settings[trial] == setting]
    mean, std = compared.loc[setting, ["mean", "std"]]
    return Best(str(setting), trials, float(mean), float(std), len(stats) - len(compared))


def by_setting(results: Results, y: str) -> pd.DataFrame:
    """Returns y of the trials that are done: a column per setting and a row per repeat."""
    repeats = [key for key in results.keys_that_vary if key in REPEATS]
    names = {"setting": _settings(results), "repeat": _names(results.done, repeats)}
    return pd.DataFrame(names | {y: numbers(results.done, y)}).pivot_table(y, "repeat", "setting")


def _settings(results: Results) -> pd.Series:
    """Returns the setting of each trial that is done, as text: its values, without repeats."""
    return _names(results.done, grouping_keys(results, results.done))


def _curve_rows(names: pd.Series, x: pd.Series, y: pd.Series) -> pd.DataFrame:
    """Returns a row per y that is not missing, curve by curve, in order of x if it is a number."""
    lines = pd.DataFrame({"curve": names, "x": x, "y": y}).dropna(subset="y").infer_objects()
    if not pd.api.types.is_numeric_dtype(lines["x"]):
        return lines
    by_curve = lines.assign(order=lines["curve"].factorize()[0])
    return by_curve.sort_values(["order", "x"]).drop(columns="order")


def _names(table: pd.DataFrame, keys: Sequence[str]) -> pd.Series:
    """Returns the values of some keys of each trial as text, which names its curve."""
    names = [
        ", ".join(f"{short(key)} {plain(row[key])}" for key in keys) for _, row in table.iterrows()
    ]
    return pd.Series(names, table.index, dtype=object)
