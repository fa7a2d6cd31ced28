"""Formats numbers, columns and tables as plain text and Markdown."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from heron.base.atomic import atomic_write

NEGATIVES = "negatives"  # a column: |N_i| of HeroCon
UNITS = {
    NEGATIVES: "size of the negative set |N_i|",
    "step_s": "time of a step, s",
    "data_wait_s": "waiting for data, s a step",
    "samples_per_s": "samples / s",
    "peak_memory_bytes": "peak memory of a process, MB",
    "seconds": "time of the run, s",
    "train_seconds": "time of training, s",
    "f1_weighted": "F1, weighted",
    "auc_macro": "AUC, macro",
    "workers": "workers",
}


def number(value: float, digits: int = 4) -> str:
    """Returns a number with so many significant digits, if possible without an exponent."""
    if not math.isfinite(value):
        return "–"
    if value and not 1e-4 <= abs(value) < 1e7:
        return f"{value:.{digits - 1}e}"
    text = np.format_float_positional(value, digits, fractional=False, trim="-")
    return text if "." in text else f"{int(text):,}"


def mean_std(mean: float, std: float, count: float) -> str:
    """Returns `mean ± std (n = count)` of a point of a curve."""
    return number(mean) if count == 1 else f"{number(mean)} ± {number(std, 2)} (n = {count:g})"


def is_number(value: Any) -> bool:
    """Returns whether a cell is a finite number, and no bool."""
    return isinstance(value, int | float) and type(value) is not bool and math.isfinite(value)


def plain(value: Any) -> str:
    """Returns a value as it is typed on the command line."""
    return json.dumps(value) if isinstance(value, list | dict | bool) else str(value)


def short(key: str) -> str:
    """Returns the last two parts of a dotted key."""
    parts = key.split(".")
    return ".".join(parts[-2:]) if len(parts) > 2 else key


def label(name: str) -> str:
    """Returns the label of a column with its unit, for an axis."""
    return UNITS.get(name, short(name))


def scale(name: str) -> float:
    """Returns the factor that a column is shown with: memory is in MB."""
    return 1e-6 if name.endswith("_bytes") else 1.0


def cell(value: Any, name: str) -> str:
    """Returns a column's value as text: memory in MB, "–" where it is missing."""
    if value is None:
        return "–"
    if name.endswith("_bytes") and is_number(value):
        return f"{value / 1e6:,.0f} MB"
    return number(value) if type(value) in (int, float) else plain(value)


def heads_and_lines(frame: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """Returns a frame's columns and cells as text: integers in full, others with three digits."""

    def format_cell(value: Any) -> str:
        if isinstance(value, str):
            return value
        return f"{value:,}" if isinstance(value, int) else number(value, 3)

    return list(frame), frame.map(format_cell).to_numpy().tolist()


def markdown(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Returns a table in Markdown."""

    def escape(text: str) -> str:
        return " ".join(text.splitlines()).replace("|", r"\|")

    rows = [heads, ["---"] * len(heads), *lines]
    return "".join("| " + " | ".join(map(escape, row)) + " |\n" for row in rows)


def write_files(out: Path, files: Mapping[str, bytes]) -> None:
    """Writes files into a folder, each atomically; ShardError if the disk is full."""
    for name, content in files.items():
        with atomic_write(out / name) as stream:
            stream.write(content)
