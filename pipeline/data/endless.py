"""The streams of a run on tars without an index: what lies in a sample, and where it is scored."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heron.pipeline.config.endless import WebDataset, expand
from heron.pipeline.config.errors import ConfigError
from heron.pipeline.config.experiment import Config
from heron.pipeline.data.dataset import open_reader, prepare_decoders
from heron.pipeline.data.plan import Rows
from heron.pipeline.data.protocol import Roles, assign
from heron.pipeline.data.reader import Reader
from heron.pipeline.data.skipped import Skipped
from heron.pipeline.data.streams import Streams, refuse_unscored
from heron.shards.annotation import Annotation, Label
from heron.shards.errors import ShardError, shown
from heron.shards.foreign import draft
from heron.shards.layout import Layout
from heron.shards.manifest import LABELS, Labels, Manifest
from heron.shards.stream import TarReader

Sample = Mapping[str, Any]  # bytes by suffix, and `__key__` and `__url__`


@dataclass(frozen=True)
class EndlessStream:
    """The tars of one stream, and how many samples of it there are in a global batch."""

    name: str
    tars: list[str]
    batch: int
    samples_per_epoch: int

    @property
    def steps_per_epoch(self) -> int:
        """Batches in what is called an epoch."""
        return self.samples_per_epoch // self.batch


@dataclass(frozen=True)
class EndlessStreams(Streams):
    """What the trainer draws from, of tars: its samples have no numbers, and lack nothing.

    The reader is the data set of `data.path`, on whose rows the run is scored, or one without rows
    that says what is declared.

    Attributes:
        config: of the stream.
        tar_reader: reads them.
        suffixes: of the members of each stored view, by its name.
        annotation: where labels lie, if anywhere.
    """

    # Of these the trainer asks for the sizes alone: they cannot be drawn from by number.
    labelled: EndlessStream | None  # type: ignore[assignment]
    unlabelled: EndlessStream | None  # type: ignore[assignment]
    epoch_stream: EndlessStream  # type: ignore[assignment]
    config: WebDataset
    tar_reader: TarReader
    suffixes: dict[str, tuple[str, ...]]
    annotation: Annotation | None

    missing = unknown = False  # samples are whole, or cannot be read

    def rows_by_views(self) -> dict[str, dict[str, dict[str, int]]]:
        """Returns nothing: see `missing`."""
        return {}

    @property
    def labelled_rows(self) -> Rows:
        """None: samples of an endless stream have no numbers."""
        return np.empty(0, np.int64)

    def skipped(self, most: float) -> Skipped:
        """Returns what counts the samples and rows that are skipped."""
        scored = self.roles.together(["test", "validation"])
        return Skipped(scored, most, self.config.samples_per_epoch)

    def describe(self) -> list[str]:
        """Returns a line a stream, and what does not hold of one without an index."""
        lines = [
            f"{s.name}: {s.batch:,} samples a batch of {len(s.tars):,} tars without an index, by "
            + ("resampling" if self.config.resampled else "passes over each process's own tars")
            + f"; an epoch is {s.samples_per_epoch:,} samples = {s.steps_per_epoch:,} steps"
            for s in (self.labelled, self.unlabelled)
            if s is not None
        ]
        scored = f"scores are of {self.reader.store}" if self.roles.test.size else "nothing scores"
        return [
            *lines,
            "an endless stream: its batches depend on the numbers of processes and of workers; a "
            "run that is resumed goes on with other samples; no protocol holds, no sample has a "
            f"number; {scored}",
        ]

    def target(self, sample: Sample) -> NDArray[np.float32]:
        """Returns the label of a sample as 0/1 columns; ValueError where it has none or another."""
        assert self.annotation is not None
        suffix, names = self.annotation.suffix, self.reader.manifest.labels.names
        if suffix not in sample:
            raise ValueError(f"lacks the label '{suffix}'; found {_members(sample)}")
        label = self.annotation.read(sample[suffix])
        one = label.kind.startswith("class")
        if one != (self.kind == "multi_class"):
            raise ValueError(f"has as its label a {label.kind}; expected a {self.kind} one")
        row = np.zeros(len(names), np.float32)
        if label.kind == "vector of 0 and 1":
            if len(label.values) != len(names):
                raise ValueError(f"has {len(label.values)} labels; expected {len(names)}")
            row[:] = label.values
        else:
            row[[self._number(value, label) for value in label.values]] = 1
        return row

    def _number(self, value: int | str, label: Label) -> int:
        names = self.reader.manifest.labels.names
        if label.kind == "class number":
            if int(value) < len(names):
                return int(value)
        elif value in names:
            return names.index(str(value))
        raise ValueError(f"is of class {shown(value)}; expected one of {len(names)} that are known")

    def fill(self, name: str, sample: Sample, out: NDArray[Any]) -> None:
        """Decodes a view of a sample into `out`; ValueError says what is wrong with it."""
        found = [suffix for suffix in self.suffixes[name] if suffix in sample]
        if len(found) != 1:
            wanted = " or ".join(map(repr, self.suffixes[name]))
            fault = "has both" if found else "lacks"
            raise ValueError(f"{fault} {wanted}; found {_members(sample)}")
        try:
            self.reader.decoders[name].decode(sample[found[0]], out)
        except (ValueError, ShardError) as fault:
            raise ValueError(f"member '{found[0]}' {fault}") from None


def _members(sample: Sample) -> list[str]:
    return [name for name in sample if not name.startswith("__")][:8]


def open_endless(config: Config) -> EndlessStreams:
    """Opens what the samples of the tars are compared with; no tar is opened yet.

    Raises:
        ConfigError: an option does not go with a stream without an index.
        SourceError: a member or a label is asked for that cannot be read.
        ShardError: the data set that the run is scored on is missing or damaged.
    """
    data = config.data
    assert data.webdataset is not None
    for key, why in _unfit(config):
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
    none = np.empty(0, np.int64)
    roles = Roles(reader.starts, none, none, none, none)
    if data.path:
        roles = assign(reader, data.split, data.protocol)
    refuse_unscored(reader, roles)
    labelled, unlabelled = _stream("labelled", config), _stream("unlabelled", config)
    present = [s for s in (labelled, unlabelled) if s is not None]
    if not present:
        raise ConfigError(
            "data.batch asks for no rows; expected labelled or unlabelled above 0, with tars of "
            "that name in data.webdataset"
        )
    return EndlessStreams(
        reader=reader,
        roles=roles,
        labelled=labelled,
        unlabelled=unlabelled,
        epoch_stream=next((s for s in present if s.name == data.epoch), present[0]),
        stored=list(dict.fromkeys(view.stored for view in data.views)),
        viewed=[view.stored for view in data.views],
        protocol=data.protocol,
        kind=manifest.labels.kind,
        config=data.webdataset,
        tar_reader=TarReader(data.webdataset.tar_bytes, data.storage_options),
        suffixes=suffixes,
        annotation=annotation,
    )


def _unfit(config: Config) -> Iterator[tuple[str, str]]:
    """Yields the options that need an index, and why."""
    data = config.data
    for name, term in config.objective.terms().items():
        if term.remembers_rows:
            yield f"objective.{name} remembers rows", "none comes again under a number"
    if config.negatives.mine:
        yield f"negatives.mine is {config.negatives.mine}", "there are no rows to embed and mine"
    if config.evaluate.baselines:
        yield "evaluate.baselines is true", "they would train on other rows than the run"
    if data.protocol.complementary is not None:
        yield "data.protocol.complementary is set", "it is drawn by the number of the row"
    if data.canonical_streams is not None:
        yield f"data.canonical_streams is {data.canonical_streams}", "nothing plans the order"
    if data.standardise and not data.path:
        yield "data.standardise is true", "there are no statistics but those of data.path"
    for name in ("labelled", "unlabelled"):
        if getattr(data.batch, name) == "all":
            yield f"data.batch.{name} is 'all'", "nobody knows how many there are"


def _declared(config: Config) -> Reader:
    """Returns a reader of no rows, whose manifest says what `data.webdataset` declares."""
    data, given = config.data, config.data.webdataset
    assert given is not None
    asked = {
        "image": given.image,
        "vector": list(given.vector),
        "text": given.text,
        "label": given.label,
    }
    layout = Layout.of(asked)
    if (given.label is None) != (not given.names):
        raise ConfigError(
            f"data.webdataset has label {given.label} and {len(given.names)} classes; expected "
            "both, or neither: labels are counted before the first sample is read"
        )
    plain = draft(Path("data.webdataset"), layout, {})
    widths = iter(given.vector.values())
    views = [
        view.model_copy(update={"shape": (next(widths),)}) if view.kind == "vector" else view
        for view in plain.views
    ]
    labels = Labels(kind=given.label_kind if given.label else "none", names=given.names)
    changes = {"views": views, "labels": labels}
    manifest = Manifest.model_validate(dict(plain) | changes).sealed()
    reader = Reader(Path("data.webdataset"), data.on_error, manifest=manifest)
    prepare_decoders(reader, data)
    return reader


def _stream(name: str, config: Config) -> EndlessStream | None:
    data, given = config.data, config.data.webdataset
    assert given is not None
    batch, tars = getattr(data.batch, name), getattr(given, name)
    if bool(batch) != bool(tars):
        raise ConfigError(
            f"data.batch.{name} is {batch}, and data.webdataset.{name} has "
            f"{len(tars) or 'no'} tars; expected both, or neither"
        )
    if not batch:
        return None
    if not 2 <= batch <= given.samples_per_epoch:
        raise ConfigError(
            f"data.batch.{name} is {batch}; expected 2 to {given.samples_per_epoch}, which is "
            "data.webdataset.samples_per_epoch"
        )
    return EndlessStream(name, expand(tars), batch, given.samples_per_epoch)
