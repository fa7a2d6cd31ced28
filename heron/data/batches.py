"""Yields the batches of one process: its share of every global batch, read by workers, in order."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from heron.data.buffers import ArraySpec, Buffer, BufferPool
from heron.data.mined import AnyStream
from heron.data.plan import Rows, even_slice
from heron.data.random_keys import rng_keys
from heron.data.reader import Reader
from heron.data.streams import Streams
from heron.distributed.signals import follow_parent
from heron.shards.errors import ShardError

AHEAD = 4  # batches that a worker reads ahead
IN_USE = 2  # batches that the trainer holds: the last one, and the one that it asks for
VIEW_PREFIX = "view "  # prefix of a stored view's name among the arrays of a batch


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
    """

    stored: dict[str, Tensor]
    targets: Tensor
    indices: Tensor
    rng_keys: Tensor
    sizes: list[int]
    paths: Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.int64))
    lost: dict[int, str] = field(default_factory=dict)
    present: Tensor | None = None

    @property
    def labelled(self) -> int:
        """The number of labelled rows."""
        return len(self.targets)

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
        ...

    def load(self, t: int, buffer: Buffer) -> tuple[list[int], dict[int, str]]:
        """Fills a buffer with batch t; returns `sizes` and `lost` of the `Batch`."""
        ...


def array_specs(
    reader: Reader,
    stored: Sequence[str],
    rows: int,
    targets: tuple[int, ...] = (0, 0),
    levels: int = 0,
    n_model_views: int = 0,
) -> dict[str, ArraySpec]:
    """Returns the shape and dtype of every array of a batch.

    `targets` is the shape of the labels, [labelled, labels]; `levels` is the depth of hierarchical
    ones. `n_model_views` is 0 unless rows may lack some of the model's views.
    """
    decoders = {name: reader.decoders[name] for name in stored}
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


class ShardBatches:
    """Reads the share that process `rank` of `world` has of every global batch."""

    def __init__(self, streams: Streams, seed: int, rank: int, world: int) -> None:
        """Reads nothing yet."""
        self.streams, self.seed, self.rank, self.world = streams, seed, rank, world

    def specs(self) -> dict[str, ArraySpec]:
        """Returns the shape and dtype of every array of a batch."""
        streams, reader, no_rows = self.streams, self.streams.reader, np.empty(0, np.int64)
        sizes = {stream.name: len(rows) for stream, rows in self._local_rows(0)}
        targets = sizes.get("labelled", 0), *streams.targets(no_rows).shape[1:]
        levels = reader.label_paths(no_rows).shape[1]
        rows, model_views = (
            sum(sizes.values()),
            len(streams.stored_by_view) if reader.may_lack_views else 0,
        )
        return array_specs(reader, streams.stored, rows, targets, levels, model_views)

    def load(self, t: int, buffer: Buffer) -> tuple[list[int], dict[int, str]]:
        """Fills a buffer with the process's share of batch t; returns `sizes` and `lost`."""
        drawn = self._local_rows(t)
        planned = np.concatenate([rows for _, rows in drawn])
        rows = self._read(planned, drawn, buffer)
        labelled, reader = rows[: len(buffer["targets"])], self.streams.reader
        buffer["targets"][:] = self.streams.targets(labelled)
        buffer["paths"][:] = reader.label_paths(labelled)
        buffer["indices"][:] = rows
        if reader.may_lack_views:
            buffer["present"][:] = reader.present(rows, self.streams.stored_by_view)
        keys = []
        for stream, local in drawn:
            passes = stream.passes(t)
            if len(passes) > 1:  # one per row
                passes = passes[even_slice(stream.batch, self.rank, self.world)]
            keys.append(rng_keys(self.seed, passes, local))
        buffer["rng_keys"][:] = np.concatenate(keys)
        lost = {int(row): reader.lost[int(row)] for row in planned[planned != rows]}
        return [len(rows) for _, rows in drawn], lost

    def _local_rows(self, t: int) -> list[tuple[AnyStream, Rows]]:
        streams = self.streams.labelled, self.streams.unlabelled
        return [
            (s, s.batch_rows(t, even_slice(s.batch, self.rank, self.world))) for s in streams if s
        ]

    def _read(self, planned: Rows, drawn: Sequence[tuple[AnyStream, Rows]], buffer: Buffer) -> Rows:
        """Reads the stored views; returns the rows read, in which others replace lost ones."""
        reader, names, rows = self.streams.reader, self.streams.stored, planned.copy()
        self._replace_lost(rows, drawn)
        reader.fill({name: buffer[VIEW_PREFIX + name] for name in names}, rows)
        while len(replaced := self._replace_lost(rows, drawn)):
            for name in names:
                buffer[VIEW_PREFIX + name][replaced] = reader.read(name, rows[replaced])
        return rows

    def _replace_lost(self, rows: Rows, drawn: Sequence[tuple[AnyStream, Rows]]) -> Rows:
        """Replaces lost rows in place by the next of their stream; returns their positions."""
        if not (lost := self.streams.reader.lost):
            return np.empty(0, np.int64)
        replaced = np.flatnonzero([int(row) in lost for row in rows])
        ends = np.cumsum([len(own) for _, own in drawn])
        for i in replaced.tolist():
            stream = drawn[int(np.searchsorted(ends, i, side="right"))][0]
            rows[i] = self._next_readable(stream, int(rows[i]))
        return replaced

    def _next_readable(self, stream: AnyStream, row: int) -> int:
        """Returns the next readable row by number: the same on any process and after a restart."""
        lost = self.streams.reader.lost
        for candidate in stream.by_shard.following(row):
            if candidate not in lost:
                return candidate
        raise ShardError(
            f"no row of the {stream.name} stream can be read; the last fault: {lost[row]}"
        )


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
    source: BatchSource, start: int, stop: int, workers: int, pin: bool
) -> Generator[Batch, None, None]:
    """Yields batches start, ..., stop - 1 in order, whatever the number of workers.

    The memory of a batch is reused once nothing refers to its tensors. Resuming at a later `start`
    costs a seek, not a replay. With 0 `workers` this process reads; `pin` copies into page-locked
    memory for a GPU.
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
        yield batch.pin_memory() if pin else batch
        del batch


def _init_worker(_: int) -> None:
    follow_parent()


def _identity(item: Any) -> Any:
    return item  # the default collation would make tensors of it


def _to_batch(buffer: Buffer, sizes: list[int], lost: dict[int, str]) -> Batch:
    """Returns a batch whose tensors share memory with the arrays of a buffer."""
    tensors = {name: torch.from_numpy(array) for name, array in buffer.items()}
    stored = {
        n.removeprefix(VIEW_PREFIX): tensors.pop(n) for n in buffer if n.startswith(VIEW_PREFIX)
    }
    return Batch(stored, sizes=sizes, lost=lost, **tensors)
