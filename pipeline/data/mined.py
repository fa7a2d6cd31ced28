"""Labelled batches that carry mined hard negatives beside their random rows."""

import multiprocessing
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from heron.pipeline.config.training import Negatives
from heron.pipeline.data.blend import Balanced, Blend
from heron.pipeline.data.plan import Rows, ShardRows, Stream
from heron.shards.errors import ShardError

MINED = "negatives"  # in a run's folder: the tables
POLL_S = 0.02
CONTEXT = multiprocessing.get_context("forkserver")  # that of reading processes


@dataclass(frozen=True)
class MinedStream:
    """A stream whose every batch ends with hard negatives of its random rows.

    The random rows are those of the stream without mining. What is mined follows from the seed,
    the number of the batch and a table on disk: so batches are the same on any number of
    processes and readers, and after a restart. The table that is mined after step s is used for
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
