"""JPEG and PNG files: their headers, whether they are complete, and their pixels.

Whatever Heron shows, trains on, embeds or searches for was decoded by `pixels`: upright by EXIF (or
XMP), RGB, transparency on white. Colour profiles are not applied.
"""

import re
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import ExifTags, Image

JPEG, PNG = b"\xff\xd8", b"\x89PNG\r\n\x1a\n"  # their first bytes
MAX_PIXELS = 1 << 27  # of a picture; more is a decompression bomb
HEAD_BYTES = 4096  # most headers are shorter
MARKER = re.compile(b"\xff[\x02-\xcf\xd9-\xfe]")  # of a JPEG, other than those inside coded pixels
END_OF_IMAGE = 0xD9  # the last marker of a JPEG
# What Pillow raises for a damaged file.
PILLOW_ERRORS = OSError, SyntaxError, AssertionError, Image.DecompressionBombError

# Where the orientation is: its number and type in EXIF, in both orders of bytes, or a name in XMP.
ORIENTATION = b"\x12\x01\x03\x00", b"\x01\x12\x00\x03", b"tiff:Orientation"
APP1, START_OF_SCAN = 0xE1, 0xDA  # markers of a JPEG: metadata, and coded pixels
NO_FRAME = 0xC4, 0xC8, 0xCC  # markers among 0xC0 to 0xCF that begin no frame
TRANSPOSED = 5  # orientations from here on swap height and width
UPRIGHT: dict[int, Callable[[NDArray[np.uint8]], NDArray[np.uint8]]] = {  # by EXIF's orientation
    1: lambda x: x,
    2: lambda x: x[:, ::-1],
    3: lambda x: x[::-1, ::-1],
    4: lambda x: x[::-1],
    5: lambda x: x.swapaxes(0, 1),
    6: lambda x: x.swapaxes(0, 1)[:, ::-1],
    7: lambda x: x.swapaxes(0, 1)[::-1, ::-1],
    8: lambda x: x.swapaxes(0, 1)[::-1],
}

Kind = Literal["JPEG", "PNG"]


class Header(NamedTuple):
    """The header of a picture; height and width in pixels, of the upright picture."""

    kind: Kind
    height: int
    width: int


def read_header(data: bytes, kind: Kind | None = None) -> Header:
    """Returns the header of a picture, of a given kind or either; ValueError where it is bad."""
    if data.startswith(JPEG):
        header = Header("JPEG", *_jpeg_size(data))
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
    if not 0 < header.height * header.width <= MAX_PIXELS:
        raise ValueError(
            f"is {header.height} × {header.width}; expected 1 to {MAX_PIXELS:,} pixels"
        )
    if orientation(data) >= TRANSPOSED:
        return Header(header.kind, header.width, header.height)
    return header


def orientation(data: bytes) -> int:
    """Returns a picture's orientation by EXIF or XMP, 1 to 8; 1 is upright, or says nothing."""
    is_png = data.startswith(PNG)
    if not is_png and not _segments(data)[0]:
        return 1
    if all(mark not in data for mark in ORIENTATION):
        return 1
    try:
        if is_png and (chunk := _png_exif(data)):
            exif = Image.Exif()
            exif.load(chunk)
        else:
            with Image.open(BytesIO(data), formats=["JPEG", "PNG"]) as image:
                exif = image.getexif()
        number = exif.get(ExifTags.Base.Orientation, 1)
    except (ValueError, Warning, struct.error, *PILLOW_ERRORS):  # broken, in a sound picture
        return 1
    return number if number in UPRIGHT else 1


def _png_exif(data: bytes) -> bytes:
    """Returns the EXIF of a PNG, wherever its chunk is; b"" without."""
    offset = len(PNG)
    while offset + 12 <= len(data):
        length, kind = struct.unpack(">I4s", data[offset : offset + 8])
        if kind == b"eXIf":
            return b"Exif\0\0" + data[offset + 8 : offset + 8 + length]
        offset += 12 + length
    return b""


