"""The streams that a run on indexed shards draws from, and a process's share of each batch."""

import multiprocessing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from heron.base.errors import ShardError
from heron.data.batches import VIEW_PREFIX, ArraySpec, Buffer, array_specs
from heron.data.decoders import Decoder
from heron.data.label_files import LabelWeights
from heron.data.options import Negatives, Protocol
from heron.data.plan import Balanced, Blend, Stream, even_slice
from heron.data.random_keys import rng_keys, uniforms
from heron.data.reader import Reader
from heron.data.rows import Roles, Rows, ShardRows, SkippedRows
from heron.data.views import Embedded, features_of
from heron.shards.show import count_views

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
        folder: of the tables, written by `heron.training.mining` and visible to all processes.
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
                    raise ShardError(f"{path} will not be read: the run has ended")
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


@dataclass(frozen=True)
class Streams:
    """The streams that the trainer draws from.

    Attributes:
        labelled: the stream of labelled rows, or None.
        unlabelled: the stream of unlabelled rows, or None.
        epoch_stream: the stream whose pass is an epoch.
        stored: names of the stored views to read, each once.
        stored_by_view: name of the stored view behind each view of the model.
        protocol: says which labels training sees.
        kind: of the labels that training sees.
        embedded: features that are read in place of views, by their number.
        label_weights: how much each label counts; None: all count 1.
    """

    reader: Reader
    roles: Roles
    labelled: AnyStream | None
    unlabelled: AnyStream | None
    epoch_stream: AnyStream
    stored: list[str]
    stored_by_view: list[str]
    protocol: Protocol
    kind: str
    embedded: Mapping[int, Embedded] = field(default_factory=dict, kw_only=True)
    label_weights: LabelWeights | None = field(default=None, kw_only=True)

    @property
    def decoders(self) -> dict[str, Decoder]:
        """The decoders of the stored views that are read, by name."""
        views = enumerate(self.stored_by_view)
        names = dict.fromkeys(name for number, name in views if number not in self.embedded)
        return {name: self.reader.decoders[name] for name in names}

    def targets(self, rows: Rows) -> NDArray[np.float32]:
        """Returns the labels of labelled rows that training sees, 0/1, [rows, labels]."""
        y = self.reader.targets(rows)
        count = self.protocol.complementary
        return y if count is None else complementary(y, rows, count, self.protocol)

    @cached_property
    def lacks_views(self) -> bool:
        """Whether any row that may be drawn lacks a view of the model."""
        if not self.reader.may_lack_views:
            return False
        rows = np.concatenate([self.roles.labelled, self.roles.unlabelled])
        return not self.reader.present(rows, self.stored).all()

    @cached_property
    def lacks_labels(self) -> bool:
        """Whether any single label of a labelled row is unknown."""
        return self.reader.may_lack_labels and bool(
            np.isnan(self.targets(self.roles.labelled)).any()
        )

    @property
    def labelled_rows(self) -> Rows:
        """Numbers of the rows whose labels training sees."""
        return self.roles.labelled

    def skipped(self, max_fraction: float) -> SkippedRows:
        """Returns a counter of skipped rows among those that the run draws or scores."""
        names = [stream.name for stream in (self.labelled, self.unlabelled) if stream is not None]
        return SkippedRows(self.roles.union([*names, "test", "validation"]), max_fraction)

    def rows_by_views(self) -> dict[str, dict[str, dict[str, int]]]:
        """Returns {"rows_by_views": {role: {views: rows}}}; empty where all rows have all views."""
        if not self.reader.may_lack_views:
            return {}
        counts = {
            role: count_views(
                self.reader.present(self.roles.rows_of(role), self.stored), self.stored
            )
            for role in ("labelled", "unlabelled", "test")
            if self.roles.count(role)
        }
        return {"rows_by_views": counts}

    def describe(self) -> list[str]:
        """Returns a line for each stream, and one for each role whose rows lack views or labels."""
        lines = [stream.describe() for stream in (self.labelled, self.unlabelled) if stream]
        for role, counts in self.rows_by_views().get("rows_by_views", {}).items():
            view_counts = ", ".join(f"{names}: {count:,}" for names, count in counts.items())
            lines.append(f"{role} rows with {view_counts}")
        if self.reader.may_lack_labels and len(self.roles.labelled):
            unknown = np.isnan(self.targets(self.roles.labelled)).mean()
            lines.append(f"labelled rows: {100 * unknown:.1f} % of their single labels are unknown")
        return lines


