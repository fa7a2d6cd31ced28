"""Writes one shard, a tar and its index, and measures what the manifest says of it."""

import tarfile
import zlib
from collections import Counter
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from heron.base.atomic import atomic_write
from heron.base.errors import ShardError
from heron.shards.index import BLOCK, ShardIndex, map_arrays
from heron.shards.manifest import (
    LABELS,
    MAX_STATISTIC,
    PRESENT,
    Shard,
    View,
    index_name,
    member_names,
)
from heron.shards.source import Rows, Source, rows_with_view
from heron.shards.texts import count_words

IMAGES_PER_READ = 64  # whatever the length of a shard


class BlockMoments(NamedTuple):
    """The rows of a block, and each column's mean and sum of squared distances to it."""

    rows: int
    mean: NDArray[np.float64]
    squares: NDArray[np.float64]

    @classmethod
    def of(cls, block: NDArray[Any]) -> Self:
        """Returns those of a block [rows, width]."""
        values = np.asarray(block, np.float64)
        mean = values.mean(0)
        return cls(len(values), mean, ((values - mean) ** 2).sum(0))


class Moments:
    """Accumulates mean and variance of columns by blocks (Chan, Golub and LeVeque 1979).

    scikit-learn's StandardScaler rounds differently, and takes 13 times as long on blocks of 256
    rows.
    """

    def __init__(self) -> None:
        """Starts without rows."""
        self.rows = 0
        self.mean: NDArray[np.float64] = np.zeros(1)
        self.squares: NDArray[np.float64] = np.zeros(1)  # sum of squared distances to the mean

    def add(self, block: NDArray[Any]) -> None:
        """Merges a block [rows, width]."""
        self.merge(BlockMoments.of(block))

    def merge(self, block: BlockMoments) -> None:
        """Merges the moments of a block; the last digit depends on the order of the blocks."""
        total = self.rows + block.rows
        shift = block.mean - self.mean
        self.squares = self.squares + block.squares + shift**2 * (self.rows * block.rows / total)
        self.mean = self.mean + shift * (block.rows / total)
        self.rows = total

    @property
    def std(self) -> NDArray[np.float64]:
        """The standard deviation of each column, divided by n (not n - 1)."""
        return np.sqrt(self.squares / max(1, self.rows))

    def apply_to(self, view: View) -> View:
        """Returns the view with these statistics, if any; ShardError if too large for float32."""
        if not self.rows:
            return view
        for name, values in (("mean", self.mean), ("standard deviation", self.std)):
            if (magnitudes := np.abs(values)).max(initial=0) > MAX_STATISTIC:
                column = int(magnitudes.argmax())
                raise ShardError(
                    f"view {view.name!r}: the {name} of column {column} is {values[column]:.3g}, "
                    f"beyond ±{MAX_STATISTIC:g}; scale the column, or remove it"
                )
        return view.model_copy(update={"mean": self.mean.tolist(), "std": self.std.tolist()})


class ShardPlan(NamedTuple):
    """Rows [start, stop) of a split, which make one shard."""

    file: str
    split: str
    start: int
    stop: int

    def __str__(self) -> str:
        """Returns the name of the tar."""
        return self.file

    @property
    def rows(self) -> int:
        """How many rows."""
        return self.stop - self.start


class Made(NamedTuple):
    """A shard that is written: its record, and what the manifest says of the rows in it."""

    shard: Shard
    blocks: dict[int, list[BlockMoments]]  # of each view of vectors, by its number
    words: dict[str, Counter[str]]  # of each view of texts, by its name


def make_shard(source: Source, out: Path, shard: ShardPlan) -> Made:
    """Writes a shard that is not there, its index first, each atomically; measures what is there.

    Others may be writing the same shard, such as the workers of a build that was killed: the bytes
    are the same, and each writes files of its own.
    """
    tar, index_file = out / shard.file, out / index_name(shard.file)
    if not (tar.exists() and index_file.exists()):
        with atomic_write(tar, several=True) as stream:
            _write_tar(source, shard, stream).write(index_file, several=True)
    index, views = ShardIndex.read(index_file), source.views
    counts = shard.split == "train" or "train" not in source.splits
    columns = [i for i, view in enumerate(views) if counts and view.kind == "vector"]
    return Made(
        Shard.of(tar, index),
        {column: list(_moments(tar, index, column)) for column in columns},
        count_words(tar, index, views) if counts else {},
    )


def _moments(tar: Path, index: ShardIndex, column: int) -> Iterator[BlockMoments]:
    """Yields the moments of each block of a view of vectors, without the rows that lack it."""
    has_member = index.lengths[:, column] > 0
    spans = index.offsets[has_member, column], index.lengths[has_member, column]
    starts = index.starts[:-1][has_member].tolist()
    for start, block in zip(starts, map_arrays(tar, *spans), strict=True):
        if index.present is not None:
            block = block[index.present[start : start + len(block), column] > 0]
        if len(block):
            yield BlockMoments.of(block)


