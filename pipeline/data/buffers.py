"""Buffers for batches that are used again, in memory that reading processes share with the trainer.

Fresh pages cost about as much as a picture takes to decode, so the buffer of a batch serves again
as soon as nothing refers to an array or a tensor of it. The memory belongs to no file system: the
size of /dev/shm, which containers keep small, is no limit.
"""

import math
import mmap
import os
import weakref
from collections.abc import Mapping
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np
from numpy.typing import NDArray

ALIGNMENT = 64  # bytes at whose multiples arrays begin

ArraySpec = tuple[tuple[int, ...], str]  # shape and dtype of an array
Buffer = Mapping[str, NDArray[Any]]  # the arrays of a batch, by name


class BufferPool:
    """Buffers of equal size in shared memory, some for each reading process.

    A reading process marks the buffer that it fills, and the trainer takes the mark off once
    nothing refers to an array of it, so neither waits for the other.
    """

    def __init__(self, specs: Mapping[str, ArraySpec], readers: int, count: int) -> None:
        """Reserves `count` buffers a reader; pages are taken when they are first written."""
        sizes = [math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in specs.values()]
        ends = np.cumsum([0, *map(_aligned, sizes)]).tolist()
        self.specs, self.offsets = dict(specs), dict(zip(specs, ends, strict=False))
        self.count, self.bytes = count, ends[-1]
        self._marks = _aligned(readers * count)  # bytes, before the buffers
        self._descriptor = os.memfd_create("heron-batches")
        os.ftruncate(self._descriptor, self._marks + readers * count * self.bytes)
        self._map()

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a reading process is given: the same memory."""
        return self.__dict__ | {"_memory": None, "_descriptor": DupFd(self._descriptor)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Maps the memory of the process that this one came from."""
        self.__dict__ = state
        self._descriptor = state["_descriptor"].detach()
        self._map()

    def _map(self) -> None:
        weakref.finalize(self, os.close, self._descriptor)
        self._memory = mmap.mmap(self._descriptor, 0)

    def acquire(self, reader: int) -> int | None:
        """Marks a free buffer of a reader, the lowest one; None where all are in use."""
        first = reader * self.count
        number = self._memory.find(b"\0", first, first + self.count)
        if number < 0:
            return None
        self._memory[number] = 1
        return number

    def buffer(self, number: int | None) -> Buffer:
        """Returns the arrays of a buffer; new ones for None."""
        if number is None:
            return {name: np.empty(*spec) for name, spec in self.specs.items()}
        return self._arrays(self._memory_of(number))

    def release_after_use(self, number: int) -> Buffer:
        """Returns the arrays of a buffer, which is free once nothing refers to them or to views."""
        memory = self._memory_of(number)
        weakref.finalize(memory, self._memory.__setitem__, number, 0).atexit = False
        return self._arrays(memory)

    def _memory_of(self, number: int) -> NDArray[np.uint8]:
        return np.ndarray(self.bytes, np.uint8, self._memory, self._marks + number * self.bytes)

    def _arrays(self, memory: NDArray[np.uint8]) -> Buffer:
        # Each array refers to `memory` itself, whose base is no array, so it outlives them all.
        return {
            name: np.ndarray(shape, dtype, memory, self.offsets[name])
            for name, (shape, dtype) in self.specs.items()
        }


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
