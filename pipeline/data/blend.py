"""Streams of several: rows of each source by its weight, or of each class in turn.

Both are index arithmetic over streams of their own, so that batch t is a function of t alone: the
same on any number of processes and readers, and after a restart.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from heron.pipeline.config.errors import ConfigError
from heron.pipeline.data.plan import Listed, Rows, ShardRows, Stream, by_number


@dataclass(frozen=True)
class Balanced:
    """A stream that takes a row of each class in turn (class-aware sampling, Shen et al. 2016).

    Draw n of the run, `batch` of them a step, is the next row of class n mod classes: a class is as
    frequent as any other, whatever it has of rows, and a small one is gone through more often. Of
    labels that are not exclusive, a row is in the class of each label that it has.

    Attributes:
        name: of the stream.
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
        """Batches of as many draws as there are rows."""
        return max(1, self.rows // self.batch)

    def at(self, t: int, own: slice = slice(None)) -> Rows:
        """Returns the rows of global batch t, or some of them, [rows]."""
        of, turns = (drawn[own] for drawn in self._draws(t))
        rows = np.empty(len(of), np.int64)
        for number, at in by_number(of):
            rows[at] = self.classes[number].many(turns[at])[:, 0]
        return rows

    def passes(self, t: int) -> Rows:
        """Returns a number for each row of batch t, another whenever the row comes again."""
        of, turns = self._draws(t)
        steps = np.array([stream.steps_per_epoch for stream in self.classes])
        passes: Rows = turns // steps[of] * len(self.classes) + of
        return passes

    def describe(self) -> str:
        """Returns a line: rows, batch and classes."""
        sizes = [one.rows for one in self.classes]
        return (
            f"{self.name}: {self.rows:,} rows = {self.steps_per_epoch:,} steps x {self.batch:,} an "
            f"epoch, {len(sizes)} classes of {min(sizes):,} to {max(sizes):,} rows in turn"
        )

    def _draws(self, t: int) -> tuple[Rows, Rows]:
        """Returns the class of each row of a batch, and which draw of the class it is."""
        draws = np.arange(t * self.batch, (t + 1) * self.batch)
        return draws % len(self.classes), draws // len(self.classes)


@dataclass(frozen=True)
class Blend:
    """A stream whose every batch takes a fixed number of rows of each of several.

    Each goes its own way round, so that a small source comes again sooner than a large one. Rows of
    the sources lie spread over the batch, and processes take nearly equal shares of each.

    Attributes:
        name: of the stream.
        parts: a stream for each source.
    """

    name: str
    parts: Sequence[Stream | Balanced]

    @property
    def batch(self) -> int:
        """Rows of the global batch."""
        return sum(part.batch for part in self.parts)

    @cached_property
    def by_shard(self) -> ShardRows:
        """The rows of each shard of every source."""
        return Listed.of([rows for part in self.parts for rows in part.by_shard])

    @cached_property
    def rows(self) -> int:
        """Rows of all sources."""
        return sum(part.rows for part in self.parts)

    @property
    def steps_per_epoch(self) -> int:
        """Batches of as many draws as there are rows."""
        return self.rows // self.batch

    def at(self, t: int, own: slice = slice(None)) -> Rows:
        """Returns the rows of global batch t, or some of them, [rows]."""
        return np.concatenate([part.at(t) for part in self.parts])[self._order[own]]

    def passes(self, t: int) -> Rows:
        """Returns of each row of batch t which pass over its source it is of, [batch]."""
        passes = [np.broadcast_to(part.passes(t), part.batch) for part in self.parts]
        return np.concatenate(passes)[self._order]

    def describe(self) -> str:
        """Returns a line: rows and batch, and how much of it each source has."""
        parts = ", ".join(f"{part.batch:,} of {part.rows:,}" for part in self.parts)
        return (
            f"{self.name}: {self.rows:,} rows = {self.steps_per_epoch:,} steps x {self.batch:,} an "
            f"epoch; a batch takes of its sources {parts} rows"
        )

    @cached_property
    def _order(self) -> Rows:
        """Spreads each source evenly over the batch."""
        places = [(np.arange(part.batch) + 0.5) / part.batch for part in self.parts]
        return np.argsort(np.concatenate(places), kind="stable")


def apportion(batch: int, weights: Sequence[float], name: str) -> list[int]:
    """Returns how many rows of a batch each source has: by largest remainder, the first of equals.

    Raises:
        ConfigError: a source would have too few.
    """
    quotas = np.array(weights) / sum(weights) * batch
    rows = np.floor(quotas).astype(int)
    rows[np.argsort(rows - quotas, kind="stable")[: batch - int(rows.sum())]] += 1
    if rows.min() < 1:
        place = int(rows.argmin())
        raise ConfigError(
            f"data.sources.{place} has no row in a batch: its weight {weights[place]:g} is "
            f"{quotas[place]:.2f} rows of data.batch.{name} = {batch}; expected at least 1; raise "
            "the weight or the batch, or leave the source out"
        )
    return [int(count) for count in rows]