def _write_tar(source: Source, shard: ShardPlan, stream: BinaryIO) -> ShardIndex:
    """Writes a shard's samples, each a block of vectors or one row; returns their index."""
    views = source.views
    has_missing = any(view.missing for view in views)
    members = [*member_names(views, source.block_rows), LABELS, *([PRESENT] if has_missing else [])]
    keys, offsets, lengths, checksums, label_blocks, present_blocks = [], [], [], [], [], []
    rows_per_read = source.block_rows or IMAGES_PER_READ
    # Times and owners are left out, so that the same rows are the same bytes.
    with tarfile.open(fileobj=stream, mode="w|", format=tarfile.USTAR_FORMAT) as tar:
        for start in range(shard.start, shard.stop, rows_per_read):
            stop = min(start + rows_per_read, shard.stop)
            rows = source.read(shard.split, start, stop)
            block = f"{shard.split}-{start // rows_per_read:06d}"
            if (fault := _find_fault(source, views, rows, stop - start)) is not None:
                raise ShardError(f"{source.name}, {block}: {fault}; this is a bug in the source")
            sample_rows = rows_per_read if source.block_rows else 1
            present = np.stack([rows_with_view(rows.views[view.name]) for view in views], 1)
            for first in range(0, stop - start, sample_rows):
                sample = slice(first, first + sample_rows)
                keys.append(block if rows.keys is None else rows.keys[first])
                label_blocks.append(rows.labels[sample])
                present_blocks.append(present[sample].astype(np.uint8))
                values = [
                    _stored_values(
                        rows.views[view.name][sample], present[sample, column], source.block_rows
                    )
                    for column, view in enumerate(views)
                ]
                values += [label_blocks[-1], present_blocks[-1]][: len(members) - len(views)]
                for suffix, value in zip(members, values, strict=True):
                    if value is None:  # the row lacks the view, so the sample lacks the member
                        offsets.append(tar.offset)
                        lengths.append(0)
                        checksums.append(0)
                        continue
                    payload = npy(value) if isinstance(value, np.ndarray) else value[0]
                    offsets.append(tar.offset + BLOCK)
                    lengths.append(len(payload))
                    checksums.append(zlib.crc32(payload))
                    member = tarfile.TarInfo(f"{keys[-1]}.{suffix}")
                    member.size = len(payload)
                    tar.addfile(member, BytesIO(payload))
    shape = (len(keys), len(members))
    return ShardIndex(
        keys=np.array(keys),
        members=np.array(members),
        offsets=np.array(offsets, np.int64).reshape(shape),
        lengths=np.array(lengths, np.int64).reshape(shape),
        crc32=np.array(checksums, np.uint32).reshape(shape),
        rows=np.array([len(block) for block in label_blocks], np.int64),
        labels=np.concatenate(label_blocks),
        present=np.concatenate(present_blocks) if has_missing else None,
    )


def _stored_values(values: Any, present: NDArray[np.bool_], block_rows: int | None) -> Any:
    """Returns values to store: zeros for rows of a block that lack the view, None for a sample."""
    if present.all():
        return values
    return None if block_rows is None else np.where(present[:, None], values, np.float32(0))


def _find_fault(source: Source, views: list[View], rows: Rows, count: int) -> str | None:
    """Returns how `count` rows differ from what their source declares, or None."""
    if (fault := source.labels.fault(np.asarray(rows.labels), count)) is not None:
        return fault
    names = [view.name for view in views]
    if sorted(rows.views) != sorted(names):
        return f"views must be {', '.join(names)}, got {', '.join(rows.views) or 'none'}"
    if source.block_rows is None and len(rows.keys or []) != count:
        return f"{len(rows.keys or [])} keys for {count} rows of pictures; each row needs one"
    present = {view.name: rows_with_view(rows.views[view.name]) for view in views}
    for view in views:
        values = rows.views[view.name]
        has_view = present[view.name]
        if not has_view.all() and not view.missing:
            return (
                f"row {int(np.argmin(has_view))} has no view {view.name!r}; every row needs it, "
                'unless the view has missing="allow"'
            )
        if source.block_rows is None and view.kind != "vector":
            payloads = [value for value in values if value is not None]
            if len(values) != count or not all(isinstance(value, bytes) for value in payloads):
                return f"view {view.name!r} is not the bytes of {count} {view.kind}s"
            continue
        array, shape = np.asarray(values), (count, *view.shape)
        if array.dtype != view.dtype or array.shape != shape:
            return f"view {view.name!r} is {array.dtype} {array.shape}, not {view.dtype} {shape}"
        if not (finite := np.isfinite(array).reshape(count, -1).all(1) | ~has_view).all():
            row = int(np.argmin(finite))
            return f"view {view.name!r}, row {row} of the block, is not finite"
    if not (some := np.stack(list(present.values())).any(0)).all():
        return f"row {int(np.argmin(some))} has none of its views; drop it"
    return None


def npy(array: NDArray[Any]) -> bytes:
    """Returns an array as the bytes of an npy file."""
    stream = BytesIO()
    np.lib.format.write_array(stream, np.ascontiguousarray(array), (1, 0), allow_pickle=False)
    return stream.getvalue()
