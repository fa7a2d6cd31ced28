"""The batch of a step, and what loads it: worker processes that fill buffers in shared memory.

Touching fresh pages takes about as long as decoding a picture, so the buffer of a batch is reused
as soon as nothing refers to its arrays or tensors. The memory belongs to no file system, so the
size of /dev/shm, often small in containers, is no limit.
"""

import math
import mmap
import os
import signal
import threading
import weakref
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from multiprocessing import parent_process
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from heron.base.cores import cores_per_process
from heron.base.errors import ShardError
from heron.data.augmentations import Blur, Color, Crop, Flip
from heron.data.decoders import Decoder
from heron.data.options import Data

MAX_WORKERS = 16  # of a training process, under `auto`
AHEAD = 4  # batches that a worker reads ahead
IN_USE = 2  # batches that the trainer holds: the last one, and the one that it asks for
VIEW_PREFIX = "view "  # prefix of a stored view's name among the arrays of a batch
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


@dataclass(frozen=True)
class Batch:
    """A process's rows of a global batch: the labelled ones first, then the unlabelled ones.

    Attributes:
        stored: stored views by name, each [rows, ...].
        targets: 0/1 labels of the labelled rows, [labelled, labels].
        indices: numbers of the rows in the data set, [rows].
        rng_keys: each row's key in its stream's epoch, [rows]; see `random_keys`.
        sizes: number of this process's rows of each stream of the run, in order; may be 0.
        paths: hierarchical labels of the labelled rows, [labelled, levels], if there are any.
        lost: rows that could not be read, and the reasons; other rows replace them.
        present: which views of the model each row has, [rows, views]; None: all of them.
        label_weights: how much each label of the labelled rows counts, 0 to 1, [labelled, labels];
            None: all count 1.
    """

    stored: dict[str, Tensor]
    targets: Tensor
    indices: Tensor
    rng_keys: Tensor
    sizes: list[int]
    paths: Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.int64))
    lost: dict[int, str] = field(default_factory=dict)
    present: Tensor | None = None
    label_weights: Tensor | None = None

    @property
    def labelled(self) -> int:
        """The number of labelled rows."""
        return len(self.targets)

    def tensors(self) -> list[Tensor]:
        """Returns all of its tensors."""
        return [x for x in (*vars(self).values(), *self.stored.values()) if isinstance(x, Tensor)]

    def to(self, device: torch.device) -> "Batch":
        """Returns the batch on a device; from pinned memory the copy is asynchronous."""
        return self._map_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "Batch":
        """Returns the batch in page-locked memory."""
        return self._map_tensors(Tensor.pin_memory)

    def _map_tensors(self, f: Callable[[Tensor], Tensor]) -> "Batch":
        moved: dict[str, Any] = {
            name: f(x) for name, x in vars(self).items() if isinstance(x, Tensor)
        }
        stored = {name: f(view) for name, view in self.stored.items()}
        return replace(self, stored=stored, **moved)


class BatchSource(Protocol):
    """Reads batches by number; every loader worker gets a copy."""

    def specs(self) -> dict[str, ArraySpec]:
        """Returns the shape and dtype of every array of a batch."""

    def load(self, t: int, buffer: Buffer) -> tuple[list[int], dict[int, str]]:
        """Fills a buffer with batch t; returns `sizes` and `lost` of the `Batch`."""


def array_specs(
    decoders: Mapping[str, Decoder],
    rows: int,
    targets: tuple[int, ...] = (0, 0),
    levels: int = 0,
    n_model_views: int = 0,
) -> dict[str, ArraySpec]:
    """Returns the shape and dtype of every array of a batch.

    `decoders` are those of the stored views, by name. `targets` is the shape of the labels,
    [labelled, labels]; `levels` is the depth of hierarchical ones. `n_model_views` is 0 unless rows
    may lack some of the model's views.
    """
    views = {
        VIEW_PREFIX + name: ((rows, *decoder.shape), decoder.dtype)
        for name, decoder in decoders.items()
    }
    specs: dict[str, ArraySpec] = views | {
        "targets": (targets, "float32"),
        "indices": ((rows,), "int64"),
        "rng_keys": ((rows,), "int64"),
        "paths": ((targets[0], levels), "int64"),
    }
    return specs | ({"present": ((rows, n_model_views), "bool")} if n_model_views else {})


