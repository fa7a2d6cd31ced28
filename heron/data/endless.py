"""The streams of a run on tars without an index: the members of a sample, and the scored rows."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heron.config.endless import WebDataset, expand
from heron.config.errors import ConfigError
from heron.config.experiment import Config
from heron.data.dataset import open_reader, prepare_decoders
from heron.data.plan import Rows
from heron.data.protocol import Roles, assign
from heron.data.reader import Reader
from heron.data.skipped import SkippedRows
from heron.data.streams import Streams, open_streams, refuse_unscored
from heron.shards.annotation import Annotation, Label
from heron.shards.errors import ShardError, short_repr
from heron.shards.foreign import draft_manifest
from heron.shards.layout import Layout
from heron.shards.manifest import LABELS, Labels, Manifest
from heron.shards.stream import TarReader

Sample = Mapping[str, Any]  # bytes by suffix, with `__key__` and `__url__`


@dataclass(frozen=True)
class EndlessStream:
    """The tars of one stream, and the number of its samples in a global batch."""

    name: str
    tars: list[str]
    batch: int
    samples_per_epoch: int

    @property
    def steps_per_epoch(self) -> int:
        """Batches in an epoch of `samples_per_epoch`."""
        return self.samples_per_epoch // self.batch


@dataclass(frozen=True)
class EndlessStreams(Streams):
    """The streams of tars: their samples have no numbers, and lack neither views nor labels.

    The reader is that of `data.path`, on whose rows the run is scored, or one without rows that has
    the declared views and labels.

    Attributes:
        tar_reader: reads the tars.
        suffixes: member suffixes of each stored view, by its name.
        annotation: where labels are stored, if anywhere.
    """

    # The trainer only reads the sizes of these: they have no rows by number.
    labelled: EndlessStream | None  # type: ignore[assignment]
    unlabelled: EndlessStream | None  # type: ignore[assignment]
    epoch_stream: EndlessStream  # type: ignore[assignment]
    config: WebDataset
    tar_reader: TarReader
    suffixes: dict[str, tuple[str, ...]]
    annotation: Annotation | None

    lacks_views = lacks_labels = False  # a sample that lacks something is unreadable

    def rows_by_views(self) -> dict[str, dict[str, dict[str, int]]]:
        """Returns an empty dictionary: no sample lacks a view."""
        return {}

    @property
    def labelled_rows(self) -> Rows:
        """Empty: samples of an endless stream have no numbers."""
        return np.empty(0, np.int64)

    def skipped(self, max_fraction: float) -> SkippedRows:
        """Returns a counter of skipped samples and rows."""
        scored = self.roles.union(["test", "validation"])
        return SkippedRows(scored, max_fraction, self.config.samples_per_epoch)

    def describe(self) -> list[str]:
        """Returns a line for each stream, and one for what a stream without an index lacks."""
        lines = [
            f"{s.name}: {s.batch:,} samples a batch of {len(s.tars):,} tars without an index, by "
            + ("resampling" if self.config.resampled else "passes over each process's own tars")
            + f"; an epoch is {s.samples_per_epoch:,} samples = {s.steps_per_epoch:,} steps"
            for s in (self.labelled, self.unlabelled)
            if s is not None
        ]
        scored = f"{self.reader.store} is scored" if self.roles.test.size else "nothing is scored"
        return [
            *lines,
            "an endless stream: its batches depend on the numbers of processes and of workers; a "
            "resumed run continues with other samples; no protocol applies, and samples have no "
            f"numbers; {scored}",
        ]

    def target(self, sample: Sample) -> NDArray[np.float32]:
        """Returns the 0/1 labels of a sample, [labels]; ValueError if they are missing or unfit."""
        assert self.annotation is not None
        suffix, names = self.annotation.suffix, self.reader.manifest.labels.names
        if suffix not in sample:
            raise ValueError(f"lacks the label '{suffix}'; found {_members(sample)}")
        label = self.annotation.read(sample[suffix])
        single_class = label.kind.startswith("class")
        if single_class != (self.kind == "multi_class"):
            raise ValueError(f"has as its label a {label.kind}; expected a {self.kind} one")
        row = np.zeros(len(names), np.float32)
        if label.kind == "vector of 0 and 1":
            if len(label.values) != len(names):
                raise ValueError(f"has {len(label.values)} labels; expected {len(names)}")
            row[:] = label.values
        else:
            row[[self._class_index(value, label) for value in label.values]] = 1
        return row

    def _class_index(self, value: int | str, label: Label) -> int:
        names = self.reader.manifest.labels.names
        if label.kind == "class number":
            if int(value) < len(names):
                return int(value)
        elif value in names:
            return names.index(str(value))
        raise ValueError(
            f"is of class {short_repr(value)}; expected one of {len(names)} that are known"
        )

    def fill(self, name: str, sample: Sample, out: NDArray[Any]) -> None:
        """Decodes a view of a sample into `out`; ValueError if it is missing or damaged."""
        suffixes = [suffix for suffix in self.suffixes[name] if suffix in sample]
        if len(suffixes) != 1:
            expected = " or ".join(map(repr, self.suffixes[name]))
            fault = "has both" if suffixes else "lacks"
            raise ValueError(f"{fault} {expected}; found {_members(sample)}")
        try:
            self.reader.decoders[name].decode(sample[suffixes[0]], out)
        except (ValueError, ShardError) as fault:
            raise ValueError(f"member '{suffixes[0]}' {fault}") from None


def _members(sample: Sample) -> list[str]:
    return [name for name in sample if not name.startswith("__")][:8]


def open_data(config: Config) -> Streams:
    """Opens the data of a run: indexed shards, or tars without an index."""
    if config.data.webdataset is None:
        return open_streams(config)
    return open_endless(config)


def open_endless(config: Config) -> EndlessStreams:
    """Opens the data set, or makes the declaration, that samples must fit; opens no tar yet.

    Raises ConfigError if an option needs an index, SourceError if a declared member or label cannot
    be read, ShardError if the data set for scoring is missing or damaged.
    """
    data = config.data
    assert data.webdataset is not None
    for key, why in _unsupported(config):
        raise ConfigError(
            f"{key}, but data.webdataset streams samples without an index: {why}; leave it out, or "
            "index the tars (heron shards index) and give data.path"
        )
    reader, layout = open_reader(data) if data.path else _declared(config), None
    if (manifest := reader.manifest).block_rows is not None:
        raise ConfigError(
            f"{reader.store} packs {manifest.block_rows} rows in a sample, and data.webdataset "
            "reads a row a sample; train on such tars by data.path alone"
        )
    if manifest.foreign:
        layout = Layout.of(manifest.built_from.options)
    views = zip(manifest.views, manifest.members, strict=False)
    suffixes: dict[str, tuple[str, ...]] = {view.name: (member,) for view, member in views}
    suffixes |= {column.name: column.suffixes for column in layout.columns} if layout else {}
    annotation = layout.annotation if layout else Annotation(LABELS)
    if data.batch.labelled and manifest.labels.kind not in ("multi_class", "multi_label"):
        raise ConfigError(
            f"data.batch.labelled is {data.batch.labelled}, and the labels of {reader.store} are "
            f"{manifest.labels.kind}; expected multi_class or multi_label: data.webdataset.label "
            "and classes, or 0 labelled rows"
        )
    no_rows = np.empty(0, np.int64)
    roles = Roles(reader.starts, no_rows, no_rows, no_rows, no_rows)
    if data.path:
        roles = assign(reader, data.split, data.protocol)
    refuse_unscored(reader, roles)
    labelled, unlabelled = _stream("labelled", config), _stream("unlabelled", config)
    active = [stream for stream in (labelled, unlabelled) if stream is not None]
    if not active:
        raise ConfigError(
            "data.batch asks for no rows; expected labelled or unlabelled above 0, with tars of "
            "that name in data.webdataset"
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


def _unsupported(config: Config) -> Iterator[tuple[str, str]]:
    """Yields the options that need an index, and the reasons."""
    data = config.data
    for name, term in config.objective.terms().items():
        if term.loss.remembers_rows:
            yield f"objective.{name} remembers rows", "none comes again under a number"
    if config.negatives.mine:
        yield f"negatives.mine is {config.negatives.mine}", "there are no rows to embed and mine"
    if config.evaluate.baselines:
        yield "evaluate.baselines is true", "they would train on other rows than the run"
    if data.roles is not None:
        yield f"data.roles is {data.roles}", "samples have no numbers, by which roles are written"
    if data.protocol.complementary is not None:
        yield "data.protocol.complementary is set", "it is drawn by the number of the row"
    if data.protocol.hide_labels:
        hidden = data.protocol.hide_labels
        yield f"data.protocol.hide_labels is {hidden:g}", "they are drawn by the number of the row"
    if data.protocol.partial_rows != "keep":
        rows = data.protocol.partial_rows
        yield f"data.protocol.partial_rows is {rows}", "a sample that lacks a view is unreadable"
    if data.canonical_streams is not None:
        yield f"data.canonical_streams is {data.canonical_streams}", "nothing plans the order"
    if data.standardise and not data.path:
        yield "data.standardise is true", "there are no statistics but those of data.path"
    for name in ("labelled", "unlabelled"):
        if getattr(data.batch, name) == "all":
            yield f"data.batch.{name} is 'all'", "the number of samples is unknown"


def _declared(config: Config) -> Reader:
    """Returns a reader without rows whose manifest has what `data.webdataset` declares."""
    data, options = config.data, config.data.webdataset
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
            f"data.webdataset has label {options.label} and {len(options.names)} classes; expected "
            "both, or neither: labels are counted before the first sample is read"
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


def _stream(name: str, config: Config) -> EndlessStream | None:
    data, options = config.data, config.data.webdataset
    assert options is not None
    batch, tars = getattr(data.batch, name), getattr(options, name)
    if bool(batch) != bool(tars):
        raise ConfigError(
            f"data.batch.{name} is {batch}, and data.webdataset.{name} has "
            f"{len(tars) or 'no'} tars; expected both, or neither"
        )
    if not batch:
        return None
    if not 2 <= batch <= options.samples_per_epoch:
        raise ConfigError(
            f"data.batch.{name} is {batch}; expected 2 to {options.samples_per_epoch}, which is "
            "data.webdataset.samples_per_epoch"
        )
    return EndlessStream(name, expand(tars), batch, options.samples_per_epoch)
