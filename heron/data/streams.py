"""Opens the data of a run: its shards, the roles of their rows, and the streams of batches."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from heron.config.data import Protocol
from heron.config.errors import ConfigError
from heron.config.experiment import Config
from heron.data.blend import Balanced, Blend, apportion
from heron.data.dataset import load_or_assign_roles, open_reader
from heron.data.mined import MINED, AnyStream, MinedStream
from heron.data.plan import MAX_STREAMS, Listed, Rows, ShardRows, Stream, default_streams
from heron.data.protocol import Roles, complementary
from heron.data.reader import Reader
from heron.data.skipped import SkippedRows
from heron.shards.show import count_views


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


def open_streams(config: Config) -> Streams:
    """Opens the shards and plans the batches.

    Raises ConfigError if the protocol or a batch size does not fit the data, or both streams are
    empty; ShardError if the data set is missing or damaged.
    """
    data = config.data
    reader = open_reader(data)
    kind = reader.manifest.labels.kind
    count = data.protocol.complementary
    if count is not None:
        if kind not in ("multi_class", "hierarchical"):
            raise ConfigError(
                f"data.protocol.complementary draws from one class a row, but the labels of "
                f"{reader.store} are {kind}; set it to null"
            )
        if count >= (classes := len(reader.manifest.labels.names)):
            raise ConfigError(
                f"data.protocol.complementary is {count}, but there are {classes} classes; "
                f"expected 1 to {classes - 1}, so that a class is left"
            )
        kind = "complementary"
    stored = list(dict.fromkeys(view.stored for view in data.views))
    roles = load_or_assign_roles(reader, data)

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
        by_shard = roles.by_shard[name].shard_range(split.start, split.stop)
        if data.sources is None and (data.balance is None or name == "unlabelled"):
            canonical = data.canonical_streams or default_streams(batch)
            return Stream(name, by_shard, batch, config.seed, canonical, data.window_rows)
        return _plan_mixed(reader, config, name, batch, by_shard)

    random, unlabelled = plan("labelled"), plan("unlabelled")
    _refuse_repeated_rows(config, random)
    if config.negatives.mine and (reader.may_lack_views or reader.may_lack_labels):
        raise ConfigError(
            f"negatives.mine is {config.negatives.mine}, and rows lack views or labels; hard "
            "negatives are mined among whole rows: expected 0, or data.protocol.partial_rows=drop "
            "and a data set of whole rows"
        )
    labelled = _with_mined(random, config, kind) if config.negatives.mine else random
    drawn = [stream for stream in (labelled, unlabelled) if stream is not None]
    if not drawn:
        raise ConfigError(
            f"data.batch asks for no rows; expected labelled (of {roles.count('labelled')}) or "
            f"unlabelled (of {roles.count('unlabelled')}) above 0"
        )
    epoch_stream = next((stream for stream in drawn if stream.name == data.epoch), drawn[0])
    viewed = [view.stored for view in data.views]
    streams = Streams(
        reader, roles, labelled, unlabelled, epoch_stream, stored, viewed, data.protocol, kind
    )
    if labelled is not None:
        _check_labels(streams)
    refuse_unscored(reader, roles)
    return streams


def _plan_mixed(
    reader: Reader, config: Config, name: str, batch: int, shards: ShardRows
) -> Stream | Balanced | Blend:
    """Plans a stream that mixes sources by weight, takes classes in turn, or both."""
    data, seed = config.data, config.seed
    if getattr(data.batch, name) == "all":
        key = "sources" if data.sources else "balance"
        raise ConfigError(
            f"data.batch.{name} is 'all', and data.{key} draws rows by shares; expected a number"
        )

    def plan_source(rows: ShardRows, count: int, salt: str) -> Stream | Balanced:
        if data.balance is None or name == "unlabelled":
            streams = default_streams(count, data.canonical_streams or MAX_STREAMS)
            return Stream(name, rows, count, seed, streams, data.window_rows, salt)
        all_rows = rows.all_rows
        has = reader.targets(all_rows) > 0  # an unknown label counts as absent
        classes = [all_rows[column] for column in has.T if column.any()]
        if not has.any(1).all():  # rows without a label form a class of their own
            classes.append(all_rows[~has.any(1)])
        class_streams = []
        for number, class_rows in enumerate(classes):
            bounds = np.unique(np.searchsorted(class_rows, reader.starts))  # of non-empty shards
            listed, class_salt = Listed(class_rows, bounds), f"{salt} class {number}"
            class_streams.append(Stream(name, listed, 1, seed, 1, data.window_rows, class_salt))
        return Balanced(name, class_streams, count, rows)

    if data.sources is None:
        return plan_source(shards, batch, "")
    counts = apportion(batch, [source.weight for source in data.sources], name)
    source_of_shard = [file.file.partition(".")[0] for file in reader.manifest.splits[data.split]]
    source_streams = []
    for number, (source, count) in enumerate(zip(data.sources, counts, strict=True)):
        first = source_of_shard.index(str(number)) if str(number) in source_of_shard else 0
        source_rows = shards.shard_range(first, first + source_of_shard.count(str(number)))
        if source_rows.total < count:
            raise ConfigError(
                f"data.sources.{number}: {source.path} has {source_rows.total} {name} rows in "
                f"split '{data.split}', and {count} of every batch; expected as many at least; "
                "lower its weight, or leave it out"
            )
        source_streams.append(plan_source(source_rows, count, f"source {number}"))
    return Blend(name, source_streams)


def _refuse_repeated_rows(config: Config, labelled: AnyStream | None) -> None:
    """Refuses `data.balance` together with options that need each row once per batch."""
    terms = config.objective.terms()
    unsupported = [f"objective.{name}" for name, term in terms.items() if term.loss.remembers_rows]
    unsupported += ["negatives.mine"] if config.negatives.mine else []
    unsupported += ["data.batch.labelled = 0"] if labelled is None else []
    if config.data.balance is not None and unsupported:
        raise ConfigError(
            f"data.balance is {config.data.balance}, and may draw a labelled row twice in a batch; "
            f"expected no {unsupported[0]} with it; leave one of them out"
        )


def refuse_unscored(reader: Reader, roles: Roles) -> None:
    """Raises the errors of `Reader.ground_truth` for scored rows, before the run's first step."""
    if reader.manifest.labels.kind == "complementary":
        for role in (roles.test, roles.validation):
            reader.ground_truth(role)


