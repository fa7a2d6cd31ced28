"""The indexes of a data set's shards: each is read, and compared, when its shard's turn comes."""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heron.pipeline.config.errors import ConfigError
from heron.pipeline.data.rows import Rows
from heron.shards.errors import RESTORE, ShardError
from heron.shards.index import ShardIndex, labels_in
from heron.shards.manifest import Manifest, Shard
from heron.shards.mixture import MixedStore
from heron.shards.store import Store

KEPT = 128  # indexes that a process keeps
KEPT_BYTES = 2**28  # of labels that a process keeps
MOST_BYTES = 2**32  # of labels that may be asked for at once


class Indexes(Sequence[ShardIndex]):
    """The index of each shard, in the manifest's order; the last ones used are kept.

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
        out = np.empty((0, *labels.row_shape), labels.dtype)
        self._refuse_many(len(rows), out.itemsize * int(np.prod(out.shape[1:])), "labels")
        out = np.empty((len(rows), *labels.row_shape), labels.dtype)
        for number, at, places in self._by_shard(rows):
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
            for number, at, places in self._by_shard(rows):
                out[at] = self[number].present[places]
        return out

    def _by_shard(self, rows: Rows) -> Any:
        """Yields the shards that rows are of, which of the rows, and their places there."""
        shards = np.searchsorted(self.starts, rows, side="right") - 1
        order = np.argsort(shards, kind="stable")
        for at in np.split(order, np.flatnonzero(np.diff(shards[order])) + 1):
            if len(at):
                number = int(shards[at[0]])
                yield number, at, rows[at] - self.starts[number]

    def _refuse_many(self, rows: int, each: int, what: str) -> None:
        if rows * each > MOST_BYTES:
            raise ConfigError(
                f"{self.store}: the protocol asks for the {what} of {rows:,} rows, of {each} bytes "
                f"each: {rows * each / 2**30:.1f} GiB in every process; expected {MOST_BYTES:,} "
                "bytes at most; write the roles of the rows once, with `heron shards protocol`, "
                "and name them by data.roles"
            )