class _BatchDataset(Dataset[Any]):
    """Has batch t as item t; each loader worker writes into buffers of its own."""

    def __init__(self, source: BatchSource, pool: BufferPool) -> None:
        self.source, self.pool = source, pool

    def __getitem__(self, t: int) -> Any:
        worker = get_worker_info()
        number = self.pool.acquire(0 if worker is None else worker.id)
        buffer = self.pool.buffer(number)
        try:
            sizes, lost = self.source.load(t, buffer)
        except ShardError as error:
            return error  # raised by `batches`: a DataLoader would add a traceback to its message
        return buffer if number is None else number, sizes, lost


def batches(
    source: BatchSource, start: int, stop: int, workers: int
) -> Generator[Batch, None, None]:
    """Yields batches start, ..., stop - 1 in order, whatever the number of workers.

    The memory of a batch is reused once nothing refers to its tensors. Resuming at a later `start`
    costs a seek, not a replay. With 0 `workers` this process reads.
    """
    pool = BufferPool(source.specs(), max(1, workers), (AHEAD if workers else 0) + IN_USE)
    loader: DataLoader[Any] = DataLoader(
        _BatchDataset(source, pool),
        batch_size=None,
        collate_fn=_identity,
        generator=torch.Generator(),  # so that no base seed is drawn from the global generator
        sampler=range(start, stop),
        num_workers=workers,
        worker_init_fn=_init_worker,
        prefetch_factor=AHEAD if workers else None,
        multiprocessing_context="forkserver" if workers else None,
    )
    for item in loader:
        if isinstance(item, ShardError):
            raise item
        slot, sizes, lost = item
        buffer = pool.release_after_use(slot) if isinstance(slot, int) else slot
        del item, slot
        batch = _to_batch(buffer, sizes, lost)
        del buffer
        yield batch
        del batch


def on_device(
    loaded: Generator[Batch, None, None], device: torch.device
) -> Generator[Batch, None, None]:
    """Yields the batches on a device, and closes `loaded` at the end.

    For a GPU, a thread pins the next batch and copies it on a stream of its own, while the GPU
    works on the last one. Work that the current stream is given later waits for the copy.
    """
    if device.type != "cuda":
        with closing(loaded):
            yield from loaded
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy_next() -> tuple[Batch, Any] | None:
        with torch.cuda.stream(stream):  # of this thread; pinning too would use the first GPU
            batch = next(loaded, None)
            if batch is None:
                return None
            return batch.pin_memory().to(device), stream.record_event()

    with closing(loaded), ThreadPoolExecutor(1) as thread:  # the thread ends before `loaded` does
        pending = thread.submit(copy_next)
        while (copied := pending.result()) is not None:
            pending = thread.submit(copy_next)
            batch, is_there = copied
            current = torch.cuda.current_stream(device)
            current.wait_event(is_there)
            for tensor in batch.tensors():
                tensor.record_stream(current)  # its memory is free once this stream is done with it
            yield batch
            del batch, copied


def _init_worker(_: int) -> None:
    """Makes a reading process exit when the training process is gone, and ignore signals."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):  # the training process stops
        signal.signal(number, signal.SIG_IGN)
    if (parent := parent_process()) is not None:
        threading.Thread(target=_exit_after, args=[parent], daemon=True).start()


def _exit_after(parent: BaseProcess) -> None:
    parent.join()
    os._exit(0)


def _identity(item: Any) -> Any:
    return item  # the default collation would make tensors of it


def _to_batch(buffer: Buffer, sizes: list[int], lost: dict[int, str]) -> Batch:
    """Returns a batch whose tensors share memory with the arrays of a buffer."""
    tensors = {name: torch.from_numpy(array) for name, array in buffer.items()}
    stored = {
        n.removeprefix(VIEW_PREFIX): tensors.pop(n) for n in buffer if n.startswith(VIEW_PREFIX)
    }
    return Batch(stored, sizes=sizes, lost=lost, **tensors)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def worker_count(data: Data) -> int:
    """Returns `data.workers`; `auto` gives pictures one worker per core available for decoding.

    With a GPU these are all cores but one; on a CPU, whose cores also train, a quarter of them; 16
    at most. Other data is copied, not decoded: 1 worker with a GPU, else 0.
    """
    if data.workers != "auto":
        return data.workers
    of_pictures = Crop, Color, Flip, Blur
    decodes = any(
        view.size is not None or any(isinstance(x.options, of_pictures) for x in view.augment)
        for view in data.views
    )
    if not torch.cuda.is_available():
        return min(MAX_WORKERS, cores_per_process() // 4) if decodes else 0
    return min(MAX_WORKERS, max(1, cores_per_process() - 1)) if decodes else 1
