"""Seconds and memory to read a CSV file, by the table source and by bare libraries.

    python -m benchmarks.csv_files [--rows 200000] [--columns 51]

Each reader has a process of its own; memory is that process's peak above what it has before it
reads. Ours also checks every cell, finds out the dialect and whether a column gives the label
away, and keeps rows apart from labels; the others only parse.
"""

import argparse
import resource
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from heron.studies.text import markdown


def ours(path: Path) -> int:
    """Reads views, labels and splits of all rows."""
    from heron.sources.table import Table

    loaded = Table.model_validate({"csv": [str(path)], "label": ["-1"]}).load()
    (view,) = loaded.views.values()
    rows = view.shape[0]
    for first in range(0, rows, 4096):
        np.asarray(view[np.arange(first, min(first + 4096, rows))])
    return int(rows)


def pyarrow(path: Path) -> int:
    """Parses by pyarrow."""
    from pyarrow import csv

    return int(csv.read_csv(path).num_rows)


def pandas(path: Path) -> int:
    """Parses by pandas."""
    import pandas as pd

    return len(pd.read_csv(path))


READERS: dict[str, Callable[[Path], int]] = {"ours": ours, "pyarrow": pyarrow, "pandas": pandas}
IMPORTS = ("heron.sources.table", "pyarrow.csv", "pandas")  # which no reader's time has


def measure(name: str, path: Path) -> tuple[float, float, int]:
    """Returns seconds, MB and rows of a reader."""
    for module in IMPORTS:
        __import__(module)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    rows = READERS[name](path)
    seconds = time.perf_counter() - began
    return seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1000, rows


def write(path: Path, rows: int, columns: int) -> None:
    """Writes random numbers of four decimals, and a class of ten in the last column."""
    draw = np.random.default_rng(0)
    with path.open("w") as stream:
        stream.write(",".join([f"x{n}" for n in range(columns - 1)] + ["label"]) + "\n")
        for first in range(0, rows, 10_000):
            count = min(10_000, rows - first)
            values = draw.normal(size=(count, columns - 1))
            cells = np.column_stack([values, draw.integers(0, 10, count)])
            np.savetxt(stream, cells, fmt=["%.4f"] * (columns - 1) + ["%d"], delimiter=",")


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--columns", type=int, default=51)
    parser.add_argument("--small", action="store_true", help="a few rows, to see that it works")
    args = parser.parse_args()
    rows = 2000 if args.small else args.rows
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.csv"
        write(path, rows, args.columns)
        size = path.stat().st_size / 1e6
        found = {}
        for name in READERS:
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                found[name] = pool.submit(measure, name, path).result()
    assert all(read == rows for _, _, read in found.values())
    print(f"{rows:,} rows of {args.columns} columns, {size:.0f} MB")
    lines = [
        [name, f"{seconds:.2f}", f"{memory:.0f}", f"{seconds / found['pyarrow'][0]:.1f}"]
        for name, (seconds, memory, _) in found.items()
    ]
    print(markdown(["reader", "s", "MB", "times pyarrow's"], lines))


if __name__ == "__main__":
    main()
