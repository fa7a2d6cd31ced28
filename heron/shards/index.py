"""The index of a shard: where each member is in the tar, so that any sample is one seek away."""

from __future__ import annotations

import math
import tarfile
import tokenize
import zipfile
import zlib
from dataclasses import dataclass, fields
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from heron.base.atomic import atomic_write
from heron.base.errors import REBUILD, RESTORE, ShardError

BLOCK = tarfile.BLOCKSIZE  # 512 bytes: tar headers and payloads start at multiples of it
NPY_ERRORS = (  # what NumPy raises for bytes that are not arrays
    *(ValueError, TypeError, KeyError, EOFError, OSError, RuntimeError, SyntaxError),
    *(tokenize.TokenError, zipfile.BadZipFile, zlib.error),
)


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """Keys, members, and where they are in the tar; also labels, so that protocols open no tar.

    Shapes: keys [samples], members [members], offsets and lengths [samples, members] of the
    payloads in bytes, crc32 [samples, members] of the payloads, rows [samples] (1 for images, up to
    block_rows for a block), and labels [sum of rows, ...] of the whole shard. Where rows may lack
    views, present [sum of rows, views] is 1 for the views that a row has. A view that is absent has
    length 0 and no member in a tar sample of one row, and is zeros in a block.
    """

    keys: NDArray[np.str_]
    members: NDArray[np.str_]
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    crc32: NDArray[np.uint32]
    rows: NDArray[np.int64]
    labels: NDArray[Any]
    present: NDArray[np.uint8] | None = None

    @property
    def starts(self) -> NDArray[np.int64]:
        """The first row of each tar sample, followed by the number of rows: [samples + 1]."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.rows)])

    def column(self, member: str) -> int:
        """Returns the column of a member in `offsets` and `lengths`."""
        members: list[str] = self.members.tolist()
        if member not in members:
            raise ShardError(f"index has no member {member!r}; it has {', '.join(members)}")
        return members.index(member)

    def write(self, path: Path, several: bool = False) -> None:
        """Writes the index deterministically (zip dates are constant); see `atomic_write`."""
        with atomic_write(path, several) as stream:
            self.save(stream)

    def save(self, stream: BinaryIO) -> None:
        """Writes the bytes that `parse` reads."""
        arrays = {field.name: getattr(self, field.name) for field in fields(self)}
        np.savez(stream, **{name: x for name, x in arrays.items() if x is not None})

    @classmethod
    def read(cls, path: Path | str) -> ShardIndex:
        """Reads an index and checks that its arrays fit each other."""
        path = Path(path)
        try:
            return cls.parse(path.read_bytes(), str(path))
        except FileNotFoundError:
            raise ShardError(
                f"{path} does not exist, and every shard has an index beside it; {RESTORE}"
            ) from None

    @classmethod
    def parse(cls, data: bytes, where: str) -> ShardIndex:
        """Parses the bytes of an index that came from `where` (a path or a URL, for messages)."""
        names = [field.name for field in fields(cls) if field.name != "present"]
        try:
            stored = read_npz(BytesIO(data), len(data))  # it is not compressed
            arrays = {name: stored[name] for name in names}
            index = cls(**arrays, present=stored.get("present"))
            samples, members = len(index.keys), len(index.members)
            if any(x.dtype.kind not in "iu" for x in (index.offsets, index.lengths, index.rows)):
                raise TypeError("offsets, lengths or rows are not integers")
        except (*NPY_ERRORS, ShardError, TypeError) as fault:
            raise ShardError(
                f"{where} is not an index ({fault}), which is an npz of {', '.join(names)}; "
                f"{REBUILD}"
            ) from None
        expected: dict[str, tuple[int, ...]] = dict.fromkeys(
            ("offsets", "lengths", "crc32"), (samples, members)
        )
        expected |= {"rows": (samples,), "labels": (int(index.rows.sum()), *index.labels.shape[1:])}
        for name, shape in expected.items():
            if (actual := getattr(index, name).shape) != shape:
                raise ShardError(
                    f"{where}: {name} {actual} do not fit {samples} keys of {members} members; "
                    f"{REBUILD}"
                )
        return index


def labels_in(data: bytes, where: str) -> NDArray[Any]:
    """Returns only the labels in the bytes of an index, which is faster than parsing all of it."""
    try:
        return read_npz(BytesIO(data), len(data), ["labels.npy"])["labels"]
    except (*NPY_ERRORS, ShardError) as fault:
        raise ShardError(f"{where} is not an index ({fault}); {REBUILD}") from None


def read_npz(
    stream: BinaryIO, max_bytes: int, files: list[str] | None = None
) -> dict[str, NDArray[Any]]:
    """Returns `files` (None: all) of an npz up to `max_bytes`; raises ShardError or NPY_ERRORS."""
    with zipfile.ZipFile(stream) as archive:
        if (size := sum(info.file_size for info in archive.infolist())) > max_bytes:
            raise ShardError(f"{size:,} bytes unpacked, and the limit is {max_bytes:,}")
        arrays = {}
        for info in archive.infolist() if files is None else map(archive.getinfo, files):
            data = np.frombuffer(archive.read(info), np.uint8)
            where = f"array {info.filename!r}"
            arrays[info.filename.removesuffix(".npy")] = array_at(data, 0, len(data), where)
        return arrays


def map_arrays(
    tar: Path, offsets: NDArray[np.int64], lengths: NDArray[np.int64]
) -> list[NDArray[Any]]:
    """Maps a tar, and returns read-only views of the npy members at these bytes.

    Raises ShardError where a member is not an npy file, holds pickles, or is cut.
    """
    data = np.memmap(tar, np.uint8, "r")
    return [
        array_at(data, offset, length, str(tar))
        for offset, length in zip(offsets.tolist(), lengths.tolist(), strict=True)
    ]


def array_at(data: NDArray[np.uint8], offset: int, length: int, where: str) -> NDArray[Any]:
    """Returns a view of the array in an npy file that starts at byte `offset` of `data`."""
    head = data[offset : offset + min(length, 4096)].tobytes()
    try:
        start, shape, fortran, dtype = _header(head[: 10 + int.from_bytes(head[8:10], "little")])
    except NPY_ERRORS as fault:
        raise ShardError(f"{where} is not an npy array at byte {offset} ({fault})") from None
    if dtype.hasobject:
        raise ShardError(f"{where}: an array of Python objects is a pickle, never decoded")
    size = math.prod(shape) * dtype.itemsize
    if start + size != length or offset + length > len(data) or min(shape, default=0) < 0:
        raise ShardError(
            f"{where}: an array of {dtype} {shape} at byte {offset} is too short or too long; "
            f"{RESTORE}"
        )
    return np.ndarray(shape, dtype, data, offset + start, order="F" if fortran else "C")


@lru_cache(1024)  # NumPy's parser is slow, and nearly all headers of a data set are the same
def _header(head: bytes) -> tuple[int, tuple[int, ...], bool, np.dtype[Any]]:
    """Returns the length of an npy header, the shape, whether it is in Fortran order, the dtype."""
    stream = BytesIO(head)
    if np.lib.format.read_magic(stream) != (1, 0):
        raise ValueError("npy version other than 1.0")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
    return stream.tell(), shape, fortran, dtype
