"""Opens the data of a run: streams of indexed shards, or of tars without an index."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal, NoReturn

import numpy as np

from heron.base.errors import ConfigError
from heron.data.dataset import load_or_assign_roles, open_reader, prepare_decoders
from heron.data.endless import EndlessStream, EndlessStreams
from heron.data.label_files import LabelWeights
from heron.data.options import Data, Negatives
from heron.data.plan import MAX_STREAMS, Balanced, Blend, Stream, apportion, default_streams
from heron.data.protocol import assign
from heron.data.reader import Reader
from heron.data.rows import Listed, Roles, ShardRows
from heron.data.streams import MINED, MinedStream, Streams
from heron.data.tars import expand
from heron.shards.annotation import Annotation
from heron.shards.manifest import LABELS, Labels, Manifest
from heron.shards.tarball import TarReader
from heron.sources.foreign import draft_manifest
from heron.sources.layout import Layout


def open_streams(data: Data, seed: int, negatives: Negatives, folder: Path) -> Streams:
    """Opens the shards and plans the batches; hard negatives are mined into a run's `folder`.

    Raises ConfigError if the protocol or a batch size does not fit the data, or both streams are
    empty; ShardError if the data set is missing or damaged.
    """
    reader = open_reader(data)
    kind = reader.manifest.labels.kind
    count = data.protocol.complementary
    if count is not None:
        if kind not in ("multi_class", "hierarchical"):
            raise ConfigError(
                "data.protocol.complementary needs one class per row, but the labels of "
                f"{reader.store} are {kind}; set it to null"
            )
        if count >= (classes := len(reader.manifest.labels.names)):
            raise ConfigError(
                f"data.protocol.complementary must be 1 to {classes - 1}, so that a class is "
                f"left, got {count}"
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
                f"data.batch.{name} is 1; use 2 or more, since batch norm needs a variance, or 0 "
                "for none"
            )
        split = reader.shards_of(data.split)
        by_shard = roles.by_shard[name].shard_range(split.start, split.stop)
        if data.sources is None and (data.balance is None or name == "unlabelled"):
            canonical = data.canonical_streams or default_streams(batch)
            return Stream(name, by_shard, batch, seed, canonical, data.window_rows)
        return _plan_mixed(reader, data, seed, name, batch, by_shard)

    random, unlabelled = plan("labelled"), plan("unlabelled")
    if negatives.mine and (reader.may_lack_views or reader.may_lack_labels):
        raise ConfigError(
            f"negatives.mine is {negatives.mine}, but some rows lack views or labels, and "
            "hard negatives are mined among whole rows: set it to 0, or set "
            "data.protocol.partial_rows=drop and use a data set of whole rows"
        )
    mined = folder / MINED
    labelled = _with_mined(random, negatives, mined, seed, kind) if negatives.mine else random
    drawn = [stream for stream in (labelled, unlabelled) if stream is not None]
    if not drawn:
        raise ConfigError(
            f"data.batch has no rows; set labelled (there are {roles.count('labelled')}) or "
            f"unlabelled (there are {roles.count('unlabelled')}) above 0"
        )
    epoch_stream = next((stream for stream in drawn if stream.name == data.epoch), drawn[0])
    viewed = [view.stored for view in data.views]
    streams = Streams(
        reader, roles, labelled, unlabelled, epoch_stream, stored, viewed, data.protocol, kind
    )
    if (path := data.protocol.label_weights) is not None:
        weights = LabelWeights.read(reader, Path(path))
        streams = replace(streams, label_weights=weights)
    if labelled is not None:
        _check_labels(streams)
    refuse_unscored(reader, roles)
    return streams


def _plan_mixed(
    reader: Reader, data: Data, seed: int, name: str, batch: int, shards: ShardRows
) -> Stream | Balanced | Blend:
    """Plans a stream that mixes sources by weight, takes classes in turn, or both."""
    if getattr(data.batch, name) == "all":
        key = "sources" if data.sources else "balance"
        raise ConfigError(
            f"data.batch.{name} is 'all', but data.{key} samples rows by shares; set a number"
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
                f"split '{data.split}', but every batch takes {count}; lower its weight"
            )
        source_streams.append(plan_source(source_rows, count, f"source {number}"))
    return Blend(name, source_streams)


def refuse_unscored(reader: Reader, roles: Roles) -> None:
    """Raises the errors of `Reader.ground_truth` for scored rows, before the run's first step."""
    if reader.manifest.labels.kind == "complementary":
        for role in (roles.test, roles.validation):
            reader.ground_truth(role)


