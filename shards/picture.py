"""JPEG and PNG files: their headers, whether they are complete, and their pixels."""

import re
import zlib
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

JPEG, PNG = b"\xff\xd8", b"\x89PNG\r\n\x1a\n"  # their first bytes
MAX_PIXELS = 1 << 27  # of a picture; more is a decompression bomb
HEAD_BYTES = 4096  # most headers are shorter
MARKER = re.compile(b"\xff[\x02-\xcf\xd9-\xfe]")  # of a JPEG, other than those inside coded pixels
END_OF_IMAGE = 0xD9  # the last marker of a JPEG
# What Pillow raises for a damaged file.
PILLOW_ERRORS = OSError, SyntaxError, AssertionError, Image.DecompressionBombError

Kind = Literal["JPEG", "PNG"]


class Header(NamedTuple):
    """The header of a picture; height and width in pixels."""

    kind: Kind
    height: int
    width: int


def read_header(data: bytes, kind: Kind | None = None) -> Header:
    """Returns the header of a picture, of a given kind or either; ValueError where it is bad."""
    if data.startswith(JPEG):
        try:
            height, width, *_ = simplejpeg.decode_jpeg_header(data)
        except ValueError as fault:
            raise ValueError(f"is a damaged JPEG ({fault})") from None
        header = Header("JPEG", height, width)
    elif data.startswith(PNG):
        if data[12:16] != b"IHDR" or zlib.crc32(data[12:29]).to_bytes(4, "big") != data[29:33]:
            raise ValueError("is a damaged PNG (its header is cut or has another checksum)")
        if data[24:26] == b"\x10\0":  # 16 bits, and the colour type of grey without alpha
            raise ValueError("is a PNG whose grey has 16 bits; expected 8, as more would be cut")
        width, height = (int.from_bytes(data[start : start + 4], "big") for start in (16, 20))
        header = Header("PNG", height, width)
    else:
        raise ValueError(f"begins with {data[:8]!r}; expected a {kind or 'JPEG or a PNG'}")
    if kind not in (None, header.kind):
        raise ValueError(f"is a {header.kind}; expected a {kind}")
    if not 0 < height * width <= MAX_PIXELS:
        raise ValueError(f"is {height} × {width}; expected 1 to {MAX_PIXELS:,} pixels")
    return header


def read_header_of(path: Path, kind: Kind | None = None) -> Header:
    """Returns the header of a picture file, reading no more of it than needed."""
    with path.open("rb") as stream:
        head = stream.read(HEAD_BYTES)
        try:
            return read_header(head, kind)
        except ValueError:  # a long header: read the whole file
            return read_header(head + stream.read(), kind)


def shape_of(headers: Iterable[Header]) -> tuple[int, int, int]:
    """Returns the shape of the decoded pictures; -1 for a height or width that varies."""
    axes = map(set, zip(*((header.height, header.width) for header in headers), strict=True))
    height, width = (axis.pop() if len(axis) == 1 else -1 for axis in axes)
    return height, width, 3


def read_complete_header(data: bytes, kind: Kind | None = None) -> Header:
    """Returns the header of a complete picture; ValueError where it is damaged or cut.

    The file may continue after the picture. The checksums of a PNG are compared.
    """
    header = read_header(data, kind)
    if not (_is_whole_jpeg if header.kind == "JPEG" else _is_whole_png)(data):
        raise ValueError(f"is cut short; expected a whole {header.kind}")
    return header


def decode(data: bytes) -> NDArray[np.uint8]:
    """Returns the pixels [height, width, 3] of a picture; ValueError where it is damaged."""
    header = read_complete_header(data)
    try:
        if header.kind == "JPEG":
            pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(data)
        else:
            with Image.open(BytesIO(data), formats=["PNG"]) as image:
                pixels = np.asarray(image.convert("RGB"))
    except (ValueError, *PILLOW_ERRORS) as fault:
        raise ValueError(f"is a damaged {header.kind} ({fault})") from None
    if pixels.shape != (header.height, header.width, 3):
        raise ValueError(f"decodes to {pixels.shape}; expected the size that its header has")
    return pixels


def _is_whole_jpeg(data: bytes) -> bool:
    """Steps from marker to marker, as a thumbnail inside a segment has an end marker too."""
    offset = len(JPEG)
    while (marker := MARKER.search(data, offset)) is not None:
        offset = marker.end()
        if data[offset - 1] == END_OF_IMAGE:
            return True
        offset += int.from_bytes(data[offset : offset + 2], "big")
    return False


def _is_whole_png(data: bytes) -> bool:
    offset, view = len(PNG), memoryview(data)
    while offset + 12 <= len(data):
        kind = data[offset + 4 : offset + 8]
        end = offset + 12 + int.from_bytes(data[offset : offset + 4], "big")
        if end > len(data):
            return False
        if zlib.crc32(view[offset + 4 : end - 4]).to_bytes(4, "big") != view[end - 4 : end]:
            raise ValueError(f"is a damaged PNG (its part {kind!r} has another checksum)")
        if kind == b"IEND":
            return True
        offset = end
    return False
