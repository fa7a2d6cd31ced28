"""Shards opened on demand: their indexes, single members and memory-mapped blocks."""

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

from heron.base.errors import RESTORE, ConfigError, ShardError
from heron.data.rows import Rows, positions_by_number
from heron.shards.cache import LocalFile
from heron.shards.index import ShardIndex, array_at, labels_in
from heron.shards.manifest import Manifest, Shard, View
from heron.shards.mixture import MixedStore
from heron.shards.store import Store

MAX_INDEXES = 128  # that a process keeps
MAX_LABEL_BYTES = 2**28  # of labels that a process keeps
MAX_REQUEST_BYTES = 2**32  # of labels in one request
ADDRESS_SPACE = ctypes.c_ubyte * 2**47  # all memory that a process can address


class Indexes(Sequence[ShardIndex]):
    """The indexes of all shards, in the manifest's order; each is read and checked on demand.

    The most recently used ones are kept. `starts` has each shard's first row, then the number of
    rows.
    """

    def __init__(self, store: Store, manifest: Manifest) -> None:
        """Reads nothing yet."""
        self.store, self.manifest = store, manifest
        self.shards = [shard for shards in manifest.splits.values() for shard in shards]
        self.starts = np.cumsum([0, *(shard.samples for shard in self.shards)])
        self._indexes: OrderedDict[int, ShardIndex] = OrderedDict()
        self._labels: OrderedDict[int, NDArray[Any]] = OrderedDict()
        self._label_bytes = 0

    def __len__(self) -> int:
        """The number of shards."""
        return len(self.shards)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state to pickle for a loader worker, which reads what it needs itself."""
        empty = {"_indexes": OrderedDict(), "_labels": OrderedDict(), "_label_bytes": 0}
        return self.__dict__ | empty

    def __getitem__(self, number: Any) -> Any:
        """Returns a shard's index; ShardError if it is missing or differs from the manifest."""
        if number not in self._indexes:
            shard = self.shards[number]
            where = self.store.where(shard.index_file)
            index = ShardIndex.parse(self._read(shard), where)
            if fault := self.manifest.index_fault(shard, index):
                raise ShardError(f"{where}: {fault}; {RESTORE}")
            if isinstance(self.store, MixedStore):  # its data sets may share keys
                keys = [f"{shard.file.partition('.')[0]}.{key}" for key in index.keys.tolist()]
                index = replace(index, keys=np.array(keys))
            while len(self._indexes) >= MAX_INDEXES:
                self._indexes.popitem(last=False)
            self._indexes[number] = index
        self._indexes.move_to_end(number)
        return self._indexes[number]

    def _read(self, shard: Shard) -> bytes:
        where = self.store.where(shard.index_file)
        with self.store.local(shard.index_file, shard.index_bytes, shard.index_sha256) as local:
            try:
                data = local.path.read_bytes()
            except FileNotFoundError:
                raise ShardError(
                    f"{where} does not exist, and every shard has an index beside it; {RESTORE}"
                ) from None
        if hashlib.sha256(data).hexdigest() != shard.index_sha256:
            raise ShardError(f"{where} is not the index that the manifest lists; {RESTORE}")
        return data

    def labels(self, rows: Rows) -> NDArray[Any]:
        """Returns the labels of rows in the stored format, [rows, ...]; reads their shards.

        Raises ConfigError if they are too many to be held at once, and ShardError as `__getitem__`.
        """
        labels = self.manifest.labels
        label = np.empty(labels.row_shape, labels.dtype)
        self._refuse_too_many(len(rows), label.nbytes, "labels")
        out = np.empty((len(rows), *label.shape), label.dtype)
        for number, positions, local_rows in self.by_shard(rows):
            out[positions] = self._labels_of(number)[local_rows]
        return out

    def _labels_of(self, number: int) -> NDArray[Any]:
        if number in self._indexes:
            return self._indexes[number].labels
        if number not in self._labels:
            shard = self.shards[number]
            where = self.store.where(shard.index_file)
            labels = labels_in(self._read(shard), where)
            if fault := self.manifest.labels.fault(labels, shard.samples):
                raise ShardError(f"{where}: {fault}; {RESTORE}")
            self._labels[number] = labels
            self._label_bytes += labels.nbytes
            while self._label_bytes > MAX_LABEL_BYTES and len(self._labels) > 1:
                self._label_bytes -= self._labels.popitem(last=False)[1].nbytes
        return self._labels[number]

    def present(self, rows: Rows) -> NDArray[np.bool_]:
        """Returns which of the manifest's views each row has, [rows, views]: see `labels`."""
        out = np.ones((len(rows), len(self.manifest.views)), bool)
        if self.manifest.partial:
            self._refuse_too_many(len(rows), out.shape[1], "views")
            for number, positions, local_rows in self.by_shard(rows):
                out[positions] = self[number].present[local_rows]
        return out

    def locate(self, rows: Rows) -> tuple[Rows, Rows]:
        """Returns the shard of each row, and the row's number within the shard."""
        shards = np.searchsorted(self.starts, rows, side="right") - 1
        return shards, rows - self.starts[shards]

    def by_shard(self, rows: Rows) -> Iterator[tuple[int, Rows, Rows]]:
        """Yields each shard of the rows, its rows' positions in `rows`, and their local numbers."""
        shards, local_rows = self.locate(rows)
        for number, positions in positions_by_number(shards):
            yield number, positions, local_rows[positions]

    def _refuse_too_many(self, rows: int, bytes_each: int, what: str) -> None:
        if rows * bytes_each > MAX_REQUEST_BYTES:
            raise ConfigError(
                f"{self.store}: the protocol needs the {what} of {rows:,} rows, of {bytes_each} "
                f"bytes each: {rows * bytes_each / 2**30:.1f} GiB in every process, and the limit "
                f"is {MAX_REQUEST_BYTES:,} bytes; write the roles of the rows once with `heron "
                "shards protocol`, and set data.roles to them"
            )


