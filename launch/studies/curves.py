"""Curves over what a study varies: a point is the mean of its repeats."""

from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd

from heron.launch.repeats import describe
from heron.launch.studies.results import (
    BATCH,
    NEGATIVES,
    REPEATS,
    SHARE,
    Results,
    is_number,
    numbers,
    plain,
)
from heron.launch.studies.text import mean_std, short


def points(curves: pd.DataFrame) -> pd.DataFrame:
    """Returns `mean`, `std` (n - 1 below; NaN of one) and `count` of the repeats at each x.

    Args:
        curves: from `curves` or `worker_curves`; `curve` and `x` are columns of the points too.
    """
    repeats = curves.groupby(["curve", "x"], sort=False)["y"]
    described: pd.DataFrame = describe(repeats).reset_index()
    return described


def natural_x(results: Results, x: str) -> str:
    """Returns |N_i| in place of the rows of a stream, where only those vary; else x."""
    table = results.done
    streams = x in ("data.batch.unlabelled", "data.batch.labelled")
    if not (streams and len(table) and BATCH in table and table[BATCH].notna().all()):
        return x
    return x if dividers(results, table, x) else NEGATIVES


def followers(table: pd.DataFrame, known: Sequence[str], keys: Sequence[str]) -> list[str]:
    """Returns keys whose value follows from those of others: they tell no two curves apart."""
    text = table[[*dict.fromkeys([*known, *keys])]].map(plain)
    others = [key for key in keys if key not in known]
    return [key for key in others if (text.groupby(list(known))[key].nunique() == 1).all()]


def dividers(results: Results, table: pd.DataFrame, x: str) -> list[str]:
    """Returns the keys that tell curves over x apart: the study's group, then what it leaves."""
    group = results.study.measure.group
    keys = [group] if group is not None and group in results.varied and group != x else []
    for key in results.varied:
        if key not in (x, *keys) and key not in followers(table, [x, *keys], results.varied):
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
    """Returns the mean of y over the two keys that are varied (NaN of none); None if no grid."""
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
    return means.reindex(index=lines, columns=columns).rename_axis(index=down, columns=across)


class Best(NamedTuple):
    """The best setting of a study by a column, over the repeats that it has.

    Attributes:
        setting: what is varied, as text; empty where nothing but repeats is.
        trials: its repeats, by name.
        mean: of the column.
        std: of the same (n - 1 below); NaN of one repeat.
        left_out: how many settings have too few repeats to be compared.
    """

    setting: str
    trials: list[str]
    mean: float
    std: float
    left_out: int

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
    table, keys = results.done, list[str]()
    for key in results.varied:
        if not keys or key not in followers(table, keys, [key]):
            keys.append(key)
    return _names(table, keys)


def _repeats(names: pd.Series, x: pd.Series, y: pd.Series) -> pd.DataFrame:
    """Returns a line for each y that there is, curve by curve, in order of x if it is a number."""
    lines = pd.DataFrame({"curve": names, "x": x, "y": y}).dropna(subset="y").infer_objects()
    if not pd.api.types.is_numeric_dtype(lines["x"]):
        return lines
    order = lines["curve"].map({name: i for i, name in enumerate(lines["curve"].unique())})
    return lines.assign(order=order).sort_values(["order", "x"]).drop(columns="order")


def _names(table: pd.DataFrame, keys: Sequence[str]) -> pd.Series:
    """Returns the values of keys as text, which tells a trial's curve from others."""
    names = [
        ", ".join(f"{short(key)} {plain(row[key])}" for key in keys) for _, row in table.iterrows()
    ]
    return pd.Series(names, table.index, dtype=object)
