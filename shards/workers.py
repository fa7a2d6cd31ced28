"""Worker processes: a function over many items, ended at once where something goes wrong.

concurrent.futures and loky say not on which item a process was killed, and end none while it works.
"""

import multiprocessing
import signal
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import TypeVar

from heron.shards.errors import ShardError, SourceError

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_parallel(
    function: Callable[[Item], Result], items: Sequence[Item], workers: int
) -> Generator[tuple[Item, Result], None, None]:
    """Calls a function on items in so many processes; gives each with its result, when done.

    Whatever ends this early (Ctrl-C, a fault, a caller that goes on no further) ends the processes
    in the midst of their work. An item's text names it in messages.

    Raises:
        ShardError: a process died.
        Exception: what the function raises.
    """
    if min(workers, len(items)) <= 1:
        for item in items:
            yield item, function(item)
        return
    left = iter(items)
    busy: dict[Connection, Item] = {}
    processes: dict[Connection, SpawnProcess] = {}
    try:
        for _ in range(min(workers, len(items))):
            pipe, process = _start(function)
            processes[pipe] = process
            _send(pipe, left, busy)
        while busy:
            ready = wait(list(busy))
            for pipe in [pipe for pipe in busy if pipe in ready]:
                item = busy.pop(pipe)
                try:
                    result, fault = pipe.recv()
                except (EOFError, OSError):
                    raise _died(processes[pipe], item) from None
                if fault is not None:
                    raise fault
                _send(pipe, left, busy)
                yield item, result
    except BaseException:
        for process in processes.values():
            process.terminate()
        raise
    finally:
        for pipe, process in processes.items():
            pipe.close()  # which ends an idle process
            process.join()


def _start(function: Callable[[Item], Result]) -> tuple[Connection, SpawnProcess]:
    # Spawn, since a fork of a process with threads (torch, a GPU) may hang.
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_work, args=(function, theirs), daemon=True)
    resource_tracker.ensure_running()  # or it begins with the first process, and lifts the mask
    # A terminal sends Ctrl-C to all processes, and it is for us alone: a mask is inherited.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    theirs.close()
    return ours, process


def _send(pipe: Connection, left: Iterator[Item], busy: dict[Connection, Item]) -> None:
    """Gives a process the next item, if there is one."""
    for item in left:
        busy[pipe] = item
        with suppress(OSError):  # it has died, which is found when its result is asked for
            pipe.send(item)
        return


def _work(function: Callable[[Item], Result], pipe: Connection) -> None:
    """Answers items with results until the other end closes."""
    with suppress(EOFError, OSError):
        while True:
            item = pipe.recv()
            result, fault = None, None
            try:
                result = function(item)
            except Exception as raised:
                fault = raised
                if not isinstance(fault, ShardError | SourceError):
                    fault.add_note(traceback.format_exc())  # which does not travel otherwise
            pipe.send((result, fault))


def _died(process: SpawnProcess, item: object) -> ShardError:
    process.join()
    code = process.exitcode or 0
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    why = " (was memory short?)" if code == -signal.SIGKILL else ""
    return ShardError(
        f"{item}: the process that worked on it {how}{why}; expected a result; run the same "
        "again, with fewer --workers where memory is short"
    )