def _with_mined(
    random: Stream | Balanced | Blend | None, negatives: Negatives, file: Path, seed: int, kind: str
) -> MinedStream:
    """Returns the labelled stream with hard negatives; ConfigError if no labels define them."""
    supported = "multi_label", "multi_class", "hierarchical"
    if random is None or isinstance(random, Balanced) or kind not in supported:
        reason = "no labelled rows in the batch" if random is None else f"{kind} labels"
        raise ConfigError(
            f"negatives.mine is {negatives.mine}, with {reason}, but hard negatives are "
            f"found by labels and need {', '.join(supported)}; set data.batch.labelled, or set "
            "negatives.mine to 0"
        )
    if (batch := random.batch + negatives.mine) > random.rows:
        raise ConfigError(
            f"data.batch.labelled + negatives.mine is {batch}, but there are only {random.rows} "
            "labelled rows; lower one of them"
        )
    return MinedStream(random, negatives, file, seed)


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
                f"{int(counts[bad[0]])} complementary labels of {classes} classes; it must have 1 "
                f"to {classes - 1}: none says nothing, all leave no class; drop or fix the sample"
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
                f"{reader.store}: the hierarchy is not a tree: '{levels[level][pairs[0, 1]]}' of "
                f"level {level + 1} is below '{names[0]}' and below '{names[1]}'; give classes "
                "under different parents different numbers"
            )


def open_endless(data: Data) -> EndlessStreams:
    """Opens the data set, or makes the declaration, that samples must fit; opens no tar yet.

    Raises ConfigError if an option needs an index, SourceError if a declared member or label cannot
    be read, ShardError if the data set for scoring is missing or damaged.
    """
    assert data.webdataset is not None
    for key, why in _unsupported(data):
        refuse_without_index(key, why)
    reader, layout = open_reader(data) if data.path else _declared(data), None
    if (manifest := reader.manifest).block_rows is not None:
        raise ConfigError(
            f"{reader.store} packs {manifest.block_rows} rows in a sample, but data.webdataset "
            "reads one row per sample; set only data.path for such tars"
        )
    if manifest.foreign:
        layout = Layout.of(manifest.built_from.options)
    views = zip(manifest.views, manifest.members, strict=False)
    suffixes: dict[str, tuple[str, ...]] = {view.name: (member,) for view, member in views}
    suffixes |= {column.name: column.suffixes for column in layout.columns} if layout else {}
    annotation = layout.annotation if layout else Annotation(LABELS)
    if data.batch.labelled and manifest.labels.kind not in ("multi_class", "multi_label"):
        raise ConfigError(
            f"data.batch.labelled is {data.batch.labelled}, but the labels of {reader.store} are "
            f"{manifest.labels.kind}, not multi_class or multi_label: set data.webdataset.label "
            "and classes, or use 0 labelled rows"
        )
    no_rows = np.empty(0, np.int64)
    roles = Roles(reader.starts, no_rows, no_rows, no_rows, no_rows)
    if data.path:
        roles = assign(reader, data.split, data.protocol)
    refuse_unscored(reader, roles)
    labelled, unlabelled = _stream("labelled", data), _stream("unlabelled", data)
    active = [stream for stream in (labelled, unlabelled) if stream is not None]
    if not active:
        raise ConfigError(
            "data.batch has no rows; set labelled or unlabelled above 0, with tars of that name "
            "in data.webdataset"
        )
    return EndlessStreams(
        reader=reader,
        roles=roles,
        labelled=labelled,
        unlabelled=unlabelled,
        epoch_stream=next((stream for stream in active if stream.name == data.epoch), active[0]),
        stored=list(dict.fromkeys(view.stored for view in data.views)),
        stored_by_view=[view.stored for view in data.views],
        protocol=data.protocol,
        kind=manifest.labels.kind,
        config=data.webdataset,
        tar_reader=TarReader(data.webdataset.tar_bytes, data.storage_options),
        suffixes=suffixes,
        annotation=annotation,
    )


