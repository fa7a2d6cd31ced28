"""One shard, opened: rows of blocks mapped where they lie, and the bytes of single members."""

import os
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from pipeline.data.plan import Rows
from shards.cache import Held
from shards.errors import RESTORE, ShardError
from shards.index import ShardIndex, array_at
from shards.manifest import View


class OpenShard:
    """A tar and its index, open for reading."""

    def __init__(self, held: Held, where: str, index: ShardIndex) -> None:
        """Open the tar.

        Args:
            held: the file, which may be a copy in a cache.
            where: it is from, for messages.
            index: of the tar.
        """
        self.where, self.index = where, index
        self._held = held
        self._file = os.open(held.path, os.O_RDONLY)
        self._bytes: NDArray[np.uint8] | None = None  # the whole tar, mapped
        self._faults: dict[str, dict[int, str]] = {}
        self._blocks: dict[str, list[NDArray[Any]]] = {}
        self._grids: dict[str, NDArray[Any] | None] = {}

    def close(self) -> None:
        """Let go of the file; arrays that were given out stay valid."""
        os.close(self._file)
        self._bytes = None
        self._blocks.clear()
        self._grids.clear()
        self._held.close()

    def payload(self, sample: int, column: int) -> bytes:
        """The bytes of one member: a read, so that a file cut meanwhile is an error, no crash."""
        length = int(self.index.lengths[sample, column])
        data = os.pread(self._file, length, int(self.index.offsets[sample, column]))
        if len(data) != length:
            raise ShardError(
                f"{self.where} sample {self.index.keys[sample]} has {len(data)} bytes; "
                f"the index says {length}; {RESTORE}"
            )
        return data

    def faults(self, view: View, column: int) -> dict[int, str]:
        """What is wrong with the blocks of a view, by the number of the sample."""
        if view.name not in self._faults:
            self._map(view, column)
        return self._faults[view.name]

    def rows(self, view: View, column: int, sample: Rows, place: Rows) -> NDArray[Any]:
        """Rows of a view by their block and their place in it, [rows, ...]; of sound blocks."""
        if view.name not in self._blocks:
            self._map(view, column)
        grid = self._grids[view.name]
        if grid is not None:
            found: NDArray[Any] = grid[sample, place]
            return found
        blocks = self._blocks[view.name]
        return np.stack([blocks[s][p] for s, p in zip(sample, place, strict=True)])

    def _map(self, view: View, column: int) -> None:
        """Find the blocks of a view where they lie."""
        index = self.index
        if self._bytes is None:
            self._bytes = np.memmap(self._held.path, np.uint8, "r")
        blocks, faults = [], {}
        for number, rows in enumerate(index.rows.tolist()):
            shape = rows, *view.shape
            where = f"{self.where} sample {index.keys[number]}: view '{view.name}'"
            place = int(index.offsets[number, column]), int(index.lengths[number, column])
            try:
                block = array_at(self._bytes, *place, where)
                if block.shape == view.shape and rows == 1:
                    block = block[None]  # a tar of others may hold a row a sample
                if (block.dtype, block.shape) != (np.dtype(view.dtype), shape):
                    raise ShardError(
                        f"{where} is {block.dtype} {block.shape}; expected {view.dtype} {shape}; "
                        f"{RESTORE}"
                    )
            except ShardError as fault:
                faults[number] = str(fault)
                block = np.empty((0, *view.shape), view.dtype)
            blocks.append(block)
        self._blocks[view.name], self._faults[view.name] = blocks, faults
        self._grids[view.name] = None if faults else _grid(blocks)


def _grid(blocks: list[NDArray[Any]]) -> NDArray[Any] | None:
    """All blocks as one array [blocks, rows, ...], where they lie at equal distances.

    Ours do, since every block but the last is of one size. The last may be shorter: the array ends
    past it, where no row of the index points.
    """
    starts = np.array([block.ctypes.data for block in blocks])
    steps = np.unique(np.diff(starts))
    if len(steps) > 1 or not all(block.flags.c_contiguous for block in blocks):
        return None
    step = int(steps[0]) if len(steps) else 0
    return as_strided(blocks[0], (len(blocks), *blocks[0].shape), (step, *blocks[0].strides))
