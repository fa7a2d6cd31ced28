"""Files through the model: what `embed` wrote of a sample is what its own file gives."""

import zlib
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from heron.base.errors import CheckpointError, RetrievalError, ShardError
from heron.data.reader import Reader
from heron.retrieval import file_reader
from heron.retrieval.build import build_index
from heron.retrieval.embed import embed
from heron.retrieval.query import Retriever
from heron.shards.build import build
from heron.sources import make_source
from tests.retrieval import made
from tests.retrieval.test_query import ask

NET = {"kind": "cnn", "channels": [4, 8], "widths": None, "dropout": None}
VIEWS = {"views": [{"stored": "image"}, {"stored": "image"}], "standardise": False}
IMAGES: dict[str, Any] = {"data": VIEWS, "model": {"encoder": NET}}


def retriever(folder: Path, changes: dict[str, Any], layer: Any = "hidden") -> Retriever:
    """An index of the data set in a folder by a model that was not trained."""
    run = made.run(folder / "run", folder / "data", changes)
    found = embed(run, folder / "embeddings", progress=False)
    build_index(found, folder / "index", layer=layer, kind="flat", progress=False)
    return Retriever.open(folder / "index")


@pytest.fixture(scope="module")
def faces(tmp_path_factory: pytest.TempPathFactory) -> Retriever:
    """JPEGs of one size in tars."""
    folder = tmp_path_factory.mktemp("faces")
    options = {"train": 24, "test": 6, "size": 32}
    build(make_source("faces", options), folder / "data", progress=False)
    return retriever(folder, IMAGES)


@pytest.fixture(scope="module")
def frames(tmp_path_factory: pytest.TempPathFactory) -> Retriever:
    """Two views of vectors, standardised, each with an encoder of its own."""
    folder = tmp_path_factory.mktemp("frames")
    build(
        make_source("frames", {"train": 300, "test": 70, "classes": 4}),
        folder / "data",
        progress=False,
    )
    return retriever(folder, {}, "projection")


def file_of(found: Retriever, number: int) -> bytes:
    """The bytes of a sample's picture in its tar, found by looking for them."""
    reader, row = Reader(found.data), int(found.samples.rows[number])
    shard = int(np.searchsorted(reader.starts, row, side="right")) - 1
    index, place = reader.indexes[shard], row - int(reader.starts[shard])
    tar = (Path(found.data) / reader.shards[shard].file).read_bytes()
    return tar[index.offsets[place, 0] :][: index.lengths[place, 0]]


def near(found: Retriever, number: int, vector: NDArray[np.float32]) -> None:
    np.testing.assert_allclose(vector, found.vector(number)[0], atol=1e-5)
    others = [i for i in range(len(found.samples)) if i != number]
    assert all(np.abs(found.vector(i)[0] - vector).max() > 1e-3 for i in others[:20])


@pytest.mark.parametrize("number", [0, 23, 29])
def test_a_picture_out_of_the_shards_is_the_sample(
    faces: Retriever, number: int, tmp_path: Path
) -> None:
    (path := tmp_path / "face.jpg").write_bytes(file_of(faces, number))
    near(faces, number, faces.encode(path))
    answer = faces.by_file(path, 3)
    assert answer.hits[0].number == number
    assert answer.hits[0].score == pytest.approx(1, abs=1e-5)
    assert (answer.query.number, answer.query.key) == (None, str(path))
    assert answer.query.vector == f"the model of {faces.run}"
    assert faces.by_file(path.read_bytes(), 3, name="upload").query.key == "upload"
    assert faces.by_file(path.read_bytes()).hits[0].number == number


@pytest.mark.parametrize("suffix", ["jpg", "png"])
def test_pictures_of_several_sizes(tmp_path: Path, suffix: str) -> None:
    draw = np.random.default_rng(0)
    for number in range(12):
        height, width = draw.integers(40, 200, 2).tolist()
        rough = Image.fromarray(draw.integers(0, 256, (4, 4, 3), np.uint8))
        (tmp_path / "in" / f"class{number % 2}").mkdir(parents=True, exist_ok=True)
        picture = rough.resize((width, height), Image.Resampling.BICUBIC)
        picture.save(tmp_path / "in" / f"class{number % 2}" / f"{number:02d}.{suffix}")
    build(make_source("folder", {"folder": tmp_path / "in"}), tmp_path / "data", progress=False)
    views = [{"stored": "image", "size": 24}, {"stored": "image", "size": 16}]
    found = retriever(tmp_path, IMAGES | {"data": VIEWS | {"views": views}})
    for number in range(12):
        near(found, number, found.encode(file_of(found, number)))
        shown = found.picture(number)
        assert shown is not None
        with Image.open(BytesIO(file_of(found, number))) as original:
            assert np.array_equal(np.asarray(shown), np.asarray(original.convert("RGB")))


