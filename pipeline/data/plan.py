"""Which rows make up batch t: index arithmetic only, so that the order costs no reading.

The order is a function of (seed, epoch, canonical streams) and of nothing else: not of the number
of processes, nor of loader workers. The shards of an epoch are permuted and laid end to end; the
line is cut into C contiguous canonical streams; each is shuffled within windows; batch t takes
B / C rows of every stream. A process then owns a contiguous share of the batch and touches about
C / P streams, hence few shards at a time.

A stream that fits a window is permuted by a generator. A longer one is cut into windows, and a row
finds its place in its window by a bijection: so that the plan of any number of rows takes the
memory of a list of shards, and of a batch only the rows that it has are ever computed. Which rows
take part is known shard by shard: a list of them has eight bytes of each, marks one in a file.
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

from heron.pipeline.config.errors import ConfigError
from heron.pipeline.data.random_keys import rng_keys

Rows = NDArray[np.int64]
ROUNDS = 6  # of the bijection: four are enough for a permutation that looks random
MOST_STREAMS = 64  # canonical streams, where nobody says how many


def share(total: int, rank: int, world: int) -> slice:
    """Returns the contiguous share of `total` rows of a process; sizes differ by at most 1."""
    return slice(rank * total // world, (rank + 1) * total // world)


def shares(total: int, world: int) -> list[int]:
    """Returns the size of every process's share."""
    slices = (share(total, rank, world) for rank in range(world))
    return [own.stop - own.start for own in slices]


def default_streams(batch: int, most: int = MOST_STREAMS) -> int:
    """Returns the largest divisor of the batch up to `most`."""
    return max(c for c in range(1, min(most, batch) + 1) if batch % c == 0)


def by_number(numbers: Rows) -> Iterator[tuple[int, Rows]]:
    """Yields each of some numbers, and where it stands among them."""
    order = np.argsort(numbers, kind="stable")
    for at in np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1):
        if len(at):
            yield int(numbers[at[0]]), at


class ShardRows(ABC):
    """The rows of each shard that take part, ascending; shards ascend too.

    Attributes:
        sizes: how many rows there are of each shard, [shards].
    """

    sizes: Rows

    def __iter__(self) -> Iterator[Rows]:
        """Yields the rows of each shard."""
        return map(self.rows_of, range(len(self)))

    def __len__(self) -> int:
        """The number of shards, of which some may have no row."""
        return len(self.sizes)

    @abstractmethod
    def rows_of(self, shard: int) -> Rows:
        """Returns the rows of a shard."""

    @abstractmethod
    def between(self, first: int, last: int) -> ShardRows:
        """Returns the rows of shards `first` to `last` - 1."""

    @cached_property
    def total(self) -> int:
        """The number of rows."""
        return int(self.sizes.sum())

    @property
    def whole(self) -> Rows:
        """All rows, in a list."""
        return np.concatenate([np.empty(0, np.int64), *self])

    def take(self, shards: Rows, places: Rows) -> Rows:
        """Returns row number `places` of each of `shards`, [rows]."""
        out = np.empty(len(shards), np.int64)
        for shard, at in by_number(shards):
            out[at] = self.rows_of(shard)[places[at]]
        return out

    @abstractmethod
    def has(self, rows: Rows) -> NDArray[np.bool_]:
        """Returns which rows are among them, [rows]."""

    def following(self, row: int) -> Iterator[int]:
        """Yields the rows after one of them in the data set's order, then those before it."""
        there = np.flatnonzero(self.sizes).tolist()
        at = bisect_right(there, row, key=lambda n: self.rows_of(n)[0]) - 1
        own = self.rows_of(there[at])
        yield from own[own > row].tolist()
        for n in (*there[at + 1 :], *there[:at]):
            yield from self.rows_of(n).tolist()
        yield from own[own < row].tolist()


@dataclass(frozen=True, eq=False)
class Listed(ShardRows):
    """Rows that lie in a list: those of shard i from place `bounds[i]` on, [shards + 1]."""

    rows: Rows
    bounds: Rows

    @classmethod
    def of(cls, shards: Sequence[Rows]) -> Listed:
        """Lists the rows of each shard."""
        bounds = np.cumsum([0, *map(len, shards)])
        return cls(np.concatenate([np.empty(0, np.int64), *shards]), bounds)

    @classmethod
    def cut(cls, rows: Rows, starts: Rows) -> Listed:
        """Takes ascending rows, shard i of which begins with number `starts[i]`, [shards + 1]."""
        return cls(rows, np.searchsorted(rows, starts))

    @cached_property
    def sizes(self) -> Rows:  # type: ignore[override]
        """See `ShardRows`."""
        return np.diff(self.bounds)

    @property
    def whole(self) -> Rows:
        """See `ShardRows`."""
        return self.rows[self.bounds[0] : self.bounds[-1]]

    def rows_of(self, shard: int) -> Rows:
        """See `ShardRows`."""
        return self.rows[self.bounds[shard] : self.bounds[shard + 1]]

    def between(self, first: int, last: int) -> Listed:
        """See `ShardRows`."""
        return Listed(self.rows, self.bounds[first : last + 1])

    def take(self, shards: Rows, places: Rows) -> Rows:
        """See `ShardRows`."""
        taken: Rows = self.rows[self.bounds[shards] + places]
        return taken

    def has(self, rows: Rows) -> NDArray[np.bool_]:
        """See `ShardRows`."""
        return np.isin(rows, self.whole)


