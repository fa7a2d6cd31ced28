"""Pictures are decoded at the size that the views need, or refused by name."""

import zlib
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from heron.base.errors import ConfigError
from heron.data.options import ModelView as Asked
from heron.data.pictures import PictureDecoder, input_shape, picture_decoder
from heron.shards.manifest import View

SMOOTH = np.add.outer(np.arange(60), np.arange(90)).astype(np.uint8)[..., None].repeat(3, 2)


def stored(*shape: int) -> View:
    return View(name="image", kind="image", shape=(*shape, 3), dtype="uint8")


def asked(**options: Any) -> Asked:
    return Asked.model_validate({"stored": "image", **options})


def jpeg(picture: np.ndarray = SMOOTH) -> bytes:
    return bytes(simplejpeg.encode_jpeg(np.ascontiguousarray(picture), quality=95))


def png(picture: np.ndarray = SMOOTH, mode: str | None = None) -> bytes:
    stream = BytesIO()
    image = Image.fromarray(picture)
    (image.convert(mode) if mode else image).save(stream, "PNG")
    return stream.getvalue()


def decoded(which: PictureDecoder, data: bytes) -> np.ndarray:
    out = np.zeros(which.shape, np.uint8)
    which.decode(data, out)
    return out


@pytest.mark.parametrize(
    ("views", "shape"),
    [
        ([{"size": 100}], (218, 178)),  # a half has only 89 columns
        ([{"size": 64}], (109, 89)),
        ([{"size": 44}], (55, 45)),  # a quarter of 178 is 45
        ([{"size": 20}], (28, 23)),
        ([{"size": 64, "augment": ["crop"]}], (218, 178)),  # the least crop is 124 wide; half is 62
        ([{"size": 62, "augment": ["crop"]}], (109, 89)),
        ([{"size": 62, "augment": [{"crop": {"area": [0.08, 1.0]}}]}], (218, 178)),
        ([{"size": 20}, {"size": 62, "augment": ["crop"]}], (109, 89)),
        ([{}], (218, 178)),
    ],
)
def test_a_draft_enlarges_no_view(views: list[dict[str, Any]], shape: tuple[int, int]) -> None:
    found = picture_decoder(stored(218, 178), [asked(**view) for view in views], True, None)
    assert found.shape == (*shape, 3)
    whole = picture_decoder(stored(218, 178), [asked(**view) for view in views], False, None)
    assert whole.shape == (218, 178, 3)


def test_a_draft_is_the_picture_made_smaller() -> None:
    half = decoded(PictureDecoder((60, 90, 3), (30, 45, 3)), jpeg())
    expected = SMOOTH.reshape(30, 2, 45, 2, 3).mean((1, 3))
    assert np.abs(half - expected).max() < 3
    from_png = decoded(PictureDecoder((60, 90, 3), (30, 45, 3)), png())
    assert np.abs(from_png[2:-2, 2:-2] - expected[2:-2, 2:-2]).max() < 3


def test_whole_pictures_are_what_was_stored() -> None:
    whole = PictureDecoder((60, 90, 3), (60, 90, 3))
    assert np.array_equal(decoded(whole, png()), SMOOTH)
    assert np.array_equal(decoded(whole, jpeg()), simplejpeg.decode_jpeg(jpeg()))
    assert np.array_equal(decoded(whole, png(mode="L")), SMOOTH)  # grey becomes RGB
    grey = bytes(simplejpeg.encode_jpeg(SMOOTH[..., :1].copy(), 95, "GRAY", "Gray"))
    assert np.abs(decoded(whole, grey).astype(int) - SMOOTH).max() < 3


@pytest.mark.parametrize("encode", [jpeg, png])
def test_pictures_of_several_sizes_come_to_one(encode: Any) -> None:
    square = PictureDecoder((-1, -1, 3), (20, 20, 3), varying=True)
    out = decoded(square, encode())
    centre = SMOOTH[:, 15:75].reshape(20, 3, 20, 3, 3).mean((1, 3))
    assert np.abs(out[2:-2, 2:-2] - centre[2:-2, 2:-2]).max() < 4
    small = decoded(square, encode(SMOOTH[:8, :9]))  # enlarged
    assert small.shape == (20, 20, 3)


