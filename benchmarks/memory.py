"""Private memory of a loader's processes, epoch after epoch: it must not grow."""

import multiprocessing
import os
import re
from pathlib import Path

from benchmarks.sets import open_set
from heron.pipeline.data.batches import ShardBatches, batches


def measure(folder: Path, views: list[str], batch: int, workers: int, epochs: int) -> list[float]:
    """Megabytes at the end of each epoch, of this process and its workers together."""
    streams = open_set(folder, views, batch, None, workers)
    assert streams.labelled is not None
    steps = streams.labelled.steps_per_epoch
    found = []
    source = ShardBatches(streams, 0, 0, 1)
    for step, _ in enumerate(batches(source, 0, epochs * steps, workers, pin=False), start=1):
        if step % steps == 0:
            mine = [process.pid for process in multiprocessing.active_children()]
            found.append(sum(private(pid) for pid in (os.getpid(), *mine) if pid is not None))
    return found


def private(pid: int) -> float:
    """Anonymous memory that a process holds, in megabytes: not what it maps of files or shares."""
    status = Path(f"/proc/{pid}/status").read_text()
    (kilobytes,) = re.findall(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE)
    return int(kilobytes) * 1024 / 1e6
