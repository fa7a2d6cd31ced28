"""The cost of verification: a folder opened unverified, verified for the first time, and again.

    python -m benchmarks.verified --megabytes 1000
    python -m benchmarks.verified --megabytes 100 --of index

A data set is vectors in shards of 8,192 rows, opened as training opens them; an index is of kind
flat, opened as a query opens it. In turns in one process.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.vectors import write_embeddings
from heron.base.artefact import VERIFIED_FILE
from heron.data.reader import Reader
from heron.retrieval.build import build_index
from heron.retrieval.embeddings import Embeddings
from heron.retrieval.index import Index
from heron.shards.build import build
from heron.sources import make_source

WIDTH, ROUNDS = 1024, 15


def open_data(folder: Path, verify: bool) -> None:
    """Opens a data set, and maybe compares its shards with their checksums."""
    reader = Reader(folder)
    if verify:
        reader.verify_payloads()


def make_data(folder: Path, rows: int) -> None:
    """Builds a data set of drawn vectors."""
    random = np.random.default_rng(0)
    vectors = random.standard_normal((rows, WIDTH), np.float32)
    np.savez(folder / "x.npz", view1=vectors, labels=random.integers(0, 9, rows))
    build(make_source("arrays", {"npz": folder / "x.npz"}), folder / "made", progress=False)


def make_index(folder: Path, rows: int) -> None:
    """Builds an index of drawn vectors."""
    write_embeddings(folder / "vectors", rows, WIDTH)
    build_index(Embeddings.open(folder / "vectors"), folder / "made", kind="flat", progress=False)


def seconds(work: Callable[[Path, bool], object], folder: Path, verify: bool) -> float:
    """Returns how long it takes to open a folder."""
    began = time.perf_counter()
    work(folder, verify)
    return time.perf_counter() - began


def main() -> None:
    """Prints medians and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--of", choices=["data", "index"], default="data")
    arguments = parser.parse_args()
    rows = arguments.megabytes * 10**6 // (4 * WIDTH)
    make_folder, open_folder = (
        (make_data, open_data) if arguments.of == "data" else (make_index, Index.open)
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        os.environ["HERON_CACHE"] = str(folder / "cache")
        make_folder(folder, rows)
        (folder / "cache" / VERIFIED_FILE).unlink(missing_ok=True)
        first_seconds = seconds(open_folder, folder / "made", True)
        assert (folder / "cache" / VERIFIED_FILE).exists()
        turns = list[tuple[float, float]]()
        for _ in range(ROUNDS):
            turns.append(
                (
                    seconds(open_folder, folder / "made", False),
                    seconds(open_folder, folder / "made", True),
                )
            )
        unverified, verified = (statistics.median(column) for column in zip(*turns, strict=True))
        print(
            f"{arguments.of} of {rows:,} rows: unverified {1e3 * unverified:.1f} ms; "
            f"verified for the first time {1e3 * first_seconds:.0f} ms, again "
            f"{1e3 * verified:.1f} ms: {verified / unverified:.2f} "
            "times the unverified"
        )


if __name__ == "__main__":
    main()
