"""The batches of one process: its share of every global batch, read by workers, in order."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from heron.pipeline.config.experiment import Config
from heron.pipeline.data.buffers import ArraySpec, Buffer, BufferPool
from heron.pipeline.data.mined import AnyStream
from heron.pipeline.data.plan import Rows, share
from heron.pipeline.data.random_keys import rng_keys
from heron.pipeline.data.reader import Reader
from heron.pipeline.data.streams import Streams
from heron.pipeline.training.signals import follow_parent
from heron.shards.errors import ShardError

AHEAD = 4  # batches that a worker reads ahead
IN_USE = 2  # batches that the trainer has: the last one, and the one that it asks for
VIEW = "view "  # before the name of a stored view, among the arrays of a batch


@dataclass(frozen=True)
class Batch:
    """A process's rows: the labelled ones first, then the unlabelled.

    Attributes:
        stored: stored views by name, each [rows, ...].
        targets: labels of the labelled rows as 0/1 columns, [labelled, labels].
        indices: numbers of the rows in the data set, [rows].
        rng_keys: of each row's random numbers in its stream's epoch, [rows]; see `random_keys`.
        sizes: this process's rows of each stream of the run, in order; they may be none.
        paths: hierarchical labels of the labelled rows, [labelled, levels], where there are any.
        lost: rows that could not be read, and why; other rows stand in their stead.
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
        """Returns the batch on a device; from pinned memory the copy does not wait."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "Batch":
        """Returns the batch in page-locked memory."""
        return self._each(Tensor.pin_memory)

    def _each(self, move: Callable[[Tensor], Tensor]) -> "Batch":
        moved: dict[str, Any] = {n: move(x) for n, x in vars(self).items() if isinstance(x, Tensor)}
        stored = {name: move(view) for name, view in self.stored.items()}
        return replace(self, stored=stored, **moved)


class BatchSource(Protocol):
    """Reads batches by number; a reading process gets a copy."""

    def specs(self) -> dict[str, ArraySpec]:
        """Returns the shape and type of every array of a batch."""
        ...

    def load(self, t: int, buffer: Buffer) -> tuple[list[int], dict[int, str]]:
        """Fills a buffer with batch t; returns its `sizes` and `lost` rows: see `Batch`."""
        ...


def array_specs(
    reader: Reader,
    stored: Sequence[str],
    rows: int,
    targets: tuple[int, ...] = (0, 0),
    levels: int = 0,
    partial: int = 0,
) -> dict[str, ArraySpec]:
    """Returns the shape and type of every array of a batch.

    Args:
        reader: decodes the views.
        stored: names of the stored views.
        rows: how many there are.
        targets: shape of the labels, [labelled, labels].
        levels: of hierarchical labels.
        partial: the model's views, where rows may lack some.
    """
    decoders = {name: reader.decoders[name] for name in stored}
    views = {VIEW + name: ((rows, *one.shape), one.dtype) for name, one in decoders.items()}
    specs: dict[str, ArraySpec] = views | {
        "targets": (targets, "float32"),
        "indices": ((rows,), "int64"),
        "rng_keys": ((rows,), "int64"),
        "paths": ((targets[0], levels), "int64"),
    }
    return specs | ({"present": ((rows, partial), "bool")} if partial else {})


class ProcessBatches:
    """Reads the share of process `rank` of `world` of every global batch."""

    def __init__(self, streams: Streams, seed: int, rank: int, world: int) -> None:
        """Reads nothing yet."""
        self.streams, self.seed, self.rank, self.world = streams, seed, rank, world

    def specs(self) -> dict[str, ArraySpec]:
        """Returns the shape and type of every array of a batch."""
        streams, reader, none = self.streams, self.streams.reader, np.empty(0, np.int64)
        sizes = {stream.name: len(rows) for stream, rows in self._draw(0)}
        targets = sizes.get("labelled", 0), *streams.targets(none).shape[1:]
        levels = reader.paths(none).shape[1]
        rows, partial = sum(sizes.values()), len(streams.viewed) if reader.partial else 0
        return array_specs(reader, streams.stored, rows, targets, levels, partial)

    def load(self, t: int, buffer: Buffer) -> tuple[list[int], dict[int, str]]:
        """Fills a buffer with the share of batch t; returns its `sizes` and `lost` rows."""
        drawn = self._draw(t)
        planned = np.concatenate([rows for _, rows in drawn])
        rows = self._read(planned, drawn, buffer)
        labelled, reader = rows[: len(buffer["targets"])], self.streams.reader
        buffer["targets"][:] = self.streams.targets(labelled)
        buffer["paths"][:] = reader.paths(labelled)
        buffer["indices"][:] = rows
        if reader.partial:
            buffer["present"][:] = reader.present(rows, self.streams.viewed)
        keys = []
        for stream, own in drawn:
            passes = stream.passes(t)
            if len(passes) > 1:  # one of each row
                passes = passes[share(stream.batch, self.rank, self.world)]
            keys.append(rng_keys(self.seed, passes, own))
        buffer["rng_keys"][:] = np.concatenate(keys)
        lost = {int(row): reader.lost[int(row)] for row in planned[planned != rows]}
        return [len(rows) for _, rows in drawn], lost

    def _draw(self, t: int) -> list[tuple[AnyStream, Rows]]:
        """Returns the share of batch t of every stream that there is."""
        streams = self.streams.labelled, self.streams.unlabelled
        return [(s, s.at(t, share(s.batch, self.rank, self.world))) for s in streams if s]

    def _read(self, planned: Rows, drawn: Sequence[tuple[AnyStream, Rows]], buffer: Buffer) -> Rows:
        """Reads the stored views; returns the rows that were read, others in lost ones' stead."""
        reader, names, rows = self.streams.reader, self.streams.stored, planned.copy()
        self._replace_lost(rows, drawn)
        reader.fill({name: buffer[VIEW + name] for name in names}, rows)
        while len(replaced := self._replace_lost(rows, drawn)):
            for name in names:
                buffer[VIEW + name][replaced] = reader.read(name, rows[replaced])
        return rows

    def _replace_lost(self, rows: Rows, drawn: Sequence[tuple[AnyStream, Rows]]) -> Rows:
        """Replaces lost rows, in place, by the next of their stream; returns their positions."""
        if not (lost := self.streams.reader.lost):
            return np.empty(0, np.int64)
        replaced = np.flatnonzero([int(row) in lost for row in rows])
        ends = np.cumsum([len(own) for _, own in drawn])
        for i in replaced.tolist():
            stream = drawn[int(np.searchsorted(ends, i, side="right"))][0]
            rows[i] = self._next(stream, int(rows[i]))
        return replaced

    def _next(self, stream: AnyStream, row: int) -> int:
        """Returns the next row of a stream that is not lost, in the data set's order.

        So a lost row's substitute is the same on any number of processes and after a restart.
        """
        lost = self.streams.reader.lost
        for candidate in stream.by_shard.following(row):
            if candidate not in lost:
                return candidate
        raise ShardError(
            f"no row of the {stream.name} stream can be read; the last fault: {lost[row]}"
        )


