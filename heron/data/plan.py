"""Plans which rows make up batch t, by index arithmetic alone: nothing is read for it.

The order is a function of (seed, epoch, canonical streams), not of the number of processes or
loader workers. In every epoch the shards are permuted and concatenated; the sequence of their rows
is cut into C contiguous canonical streams; each is shuffled within windows; batch t of B rows takes
B / C rows of every stream. Each of P processes owns a contiguous share of the batch, so it touches
about C / P streams, hence few shards at a time.

A stream that fits into one window is permuted by a generator; in a longer one, a row's position in
its window is computed by a bijection. So a plan needs only memory for a list of shards, and only
the requested rows are computed. Streams are combined by the same arithmetic: sources by weight, or
classes in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from heron.base.errors import ConfigError
from heron.data.random_keys import rng_keys
from heron.data.rows import Listed, Rows, ShardRows, positions_by_number

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
                f"data.batch.{self.name} is {self.batch}, but there are only {self.rows} "
                f"{self.name} rows; lower it, or use 'all'"
            )
        if self.batch % self.n_streams:
            divisors = [c for c in range(1, self.batch + 1) if self.batch % c == 0]
            nearest = min(divisors, key=lambda c: abs(c - self.n_streams))
            raise ConfigError(
                f"data.canonical_streams is {self.n_streams}, which does not divide "
                f"data.batch.{self.name} = {self.batch}; the nearest number that does is {nearest}"
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


@dataclass(frozen=True)
class Balanced:
    """A stream that takes a row of each class in turn (class-aware sampling, Shen et al. 2016).

    Draw n of the run is the next row of class n mod classes, so classes are equally frequent
    whatever their sizes. A row with several labels is in the class of each.

    Attributes:
        classes: endless streams of batch 1, one over the rows of each class.
        batch: rows of the global batch.
        by_shard: the rows of each shard that take part, each once.
    """

    name: str
    classes: Sequence[Stream]
    batch: int
    by_shard: ShardRows

    @cached_property
    def rows(self) -> int:
        """Rows that take part."""
        return self.by_shard.total

    @property
    def steps_per_epoch(self) -> int:
        """Batches that together have as many draws as there are rows."""
        return max(1, self.rows // self.batch)

    def batch_rows(self, t: int, local: slice = slice(None)) -> Rows:
        """Returns the rows of global batch t, or a slice of them, [rows]."""
        classes, turns = (drawn[local] for drawn in self._draws(t))
        rows = np.empty(len(classes), np.int64)
        for number, positions in positions_by_number(classes):
            rows[positions] = self.classes[number].rows_of_batches(turns[positions])[:, 0]
        return rows

    def passes(self, t: int) -> Rows:
        """Returns a number for each row of batch t that differs between draws of the same row."""
        classes, turns = self._draws(t)
        steps = np.array([stream.steps_per_epoch for stream in self.classes])
        passes: Rows = turns // steps[classes] * len(self.classes) + classes
        return passes

    def describe(self) -> str:
        """Returns one line: rows, batch and classes."""
        sizes = [stream.rows for stream in self.classes]
        return (
            f"{self.name}: {self.rows:,} rows = {self.steps_per_epoch:,} steps x {self.batch:,} an "
            f"epoch, {len(sizes)} classes of {min(sizes):,} to {max(sizes):,} rows in turn"
        )

    def _draws(self, t: int) -> tuple[Rows, Rows]:
        """Returns the class of each row of a batch, and the number of the draw from that class."""
        draws = np.arange(t * self.batch, (t + 1) * self.batch)
        return draws % len(self.classes), draws // len(self.classes)


@dataclass(frozen=True)
class Blend:
    """A stream in which every batch has a fixed number of rows of each source.

    Each source is a stream with its own epochs, so a small one repeats sooner than a large one. The
    rows of each source are spread over the batch, so processes get nearly equal shares of it.
    """

    name: str
    streams: Sequence[Stream | Balanced]

    @property
    def batch(self) -> int:
        """Rows of the global batch."""
        return sum(stream.batch for stream in self.streams)

    @cached_property
    def by_shard(self) -> ShardRows:
        """The rows of each shard of every source."""
        return Listed.from_shards([rows for stream in self.streams for rows in stream.by_shard])

    @cached_property
    def rows(self) -> int:
        """Rows of all sources."""
        return sum(stream.rows for stream in self.streams)

    @property
    def steps_per_epoch(self) -> int:
        """Batches that together have as many draws as there are rows."""
        return self.rows // self.batch

    def batch_rows(self, t: int, local: slice = slice(None)) -> Rows:
        """Returns the rows of global batch t, or a slice of them, [rows]."""
        return np.concatenate([stream.batch_rows(t) for stream in self.streams])[self._order[local]]

    def passes(self, t: int) -> Rows:
        """Returns the number of the pass over its source of each row of batch t, [batch]."""
        passes = [np.broadcast_to(stream.passes(t), stream.batch) for stream in self.streams]
        return np.concatenate(passes)[self._order]

    def describe(self) -> str:
        """Returns one line: rows, batch, and the share of each source."""
        sources = ", ".join(f"{stream.batch:,} of {stream.rows:,}" for stream in self.streams)
        return (
            f"{self.name}: {self.rows:,} rows = {self.steps_per_epoch:,} steps x {self.batch:,} an "
            f"epoch; a batch takes of its sources {sources} rows"
        )

    @cached_property
    def _order(self) -> Rows:
        """The permutation that spreads each source evenly over the batch."""
        positions = [(np.arange(stream.batch) + 0.5) / stream.batch for stream in self.streams]
        return np.argsort(np.concatenate(positions), kind="stable")


def apportion(batch: int, weights: Sequence[float], name: str) -> list[int]:
    """Apportions rows by largest remainders, ties to the first; ConfigError if any source has 0."""
    quotas = np.array(weights) / sum(weights) * batch
    rows = np.floor(quotas).astype(int)
    rows[np.argsort(rows - quotas, kind="stable")[: batch - int(rows.sum())]] += 1
    if rows.min() < 1:
        source = int(rows.argmin())
        raise ConfigError(
            f"data.sources.{source} gets no row of a batch: its weight {weights[source]:g} is "
            f"{quotas[source]:.2f} rows of data.batch.{name} = {batch}; raise the weight or the "
            "batch, or remove the source"
        )
    return [int(count) for count in rows]
