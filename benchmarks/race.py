"""Loaders that take turns, each in its own processes, so that other load affects all alike."""

import atexit
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.crew import Crew
from benchmarks.isolation import CONTEXT

PREFETCH = 4  # batches that a worker reads ahead, of ours and of all peers
SETTLE_S = 0.5  # after a turn, for workers to finish reading ahead
CONTEXT.set_forkserver_preload(["benchmarks.workloads", "benchmarks.peers"])


@dataclass(frozen=True)
class Contestant:
    """A loader.

    Attributes:
        open: yields, without end, the number of rows of one batch after another.
        args: of `open`, without the last one.
        workers: the last argument; they must read `PREFETCH` batches ahead.
        team: number of processes to use instead; the last argument of process i is (i, team).
    """

    open: Callable[..., Iterator[int]]
    args: Sequence[Any]
    workers: int = 0
    team: int = 0


@dataclass(frozen=True)
class Rate:
    """The rate of one turn.

    Attributes:
        rows: per second.
        of_core: rows per second of processor time, which other load hardly lowers.
    """

    rows: float
    of_core: float


class Stable:
    """The processes of one contestant, ready for their turns.

    Attributes:
        missing: why the contestant cannot take part.
    """

    def __init__(self, contestant: Contestant) -> None:
        self.workers, team = contestant.workers, contestant.team
        lasts: list[Any] = [(i, team) for i in range(team)] or [contestant.workers]
        self.crew = Crew(_serve, [(contestant.open, *contestant.args, last) for last in lasts])
        self.missing = next((str(fault) for fault in self.crew.answers() if fault), "")

    def turn(self, seconds: float) -> Rate | str:
        """Returns the rate of all its processes, or why there is none."""
        answers = self.crew.ask((PREFETCH * self.workers, seconds))
        if self.workers:
            time.sleep(SETTLE_S)
        if faults := [answer for answer in answers if isinstance(answer, str)]:
            return faults[0]
        rows, processor = (sum(answer[i] for answer in answers) for i in (0, 2))
        return Rate(sum(answer[0] / answer[1] for answer in answers), rows / processor)


Name = TypeVar("Name", bound=Hashable)


def race(
    contestants: Mapping[Name, Contestant], rounds: int, seconds: float
) -> tuple[dict[Name, list[Rate]], dict[Name, str]]:
    """Returns the rates of every contestant, one per round, and why other contestants have none.

    Rounds go through the contestants in order and backwards by turns; the first is not counted.
    """
    rates: dict[Name, list[Rate]] = {}
    missing: dict[Name, str] = {}
    stables: dict[Name, Stable] = {}
    try:
        for name, contestant in contestants.items():
            stables[name] = Stable(contestant)
            missing[name] = stables[name].missing
        for number in range(rounds + 1):
            for name in list(stables)[:: -1 if number % 2 else 1]:
                rate: Rate | str = missing[name] or stables[name].turn(seconds)
                if isinstance(rate, str):
                    missing[name] = rate
                elif number:
                    rates.setdefault(name, []).append(rate)
    finally:
        for stable in stables.values():
            stable.crew.close()
    missing = {name: fault for name, fault in missing.items() if fault}
    return {
        name: rates_of_name for name, rates_of_name in rates.items() if name not in missing
    }, missing


def ratio(numerators: Sequence[Rate], denominators: Sequence[Rate]) -> tuple[float, float]:
    """Returns the median over rounds of the ratio of rates, by time and by processor time."""
    pairs = list(zip(numerators, denominators, strict=True))
    of_rows = statistics.median(a.rows / b.rows for a, b in pairs)
    return of_rows, statistics.median(a.of_core / b.of_core for a, b in pairs)


def processor_seconds() -> float:
    """Returns the processor time of this process and of the workers that it started."""
    total = time.process_time()
    for process in multiprocessing.active_children():
        used = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        total += (int(used[11]) + int(used[12])) / os.sysconf("SC_CLK_TCK")  # user and system
    return total


def _serve(connection: Connection, open_: Callable[..., Iterator[int]], *args: Any) -> None:
    """Reads on request: the batches that are prefetched, then more for some seconds."""
    torch.set_num_threads(1)
    try:
        batches = open_(*args)
        next(batches)
        connection.send("")
        while True:
            prefetched, seconds = connection.recv()
            for _ in range(prefetched):
                next(batches)
            rows, used_before, start, elapsed = 0, processor_seconds(), time.perf_counter(), 0.0
            while elapsed < seconds:
                rows += next(batches)
                elapsed = time.perf_counter() - start
            connection.send((rows, elapsed, processor_seconds() - used_before))
    except EOFError:
        return  # the connection is closed
    except Exception as error:  # any error of a peer becomes a note under the table
        connection.send(f"{type(error).__name__}: {error}".splitlines()[0][:160])
    finally:
        atexit._run_exitfuncs()  # multiprocessing skips them; those of peers free shared memory
