"""Reusable buffers for batches, in memory that loader workers share with the trainer.

Touching fresh pages takes about as long as decoding a picture, so the buffer of a batch is reused
as soon as nothing refers to its arrays or tensors. The memory belongs to no file system, so the
size of /dev/shm, often small in containers, is no limit.
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

ALIGNMENT = 64  # arrays begin at multiples of so many bytes

ArraySpec = tuple[tuple[int, ...], str]  # shape and dtype of an array
Buffer = Mapping[str, NDArray[Any]]  # the arrays of a batch, by name


class BufferPool:
    """Buffers of equal size in shared memory, a few for each loader worker.

    A worker marks the buffer that it fills, and the trainer clears the mark once nothing refers to
    its arrays, so neither waits for the other.
    """

    def __init__(self, specs: Mapping[str, ArraySpec], readers: int, count: int) -> None:
        """Reserves `count` buffers per worker; pages are allocated when first written."""
        sizes = [math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in specs.values()]
        ends = np.cumsum([0, *map(_aligned, sizes)]).tolist()
        self.specs, self.offsets = dict(specs), dict(zip(specs, ends, strict=False))
        self.count, self.bytes = count, ends[-1]
        self._header_bytes = _aligned(readers * count)  # a byte per buffer: its mark
        self._descriptor = os.memfd_create("heron-batches")
        os.ftruncate(self._descriptor, self._header_bytes + readers * count * self.bytes)
        self._map()

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state to pickle for a loader worker, with the same memory."""
        return self.__dict__ | {"_memory": None, "_descriptor": DupFd(self._descriptor)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Maps the memory of the process that pickled the pool."""
        self.__dict__ = state
        self._descriptor = state["_descriptor"].detach()
        self._map()

    def _map(self) -> None:
        weakref.finalize(self, os.close, self._descriptor)
        self._memory = mmap.mmap(self._descriptor, 0)

    def acquire(self, reader: int) -> int | None:
        """Marks a worker's lowest free buffer and returns its number; None if all are in use."""
        first = reader * self.count
        number = self._memory.find(b"\0", first, first + self.count)
        if number < 0:
            return None
        self._memory[number] = 1
        return number

    def buffer(self, number: int | None) -> Buffer:
        """Returns the arrays of a buffer; newly allocated ones for None."""
        if number is None:
            return {name: np.empty(*spec) for name, spec in self.specs.items()}
        return self._arrays(self._memory_of(number))

    def release_after_use(self, number: int) -> Buffer:
        """Returns the arrays of a buffer, and frees it once nothing refers to them or views."""
        memory = self._memory_of(number)
        weakref.finalize(memory, self._memory.__setitem__, number, 0).atexit = False
        return self._arrays(memory)

    def _memory_of(self, number: int) -> NDArray[np.uint8]:
        return np.ndarray(
            self.bytes, np.uint8, self._memory, self._header_bytes + number * self.bytes
        )

    def _arrays(self, memory: NDArray[np.uint8]) -> Buffer:
        # The base of each array is `memory` itself, since its own base is no array; so `memory`
        # outlives all arrays and views.
        return {
            name: np.ndarray(shape, dtype, memory, self.offsets[name])
            for name, (shape, dtype) in self.specs.items()
        }


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