def test_the_decode_size_of_several_sizes() -> None:
    views = [asked(size=224), asked(size=[96, 96])]
    assert picture_decoder(stored(-1, -1), views, True, None).shape == (256, 256, 3)
    assert picture_decoder(stored(-1, 50), views, True, 300).shape == (300, 300, 3)
    with pytest.raises(
        ConfigError, match="data\\.decode_size must be at least the views' size 224, got 100"
    ):
        picture_decoder(stored(-1, -1), views, True, 100)
    assert picture_decoder(stored(-1, -1), views, False, None) != picture_decoder(
        stored(-1, -1), views, True, None
    )


@pytest.mark.parametrize(
    ("data", "varying", "message"),
    [
        (b"<html>", False, "JPEG, PNG, WebP, GIF, TIFF or BMP: it begins with b'<html>'"),
        (b"", False, "begins with b''"),
        (jpeg()[:400], False, "is a damaged JPEG"),
        (jpeg()[:-200], False, r"is a damaged JPEG \(Premature end of JPEG file\)"),
        (png()[:-60], False, r"is a damaged PNG \(.*runcated"),
        (jpeg(SMOOTH[:50]), False, "is 50 × 90, but the manifest says 60 × 90"),
        (png(SMOOTH[:50]), False, "is 50 × 90, but the manifest says 60 × 90"),
        (b"GIF89a", True, "is a damaged GIF .its header cannot be read"),
    ],
)
def test_bad_pictures(data: bytes, varying: bool, message: str) -> None:
    which = (
        PictureDecoder((-1, -1, 3), (20, 20, 3), True)
        if varying
        else PictureDecoder((60, 90, 3), (60, 90, 3))
    )
    with pytest.raises(ValueError, match=message):
        decoded(which, data)


def test_a_bomb_is_not_set_off() -> None:
    """A header that claims 60,000 x 60,000 pixels: refused before a pixel is decoded."""
    data = bytearray(jpeg())
    at = data.index(b"\xff\xc0")  # start of frame: length, precision, height, width
    data[at + 5 : at + 9] = (60000).to_bytes(2, "big") * 2
    with pytest.raises(ValueError, match="must have 1 to 134,217,728 pixels, got 60000 × 60000"):
        decoded(PictureDecoder((-1, -1, 3), (20, 20, 3), True), bytes(data))
    with pytest.raises(ValueError, match="pixels, got 60000 × 60000"):
        decoded(PictureDecoder((60, 90, 3), (60, 90, 3)), bytes(data))
    picture = bytearray(png())
    picture[16:24] = (60000).to_bytes(4, "big") * 2
    picture[29:33] = zlib.crc32(picture[12:29]).to_bytes(4, "big")  # of the header
    with pytest.raises(ValueError, match="must have 1 to 134,217,728 pixels, got 60000 × 60000"):
        decoded(PictureDecoder((-1, -1, 3), (20, 20, 3), True), bytes(picture))


def test_a_png_with_two_headers_is_refused() -> None:
    """The first is checked; the last is what a decoder would believe."""
    data = png()
    chunk = b"IHDR" + (5000).to_bytes(4, "big") * 2 + data[24:29]
    second = (13).to_bytes(4, "big") + chunk + zlib.crc32(chunk).to_bytes(4, "big")
    with pytest.raises(ValueError, match="is a damaged PNG"):
        decoded(PictureDecoder((60, 90, 3), (60, 90, 3)), data[:33] + second + data[33:])


def test_what_a_view_may_ask() -> None:
    grey = View(name="image", kind="image", shape=(8, 8, 1), dtype="uint8")
    vector = View(name="v", kind="vector", shape=(4,), dtype="float32")
    assert input_shape(stored(218, 178), asked(size=64)) == (64, 64, 3)
    assert input_shape(stored(218, 178), asked(size=[64, 48])) == (64, 48, 3)
    assert input_shape(stored(218, 178), asked()) == (218, 178, 3)
    assert input_shape(vector, asked(augment=["noise"])) == (4,)
    cases: list[tuple[View, dict[str, Any], str]] = [
        (vector, {"size": 4}, "data.views: size is .*, but 'image' has vectors; remove it"),
        (vector, {"augment": ["crop"]}, "'crop' does not work on vector view '"),
        (stored(8, 8), {"augment": ["noise"]}, "'noise' does not work on image view"),
        (stored(-1, -1), {}, "have several sizes; set the size of the model's input"),
        (grey, {"augment": ["color"]}, "'color' needs three channels, but 'image' has 1"),
    ]
    for view, options, message in cases:
        with pytest.raises(ConfigError, match=message):
            input_shape(view, asked(**options))
