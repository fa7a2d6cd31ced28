"""The batches of one process: its share of every global batch, read by workers, in order."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from heron.pipeline.data.mined import AnyStream
from heron.pipeline.data.plan import Rows, share
from heron.pipeline.data.random_keys import keys
from heron.pipeline.data.slots import Form, Room, Slots
from heron.pipeline.data.streams import Streams
from heron.pipeline.training.signals import follow_parent
from heron.shards.errors import ShardError

AHEAD = 4  # batches that a worker reads ahead
HELD = 2  # batches that the taker holds: the last one, and the one that it asks for
VIEW = "view "  # before the name of a stored view, among the arrays of a batch


@dataclass(frozen=True)
class Batch:
    """A process's rows: the labelled ones first, then the unlabelled.

    Attributes:
        stored: stored views by name, each [rows, ...].
        targets: labels of the labelled rows as 0/1 columns, [labelled, labels].
        rows: row numbers in the data set, [rows].
        keys: of each row's random numbers in its stream's epoch, [rows]; see `random_keys`.
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


class ProcessBatches:
    """This process's share of every global batch."""

    def __init__(self, streams: Streams, seed: int, rank: int, world: int) -> None:
        """Take the share of process `rank` of `world`."""
        self.streams = streams
        self.seed = seed
        self.rank, self.world = rank, world
        self._sorted: dict[str, Rows] = {}  # the rows of a stream that has lost some

    def forms(self) -> dict[str, Form]:
        """Shape and type of every array of a batch."""
        reader, none = self.streams.reader, np.empty(0, np.int64)
        sizes = {stream.name: len(rows) for stream, rows in self._draw(0)}
        labelled, rows = sizes.get("labelled", 0), sum(sizes.values())
        return {
            VIEW + name: ((rows, *reader.shape(name)), reader.view(name).dtype)
            for name in self.streams.stored
        } | {
            "targets": ((labelled, *self.streams.targets(none).shape[1:]), "float32"),
            "rows": ((rows,), "int64"),
            "keys": ((rows,), "int64"),
            "paths": ((labelled, *reader.paths(none).shape[1:]), "int64"),
        }

    def load(self, t: int, room: Room) -> tuple[list[int], dict[int, str]]:
        """Read the share of global batch t.

        Args:
            t: the number of the batch.
            room: arrays of the `forms`, which are filled.

        Returns:
            The parts of the batch and the rows it lost: see `Batch`.
        """
        drawn = self._draw(t)
        rows = np.concatenate([part for _, part in drawn])
        self._read(rows, drawn, room)  # puts others in the place of rows that are lost
        labelled, reader = rows[: len(room["targets"])], self.streams.reader
        room["targets"][:] = self.streams.targets(labelled)
        room["paths"][:] = reader.paths(labelled)
        room["rows"][:] = rows
        wanted = np.concatenate([part for _, part in drawn])
        epochs = [np.array([t // stream.steps_per_epoch]) for stream, _ in drawn]
        parts = zip(epochs, drawn, strict=True)
        room["keys"][:] = np.concatenate([keys(self.seed, e, part) for e, (_, part) in parts])
        lost = {int(row): reader.lost[int(row)] for row in wanted[wanted != rows]}
        return [len(part) for _, part in drawn], lost

    def _draw(self, t: int) -> list[tuple[AnyStream, Rows]]:
        """The share of batch t of every stream that there is."""
        streams = self.streams.labelled, self.streams.unlabelled
        return [(s, s.at(t)[share(s.batch, self.rank, self.world)]) for s in streams if s]

    def _read(self, rows: Rows, drawn: Sequence[tuple[AnyStream, Rows]], room: Room) -> None:
        """Read the stored views; a row that is lost gives its place to the next of its stream."""
        reader, names = self.streams.reader, self.streams.stored
        self._replace(rows, drawn)
        reader.fill({name: room[VIEW + name] for name in names}, rows)
        while len(places := self._replace(rows, drawn)):
            for name in names:
                room[VIEW + name][places] = reader.read(name, rows[places])

    def _replace(self, rows: Rows, drawn: Sequence[tuple[AnyStream, Rows]]) -> Rows:
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

    def _next(self, stream: AnyStream, row: int) -> int:
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


class Source(Protocol):
    """What batches are read from; a reading process gets a copy."""

    def forms(self) -> dict[str, Form]:
        """Shape and type of every array of a batch."""
        ...

    def load(self, t: int, room: Room) -> tuple[list[int], dict[int, str]]:
        """Fill a room with batch t; the parts of the batch and the rows it lost: see `Batch`."""
        ...


class Worker(Dataset[Any]):
    """What a reading process does: item t is batch t, written into a slot of its own."""

    def __init__(self, source: Source, slots: Slots) -> None:
        """Read from a source into slots."""
        self.source, self.slots = source, slots

    def __getitem__(self, t: int) -> Any:
        """What a slot does not hold; a fault is a value, to cross from a worker whole."""
        info = get_worker_info()
        slot = self.slots.take(0 if info is None else info.id)
        room = self.slots.room(slot)
        try:
            parts, lost = self.source.load(t, room)
        except ShardError as fault:
            return fault
        return room if slot is None else slot, parts, lost


def batches(
    source: Source, start: int, stop: int, workers: int, pin: bool
) -> Generator[Batch, None, None]:
    """Batches start, ..., stop - 1 in order, whatever the number of workers.

    The memory of a batch is used again once nothing holds a tensor of it.

    Args:
        source: what item t is.
        start: the first step; resuming costs a seek, not a replay.
        stop: one past the last step.
        workers: reading processes; 0 reads in this one.
        pin: copy into page-locked memory, for a GPU.
    """
    slots = Slots(source.forms(), max(1, workers), (AHEAD if workers else 0) + HELD)
    loader: DataLoader[Any] = DataLoader(
        Worker(source, slots),
        batch_size=None,
        collate_fn=_unchanged,
        generator=torch.Generator(),  # its base seed must not come out of the global generator
        sampler=range(start, stop),
        num_workers=workers,
        worker_init_fn=_start,
        prefetch_factor=AHEAD if workers else None,
        multiprocessing_context="forkserver" if workers else None,
    )
    for found in loader:
        if isinstance(found, ShardError):
            raise found
        slot, parts, lost = found
        batch = _batch(slots.lend(slot) if isinstance(slot, int) else slot, parts, lost)
        yield batch.pin_memory() if pin else batch
        del batch


def _start(_: int) -> None:
    """What a reading process does first."""
    follow_parent()


def _unchanged(found: Any) -> Any:
    """What a reading process gives is no tensor, nor to become one."""
    return found


def _batch(room: Room, parts: list[int], lost: dict[int, str]) -> Batch:
    """A batch whose tensors are the arrays of a room."""
    of = {name: torch.from_numpy(array) for name, array in room.items()}
    stored = {name.removeprefix(VIEW): of[name] for name in room if name.startswith(VIEW)}
    return Batch(stored, of["targets"], of["rows"], of["keys"], parts, of["paths"], lost)
