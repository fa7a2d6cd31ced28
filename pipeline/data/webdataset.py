"""Batches from tars without an index, as webdataset streams them: `data.webdataset`.

There is no plan: what a batch holds depends on the number of processes and of reading ones. What
the trainer is given is what `streams` and `batches` give it.
"""

import hashlib
from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np
from torch.utils.data import get_worker_info

from heron.pipeline.config.errors import ConfigError
from heron.pipeline.config.experiment import Config
from heron.pipeline.data.batches import VIEW, array_specs
from heron.pipeline.data.buffers import ArraySpec, Buffer
from heron.pipeline.data.endless import EndlessStreams, Sample
from heron.pipeline.data.plan import share
from heron.pipeline.data.random_keys import rng_keys
from heron.pipeline.data.workers import readers
from heron.shards.errors import ShardError

MOST_BAD = 1000  # faults with no sample between them: then there is none to come


class EndlessBatches:
    """The share of process `rank` of `world` of every global batch: a `batches.BatchSource`.

    Each reading process draws on a pipeline of webdataset's own, with tars, order and buffer of
    its own. The number of a row is its place in the run: batch, then place in the global batch.
    """

    def __init__(
        self, streams: EndlessStreams, config: Config, rank: int, world: int, start: int
    ) -> None:
        """Opens nothing yet; the step `start` that the run goes on from draws another order.

        Raises:
            ConfigError: a reading process would have no tar.
        """
        self.streams, self.seed, self.rank, self.world = streams, config.seed, rank, world
        self.start, self.on_error = start, config.data.on_error
        self.most = config.data.max_bad_fraction
        self.drawn = [s for s in (streams.labelled, streams.unlabelled) if s is not None]
        workers = readers(config.data)
        needed = world * max(1, workers)
        for stream in self.drawn:
            if not streams.config.resampled and len(stream.tars) < needed:
                raise ConfigError(
                    f"data.webdataset.{stream.name} has {len(stream.tars)} tars for {needed} "
                    f"reading processes ({world} with {workers} workers each); "
                    "expected one for each at least; set data.webdataset.resampled, or fewer "
                    "workers"
                )
        self._samples: dict[str, Iterator[Sample]] = {}
        self._faults: dict[int, str] = {}  # of this batch
        self._bad: dict[bool, set[str]] = {True: set(), False: set()}  # tars, samples
        self._in_a_row = 0

    def specs(self) -> dict[str, ArraySpec]:
        """Returns the shape and type of every array of a batch."""
        sizes, reader = self._sizes(), self.streams.reader
        targets = sizes[0] if self.streams.labelled else 0, len(reader.manifest.labels.names)
        return array_specs(reader, self.streams.stored, sum(sizes), targets)

    def load(self, t: int, buffer: Buffer) -> tuple[list[int], dict[int, str]]:
        """Fills a buffer with the next samples as batch t; returns its `sizes` and its faults."""
        row, first, numbers = 0, t * sum(s.batch for s in self.drawn), []
        for stream in self.drawn:
            own = share(stream.batch, self.rank, self.world)
            for place in range(own.start, own.stop):
                while not self._fill(stream.name, row, buffer):
                    pass
                numbers.append(first + place)
                row += 1
            first += stream.batch
        buffer["indices"][:] = numbers
        epoch = np.array([t // self.streams.epoch_stream.steps_per_epoch])
        buffer["rng_keys"][:] = rng_keys(self.seed, epoch, np.array(numbers, np.int64))
        faults, self._faults = self._faults, {}
        return self._sizes(), faults

    def _sizes(self) -> list[int]:
        return [len(range(s.batch)[share(s.batch, self.rank, self.world)]) for s in self.drawn]

    def _fill(self, name: str, row: int, buffer: Buffer) -> bool:
        """Reads the next sample of a stream into a row; False where it cannot be read."""
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
                self.streams.fill(stored, sample, buffer[VIEW + stored][row])
            if name == "labelled":
                buffer["targets"][row] = self.streams.target(sample)
        except (ValueError, ShardError) as fault:
            self._fault(f"{sample['__url__']} sample {sample['__key__']}: {fault}", tar=False)
            return False
        self._in_a_row = 0
        return True

    def _pipeline(self, name: str) -> Iterable[Sample]:
        """Returns webdataset's pipeline: tars, those of this reader, shuffled, their samples."""
        import webdataset as wds  # late: it imports a lot

        info, given = get_worker_info(), self.streams.config
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        (stream,) = (s for s in self.drawn if s.name == name)
        drawn = repr((self.seed, name, self.rank, worker, self.start)).encode()
        seed = int.from_bytes(hashlib.sha256(drawn).digest()[:6])

        def own(tars: Iterator[Sample]) -> Iterator[Sample]:
            # As split_by_node and split_by_worker, which would ask the environment who they are.
            return islice(islice(tars, self.rank, None, self.world), worker, None, workers)

        read = self._read_tars
        if given.resampled:
            tars = wds.ResampledShards(
                stream.tars, seed=seed, worker_seed=lambda: 0, deterministic=True
            )
            stages = [tars, read]
        else:
            tars = wds.SimpleShardList(stream.tars)
            most = len(stream.tars)
            stages = [tars, own, wds.detshuffle(most, initial=most, seed=seed), read]
        if given.shuffle:
            stages.append(wds.detshuffle(given.shuffle, seed=seed))
        endless: Iterable[Sample] = wds.DataPipeline(*stages).repeat()
        return endless

    def _read_tars(self, tars: Iterable[Sample]) -> Iterator[Sample]:
        """Yields the samples of tars one after the other, grouped by webdataset; bytes as yet."""
        from webdataset.tariterators import group_by_keys

        streams = self.streams
        suffixes = {suffix for name in streams.stored for suffix in streams.suffixes[name]}
        if streams.annotation is not None:
            suffixes.add(streams.annotation.suffix)
        for tar in tars:
            url, found = str(tar["url"]), False
            try:
                files = streams.tar_reader.files(url, suffixes)
                named = ({"fname": n, "data": data, "__url__": url} for n, data in files)
                for sample in group_by_keys(named):
                    found = True
                    yield sample
                if not found:
                    raise ShardError(f"{url}: no sample in it; expected some")
            except ShardError as fault:
                self._fault(str(fault), tar=True)
            except ValueError as fault:  # of `group_by_keys`
                self._fault(f"{url}: {fault.args[0]}", tar=True)

    def _fault(self, text: str, tar: bool) -> None:
        """Notes what could not be read; ShardError where a run may not go on without it."""
        if self.on_error == "raise":
            raise ShardError(text)
        # The same fault met again, here or by another process, is one.
        number = -1 - int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])
        self._faults[number] = text
        self._bad[tar].add(text)
        self._in_a_row += 1
        tars = sum(len(stream.tars) for stream in self.drawn)
        most = self.most * (tars if tar else self.streams.config.samples_per_epoch)
        if len(self._bad[tar]) > most or self._in_a_row >= MOST_BAD:
            what = f"of {tars:,} tars" if tar else "samples"
            raise ShardError(
                f"{len(self._bad[tar]):,} {what} cannot be read, more than data.max_bad_fraction = "
                f"{self.most:g} allows, or {MOST_BAD:,} one after the other; the last fault: {text}"
            )
