"""Streams made of streams: of each source by weight, of each class in turn, with hard negatives.

Batch t is a function of t alone, and of a table on disk where negatives are mined: the same on any
number of processes and readers, and after a restart.
"""

import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from heron.pipeline.config.errors import ConfigError
from heron.pipeline.config.training import Negatives
from heron.pipeline.data.plan import Listed, Rows, ShardRows, Stream, by_number
from heron.shards.errors import ShardError

MINED = "negatives"  # in a run's folder: the tables
POLL_S = 0.02
CONTEXT = multiprocessing.get_context("forkserver")  # that of reading processes


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


@dataclass(frozen=True)
class MinedStream:
    """A stream whose every batch ends with hard negatives of its random rows.

    The random rows are those of the stream without mining. What is mined follows from the seed,
    the number of the batch and a table on disk. The table that is mined after step s is used for
    the steps from s + `every_steps` on: until then it is made in the background. Before the
    first one, further random rows stand in.

    Attributes:
        base: the random rows.
        config: how many rows, and how often the tables change.
        folder: of the tables, which `pipeline.negatives.mine` writes; all processes see it.
        seed: the run's.
        ended: set when the run ends, so that no reading process waits for a table for ever.
    """

    base: Stream | Blend
    config: Negatives
    folder: Path
    seed: int
    ended: Event = field(default_factory=CONTEXT.Event, repr=False, compare=False)
    _tables: dict[int, NDArray[np.int64]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def name(self) -> str:
        """The stream's name."""
        return self.base.name

    @property
    def batch(self) -> int:
        """Rows of the global batch, the mined ones included."""
        return self.base.batch + self.config.mine

    @property
    def steps_per_epoch(self) -> int:
        """Batches in a pass over the random rows."""
        return self.base.steps_per_epoch

    @property
    def by_shard(self) -> ShardRows:
        """See `Stream`."""
        return self.base.by_shard

    def describe(self) -> str:
        """Returns a line: that of the random rows, and how many are mined."""
        return f"{self.base.describe()}, and {self.config.mine:,} mined hard negatives a batch"

    @cached_property
    def candidates(self) -> Rows:
        """The numbers of all labelled rows, in order: row i of a table is of number i of them."""
        return self.by_shard.whole

    def passes(self, t: int) -> Rows:
        """Returns which pass each row of batch t is of, [1] or [batch]."""
        if len(passes := self.base.passes(t)) == 1:
            return passes
        mined = np.full(self.config.mine, t // self.steps_per_epoch)
        return np.concatenate([passes, mined])

    def at(self, t: int, own: slice = slice(None)) -> Rows:
        """Returns the rows of global batch t: the random ones, then the mined ones, each once.

        Or some of them: see `Stream.at`.
        """
        random = self.base.at(t)
        return np.concatenate([random, self._mined(t, random)])[own]

    def _mined(self, t: int, random: Rows) -> Rows:
        """Returns hard negatives of all random rows in a drawn order, then further random rows."""
        draw = np.random.default_rng([self.seed, *b"mined", t])
        chosen = np.empty(0, np.int64)
        if (table := self._table(t)) is not None:
            near = table[np.searchsorted(self.candidates, random)].ravel()
            chosen = _each_once(draw.permutation(near[near >= 0]), random)
        if len(chosen) < self.config.mine:
            others = draw.permutation(self.candidates)
            chosen = np.concatenate([chosen, _each_once(others, np.concatenate([random, chosen]))])
        return chosen[: self.config.mine]

    def _table(self, t: int) -> NDArray[np.int64] | None:
        """Returns the table in force at batch t, once it is there; None before the first."""
        every = self.config.every_steps
        made_at = (t // every - 1) * every
        if made_at <= 0:
            return None
        if made_at not in self._tables:
            path = self.folder / table_name(made_at)
            while not path.exists():  # it is being made; who waits too long ends by the watchdog
                if self.ended.wait(POLL_S):
                    raise ShardError(f"{path} will not come: the run has ended")
            self._tables.clear()
            self._tables[made_at] = np.load(path, allow_pickle=False)
        return self._tables[made_at]


AnyStream = Stream | Balanced | Blend | MinedStream


def table_name(step: int) -> str:
    """Returns the file of the table that is mined when so many steps are done."""
    return f"step-{step:08d}.npy"


def _each_once(rows: Rows, without: Rows) -> Rows:
    """Returns each row once, where it comes first, and none of others."""
    kept = rows[~np.isin(rows, without)]
    return kept[np.sort(np.unique(kept, return_index=True)[1])]
