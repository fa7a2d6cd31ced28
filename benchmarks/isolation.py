"""Measurements in processes of their own, which isolate memory peaks and crashes."""

import math
import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

OUT_OF_MEMORY = "out of memory"
CONTEXT = multiprocessing.get_context("forkserver")  # imports torch once, not in every process
LEAVE_S = 20.0  # for a process to end
CONTEXT.set_forkserver_preload(["benchmarks.workloads"])


@dataclass(frozen=True)
class Outcome:
    """The outcome of a measurement.

    Attributes:
        seconds: of a forward and backward pass.
        bytes: peak memory above that of the inputs.
        capacity: of the device's memory, in bytes.
        loss_error: relative to the loss in float64.
        gradient_error: the largest over all elements, relative to the largest element.
        missing: why there are no numbers.
    """

    seconds: float = math.nan
    bytes: float = math.nan
    capacity: float = math.inf
    loss_error: float = math.nan
    gradient_error: float = math.nan
    missing: str = ""


def alone(function: Callable[..., Any], *args: Any, limit_s: float) -> Any:
    """Runs a function in its own process; returns its result, or an `Outcome` with the fault."""
    receiver, sender = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=_answer, args=(sender, function, args))
    process.start()
    sender.close()
    try:
        if not receiver.poll(limit_s):
            return Outcome(missing=f"took more than {limit_s:.0f} s")
        result = receiver.recv()
        process.join(LEAVE_S)
        return result
    except EOFError:
        process.join()
        killed = process.exitcode == -9  # by Linux, when memory runs out
        return Outcome(missing=OUT_OF_MEMORY if killed else f"ended with {process.exitcode}")
    finally:
        process.kill()
        process.join()


def _answer(sender: Connection, function: Callable[..., Any], args: Sequence[Any]) -> None:
    try:
        sender.send(function(*args))
    except Exception as error:  # any error of a peer becomes a note under the table
        text = f"{type(error).__name__}: {error}".splitlines()[0][:160]
        full = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
        sender.send(Outcome(missing=OUT_OF_MEMORY if full else text))
