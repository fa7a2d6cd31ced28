"""Files of pictures: their headers, whether they are complete, and their pixels.

Whatever Heron shows, trains on, embeds or searches for was decoded by `pixels`: upright by EXIF (or
XMP), RGB, transparency on white. Colour profiles are not applied. The kind follows from a file's
bytes, never from its name, and no reader of Pillow's but those of `MAGIC` is given a byte of it.
"""

import re
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from io import BytesIO
from typing import Any, Literal, NamedTuple

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import ExifTags, Image, TiffImagePlugin, UnidentifiedImageError, WebPImagePlugin

from heron.base.errors import short_repr

JPEG, PNG = b"\xff\xd8", b"\x89PNG\r\n\x1a\n"  # their first bytes
Kind = Literal["JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP"]
MAGIC: dict[Kind, re.Pattern[bytes]] = {  # how a file of each kind begins
    "JPEG": re.compile(JPEG),
    "PNG": re.compile(PNG),
    "WEBP": re.compile(b"RIFF.{4}WEBP", re.DOTALL),
    "GIF": re.compile(b"GIF8[79]a"),
    "TIFF": re.compile(rb"II[*+]\0|MM\0[*+]"),
    "BMP": re.compile(b"BM"),
}
ANY_KIND = "JPEG, PNG, WebP, GIF, TIFF or BMP"
ANY_SUFFIX = ".jpg, .png, .webp, .gif, .tif or .bmp"  # the usual ones, in messages
SUFFIXES = ("jpg", "jpeg", "jpe", "jfif", "png", "webp", "gif", "tif", "tiff", "bmp")  # all
PLUGINS = TiffImagePlugin, WebPImagePlugin  # beside those that Pillow has at hand; no other loads
MAX_PIXELS = 1 << 27  # of a picture; more is a decompression bomb
MARKER = re.compile(b"\xff[\x02-\xcf\xd9-\xfe]")  # of a JPEG, other than those inside coded pixels
END_OF_IMAGE = 0xD9  # the last marker of a JPEG
# What Pillow raises for a damaged file, and its warnings, which may be errors.
PILLOW_ERRORS = (
    *(OSError, SyntaxError, AssertionError, ValueError, LookupError, TypeError, EOFError, Warning),
    *(OverflowError, struct.error, MemoryError, Image.DecompressionBombError),
)

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


class Header(NamedTuple):
    """The header of a picture; height and width in pixels, of the upright picture."""

    kind: Kind
    height: int
    width: int


def kind_of(data: bytes) -> Kind:
    """Returns the kind of a picture by its first bytes; ValueError where it is none of `MAGIC`."""
    for kind, magic in MAGIC.items():
        if magic.match(data):
            return kind
    raise ValueError(f"is not a {ANY_KIND}: it begins with {data[:8]!r}")


def read_header(data: bytes) -> Header:
    """Returns the header of a picture; ValueError where it is bad."""
    kind = kind_of(data)
    if kind == "PNG" and (
        data[12:16] != b"IHDR" or zlib.crc32(data[12:29]).to_bytes(4, "big") != data[29:33]
    ):
        raise ValueError("is a damaged PNG (its header is cut or has another checksum)")
    if kind == "PNG":
        width, height = (int.from_bytes(data[start : start + 4], "big") for start in (16, 20))
    elif kind == "JPEG":
        height, width = _jpeg_size(data)
    else:
        try:
            with Image.open(BytesIO(data), formats=[kind]) as image:
                width, height = image.size
        except PILLOW_ERRORS as fault:
            raise _damaged(kind, fault) from None
    if not 0 < height * width <= MAX_PIXELS:
        raise ValueError(f"must have 1 to {MAX_PIXELS:,} pixels, got {height} × {width}")
    if orientation(data) >= TRANSPOSED:
        height, width = width, height
    return Header(kind, height, width)


def _damaged(kind: Kind, fault: Exception) -> ValueError:
    unknown = isinstance(fault, UnidentifiedImageError)
    return ValueError(f"is a damaged {kind} ({'its header cannot be read' if unknown else fault})")


def orientation(data: bytes) -> int:
    """Returns a picture's orientation by EXIF or XMP, 1 to 8; 1 is upright, or says nothing."""
    kind = kind_of(data)
    if kind == "JPEG" and not _segments(data)[0]:
        return 1
    if kind not in ("JPEG", "PNG", "WEBP"):  # a TIFF is turned by Pillow
        return 1
    chunks = _png_chunks(data) if kind == "PNG" else []
    searched = b"".join(body for _, body in chunks) if kind == "PNG" else data
    if all(mark not in searched for mark in ORIENTATION):
        return 1
    try:
        if chunk := next((body for name, body in chunks if name == b"eXIf"), b""):
            exif = Image.Exif()
            exif.load(b"Exif\0\0" + chunk)
        else:
            with Image.open(BytesIO(data), formats=[kind]) as image:
                exif = image.getexif()
        number = exif.get(ExifTags.Base.Orientation, 1)
    except PILLOW_ERRORS:  # broken, in a sound picture
        return 1
    return number if number in UPRIGHT else 1


