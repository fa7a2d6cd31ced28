"""Maps a function over items in worker processes, which end at once if anything goes wrong.

concurrent.futures and loky do not tell which item killed a process, and end no process at work.
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
    """Calls a function on items in `workers` processes; yields each item with its result when done.

    Anything that ends this early (Ctrl-C, an error, a caller that stops iterating) terminates the
    processes amid their work. Raises what the function raises, and ShardError where a process died;
    messages name an item by its str().
    """
    if min(workers, len(items)) <= 1:
        for item in items:
            yield item, function(item)
        return
    pending = iter(items)
    busy: dict[Connection, Item] = {}
    processes: dict[Connection, SpawnProcess] = {}
    try:
        for _ in range(min(workers, len(items))):
            pipe, process = _start(function)
            processes[pipe] = process
            _send_next(pipe, pending, busy)
        while busy:
            ready = wait(list(busy))
            for pipe in [pipe for pipe in busy if pipe in ready]:
                item = busy.pop(pipe)
                try:
                    result, fault = pipe.recv()
                except (EOFError, OSError):
                    raise _death_error(processes[pipe], item) from None
                if fault is not None:
                    raise fault
                _send_next(pipe, pending, busy)
                yield item, result
    except BaseException:
        for process in processes.values():
            process.terminate()
        raise
    finally:
        for pipe, process in processes.items():
            pipe.close()  # this ends an idle process
            process.join()


def _start(function: Callable[[Item], Result]) -> tuple[Connection, SpawnProcess]:
    # Spawn, as forking a process with threads (torch, a GPU) may hang.
    spawn = multiprocessing.get_context("spawn")
    parent_end, child_end = spawn.Pipe()
    process = spawn.Process(target=_worker_loop, args=(function, child_end), daemon=True)
    resource_tracker.ensure_running()  # else the first process starts it, which would lift the mask
    # A terminal sends Ctrl-C to all processes; workers inherit a mask, so only the parent gets it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    child_end.close()
    return parent_end, process


def _send_next(pipe: Connection, pending: Iterator[Item], busy: dict[Connection, Item]) -> None:
    for item in pending:
        busy[pipe] = item
        with suppress(OSError):  # a dead process is noticed when its result is received
            pipe.send(item)
        return


def _worker_loop(function: Callable[[Item], Result], pipe: Connection) -> None:
    with suppress(EOFError, OSError):
        while True:
            item = pipe.recv()
            result, fault = None, None
            try:
                result = function(item)
            except Exception as error:
                fault = error
                if not isinstance(fault, ShardError | SourceError):
                    fault.add_note(traceback.format_exc())  # pickling drops the traceback
            pipe.send((result, fault))


def _death_error(process: SpawnProcess, item: object) -> ShardError:
    process.join()
    code = process.exitcode or 0
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    hint = " (was memory short?)" if code == -signal.SIGKILL else ""
    return ShardError(
        f"{item}: the process that worked on it {how}{hint}; expected a result; run the same "
        "again, with fewer --workers where memory is short"
    )
