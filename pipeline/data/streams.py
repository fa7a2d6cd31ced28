"""The data of a run: shards opened, roles assigned, and the streams its batches come from."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from pipeline.config import Config, Data
from pipeline.data.plan import Rows, Stream, default_streams
from pipeline.data.protocol import Roles, assign
from pipeline.data.reader import Reader
from pipeline.errors import ConfigError
from shards.build import build
from shards.sources import make


@dataclass(frozen=True)
class Streams:
    """What the trainer draws from.

    Attributes:
        reader: the data set.
        roles: rows by role.
        labelled: the stream of labelled rows, or None.
        unlabelled: the stream of unlabelled rows, or None.
        lead: the one whose pass is an epoch.
        stored: names of the stored views that are read, each once.
    """

    reader: Reader
    roles: Roles
    labelled: Stream | None
    unlabelled: Stream | None
    lead: Stream
    stored: list[str]

    def describe(self) -> list[str]:
        """A line a stream: rows, batch, and what an epoch leaves over."""
        return [
            f"{s.name}: {s.rows:,} rows = {s.steps_per_epoch:,} steps x {s.batch:,} "
            f"+ {s.left_over:,} left over an epoch, in {s.canonical} canonical streams"
            for s in (self.labelled, self.unlabelled)
            if s is not None
        ]


def build_data(data: Data, progress: bool = True) -> None:
    """Make the data set of `data.build` unless it is there already."""
    if data.build is not None:
        options = dict(data.build)
        source = options.pop("source", None)
        if not isinstance(source, str):
            raise ConfigError("data.build: key 'source' is missing; expected e.g. source: faces")
        build(make(source, options), Path(data.path), progress=progress)


def open_streams(config: Config) -> Streams:
    """Open the shards and plan the batches.

    Raises:
        ConfigError: the protocol or a batch does not fit the data, or both streams are empty.
        ShardError: the data set is missing or damaged.
    """
    data = config.data
    reader = Reader(data.path)
    kind = reader.manifest.labels.kind
    if config.objective.cross_entropy is not None and kind not in ("multi_class", "hierarchical"):
        raise ConfigError(
            f"objective.cross_entropy needs one class a row, but the labels of {data.path} are "
            f"{kind}; use objective.bce"
        )
    if kind == "complementary":
        raise ConfigError(
            f"the labels of {data.path} are complementary: they say what a row is not; the terms "
            "so far need labels that say what it is"
        )
    if config.objective.weighted_unsupervised is not None and len(data.views) < 2:
        raise ConfigError(
            f"objective.weighted_unsupervised needs at least 2 views; data.views has "
            f"{len(data.views)}; give the stored view twice, each with its augmentation"
        )
    roles = assign(reader, data.split, data.protocol)
    in_shard = reader.shard_rows(data.split)

    def plan(name: Literal["labelled", "unlabelled"], rows: Rows) -> Stream | None:
        asked = getattr(data.batch, name)
        batch = len(rows) if asked == "all" else asked
        if batch == 0:
            return None
        if batch == 1:
            raise ConfigError(
                f"data.batch.{name} is 1; expected at least 2, since batch norm has no variance of "
                "one row, or 0 for none"
            )
        taken = [shard[np.isin(shard, rows, assume_unique=True)] for shard in in_shard]
        canonical = data.canonical_streams or default_streams(batch)
        return Stream(name, taken, batch, config.seed, canonical, data.window_rows)

    labelled, unlabelled = plan("labelled", roles.labelled), plan("unlabelled", roles.unlabelled)
    found = [s for s in (labelled, unlabelled) if s is not None]
    if not found:
        raise ConfigError(
            f"data.batch asks for no rows; expected labelled (of {len(roles.labelled)}) or "
            f"unlabelled (of {len(roles.unlabelled)}) above 0"
        )
    lead = next((s for s in found if s.name == data.epoch), found[0])
    stored = list(dict.fromkeys(view.stored for view in data.views))
    return Streams(reader, roles, labelled, unlabelled, lead, stored)
