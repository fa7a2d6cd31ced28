"""Batches from tars without an index, streamed by webdataset: `data.webdataset`.

There is no plan: the content of a batch depends on the numbers of processes and loader workers. The
trainer sees the same interface as with `streams` and `batches`.
"""

import hashlib
from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np
from torch.utils.data import get_worker_info

from heron.config.errors import ConfigError
from heron.config.experiment import Config
from heron.data.batches import VIEW_PREFIX, BatchSource, ShardBatches, array_specs
from heron.data.buffers import ArraySpec, Buffer
from heron.data.endless import EndlessStreams, Sample
from heron.data.plan import even_slice
from heron.data.random_keys import rng_keys
from heron.data.streams import Streams
from heron.data.workers import worker_count
from heron.shards.errors import ShardError

MAX_CONSECUTIVE = 1000  # faults without a readable sample between them: none is to be expected


class EndlessBatches:
    """The share of process `rank` of `world` of every global batch: a `batches.BatchSource`.

    Each loader worker has a webdataset pipeline of its own, with its own tars, order and shuffle
    buffer. A row is numbered by its position in the run: batch, then position in the global batch.
    """

    def __init__(
        self, streams: EndlessStreams, config: Config, rank: int, world: int, start: int
    ) -> None:
        """Opens no tar; another `start` gives another order. ConfigError if a worker has none."""
        self.streams, self.seed, self.rank, self.world = streams, config.seed, rank, world
        self.start, self.on_error = start, config.data.on_error
        self.max_bad_fraction = config.data.max_bad_fraction
        self.active_streams = [s for s in (streams.labelled, streams.unlabelled) if s is not None]
        workers = worker_count(config.data)
        needed = world * max(1, workers)
        for stream in self.active_streams:
            if not streams.config.resampled and len(stream.tars) < needed:
                raise ConfigError(
                    f"data.webdataset.{stream.name} has {len(stream.tars)} tars for {needed} "
                    f"reading processes ({world} with {workers} workers each); "
                    "expected one for each at least; set data.webdataset.resampled, or fewer "
                    "workers"
                )
        self._samples: dict[str, Iterator[Sample]] = {}
        self._faults: dict[int, str] = {}  # of the current batch
        self._distinct: dict[bool, set[str]] = {True: set(), False: set()}  # of tars, of samples
        self._consecutive_faults = 0

    def specs(self) -> dict[str, ArraySpec]:
        """Returns the shape and dtype of every array of a batch."""
        sizes, reader = self._sizes(), self.streams.reader
        targets = sizes[0] if self.streams.labelled else 0, len(reader.manifest.labels.names)
        return array_specs(reader, self.streams.stored, sum(sizes), targets)

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
        return [
            len(range(s.batch)[even_slice(s.batch, self.rank, self.world)])
            for s in self.active_streams
        ]

    def _try_fill(self, name: str, row: int, buffer: Buffer) -> bool:
        """Reads the next sample of a stream into a row; returns False if it cannot be read."""
        if name not in self._samples:
            self._samples[name] = iter(self._pipeline(name))
        if (sample := next(self._samples[name], None)) is None:
            raise ShardError(
                f"data.webdataset.{name}: a pass over the tars of a reading process had no sample; "
                "expected some"
                + "".join(f"; the last fault: {fault}" for fault in [*self._faults.values()][-1:])
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
                    raise ShardError(f"{url}: no sample in it; expected some")
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
                f"{count:,} {what} cannot be read, more than data.max_bad_fraction = "
                f"{self.max_bad_fraction:g} allows, or {MAX_CONSECUTIVE:,} one after the other; "
                f"the last fault: {text}"
            )


def open_process_batches(
    streams: Streams, config: Config, rank: int, world: int, start: int
) -> BatchSource:
    """Returns the batches of a process; `start` is the step from which the run continues."""
    if config.data.webdataset is None:
        return ShardBatches(streams, config.seed, rank, world)
    assert isinstance(streams, EndlessStreams)
    return EndlessBatches(streams, config, rank, world, start)