def refuse_without_index(key: str, why: str) -> NoReturn:
    """Raises the error of an option that needs an index, for tars that have none."""
    raise ConfigError(
        f"{key}, but data.webdataset streams samples without an index: {why}; remove it, or "
        "index the tars (heron shards index) and set data.path"
    )


def _unsupported(data: Data) -> Iterator[tuple[str, str]]:
    """Yields the options of data that need an index, and the reasons."""
    if data.roles is not None:
        yield f"data.roles is {data.roles}", "samples have no numbers, which roles need"
    if data.protocol.complementary is not None:
        yield "data.protocol.complementary is set", "it is chosen by row number"
    if data.protocol.hide_labels:
        hidden = data.protocol.hide_labels
        yield f"data.protocol.hide_labels is {hidden:g}", "they are chosen by row number"
    for key in ("leave_out", "label_weights"):
        if (path := getattr(data.protocol, key)) is not None:
            yield f"data.protocol.{key} is {path}", "it chooses samples of a data set by their keys"
    if data.protocol.partial_rows != "keep":
        rows = data.protocol.partial_rows
        yield (
            f"data.protocol.partial_rows is {rows}",
            "a sample without one of its views counts as unreadable",
        )
    if data.canonical_streams is not None:
        yield f"data.canonical_streams is {data.canonical_streams}", "nothing plans the order"
    if data.standardise and not data.path:
        yield "data.standardise is true", "there are no statistics but those of data.path"
    for name in ("labelled", "unlabelled"):
        if getattr(data.batch, name) == "all":
            yield f"data.batch.{name} is 'all'", "the number of samples is unknown"


def _declared(data: Data) -> Reader:
    """Returns a reader without rows whose manifest has what `data.webdataset` declares."""
    options = data.webdataset
    assert options is not None
    layout_options = {
        "image": options.image,
        "vector": list(options.vector),
        "text": options.text,
        "label": options.label,
    }
    layout = Layout.of(layout_options)
    if (options.label is None) != (not options.names):
        raise ConfigError(
            f"data.webdataset has label {options.label} and {len(options.names)} classes; set "
            "both or neither, since labels are counted before the first sample is read"
        )
    drafted = draft_manifest(Path("data.webdataset"), layout, {})
    widths = iter(options.vector.values())
    views = [
        view.model_copy(update={"shape": (next(widths),)}) if view.kind == "vector" else view
        for view in drafted.views
    ]
    labels = Labels(kind=options.label_kind if options.label else "none", names=options.names)
    changes = {"views": views, "labels": labels}
    manifest = Manifest.model_validate(dict(drafted) | changes).sealed()
    reader = Reader(Path("data.webdataset"), data.on_error, manifest=manifest)
    prepare_decoders(reader, data)
    return reader


def _stream(name: str, data: Data) -> EndlessStream | None:
    options = data.webdataset
    assert options is not None
    batch, tars = getattr(data.batch, name), getattr(options, name)
    if bool(batch) != bool(tars):
        raise ConfigError(
            f"data.batch.{name} is {batch}, and data.webdataset.{name} has {len(tars) or 'no'} "
            "tars; set both or neither"
        )
    if not batch:
        return None
    if not 2 <= batch <= options.samples_per_epoch:
        raise ConfigError(
            f"data.batch.{name} must be 2 to {options.samples_per_epoch}, which is "
            f"data.webdataset.samples_per_epoch, got {batch}"
        )
    return EndlessStream(name, expand(tars), batch, options.samples_per_epoch)
