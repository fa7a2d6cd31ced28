"""Runs of a sweep: jobs ask for work and get its results, here or as the tasks of a Ray cluster.

Comparisons, searches and published tables are jobs; what they compute does not depend on where.
"""

import contextlib
import heapq
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import methodcaller
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from heron.base.errors import ConfigError, TrainingError
from heron.base.workers import ALONE, Executor
from heron.experiment.config import Config, load_saved
from heron.training.tracking import read_result

Result = TypeVar("Result")


class Batch(NamedTuple):
    """Calls that may be made at once; all of them, and what they return, can be pickled."""

    calls: Mapping[str, Callable[[], Any]]  # by name, for errors
    arrived: Callable[[str, Any], object] = lambda name, result: None  # in the calling process


Job = Generator[Batch, list[Any], Result]  # is sent the results of each batch, in its order


@dataclass(frozen=True, order=True)
class _Work:
    job: int
    number: int
    name: str = field(compare=False)
    call: Callable[[], Any] = field(compare=False)

    def __str__(self) -> str:
        return self.name


class _Queue(list[_Work]):
    """Work that waits, that of the first job first; it ends for now where there is none."""

    def __iter__(self) -> Iterator[_Work]:
        return self

    def __next__(self) -> _Work:
        if not self:
            raise StopIteration
        return heapq.heappop(self)


def run_jobs(
    jobs: Sequence[Job[Result]],
    executor: Executor = ALONE,
    ended: Callable[[int], object] = lambda job: None,
) -> list[Result]:
    """Runs jobs to their ends, and returns what they return, in their order.

    One process does the work of the first job first; others do whatever can be done. `ended` is
    called with the number of each job that ends. Raises what a job or its work raises.
    """
    queue, results = _Queue(), dict[int, Result]()
    batches: dict[int, tuple[Batch, dict[int, Any]]] = {}

    def advance(number: int, sent: Any) -> None:
        try:
            while not (batch := jobs[number].send(sent)).calls:
                sent = []
        except StopIteration as end:
            results[number] = end.value
            ended(number)
            return
        batches[number] = batch, {}
        for place, (name, call) in enumerate(batch.calls.items()):
            heapq.heappush(queue, _Work(number, place, name, call))

    for number in range(len(jobs)):
        advance(number, None)
    with contextlib.closing(executor.map(methodcaller("call"), queue)) as done:
        for work, result in done:
            batch, found = batches[work.job]
            batch.arrived(work.name, result)
            found[work.number] = result
            if len(found) == len(batch.calls):
                advance(work.job, [found[place] for place in range(len(found))])
    return [results[number] for number in range(len(jobs))]


@contextlib.contextmanager
def executor(address: str | None, at_once: int | None, threads: int | None) -> Iterator[Executor]:
    """Provides what does the work: this process, or Ray tasks with `threads` threads each.

    These are on the cluster at an address, or on this machine, if more than one is to run at once.
    Raises a TrainingError if no node has the CPUs of a task.
    """
    if not is_parallel(address, at_once):
        yield ALONE
        return
    from heron.distributed.cluster import Tasks, connected, has_gpus, nodes

    with connected(address, "--address" if address else "--at-once"):
        largest, cpus = int(max(node.get("CPU", 0) for node in nodes())), threads or 1
        if cpus > largest:
            raise TrainingError(
                f"a run needs {cpus} CPUs (train.cpu_threads), but the largest node has {largest}; "
                f"set train.cpu_threads={largest}"
            )
        yield Tasks(at_once, int(has_gpus()), cpus)


def is_parallel(address: str | None, at_once: int | None) -> bool:
    """Returns whether work is done by the tasks of Ray, which set `train.cpu_threads`."""
    return address is not None or (at_once or 1) > 1


def train(config: Config, log: Path | None) -> dict[str, Any]:
    """Returns the result of a run, training it first where it has none; its output to a log."""
    from heron.api.job import pretrain
    from heron.training.saved import as_saved

    config = as_saved(config)
    folder = Path(config.run.dir)
    if not is_done(config):
        if log is None:
            return pretrain(config)
        folder.mkdir(parents=True, exist_ok=True)
        with (
            log.open("a", buffering=1) as stream,
            contextlib.redirect_stdout(stream),
            contextlib.redirect_stderr(stream),
        ):
            pretrain(config)
    return read_result(folder / "result.json")


def is_done(config: Config) -> bool:
    """Returns whether the run has a result; ConfigError if its folder has another run."""
    folder = Path(config.run.dir)
    if not (folder / "config.yaml").exists():
        return False
    saved = load_saved(folder, trust_code=None)
    expected = config.in_precision(saved.train.precision)
    if saved.model_copy(update={"run": config.run}) != expected:
        raise ConfigError(
            f"{folder} has a run of another configuration; choose another --out, or add "
            "--overwrite, which moves the whole --out aside"
        )
    return (folder / "result.json").exists()


def refuse_clashes(overrides: Sequence[str], own: Sequence[str]) -> None:
    """Raises a ConfigError for an override of a key in `own`, or of a key below it."""
    clashes = [
        override
        for override in overrides
        if any(f"{override.split('=')[0]}.".startswith(f"{key}.") for key in own)
    ]
    if clashes:
        raise ConfigError(
            f"{', '.join(clashes)}: this is set for each run; leave it out, or use `heron pretrain`"
        )
