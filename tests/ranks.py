"""Run a plain function on N gloo processes that meet through a file.

They are forked from a server that has the libraries loaded (see `preloaded`): a start takes
milliseconds where a new interpreter takes seconds.
"""

import contextlib
import faulthandler
import os
import tempfile
import time
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from heron.distributed.watchdog import leave


def begin_server() -> None:
    """Start the server, unless it runs; in another folder it would not find `tests`."""
    with contextlib.chdir(Path(__file__).parent.parent):
        forkserver.ensure_running()


def run(world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call function(*args) on every process; its results in order of rank.

    Args:
        world: number of processes; with 1 there is a process group of one.
        function: importable, its result can be saved by torch.
    """
    begin_server()
    with tempfile.TemporaryDirectory() as folder:
        given = world, folder, dict(os.environ), function, args
        context = start_processes(  # type: ignore[no-untyped-call]
            _start, given, world, join=False, start_method="forkserver"
        )
        assert context is not None
        deadline = time.monotonic() + 600
        while not context.join(timeout=5):
            if time.monotonic() > deadline:
                for process in context.processes:
                    process.kill()
                raise TimeoutError(f"{function.__name__} hangs on {world} processes")
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(world)]


def _start(
    rank: int,
    world: int,
    folder: str,
    environment: dict[str, str],  # the server has that of the moment when it began
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    os.environ.clear()
    os.environ |= environment | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
    }
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world
    )
    result = function(*args)
    torch.save(result, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
    leave(0)  # a thread of a library can abort the interpreter's end
