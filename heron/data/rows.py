"""Numbers of rows: by shard, by role, and those that a run has skipped.

A set of rows is a list of eight bytes a row, or marks of one byte a row in a file that is mapped;
either is looked up shard by shard.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heron.base.errors import ShardError

Rows = NDArray[np.int64]
ROLES = "labelled", "unlabelled", "test", "validation"  # role i is bit i of a mark


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


class Roles:
    """Row numbers by role; labelled, validation and unlabelled rows partition the split.

    Only rows with a label are tested, and no validation row is. `by_shard` has the rows of each
    role: lists, or marks that are looked up shard by shard and listed only on request.
    """

    def __init__(self, starts: Rows, *roles: Rows | Marked) -> None:
        """Takes the ascending rows of each of `ROLES`; `starts` has the shards' first rows."""
        self.by_shard: dict[str, ShardRows] = {
            role: rows if isinstance(rows, Marked) else Listed.cut(rows, starts)
            for role, rows in zip(ROLES, roles, strict=True)
        }

    @property
    def labelled(self) -> Rows:
        """The rows whose labels training sees, in one array."""
        return self.rows_of("labelled")

    @property
    def unlabelled(self) -> Rows:
        """The rows that training sees without a label, in one array."""
        return self.rows_of("unlabelled")

    @property
    def test(self) -> Rows:
        """The rows that are tested, in one array."""
        return self.rows_of("test")

    @property
    def validation(self) -> Rows:
        """The rows that serve to choose a configuration, in one array."""
        return self.rows_of("validation")

    def rows_of(self, role: str) -> Rows:
        """Returns the rows of a role in one array."""
        return self.by_shard[role].all_rows

    def count(self, role: str) -> int:
        """Returns the number of rows of a role."""
        return self.by_shard[role].total

    def union(self, roles: Sequence[str]) -> ShardRows:
        """Returns the rows that have any of the roles, each once."""
        nonempty = [self.by_shard[role] for role in dict.fromkeys(roles) if self.count(role)]
        if len(nonempty) == 1:
            return nonempty[0]
        marked = [rows for rows in nonempty if isinstance(rows, Marked)]
        if marked and len(marked) == len(nonempty):
            return marked[0].with_bits(int(np.bitwise_or.reduce([rows.bits for rows in marked])))
        lists = [np.empty(0, np.int64), *(rows.all_rows for rows in nonempty)]
        return Listed.from_shards([np.unique(np.concatenate(lists))])


class SkippedRows:
    """The rows that all processes have skipped so far, with their faults."""

    def __init__(self, rows: ShardRows, max_fraction: float, endless: int = 0) -> None:
        """Allows at most `max_fraction` of the rows that the run draws or scores.

        Samples of an endless stream have numbers below 0, and count as `endless` further rows.
        """
        self.rows, self.max_fraction = rows, max_fraction
        self.count = rows.total + endless
        self.faults: dict[int, str] = {}

    def __len__(self) -> int:
        """The number of distinct rows that were skipped."""
        return len(self.faults)

    def add(self, lost_by_process: Iterable[Mapping[int, str]]) -> list[str]:
        """Records the lost rows of every process; returns a line for each new fault."""
        new = {row: fault for lost in lost_by_process for row, fault in lost.items()}
        candidates = np.sort(np.fromiter((row for row in new if row not in self.faults), np.int64))
        counted = candidates[self.rows.contains(candidates) | (candidates < 0)]
        new = {row: new[row] for row in counted.tolist()}
        self.faults |= new
        rows_of: dict[str, list[int]] = {}
        for row, fault in new.items():
            rows_of.setdefault(fault, []).append(row)
        return [f"skipped{_rows_text(numbers)}: {fault}" for fault, numbers in rows_of.items()]

    def refuse(self) -> None:
        """Raises ShardError if more rows are lost than allowed."""
        if len(self) > self.max_fraction * self.count:
            raise ShardError(
                f"cannot read {len(self):,} of the run's {self.count:,} rows, which is more than "
                f"data.max_bad_fraction = {self.max_fraction:g}; the last error: "
                f"{list(self.faults.values())[-1]}"
            )


def _rows_text(rows: list[int]) -> str:
    if rows[0] < 0:
        return ""  # the fault itself names a sample without a row number
    if len(rows) == 1:
        return f" row {rows[0]}"
    return f" {len(rows):,} rows, {rows[0]} to {rows[-1]}"
