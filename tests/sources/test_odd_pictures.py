"""Odd pictures, mixed, through every source that reads files, against Pillow; and bad ones."""

import io
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps

from heron.base.errors import ShardError, SourceError
from heron.cli.main import main
from heron.data.pictures import PictureDecoder
from heron.data.reader import Reader
from heron.shards.manifest import load_manifest
from heron.shards.picture import MAX_PIXELS, decode, pixels, read_complete_header
from heron.shards.verify import verify
from heron.sources import make_source
from tests.retrieval.test_one_decoder import by_pillow, drawn, saved, turned

WIDE = np.arange(16 * 24, dtype=np.uint16).reshape(16, 24) * 170


def odd() -> Iterator[tuple[str, bytes]]:
    """The name and bytes of each: all are 16 high and 24 wide once they are upright."""
    picture, clear = drawn(1), drawn(2, "RGBA")
    on_side = drawn(3, size=(16, 24))
    yield "plain.jpg", saved(picture, "JPEG")
    yield "capitals.JPEG", saved(picture, "JPEG", quality=60)
    yield "old name.jfif", saved(picture, "JPEG", progressive=True)
    yield "cmyk.jpg", saved(drawn(4, "CMYK"), "JPEG")
    yield "turned.jpg", saved(on_side, "JPEG", exif=turned(6))
    yield "a png by name.jpg", saved(picture, "PNG")
    yield "clear.png", saved(clear, "PNG")
    yield "turned.png", saved(on_side, "PNG", exif=turned(8))
    yield "palette.png", saved(picture.quantize(9), "PNG", transparency=0)
    yield "lossless.webp", saved(picture, "WEBP", lossless=True)
    yield "clear.webp", saved(clear, "WEBP", lossless=True, exact=True)
    yield "turned.webp", saved(on_side, "WEBP", lossless=True, exif=turned(6))
    yield "moves.webp", saved(picture, "WEBP", save_all=True, append_images=[drawn(5)])
    yield "still.gif", saved(picture.quantize(16), "GIF")
    yield "moves.gif", saved(picture.quantize(8), "GIF", save_all=True, append_images=[drawn(6)])
    yield "clear.gif", saved(picture.quantize(8), "GIF", transparency=1)
    yield "plain.tif", saved(picture, "TIFF")
    yield "lzw.tiff", saved(picture, "TIFF", compression="tiff_lzw")
    yield "pages.tif", saved(picture, "TIFF", save_all=True, append_images=[drawn(7)])
    yield "turned.tif", saved(on_side, "TIFF", exif=turned(6))
    yield "cmyk.tif", saved(drawn(8, "CMYK"), "TIFF")
    yield "one bit.tif", saved(drawn(9, "L").convert("1"), "TIFF", compression="group4")
    yield "plain.bmp", saved(picture, "BMP")
    yield "palette.bmp", saved(picture.quantize(7), "BMP")


def wide() -> Iterator[tuple[str, bytes]]:
    """Grey of 16 bits, which Pillow would cut."""
    yield "wide.png", saved(Image.fromarray(WIDE), "PNG")
    yield "wide.tif", saved(Image.fromarray(WIDE), "TIFF")


FILES = dict([*odd(), *wide()])


