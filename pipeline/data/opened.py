"""One shard, opened: rows of blocks mapped where they lie, and the bytes of single members."""

import os
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from pipeline.data.plan import Rows
from shards.cache import Held
from shards.errors import RESTORE, ShardError
from shards.index import ShardIndex, map_arrays
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
        self._blocks: dict[str, list[NDArray[Any]]] = {}
        self._grids: dict[str, NDArray[Any] | None] = {}

    def close(self) -> None:
        """Let go of the file; arrays that were given out stay valid."""
        os.close(self._file)
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

    def rows(self, view: View, column: int, sample: Rows, place: Rows) -> NDArray[Any]:
        """Rows of a view by their block and their place in it, [rows, ...].

        Raises:
            ShardError: a block is not what the manifest says.
        """
        grid = self._grid(view, column)
        if grid is not None:
            found: NDArray[Any] = grid[sample, place]
            return found
        blocks = self._arrays(view, column)
        return np.stack([blocks[s][p] for s, p in zip(sample, place, strict=True)])

    def _arrays(self, view: View, column: int) -> list[NDArray[Any]]:
        if view.name not in self._blocks:
            index = self.index
            mapped = map_arrays(self._held.path, index.offsets[:, column], index.lengths[:, column])
            blocks = [  # a tar of others may hold a row a sample
                block[None] if block.shape == view.shape and rows == 1 else block
                for block, rows in zip(mapped, index.rows.tolist(), strict=True)
            ]
            for number, (block, rows) in enumerate(zip(blocks, index.rows.tolist(), strict=True)):
                if (block.dtype, block.shape) != (np.dtype(view.dtype), (rows, *view.shape)):
                    raise ShardError(
                        f"{self.where} sample {index.keys[number]}: view '{view.name}' is "
                        f"{block.dtype} {block.shape}; expected {view.dtype} "
                        f"{(rows, *view.shape)}; {RESTORE}"
                    )
            self._blocks[view.name] = blocks
        return self._blocks[view.name]

    def _grid(self, view: View, column: int) -> NDArray[Any] | None:
        """All blocks as one array [blocks, rows, ...], where they lie at equal distances.

        Ours do, since every block but the last is of one size. The last may be shorter: the array
        ends past it, where no row of the index points.
        """
        if view.name not in self._grids:
            blocks = self._arrays(view, column)
            starts = np.array([block.ctypes.data for block in blocks])
            steps = np.unique(np.diff(starts))
            step = int(steps[0]) if len(steps) else 0
            regular = len(steps) <= 1 and all(block.flags.c_contiguous for block in blocks)
            shape = len(blocks), *blocks[0].shape
            strides = step, *blocks[0].strides
            self._grids[view.name] = as_strided(blocks[0], shape, strides) if regular else None
        return self._grids[view.name]