def complementary(
    y: NDArray[np.float32], rows: Rows, count: int, protocol: Protocol
) -> NDArray[np.float32]:
    """Draws complementary labels: `count` of the wrong classes of each row, uniformly.

    MulCo, Section 5.1, with s = `count`, 1 to classes - 1; y is one-hot. The classes of a row are a
    function of (seed, fold, row) alone. The result is 1 where a class is marked, [rows, classes].
    """
    row_keys = torch.from_numpy(rng_keys(protocol.seed, np.array([protocol.fold]), rows))
    draws = uniforms(row_keys, salt=7, count=y.shape[1]).numpy()
    order = np.argsort(np.where(y == 1, np.inf, draws), axis=1, kind="stable")
    wrong = np.zeros_like(y)
    np.put_along_axis(wrong, order[:, :count], 1.0, axis=1)
    return wrong


class ShardBatches:
    """Reads the share that process `rank` of `world` has of every global batch."""

    def __init__(self, streams: Streams, seed: int, rank: int, world: int) -> None:
        """Reads nothing yet."""
        self.streams, self.seed, self.rank, self.world = streams, seed, rank, world

    def specs(self) -> dict[str, ArraySpec]:
        """Returns the shape and dtype of every array of a batch."""
        streams, reader, no_rows = self.streams, self.streams.reader, np.empty(0, np.int64)
        sizes = {stream.name: len(rows) for stream, rows in self._local_rows(0)}
        targets = sizes.get("labelled", 0), *streams.targets(no_rows).shape[1:]
        levels = reader.label_paths(no_rows).shape[1]
        model_views = len(streams.stored_by_view) if reader.may_lack_views else 0
        rows = sum(sizes.values())
        specs = array_specs(streams.decoders, rows, targets, levels, model_views)
        if streams.label_weights is not None:
            specs["label_weights"] = targets, "float32"
        return specs | {
            VIEW_PREFIX + features_of(view): ((rows, embedded.width), embedded.dtype)
            for view, embedded in streams.embedded.items()
        }

    def load(self, t: int, buffer: Buffer) -> tuple[list[int], dict[int, str]]:
        """Fills a buffer with the process's share of batch t; returns `sizes` and `lost`."""
        drawn = self._local_rows(t)
        planned = np.concatenate([rows for _, rows in drawn])
        rows = self._read(planned, drawn, buffer)
        labelled, reader = rows[: len(buffer["targets"])], self.streams.reader
        buffer["targets"][:] = self.streams.targets(labelled)
        buffer["paths"][:] = reader.label_paths(labelled)
        if self.streams.label_weights is not None:
            buffer["label_weights"][:] = self.streams.label_weights.of(labelled)
        buffer["indices"][:] = rows
        if reader.may_lack_views:
            buffer["present"][:] = reader.present(rows, self.streams.stored_by_view)
        keys = []
        for stream, local in drawn:
            passes = stream.passes(t)
            if len(passes) > 1:  # one per row
                passes = passes[even_slice(stream.batch, self.rank, self.world)]
            keys.append(rng_keys(self.seed, passes, local))
        buffer["rng_keys"][:] = np.concatenate(keys)
        for view, embedded in self.streams.embedded.items():
            buffer[VIEW_PREFIX + features_of(view)][:] = embedded.read(rows, buffer["rng_keys"])
        lost = {int(row): reader.lost[int(row)] for row in planned[planned != rows]}
        return [len(rows) for _, rows in drawn], lost

    def _local_rows(self, t: int) -> list[tuple[AnyStream, Rows]]:
        streams = self.streams.labelled, self.streams.unlabelled
        return [
            (s, s.batch_rows(t, even_slice(s.batch, self.rank, self.world))) for s in streams if s
        ]

    def _read(self, planned: Rows, drawn: Sequence[tuple[AnyStream, Rows]], buffer: Buffer) -> Rows:
        """Reads the stored views; returns the rows read, in which others replace lost ones."""
        reader, names, rows = self.streams.reader, [*self.streams.decoders], planned.copy()
        self._replace_lost(rows, drawn)
        reader.fill({name: buffer[VIEW_PREFIX + name] for name in names}, rows)
        while len(replaced := self._replace_lost(rows, drawn)):
            for name in names:
                buffer[VIEW_PREFIX + name][replaced] = reader.read(name, rows[replaced])
        return rows

    def _replace_lost(self, rows: Rows, drawn: Sequence[tuple[AnyStream, Rows]]) -> Rows:
        """Replaces lost rows in place by the next of their stream; returns their positions."""
        if not (lost := self.streams.reader.lost):
            return np.empty(0, np.int64)
        replaced = np.flatnonzero([int(row) in lost for row in rows])
        ends = np.cumsum([len(own) for _, own in drawn])
        for i in replaced.tolist():
            stream = drawn[int(np.searchsorted(ends, i, side="right"))][0]
            rows[i] = self._next_readable(stream, int(rows[i]))
        return replaced

    def _next_readable(self, stream: AnyStream, row: int) -> int:
        """Returns the next readable row by number: the same on any process and after a restart."""
        lost = self.streams.reader.lost
        for candidate in stream.by_shard.following(row):
            if candidate not in lost:
                return candidate
        raise ShardError(
            f"cannot read any row of the {stream.name} stream; the last error: {lost[row]}"
        )
