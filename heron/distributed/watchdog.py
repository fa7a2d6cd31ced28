"""Ends a job that makes no progress: a process died, hangs, or cannot be reached.

A collective waits for a process that is gone until its time-out, which is long, or on a cut link
for ever. So every process writes its progress to the rendezvous store, and a thread watches. When
its own process has made no progress for the time-out, and neither has any other that it can hear,
it names the silent ones and ends its process.

All processes increment one counter, which shows whether any other made progress. A silent process
is found by the one before it in a ring, which reports it to all. So a process sends the store a few
messages a round, whatever the number of processes.
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

from heron.base.errors import LOST
from heron.distributed.collectives import default_store, rank, world_size

LOOKS = 20  # rounds in a time-out, at least
RATE = 1000  # processes that the store serves a second
SILENT = 3  # rounds without a message after which a process is reported
JOIN_S = 10.0  # to wait for an answer of the store, which comes at once or never


@dataclass
class Heartbeat:
    """The last message of another process.

    Attributes:
        status: its progress, step, host and address.
        moved_at: when the status changed.
        message: the status and a number that is new in each message.
        heard_at: when the message changed.
    """

    status: list[str]
    moved_at: float
    message: str
    heard_at: float


class Watchdog:
    """Watches a process from its first step to its last; `step` is the current one."""

    def __init__(self, timeout_s: float) -> None:
        """Waits `timeout_s` for progress; watches nothing before `start`."""
        self.timeout_s = timeout_s
        self.step = 0
        self._count, self._busy = 0, False
        self._moved = self._answered = self._others = time.monotonic()
        self._published, self._total_moves = 0, 0  # own progress in the store, and that of all
        self._heartbeats: dict[int, Heartbeat] = {}
        self._silent: dict[int, str] = {}  # lines of others about silent processes
        self._reports_silent = False
        self._ticks = itertools.count()
        self.started = False
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=t, daemon=True) for t in (self._talk, self._watch)]

    def beat(self, step: int | None = None) -> None:
        """Notes that the process has made progress."""
        self.step = self.step if step is None else step
        self._count += 1
        self._moved = time.monotonic()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Context of long work of one process, for which the others wait."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False
            self.beat()

    def start(self) -> None:
        """Starts to watch, after the rendezvous; a second call changes nothing."""
        if self.started:
            return
        self.started = True
        self.beat()
        self._others = self._moved
        for thread in self._threads[0 if world_size() > 1 else 1 :]:
            thread.start()

    def __enter__(self) -> Self:
        """Returns the watchdog, which ends with the context."""
        return self

    def __exit__(self, *error: object) -> None:
        """Joins the threads: one in the store when the interpreter ends would abort the process."""
        self._ended.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(JOIN_S)

    def report(self) -> str:
        """Returns the state of this process, of silent ones, and of the next in the ring."""
        lines = [f"this is rank {rank()} on {socket.gethostname()} at step {self.step}"]
        now = time.monotonic()
        lines += [line for other, line in self._silent.items() if other not in self._heartbeats]
        lines += map(
            self._line, sorted(self._heartbeats, key=lambda n: self._heartbeats[n].heard_at)
        )
        if world_size() > 1 and now - self._answered > self.timeout_s / 2:
            lines.append(
                f"the processes' meeting point at {os.environ.get('MASTER_ADDR', 'rank 0')} has "
                f"not answered for {now - self._answered:.0f} s"
            )
        return "; ".join(lines)

    def final_report(self) -> str:
        """Returns the report, after a few rounds in which living processes are heard."""
        time.sleep((SILENT + 3) * self._pause)
        return self.report()

    def _talk(self) -> None:
        """Sends and reads heartbeats; blocks where the store does not answer."""
        store, address = default_store("heron-watchdog"), _address()
        # Often at first, so that a process that is lost soon after the start can be named.
        while not self._ended.wait(self._pause if self._heartbeats else self._pause / LOOKS):
            try:
                self._round(store, address)
                self._answered = time.monotonic()
            except RuntimeError:  # the store is gone; `_watch` reports it in time
                continue

    def _round(self, store: Any, address: str) -> None:
        """Sends this process's heartbeat and reads those of others, in a few messages."""
        count = self._count
        status = f"{count} {self.step} {socket.gethostname()} {address}"
        store.set(str(rank()), f"{status} {next(self._ticks)}")
        moved = int(count != self._published)
        total_moves = int(store.add("moves", moved))
        if total_moves != self._total_moves + moved:
            self._others = time.monotonic()
        self._published, self._total_moves = count, total_moves
        silent: dict[int, str] = {}
        others = [(rank() + step) % world_size() for step in range(1, world_size())]
        for other in others:  # the next in the ring; where that is silent, the one after it
            if not store.check([str(other)]):
                break  # it has not started yet
            self._note(other, store.get(str(other)).decode())
            if time.monotonic() - self._heartbeats[other].heard_at < SILENT * self._pause:
                break
            silent[other] = self._line(other)
        for other in others[len(silent) + 1 :]:
            self._heartbeats.pop(other, None)  # read while those before it were silent
        if silent or self._reports_silent:
            store.set("silent", json.dumps(silent))
            self._reports_silent = bool(silent)
        if store.check(["silent"]):
            lines = json.loads(store.get("silent"))
            self._silent = {int(other): line for other, line in lines.items()}

    def _line(self, other: int) -> str:
        now, heartbeat = time.monotonic(), self._heartbeats[other]
        _, step, host, address = heartbeat.status
        return (
            f"rank {other} on {host} ({address}), at step {step}, was last heard "
            f"{now - heartbeat.heard_at:.0f} s ago and has not moved for "
            f"{now - heartbeat.moved_at:.0f} s"
        )

    def _note(self, other: int, message: str) -> None:
        now, status = time.monotonic(), message.split()[:4]
        last = self._heartbeats.get(other, Heartbeat([], now, "", now))
        self._heartbeats[other] = Heartbeat(
            status,
            last.moved_at if status == last.status else now,
            message,
            last.heard_at if message == last.message else now,
        )

    def _watch(self) -> None:
        while not self._ended.wait(self._pause):
            if self._busy:
                self.beat()
            now = time.monotonic()
            others_stand = world_size() == 1 or now - self._others > self.timeout_s / 2
            if now - self._moved > self.timeout_s and others_stand:
                print(
                    f"error: nothing has moved for {self.timeout_s:g} s: {self.report()}; run "
                    "again with run.resume=auto to continue from the last checkpoint",
                    file=sys.stderr,
                    flush=True,
                )
                leave(LOST)

    @property
    def _pause(self) -> float:
        """Seconds between two rounds: more with thousands of processes, which share the store."""
        return min(max(1.0, world_size() / RATE), self.timeout_s / LOOKS)


def leave(status: int) -> NoReturn:
    """Ends this process and its reading processes at once, without any cleanup that may block."""
    sys.stdout.flush()
    sys.stderr.flush()
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(status)


def _address() -> str:
    """Returns this host's address as others see it, or "unknown"."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))
            address: str = probe.getsockname()[0]
            return address
    except OSError:
        return "unknown"
