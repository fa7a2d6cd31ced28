"""Pictures that are cut, damaged, or go on after their end."""

from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from heron.shards.picture import decode, read_complete_header, read_header

SHAPE = (48, 40, 3)
NOISE = np.random.default_rng(0).integers(0, 256, SHAPE).astype(np.uint8)


def picture(kind: str, **options: object) -> bytes:
    stream = BytesIO()
    Image.fromarray(NOISE).save(stream, kind, **options)
    return stream.getvalue()


THUMBNAIL = Image.Exif()
THUMBNAIL[0x9C9B] = picture("JPEG", quality=20)  # a whole JPEG within the header
KINDS = {
    "plain": picture("JPEG"),
    "progressive": picture("JPEG", progressive=True, optimize=True),
    "restarts": picture("JPEG", restart_marker_blocks=2),
    "thumbnail": picture("JPEG", exif=THUMBNAIL),
    "png": picture("PNG"),
}


@pytest.mark.parametrize("name", KINDS)
def test_every_cut_is_found(name: str) -> None:
    data = KINDS[name]
    header = read_complete_header(data)
    assert (header.height, header.width) == SHAPE[:2] and decode(data).shape == SHAPE
    assert read_complete_header(data + b"what a camera adds\xff") == header
    begins = data.rindex(b"IDAT" if name == "png" else b"\xff\xda")
    assert read_header(data[: begins + 20]) == header  # a header tells nothing of a cut
    for length in range(begins + 20, len(data), 7):
        with pytest.raises(ValueError, match=f"is cut short; it must be a whole {header.kind}"):
            read_complete_header(data[:length])
    with pytest.raises(ValueError, match="is cut short"):
        read_complete_header(data[:-1])


def test_what_decodes_to_nothing() -> None:
    data = KINDS["plain"]
    scan = data.index(b"\xff\xda")
    with pytest.raises(ValueError, match="is a damaged JPEG"):
        read_complete_header(data[:scan] + data[-2:])  # an end, and no pixels before it
    with pytest.raises(ValueError, match="is a damaged JPEG"):
        decode(data[: scan + 200] + data[-2:])
    png = KINDS["png"]
    with pytest.raises(ValueError, match="damaged PNG .its part b'IDAT' has another checksum"):
        read_complete_header(png[:90] + bytes([png[90] ^ 1]) + png[91:])


def test_an_end_within_a_table_is_none(tmp_path: Path) -> None:
    data = KINDS["plain"]
    comment = b"\xff\xfe\x00\x06\xff\xda\xff\xd9"
    marked = data[:2] + comment + data[2:]
    assert read_complete_header(marked) == read_complete_header(data)
    with pytest.raises(ValueError, match="is cut short"):
        read_complete_header(marked[:-2])
