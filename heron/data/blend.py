"""Streams that combine others by index arithmetic: sources by weight, or classes in turn.

Batch t is a function of t alone: the same for any processes and workers, and after a restart.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from heron.config.errors import ConfigError
from heron.data.plan import Listed, Rows, ShardRows, Stream, positions_by_number


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
            f"data.sources.{source} has no row in a batch: its weight {weights[source]:g} is "
            f"{quotas[source]:.2f} rows of data.batch.{name} = {batch}; expected at least 1; raise "
            "the weight or the batch, or leave the source out"
        )
    return [int(count) for count in rows]
