"""What a run of a billion rows costs before its first batch, and a batch of it by number.

    python -m benchmarks.plan
    python -m benchmarks.plan --shards 2000 --rows 1000

The manifest is made up, and so is an index where one is asked for; no tar is there. Times are of
the processor, since others may work beside; memory is the most that this process ever held, before
the start and after it. The rows of a batch are compared with those of 1 and of 4,096 processes.
"""

import argparse
import json
import random
import resource
import statistics
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np

from heron.base.artefact import fingerprint
from heron.base.errors import ShardError
from heron.data import dataset
from heron.data.plan import even_slice
from heron.experiment import open_data
from heron.experiment.config import parse_config
from heron.shards.cache import LocalFile
from heron.shards.manifest import SCHEMA_VERSION, Manifest
from heron.shards.store import Store

BATCH, WORLD, DRAWS = 4096, 4096, 50
VIEW = {"name": "x", "kind": "vector", "shape": [4], "dtype": "float32"}


class MadeUp(Store):
    """A data set of many shards of which nothing is there but the manifest."""

    def __init__(self, shards: int, rows: int) -> None:
        listed = [
            {
                "file": f"train-{number:06d}.tar",
                "samples": rows,
                "bytes": 1024,
                "sha256": f"{number:064x}",
                "index_bytes": 1024,
                "index_sha256": f"{number:064x}",
            }
            for number in range(shards)
        ]
        tree = {
            "dataset": "made-up",
            "schema_version": SCHEMA_VERSION,
            "views": [VIEW],
            "labels": {"kind": "none", "names": []},
            "block_rows": 1000,
            "splits": {"train": listed},
            "built_from": {"source": "x", "options": {}, "files": [], "shard_rows": rows},
        }
        manifest = Manifest.model_validate_json(json.dumps(tree)).model_dump(mode="json")
        self.bytes = json.dumps({**manifest, "fingerprint": fingerprint(manifest)}).encode()
        self.opened = 0

    def where(self, name: str = "") -> str:
        return f"made-up/{name}"

    def read_bytes(self, name: str) -> bytes:
        return self.bytes

    def names(self) -> None:
        return None

    def local(self, name: str, size: int | None, sha256: str) -> LocalFile:
        self.opened += 1
        raise ShardError(f"{name} is not there")

    def local_copies(self, sizes: Mapping[str, int | None]) -> AbstractContextManager[Path]:
        raise ShardError("nothing is there")


def peak_mb() -> float:
    """Returns the most memory that this process ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(words: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shards", type=int, default=100_000)
    parser.add_argument("--rows", type=int, default=10_000, help="of a shard")
    arguments = parser.parse_args(words)
    store = MadeUp(arguments.shards, arguments.rows)
    vars(dataset)["open_store"] = lambda *_: store
    config = parse_config(
        {
            "run": {"dir": "run"},
            "data": {
                "path": "made-up",
                "batch": {"labelled": 0, "unlabelled": BATCH},
                "views": [{"stored": "x"}, {"stored": "x"}],
            },
            "objective": {"nt_xent": {}},
        }
    )
    before, clock = peak_mb(), time.process_time()
    plan = open_data.open_data(config).unlabelled
    started = time.process_time() - clock
    assert plan is not None
    draw, batch_seconds, share_seconds = random.Random(0), list[float](), list[float]()
    for _ in range(DRAWS):
        t = draw.randrange(3 * plan.steps_per_epoch)
        plan.batch_rows(t - t % plan.steps_per_epoch)  # a new epoch permutes the shards, once
        clock = time.process_time()
        rows = plan.batch_rows(t)
        batch_seconds.append(time.process_time() - clock)
        for rank in (0, draw.randrange(WORLD), WORLD - 1):
            rows_of_rank = even_slice(BATCH, rank, WORLD)
            clock = time.process_time()
            local_rows = plan.batch_rows(t, rows_of_rank)
            share_seconds.append(time.process_time() - clock)
            assert np.array_equal(local_rows, rows[rows_of_rank])
    numbers = {
        "rows": arguments.shards * arguments.rows,
        "start_s": started,
        "peak_mb": peak_mb(),
        "before_mb": before,
        "batch_ms": 1000 * statistics.median(batch_seconds),
        "most_batch_ms": 1000 * max(batch_seconds),
        "share_ms": 1000 * statistics.median(share_seconds),
        "files_opened": store.opened,
    }
    print(f"{numbers['rows']:,} rows in {arguments.shards:,} shards")
    print(f"start: {started:.2f} s; {numbers['peak_mb']:,.0f} MB at most, {before:,.0f} MB before")
    print(
        f"batch t of {BATCH:,}: {numbers['batch_ms']:.2f} ms, at most "
        f"{numbers['most_batch_ms']:.2f} ms; "
        f"the share of one of {WORLD:,} processes: {numbers['share_ms']:.2f} ms"
    )
    print(f"indexes and tars opened: {store.opened}")
    return numbers


if __name__ == "__main__":
    main()