class Blocks(NamedTuple):
    """The mapped blocks of a view, their addresses in memory, and the faults of some."""

    arrays: list[NDArray[Any]]
    addresses: Rows  # 0: the block is faulty
    faults: dict[int, str]  # by the sample's number in the tar


class OpenShard:
    """A tar and its index, open for reading."""

    def __init__(self, local: LocalFile, where: str, index: ShardIndex) -> None:
        """Opens the tar, which may be a cached copy; messages call it `where`."""
        self.where, self.index = where, index
        self._local = local
        self._file = os.open(local.path, os.O_RDONLY)
        self._mapped: NDArray[np.uint8] | None = None  # the whole tar, mapped
        self._blocks: dict[str, Blocks] = {}  # by view

    def close(self) -> None:
        """Closes the file; the addresses of its blocks become invalid."""
        os.close(self._file)
        self._mapped = None
        self._blocks.clear()
        self._local.close()

    def payload(self, sample: int, column: int) -> bytes:
        """Returns the bytes of one member."""
        length = int(self.index.lengths[sample, column])
        # Reads instead of mapping, so that a file truncated meanwhile is an error and no crash.
        data = os.pread(self._file, length, int(self.index.offsets[sample, column]))
        if len(data) != length:
            raise ShardError(
                f"{self.where} sample {self.index.keys[sample]} has {len(data)} bytes, but the "
                f"index says {length}; {RESTORE}"
            )
        return data

    def blocks(self, view: View, column: int) -> Blocks:
        """Returns the blocks of a view, memory-mapped once."""
        if view.name not in self._blocks:
            if self._mapped is None:
                self._mapped = np.memmap(self._local.path, np.uint8, "r")
            arrays, faults = [], {}
            for sample in range(len(self.index.keys)):
                try:
                    arrays.append(self._block(self._mapped, view, sample, column))
                except ShardError as error:
                    faults[sample] = str(error)
                    arrays.append(np.empty((0, *view.shape), view.dtype))
            addresses = [0 if n in faults else x.ctypes.data for n, x in enumerate(arrays)]
            self._blocks[view.name] = Blocks(arrays, np.array(addresses, np.int64), faults)
        return self._blocks[view.name]

    def _block(self, data: NDArray[np.uint8], view: View, sample: int, column: int) -> NDArray[Any]:
        """Returns the block of a sample, C-contiguous; zeros if its row lacks the view."""
        index = self.index
        shape = int(index.rows[sample]), *view.shape
        offset, length = int(index.offsets[sample, column]), int(index.lengths[sample, column])
        if not length and index.present is not None:
            return np.zeros(shape, view.dtype)
        where = f"{self.where} sample {index.keys[sample]}: view '{view.name}'"
        block = array_at(data, offset, length, where)
        if block.shape == view.shape and shape[0] == 1:
            block = block[None]  # foreign tars may hold one row per sample
        if (block.dtype, block.shape) != (np.dtype(view.dtype), shape):
            raise ShardError(
                f"{where} must be {view.dtype} {shape}, got {block.dtype} {block.shape}; {RESTORE}"
            )
        return np.ascontiguousarray(block)  # that of a foreign tar may be in Fortran order


def copy_rows(addresses: Rows, out: NDArray[Any]) -> None:
    """Copies rows of mapped blocks to `out`, C-contiguous, [rows, ...]; skips address 0.

    A batch has few rows of each of many shards, so one call copies them all: a call per shard would
    cost more than the copying. It sees all memory from the first to the last row as overlapping
    rows, one beginning at each byte; what lies between the requested rows need not be mapped.
    """
    if not len(source := addresses[addresses != 0]):
        return
    base, row_bytes = int(source.min()), out[0].nbytes
    shape = int(source.max()) - base + 1, row_bytes
    windows = np.ndarray(
        shape, np.uint8, memoryview(ADDRESS_SPACE.from_address(base)), strides=(1, 1)
    )
    memory, offsets = torch.from_numpy(windows), torch.from_numpy(source - base)
    if len(source) == len(out):
        out_bytes = torch.from_numpy(out.view(np.uint8).reshape(len(out), row_bytes))
        torch.index_select(memory, 0, offsets, out=out_bytes)
    else:
        copied = torch.index_select(memory, 0, offsets).numpy()
        out[addresses != 0] = copied.view(out.dtype).reshape(len(source), *out.shape[1:])
