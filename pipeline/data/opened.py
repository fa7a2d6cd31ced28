"""One shard, opened: blocks mapped where they lie, and the bytes of single members."""

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
        self._faults: dict[str, dict[int, str]] = {}
        self._blocks: dict[str, list[NDArray[Any]]] = {}
        self._addresses: dict[str, NDArray[np.int64]] = {}

    def close(self) -> None:
        """Closes the file; what `addresses` pointed to is gone."""
        os.close(self._file)
        self._bytes = None
        self._blocks.clear()
        self._addresses.clear()
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
        self._map(view, column)
        return self._faults[view.name]

    def addresses(self, view: View, column: int) -> NDArray[np.int64]:
        """Returns where each block of a view begins in memory, [blocks]; 0 for a faulty one."""
        self._map(view, column)
        return self._addresses[view.name]

    def _map(self, view: View, column: int) -> None:
        """Maps the blocks of a view where they lie, once."""
        if view.name in self._addresses:
            return
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
        self._blocks[view.name], self._faults[view.name] = blocks, faults
        addresses = [0 if n in faults else block.ctypes.data for n, block in enumerate(blocks)]
        self._addresses[view.name] = np.array(addresses, np.int64)
