"""Rows of a view copied from wherever its blocks are mapped, in one call, at the rate of memory.

A batch has a few rows of each of many shards, so a call a shard costs more than the rows do.
"""

import ctypes
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from heron.pipeline.data.rows import Rows


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