def share_of(streams: Streams, config: Config, rank: int, world: int, start: int) -> BatchSource:
    """Returns the batches of a process; `start` is the step that the run goes on from."""
    if config.data.webdataset is None:
        return ProcessBatches(streams, config.seed, rank, world)
    from heron.pipeline.data.endless import EndlessStreams
    from heron.pipeline.data.webdataset import EndlessBatches

    assert isinstance(streams, EndlessStreams)
    return EndlessBatches(streams, config, rank, world, start)


class _BatchDataset(Dataset[Any]):
    """Gives batch t as item t: a reading process writes it into a buffer of its own."""

    def __init__(self, source: BatchSource, pool: BufferPool) -> None:
        self.source, self.pool = source, pool

    def __getitem__(self, t: int) -> Any:
        info = get_worker_info()
        number = self.pool.acquire(0 if info is None else info.id)
        buffer = self.pool.buffer(number)
        try:
            sizes, lost = self.source.load(t, buffer)
        except ShardError as error:
            return error  # as a value: a DataLoader would put a traceback into its message
        return buffer if number is None else number, sizes, lost


def batches(
    source: BatchSource, start: int, stop: int, workers: int, pin: bool
) -> Generator[Batch, None, None]:
    """Yields batches start, ..., stop - 1 in order, whatever the number of workers.

    The memory of a batch is used again once nothing refers to a tensor of it. Resuming at a later
    `start` costs a seek, not a replay. With 0 `workers` this process reads; `pin` copies into
    page-locked memory, for a GPU.
    """
    pool = BufferPool(source.specs(), max(1, workers), (AHEAD if workers else 0) + IN_USE)
    loader: DataLoader[Any] = DataLoader(
        _BatchDataset(source, pool),
        batch_size=None,
        collate_fn=_unchanged,
        generator=torch.Generator(),  # its base seed must not come out of the global generator
        sampler=range(start, stop),
        num_workers=workers,
        worker_init_fn=_start,
        prefetch_factor=AHEAD if workers else None,
        multiprocessing_context="forkserver" if workers else None,
    )
    for item in loader:
        if isinstance(item, ShardError):
            raise item
        where, sizes, lost = item
        buffer = pool.release_after_use(where) if isinstance(where, int) else where
        del item, where
        batch = _batch(buffer, sizes, lost)
        del buffer
        yield batch.pin_memory() if pin else batch
        del batch


def _start(_: int) -> None:
    """Runs first in a reading process."""
    follow_parent()


def _unchanged(item: Any) -> Any:
    return item  # a DataLoader would make tensors of it


def _batch(buffer: Buffer, sizes: list[int], lost: dict[int, str]) -> Batch:
    """Returns a batch whose tensors are the arrays of a buffer."""
    tensors = {name: torch.from_numpy(array) for name, array in buffer.items()}
    stored = {n.removeprefix(VIEW): tensors.pop(n) for n in buffer if n.startswith(VIEW)}
    return Batch(stored, sizes=sizes, lost=lost, **tensors)
