"""Pictures as files: what the header of a JPEG or a PNG says, and whether all of it is there."""

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

JPEG, PNG = b"\xff\xd8", b"\x89PNG\r\n\x1a\n"  # how they begin
MOST_PIXELS = 1 << 27  # of a picture; more is a bomb
HEAD = 4096  # bytes; the header of most files is shorter
MARKER = re.compile(b"\xff[\x02-\xcf\xd9-\xfe]")  # of a JPEG, less those within coded pixels
END = 0xD9  # the marker of a JPEG's end
PILLOWS = OSError, SyntaxError, AssertionError, Image.DecompressionBombError  # that it raises

Kind = Literal["JPEG", "PNG"]


class Header(NamedTuple):
    """What a picture says of itself; height and width in pixels."""

    kind: Kind
    height: int
    width: int


def read_header(data: bytes, kind: Kind | None = None) -> Header:
    """Returns the header of a picture, of either kind or of one; ValueError says what is wrong."""
    if data.startswith(JPEG):
        try:
            height, width, *_ = simplejpeg.decode_jpeg_header(data)
        except ValueError as fault:
            raise ValueError(f"is a damaged JPEG ({fault})") from None
        header = Header("JPEG", height, width)
    elif data.startswith(PNG):
        if data[12:16] != b"IHDR" or zlib.crc32(data[12:29]).to_bytes(4, "big") != data[29:33]:
            raise ValueError("is a damaged PNG (its header is cut or has another checksum)")
        if data[24:26] == b"\x10\0":  # bits, and the type of grey without transparency
            raise ValueError("is a PNG whose grey has 16 bits; expected 8, as more would be cut")
        width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
        header = Header("PNG", height, width)
    else:
        raise ValueError(f"begins with {data[:8]!r}; expected a {kind or 'JPEG or a PNG'}")
    if kind not in (None, header.kind):
        raise ValueError(f"is a {header.kind}; expected a {kind}")
    if not 0 < height * width <= MOST_PIXELS:
        raise ValueError(f"is {height} × {width}; expected 1 to {MOST_PIXELS:,} pixels")
    return header


def read_header_of(path: Path, kind: Kind | None = None) -> Header:
    """Returns the header of a picture's file, of which no more is read than is needed."""
    with path.open("rb") as stream:
        head = stream.read(HEAD)
        try:
            return read_header(head, kind)
        except ValueError:  # a long header: look at all of it
            return read_header(head + stream.read(), kind)


def shape_of(headers: Iterable[Header]) -> tuple[int, int, int]:
    """Returns the shape of pictures, decoded; -1 for a height or width that varies."""
    axes = map(set, zip(*((one.height, one.width) for one in headers), strict=True))
    height, width = (axis.pop() if len(axis) == 1 else -1 for axis in axes)
    return height, width, 3


def read_whole(data: bytes, kind: Kind | None = None) -> Header:
    """Returns the header of a picture that is not cut; ValueError says what is wrong.

    A file may go on after the end of its picture. The checksums of a PNG are compared.
    """
    header = read_header(data, kind)
    if not (_jpeg_ends if header.kind == "JPEG" else _png_ends)(data):
        raise ValueError(f"is cut short; expected a whole {header.kind}")
    return header


def decode(data: bytes) -> NDArray[np.uint8]:
    """Returns the pixels [height, width, 3] of a whole picture; ValueError says what is wrong."""
    header = read_whole(data)
    try:
        if header.kind == "JPEG":
            pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(data)
        else:
            with Image.open(BytesIO(data), formats=["PNG"]) as image:
                pixels = np.asarray(image.convert("RGB"))
    except (ValueError, *PILLOWS) as fault:
        raise ValueError(f"is a damaged {header.kind} ({fault})") from None
    if pixels.shape != (header.height, header.width, 3):
        raise ValueError(f"decodes to {pixels.shape}; expected the size that its header has")
    return pixels


def _jpeg_ends(data: bytes) -> bool:
    """Goes from marker to marker: what looks like an end within one, a thumbnail's, is none."""
    at = len(JPEG)
    while (marker := MARKER.search(data, at)) is not None:
        at = marker.end()
        if data[at - 1] == END:
            return True
        at += int.from_bytes(data[at : at + 2], "big")
    return False


def _png_ends(data: bytes) -> bool:
    at, view = len(PNG), memoryview(data)
    while at + 12 <= len(data):
        kind, end = data[at + 4 : at + 8], at + 12 + int.from_bytes(data[at : at + 4], "big")
        if end > len(data):
            return False
        if zlib.crc32(view[at + 4 : end - 4]).to_bytes(4, "big") != view[end - 4 : end]:
            raise ValueError(f"is a damaged PNG (its part {kind!r} has another checksum)")
        if kind == b"IEND":
            return True
        at = end
    return False