@dataclass(frozen=True, eq=False)
class Marked(ShardRows):
    """Rows of shards whose mark has one of some bits; without marks all rows.

    Attributes:
        starts: the first row of each shard, and behind the last, [shards + 1].
        sizes: see `ShardRows`; where it is 0 nothing is looked up.
        marks: an npy file, which is mapped, of a byte a row of the data set.
        bits: that a mark may have.
    """

    starts: Rows
    sizes: Rows
    marks: Path | None = None
    bits: int = 0

    @cached_property
    def _mapped(self) -> NDArray[np.uint8]:
        assert self.marks is not None
        return np.load(self.marks, mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]

    def __getstate__(self) -> dict[str, Any]:
        """Returns what another process is given: it maps the file itself, where this one copies."""
        return {name: value for name, value in vars(self).items() if name != "_mapped"}

    def rows_of(self, shard: int) -> Rows:
        """See `ShardRows`."""
        first, last = self.starts[shard : shard + 2].tolist()
        if not self.sizes[shard]:
            return np.empty(0, np.int64)
        if self.marks is None:
            return np.arange(first, last)
        found: Rows = first + np.flatnonzero(self._mapped[first:last] & self.bits)
        return found

    def between(self, first: int, last: int) -> Marked:
        """See `ShardRows`."""
        starts, sizes = self.starts[first : last + 1], self.sizes[first:last]
        return Marked(starts, sizes, self.marks, self.bits)

    def take(self, shards: Rows, places: Rows) -> Rows:
        """See `ShardRows`."""
        if self.marks is not None:
            return super().take(shards, places)
        taken: Rows = self.starts[shards] + places
        return taken

    def has(self, rows: Rows) -> NDArray[np.bool_]:
        """See `ShardRows`."""
        shards = np.searchsorted(self.starts, rows, side="right") - 1
        there: NDArray[np.bool_] = self.sizes[shards] > 0
        return there if self.marks is None else there & (self._mapped[rows] & self.bits > 0)

    def joined(self, bits: int) -> Marked:
        """Returns the rows that have one of other bits: reads all marks."""
        spans = pairwise(self.starts.tolist())
        sizes = [np.count_nonzero(self._mapped[first:last] & bits) for first, last in spans]
        return Marked(self.starts, np.array(sizes), self.marks, bits)


