"""Checks, before training, that all processes that were started together train the same run.

Ranks that differ in a seed, the data or the code would train without an error, each something else.
"""

import hashlib
import itertools
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from heron.base.dotted import loaded_files
from heron.base.errors import LOST, STOPPED, Lost, Stopped, TrainingError
from heron.base.shipped import __version__
from heron.distributed.collectives import default_store, rank, world_size
from heron.distributed.watchdog import leave

YAML = {"None": "null", "True": "true", "False": "false"}  # as an experiment's file has them
NAMED = 8  # ranks that an error names
MET, LATE = 0, 255  # in one byte with the numbers of signals
ENDING = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1
LEAVING_S = 10.0  # that rank 0, which has the store, waits for the others to read the verdict
_calls = itertools.count()


def versions() -> dict[str, str]:
    """Returns the versions of Heron, of its source files, of torch and of NumPy."""
    return {
        "heron": __version__,
        "code": code_sha256(tuple(loaded_files())),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


@cache
def code_sha256(user_files: tuple[Path, ...] = ()) -> str:
    """Returns the sha256 of all source files, and of the user's own."""
    digest, root = hashlib.sha256(), Path(__file__).resolve().parents[1]
    files = sorted(path for path in root.rglob("*.py") if "__pycache__" not in path.parts)
    for path in (*files, *user_files):
        name = path.relative_to(root) if path not in user_files else path.name
        digest.update(f"{name}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def agree(
    facts: Mapping[str, Any], timeout_s: float, stop: Callable[[], object] = lambda: False
) -> None:
    """Compares every process's facts with those of the first; every process calls it.

    `facts` are plain values, in nested mappings; `stop` returns whether a signal was received,
    which ends the wait.

    Raises:
        TrainingError: on every process: some differ, and in which keys.
        Lost: some did not answer in time.
        Stopped: a signal was received first.
    """
    if world_size() == 1:
        return
    try:
        _compare(facts, timeout_s, stop)
    except RuntimeError as error:  # of the store, which ended with rank 0
        raise Lost(f"rank 0 ended while all compared what they train: {error}") from None


def _compare(facts: Mapping[str, Any], timeout_s: float, stop: Callable[[], object]) -> None:
    store = default_store(f"heron-agree-{next(_calls)}")
    local_rank, world = rank(), world_size()
    if local_rank == 0:
        store.set("first", json.dumps(facts, sort_keys=True))
    _wait(store, "first", [0], timeout_s, stop)
    first = json.loads(store.get("first"))
    differing = differences(first, json.loads(json.dumps(facts)))
    if differing and (number := store.add("differing", 1)) <= NAMED:
        store.set(f"differs-{number}", f"rank {local_rank}: {'; '.join(differing[:8])}")
    store.set(f"came-{local_rank}", "")
    if store.add("count", 1) == world:
        store.set("all", "")
    _wait(store, "all", range(world), timeout_s, stop)
    if not (count := store.add("differing", 0)):
        return
    lines = [store.get(f"differs-{n}").decode() for n in range(1, min(count, NAMED) + 1)]
    lines.sort(key=lambda line: int(line.split(":")[0].removeprefix("rank ")))
    if store.add("heard", 1) == world:
        store.set("done", "")
    if local_rank == 0:
        with suppress(Lost, Stopped):  # a process that has not read it ends without the store
            _wait(store, "done", (), LEAVING_S, stop)
    raise TrainingError(
        f"the processes would not train the same run: {' | '.join(lines)}; start all of them with "
        "one configuration, copies of one data set and one version of the code"
    )


def _wait(
    store: Any, key: str, ranks: Sequence[int], timeout_s: float, stop: Callable[[], object]
) -> None:
    """Waits for a key; raises Lost with the ranks that did not answer in time."""
    deadline, pause = time.monotonic() + timeout_s, 0.01
    while not store.check([key]):
        if stop():
            raise Stopped("a signal came before all processes said what they train")
        if time.monotonic() > deadline:
            absent = (ranks if key == "first" else _absent(store, ranks))[:NAMED]
            raise Lost(
                f"rank {', '.join(map(str, absent))} did not say within {timeout_s:g} s what it "
                "trains; check that process's log, or raise train.timeout_s"
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.5)  # rank 0 may serve thousands


def _absent(store: Any, ranks: Sequence[int]) -> list[int]:
    """Returns the first absent ranks by bisection, which takes few messages among thousands."""
    if not ranks or store.check([f"came-{n}" for n in ranks]):
        return []
    if len(ranks) == 1:
        return [*ranks]
    half = len(ranks) // 2
    absent = _absent(store, ranks[:half])
    return absent if len(absent) >= NAMED else absent + _absent(store, ranks[half:])


def differences(expected: Any, actual: Any, key: str = "") -> list[str]:
    """Returns the leaves in which two trees differ, as 'key is X, not Y'."""
    if isinstance(expected, dict) and isinstance(actual, dict):
        names = sorted(expected.keys() | actual.keys())
        pairs = [(expected.get(n), actual.get(n), f"{key}.{n}".strip(".")) for n in names]
        return [line for pair in pairs for line in differences(*pair)]
    if expected == actual:
        return []
    has, wants = (YAML.get(str(x), x) for x in (actual, expected))
    return [f"{key} is {has}, not {wants}"]


@contextmanager
def rendezvous(timeout_s: float) -> Iterator[None]:
    """Ends the process where the others do not join in time, or where a signal is received.

    The rendezvous runs in C++, which neither times out nor lets a Python handler run, so a thread
    reads the signal's number from a pipe.
    """
    is_main = threading.current_thread() is threading.main_thread()
    read, write = os.pipe()
    os.set_blocking(write, False)
    old_fd = signal.set_wakeup_fd(write, warn_on_full_buffer=False) if is_main else -1

    def watch() -> None:
        number, deadline = -1, time.monotonic() + timeout_s
        while number not in (MET, *ENDING):
            ready, _, _ = select.select([read], [], [], max(0, deadline - time.monotonic()))
            number = os.read(read, 1)[0] if ready else LATE
            if number == LATE:
                break
        if number == MET:
            return
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        process = f"rank {os.environ.get('RANK')} of {os.environ.get('WORLD_SIZE')}"
        if number == LATE:
            print(
                f"error: {process}: not all processes reached {address} within {timeout_s:g} s; "
                "check the logs of the other hosts, or raise train.timeout_s",
                file=sys.stderr,
            )
            leave(LOST)
        name = signal.Signals(number).name
        print(f"stopped: {process}: {name} before all had reached {address}", file=sys.stderr)
        leave(128 + number if number == signal.SIGINT else STOPPED)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        if is_main:
            signal.set_wakeup_fd(old_fd)
        os.write(write, bytes([MET]))
        thread.join()
        os.close(read)
        os.close(write)
