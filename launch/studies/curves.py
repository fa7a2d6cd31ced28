"""Curves over what a study varies: a point is the mean of its repeats."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from heron.launch.repeats import describe
from heron.launch.studies.rows import (
    BATCH,
    NEGATIVES,
    REPEATS,
    SHARE,
    Results,
    is_number,
    numbers,
    plain,
)
from heron.launch.studies.text import short


@dataclass(frozen=True)
class Curve:
    """One column over another, everything else but repeats the same.

    Attributes:
        name: what tells it from the others; empty where it is the only one.
        x: the column that it goes over.
        y: the column that it shows.
        values: of y, indexed by x, a line for each repeat, in order of x.
    """

    name: str
    x: str
    y: str
    values: pd.Series

    @property
    def numeric(self) -> bool:
        """Whether x is a number."""
        return bool(pd.api.types.is_numeric_dtype(self.values.index))

    @property
    def points(self) -> pd.DataFrame:
        """`mean`, `std` (n - 1 below; NaN of one) and `count` of the repeats, indexed by x."""
        points: pd.DataFrame = describe(self.values.groupby(level=0, sort=False))
        return points


def natural_x(results: Results, x: str) -> str:
    """Returns |N_i| in place of the rows of a stream, where only those vary; else x."""
    table = results.finished
    streams = x in ("data.batch.unlabelled", "data.batch.labelled")
    if not (streams and results.done and BATCH in table and table[BATCH].notna().all()):
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


def curves(results: Results, x: str, y: str) -> list[Curve]:
    """Returns every curve of y over x that has a point, of the trials that are done.

    Args:
        results: of the study.
        x: a column.
        y: a column of numbers.
    """
    table = results.finished[results.finished[x].notna()]
    names = _names(table, dividers(results, table, x))
    return _split(names, table[x].map(_place), numbers(table, y), x, y)


def worker_curves(results: Results, y: str) -> list[Curve]:
    """Returns curves of y over workers at a fixed global batch, and at a fixed share of each.

    Of trials that differ in nothing else, those of one global batch make a curve, and those of as
    many rows a worker; a curve has two numbers of workers or more.
    """
    if BATCH not in results.finished:
        return []
    table = results.finished[results.finished[BATCH].notna()]
    others = [k for k in results.varied if k != "workers" and not k.startswith("data.batch.")]
    rest = _names(table, others).map(lambda name: f", {name}" if name else "")
    scaled = []
    for column, text in ((BATCH, "{:,} rows in all"), (SHARE, "{:,.0f} rows a worker")):
        names = table[column].map(text.format) + rest
        scaled += _split(names, table["workers"].map(float), numbers(table, y), "workers", y)
    return [curve for curve in scaled if len(curve.points) > 1]


def grid(results: Results, y: str) -> pd.DataFrame | None:
    """Returns the mean of y over the two keys that are varied, or nothing where it is no grid.

    Returns:
        Means, [lines, columns], named by their keys; NaN where no trial has one.
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
    done = table.loc[table.index.intersection(results.finished.index)]
    means = numbers(done, y).groupby([done[down], done[across]]).mean().unstack()
    return means.reindex(index=lines, columns=columns).rename_axis(index=down, columns=across)


def by_setting(results: Results, y: str) -> pd.DataFrame:
    """Returns y of the trials that are done: a column a setting, a line a repeat; NaN of none.

    Settings are named by the keys that are varied, repeats by `REPEATS`, where those have several
    values.
    """
    table, keys = results.finished, list[str]()
    for key in results.varied:
        if not keys or key not in followers(table, keys, [key]):
            keys.append(key)
    repeats = [key for key in results.several if key in REPEATS]
    parts = {"setting": _names(table, keys), "repeat": _names(table, repeats)}
    return pd.DataFrame(parts | {y: numbers(table, y)}).pivot_table(y, "repeat", "setting")


def _split(names: pd.Series, at: pd.Series, values: pd.Series, x: str, y: str) -> list[Curve]:
    """Returns a curve for each name, in order of x where all of it are numbers."""
    split = []
    values = values.dropna()
    for name, part in values.groupby(names[values.index], sort=False):
        curve = part.set_axis(pd.Index(at[part.index].tolist()))
        numeric = pd.api.types.is_numeric_dtype(curve.index)
        split.append(Curve(str(name), x, y, curve.sort_index() if numeric else curve))
    return split


def _names(table: pd.DataFrame, keys: Sequence[str]) -> pd.Series:
    """Returns what tells a trial's curve from others."""
    names = [
        ", ".join(f"{short(key)} {plain(row[key])}" for key in keys) for _, row in table.iterrows()
    ]
    return pd.Series(names, table.index, dtype=object)


def _place(x: Any) -> float | str:
    return float(x) if is_number(x) else plain(x)
