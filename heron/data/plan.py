"""Plans which rows make up batch t, by index arithmetic alone: nothing is read for it.

The order is a function of (seed, epoch, canonical streams), not of the number of processes or
loader workers. In every epoch the shards are permuted and concatenated; the sequence of their rows
is cut into C contiguous canonical streams; each is shuffled within windows; batch t of B rows takes
B / C rows of every stream. Each of P processes owns a contiguous share of the batch, so it touches
about C / P streams, hence few shards at a time.

A stream that fits into one window is permuted by a generator; in a longer one, a row's position in
its window is computed by a bijection. So a plan needs only memory for a list of shards, and only
the requested rows are computed. Rows that take part are looked up by shard: in a list of eight
bytes a row, or in a file of one byte a row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heron.config.errors import ConfigError
from heron.data.random_keys import rng_keys

Rows = NDArray[np.int64]
FEISTEL_ROUNDS = 6  # four are enough for a permutation that looks random
MAX_STREAMS = 64  # canonical streams, by default


def even_slice(total: int, rank: int, world: int) -> slice:
    """Returns a process's contiguous share of `total` rows; sizes differ by at most 1."""
    return slice(rank * total // world, (rank + 1) * total // world)


def even_sizes(total: int, world: int) -> list[int]:
    """Returns the sizes of all processes' shares."""
    slices = (even_slice(total, rank, world) for rank in range(world))
    return [part.stop - part.start for part in slices]


def default_streams(batch: int, limit: int = MAX_STREAMS) -> int:
    """Returns the largest divisor of the batch up to `limit`."""
    return max(c for c in range(1, min(limit, batch) + 1) if batch % c == 0)


def positions_by_number(numbers: Rows) -> Iterator[tuple[int, Rows]]:
    """Yields each distinct number, ascending, and its positions in `numbers`."""
    order = np.argsort(numbers, kind="stable")
    for positions in np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1):
        if len(positions):
            yield int(numbers[positions[0]]), positions


class ShardRows(ABC):
    """The selected rows of each shard, ascending; `sizes` are their numbers by shard, [shards]."""

    sizes: Rows

    def __iter__(self) -> Iterator[Rows]:
        """Yields the rows of each shard."""
        return map(self.rows_of, range(len(self)))

    def __len__(self) -> int:
        """The number of shards, including those without a selected row."""
        return len(self.sizes)

    @abstractmethod
    def rows_of(self, shard: int) -> Rows:
        """Returns the rows of a shard."""

    @abstractmethod
    def shard_range(self, first: int, last: int) -> ShardRows:
        """Returns the rows of shards `first` to `last` - 1."""

    @cached_property
    def total(self) -> int:
        """The number of rows."""
        return int(self.sizes.sum())

    @property
    def all_rows(self) -> Rows:
        """All rows in one array."""
        return np.concatenate([np.empty(0, np.int64), *self])

    def take(self, shards: Rows, offsets: Rows) -> Rows:
        """Returns row number `offsets[i]` of shard `shards[i]` for every i, [rows]."""
        out = np.empty(len(shards), np.int64)
        for shard, at_shard in positions_by_number(shards):
            out[at_shard] = self.rows_of(shard)[offsets[at_shard]]
        return out

    @abstractmethod
    def contains(self, rows: Rows) -> NDArray[np.bool_]:
        """Returns which of `rows` are selected, [rows]."""

    def following(self, row: int) -> Iterator[int]:
        """Yields the rows after a selected row in the data set's order, then those before it."""
        nonempty = np.flatnonzero(self.sizes).tolist()
        index = bisect_right(nonempty, row, key=lambda shard: self.rows_of(shard)[0]) - 1
        rows = self.rows_of(nonempty[index])
        yield from rows[rows > row].tolist()
        for shard in (*nonempty[index + 1 :], *nonempty[:index]):
            yield from self.rows_of(shard).tolist()
        yield from rows[rows < row].tolist()


