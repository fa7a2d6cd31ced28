"""Maps a function over items: in worker processes, or wherever another executor has it done.

Worker processes end at once if anything goes wrong. concurrent.futures and loky do not tell which
item killed a process, and end no process at work.
"""

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import NamedTuple, Protocol, TypeVar

from heron.base.errors import HeronError, ShardError

END_S = 10.0  # that a process has to end; it has nothing to save
Item = TypeVar("Item")
Result = TypeVar("Result")


class Executor(Protocol):
    """Maps a function over items; what is computed does not depend on where.

    `Processes` are those of this machine, `heron.distributed.cluster.Tasks` those of a Ray cluster.
    """

    def map(
        self, function: Callable[[Item], Result], items: Sequence[Item]
    ) -> Generator[tuple[Item, Result], None, None]:
        """Calls a function on items, all of which can be pickled; yields each with its result.

        They come as they are done, in any order. Raises what the function raises, and ShardError,
        which names the item by its str(), where a process died. Whatever ends it early ends the
        work on all items, too.
        """
        ...


class Processes(NamedTuple):
    """An executor of some processes of this machine; a single one is the caller's own.

    Anything that ends a map early (Ctrl-C, an error, a caller that stops iterating) terminates the
    processes amid their work.
    """

    workers: int = 1

    def map(
        self, function: Callable[[Item], Result], items: Sequence[Item]
    ) -> Generator[tuple[Item, Result], None, None]:
        """Calls a function on items: see `Executor`."""
        if min(self.workers, len(items)) <= 1:
            for item in items:
                yield item, function(item)
            return
        pending = iter(items)
        busy: dict[Connection, Item] = {}
        processes: dict[Connection, SpawnProcess] = {}
        try:
            for _ in range(min(self.workers, len(items))):
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
                _end(process)


ALONE = Processes()


def in_order(
    items: Iterable[Item], results: Iterable[tuple[Item, Result]]
) -> Iterator[tuple[Item, Result]]:
    """Yields the results of `Executor.map` in the order of its items, each as soon as it can."""
    done, arriving = dict[Item, Result](), iter(results)
    for item in items:
        while item not in done:
            arrived, result = next(arriving)
            done[arrived] = result
        yield item, done.pop(item)


def _start(function: Callable[[Item], Result]) -> tuple[Connection, SpawnProcess]:
    # Spawn, as forking a process with threads (torch, a GPU) may hang.
    spawn = multiprocessing.get_context("spawn")
    parent_end, child_end = spawn.Pipe()
    # Libraries that move C's environment (Ray does) leave what Python sets later out of it.
    given = function, child_end, dict(os.environ)
    process = spawn.Process(target=_worker_loop, args=given, daemon=True)
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


def _worker_loop(
    function: Callable[[Item], Result], pipe: Connection, environment: dict[str, str]
) -> None:
    os.environ.update(environment)
    with suppress(EOFError, OSError):
        while True:
            pipe.send(outcome(function, pipe.recv()))


def outcome(
    function: Callable[[Item], Result], item: Item
) -> tuple[Result | None, Exception | None]:
    """Returns the result of a call, or the exception that it ended with, to send to the caller."""
    try:
        return function(item), None
    except Exception as fault:
        if not isinstance(fault, HeronError):
            fault.add_note(traceback.format_exc())  # pickling drops the traceback
        return None, fault


def _end(process: SpawnProcess) -> None:
    """Waits until a process has ended; after `END_S`, as where it was stopped, it is killed."""
    process.join(END_S)
    process.kill()
    process.join()


def _death_error(process: SpawnProcess, item: object) -> ShardError:
    _end(process)
    code = process.exitcode or 0
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    hint = " (was memory short?)" if code == -signal.SIGKILL else ""
    return ShardError(
        f"{item}: the process that worked on it {how}{hint}; run the same command again, with "
        "fewer --workers if memory is short"
    )
