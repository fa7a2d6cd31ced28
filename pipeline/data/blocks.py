"""Rows of a view copied from wherever its blocks are mapped, in one call, at the rate of memory.

A batch has a few rows of each of many shards, so a call a shard costs more than the rows do.
"""

import ctypes
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from heron.pipeline.data.plan import Rows


class MappedBlocks:
    """Copies rows of a view's blocks, over all shards, from where they are mapped.

    Attributes:
        addresses: of the first row of each block, contiguous; 0 where it is not mapped, [blocks].
    """

    def __init__(self, blocks: int, row_bytes: int) -> None:
        """Begins with no block mapped."""
        self.addresses = np.zeros(blocks, np.int64)
        self.row_bytes = row_bytes
        self._lowest, self._memory = 0, torch.empty(0)

    def set_addresses(self, blocks: slice, addresses: NDArray[np.int64] | int) -> None:
        """Notes where some blocks are mapped from now on; whoever mapped them keeps them there."""
        self.addresses[blocks] = addresses
        mapped = self.addresses[self.addresses != 0]
        if len(mapped):
            self._lowest = int(mapped.min())
            self._memory = _memory(self._lowest, int(mapped.max()), self.row_bytes)

    def copy(self, blocks: Rows, offsets: Rows, out: NDArray[Any]) -> None:
        """Copies rows to `out`, which is C-contiguous, [rows, ...].

        `blocks` [rows] says which block a row is in, all of them mapped; `offsets` [rows], which
        row of its block it is.
        """
        if len(out):
            starts = self.addresses[blocks] - self._lowest + offsets * self.row_bytes
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
