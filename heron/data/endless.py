"""The streams of a run on tars without an index, and a process's share of each batch."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import get_worker_info

from heron.base.errors import ConfigError, ShardError, short_repr
from heron.data.batches import VIEW_PREFIX, ArraySpec, Buffer, array_specs, worker_count
from heron.data.options import Data
from heron.data.plan import even_slice
from heron.data.random_keys import rng_keys
from heron.data.rows import Rows, SkippedRows
from heron.data.streams import Streams
from heron.data.tars import WebDataset
from heron.shards.annotation import Annotation, Label
from heron.shards.tarball import TarReader

Sample = Mapping[str, Any]  # bytes by suffix, with `__key__` and `__url__`
MAX_CONSECUTIVE = 1000  # faults without a readable sample between them: none is to be expected


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
        """Returns a line for each stream, and one that says what is missing without an index."""
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
            raise ValueError(f"has no label '{suffix}'; it has {_members(sample)}")
        label = self.annotation.read(sample[suffix])
        single_class = label.kind.startswith("class")
        if single_class != (self.kind == "multi_class"):
            raise ValueError(f"must have a {self.kind} label, got a {label.kind}")
        row = np.zeros(len(names), np.float32)
        if label.kind == "vector of 0 and 1":
            if len(label.values) != len(names):
                raise ValueError(f"must have {len(names)} labels, got {len(label.values)}")
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
            f"is of class {short_repr(value)}, which is not one of the {len(names)} known classes"
        )

    def fill(self, name: str, sample: Sample, out: NDArray[Any]) -> None:
        """Decodes a view of a sample into `out`; ValueError if it is missing or damaged."""
        suffixes = [suffix for suffix in self.suffixes[name] if suffix in sample]
        if len(suffixes) != 1:
            expected = " or ".join(map(repr, self.suffixes[name]))
            fault = "has both" if suffixes else "lacks"
            raise ValueError(f"{fault} {expected}; it has {_members(sample)}")
        try:
            self.reader.decoders[name].decode(sample[suffixes[0]], out)
        except (ValueError, ShardError) as fault:
            raise ValueError(f"member '{suffixes[0]}' {fault}") from None


def _members(sample: Sample) -> list[str]:
    return [name for name in sample if not name.startswith("__")][:8]


class EndlessBatches:
    """The share of process `rank` of `world` of every global batch: a `batches.BatchSource`.

    Each loader worker has a webdataset pipeline of its own, with its own tars, order and shuffle
    buffer. A row is numbered by its position in the run: batch, then position in the global batch.
    """

    def __init__(
        self, streams: EndlessStreams, data: Data, seed: int, rank: int, world: int, start: int
    ) -> None:
        """Opens no tar; another `start` gives another order. ConfigError if a worker has none."""
        self.streams, self.seed, self.rank, self.world = streams, seed, rank, world
        self.start, self.on_error = start, data.on_error
        self.max_bad_fraction = data.max_bad_fraction
        self.active_streams = [s for s in (streams.labelled, streams.unlabelled) if s is not None]
        workers = worker_count(data)
        needed = world * max(1, workers)
        for stream in self.active_streams:
            if not streams.config.resampled and len(stream.tars) < needed:
                raise ConfigError(
                    f"data.webdataset.{stream.name} has {len(stream.tars)} tars, but {needed} "
                    f"processes read ({world} with {workers} workers each) and each needs one; "
                    "set data.webdataset.resampled, or lower the number of workers"
                )
        self._samples: dict[str, Iterator[Sample]] = {}
        self._faults: dict[int, str] = {}  # of the current batch
        self._distinct: dict[bool, set[str]] = {True: set(), False: set()}  # of tars, of samples
        self._consecutive_faults = 0

    def specs(self) -> dict[str, ArraySpec]:
        """Returns the shape and dtype of every array of a batch."""
        sizes, reader = self._sizes(), self.streams.reader
        targets = sizes[0] if self.streams.labelled else 0, len(reader.manifest.labels.names)
        return array_specs(self.streams.decoders, sum(sizes), targets)

    def load(self, t: int, buffer: Buffer) -> tuple[list[int], dict[int, str]]:
        """Fills a buffer with the next samples as batch t; returns its `sizes` and faults."""
        row, first, numbers = 0, t * sum(s.batch for s in self.active_streams), []
        for stream in self.active_streams:
            local = even_slice(stream.batch, self.rank, self.world)
            for position in range(local.start, local.stop):
                while not self._try_fill(stream.name, row, buffer):
                    pass
                numbers.append(first + position)
                row += 1
            first += stream.batch
        buffer["indices"][:] = numbers
        epoch = np.array([t // self.streams.epoch_stream.steps_per_epoch])
        buffer["rng_keys"][:] = rng_keys(self.seed, epoch, np.array(numbers, np.int64))
        faults, self._faults = self._faults, {}
        return self._sizes(), faults

    def _sizes(self) -> list[int]:
        shares = [even_slice(s.batch, self.rank, self.world) for s in self.active_streams]
        return [share.stop - share.start for share in shares]

    def _try_fill(self, name: str, row: int, buffer: Buffer) -> bool:
        """Reads the next sample of a stream into a row; returns False if it cannot be read."""
        if name not in self._samples:
            self._samples[name] = iter(self._pipeline(name))
        if (sample := next(self._samples[name], None)) is None:
            raise ShardError(
                f"data.webdataset.{name}: a reading process found no sample in its tars"
                + "".join(f"; the last error: {fault}" for fault in [*self._faults.values()][-1:])
            )
        try:
            for stored in self.streams.stored:
                self.streams.fill(stored, sample, buffer[VIEW_PREFIX + stored][row])
            if name == "labelled":
                buffer["targets"][row] = self.streams.target(sample)
        except (ValueError, ShardError) as fault:
            self._record_fault(
                f"{sample['__url__']} sample {sample['__key__']}: {fault}", tar=False
            )
            return False
        self._consecutive_faults = 0
        return True

    def _pipeline(self, name: str) -> Iterable[Sample]:
        """Returns webdataset's pipeline: this worker's tars, shuffled, then their samples."""
        import webdataset as wds  # here: it imports a lot

        info, options = get_worker_info(), self.streams.config
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        (stream,) = (s for s in self.active_streams if s.name == name)
        key = repr((self.seed, name, self.rank, worker, self.start)).encode()
        seed = int.from_bytes(hashlib.sha256(key).digest()[:6])

        def own_tars(tars: Iterator[Sample]) -> Iterator[Sample]:
            # Like split_by_node and split_by_worker, which read rank and world from environment.
            return islice(islice(tars, self.rank, None, self.world), worker, None, workers)

        read = self._read_tars
        if options.resampled:
            tars = wds.ResampledShards(
                stream.tars, seed=seed, worker_seed=lambda: 0, deterministic=True
            )
            stages = [tars, read]
        else:
            tars = wds.SimpleShardList(stream.tars)
            count = len(stream.tars)
            stages = [tars, own_tars, wds.detshuffle(count, initial=count, seed=seed), read]
        if options.shuffle:
            stages.append(wds.detshuffle(options.shuffle, seed=seed))
        endless: Iterable[Sample] = wds.DataPipeline(*stages).repeat()
        return endless

    def _read_tars(self, tars: Iterable[Sample]) -> Iterator[Sample]:
        """Yields the samples of the tars in turn, grouped by webdataset and not yet decoded."""
        from webdataset.tariterators import group_by_keys

        streams = self.streams
        suffixes = {suffix for name in streams.stored for suffix in streams.suffixes[name]}
        if streams.annotation is not None:
            suffixes.add(streams.annotation.suffix)
        for tar in tars:
            url, any_sample = str(tar["url"]), False
            try:
                files = streams.tar_reader.files(url, suffixes)
                named = ({"fname": n, "data": data, "__url__": url} for n, data in files)
                for sample in group_by_keys(named):
                    any_sample = True
                    yield sample
                if not any_sample:
                    raise ShardError(f"{url} has no samples")
            except ShardError as fault:
                self._record_fault(str(fault), tar=True)
            except ValueError as fault:  # from `group_by_keys`
                self._record_fault(f"{url}: {fault.args[0]}", tar=True)

    def _record_fault(self, text: str, tar: bool) -> None:
        """Records an unreadable tar or sample; ShardError if the run may not go on without it."""
        if self.on_error == "raise":
            raise ShardError(text)
        # The same fault, met again here or in another process, has the same number.
        number = -1 - int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])
        self._faults[number] = text
        self._distinct[tar].add(text)
        self._consecutive_faults += 1
        tars = sum(len(stream.tars) for stream in self.active_streams)
        allowed = self.max_bad_fraction * (tars if tar else self.streams.config.samples_per_epoch)
        count = len(self._distinct[tar])
        if count > allowed or self._consecutive_faults >= MAX_CONSECUTIVE:
            what = f"of {tars:,} tars" if tar else "samples"
            raise ShardError(
                f"cannot read {count:,} {what}, which is more than data.max_bad_fraction = "
                f"{self.max_bad_fraction:g} allows, or {MAX_CONSECUTIVE:,} in a row; the last "
                f"error: {text}"
            )