def _jpeg_size(data: bytes) -> tuple[int, int]:
    """Returns height and width of a JPEG as it is stored."""
    try:
        height, width, *_ = simplejpeg.decode_jpeg_header(data)
        return height, width
    except ValueError as fault:
        damaged = ValueError(f"is a damaged JPEG ({fault})")
    try:  # simplejpeg cannot read every CMYK
        with Image.open(BytesIO(data), formats=["JPEG"]) as image:
            if image.mode == "CMYK":
                return image.height, image.width
    except (ValueError, *PILLOW_ERRORS):
        pass
    raise damaged


def read_header_of(path: Path, kind: Kind | None = None) -> Header:
    """Returns the header of a picture file, reading no more of it than needed."""
    with path.open("rb") as stream:
        head = stream.read(HEAD_BYTES)
        if head.startswith(PNG):  # whose orientation may be anywhere
            head += stream.read()
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
    """Returns the pixels [height, width, 3] of a whole picture; ValueError where it is damaged."""
    header = read_complete_header(data)
    picture = pixels(data)
    if picture.shape != (header.height, header.width, 3):
        raise ValueError(f"decodes to {picture.shape}; expected the size that its header has")
    return picture


def pixels(data: bytes, least: Sequence[int] = (0, 0)) -> NDArray[np.uint8]:
    """Returns the pixels [height, width, 3] of a picture, upright, RGB, transparency on white.

    A JPEG is decoded at 1/2, 1/4 or 1/8 of its size where that is no less than the height and
    width in `least`, unless these are 0.

    Raises:
        ValueError: it is neither a JPEG nor a PNG, or damaged.
    """
    number = orientation(data)
    try:
        if data.startswith(JPEG) and _segments(data)[1] != 4:
            height, width = reversed(least) if number >= TRANSPOSED else least
            picture = simplejpeg.decode_jpeg(data, min_height=height, min_width=width)
        else:
            picture = _by_pillow(data)
    except (ValueError, Warning, *PILLOW_ERRORS) as fault:  # warnings may be errors
        kind = "JPEG" if data.startswith(JPEG) else "PNG"
        raise ValueError(f"is a damaged {kind} ({fault})") from None
    return np.ascontiguousarray(UPRIGHT[number](picture))


def is_plain_jpeg(data: bytes) -> bool:
    """Returns whether simplejpeg decodes a file to its `pixels`: a JPEG, upright, and no CMYK."""
    if not data.startswith(JPEG):
        return False
    has_metadata, colours = _segments(data)
    return colours != 4 and not (has_metadata and orientation(data) > 1)


def _segments(data: bytes) -> tuple[bool, int]:
    """Returns whether a JPEG has metadata before its pixels, and the number of its colours.

    The first is true where its segments do not follow one another, which is for Pillow to read.
    """
    offset, has_metadata, colours = len(JPEG), False, 0
    while offset + 10 <= len(data) and data[offset] == 0xFF:
        marker = data[offset + 1]
        if marker == START_OF_SCAN:
            return has_metadata, colours
        if 0xC0 <= marker <= 0xCF and marker not in NO_FRAME:
            colours = data[offset + 9]
        has_metadata |= marker == APP1
        padding = marker == 0xFF
        offset += 1 if padding else 2 + int.from_bytes(data[offset + 2 : offset + 4], "big")
    return True, colours


def _by_pillow(data: bytes) -> NDArray[np.uint8]:
    with Image.open(BytesIO(data), formats=["JPEG", "PNG"]) as image:
        if data.startswith(PNG):
            width, height = (int.from_bytes(data[i : i + 4], "big") for i in (16, 20))
            if image.size != (width, height):
                raise ValueError("it has two headers, of two sizes")
        if not image.has_transparency_data:
            return np.asarray(image.convert("RGB"))
        white = Image.new("RGBA", image.size, "white")
        return np.asarray(Image.alpha_composite(white, image.convert("RGBA")).convert("RGB"))


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
