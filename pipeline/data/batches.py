"""The batches of one process: its share of every global batch, read by workers, in order."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from pipeline.data.plan import Rows, Stream, share
from pipeline.data.reader import Reader
from pipeline.data.streams import Streams
from pipeline.draws import keys
from shards.errors import ShardError


@dataclass(frozen=True)
class Batch:
    """A process's rows: the labelled ones first, then the unlabelled.

    Attributes:
        stored: stored views by name, each [rows, ...].
        targets: labels of the labelled rows as 0/1 columns, [labelled, labels].
        rows: row numbers in the data set, [rows].
        keys: of each row's random numbers in its stream's epoch, [rows]; see `pipeline.draws`.
        parts: this process's rows of each stream of the run, in order; they may be none.
        paths: hierarchical labels of the labelled rows, [labelled, levels], where there are any.
        lost: rows that could not be read, whose places others took, and why.
    """

    stored: dict[str, Tensor]
    targets: Tensor
    rows: Tensor
    keys: Tensor
    parts: list[int]
    paths: Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.int64))
    lost: dict[int, str] = field(default_factory=dict)

    @property
    def labelled(self) -> int:
        """How many rows are labelled."""
        return len(self.targets)

    def to(self, device: torch.device) -> "Batch":
        """The batch on a device; from pinned memory the copy does not wait."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "Batch":
        """What a DataLoader calls before a copy to a GPU."""
        return self._each(Tensor.pin_memory)

    def _each(self, move: Callable[[Tensor], Tensor]) -> "Batch":
        return replace(
            self,
            stored={name: move(view) for name, view in self.stored.items()},
            targets=move(self.targets),
            rows=move(self.rows),
            keys=move(self.keys),
            paths=move(self.paths),
        )


class ProcessBatches(Dataset[Batch | ShardError]):
    """Item t is this process's share of global batch t."""

    def __init__(self, streams: Streams, seed: int, rank: int, world: int) -> None:
        """Take the share of process `rank` of `world`."""
        self.streams = streams
        self.seed = seed
        self.rank, self.world = rank, world
        self._sorted: dict[str, Rows] = {}  # the rows of a stream that has lost some

    def __getitem__(self, t: int) -> Batch | ShardError:
        """The share of global batch t; a fault is a value, to cross from a worker whole."""
        try:
            return self.load(t)
        except ShardError as fault:
            return fault

    def load(self, t: int) -> Batch:
        """Read the share of global batch t."""
        labelled, labelled_epoch = self._rows(self.streams.labelled, t)
        unlabelled, unlabelled_epoch = self._rows(self.streams.unlabelled, t)
        drawn = [
            (stream, rows)
            for stream, rows in (
                (self.streams.labelled, labelled),
                (self.streams.unlabelled, unlabelled),
            )
            if stream is not None
        ]
        rows = np.concatenate([labelled, unlabelled])
        wanted = rows.copy()
        stored = self._read(rows, drawn)  # puts others in the place of rows that are lost
        labelled = rows[: len(labelled)]
        epoch = torch.from_numpy(np.concatenate([labelled_epoch, unlabelled_epoch]))
        numbers = torch.from_numpy(rows)
        reader = self.streams.reader
        return Batch(
            stored,
            torch.from_numpy(self.streams.targets(labelled)),
            numbers,
            keys(self.seed, epoch, torch.from_numpy(wanted)),
            [len(part) for _, part in drawn],
            torch.from_numpy(reader.paths(labelled)),
            {int(row): reader.lost[int(row)] for row in wanted[wanted != rows]},
        )

    def _rows(self, stream: Stream | None, t: int) -> tuple[Rows, Rows]:
        if stream is None:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        rows = stream.at(t)[share(stream.batch, self.rank, self.world)]
        return rows, np.full(len(rows), t // stream.steps_per_epoch)

    def _read(self, rows: Rows, drawn: Sequence[tuple[Stream, Rows]]) -> dict[str, Tensor]:
        """Read the stored views; a row that is lost gives its place to the next of its stream."""
        reader = self.streams.reader
        self._replace(rows, drawn)
        stored = read(reader, self.streams.stored, rows)
        while len(places := self._replace(rows, drawn)):
            for name, view in stored.items():
                view[places] = torch.from_numpy(reader.read(name, rows[places]))
        return stored

    def _replace(self, rows: Rows, drawn: Sequence[tuple[Stream, Rows]]) -> Rows:
        """Replace lost rows by the next of their stream that are not, and give their places."""
        if not (lost := self.streams.reader.lost):
            return np.empty(0, np.int64)
        places = np.flatnonzero([int(row) in lost for row in rows])
        first = 0
        for stream, part in drawn:
            for place in places[(places >= first) & (places < first + len(part))].tolist():
                rows[place] = self._next(stream, int(rows[place]))
            first += len(part)
        return places

    def _next(self, stream: Stream, row: int) -> int:
        """The next row of a stream that is not lost, in the data set's order.

        So what takes a row's place is the same on any number of processes and after a restart.
        """
        if stream.name not in self._sorted:
            self._sorted[stream.name] = np.sort(np.concatenate(stream.shards))
        rows, lost = self._sorted[stream.name], self.streams.reader.lost
        at = int(np.searchsorted(rows, row))
        for step in range(1, len(rows)):
            if (found := int(rows[(at + step) % len(rows)])) not in lost:
                return found
        raise ShardError(
            f"no row of the {stream.name} stream can be read; the last fault: {lost[row]}"
        )


def read(reader: Reader, views: Sequence[str], rows: Rows) -> dict[str, Tensor]:
    """Stored views of some rows as tensors, read into memory that a worker shares."""
    stored = {}
    for name in views:
        dtype = torch.uint8 if reader.view(name).dtype == "uint8" else torch.float32
        tensor = torch.empty((len(rows), *reader.shape(name)), dtype=dtype)
        if get_worker_info() is not None:  # else it is copied once more on its way out
            tensor.share_memory_()  # type: ignore[no-untyped-call]
        reader.read(name, rows, tensor.numpy())
        stored[name] = tensor
    return stored


def batches(
    source: ProcessBatches, start: int, stop: int, workers: int, pin: bool
) -> Iterator[Batch]:
    """Batches start, ..., stop - 1 in order, whatever the number of workers.

    Args:
        source: what item t is.
        start: the first step; resuming costs a seek, not a replay.
        stop: one past the last step.
        workers: reading processes; 0 reads in this one.
        pin: copy into page-locked memory, for a GPU.
    """
    loader: DataLoader[Batch | ShardError] = DataLoader(
        source,
        batch_size=None,
        generator=torch.Generator(),  # its base seed must not come out of the global generator
        sampler=range(start, stop),
        num_workers=workers,
        pin_memory=pin,
        prefetch_factor=4 if workers else None,
        multiprocessing_context="forkserver" if workers else None,
    )
    for item in loader:
        if isinstance(item, ShardError):
            raise item
        yield item