@dataclass(frozen=True)
class Stream:
    """An endless sequence of global batches over one set of rows, each epoch a full pass.

    Attributes:
        by_shard: the rows of each shard that take part, as numbers in the data set.
        batch: rows of the global batch.
        seed: the run's seed; `name` keeps two streams of one run apart.
        canonical: C, the number of canonical streams; divides the batch.
        window: so many rows of a stream are shuffled together, and none moves further.
        salt: tells streams of one name apart.
    """

    name: str
    by_shard: ShardRows
    batch: int
    seed: int
    canonical: int
    window: int
    salt: str = ""
    _cache: dict[int, Rows] = field(default_factory=dict, repr=False, compare=False)
    _lines: dict[int, tuple[Rows, Rows]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Refuses a plan that cannot give one batch."""
        if self.batch > self.rows:
            raise ConfigError(
                f"data.batch.{self.name} is {self.batch}, but there are {self.rows} {self.name} "
                f"rows; expected at most {self.rows}, or 'all'"
            )
        if self.batch % self.canonical:
            divisors = [c for c in range(1, self.batch + 1) if self.batch % c == 0]
            nearest = min(divisors, key=lambda c: abs(c - self.canonical))
            raise ConfigError(
                f"data.canonical_streams is {self.canonical}, which does not divide "
                f"data.batch.{self.name} = {self.batch}; the nearest that does is {nearest}"
            )

    @cached_property
    def rows(self) -> int:
        """Rows that an epoch passes over."""
        return self.by_shard.total

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches in an epoch; fewer rows than one batch are left over."""
        return self.rows // self.batch

    @property
    def left_over(self) -> int:
        """Rows that an epoch does not reach: other ones every epoch."""
        return self.rows % self.batch

    def at(self, t: int, own: slice = slice(None)) -> Rows:
        """Returns the rows of global batch t = 0, 1, ... of the run, or some of them, [rows].

        They lie stream by stream; `own` says which are asked for.
        """
        drawn: Rows = self.many(np.array([t]), own)[0]
        return drawn

    def many(self, batches: Rows, own: slice = slice(None)) -> Rows:
        """Returns the rows of ascending global batches, [batches, rows]: see `at`."""
        epochs, steps = np.divmod(batches, self.steps_per_epoch)
        parts = [self._drawn(e, steps[epochs == e], own) for e in np.unique(epochs).tolist()]
        return np.concatenate(parts)

    def _drawn(self, epoch: int, steps: Rows, own: slice) -> Rows:
        """Returns the rows of some batches of an epoch."""
        each = self.batch // self.canonical
        if self._longest <= self.window:
            if epoch not in self._cache:
                whole = self.steps_per_epoch
                order = [rows[: whole * each].reshape(whole, each) for rows in self.order(epoch)]
                self._cache.clear()
                self._cache[epoch] = np.concatenate(order, axis=1)
            drawn: Rows = self._cache[epoch][steps, own]
            return drawn
        columns = np.arange(self.batch)[own]
        streams, places = np.divmod(columns, each)
        places = steps[:, None] * each + places
        return self._rows(epoch, np.broadcast_to(streams, places.shape), places)

    def passes(self, t: int) -> Rows:
        """Returns which pass over the rows batch t is of, [1]."""
        return np.array([t // self.steps_per_epoch])

    def describe(self) -> str:
        """Returns a line: rows, batch, and what an epoch leaves over."""
        return (
            f"{self.name}: {self.rows:,} rows = {self.steps_per_epoch:,} steps x {self.batch:,} + "
            f"{self.left_over:,} left over an epoch, in {self.canonical} canonical streams"
        )

    def order(self, epoch: int) -> list[Rows]:
        """Returns the canonical streams of an epoch, shuffled; each row is in one, once."""
        bounds = [share(self.rows, number, self.canonical) for number in range(self.canonical)]
        lengths, salt = [b.stop - b.start for b in bounds], self._salt(epoch)
        if self._longest <= self.window:
            draws = [np.random.default_rng([*salt, 1, n]) for n in range(self.canonical)]
            shuffled = [
                b.start + d.permutation(n) for b, d, n in zip(bounds, draws, lengths, strict=True)
            ]
            rows = self._on_line(epoch, np.concatenate(shuffled))
        else:
            streams = np.repeat(np.arange(self.canonical), lengths)
            rows = self._rows(epoch, streams, np.concatenate([np.arange(n) for n in lengths]))
        return np.split(rows, np.cumsum(lengths)[:-1])

    @property
    def _longest(self) -> int:
        """Rows of the longest canonical stream."""
        return -(-self.rows // self.canonical)

    def _salt(self, epoch: int) -> list[int]:
        return [self.seed, *self.name.encode(), *self.salt.encode(), epoch]

    def _rows(self, epoch: int, streams: Rows, places: Rows) -> Rows:
        """Returns what stands at places of canonical streams after the shuffle, same shape."""
        starts = np.arange(self.canonical) * self.rows // self.canonical  # see `share`
        lengths = np.diff(starts, append=self.rows)[streams]
        windows = -(-lengths // self.window)  # nearly equal ones: see `share`
        number = ((places + 1) * windows - 1) // lengths
        first, last = number * lengths // windows, (number + 1) * lengths // windows
        drawn = int(np.random.default_rng([*self._salt(epoch), 2]).integers(2**62))
        keys = rng_keys(drawn, streams, number)
        shuffled = first + _bijection(places - first, last - first, keys)
        return self._on_line(epoch, starts[streams] + shuffled)

    def _on_line(self, epoch: int, places: Rows) -> Rows:
        """Returns the rows at places of the line of all shards, permuted; same shape."""
        if epoch not in self._lines:
            shuffle = np.random.default_rng([*self._salt(epoch), 0])
            order = shuffle.permutation(len(self.by_shard))
            self._lines.clear()
            self._lines[epoch] = order, np.cumsum(self.by_shard.sizes[order])
        order, ends = self._lines[epoch]
        at = np.searchsorted(ends, flat := places.ravel(), side="right")
        shards = order[at]
        within = flat - ends[at] + self.by_shard.sizes[shards]
        return self.by_shard.take(shards, within).reshape(places.shape)


def _bijection(places: Rows, sizes: Rows, keys: Rows) -> Rows:
    """Permutes 0, ..., size - 1 by a key, a place at a time (a Feistel network; same shapes).

    What the network throws out of the range goes through it again (Black and Rogaway, "Ciphers
    with arbitrary finite domains", CT-RSA 2002), which happens to less than three of four.
    """
    bits = np.frexp(sizes - 1)[1].astype(np.int64)  # the bit length of size - 1, of each by itself
    halves, out = np.maximum(1, -(-bits // 2)), np.ascontiguousarray(places)
    left = np.ones(places.shape, bool)
    while left.any():
        half = halves[left]
        high, mask = out[left] >> half, (1 << half) - 1
        low = out[left] & mask
        for number in range(ROUNDS):
            high, low = low, high ^ (rng_keys(number, keys[left], low) & mask)
        out = out.copy()
        out[left] = high << half | low
        left = out >= sizes
    return out