@dataclass(frozen=True, eq=False)
class Listed(ShardRows):
    """Rows in one array: those of shard i are `rows[bounds[i] : bounds[i + 1]]`."""

    rows: Rows
    bounds: Rows

    @classmethod
    def from_shards(cls, shards: Sequence[Rows]) -> Listed:
        """Concatenates the rows of each shard."""
        bounds = np.cumsum([0, *map(len, shards)])
        return cls(np.concatenate([np.empty(0, np.int64), *shards]), bounds)

    @classmethod
    def cut(cls, rows: Rows, starts: Rows) -> Listed:
        """Assigns ascending rows to shards; shard i begins at row `starts[i]`, [shards + 1]."""
        return cls(rows, np.searchsorted(rows, starts))

    @cached_property
    def sizes(self) -> Rows:  # type: ignore[override]
        """See `ShardRows`."""
        return np.diff(self.bounds)

    @property
    def all_rows(self) -> Rows:
        """See `ShardRows`."""
        return self.rows[self.bounds[0] : self.bounds[-1]]

    def rows_of(self, shard: int) -> Rows:
        """See `ShardRows`."""
        return self.rows[self.bounds[shard] : self.bounds[shard + 1]]

    def shard_range(self, first: int, last: int) -> Listed:
        """See `ShardRows`."""
        return Listed(self.rows, self.bounds[first : last + 1])

    def take(self, shards: Rows, offsets: Rows) -> Rows:
        """See `ShardRows`."""
        taken: Rows = self.rows[self.bounds[shards] + offsets]
        return taken

    def contains(self, rows: Rows) -> NDArray[np.bool_]:
        """See `ShardRows`."""
        return np.isin(rows, self.all_rows)


