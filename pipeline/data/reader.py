"""Rows of a data set by number: vector blocks mapped in place, images decoded."""

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from pipeline.errors import ConfigError
from shards.errors import RESTORE, ShardError
from shards.index import ShardIndex, map_arrays
from shards.manifest import Manifest, Shard, View, load_manifest
from shards.sources.base import sha256

Rows = NDArray[np.int64]


class Reader:
    """Random access to a folder of shards; opened shards stay mapped.

    Rows are numbered over the splits in the manifest's order, shard by shard. Opening checks the
    manifest, the presence and size of every shard and the checksum of its index; payloads are read
    when asked for, and `verify_payloads` compares their checksums.
    """

    def __init__(self, folder: str | Path) -> None:
        """Open a folder that `heron shards build` made."""
        self.folder = Path(folder)
        self.manifest: Manifest = load_manifest(self.folder)
        self.shards = [s for shards in self.manifest.splits.values() for s in shards]
        for shard in self.shards:
            self._check(shard)
        self.indexes = [self._index(shard) for shard in self.shards]
        self.starts = np.cumsum([0] + [shard.samples for shard in self.shards])
        self._maps: dict[tuple[int, str], list[NDArray[Any]]] = {}

    def _check(self, shard: Shard) -> None:
        path = self.folder / shard.file
        if not path.is_file():
            raise ShardError(f"{path} is missing; the manifest lists it; {RESTORE}")
        if path.stat().st_size != shard.bytes:
            raise ShardError(
                f"{path} has {path.stat().st_size} bytes; the manifest says {shard.bytes}; "
                f"{RESTORE}"
            )

    def _index(self, shard: Shard) -> ShardIndex:
        path = self.folder / shard.index_file
        index = ShardIndex.read(path)
        if sha256(path) != shard.index_sha256 or int(index.rows.sum()) != shard.samples:
            raise ShardError(f"{path} is not the index that the manifest lists; {RESTORE}")
        return index

    def verify_payloads(self) -> None:
        """Compare every shard's checksum with the manifest's: reads all bytes once.

        Raises:
            ShardError: a shard was altered; `heron shards verify` names the sample.
        """
        for shard in self.shards:
            path = self.folder / shard.file
            if sha256(path) != shard.sha256:
                raise ShardError(
                    f"{path} is altered: its sha256 is not the manifest's; {RESTORE}; "
                    "`heron shards verify` names the sample"
                )

    @property
    def splits(self) -> list[str]:
        """Names of the splits."""
        return list(self.manifest.splits)

    def shard_rows(self, split: str) -> list[Rows]:
        """The numbers of a split's rows, shard by shard."""
        if split not in self.manifest.splits:
            raise ConfigError(
                f"split '{split}' is not in {self.folder}; found {', '.join(self.splits)}"
            )
        first = 0
        for name, shards in self.manifest.splits.items():
            if name == split:
                break
            first += len(shards)
        numbers = range(first, first + len(self.manifest.splits[split]))
        return [np.arange(self.starts[i], self.starts[i + 1]) for i in numbers]

    def split_rows(self, split: str) -> Rows:
        """The numbers of a split's rows."""
        return np.concatenate(self.shard_rows(split))

    @cached_property
    def _labels(self) -> NDArray[Any]:
        return np.concatenate([index.labels for index in self.indexes])

    def labels(self, rows: Rows) -> NDArray[Any]:
        """Labels as stored: see `shards.manifest.Labels`."""
        found: NDArray[Any] = self._labels[rows]
        return found

    def targets(self, rows: Rows) -> NDArray[np.float32]:
        """Labels as 0/1 columns, one a name: a class number becomes one-hot."""
        labels = self.labels(rows)
        if self.manifest.labels.kind == "hierarchical":
            labels = labels[:, -1]
        if labels.ndim == 1:
            names = np.arange(len(self.manifest.labels.names))
            labels = labels[:, None] == names
        targets: NDArray[np.float32] = labels.astype(np.float32)
        return targets

    def truth(self, rows: Rows) -> NDArray[np.float32]:
        """What the rows are, as 0/1 columns, for scoring.

        Raises:
            ConfigError: complementary labels of a row leave more than one class.
        """
        targets = self.targets(rows)
        if self.manifest.labels.kind != "complementary":
            return targets
        left = targets.shape[1] - targets.sum(1)
        if (left != 1).any():
            row = int(np.flatnonzero(left != 1)[0])
            raise ConfigError(
                f"{self.folder}: the complementary labels of sample {self.key(int(rows[row]))} "
                f"leave {int(left[row])} classes; expected 1 in rows that are tested or probed; "
                "store there every class but the right one"
            )
        return 1 - targets

    def paths(self, rows: Rows) -> NDArray[np.int64]:
        """Hierarchical labels, [rows, levels]; [rows, 0] where labels are of another kind."""
        if self.manifest.labels.kind != "hierarchical":
            return np.empty((len(rows), 0), np.int64)
        found: NDArray[np.int64] = self.labels(rows)
        return found

    def key(self, row: int) -> str:
        """The key of a row: of its tar sample and, in a block, its place there."""
        shard, sample, place = (int(x[0]) for x in self._locate(np.array([row])))
        key = str(self.indexes[shard].keys[sample])
        return key if self.manifest.block_rows is None else f"{key}/{place}"

    def view(self, name: str) -> View:
        """What the manifest says of a view."""
        views = {view.name: view for view in self.manifest.views}
        if name not in views:
            raise ConfigError(
                f"data.views: stored view '{name}' is not in {self.folder}; "
                f"found {', '.join(views)}"
            )
        return views[name]

    def read(self, name: str, rows: Rows) -> NDArray[Any]:
        """One view of some rows, in their order.

        Args:
            name: a stored view.
            rows: row numbers, shape [rows].

        Returns:
            float32 [rows, width] for vectors, uint8 [rows, height, width, channels] for images.

        Raises:
            ShardError: a sample cannot be read; names the shard and the sample.
        """
        view = self.view(name)
        if view.kind == "image":
            if not len(rows):
                return np.empty((0, *np.maximum(view.shape, 1)), np.uint8)
            return np.stack([self._image(view, int(row)) for row in rows])
        out = np.empty((len(rows), *view.shape), np.float32)
        shard, sample, place = self._locate(rows)
        block = shard * (1 + max(len(index.keys) for index in self.indexes)) + sample
        order = np.argsort(block, kind="stable")
        cuts = np.flatnonzero(np.diff(block[order])) + 1
        for group in np.split(order, cuts):
            if len(group):
                blocks = self._blocks(int(shard[group[0]]), name)
                out[group] = blocks[sample[group[0]]][place[group]]
        return out

    def _locate(self, rows: Rows) -> tuple[Rows, Rows, Rows]:
        """Shard, tar sample in it, and place in the sample's block, of each row."""
        shard = np.searchsorted(self.starts, rows, side="right") - 1
        local = rows - self.starts[shard]
        if self.manifest.block_rows is None:
            return shard, local, np.zeros_like(local)
        return shard, local // self.manifest.block_rows, local % self.manifest.block_rows

    def _blocks(self, shard: int, name: str) -> list[NDArray[Any]]:
        """The blocks of a view in a shard, mapped into memory where they lie in the tar."""
        if (shard, name) not in self._maps:
            index, path = self.indexes[shard], self.folder / self.shards[shard].file
            column = index.column(f"{name}.npy")
            self._maps[shard, name] = map_arrays(
                path, index.offsets[:, column], index.lengths[:, column]
            )
        return self._maps[shard, name]

    def _image(self, view: View, row: int) -> NDArray[np.uint8]:
        shard, sample, _ = (int(x[0]) for x in self._locate(np.array([row])))
        index, path = self.indexes[shard], self.folder / self.shards[shard].file
        suffixes = [m for m in index.members if m in ("jpg", f"{view.name}.jpg")]
        column = index.column(str(suffixes[0]) if suffixes else "jpg")
        with path.open("rb") as tar:
            tar.seek(int(index.offsets[sample, column]))
            data = tar.read(int(index.lengths[sample, column]))
        try:
            image: NDArray[np.uint8] = simplejpeg.decode_jpeg(data)
        except ValueError as fault:
            raise ShardError(
                f"{path} sample {index.keys[sample]}: {fault}; expected a JPEG; "
                "run `heron shards verify` to see what else is damaged"
            ) from None
        if -1 not in view.shape and image.shape != view.shape:
            raise ShardError(
                f"{path} sample {index.keys[sample]} is {image.shape}; "
                f"the manifest says {view.shape} for view '{view.name}'"
            )
        return image