@pytest.mark.parametrize("channels", [1, 3])
def test_raw_pictures_in_blocks(tmp_path: Path, channels: int) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (20, 8, 10, channels), np.uint8)
    np.savez(tmp_path / "a.npz", image=pixels, labels=np.arange(20) % 2)
    build(make_source("arrays", {"npz": tmp_path / "a.npz"}), tmp_path / "data", progress=False)
    found = retriever(tmp_path, IMAGES)
    for number in (0, 7, 19):
        row = pixels[int(found.samples.rows[number])]
        image = Image.fromarray(row[..., 0] if channels == 1 else row)
        near(found, number, found.encode(as_bytes(image)))
        picture = found.picture(number)
        assert picture is not None
        assert np.array_equal(np.asarray(picture), np.broadcast_to(row, (8, 10, 3)))


def as_bytes(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    image.save(stream := BytesIO(), kind, **options)
    return stream.getvalue()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_is_turned_as_exif_says(faces: Retriever, orientation: int) -> None:
    upright = Image.open(BytesIO(file_of(faces, 5))).convert("RGB")
    turns = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    lying = upright.transpose(turns[orientation]) if orientation > 1 else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = as_bytes(lying, exif=exif)
    assert np.array_equal(np.asarray(file_reader.upright_picture(data, "x")), np.asarray(upright))
    near(faces, 5, faces.encode(data))


def test_a_picture_of_another_size_is_brought_to_that_of_the_shards(faces: Retriever) -> None:
    picture = Image.open(BytesIO(file_of(faces, 8))).convert("RGB")
    large = picture.resize((96, 96), Image.Resampling.BICUBIC)
    wide = Image.new("RGB", (160, 96), "red")
    wide.paste(large, (32, 0))  # what is beside the middle does not count
    fitted = large.resize((32, 32), Image.Resampling.BICUBIC)
    expected = faces.encode(as_bytes(fitted))
    for image in (large, wide):
        np.testing.assert_allclose(faces.encode(as_bytes(image)), expected, atol=1e-5)
    assert faces.by_file(as_bytes(wide), 1).hits[0].number == 8


def test_grey_transparent_and_palette_pictures_are_decoded(faces: Retriever) -> None:
    picture = Image.open(BytesIO(file_of(faces, 8))).convert("RGB")
    for mode in ("L", "LA", "RGBA", "P", "1"):
        changed = picture.convert(mode)
        expected = faces.encode(as_bytes(changed.convert("RGB")))
        np.testing.assert_allclose(faces.encode(as_bytes(changed)), expected, atol=1e-6)


@pytest.mark.parametrize("number", [0, 299, 369])
def test_vector_rows_out_of_the_shards_are_the_sample(
    frames: Retriever, number: int, tmp_path: Path
) -> None:
    reader, row = Reader(frames.data), frames.samples.rows[number : number + 1]
    files = {name: tmp_path / f"{name}.npy" for name in ("view1", "view2")}
    for name, path in files.items():
        np.save(path, np.concatenate([reader.read(name, np.array([1, 2])), reader.read(name, row)]))
    near(frames, number, frames.encode(files, 2))
    answer = frames.by_file(files, 3, row=2)
    assert answer.hits[0].number == number
    assert answer.query.key == f"{files['view1']}, {files['view2']}"
    one = {name: reader.read(name, row)[0].astype(np.float64) for name in files}
    near(frames, number, frames.encode({name: npy(x) for name, x in one.items()}))


def npy(array: NDArray[Any], **options: Any) -> bytes:
    np.save(stream := BytesIO(), array, **options)
    return stream.getvalue()


def test_files_are_given_by_view(frames: Retriever) -> None:
    texts = ["view2=b=c.npy", "view1=a.npy"]
    assert frames.files(texts) == {"view1": Path("a.npy"), "view2": Path("b=c.npy")}
    with pytest.raises(RetrievalError, match="^no view named 'a'; pass one or more of view"):
        frames.by_file({"a": "x", "view1": "x", "view2": "x"}, 3)


def test_one_view_needs_no_name(faces: Retriever) -> None:
    assert faces.files(["a=b.png"]) == {"image": Path("a=b.png")}
    assert faces.files(["image=b.png"]) == {"image": Path("b.png")}


def test_a_file_is_read_up_to_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = Path("/proc/self/status")  # says that it has no bytes, as one that grows may
    if not endless.is_file():
        pytest.skip("needs /proc")
    monkeypatch.setattr(file_reader, "MAX_FILE_BYTES", 40)
    with pytest.raises(RetrievalError, match="status has .* bytes, and the limit is 40; make it"):
        file_reader.read_file(endless)


def png(width: int, height: int, twice: bool = False) -> bytes:
    """A PNG of zeros that says to be of a size, and perhaps says so again, larger."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return (
            len(body).to_bytes(4, "big") + name + body + zlib.crc32(name + body).to_bytes(4, "big")
        )

    def header(w: int, h: int) -> bytes:
        return chunk(b"IHDR", w.to_bytes(4, "big") + h.to_bytes(4, "big") + bytes([8, 2, 0, 0, 0]))

    headers = header(width, height) + (header(9_000, 11_000) if twice else b"")
    data = chunk(b"IDAT", zlib.compress(b"\0" * 100))
    return b"\x89PNG\r\n\x1a\n" + headers + data + chunk(b"IEND", b"")


def named(value: object) -> str:
    """The name of a case: its message, not its bytes."""
    return value[:30] if isinstance(value, str) else ""


PICTURE = as_bytes(Image.effect_noise((32, 32), 50).convert("RGB"), "JPEG")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is not a JPEG, PNG, WebP, GIF, TIFF or BMP: it begins with b''"),
        (
            b"hello, I am text",
            "is not a JPEG, PNG, WebP, GIF, TIFF or BMP: it begins with b'hello, I'",
        ),
        (b"GIF89a" + bytes(40), "the file is a damaged GIF"),
        (as_bytes(Image.new("RGB", (32, 32)), "PPM"), "is not a JPEG, PNG.* begins with b'P6"),
        (b"\xff\xd8" + bytes(90), "the file is a damaged JPEG"),
        (b"\x89PNG\r\n\x1a\n" + bytes(40), "the file is a damaged PNG"),
        (PICTURE[:-200], "the file is a damaged JPEG|the file is cut short"),
        (png(32, 32), "the file is a damaged PNG .*; pass a complete picture"),
        (png(40, 30), r"the file is a damaged PNG \(.*\); pass a complete picture"),
        (png(9_000, 8_000), "the file is 8000 × 9000, and the limit is 64,000,000 pixels; make it"),
        (png(60_000, 60_000), "pixels, got 60000 × 60000"),
        (png(32, 32, twice=True), r"the file is a damaged PNG \((it has two headers|Image size)"),
        (PICTURE + bytes(20_000_000), "the file has 20,00.,... bytes, and the limit is 20,000,000"),
        (npy(np.ones(3)), "the file is an npy file, but view 'image' needs a picture"),
    ],
    ids=named,
)
def test_files_that_are_no_pictures(faces: Retriever, data: bytes, message: str) -> None:
    with pytest.raises(RetrievalError, match=message):
        faces.by_file(data)


def test_paths_that_are_no_files(faces: Retriever, tmp_path: Path) -> None:
    with (large := tmp_path / "large.png").open("wb") as stream:
        stream.truncate(30_000_000)
    for path, message in [
        (tmp_path / "none.png", "none.png does not exist; pass a picture or an npy file"),
        (tmp_path, "is not a file; pass a picture"),
        (large, "large.png has 30,000,000 bytes, and the limit is 20,000,000; make it smaller"),
    ]:
        with pytest.raises(RetrievalError, match=message):
            faces.by_file(path)


@pytest.mark.parametrize(
    ("data", "row", "message"),
    [
        (
            PICTURE,
            0,
            "the file of view 'view1' must be an npy file, .* 273 numbers, but it begins with",
        ),
        (npy(np.array([{}]), allow_pickle=True), 0, "an array of Python objects is a pickle"),
        (npy(np.ones((3, 5))), 0, "of view 'view1' must have 273 numbers in each row, got 5"),
        (
            npy(np.ones((2, 3, 4))),
            0,
            r"of view 'view1' must have numbers, .*, got float64 \(2, 3, 4\)",
        ),
        (
            npy(np.ones(20) * 1j),
            0,
            r"of view 'view1' must have numbers, .*, got complex128 \(20,\)",
        ),
        (
            npy(np.ones(20))[:-4],
            0,
            r"an array of float64 \(20,\) at byte 0 is too short or too long",
        ),
        (npy(np.ones((3, 20))), 3, "of view 'view1' has 3 rows, .* --row cannot be 3"),
        (npy(np.full(273, np.nan)), 0, "273 numbers of row 0 are not finite in float32, the first"),
        (npy(np.full(273, 1e300)), 0, "273 numbers of row 0 are not finite in float32"),
    ],
    ids=named,
)
def test_files_that_are_no_vectors(frames: Retriever, data: bytes, row: int, message: str) -> None:
    with pytest.raises(RetrievalError, match=message):
        frames.by_file({"view1": data, "view2": data}, 3, row=row)


def test_a_file_has_no_labels(faces: Retriever) -> None:
    with pytest.raises(
        RetrievalError, match="'x' is not a sample and has no labels, which relation 'hard'"
    ):
        faces.by_file(PICTURE, 3, relation="hard", name="x")
    answer = faces.by_file(PICTURE, 4, "Male")
    assert all("Male" in hit.labels for hit in answer.hits)


def test_the_model_and_the_data_are_those_of_the_index(faces: Retriever, tmp_path: Path) -> None:
    index, wanted = faces.index.folder, faces.index.manifest.checkpoint[:12]
    other = made.run(tmp_path / "other", Path(faces.data), IMAGES, seed=1)
    message = (
        f"other has weights of sha256 [0-9a-f]{{12}}, but the index was .* {wanted}; pass the run"
    )
    with pytest.raises(RetrievalError, match=message):
        Retriever.open(index, run=other).by_file(PICTURE)
    assert Retriever.open(index, run=faces.run).by_file(PICTURE).hits
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        Retriever.open(index, run=tmp_path / "none").by_file(PICTURE)
    with pytest.raises(ShardError, match="none/manifest.json"):
        Retriever.open(index, data=tmp_path / "none").by_file(PICTURE)
    nine = make_source("faces", {"train": 9, "test": 0, "size": 32})
    build(nine, tmp_path / "data", progress=False)
    fresh = Retriever.open(index, data=tmp_path / "data")
    with pytest.raises(
        RetrievalError,
        match="has the fingerprint sha256:.*, but the .* embedded has sha.*--data, or embed",
    ):
        fresh.by_file(PICTURE)
    message = "row 29 of .* is 'no sample', but '.*' in the index; pass the shards that"
    with pytest.raises(RetrievalError, match=message):
        fresh.picture(29)
    given = Retriever.open(index, data=faces.data)
    assert given.by_file(PICTURE).hits and given.picture(29) is not None


def test_an_older_checkpoint_of_the_run_is_found(faces: Retriever, tmp_path: Path) -> None:
    run = tmp_path / "run" / "checkpoints"
    made.run(run / "step-00000002", Path(faces.data), IMAGES, seed=1)
    made.run(run / "step-00000001", Path(faces.data), IMAGES)
    for step in run.iterdir():
        (step / "COMPLETE").write_text("{}")
    found = Retriever.open(faces.index.folder, run=tmp_path / "run")
    near(faces, 4, found.encode(file_of(faces, 4)))


def test_pictures_are_those_of_the_shards(faces: Retriever, frames: Retriever) -> None:
    for number in (0, 29):
        picture = faces.picture(number)
        assert picture is not None
        expected = Reader(faces.data).read("image", faces.samples.rows[number : number + 1])[0]
        apart = np.abs(np.asarray(picture).astype(int) - expected)
        assert apart.max() <= 4  # two decoders of JPEG
    assert frames.picture(0) is None


def test_threads_get_what_one_would(faces: Retriever) -> None:
    def ask_all(number: int) -> tuple[Any, Any, bytes]:
        picture = faces.picture(number)
        assert picture is not None
        by_file = faces.by_file(file_of(faces, number), 5).plain()
        return faces.by_key(faces.samples.key(number), 5).plain(), by_file, picture.tobytes()

    numbers = [i % 6 for i in range(18)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(ask_all, numbers))
    for number, one in zip(numbers, found, strict=True):
        assert one == ask_all(number)


def test_a_sheet_has_the_query_first_and_framed(
    faces: Retriever, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path := tmp_path / "face.jpg").write_bytes(file_of(faces, 3))
    for asked in (("--key", faces.samples.key(3)), ("--file", path)):
        sheet = tmp_path / "sheet.png"
        ask(faces.index.folder, *asked, "--k", 8, "--sheet", sheet)
        shown = capsys.readouterr().out.splitlines()[6:]
        keys = [line.split()[2] for line in shown]
        assert len(keys) == 8
        with Image.open(sheet) as image:
            assert image.width == 6 * 182 + 6
            assert image.getpixel((3, 50)) == (0x1F, 0x5F, 0xBF)  # the frame
            assert image.getpixel((6 + 182 - 4, 50)) == (0x1F, 0x5F, 0xBF)
            first = np.asarray(image.crop((6, 6, 182, 182)).resize((32, 32)), int)
            drawn = np.asarray(image.crop((188, 6, 364, 182)).resize((32, 32)), int)
        for pixels, number in ((first, 3), (drawn, faces.samples.find(keys[0]))):
            apart = [
                np.abs(np.asarray(faces.picture(i), int) - pixels)[3:-3, 3:-3].mean()
                for i in range(30)
            ]
            assert int(np.argmin(apart)) == number


def test_a_sheet_needs_pictures(frames: Retriever, tmp_path: Path) -> None:
    with pytest.raises(RetrievalError, match="has no view of pictures with 1 or 3 channels, which"):
        ask(frames.index.folder, "--key", frames.samples.key(0), "--sheet", tmp_path / "a.png")
    ask(frames.index.folder, "--key", frames.samples.key(0))
