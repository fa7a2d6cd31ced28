"""Reads files of users, pictures or rows of vectors: within limits, and without unpickling."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from heron.base.errors import RESTORE, RetrievalError, ShardError
from heron.shards.index import array_at
from heron.shards.picture import decode, read_header

MAX_FILE_BYTES = 20_000_000  # of a file
MAX_PIXELS = 64_000_000  # of a picture: 192 MB decoded
NPY = b"\x93NUMPY"  # the first bytes of an npy file

File = str | Path | bytes


def read_file(file: File) -> tuple[bytes, str]:
    """Returns a file's bytes, and its name for messages; RetrievalError if missing or too large."""
    if isinstance(file, bytes):
        return file, "the file"
    path = Path(file)
    if not path.is_file():
        fault = "is not a file" if path.exists() else "does not exist"
        raise RetrievalError(f"{path} {fault}; pass a picture or an npy file")
    with path.open("rb") as stream:
        data = stream.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise RetrievalError(
            f"{path} has {path.stat().st_size:,} bytes, and the limit is {MAX_FILE_BYTES:,}; make "
            "it smaller"
        )
    return data, str(path)


def vector_row(
    data: NDArray[np.uint8],  # the file's bytes, read or mapped
    name: str,  # of the file, for messages
    row: int = 0,  # of an array [rows, width]; an array [width] has only row 0
    width: int | None = None,  # the expected width, if any
) -> NDArray[np.float32]:
    """Returns a row of an npy file of numbers, float32 [width], without unpickling.

    Raises a RetrievalError if it is no such array, has no such row, or the row is not finite.
    """
    try:
        array = array_at(data, 0, len(data), name)
    except ShardError as fault:
        raise RetrievalError(
            f"{str(fault).removesuffix(f'; {RESTORE}')}; write it with numpy.save"
        ) from None
    if array.dtype.kind not in "fiu" or array.ndim not in (1, 2):
        raise RetrievalError(
            f"{name} must have numbers, [width] or [rows, width], got {array.dtype} {array.shape}"
        )
    rows = array[None] if array.ndim == 1 else array
    if not 0 <= row < len(rows):
        raise RetrievalError(
            f"{name} has {len(rows):,} rows, counted from 0, so --row cannot be {row}"
        )
    with np.errstate(over="ignore"):  # overflow gives infinity, which is refused below
        vector = np.array(rows[row], np.float32)
    if width is not None and len(vector) != width:
        raise RetrievalError(f"{name} must have {width:,} numbers in each row, got {len(vector):,}")
    if len(bad := np.flatnonzero(~np.isfinite(vector))):
        raise RetrievalError(
            f"{name}: {len(bad):,} numbers of row {row} are not finite in float32, the first in "
            f"column {bad[0]}"
        )
    return vector


def map_bytes(path: Path) -> NDArray[np.uint8]:
    """Returns the bytes of a file of any size, mapped; RetrievalError if it is missing or empty."""
    try:
        return np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as fault:
        raise RetrievalError(f"cannot read {path} as an npy file: {fault}") from None


def read_size(data: bytes, name: str) -> tuple[int, int]:
    """Returns the height and width of a picture, upright by EXIF.

    Only headers are read, so that too large pictures are refused before decoding. Raises a
    RetrievalError for those, and for what is no picture. `name` is for messages.
    """
    if len(data) > MAX_FILE_BYTES:
        raise RetrievalError(
            f"{name} has {len(data):,} bytes, and the limit is {MAX_FILE_BYTES:,}; make it smaller"
        )
    try:
        header = read_header(data)
        size = header.height, header.width
        if size[0] * size[1] > MAX_PIXELS:
            raise ValueError(
                f"is {size[0]} × {size[1]}, and the limit is {MAX_PIXELS:,} pixels; make it smaller"
            )
        return size
    except ValueError as fault:
        raise RetrievalError(f"{name} {fault}") from None


def upright_picture(data: bytes, name: str) -> Image.Image:
    """Returns a file's picture, RGB, as `shards.picture` decodes it.

    Raises a RetrievalError if it is no picture, damaged or too large.
    """
    read_size(data, name)
    try:
        return Image.fromarray(decode(data))
    except ValueError as fault:
        raise RetrievalError(f"{name} {fault}; pass a complete picture") from None
