"""Teams of processes that train in turns, each for a given number of steps."""

import contextlib
import io
import os
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from benchmarks.crew import Crew
from benchmarks.isolation import CONTEXT
from benchmarks.race import Rate

WARM = 2  # steps before the first turn
ALONE = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}  # what a launcher would set

CONTEXT.set_forkserver_preload(
    [
        "benchmarks.workloads",
        "benchmarks.peers",
        "benchmarks.scaling_steps",
        "torch._inductor",  # every optimiser's first step loads it, in two seconds
    ]
)


class Gate:
    """Called by a contestant after every step; blocks between the contestant's turns.

    Attributes:
        suffix: of the run's folder, which separate processes must not share.
    """

    def __init__(self, connection: Connection, suffix: str) -> None:
        self.connection, self.suffix = connection, suffix
        self.steps_left = WARM
        self.first: float | None = None
        self.clock = self.processor = 0.0

    def __call__(self, loss: float | torch.Tensor) -> None:
        """Counts a step; the first loss is sent as the first answer."""
        if self.first is None:
            self.first = float(loss)
        self.steps_left -= 1
        if self.steps_left:
            return
        spent = time.perf_counter() - self.clock, time.process_time() - self.processor
        self.connection.send(spent if self.clock else self.first)
        self.steps_left = self.connection.recv()
        self.clock, self.processor = time.perf_counter(), time.process_time()


@dataclass(frozen=True)
class Contestant:
    """A way to train.

    Attributes:
        train: calls the gate, its first argument, after every step, without end.
        args: its other arguments.
        rows: of one step, over all its processes.
        world: number of processes.
        apart: the processes form no group; each trains alone.
    """

    train: Callable[..., None]
    args: Sequence[Any]
    rows: int
    world: int = 1
    apart: bool = False


class Team:
    """The processes of one contestant.

    Attributes:
        first_answers: the first answer of each process.
        missing: why the contestant cannot take part.
    """

    def __init__(self, contestant: Contestant, folder: Path) -> None:
        self.contestant = contestant
        self.crew = Crew(_serve, [(contestant, i, folder) for i in range(contestant.world)])
        self.first_answers = self.crew.answers()
        self.missing = next(
            (answer for answer in self.first_answers if isinstance(answer, str)), ""
        )

    def turn(self, steps: int) -> Rate | str:
        """The rate of all its processes over so many steps, or why there is none."""
        answers = self.crew.ask(steps)
        if faults := [answer for answer in answers if isinstance(answer, str)]:
            return faults[0]
        seconds, processor = zip(*answers, strict=True)
        rows = steps * self.contestant.rows
        return Rate(rows / max(seconds), rows / sum(processor))


Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Results:
    """The results of a race.

    Attributes:
        rates: of every contestant, one per round.
        losses: of its first step.
        missing: why other contestants have no rates.
    """

    rates: dict[Any, list[Rate]]
    losses: dict[Any, float]
    missing: dict[Any, str]


def race(
    contestants: Mapping[Name, Contestant], folder: Path, rounds: int, seconds: float
) -> Results:
    """Lets all take turns of equal length, in order and backwards; the first round is not counted.

    Args:
        contestants: by name.
        folder: for the rendezvous of processes.
        rounds: that are counted.
        seconds: of a turn, roughly: the steps that fit into it are determined in advance.
    """
    rates: dict[Name, list[Rate]] = {}
    losses: dict[Name, float] = {}
    missing: dict[Name, str] = {}
    steps: dict[Name, int] = {}
    teams: dict[Name, Team] = {}
    try:
        for number, (name, contestant) in enumerate(contestants.items()):
            teams[name] = team = Team(contestant, folder / f"team{number}")
            missing[name] = team.missing
            if not team.missing:
                losses[name] = team.first_answers[0]
        for round_ in range(rounds + 1):
            for name in list(teams)[:: -1 if round_ % 2 else 1]:
                rate = missing[name] or teams[name].turn(steps.get(name, 1))
                if isinstance(rate, str):
                    missing[name] = rate
                elif round_:
                    rates.setdefault(name, []).append(rate)
                else:
                    steps[name] = max(1, round(seconds * rate.rows / contestants[name].rows))
    finally:
        for team in teams.values():
            team.crew.close()
    missing = {name: fault for name, fault in missing.items() if fault}
    return Results({name: r for name, r in rates.items() if name not in missing}, losses, missing)


def together(function: Callable[..., None], args: Sequence[Any], world: int, folder: Path) -> Any:
    """Returns the first answer of every process of a group, in order of rank.

    Raises:
        RuntimeError: one of them failed.
    """
    team = Team(Contestant(function, args, 0, world), folder)
    team.crew.close()
    if team.missing:
        raise RuntimeError(team.missing)
    return team.first_answers


def _serve(connection: Connection, contestant: Contestant, rank: int, folder: Path) -> None:
    """Joins the group and trains in silence, until the connection is closed."""
    torch.set_num_threads(1)
    world = 1 if contestant.apart else contestant.world
    for name in ALONE:
        os.environ.pop(name, None)
    silence = io.StringIO()
    try:
        if world > 1:
            numbers = {"RANK": rank, "LOCAL_RANK": rank}
            numbers |= {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
            os.environ |= {name: str(number) for name, number in numbers.items()}
            folder.mkdir(parents=True, exist_ok=True)
            meet = f"file://{folder}/meet"
            dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=world)
        with contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
            suffix = str(rank) if contestant.apart else ""
            contestant.train(Gate(connection, suffix), *contestant.args)
    except EOFError:
        return
    except Exception as error:  # whatever a peer may raise makes a note under the table
        connection.send(f"{type(error).__name__}: {error}".splitlines()[0][:160])
