"""Open shards: the bytes of single members, and blocks mapped where they lie.

Rows are copied from the blocks of all open shards in one call: a batch has a few rows of each of
many shards, and a call a shard would cost more than the rows do.
"""

import ctypes
import os
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from heron.pipeline.data.rows import Rows
from heron.shards.cache import LocalFile
from heron.shards.errors import RESTORE, ShardError
from heron.shards.index import ShardIndex, array_at
from heron.shards.manifest import View


class OpenShard:
    """A tar and its index, open for reading."""

    def __init__(self, local: LocalFile, where: str, index: ShardIndex) -> None:
        """Opens the tar, maybe a copy in a cache; messages say that it is at `where`."""
        self.where, self.index = where, index
        self._local = local
        self._file = os.open(local.path, os.O_RDONLY)
        self._bytes: NDArray[np.uint8] | None = None  # the whole tar, mapped
        self._mapped: dict[str, _Mapped] = {}  # by view

    def close(self) -> None:
        """Closes the file; what `addresses` pointed to is gone."""
        os.close(self._file)
        self._bytes = None
        self._mapped.clear()
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

    def faults(self, view: View, column: int) -> dict[int, str]:
        """Returns what is wrong with the blocks of a view, by the number of the sample."""
        return self._map(view, column).faults

    def addresses(self, view: View, column: int) -> NDArray[np.int64]:
        """Returns where each block of a view begins in memory, [blocks]; 0 for a faulty one."""
        return self._map(view, column).addresses

    def _map(self, view: View, column: int) -> "_Mapped":
        """Maps the blocks of a view where they lie, once."""
        if view.name in self._mapped:
            return self._mapped[view.name]
        index = self.index
        if self._bytes is None:
            self._bytes = np.memmap(self._local.path, np.uint8, "r")
        blocks, faults = [], {}
        for number, rows in enumerate(index.rows.tolist()):
            shape = rows, *view.shape
            where = f"{self.where} sample {index.keys[number]}: view '{view.name}'"
            span = int(index.offsets[number, column]), int(index.lengths[number, column])
            if not span[1] and index.present is not None:  # the row lacks the view
                blocks.append(np.zeros(shape, view.dtype))
                continue
            try:
                block = array_at(self._bytes, *span, where)
                if block.shape == view.shape and rows == 1:
                    block = block[None]  # a tar of others may hold a row a sample
                if (block.dtype, block.shape) != (np.dtype(view.dtype), shape):
                    raise ShardError(
                        f"{where} is {block.dtype} {block.shape}; expected {view.dtype} {shape}; "
                        f"{RESTORE}"
                    )
            except ShardError as error:
                faults[number] = str(error)
                block = np.empty((0, *view.shape), view.dtype)
            blocks.append(np.ascontiguousarray(block))  # one of others may be in Fortran's order
        places = [0 if n in faults else block.ctypes.data for n, block in enumerate(blocks)]
        self._mapped[view.name] = _Mapped(blocks, np.array(places, np.int64), faults)
        return self._mapped[view.name]


class _Mapped(NamedTuple):
    """The blocks of a view, where each begins in memory, and what is wrong with some."""

    blocks: list[NDArray[Any]]
    addresses: NDArray[np.int64]
    faults: dict[int, str]


class MappedBlocks:
    """Copies rows of a view's blocks, over all open shards, from where they are mapped."""

    def __init__(self, shards: int, row_bytes: int) -> None:
        """Begins with no block mapped."""
        self.row_bytes = row_bytes
        self._slots = np.zeros(shards, np.int64)  # of each shard; 0: it is not mapped
        self._table = np.zeros((1, 1), np.int64)  # of the first row of each block, [slots, blocks]
        self._lowest, self._memory = 0, torch.empty(0)

    def map(self, shard: int, addresses: NDArray[np.int64]) -> None:
        """Notes where a shard's blocks are mapped; whoever mapped them keeps them there.

        `addresses` [blocks] are of the first row of each, contiguous; 0 for one that is not.
        """
        slots, blocks = self._table.shape
        used = self._slots[self._slots > 0]
        free = np.setdiff1d(np.arange(1, slots), used)
        slot = int(self._slots[shard]) or (int(free[0]) if len(free) else slots)
        if slot == slots or len(addresses) > blocks:
            grown = max(slots, 2 * slot), max(blocks, len(addresses))
            table = np.zeros(grown, np.int64)
            table[:slots, :blocks] = self._table
            self._table = table
        self._slots[shard] = slot
        self._table[slot] = 0
        self._table[slot, : len(addresses)] = addresses
        mapped = self._table[self._table != 0]
        if len(mapped):
            self._lowest = int(mapped.min())
            self._memory = _memory(self._lowest, int(mapped.max()), self.row_bytes)

    def forget(self, shard: int) -> None:
        """Notes that a shard is no longer mapped."""
        self._table[self._slots[shard]] = 0
        self._slots[shard] = 0

    def addresses(self, shards: Rows, blocks: Rows) -> Rows:
        """Returns where blocks of shards begin, [rows]; 0 for one that is not mapped."""
        slots = self._slots[shards]
        found: Rows = self._table[slots, np.where(slots > 0, blocks, 0)]
        return found

    def copy(self, addresses: Rows, offsets: Rows, out: NDArray[Any]) -> None:
        """Copies rows to `out`, which is C-contiguous, [rows, ...].

        `addresses` [rows] says where the block of a row begins, all of them mapped; `offsets`
        [rows], which row of its block it is.
        """
        if len(out):
            starts = addresses - self._lowest + offsets * self.row_bytes
            out_bytes = torch.from_numpy(out.view(np.uint8).reshape(len(out), self.row_bytes))
            torch.index_select(self._memory, 0, torch.from_numpy(starts), out=out_bytes)


def _memory(lowest: int, highest: int, row_bytes: int) -> torch.Tensor:
    """Returns all memory between two blocks as overlapping rows, one beginning at each byte.

    What lies between the rows that are asked for is not touched, and need not be there.
    """
    longest = 1 << 40  # of a block, bytes: rows of the last one begin after `highest`
    first = np.frombuffer(memoryview((ctypes.c_ubyte * row_bytes).from_address(lowest)), np.uint8)
    rows = as_strided(first, (highest - lowest + longest, row_bytes), (1, 1))
    return torch.from_numpy(rows)
