"""What verification costs: opening a data set unverified, verified for the first time, and again.

    python -m benchmarks.verified --megabytes 1000

Vectors in shards of 8,192 rows, opened as training opens them, in turns in one process.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from heron.pipeline.data.reader import Reader
from heron.shards.artefact import VERIFIED
from heron.shards.build import build
from heron.shards.sources import make

WIDTH, ROUNDS = 1024, 15


def seconds(folder: Path, verify: bool) -> float:
    """Opens a data set, and maybe compares its shards with their checksums."""
    began = time.perf_counter()
    reader = Reader(folder)
    if verify:
        reader.verify_payloads()
    return time.perf_counter() - began


def main() -> None:
    """Prints medians and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--megabytes", type=int, default=1000)
    rows = parser.parse_args().megabytes * 10**6 // (4 * WIDTH)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        os.environ["HERON_CACHE"] = str(folder / "cache")
        random = np.random.default_rng(0)
        vectors = random.standard_normal((rows, WIDTH), np.float32)
        np.savez(folder / "x.npz", view1=vectors, labels=random.integers(0, 9, rows))
        build(make("arrays", {"npz": folder / "x.npz"}), folder / "data", progress=False)
        first = seconds(folder / "data", True)
        assert (folder / "cache" / VERIFIED).exists()
        turns = list[tuple[float, float]]()
        for _ in range(ROUNDS):
            turns.append((seconds(folder / "data", False), seconds(folder / "data", True)))
        without, again = (statistics.median(column) for column in zip(*turns, strict=True))
        print(
            f"{rows:,} rows, {len(Reader(folder / 'data').shards)} shards: unverified "
            f"{1e3 * without:.1f} ms; verified for the first time {1e3 * first:.0f} ms, again "
            f"{1e3 * again:.1f} ms: {again / without:.2f} times the unverified"
        )


if __name__ == "__main__":
    main()