@dataclass(frozen=True, eq=False)
class Marked(ShardRows):
    """Rows whose mark has any of `bits` set; without marks all rows.

    Attributes:
        starts: the first row of each shard, then the end of the last one, [shards + 1].
        sizes: see `ShardRows`; shards of size 0 are not looked up.
        marks: an npy file with one byte per row of the data set, memory-mapped.
    """

    starts: Rows
    sizes: Rows
    marks: Path | None = None
    bits: int = 0

    @cached_property
    def _mapped_marks(self) -> NDArray[np.uint8]:
        assert self.marks is not None
        return np.load(self.marks, mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state to pickle: the other process maps the file itself."""
        return {name: value for name, value in vars(self).items() if name != "_mapped_marks"}

    def rows_of(self, shard: int) -> Rows:
        """See `ShardRows`."""
        first, last = self.starts[shard : shard + 2].tolist()
        if not self.sizes[shard]:
            return np.empty(0, np.int64)
        if self.marks is None:
            return np.arange(first, last)
        rows: Rows = first + np.flatnonzero(self._mapped_marks[first:last] & self.bits)
        return rows

    def shard_range(self, first: int, last: int) -> Marked:
        """See `ShardRows`."""
        starts, sizes = self.starts[first : last + 1], self.sizes[first:last]
        return Marked(starts, sizes, self.marks, self.bits)

    def take(self, shards: Rows, offsets: Rows) -> Rows:
        """See `ShardRows`."""
        if self.marks is not None:
            return super().take(shards, offsets)
        taken: Rows = self.starts[shards] + offsets
        return taken

    def contains(self, rows: Rows) -> NDArray[np.bool_]:
        """See `ShardRows`."""
        shards = np.searchsorted(self.starts, rows, side="right") - 1
        inside: NDArray[np.bool_] = self.sizes[shards] > 0
        return inside if self.marks is None else inside & (self._mapped_marks[rows] & self.bits > 0)

    def with_bits(self, bits: int) -> Marked:
        """Returns the rows whose marks have any of other `bits` set; reads all marks."""
        spans = pairwise(self.starts.tolist())
        sizes = [np.count_nonzero(self._mapped_marks[first:last] & bits) for first, last in spans]
        return Marked(self.starts, np.array(sizes), self.marks, bits)


@dataclass(frozen=True)
class Stream:
    """An endless sequence of global batches over one set of rows; each epoch is a full pass.

    Attributes:
        name: streams of other names are shuffled differently.
        by_shard: the rows of each shard that take part, as numbers in the data set.
        batch: rows of the global batch.
        n_streams: C, the number of canonical streams; divides the batch.
        window_rows: how many rows of a stream are shuffled together; no row leaves its window.
        salt: makes streams of the same name shuffle differently.
    """

    name: str
    by_shard: ShardRows
    batch: int
    seed: int
    n_streams: int
    window_rows: int
    salt: str = ""
    _epoch_rows: dict[int, Rows] = field(default_factory=dict, repr=False, compare=False)
    _shard_orders: dict[int, tuple[Rows, Rows]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        """Refuses a plan that cannot fill one batch."""
        if self.batch > self.rows:
            raise ConfigError(
                f"data.batch.{self.name} is {self.batch}, but there are {self.rows} {self.name} "
                f"rows; expected at most {self.rows}, or 'all'"
            )
        if self.batch % self.n_streams:
            divisors = [c for c in range(1, self.batch + 1) if self.batch % c == 0]
            nearest = min(divisors, key=lambda c: abs(c - self.n_streams))
            raise ConfigError(
                f"data.canonical_streams is {self.n_streams}, which does not divide "
                f"data.batch.{self.name} = {self.batch}; the nearest that does is {nearest}"
            )

    @cached_property
    def rows(self) -> int:
        """Rows that take part."""
        return self.by_shard.total

    @property
    def steps_per_epoch(self) -> int:
        """Full batches in an epoch."""
        return self.rows // self.batch

    @property
    def left_over(self) -> int:
        """Rows that an epoch leaves out, fewer than a batch; they differ from epoch to epoch."""
        return self.rows % self.batch

    def batch_rows(self, t: int, local: slice = slice(None)) -> Rows:
        """Returns rows of global batch t = 0, 1, ... (or a slice) by canonical stream, [rows]."""
        rows: Rows = self.rows_of_batches(np.array([t]), local)[0]
        return rows

    def rows_of_batches(self, batches: Rows, local: slice = slice(None)) -> Rows:
        """Returns the rows of ascending global batches, [batches, rows]: see `batch_rows`."""
        epochs, steps = np.divmod(batches, self.steps_per_epoch)
        rows = [
            self._epoch_batches(epoch, steps[epochs == epoch], local)
            for epoch in np.unique(epochs).tolist()
        ]
        return np.concatenate(rows)

    def _epoch_batches(self, epoch: int, steps: Rows, local: slice) -> Rows:
        """Returns the rows of the batches at `steps` of an epoch, [steps, rows]."""
        per_stream = self.batch // self.n_streams
        if self._longest_stream <= self.window_rows:
            if epoch not in self._epoch_rows:
                n_steps = self.steps_per_epoch
                order = [
                    rows[: n_steps * per_stream].reshape(n_steps, per_stream)
                    for rows in self.order(epoch)
                ]
                self._epoch_rows.clear()
                self._epoch_rows[epoch] = np.concatenate(order, axis=1)
            batch_rows: Rows = self._epoch_rows[epoch][steps, local]
            return batch_rows
        positions = np.arange(self.batch)[local]
        streams, stream_positions = np.divmod(positions, per_stream)
        stream_positions = steps[:, None] * per_stream + stream_positions
        return self._shuffled_rows(
            epoch, np.broadcast_to(streams, stream_positions.shape), stream_positions
        )

    def passes(self, t: int) -> Rows:
        """Returns the number of the pass over the rows that batch t belongs to, [1]."""
        return np.array([t // self.steps_per_epoch])

    def describe(self) -> str:
        """Returns one line: rows, batch, and the rows that an epoch leaves over."""
        return (
            f"{self.name}: {self.rows:,} rows = {self.steps_per_epoch:,} steps x {self.batch:,} + "
            f"{self.left_over:,} left over an epoch, in {self.n_streams} canonical streams"
        )

    def order(self, epoch: int) -> list[Rows]:
        """Returns the shuffled canonical streams of an epoch; together they have each row once."""
        bounds = [even_slice(self.rows, number, self.n_streams) for number in range(self.n_streams)]
        lengths, salt = [part.stop - part.start for part in bounds], self._salt(epoch)
        if self._longest_stream <= self.window_rows:
            generators = [np.random.default_rng([*salt, 1, n]) for n in range(self.n_streams)]
            shuffled = [
                part.start + d.permutation(n)
                for part, d, n in zip(bounds, generators, lengths, strict=True)
            ]
            rows = self._rows_at(epoch, np.concatenate(shuffled))
        else:
            streams = np.repeat(np.arange(self.n_streams), lengths)
            rows = self._shuffled_rows(
                epoch, streams, np.concatenate([np.arange(n) for n in lengths])
            )
        return np.split(rows, np.cumsum(lengths)[:-1])

    @property
    def _longest_stream(self) -> int:
        """Number of rows of the longest canonical stream."""
        return -(-self.rows // self.n_streams)

    def _salt(self, epoch: int) -> list[int]:
        return [self.seed, *self.name.encode(), *self.salt.encode(), epoch]

    def _shuffled_rows(self, epoch: int, streams: Rows, positions: Rows) -> Rows:
        """Returns the rows at `positions` of shuffled canonical streams, same shape."""
        starts = np.arange(self.n_streams) * self.rows // self.n_streams  # as in `even_slice`
        lengths = np.diff(starts, append=self.rows)[streams]
        windows = -(-lengths // self.window_rows)  # per stream, nearly equal, as in `even_slice`
        window = ((positions + 1) * windows - 1) // lengths
        first, last = window * lengths // windows, (window + 1) * lengths // windows
        key_seed = int(np.random.default_rng([*self._salt(epoch), 2]).integers(2**62))
        keys = rng_keys(key_seed, streams, window)
        shuffled = first + _permute(positions - first, last - first, keys)
        return self._rows_at(epoch, starts[streams] + shuffled)

    def _rows_at(self, epoch: int, positions: Rows) -> Rows:
        """Returns the rows at `positions` of the permuted, concatenated shards, same shape."""
        if epoch not in self._shard_orders:
            shuffle = np.random.default_rng([*self._salt(epoch), 0])
            order = shuffle.permutation(len(self.by_shard))
            self._shard_orders.clear()
            self._shard_orders[epoch] = order, np.cumsum(self.by_shard.sizes[order])
        order, ends = self._shard_orders[epoch]
        index = np.searchsorted(ends, flat := positions.ravel(), side="right")
        shards = order[index]
        offsets = flat - ends[index] + self.by_shard.sizes[shards]
        return self.by_shard.take(shards, offsets).reshape(positions.shape)


def _permute(positions: Rows, sizes: Rows, keys: Rows) -> Rows:
    """Maps each position by the keyed permutation of 0, ..., size - 1: a Feistel network.

    All arrays have the same shape. Results outside of the range go through the network again (Black
    and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002): fewer than three of four.
    """
    bits = np.frexp(sizes - 1)[1].astype(np.int64)  # bit length of each size - 1
    halves, out = np.maximum(1, -(-bits // 2)), np.ascontiguousarray(positions)
    pending = np.ones(positions.shape, bool)
    while pending.any():
        half = halves[pending]
        high, mask = out[pending] >> half, (1 << half) - 1
        low = out[pending] & mask
        for number in range(FEISTEL_ROUNDS):
            high, low = low, high ^ (rng_keys(number, keys[pending], low) & mask)
        out = out.copy()
        out[pending] = high << half | low
        pending = out >= sizes
    return out
