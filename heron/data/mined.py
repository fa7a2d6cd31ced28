"""Labelled batches of random rows and mined hard negatives."""

import multiprocessing
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from heron.config.training import Negatives
from heron.data.blend import Balanced, Blend
from heron.data.plan import Rows, ShardRows, Stream
from heron.shards.errors import ShardError

MINED = "negatives"  # folder of the tables in a run's folder
POLL_S = 0.02
CONTEXT = multiprocessing.get_context("forkserver")  # that of the loader workers


@dataclass(frozen=True)
class MinedStream:
    """A stream in which every batch ends with hard negatives of its random rows.

    The random rows are those of the stream without mining. The mined rows are a function of the
    seed, the number of the batch and a table on disk, so batches do not depend on processes, loader
    workers or restarts. The table mined after step s is used from step s + `every_steps` on; until
    then it is computed in the background. Before the first table, random rows take the place of
    mined ones.

    Attributes:
        config: how many rows to mine, and how often the tables change.
        folder: of the tables, written by `pipeline.negatives.mine` and visible to all processes.
        ended: set when the run ends, so that no loader worker waits for a table forever.
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
        """Rows of the global batch, including the mined ones."""
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
        """Returns one line: that of the random rows, and the number of mined rows."""
        return f"{self.base.describe()}, and {self.config.mine:,} mined hard negatives a batch"

    @cached_property
    def candidates(self) -> Rows:
        """All labelled rows, ascending; row i of a table has the neighbours of candidate i."""
        return self.by_shard.all_rows

    def passes(self, t: int) -> Rows:
        """Returns the number of the pass of each row of batch t, [1] or [batch]."""
        if len(passes := self.base.passes(t)) == 1:
            return passes
        mined = np.full(self.config.mine, t // self.steps_per_epoch)
        return np.concatenate([passes, mined])

    def batch_rows(self, t: int, local: slice = slice(None)) -> Rows:
        """See `Stream.batch_rows`; random rows come first, and each row is there once."""
        random = self.base.batch_rows(t)
        return np.concatenate([random, self._mined(t, random)])[local]

    def _mined(self, t: int, random: Rows) -> Rows:
        """Returns shuffled hard negatives of the random rows, filled up with random rows."""
        rng = np.random.default_rng([self.seed, *b"mined", t])
        chosen = np.empty(0, np.int64)
        if (table := self._table(t)) is not None:
            near = table[np.searchsorted(self.candidates, random)].ravel()
            chosen = _unique(rng.permutation(near[near >= 0]), random)
        if len(chosen) < self.config.mine:
            others = rng.permutation(self.candidates)
            chosen = np.concatenate([chosen, _unique(others, np.concatenate([random, chosen]))])
        return chosen[: self.config.mine]

    def _table(self, t: int) -> NDArray[np.int64] | None:
        """Waits for the table that batch t uses and returns it; None before the first table."""
        interval = self.config.every_steps
        mined_at = (t // interval - 1) * interval
        if mined_at <= 0:
            return None
        if mined_at not in self._tables:
            path = self.folder / table_name(mined_at)
            while not path.exists():  # it is being mined; the watchdog ends a wait that is too long
                if self.ended.wait(POLL_S):
                    raise ShardError(f"{path} will not come: the run has ended")
            self._tables.clear()
            self._tables[mined_at] = np.load(path, allow_pickle=False)
        return self._tables[mined_at]


AnyStream = Stream | Balanced | Blend | MinedStream


def table_name(step: int) -> str:
    """Returns the file name of the table that is mined after `step` steps."""
    return f"step-{step:08d}.npy"


def _unique(rows: Rows, excluded: Rows) -> Rows:
    """Returns the distinct rows in order of first occurrence, without the excluded ones."""
    rows = rows[~np.isin(rows, excluded)]
    return rows[np.sort(np.unique(rows, return_index=True)[1])]
