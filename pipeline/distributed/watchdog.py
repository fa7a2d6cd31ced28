"""Ends a job in which nothing moves: a process died, hangs, or cannot be reached.

A collective that waits for a process that is gone waits for its time-out, which is long or, on a
cut link, for ever. Here every process says where it stands in the store through which the processes
met, and a thread looks on. When its own process has stood still for the time-out, and so have all
others as far as it can hear, it says who is behind and ends its process.

Whether any other has moved is one counter that all count up. Who does not speak any more is found
by the one before it in a ring, and told to all. So a process asks the store a few times a round,
whatever the number of processes.
"""

import itertools
import json
import multiprocessing
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, Self

from heron.pipeline.config.errors import LOST
from heron.pipeline.distributed.collectives import default_store, rank, world_size

LOOKS = 20  # in a time-out
RATE = 1000  # processes that the store hears a second
SILENT = 3  # rounds after which a process that did not speak is told of
JOIN_S = 10.0  # for an answer of the store, which comes at once or never


@dataclass
class Heard:
    """What another process said last.

    Attributes:
        at: its progress, step, host and address.
        moved: when that changed.
        said: what it said, with a number that is new each time.
        spoke: when that changed.
    """

    at: list[str]
    moved: float
    said: str
    spoke: float


class Watchdog:
    """Watches over a process from its first step to its last.

    Attributes:
        step: that the process is at.
        started: whether the processes have met, and are watched.
    """

    def __init__(self, timeout_s: float) -> None:
        """Wait so long for progress; nothing is watched before `start`."""
        self.timeout_s = timeout_s
        self.step = 0
        self._count, self._busy = 0, False
        self._moved = self._answered = self._others = time.monotonic()
        self._told, self._moves = 0, 0  # progress that was told of, and that of all
        self._heard: dict[int, Heard] = {}
        self._silent: dict[int, str] = {}  # what others say of processes that are silent
        self._tells = False
        self._ticks = itertools.count()
        self.started = False
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=t, daemon=True) for t in (self._talk, self._watch)]

    def beat(self, step: int | None = None) -> None:
        """Say that the process has moved on."""
        self.step = self.step if step is None else step
        self._count += 1
        self._moved = time.monotonic()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """While one process works for long, and the others wait for it."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False
            self.beat()

    def start(self) -> None:
        """Begin, once the processes have met; a second call changes nothing."""
        if self.started:
            return
        self.started = True
        self.beat()
        self._others = self._moved
        for thread in self._threads[0 if world_size() > 1 else 1 :]:
            thread.start()

    def __enter__(self) -> Self:
        """What ends when it is left."""
        return self

    def __exit__(self, *error: object) -> None:
        """End, and wait for the threads.

        One that is inside the store when the interpreter ends would abort the process.
        """
        self._ended.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(JOIN_S)

    def report(self) -> str:
        """Where this process stands, who is silent, and where the next of the ring stands."""
        lines = [f"this is rank {rank()} on {socket.gethostname()} at step {self.step}"]
        now = time.monotonic()
        lines += [line for other, line in self._silent.items() if other not in self._heard]
        lines += map(self._line, sorted(self._heard, key=lambda n: self._heard[n].spoke))
        if world_size() > 1 and now - self._answered > self.timeout_s / 2:
            lines.append(
                f"the processes' meeting point at {os.environ.get('MASTER_ADDR', 'rank 0')} has "
                f"not answered for {now - self._answered:.0f} s"
            )
        return "; ".join(lines)

    def autopsy(self) -> str:
        """The report after a moment, in which those that live say so."""
        time.sleep((SILENT + 3) * self._pause)
        return self.report()

    def _talk(self) -> None:
        """Tell the others and hear them; without an answer this waits, and `_watch` does not."""
        store, address = default_store("heron-watchdog"), _address()
        # Often at first, so that who is lost soon after the start is known by name.
        while not self._ended.wait(self._pause if self._heard else self._pause / LOOKS):
            try:
                self._round(store, address)
                self._answered = time.monotonic()
            except RuntimeError:  # nobody holds the store any more; `_watch` says so in time
                continue

    def _round(self, store: Any, address: str) -> None:
        """Say where this process stands, and hear of the others, in a few messages."""
        count = self._count
        at = f"{count} {self.step} {socket.gethostname()} {address}"
        store.set(str(rank()), f"{at} {next(self._ticks)}")
        own = int(count != self._told)
        moves = int(store.add("moves", own))
        if moves != self._moves + own:
            self._others = time.monotonic()
        self._told, self._moves = count, moves
        silent: dict[int, str] = {}
        others = [(rank() + step) % world_size() for step in range(1, world_size())]
        for other in others:  # the next one of the ring, and while that is silent the next
            if not store.check([str(other)]):
                break  # it has not begun yet
            self._note(other, store.get(str(other)).decode())
            if time.monotonic() - self._heard[other].spoke < SILENT * self._pause:
                break
            silent[other] = self._line(other)
        for other in others[len(silent) + 1 :]:
            self._heard.pop(other, None)  # heard of while those before it were silent
        if silent or self._tells:
            store.set("silent", json.dumps(silent))
            self._tells = bool(silent)
        if store.check(["silent"]):
            told = json.loads(store.get("silent"))
            self._silent = {int(other): line for other, line in told.items()}

    def _line(self, other: int) -> str:
        """What is known of another process."""
        now, heard = time.monotonic(), self._heard[other]
        _, step, host, address = heard.at
        return (
            f"rank {other} on {host} ({address}), at step {step}, was last heard "
            f"{now - heard.spoke:.0f} s ago and has not moved for {now - heard.moved:.0f} s"
        )

    def _note(self, other: int, said: str) -> None:
        now, at = time.monotonic(), said.split()[:4]
        before = self._heard.get(other, Heard([], now, "", now))
        self._heard[other] = Heard(
            at,
            before.moved if at == before.at else now,
            said,
            before.spoke if said == before.said else now,
        )

    def _watch(self) -> None:
        while not self._ended.wait(self._pause):
            if self._busy:
                self.beat()
            now = time.monotonic()
            alone = world_size() == 1 or now - self._others > self.timeout_s / 2
            if now - self._moved > self.timeout_s and alone:
                print(
                    f"error: nothing has moved for {self.timeout_s:g} s: {self.report()}; run "
                    "again with run.resume=auto to go on from the last checkpoint",
                    file=sys.stderr,
                    flush=True,
                )
                leave(LOST)

    @property
    def _pause(self) -> float:
        """Seconds between two rounds: at most the store's share of them, of thousands."""
        return min(max(1.0, world_size() / RATE), self.timeout_s / LOOKS)


def leave(status: int) -> NoReturn:
    """End this process and its reading processes, without waiting for what others may hold."""
    sys.stdout.flush()
    sys.stderr.flush()
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(status)


def _address() -> str:
    """This host's address as others see it, or its name."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))
            address: str = probe.getsockname()[0]
            return address
    except OSError:
        return "unknown"
