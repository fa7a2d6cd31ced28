"""Which rows make up batch t: index arithmetic only, so that the order costs no reading.

The order is a function of (seed, epoch, canonical streams) and of nothing else: not of the number
of processes, nor of loader workers. The shards of an epoch are permuted and laid end to end; the
line is cut into C contiguous canonical streams; each is shuffled within a window; batch t takes
B / C rows of every stream. A process then owns a contiguous share of the batch and touches about
C / P streams, hence few shards at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from heron.pipeline.config.errors import ConfigError

Rows = NDArray[np.int64]
MOST_STREAMS = 64  # canonical streams, where nobody says how many


def share(total: int, rank: int, world: int) -> slice:
    """Returns the contiguous share of `total` rows of a process; sizes differ by at most 1."""
    return slice(rank * total // world, (rank + 1) * total // world)


def shares(total: int, world: int) -> list[int]:
    """Returns the size of every process's share."""
    slices = (share(total, rank, world) for rank in range(world))
    return [own.stop - own.start for own in slices]


def default_streams(batch: int) -> int:
    """Returns the largest divisor of the batch up to `MOST_STREAMS`."""
    return max(c for c in range(1, min(MOST_STREAMS, batch) + 1) if batch % c == 0)


@dataclass(frozen=True)
class Stream:
    """An endless sequence of global batches over one set of rows, each epoch a full pass.

    Attributes:
        shards: the rows of each shard that take part, as numbers in the data set.
        batch: rows of the global batch.
        seed: the run's seed; `name` keeps two streams of one run apart.
        canonical: C, the number of canonical streams; divides the batch.
        window: a row moves at most this far in its stream.
        salt: tells streams of one name apart.
    """

    name: str
    shards: Sequence[Rows]
    batch: int
    seed: int
    canonical: int
    window: int
    salt: str = ""
    _cache: dict[int, Rows] = field(default_factory=dict, repr=False, compare=False)

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
        return sum(len(shard) for shard in self.shards)

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches in an epoch; fewer rows than one batch are left over."""
        return self.rows // self.batch

    @property
    def left_over(self) -> int:
        """Rows that an epoch does not reach: other ones every epoch."""
        return self.rows % self.batch

    def at(self, t: int) -> Rows:
        """Returns the rows of global batch t = 0, 1, ... of the run, stream by stream, [batch]."""
        epoch, step = divmod(t, self.steps_per_epoch)
        if epoch not in self._cache:
            each, steps = self.batch // self.canonical, self.steps_per_epoch
            streams = [rows[: steps * each].reshape(steps, each) for rows in self.order(epoch)]
            self._cache.clear()
            self._cache[epoch] = np.concatenate(streams, axis=1)
        batch: Rows = self._cache[epoch][step]
        return batch

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
        salt = [self.seed, *self.name.encode(), *self.salt.encode(), epoch]
        shuffle = np.random.default_rng([*salt, 0])
        line = np.concatenate([self.shards[i] for i in shuffle.permutation(len(self.shards))])
        bounds = [share(len(line), c, self.canonical) for c in range(self.canonical)]
        return [
            _shuffle_within(line[bound], self.window, np.random.default_rng([*salt, 1, c]))
            for c, bound in enumerate(bounds)
        ]


def _shuffle_within(rows: Rows, window: int, rng: np.random.Generator) -> Rows:
    """Sorts by position + uniform(0, window): no row moves further than the window."""
    if window >= len(rows):
        return rng.permutation(rows)
    return rows[np.argsort(np.arange(len(rows)) + rng.random(len(rows)) * window, kind="stable")]
