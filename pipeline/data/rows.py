"""Rows that take part, shard by shard: how many there are of each, and which, at its turn.

A list of all rows has eight bytes of each; what is here has as many as there are shards, or as
there are rows of a role that is drawn.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]


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
        order = np.argsort(shards, kind="stable")
        for part in np.split(order, np.flatnonzero(np.diff(shards[order])) + 1):
            if len(part):
                out[part] = self.rows_of(int(shards[part[0]]))[places[part]]
        return out

    def has(self, rows: Rows) -> NDArray[np.bool_]:
        """Returns which rows are among them, [rows]."""
        there = np.flatnonzero(self.sizes)
        at = [
            bisect_right(there, row, key=lambda n: self.rows_of(n)[0]) - 1 for row in rows.tolist()
        ]
        return np.array(
            [
                n >= 0 and row in self.rows_of(int(there[n]))
                for n, row in zip(at, rows, strict=True)
            ],
            bool,
        )

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

    def joined(self, bits: int) -> Marked:
        """Returns the rows that have one of other bits: reads all marks."""
        spans = pairwise(self.starts.tolist())
        sizes = [np.count_nonzero(self._mapped[first:last] & bits) for first, last in spans]
        return Marked(self.starts, np.array(sizes), self.marks, bits)
