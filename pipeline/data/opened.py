"""The shards of a data set, opened at their turn: indexes, single members and mapped blocks."""

import ctypes
import hashlib
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from heron.pipeline.config.errors import ConfigError
from heron.pipeline.data.plan import Rows, by_number
from heron.shards.cache import LocalFile
from heron.shards.errors import RESTORE, ShardError
from heron.shards.index import ShardIndex, array_at, labels_in
from heron.shards.manifest import Manifest, Shard, View
from heron.shards.mixture import MixedStore
from heron.shards.store import Store

KEPT = 128  # indexes that a process keeps
KEPT_BYTES = 2**28  # of labels that a process keeps
MOST_BYTES = 2**32  # of labels that may be asked for at once
MEMORY = ctypes.c_ubyte * 2**47  # what a process can address, from anywhere on


class Indexes(Sequence[ShardIndex]):
    """The index of each shard, in the manifest's order: read and compared at its turn.

    The last ones used are kept.

    Attributes:
        starts: the number of each shard's first row, and of all rows, [shards + 1].
    """

    def __init__(self, store: Store, manifest: Manifest) -> None:
        """Reads nothing yet."""
        self.store, self.manifest = store, manifest
        self.shards = [shard for shards in manifest.splits.values() for shard in shards]
        self.starts = np.cumsum([0, *(shard.samples for shard in self.shards)])
        self._kept: OrderedDict[int, ShardIndex] = OrderedDict()
        self._labels: OrderedDict[int, NDArray[Any]] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        """The number of shards."""
        return len(self.shards)

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a reading process is given: it reads what it needs."""
        return self.__dict__ | {"_kept": OrderedDict(), "_labels": OrderedDict(), "_bytes": 0}

    def __getitem__(self, number: Any) -> Any:
        """Returns the index of a shard.

        Raises:
            ShardError: it is missing, another than the manifest lists, or does not fit it.
        """
        if number not in self._kept:
            shard = self.shards[number]
            where = self.store.where(shard.index_file)
            index = ShardIndex.parse(self._read(shard), where)
            if fault := self.manifest.index_fault(shard, index):
                raise ShardError(f"{where}: {fault}; {RESTORE}")
            if isinstance(self.store, MixedStore):  # two of its data sets may have the same keys
                keys = [f"{shard.file.partition('.')[0]}.{key}" for key in index.keys.tolist()]
                index = replace(index, keys=np.array(keys))
            while len(self._kept) >= KEPT:
                self._kept.popitem(last=False)
            self._kept[number] = index
        self._kept.move_to_end(number)
        return self._kept[number]

    def _read(self, shard: Shard) -> bytes:
        where = self.store.where(shard.index_file)
        with self.store.local(shard.index_file, shard.index_bytes, shard.index_sha256) as local:
            try:
                data = local.path.read_bytes()
            except FileNotFoundError:
                raise ShardError(
                    f"{where}: no such index; a shard has one beside it; {RESTORE}"
                ) from None
        if hashlib.sha256(data).hexdigest() != shard.index_sha256:
            raise ShardError(f"{where} is not the index that the manifest lists; {RESTORE}")
        return data

    def labels(self, rows: Rows) -> NDArray[Any]:
        """Returns the labels of rows as stored, [rows, ...]; reads the shards that they are of.

        Raises:
            ConfigError: they are too many to be held at once.
            ShardError: see `__getitem__`.
        """
        labels = self.manifest.labels
        row = np.empty(labels.row_shape, labels.dtype)
        self._refuse_many(len(rows), row.nbytes, "labels")
        out = np.empty((len(rows), *row.shape), row.dtype)
        for number, at, places in self.by_shard(rows):
            out[at] = self._labels_of(number)[places]
        return out

    def _labels_of(self, number: int) -> NDArray[Any]:
        """Returns the labels of a shard's rows."""
        if number in self._kept:
            return self._kept[number].labels
        if number not in self._labels:
            shard = self.shards[number]
            where = self.store.where(shard.index_file)
            found = labels_in(self._read(shard), where)
            if fault := self.manifest.labels.fault(found, shard.samples):
                raise ShardError(f"{where}: {fault}; {RESTORE}")
            self._labels[number] = found
            self._bytes += found.nbytes
            while self._bytes > KEPT_BYTES and len(self._labels) > 1:
                self._bytes -= self._labels.popitem(last=False)[1].nbytes
        return self._labels[number]

    def present(self, rows: Rows) -> NDArray[np.bool_]:
        """Returns which of the manifest's views each row has, [rows, views]: see `labels`."""
        out = np.ones((len(rows), len(self.manifest.views)), bool)
        if self.manifest.partial:
            self._refuse_many(len(rows), out.shape[1], "views")
            for number, at, places in self.by_shard(rows):
                out[at] = self[number].present[places]
        return out

    def locate(self, rows: Rows) -> tuple[Rows, Rows]:
        """Returns the shard of each row, and its place there."""
        shards = np.searchsorted(self.starts, rows, side="right") - 1
        return shards, rows - self.starts[shards]

    def by_shard(self, rows: Rows) -> Iterator[tuple[int, Rows, Rows]]:
        """Yields the shards that rows are of, which of the rows, and their places there."""
        shards, places = self.locate(rows)
        for number, at in by_number(shards):
            yield number, at, places[at]

    def _refuse_many(self, rows: int, each: int, what: str) -> None:
        if rows * each > MOST_BYTES:
            raise ConfigError(
                f"{self.store}: the protocol asks for the {what} of {rows:,} rows, of {each} bytes "
                f"each: {rows * each / 2**30:.1f} GiB in every process; expected {MOST_BYTES:,} "
                "bytes at most; write the roles of the rows once, with `heron shards protocol`, "
                "and name them by data.roles"
            )


