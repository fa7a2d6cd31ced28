"""A picture has the same pixels on every path, which are Pillow's: upright, and on white."""

import json
from collections.abc import Iterator
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageCms, ImageOps

from heron.api.job import pretrain
from heron.cli.main import main
from heron.data.pictures import PictureDecoder
from heron.data.reader import Reader
from heron.retrieval.embeddings import Embeddings
from heron.retrieval.file_reader import upright_picture
from heron.retrieval.pictures import SamplePictures
from heron.shards.picture import decode, orientation, read_header, shape_of
from tests.experiments import frames

pytestmark = pytest.mark.filterwarnings("ignore:Corrupt EXIF")
SIZE = 24, 16  # width and height


def drawn(seed: int, mode: str = "RGB", size: tuple[int, int] = SIZE) -> Image.Image:
    """Blocks of colour, different for each seed."""
    draw = np.random.default_rng(seed)
    channels = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4, "CMYK": 4}[mode]
    blocks = draw.integers(0, 256, (size[1] // 4, size[0] // 4, channels))
    values = np.kron(blocks, np.ones((4, 4, 1))).astype(np.uint8)
    return Image.fromarray(values[..., 0] if channels == 1 else values, mode)


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    stream = BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def turned(number: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = number
    return exif


def late_exif(data: bytes, number: int) -> bytes:
    """A PNG whose EXIF follows its pixels."""
    donor = saved(drawn(0), "PNG", exif=turned(number))
    start = donor.index(b"eXIf") - 4
    length = int.from_bytes(donor[start : start + 4], "big") + 12
    end = data.index(b"IEND") - 4
    return data[:end] + donor[start : start + length] + data[end:]


@cache
def odd() -> dict[str, tuple[str, bytes]]:
    """Odd pictures by name: the suffix of the file, and its bytes."""
    files: dict[str, tuple[str, bytes]] = {}

    def put(name: str, kind: str, image: Image.Image, **options: Any) -> None:
        files[name] = "jpg" if kind == "JPEG" else "png", saved(image, kind, **options)

    for number in range(1, 9):
        put(f"turned-{number}", "JPEG", drawn(number), exif=turned(number), quality=95)
        put(f"png-turned-{number}", "PNG", drawn(number), exif=turned(number))
    seed = iter(range(100, 200))
    for sampling in (0, 1, 2):
        put(f"sampling-{sampling}", "JPEG", drawn(next(seed)), subsampling=sampling, quality=70)
        cmyk = drawn(next(seed), "CMYK")
        put(f"cmyk-{sampling}", "JPEG", cmyk, subsampling=sampling, quality=90)
    put("cmyk-turned", "JPEG", drawn(next(seed), "CMYK"), exif=turned(6))
    put("progressive", "JPEG", drawn(next(seed)), progressive=True)
    put("progressive-turned", "JPEG", drawn(next(seed)), progressive=True, exif=turned(8))
    put("grey", "JPEG", drawn(next(seed), "L"))
    put("grey-turned", "JPEG", drawn(next(seed), "L"), exif=turned(5))
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    put("icc", "JPEG", drawn(next(seed)), icc_profile=profile)
    put("icc-turned", "JPEG", drawn(next(seed)), icc_profile=profile, exif=turned(3))
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><r tiff:Orientation="6"/></x:xmpmeta>'
    put("xmp", "JPEG", drawn(next(seed)), xmp=xmp)
    put("orientation-9", "JPEG", drawn(next(seed)), exif=turned(9))
    broken = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0"
    put("exif-broken", "JPEG", drawn(next(seed)), exif=broken)
    put("comment", "JPEG", drawn(next(seed)), comment=b"tiff:Orientation")

    put("png-grey", "PNG", drawn(next(seed), "L"))
    put("png-grey-alpha", "PNG", drawn(next(seed), "LA"))
    put("png-alpha", "PNG", drawn(next(seed), "RGBA"))
    put("png-alpha-turned", "PNG", drawn(next(seed), "RGBA"), exif=turned(7))
    put("png-palette", "PNG", drawn(next(seed)).quantize(8))
    palette = drawn(next(seed)).quantize(8)
    put("png-palette-clear", "PNG", palette, transparency=0)
    put("png-palette-alphas", "PNG", palette.copy(), transparency=bytes([0, 90, 180, 255, 7]))
    put("png-one-bit", "PNG", drawn(next(seed), "L").convert("1"))
    put("png-key", "PNG", drawn(next(seed)), transparency=(1, 2, 3))
    grey = drawn(next(seed), "L")
    put("png-grey-key", "PNG", grey, transparency=int(np.asarray(grey)[0, 0]))
    put("png-interlaced-icc", "PNG", drawn(next(seed)), icc_profile=profile)
    files["png-late-exif"] = "png", late_exif(saved(drawn(next(seed)), "PNG"), 6)
    return files


def by_pillow(data: bytes) -> NDArray[np.uint8]:
    """What a person sees: upright, and on white."""
    with Image.open(BytesIO(data)) as image:
        image.load()
        upright = ImageOps.exif_transpose(image)
    if not upright.has_transparency_data:
        return np.asarray(upright.convert("RGB"))
    white = Image.new("RGBA", upright.size, (255, 255, 255, 255))
    return np.asarray(Image.alpha_composite(white, upright.convert("RGBA")).convert("RGB"))


def test_there_are_forty_and_they_are_odd() -> None:
    assert len(odd()) >= 40
    hidden = Image.open(BytesIO(odd()["png-alpha"][1])).convert("RGB")
    assert not np.array_equal(np.asarray(hidden), by_pillow(odd()["png-alpha"][1]))


@pytest.mark.parametrize("name", odd())
def test_pixels_are_pillows(name: str) -> None:
    _, data = odd()[name]
    expected = by_pillow(data)
    height, width, channels = expected.shape
    np.testing.assert_array_equal(decode(data), expected)
    header = read_header(data)
    assert (header.height, header.width) == (height, width)
    assert shape_of([header]) == expected.shape
    for varying in (False, True):  # what training and embedding read
        stored = (-1, -1, 3) if varying else (height, width, channels)
        side = min(height, width)
        shape = (side, side, channels) if varying else stored
        out = np.zeros(shape, np.uint8)
        PictureDecoder(stored, shape, varying).decode(data, out)
        top, left = (height - shape[0]) // 2, (width - shape[1]) // 2
        np.testing.assert_array_equal(
            out, expected[top : top + shape[0], left : left + shape[1]], str(varying)
        )
    np.testing.assert_array_equal(np.asarray(upright_picture(data, name)), expected)
    assert orientation(data) in range(1, 9)


@pytest.mark.parametrize("name", ["turned-6", "progressive", "png-alpha-turned", "cmyk-1"])
def test_a_cut_file_is_refused(name: str) -> None:
    _, data = odd()[name]
    for end in (len(data) // 2, len(data) * 3 // 4):
        with pytest.raises(ValueError, match="damaged|cut short"):
            decode(data[:end])


@pytest.fixture(scope="module", params=["jpg", "png"])
def searched(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """A folder of odd pictures, built, trained on, embedded and indexed."""
    place = tmp_path_factory.mktemp(request.param)
    files = {name: data for name, (kind, data) in odd().items() if kind == request.param}
    for number, (name, data) in enumerate(files.items()):
        folder = place / "pictures" / f"class-{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.{request.param}").write_bytes(data)
    words = ["--folder", str(place / "pictures"), "--out", str(place / "data"), "--quiet"]
    assert main(["shards", "build", "folder", *words]) == 0
    assert main(["shards", "verify", str(place / "data"), "--decode"]) == 0
    view = {"stored": "image", "size": 16}
    config = frames(
        place,
        data={
            "path": str(place / "data"), "build": None, "split": "all", "window_rows": 16,
            "protocol": {"labelled": 12, "test": "unlabelled"}, "views": [view, view],
            "batch": {"labelled": 6, "unlabelled": 4}, "standardise": False,
        },
        model={"encoder": {"kind": "convnet", "channels": [4], "widths": [8]}},
    )  # fmt: skip
    pretrain(config)
    assert main(["embed", str(place / "run"), "--out", str(place / "emb"), "--quiet"]) == 0
    words = [str(place / "emb"), "--out", str(place / "index"), "--kind", "flat", "--quiet"]
    assert main(["index", *words]) == 0
    yield place


def test_each_indexed_picture_is_its_own_nearest(
    searched: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the bytes that were indexed: training, embedding and query decode alike."""
    for path in sorted((searched / "pictures").rglob("*.*")):
        capsys.readouterr()
        words = ["--file", str(path), "--k", "1", "--format", "json"]
        assert main(["query", str(searched / "index"), *words]) == 0
        (hit,) = json.loads(capsys.readouterr().out)["hits"]
        assert hit["score"] == pytest.approx(1, abs=1e-6)
        same = by_pillow(path.read_bytes())
        key = f"{path.parent.name}-{path.stem}"
        if hit["key"] != key:  # another file with the same pixels
            other = next((searched / "pictures").rglob(f"{hit['key'].split('-', 2)[2]}.*"))
            np.testing.assert_array_equal(by_pillow(other.read_bytes()), same)


def test_the_page_shows_what_was_embedded(searched: Path) -> None:
    samples = Embeddings.open(searched / "emb").samples
    pictures = SamplePictures(Reader(searched / "data"))
    files = {path.stem: path.read_bytes() for path in (searched / "pictures").rglob("*.*")}
    assert len(samples) == len(files)
    for number in range(len(samples)):
        shown = pictures.of(samples, number)
        name = samples.key(number).split("-", 2)[2]
        np.testing.assert_array_equal(np.asarray(shown), by_pillow(files[name]), name)