def _png_chunks(data: bytes) -> list[tuple[bytes, bytes]]:
    """Returns the names and bytes of the chunks of a PNG that are not of its pixels."""
    offset, chunks = len(PNG), []
    while offset + 12 <= len(data):
        length, name = struct.unpack(">I4s", data[offset : offset + 8])
        if name != b"IDAT":
            chunks.append((name, data[offset + 8 : offset + 8 + length]))
        offset += 12 + length
    return chunks


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
    except PILLOW_ERRORS:
        pass
    raise damaged


def shape_of(headers: Iterable[Header]) -> tuple[int, int, int]:
    """Returns the shape of the decoded pictures; -1 for a height or width that varies."""
    axes = map(set, zip(*((header.height, header.width) for header in headers), strict=True))
    height, width = (axis.pop() if len(axis) == 1 else -1 for axis in axes)
    return height, width, 3


class Checked(NamedTuple):
    """What was found of many pictures: their shape, their suffix in a tar, and what the bad lack.

    `faults` says what is wrong with each bad one, by its name.
    """

    shape: tuple[int, int, int]
    member: str | None
    faults: dict[str, str]


def check_pictures(payloads: Iterable[tuple[str, Any]]) -> Checked:
    """Checks pictures, by name, from their first byte to their last; raises nothing."""
    headers, faults = set[Header](), dict[str, str]()
    for name, data in payloads:
        if not isinstance(data, bytes):
            found = short_repr(data)
            faults[name] = f"has {found} instead of the bytes of a picture"
            continue
        try:
            headers.add(read_complete_header(data))
        except ValueError as fault:
            faults[name] = str(fault)
    shape = shape_of(headers) if headers else (-1, -1, 3)
    kinds = {header.kind for header in headers}
    kind = kinds.pop() if len(kinds) == 1 else "JPEG"  # readers go by the bytes, not by the name
    return Checked(shape, None if kind == "JPEG" else kind.lower(), faults)


def read_complete_header(data: bytes) -> Header:
    """Returns the header of a complete picture; ValueError where it is damaged or cut.

    The file may continue after the picture. The checksums of a PNG are compared; what is neither a
    PNG nor a JPEG is decoded.
    """
    header = read_header(data)
    if header.kind not in ("JPEG", "PNG"):
        pixels(data)
    elif not (_is_whole_jpeg if header.kind == "JPEG" else _is_whole_png)(data):
        raise ValueError(f"is cut short; it must be a whole {header.kind}")
    return header


def decode(data: bytes) -> NDArray[np.uint8]:
    """Returns the pixels [height, width, 3] of a whole picture; ValueError where it is damaged."""
    header = (read_complete_header if data.startswith((JPEG, PNG)) else read_header)(data)
    picture = pixels(data)
    if picture.shape != (header.height, header.width, 3):
        raise ValueError(f"decodes to {picture.shape}, not the size in its header")
    return picture


def pixels(data: bytes, least: Sequence[int] = (0, 0)) -> NDArray[np.uint8]:
    """Returns the pixels [height, width, 3] of a picture, upright, RGB, transparency on white.

    A JPEG is decoded at 1/2, 1/4 or 1/8 of its size where that is no less than the height and
    width in `least`, unless these are 0. Of several pictures in a file it is the first.

    Raises:
        ValueError: it is of no kind in `MAGIC`, or damaged.
    """
    kind, number = kind_of(data), orientation(data)
    try:
        if kind == "JPEG" and _segments(data)[1] != 4:
            height, width = reversed(least) if number >= TRANSPOSED else least
            picture = simplejpeg.decode_jpeg(data, min_height=height, min_width=width)
        else:
            picture = _by_pillow(data, kind)
    except PILLOW_ERRORS as fault:
        raise _damaged(kind, fault) from None
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


def _by_pillow(data: bytes, kind: Kind) -> NDArray[np.uint8]:
    with Image.open(BytesIO(data), formats=[kind]) as image:
        if kind == "PNG":
            width, height = (int.from_bytes(data[i : i + 4], "big") for i in (16, 20))
            if image.size != (width, height):
                raise ValueError("it has two headers, of two sizes")
        if image.width * image.height > MAX_PIXELS:
            raise ValueError(
                f"of {image.height} × {image.width}, and the limit is {MAX_PIXELS:,} pixels"
            )
        if image.mode.startswith("I;16"):  # grey: the high byte, as Pillow takes of 16-bit colours
            values = np.asarray(image)
            grey = (values >> 8).astype(np.uint8)
            grey[values == image.info.get("transparency", -1)] = 255
            return np.repeat(grey[..., None], 3, 2)
        if image.mode in ("I", "F"):
            raise ValueError(f"a {kind} of 32 bits a value; 8 or 16 can be read")
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
