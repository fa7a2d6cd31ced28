"""The rows of a study as a table: Markdown, CSV, Parquet."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from heron.launch.studies.rows import NEGATIVES, Results, less_is_better, numbers, plain
from heron.launch.studies.text import cell, markdown, short
from heron.shards.atomic import atomic_write

SHOWN = ("step_s", "samples_per_s", "data_wait_s", "peak_memory_bytes")  # beside what is asked for


def write_tables(results: Results, ys: Sequence[str], out: Path) -> None:
    """Writes table.md (what is asked for), table.csv and table.parquet (every column).

    Raises:
        ShardError: the disk is full.
    """
    table = every_column(results)
    with atomic_write(out / "table.md") as stream:
        stream.write(markdown(*shown(results, ys)).encode())
    with atomic_write(out / "table.csv") as stream:
        stream.write(table.to_csv(index=False).encode())
    with atomic_write(out / "table.parquet") as stream:
        table.to_parquet(stream)


def shown(results: Results, ys: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Returns heads and lines of the table that people read, without commands and errors."""
    table = results.table
    asked = dict.fromkeys([*(results.several or results.keys), NEGATIVES, *ys, *SHOWN])
    names = [name for name in asked if name in table and table[name].notna().any()]
    brief = [short(name) for name in names]
    heads = [one if brief.count(one) == 1 else n for one, n in zip(brief, names, strict=True)]
    heads = ["|N_i|" if head == NEGATIVES else head for head in heads]
    lines = [
        [row.trial, row.status, *(cell(table.at[row.trial, name], name) for name in names)]
        for row in results.rows
    ]
    return ["trial", "status", *heads], lines


def every_column(results: Results) -> pd.DataFrame:
    """Returns every column of every row, each of one type: numbers, truths, or else text.

    Nested values of results are left to the runs; nested values that are varied are JSON.
    """
    rows, table = results.rows, results.table
    columns: dict[str, list[Any]] = {
        "trial": [row.trial for row in rows],
        "status": [row.status for row in rows],
    }
    for name in table:
        if name in results.keys or not table[name].map(lambda v: isinstance(v, dict)).any():
            columns.setdefault(name, list(table[name]))
    columns["error"] = [row.error for row in rows]
    columns["command"] = [row.command for row in rows]
    columns["run"] = [row.run for row in rows]
    return pd.DataFrame({name: _of_one_type(values) for name, values in columns.items()})


def _of_one_type(values: Sequence[Any]) -> pd.api.extensions.ExtensionArray:
    array = pd.array(values)
    if not isinstance(array, pd.arrays.NumpyExtensionArray):
        return array
    return pd.array([None if v is None else plain(v) for v in values], "string")


def best(results: Results, name: str, least: bool | None = None) -> str | None:
    """Returns the finished trial with the best value of a column, not of failed or stopped ones.

    Args:
        results: with its rows.
        name: of the column.
        least: whether the least is best; None: see `less_is_better`.
    """
    values = numbers(results.finished, name).dropna()
    if values.empty:
        return None
    least = less_is_better(name) if least is None else least
    return str(values.idxmin() if least else values.idxmax())
