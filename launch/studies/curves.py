"""Curves over what a study varies: a point is the mean of its repeats."""

from collections.abc import Sequence

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
from heron.launch.studies.text import short

# Curves by name: values of y, a line for each repeat, indexed by x, in order of x. The name tells a
# curve from the others, and is empty where it is the only one.
Curves = dict[str, pd.Series]


def points(curve: pd.Series) -> pd.DataFrame:
    """Returns `mean`, `std` (n - 1 below; NaN of one) and `count` of the repeats, indexed by x."""
    described: pd.DataFrame = describe(curve.groupby(level=0, sort=False))
    return described


def is_numeric(curve: pd.Series) -> bool:
    """Whether x is a number at every point."""
    return bool(pd.api.types.is_numeric_dtype(curve.index))


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


def curves(results: Results, x: str, y: str) -> Curves:
    """Returns every curve of y over x that has a point, of the trials that are done."""
    table = results.done[results.done[x].notna()]
    at = table[x].map(lambda value: float(value) if is_number(value) else plain(value))
    return _split(_names(table, dividers(results, table, x)), at, numbers(table, y))


def worker_curves(results: Results, y: str) -> Curves:
    """Returns curves of y over workers at a fixed global batch, and at a fixed share of each.

    Of trials that differ in nothing else, those of one global batch make a curve, and those of as
    many rows a worker; a curve has two numbers of workers or more.
    """
    if BATCH not in results.done:
        return {}
    table = results.done[results.done[BATCH].notna()]
    others = [k for k in results.varied if k != "workers" and not k.startswith("data.batch.")]
    rest = _names(table, others).map(lambda name: f", {name}" if name else "")
    scaled = Curves()
    for column, text in ((BATCH, "{:,} rows in all"), (SHARE, "{:,.0f} rows a worker")):
        names = table[column].map(text.format) + rest
        scaled |= _split(names, table["workers"].astype(float), numbers(table, y))
    return {name: curve for name, curve in scaled.items() if curve.index.nunique() > 1}


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


def by_setting(results: Results, y: str) -> pd.DataFrame:
    """Returns y of the trials that are done: a column a setting, a line a repeat; NaN of none."""
    table, keys = results.done, list[str]()
    for key in results.varied:
        if not keys or key not in followers(table, keys, [key]):
            keys.append(key)
    repeats = [key for key in results.several if key in REPEATS]
    parts = {"setting": _names(table, keys), "repeat": _names(table, repeats)}
    return pd.DataFrame(parts | {y: numbers(table, y)}).pivot_table(y, "repeat", "setting")


def _split(names: pd.Series, at: pd.Series, values: pd.Series) -> Curves:
    """Returns a curve for each name, named as its x and y, in order of x where x is a number."""
    split = Curves()
    values = values.dropna()
    for name, part in values.groupby(names[values.index], sort=False):
        curve = part.set_axis(pd.Index(at[part.index].tolist(), name=at.name))
        split[str(name)] = curve.sort_index() if is_numeric(curve) else curve
    return split


def _names(table: pd.DataFrame, keys: Sequence[str]) -> pd.Series:
    """Returns the values of keys as text, which tells a trial's curve from others."""
    names = [
        ", ".join(f"{short(key)} {plain(row[key])}" for key in keys) for _, row in table.iterrows()
    ]
    return pd.Series(names, table.index, dtype=object)