def _with_mined(random: Stream | Balanced | Blend | None, config: Config, kind: str) -> MinedStream:
    """Returns the labelled stream with hard negatives; ConfigError if no labels define them."""
    supported = "multi_label", "multi_class", "hierarchical"
    if random is None or isinstance(random, Balanced) or kind not in supported:
        reason = "no labelled rows in the batch" if random is None else f"{kind} labels"
        raise ConfigError(
            f"negatives.mine is {config.negatives.mine}, with {reason}; hard negatives are told by "
            f"labels: expected {', '.join(supported)}; set data.batch.labelled, or "
            "negatives.mine to 0"
        )
    if (batch := random.batch + config.negatives.mine) > random.rows:
        raise ConfigError(
            f"data.batch.labelled + negatives.mine is {batch}, but there are {random.rows} "
            f"labelled rows; expected at most {random.rows}"
        )
    return MinedStream(random, config.negatives, Path(config.run.dir) / MINED, config.seed)


def _check_labels(streams: Streams) -> None:
    """Raises ConfigError for labels that no loss can use."""
    reader = streams.reader
    if reader.manifest.labels.kind not in ("complementary", "hierarchical"):
        return
    rows = streams.roles.labelled
    if reader.manifest.labels.kind == "complementary":
        counts = reader.targets(rows).sum(1)
        classes = len(reader.manifest.labels.names)
        if len(bad := np.flatnonzero((counts < 1) | (counts > classes - 1))):
            raise ConfigError(
                f"{reader.store}: sample {reader.sample_key(int(rows[bad[0]]))} has "
                f"{int(counts[bad[0]])} complementary labels of {classes} classes; expected 1 to "
                f"{classes - 1}: none says nothing, all leave no class; drop or mend the sample"
            )
    levels = reader.manifest.labels.levels or []
    paths = reader.label_paths(rows)
    for level in range(1, len(levels)):
        parents = np.unique(paths[:, level - 1 : level + 1], axis=0)
        child, count = np.unique(parents[:, 1], return_counts=True)
        if (count > 1).any():
            pairs = parents[parents[:, 1] == child[count > 1][0]]
            names = [levels[level - 1][parent] for parent in pairs[:2, 0]]
            raise ConfigError(
                f"{reader.store}: the hierarchy is no tree: '{levels[level][pairs[0, 1]]}' of "
                f"level {level + 1} lies below '{names[0]}' and below '{names[1]}'; expected one "
                "parent; give classes under different parents different numbers"
            )
