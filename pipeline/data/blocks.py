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


class Blocks:
    """Where the blocks of a view are mapped, over all shards.

    Attributes:
        addresses: of the first row of each block, contiguous; 0 where it is not mapped, [blocks].
    """

    def __init__(self, blocks: int, row_bytes: int) -> None:
        """Begin with none mapped.

        Args:
            blocks: how many there are.
            row_bytes: of a row.
        """
        self.addresses = np.zeros(blocks, np.int64)
        self.row_bytes = row_bytes
        self._lowest, self._memory = 0, torch.empty(0)

    def place(self, part: slice, addresses: NDArray[np.int64] | int) -> None:
        """Note where some blocks are mapped from now on; whoever mapped them keeps them there."""
        self.addresses[part] = addresses
        mapped = self.addresses[self.addresses != 0]
        if len(mapped):
            self._lowest = int(mapped.min())
            self._memory = _memory(self._lowest, int(mapped.max()), self.row_bytes)

    def copy(self, blocks: Rows, places: Rows, out: NDArray[Any]) -> None:
        """Copy rows.

        Args:
            blocks: which block a row is in, all of them mapped, [rows].
            places: where in its block, [rows].
            out: C-contiguous, [rows, ...].
        """
        if len(out):
            found = torch.from_numpy(
                self.addresses[blocks] - self._lowest + places * self.row_bytes
            )
            into = torch.from_numpy(out.view(np.uint8).reshape(len(out), self.row_bytes))
            torch.index_select(self._memory, 0, found, out=into)


def _memory(lowest: int, highest: int, row_bytes: int) -> torch.Tensor:
    """All memory from one block to another as overlapping rows, one beginning at each byte.

    What lies between the rows that are asked for is not touched, and need not be there.
    """
    longest = 1 << 40  # of a block, bytes: rows of the last one begin after `highest`
    first = np.frombuffer(memoryview((ctypes.c_ubyte * row_bytes).from_address(lowest)), np.uint8)
    rows = as_strided(first, (highest - lowest + longest, row_bytes), (1, 1))
    return torch.from_numpy(rows)
