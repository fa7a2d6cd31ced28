"""Whether the processes that were started together would train the same run, before they begin.

Ranks that differ in a seed, the data or the code train without a word, each something else.
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

import heron
from heron.pipeline.config.data import without_places
from heron.pipeline.config.errors import LOST, STOPPED, Lost, Stopped, TrainingError
from heron.pipeline.config.experiment import Config
from heron.pipeline.distributed.collectives import default_store, rank, world_size
from heron.pipeline.distributed.watchdog import leave
from heron.shards.artefact import fingerprint
from heron.shards.dotted import loaded_files

HERE = {  # what may differ from host to host, and changes no number
    "run": {"dir"},
    "data": {"cache", "storage_options", "verify", "workers"},
    "train": {"cpu_threads"},
}
NAMED = 8  # ranks that an error names
MET, LATE = 0, 255  # beside the numbers of signals
ENDING = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1
LEAVING_S = 10.0  # for the others to hear a verdict, before rank 0 takes the store away
_calls = itertools.count()


def run_facts(config: Config) -> dict[str, Any]:
    """Returns what decides the numbers of a run, but its data: configuration and versions."""
    tree = config.model_dump(mode="json", exclude={"tracking"})
    tree["data"] = without_places(tree["data"])
    for section, keys in HERE.items():
        for key in keys:
            del tree[section][key]
    return {**tree, "versions": versions()}


def run_fingerprint(config: Config, data: str) -> str:
    """Returns what two runs share whose numbers are the same: see `run_facts`."""
    facts = run_facts(config)
    facts["data"]["fingerprint"] = data
    del facts["run"]  # how it is resumed
    for key in ("timeout_s", "keep_checkpoints", "save_every_epochs", "save_every_steps"):
        del facts["train"][key]
    return fingerprint(facts)


def versions() -> dict[str, str]:
    """Returns the versions of Heron, of its source files, and of what computes."""
    return {
        "heron": heron.__version__,
        "code": code_sha256(tuple(loaded_files())),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


@cache
def code_sha256(own: tuple[Path, ...] = ()) -> str:
    """Returns the sha256 of all source files, and of those of the user's own parts."""
    digest, root = hashlib.sha256(), Path(heron.__file__).resolve().parent
    files = sorted(path for path in root.glob("*/**/*.py") if "__pycache__" not in path.parts)
    for path in (*files, *own):
        name = path.relative_to(root) if path not in own else path.name
        digest.update(f"{name}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def agree(
    mine: Mapping[str, Any], timeout_s: float, stop: Callable[[], object] = lambda: False
) -> None:
    """Compares what a process would do with what the first would; every process calls it.

    Args:
        mine: plain values, in nested mappings.
        timeout_s: how long to wait for all processes.
        stop: says whether a signal has come, which ends the wait.

    Raises:
        TrainingError: on every process: some differ, and in which keys.
        Lost: some did not come in time.
        Stopped: a signal came first.
    """
    if world_size() == 1:
        return
    try:
        _compare(mine, timeout_s, stop)
    except RuntimeError as error:  # of a store that rank 0 has taken away
        raise Lost(f"rank 0 ended while all compared what they train: {error}") from None


def _compare(mine: Mapping[str, Any], timeout_s: float, stop: Callable[[], object]) -> None:
    store, me, world = default_store(f"heron-agree-{next(_calls)}"), rank(), world_size()
    if me == 0:
        store.set("first", json.dumps(mine, sort_keys=True))
    _wait(store, "first", [0], timeout_s, stop)
    first = json.loads(store.get("first"))
    differing = differences(first, json.loads(json.dumps(mine)))
    if differing and (place := store.add("differing", 1)) <= NAMED:
        store.set(f"differs-{place}", f"rank {me}: {'; '.join(differing[:8])}")
    store.set(f"came-{me}", "")
    if store.add("count", 1) == world:
        store.set("all", "")
    _wait(store, "all", range(world), timeout_s, stop)
    if not (count := store.add("differing", 0)):
        return
    lines = [store.get(f"differs-{n}").decode() for n in range(1, min(count, NAMED) + 1)]
    lines.sort(key=lambda line: int(line.split(":")[0].removeprefix("rank ")))
    if store.add("heard", 1) == world:
        store.set("done", "")
    if me == 0:
        with suppress(Lost, Stopped):  # whoever has not heard it ends for want of the store
            _wait(store, "done", (), LEAVING_S, stop)
    raise TrainingError(
        f"the processes would not train the same run: {' | '.join(lines)}; expected "
        "what rank 0 has; start all with one configuration, copies of one data set and one "
        "version of the code"
    )


def _wait(
    store: Any, key: str, ranks: Sequence[int], timeout_s: float, stop: Callable[[], object]
) -> None:
    """Waits for a key, and names the ranks that did not come in time."""
    deadline, pause = time.monotonic() + timeout_s, 0.01
    while not store.check([key]):
        if stop():
            raise Stopped("a signal came before all processes said what they train")
        if time.monotonic() > deadline:
            absent = (ranks if key == "first" else _absent(store, ranks))[:NAMED]
            raise Lost(
                f"rank {', '.join(map(str, absent))} did not say within {timeout_s:g} s what "
                "it trains; expected an answer of all; look at that process's log, or raise "
                "train.timeout_s"
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.5)  # rank 0 has the store of thousands


def _absent(store: Any, ranks: Sequence[int]) -> list[int]:
    """Returns the first ranks that did not come, found by halves: few messages of thousands."""
    if not ranks or store.check([f"came-{n}" for n in ranks]):
        return []
    if len(ranks) == 1:
        return [*ranks]
    half = len(ranks) // 2
    found = _absent(store, ranks[:half])
    return found if len(found) >= NAMED else found + _absent(store, ranks[half:])


def differences(expected: Any, found: Any, key: str = "") -> list[str]:
    """Returns the leaves in which two trees differ, as 'key is X, not Y'."""
    if isinstance(expected, dict) and isinstance(found, dict):
        names = sorted(expected.keys() | found.keys())
        pairs = [(expected.get(n), found.get(n), f"{key}.{n}".strip(".")) for n in names]
        return [line for pair in pairs for line in differences(*pair)]
    return [] if expected == found else [f"{key} is {found}, not {expected}"]


@contextmanager
def meeting(timeout_s: float) -> Iterator[None]:
    """Ends the process where the others do not come in time, or where a signal does.

    The processes meet in C++, which neither ends nor lets a Python handler run; what the signal
    leaves in a pipe is read by a thread.
    """
    main = threading.current_thread() is threading.main_thread()
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False) if main else -1

    def watch() -> None:
        number, deadline = -1, time.monotonic() + timeout_s
        while number not in (MET, *ENDING):
            ready, _, _ = select.select([read], [], [], max(0, deadline - time.monotonic()))
            number = os.read(read, 1)[0] if ready else LATE
            if number == LATE:
                break
        if number == MET:
            return
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        who = f"rank {os.environ.get('RANK')} of {os.environ.get('WORLD_SIZE')}"
        if number == LATE:
            print(
                f"error: {who}: not all processes came to {where} within {timeout_s:g} s; expected "
                "every one of them; look at the logs of the other hosts, or raise train.timeout_s",
                file=sys.stderr,
            )
            leave(LOST)
        name = signal.Signals(number).name
        print(f"stopped: {who}: {name} came before all were at {where}", file=sys.stderr)
        leave(128 + number if number == signal.SIGINT else STOPPED)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        if main:
            signal.set_wakeup_fd(before)
        os.write(write, bytes([MET]))
        thread.join()
        os.close(read)
        os.close(write)
