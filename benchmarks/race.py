"""Contestants of a race take turns, each in a process of its own, so that load hits all alike."""

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

PREFETCH = 4  # batches that a worker reads ahead: of `data.batches`, and of all peers
SETTLE_S = 0.5  # after a turn, for workers to read ahead and fall silent
CONTEXT.set_forkserver_preload(["benchmarks.workloads", "benchmarks.peers"])


@dataclass(frozen=True)
class Contestant:
    """A loader.

    Attributes:
        open: gives, without end, the rows of one batch after another.
        args: of `open`, but for the last.
        workers: the last of them; they must read `PREFETCH` batches ahead.
        team: in so many processes instead, process i of which `open` is told of by (i, team).
    """

    open: Callable[..., Iterator[int]]
    args: Sequence[Any]
    workers: int = 0
    team: int = 0


@dataclass(frozen=True)
class Rate:
    """Of one turn.

    Attributes:
        rows: a second.
        of_core: rows a second of processor time, which the load of others hardly lowers.
    """

    rows: float
    of_core: float


class Stable:
    """The processes of one contestant, ready for their turns.

    Attributes:
        missing: why it cannot take part.
    """

    def __init__(self, contestant: Contestant) -> None:
        self.workers, team = contestant.workers, contestant.team
        lasts: list[Any] = [(i, team) for i in range(team)] or [contestant.workers]
        self.crew = Crew(_serve, [(contestant.open, *contestant.args, last) for last in lasts])
        self.missing = next((str(fault) for fault in self.crew.answers() if fault), "")

    def turn(self, seconds: float) -> Rate | str:
        """The rate of all its processes, or why there is none."""
        found = self.crew.ask((PREFETCH * self.workers, seconds))
        if self.workers:
            time.sleep(SETTLE_S)
        if faults := [answer for answer in found if isinstance(answer, str)]:
            return faults[0]
        rows, processor = (sum(answer[i] for answer in found) for i in (0, 2))
        return Rate(sum(answer[0] / answer[1] for answer in found), rows / processor)


Name = TypeVar("Name", bound=Hashable)


def race(
    contestants: Mapping[Name, Contestant], rounds: int, seconds: float
) -> tuple[dict[Name, list[Rate]], dict[Name, str]]:
    """The rates of every contestant, a round each, and why others have none.

    A round goes through them in order, the next one backwards; the first is not counted.
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
    return {name: found for name, found in rates.items() if name not in missing}, missing


def ratio(these: Sequence[Rate], those: Sequence[Rate]) -> tuple[float, float]:
    """A rate by another of the same round, and the same of processor time; medians of rounds."""
    pairs = list(zip(these, those, strict=True))
    of_rows = statistics.median(a.rows / b.rows for a, b in pairs)
    return of_rows, statistics.median(a.of_core / b.of_core for a, b in pairs)


def processor_seconds() -> float:
    """What this process and the workers that it started have used so far."""
    total = time.process_time()
    for process in multiprocessing.active_children():
        used = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        total += (int(used[11]) + int(used[12])) / os.sysconf("SC_CLK_TCK")  # user and system
    return total


def _serve(connection: Connection, open_: Callable[..., Iterator[int]], *args: Any) -> None:
    """Read when told to: so many batches that lie ready, then for so many seconds."""
    torch.set_num_threads(1)
    try:
        batches = open_(*args)
        next(batches)
        connection.send("")
        while True:
            ready, seconds = connection.recv()
            for _ in range(ready):
                next(batches)
            rows, used, start, spent = 0, processor_seconds(), time.perf_counter(), 0.0
            while spent < seconds:
                rows += next(batches)
                spent = time.perf_counter() - start
            connection.send((rows, spent, processor_seconds() - used))
    except EOFError:
        return  # nobody asks any more
    except Exception as error:  # whatever a peer may raise makes a note under the table
        connection.send(f"{type(error).__name__}: {error}".splitlines()[0][:160])
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves them out; peers' free shared memory