def seen(name: str) -> NDArray[np.uint8]:
    if name.startswith("wide"):
        return np.repeat((WIDE // 256).astype(np.uint8)[..., None], 3, 2)
    if name.endswith((".jpg", ".JPEG", ".jfif")) and not name.startswith(("cmyk", "a png")):
        return decode(FILES[name])  # by simplejpeg; Pillow may differ by a few grey levels
    if name == "turned.tif":  # Pillow turns it as it loads it
        return np.asarray(Image.open(io.BytesIO(FILES[name])).convert("RGB"))
    return by_pillow(FILES[name])


def write(folder: Path) -> Path:
    for name, data in FILES.items():
        (folder / "kind").mkdir(parents=True, exist_ok=True)
        (folder / "kind" / name).write_bytes(data)
    return folder


def check(shards: Path, names: list[str]) -> None:
    assert verify(shards, decode=True).ok
    reader = Reader(shards)
    found = reader.read("image", np.arange(len(names)))
    for name, picture in zip(names, found, strict=True):
        np.testing.assert_array_equal(picture, seen(name), err_msg=name)


def test_mixed_in_one_folder_and_in_one_zip(tmp_path: Path) -> None:
    folder = write(tmp_path / "pets")
    with zipfile.ZipFile(tmp_path / "pets.zip", "w") as archive:
        for name, data in FILES.items():
            archive.writestr(f"pets/kind/{name}", data)
        archive.writestr("__MACOSX/pets/._x.jpg", b"")
    for given, out in ((folder, "a"), (tmp_path / "pets.zip", "b")):
        words = ["shards", "build", "folder", "--folder", str(given), "--out"]
        assert main([*words, str(tmp_path / out), "--workers", "2", "--quiet"]) == 0
        check(tmp_path / out, sorted(FILES))
    assert load_manifest(tmp_path / "b").views == load_manifest(tmp_path / "a").views
    assert load_manifest(tmp_path / "b").dataset == "pets"


def test_mixed_in_one_parquet_and_in_one_tar(tmp_path: Path) -> None:
    pq.write_table(pa.table({"image": list(FILES.values())}), tmp_path / "a.parquet")
    words = ["shards", "build", "parquet", "--data", str(tmp_path / "a.parquet")]
    assert main([*words, "--image", "image", "--out", str(tmp_path / "p"), "--quiet"]) == 0
    check(tmp_path / "p", list(FILES))
    (tars := tmp_path / "tars").mkdir()
    with tarfile.open(tars / "a.tar", "w") as tar:
        for number, (name, data) in enumerate(FILES.items()):
            member = tarfile.TarInfo(f"{number}.{name.rpartition('.')[2].lower()}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    assert main(["shards", "index", str(tars), "--image", ANY, "--quiet"]) == 0
    check(tars, list(FILES))


ANY = "jpg,jpeg,jfif,png,webp,gif,tif,tiff,bmp"


def test_training_draws_them_to_size_as_it_shows_them() -> None:
    decoder = PictureDecoder((-1, -1, 3), (16, 16, 3), varying=True)
    whole = PictureDecoder((16, 24, 3), (16, 24, 3))
    for name, data in FILES.items():
        out, square = np.zeros((16, 24, 3), np.uint8), np.zeros((16, 16, 3), np.uint8)
        whole.decode(data, out)
        np.testing.assert_array_equal(out, seen(name), err_msg=name)
        decoder.decode(data, square)
        np.testing.assert_array_equal(square, seen(name)[:, 4:20], err_msg=name)


def test_a_folder_of_one_kind_keeps_its_suffix(tmp_path: Path) -> None:
    for seed in range(3):
        (tmp_path / "x" / "a").mkdir(parents=True, exist_ok=True)
        (tmp_path / "x" / "a" / f"{seed}.webp").write_bytes(saved(drawn(seed), "WEBP"))
    assert make_source("folder", {"folder": tmp_path / "x"}).views[0].member == "webp"


def bomb(kind: str) -> bytes:
    """A header that claims 60,000 x 60,000 pixels, and next to nothing behind it."""
    data = bytearray(saved(drawn(1), kind))
    side = 60_000
    if kind == "GIF":
        data[6:10] = side.to_bytes(2, "little") * 2
    elif kind == "BMP":
        data[18:26] = side.to_bytes(4, "little") * 2
    else:  # TIFF: the values of its tags 256 and 257
        image = Image.open(io.BytesIO(data))
        for tag in (256, 257):
            at = data.index(tag.to_bytes(2, "little") + b"\4\0\1\0\0\0", 4)
            data[at + 8 : at + 12] = side.to_bytes(4, "little")
        image.close()
    return bytes(data)


@pytest.mark.parametrize("kind", ["GIF", "BMP", "TIFF"])
def test_no_bomb_is_set_off(kind: str) -> None:
    for read in (read_complete_header, pixels, decode):
        with pytest.raises(ValueError, match=f"pixels|{MAX_PIXELS}"):
            read(bomb(kind))


@pytest.mark.parametrize("name", [n for n in FILES if not n.endswith(("jpg", "JPEG", "jfif"))])
def test_a_file_that_is_cut_is_damaged_and_named_so(name: str) -> None:
    data = FILES[name]
    with pytest.raises(ValueError, match="is (a damaged|cut short)"):
        read_complete_header(data[: len(data) // 4])


@pytest.mark.parametrize("kind", ["PPM", "PCX", "TGA", "ICO", "SGI", "JPEG2000"])
def test_other_readers_of_pillow_are_given_nothing(kind: str) -> None:
    with pytest.raises(
        ValueError, match="is not a JPEG, PNG, WebP, GIF, TIFF or BMP: it begins with"
    ):
        pixels(saved(drawn(1), kind))


def test_values_of_32_bits_are_refused() -> None:
    data = saved(Image.fromarray(np.ones((4, 5), np.float32)), "TIFF")
    with pytest.raises(ValueError, match="a TIFF of 32 bits a value; 8 or 16 can be read"):
        read_complete_header(data)


def damage(folder: Path, count: int) -> None:
    for number in range(count):
        (folder / "kind" / f"bad {number:02}.jpg").write_bytes(b"<html>")


def test_all_bad_files_are_named_at_once_and_may_be_left_out(tmp_path: Path) -> None:
    folder = write(tmp_path / "pets")
    damage(folder, 14)
    (folder / "kind" / "Thumbs.db").write_bytes(b"x")
    with pytest.raises(SourceError) as raised:
        _ = make_source("folder", {"folder": folder}).splits
    message = str(raised.value)
    assert (
        "kind/Thumbs.db is not a picture" in message
        and "bad 08.jpg is not a JPEG, PNG, WebP, GIF, TIFF or BMP: it begins with b'<html>'"
        in message
    )
    assert "; and 5 more; " in message and message.endswith(" what is bad with `--on-error skip`")
    words = ["shards", "build", "folder", "--folder", str(folder), "--on-error", "skip"]
    out = tmp_path / "out"
    assert main([*words, "--out", str(out), "--workers", "2", "--shard-rows", "8"]) == 0
    check(out, sorted(FILES))
    skipped = load_manifest(out).skipped
    assert skipped is not None and skipped.count == 15 and len(skipped.first) == 15
    assert "kind/bad 13.jpg is not a JPEG, PNG" in skipped.first[-1]


def test_bad_rows_of_parquet_captions_and_tars(tmp_path: Path) -> None:
    good = list(FILES.values())[:6]
    (folder := tmp_path / "birds").mkdir()
    for number, data in enumerate([*good, b"<html>", b"\xff\xd8"]):
        (folder / f"{number}.jpg").write_bytes(data)
        (folder / f"{number}.txt").write_text(f"bird {number}")
    (folder / "alone.txt").write_text("alone")
    pq.write_table(
        pa.table({"image": [good[0], None, *good[1:], b"<html>"], "y": [*range(8)]}),
        tmp_path / "a.parquet",
    )
    (tars := tmp_path / "tars").mkdir()
    for name in "ab":
        with tarfile.open(tars / f"{name}.tar", "w") as tar:
            for number, data in enumerate([good[0], b"<html>", b"GIF89a"]):
                member = tarfile.TarInfo(f"{name}{number}.jpg")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    builds: list[tuple[list[str], Path, int, list[str]]] = [
        (["build", "captions", "--folder", str(folder)], tmp_path / "c", 6, ["6.jpg", "alone"]),
        (
            ["build", "parquet", "--data", str(tmp_path / "a.parquet"), "--image", "image"]
            + ["--label", "y"],
            tmp_path / "p",
            6,
            ["row 1 has None instead", "row 7 is not a JPEG"],
        ),
        (["index", str(tars), "--image", "jpg"], tars, 2, ["a.tar sample a1", "b.tar sample b2"]),
    ]
    for words, out, rows, names in builds:
        into = ["--out", str(out)] if words[0] == "build" else []
        with pytest.raises((SourceError, ShardError)) as raised:
            run(*words, *into)
        assert all(name in str(raised.value) for name in names)
        run(*words, *into, "--on-error", "skip")
        manifest = load_manifest(out)
        assert manifest.rows("all") == rows and manifest.skipped is not None
        assert all(name in "\n".join(manifest.skipped.first) for name in names)
        assert verify(out, decode=True).ok
    assert Reader(tmp_path / "p").labels(np.arange(6)).tolist() == [0, 2, 3, 4, 5, 6]


def run(*words: str) -> Any:
    from heron.cli import shards

    verb, source, *rest = words
    pairs = {
        key[2:].replace("-", "_"): value for key, value in zip(rest[::2], rest[1::2], strict=True)
    }
    if verb == "index":
        return shards.index_tars(
            Path(source), image=[pairs["image"]], quiet=True, **dict[str, Any](only(pairs))
        )
    options: dict[str, Any] = {**pairs, "out": Path(pairs["out"]), "quiet": True}
    for key in ("data", "image", "label"):
        options |= {key: [options[key]]} if key in options else {}
    return shards.build_shards(source, **options)


def only(pairs: dict[str, str]) -> dict[str, str]:
    return {"on_error": pairs["on_error"]} if "on_error" in pairs else {}


def test_upright_on_white_is_what_pillow_says() -> None:
    for name in ("turned.jpg", "turned.png", "turned.webp"):
        image = ImageOps.exif_transpose(Image.open(io.BytesIO(FILES[name])))
        assert np.abs(np.asarray(image.convert("RGB"), int) - decode(FILES[name])).max() < 4
