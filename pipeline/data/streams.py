"""The data of a run: shards opened, roles assigned, and the streams its batches come from."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from heron.pipeline.config.data import Protocol
from heron.pipeline.config.errors import ConfigError
from heron.pipeline.config.experiment import Config
from heron.pipeline.data.blend import Balanced, Blend, apportion
from heron.pipeline.data.dataset import open_reader, roles_of
from heron.pipeline.data.mined import MINED, AnyStream, MinedStream
from heron.pipeline.data.plan import MOST_STREAMS, Listed, Rows, ShardRows, Stream, default_streams
from heron.pipeline.data.protocol import Roles, complementary
from heron.pipeline.data.reader import Reader
from heron.pipeline.data.skipped import Skipped
from heron.shards.show import count_views


@dataclass(frozen=True)
class Streams:
    """The streams that the trainer draws from.

    Attributes:
        reader: the data set.
        roles: rows by role.
        labelled: the stream of labelled rows, or None.
        unlabelled: the stream of unlabelled rows, or None.
        epoch_stream: the one whose pass is an epoch.
        stored: names of the stored views that are read, each once.
        viewed: the stored view of each view of the model.
        protocol: decides what training sees of a label.
        kind: of the labels that training sees.
    """

    reader: Reader
    roles: Roles
    labelled: AnyStream | None
    unlabelled: AnyStream | None
    epoch_stream: AnyStream
    stored: list[str]
    viewed: list[str]
    protocol: Protocol
    kind: str

    def targets(self, rows: Rows) -> NDArray[np.float32]:
        """Returns the labels that training sees of some labelled rows, as 0/1 columns."""
        y = self.reader.targets(rows)
        drawn = self.protocol.complementary
        return y if drawn is None else complementary(y, rows, drawn, self.protocol)

    @cached_property
    def missing(self) -> bool:
        """Whether a row that is drawn lacks a view that the model sees."""
        if not self.reader.partial:
            return False
        rows = np.concatenate([self.roles.labelled, self.roles.unlabelled])
        return not self.reader.present(rows, self.stored).all()

    @cached_property
    def unknown(self) -> bool:
        """Whether a labelled row lacks a label."""
        return self.reader.unknown and bool(np.isnan(self.targets(self.roles.labelled)).any())

    @property
    def labelled_rows(self) -> Rows:
        """Numbers of the rows whose labels training sees."""
        return self.roles.labelled

    def skipped(self, most: float) -> Skipped:
        """Returns what counts skipped rows, of all that the run draws or scores."""
        drawn = [s.name for s in (self.labelled, self.unlabelled) if s is not None]
        return Skipped(self.roles.together([*drawn, "test", "validation"]), most)

    def rows_by_views(self) -> dict[str, dict[str, dict[str, int]]]:
        """Returns how many rows of each role have which views, by `rows_by_views`, for the result.

        Nothing where all rows have all views.
        """
        if not self.reader.partial:
            return {}
        counts = {
            role: count_views(
                self.reader.present(self.roles.listed(role), self.stored), self.stored
            )
            for role in ("labelled", "unlabelled", "test")
            if self.roles.count(role)
        }
        return {"rows_by_views": counts}

    def describe(self) -> list[str]:
        """Returns a line a stream, and a line a role whose rows are not whole: see `Stream`."""
        lines = [stream.describe() for stream in (self.labelled, self.unlabelled) if stream]
        for role, counts in self.rows_by_views().get("rows_by_views", {}).items():
            found = ", ".join(f"{names}: {n:,}" for names, n in counts.items())
            lines.append(f"{role} rows with {found}")
        if self.reader.unknown and len(self.roles.labelled):
            unknown = np.isnan(self.targets(self.roles.labelled)).mean()
            lines.append(f"labelled rows: {100 * unknown:.1f} % of their single labels are unknown")
        return lines


def open_data(config: Config) -> Streams:
    """Opens what a run draws from: indexed shards, or tars without an index."""
    if config.data.webdataset is None:
        return open_streams(config)
    from heron.pipeline.data.endless import open_endless  # late: endless streams are streams

    return open_endless(config)


def open_streams(config: Config) -> Streams:
    """Opens the shards and plans the batches.

    Raises:
        ConfigError: the protocol or a batch does not fit the data, or both streams are empty.
        ShardError: the data set is missing or damaged.
    """
    data = config.data
    reader = open_reader(data)
    kind = reader.manifest.labels.kind
    drawn = data.protocol.complementary
    if drawn is not None:
        if kind not in ("multi_class", "hierarchical"):
            raise ConfigError(
                f"data.protocol.complementary draws from one class a row, but the labels of "
                f"{reader.store} are {kind}; set it to null"
            )
        if drawn >= (classes := len(reader.manifest.labels.names)):
            raise ConfigError(
                f"data.protocol.complementary is {drawn}, but there are {classes} classes; "
                f"expected 1 to {classes - 1}, so that a class is left"
            )
        kind = "complementary"
    stored = list(dict.fromkeys(view.stored for view in data.views))
    roles = roles_of(reader, data)

    def plan(name: Literal["labelled", "unlabelled"]) -> Stream | Balanced | Blend | None:
        size = getattr(data.batch, name)
        batch = roles.count(name) if size == "all" else size
        if batch == 0:
            return None
        if batch == 1:
            raise ConfigError(
                f"data.batch.{name} is 1; expected at least 2, since batch norm has no variance of "
                "one row, or 0 for none"
            )
        split = reader.shards_of(data.split)
        by_shard = roles.by_shard[name].between(split.start, split.stop)
        if data.sources is None and (data.balance is None or name == "unlabelled"):
            canonical = data.canonical_streams or default_streams(batch)
            return Stream(name, by_shard, batch, config.seed, canonical, data.window_rows)
        return _mixed(reader, config, name, batch, by_shard)

    random, unlabelled = plan("labelled"), plan("unlabelled")
    _refuse_balance(config, random)
    if config.negatives.mine and (reader.partial or reader.unknown):
        raise ConfigError(
            f"negatives.mine is {config.negatives.mine}, and rows lack views or labels; hard "
            "negatives are mined among whole rows: expected 0, or data.protocol.partial_rows=drop "
            "and a data set of whole rows"
        )
    labelled = _with_mined(random, config, kind) if config.negatives.mine else random
    present = [s for s in (labelled, unlabelled) if s is not None]
    if not present:
        raise ConfigError(
            f"data.batch asks for no rows; expected labelled (of {roles.count('labelled')}) or "
            f"unlabelled (of {roles.count('unlabelled')}) above 0"
        )
    epoch_stream = next((s for s in present if s.name == data.epoch), present[0])
    viewed = [view.stored for view in data.views]
    streams = Streams(
        reader, roles, labelled, unlabelled, epoch_stream, stored, viewed, data.protocol, kind
    )
    if labelled is not None:
        _check_labels(streams)
    refuse_unscored(reader, roles)
    return streams


def _mixed(
    reader: Reader, config: Config, name: str, batch: int, shards: ShardRows
) -> Stream | Balanced | Blend:
    """Returns a stream that takes of each source its share, of each class its turn, or both."""
    data, seed = config.data, config.seed
    if getattr(data.batch, name) == "all":
        what = "sources" if data.sources else "balance"
        raise ConfigError(
            f"data.batch.{name} is 'all', and data.{what} draws rows by shares; expected a number"
        )

    def one(rows: ShardRows, count: int, salt: str) -> Stream | Balanced:
        if data.balance is None or name == "unlabelled":
            streams = default_streams(count, data.canonical_streams or MOST_STREAMS)
            return Stream(name, rows, count, seed, streams, data.window_rows, salt)
        drawn = rows.whole
        has = reader.targets(drawn) > 0  # which what is not known is not
        classes = [drawn[column] for column in has.T if column.any()]
        if not has.any(1).all():  # of no label: a class of their own
            classes.append(drawn[~has.any(1)])
        streams_of = []
        for number, own in enumerate(classes):
            bounds = np.unique(np.searchsorted(own, reader.starts))  # shards with a row of it
            known = seed, 1, data.window_rows, f"{salt} class {number}"
            streams_of.append(Stream(name, Listed(own, bounds), 1, *known))
        return Balanced(name, streams_of, count, rows)

    if data.sources is None:
        return one(shards, batch, "")
    counts = apportion(batch, [source.weight for source in data.sources], name)
    of = [file.file.partition(".")[0] for file in reader.manifest.splits[data.split]]
    parts = []
    for number, (source, count) in enumerate(zip(data.sources, counts, strict=True)):
        first = of.index(str(number)) if str(number) in of else 0
        own = shards.between(first, first + of.count(str(number)))
        if own.total < count:
            raise ConfigError(
                f"data.sources.{number}: {source.path} has {own.total} {name} rows in "
                f"split '{data.split}', and {count} of every batch; expected as many at least; "
                "lower its weight, or leave it out"
            )
        parts.append(one(own, count, f"source {number}"))
    return Blend(name, parts)


def _refuse_balance(config: Config, labelled: AnyStream | None) -> None:
    """Refuses what a batch that may have a row twice cannot do."""
    unfit = [f"objective.{k}" for k, t in config.objective.terms().items() if t.remembers_rows]
    unfit += ["negatives.mine"] if config.negatives.mine else []
    unfit += ["data.batch.labelled = 0"] if labelled is None else []
    if config.data.balance is not None and unfit:
        raise ConfigError(
            f"data.balance is {config.data.balance}, and may draw a labelled row twice in a batch; "
            f"expected no {unfit[0]} with it; leave one of them out"
        )


def refuse_unscored(reader: Reader, roles: Roles) -> None:
    """Raises as `Reader.truth`, before the first step and not after the last."""
    if reader.manifest.labels.kind == "complementary":
        for scored in (roles.test, roles.validation):
            reader.truth(scored)


def _with_mined(random: Stream | Balanced | Blend | None, config: Config, kind: str) -> MinedStream:
    """Returns the labelled stream with mined hard negatives.

    Raises:
        ConfigError: there are no labels to tell hard negatives by, or too few rows.
    """
    known = "multi_label", "multi_class", "hierarchical"
    if random is None or isinstance(random, Balanced) or kind not in known:
        reason = "no labelled rows in the batch" if random is None else f"{kind} labels"
        raise ConfigError(
            f"negatives.mine is {config.negatives.mine}, with {reason}; hard negatives are told by "
            f"labels: expected {', '.join(known)}; set data.batch.labelled, or negatives.mine to 0"
        )
    if (batch := random.batch + config.negatives.mine) > random.rows:
        raise ConfigError(
            f"data.batch.labelled + negatives.mine is {batch}, but there are {random.rows} "
            f"labelled rows; expected at most {random.rows}"
        )
    return MinedStream(random, config.negatives, Path(config.run.dir) / MINED, config.seed)


def _check_labels(streams: Streams) -> None:
    """Refuses labels that no loss can use: sets that say nothing or all, a hierarchy of no tree.

    Raises:
        ConfigError: names the sample or the class, what is wrong and the remedy.
    """
    reader = streams.reader
    if reader.manifest.labels.kind not in ("complementary", "hierarchical"):
        return
    rows = streams.roles.labelled
    if reader.manifest.labels.kind == "complementary":
        size = reader.targets(rows).sum(1)
        classes = len(reader.manifest.labels.names)
        if len(bad := np.flatnonzero((size < 1) | (size > classes - 1))):
            raise ConfigError(
                f"{reader.store}: sample {reader.sample_key(int(rows[bad[0]]))} has "
                f"{int(size[bad[0]])} complementary labels of {classes} classes; expected 1 to "
                f"{classes - 1}: none says nothing, all leave no class; drop or mend the sample"
            )
    levels = reader.manifest.labels.levels or []
    paths = reader.paths(rows)
    for level in range(1, len(levels)):
        parents = np.unique(paths[:, level - 1 : level + 1], axis=0)
        child, count = np.unique(parents[:, 1], return_counts=True)
        if (count > 1).any():
            two = parents[parents[:, 1] == child[count > 1][0]]
            names = [levels[level - 1][parent] for parent in two[:2, 0]]
            raise ConfigError(
                f"{reader.store}: the hierarchy is no tree: '{levels[level][two[0, 1]]}' of level "
                f"{level + 1} lies below '{names[0]}' and below '{names[1]}'; expected one parent; "
                "give classes under different parents different numbers"
            )
