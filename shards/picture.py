"""Pictures as files: what the header of a JPEG or a PNG says, and nothing is decoded."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Literal, NamedTuple

import simplejpeg

JPEG, PNG = b"\xff\xd8", b"\x89PNG\r\n\x1a\n"  # how they begin
MOST_PIXELS = 1 << 27  # of a picture; more is a bomb
HEAD = 4096  # bytes; the header of most files is shorter

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