class Blocks(NamedTuple):
    """The mapped blocks of a view, where each begins in memory, and what is wrong with some."""

    arrays: list[NDArray[Any]]
    addresses: Rows  # 0: it is faulty
    faults: dict[int, str]  # by the number of the tar's sample


class OpenShard:
    """A tar and its index, open for reading."""

    def __init__(self, local: LocalFile, where: str, index: ShardIndex) -> None:
        """Opens the tar, maybe a copy in a cache; messages say that it is at `where`."""
        self.where, self.index = where, index
        self._local = local
        self._file = os.open(local.path, os.O_RDONLY)
        self._bytes: NDArray[np.uint8] | None = None  # the whole tar, mapped
        self._blocks: dict[str, Blocks] = {}  # by view

    def close(self) -> None:
        """Closes the file; the addresses of its blocks are no more."""
        os.close(self._file)
        self._bytes = None
        self._blocks.clear()
        self._local.close()

    def payload(self, sample: int, column: int) -> bytes:
        """Returns the bytes of one member."""
        length = int(self.index.lengths[sample, column])
        # A read, not a map: so a file that is cut meanwhile is an error, no crash.
        data = os.pread(self._file, length, int(self.index.offsets[sample, column]))
        if len(data) != length:
            raise ShardError(
                f"{self.where} sample {self.index.keys[sample]} has {len(data)} bytes; "
                f"the index says {length}; {RESTORE}"
            )
        return data

    def blocks(self, view: View, column: int) -> Blocks:
        """Maps the blocks of a view where they lie, once."""
        if view.name not in self._blocks:
            if self._bytes is None:
                self._bytes = np.memmap(self._local.path, np.uint8, "r")
            arrays, faults = [], {}
            for number in range(len(self.index.keys)):
                try:
                    arrays.append(self._block(self._bytes, view, number, column))
                except ShardError as error:
                    faults[number] = str(error)
                    arrays.append(np.empty((0, *view.shape), view.dtype))
            places = [0 if n in faults else one.ctypes.data for n, one in enumerate(arrays)]
            self._blocks[view.name] = Blocks(arrays, np.array(places, np.int64), faults)
        return self._blocks[view.name]

    def _block(self, data: NDArray[np.uint8], view: View, number: int, column: int) -> NDArray[Any]:
        """Returns the block of a sample, C-contiguous; zeros where its row lacks the view."""
        index = self.index
        shape = int(index.rows[number]), *view.shape
        offset, length = int(index.offsets[number, column]), int(index.lengths[number, column])
        if not length and index.present is not None:
            return np.zeros(shape, view.dtype)
        where = f"{self.where} sample {index.keys[number]}: view '{view.name}'"
        block = array_at(data, offset, length, where)
        if block.shape == view.shape and shape[0] == 1:
            block = block[None]  # a tar of others may hold a row a sample
        if (block.dtype, block.shape) != (np.dtype(view.dtype), shape):
            raise ShardError(
                f"{where} is {block.dtype} {block.shape}; expected {view.dtype} {shape}; {RESTORE}"
            )
        return np.ascontiguousarray(block)  # one of others may be in Fortran's order


def copy_rows(addresses: Rows, out: NDArray[Any]) -> None:
    """Copies rows of mapped blocks to `out`, C-contiguous, [rows, ...]; leaves those of address 0.

    Rows are copied from the blocks of all shards in one call: a batch has a few rows of each of
    many shards, and a call a shard would cost more than the rows do. To that call all memory
    between the first and the last row is overlapping rows, one beginning at each byte; what lies
    between those that are asked for is not touched, and need not be there.
    """
    if not len(found := addresses[addresses != 0]):
        return
    lowest, row_bytes = int(found.min()), out[0].nbytes
    shape = int(found.max()) - lowest + 1, row_bytes
    rows = np.ndarray(shape, np.uint8, memoryview(MEMORY.from_address(lowest)), strides=(1, 1))
    memory, asked = torch.from_numpy(rows), torch.from_numpy(found - lowest)
    if len(found) == len(out):
        out_bytes = torch.from_numpy(out.view(np.uint8).reshape(len(out), row_bytes))
        torch.index_select(memory, 0, asked, out=out_bytes)
    else:
        copied = torch.index_select(memory, 0, asked).numpy()
        out[addresses != 0] = copied.view(out.dtype).reshape(len(found), *out.shape[1:])
