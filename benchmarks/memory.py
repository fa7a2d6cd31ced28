"""The private memory of a loader's processes after each epoch, which must not grow."""

import multiprocessing
import os
import re
from pathlib import Path

from benchmarks.sets import open_set
from heron.data.batches import batches
from heron.data.streams import ShardBatches


def measure(folder: Path, views: list[str], batch: int, workers: int, epochs: int) -> list[float]:
    """Returns the megabytes of this process and its workers at the end of each epoch."""
    streams = open_set(folder, views, batch, None, workers)
    assert streams.labelled is not None
    steps = streams.labelled.steps_per_epoch
    megabytes = []
    source = ShardBatches(streams, 0, 0, 1)
    for step, _ in enumerate(batches(source, 0, epochs * steps, workers), start=1):
        if step % steps == 0:
            workers_pids = [process.pid for process in multiprocessing.active_children()]
            megabytes.append(
                sum(private(pid) for pid in (os.getpid(), *workers_pids) if pid is not None)
            )
    return megabytes


def private(pid: int) -> float:
    """Returns a process's anonymous memory in megabytes, without mapped files and shared memory."""
    status = Path(f"/proc/{pid}/status").read_text()
    (kilobytes,) = re.findall(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE)
    return int(kilobytes) * 1024 / 1e6
