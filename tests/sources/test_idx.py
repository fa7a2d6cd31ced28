"""The source `idx`: the MNIST family, N-MNIST's noise, and what it says of a bad file."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from heron.base.errors import SourceError
from heron.cli.main import main
from heron.data.reader import Reader
from heron.shards.build import build
from heron.shards.manifest import load_manifest
from heron.shards.source import Source
from heron.shards.verify import verify
from heron.sources import make_source
from tests.shards.tiny import whole

DATA = Path(__file__).parents[3] / "shared" / "data"
IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
TEST_IMAGES, TEST_LABELS = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"
PIXELS = np.random.default_rng(0).integers(0, 256, (10, 2, 3)).astype(np.uint8)
NUMBERS = np.arange(10, dtype=np.uint8)


def idx(array: NDArray[np.uint8], magic: int = 0) -> bytes:
    head = struct.pack(f">{1 + array.ndim}I", magic or 0x0800 + array.ndim, *array.shape)
    return head + array.tobytes()


def family(folder: Path, changes: dict[str, bytes] | None = None, /, **options: object) -> Source:
    """Seven rows to train on and three to test on; the labels of both gzipped."""
    files = {
        IMAGES: idx(PIXELS[:7]),
        f"{LABELS}.gz": gzip.compress(idx(NUMBERS[:7])),
        TEST_IMAGES: idx(PIXELS[7:]),
        f"{TEST_LABELS}.gz": gzip.compress(idx(NUMBERS[7:])),
    }
    for name, data in (files | (changes or {})).items():
        (folder / name).write_bytes(data)
    return make_source("idx", {"folder": folder, **options})


def noisy(folder: Path, **options: object) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    views = whole(family(folder, merge=True, view_kind="noise", **options), "all").views
    return np.asarray(views["view1"]), np.asarray(views["view2"])


def test_grey_pictures_of_both_splits(tmp_path: Path) -> None:
    source = family(tmp_path)
    (view,) = source.views
    assert (view.name, view.kind, view.shape) == ("image", "image", (*PIXELS.shape[1:], 1))
    build(source, tmp_path / "out", progress=False)
    assert verify(tmp_path / "out").ok
    found = Reader(tmp_path / "out").read("image", np.arange(10))
    assert sorted(map(bytes, found)) == sorted(map(bytes, PIXELS))


def test_pixels_of_both_splits_as_vectors(tmp_path: Path) -> None:
    source = family(tmp_path, view_kind="vectors")
    assert source.options()["view_kind"] == "plain"  # as before there were pictures
    assert source.splits == {"train": 7, "test": 3} and source.dataset == tmp_path.name
    assert [(view.name, view.kind, view.shape) for view in source.views] == [
        ("image", "vector", (6,))
    ]
    rows = source.read("test", 1, 3)
    image = np.asarray(rows.views["image"])
    assert image.dtype == np.float32
    np.testing.assert_allclose(image, PIXELS[8:].reshape(2, 6) / 255, rtol=1e-7)
    assert rows.labels.tolist() == [8, 9] and source.labels.names == list("0123456789")


def test_merged_is_train_and_then_test(tmp_path: Path) -> None:
    source = family(tmp_path, merge=True)
    assert source.splits == {"all": 10}
    rows = whole(source, "all")
    assert rows.labels.tolist() == NUMBERS.tolist()
    for start, stop in [(0, 7), (5, 9), (7, 10), (9, 10)]:
        part = source.read("all", start, stop)
        np.testing.assert_array_equal(part.views["image"], rows.views["image"][start:stop])
        np.testing.assert_array_equal(part.labels, rows.labels[start:stop])


@pytest.mark.parametrize("law", ["gaussian", "uniform"])
def test_noise_is_of_the_seed_and_the_row_alone(tmp_path: Path, law: str) -> None:
    options = {"view_kind": "noise", "noise": 0.5, "noise_law": law}
    merged = family(tmp_path, merge=True, **options)
    rows = whole(merged, "all").views
    apart = family(tmp_path, **options)
    for name in ("view1", "view2"):
        part = merged.read("all", 5, 9).views[name]
        np.testing.assert_array_equal(part, rows[name][5:9])
        np.testing.assert_array_equal(apart.read("train", 2, 6).views[name], rows[name][2:6])
        np.testing.assert_array_equal(apart.read("test", 1, 3).views[name], rows[name][8:])
        other = family(tmp_path, merge=True, seed=1, **options).read("all", 0, 10).views[name]
        assert not np.array_equal(other, rows[name])
    assert not np.array_equal(rows["view1"], rows["view2"])


def test_the_noise_of_a_row_is_drawn_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = family(tmp_path, view_kind="noise")
    drawn: list[object] = []
    draw = np.random.default_rng

    def counted(seed: object) -> np.random.Generator:
        drawn.append(seed)
        return draw(seed)  # type: ignore[arg-type]

    monkeypatch.setattr("numpy.random.default_rng", counted)
    for rows in ((0, 5), (5, 7)):
        source.read("train", *rows)
    assert drawn == [[0, 0, row] for row in range(7)]


def test_noise_has_the_moments_of_all_pixels(tmp_path: Path) -> None:
    grey = np.full((400, 10, 10), 98, np.uint8)
    grey[::2] = 78  # mean 88, standard deviation 10: far from where the sum is cut
    options = {IMAGES: idx(grey), LABELS: idx(np.zeros(400, np.uint8))}
    changes = options | {TEST_IMAGES: idx(grey[:2]), TEST_LABELS: idx(np.zeros(2, np.uint8))}
    source = family(tmp_path, changes, view_kind="noise")
    added = np.asarray(source.read("train", 0, 400).views["view2"]) - grey.reshape(400, 100) / 255
    assert abs(added.mean() - 88 / 255) < 0.002 and abs(added.std() - 10 / 255) < 0.001


def test_noise_of_given_moments_is_cut_to_0_and_1(tmp_path: Path) -> None:
    plain = PIXELS.reshape(10, 6) / np.float32(255)
    for view in noisy(tmp_path, noise_mean=0.25, noise_std=0):
        np.testing.assert_allclose(view, np.minimum(plain + 0.25, 1), rtol=1e-6)
    for view in noisy(tmp_path, noise_mean=-0.25, noise_std=0):
        np.testing.assert_allclose(view, np.maximum(plain - 0.25, 0), atol=1e-7)
    for view in noisy(tmp_path, noise_law="uniform"):
        assert (view > plain).mean() > 0.9 and view.max() == 1
    for view in noisy(tmp_path, noise_std=9):
        assert view.min() == 0 and view.max() == 1


def test_a_larger_share_keeps_the_noise_of_a_smaller(tmp_path: Path) -> None:
    vectors = family(tmp_path, merge=True, view_kind="vectors")
    plain = np.asarray(whole(vectors, "all").views["image"])
    np.testing.assert_allclose(noisy(tmp_path, noise=0)[0], plain, rtol=1e-6)
    half, full = noisy(tmp_path, noise=0.5)[1], noisy(tmp_path)[1]
    touched = ~np.isclose(half, plain)
    assert 0.2 < touched.mean() < 0.8 and not np.isclose(full, plain).all()
    np.testing.assert_array_equal(half[touched], full[touched])


BAD: list[tuple[dict[str, bytes], str]] = [
    (
        {IMAGES: b"<html>quota exceeded</html>"},
        f"{IMAGES}: magic number 0x3c68746d, ",
    ),
    (
        {IMAGES: idx(NUMBERS)},
        "; it must have 0x00000803, as an idx file of unsigned bytes in 3 dimensions",
    ),
    (
        {f"{LABELS}.gz": gzip.compress(idx(NUMBERS[:7]) + bytes(10**8))},
        f"{LABELS}.gz: magic number 0x00000801, dimensions 7, 15 or more bytes; it must",
    ),
    (
        {IMAGES: gzip.compress(struct.pack(">4I", 0x0803, 1 << 31, 28, 28) + bytes(99))},
        "and the 1,683,627,180,048 bytes of its header and dimensions, 1 to 1,073,741,824; downl",
    ),
    ({LABELS: idx(NUMBERS, 0x0901)}, f"{LABELS}: magic number 0x00000901"),
    ({IMAGES: idx(PIXELS)[:9]}, ", 9 bytes; it must have"),
    ({IMAGES: b""}, ", 0 bytes; it must have"),
    (
        {IMAGES: idx(PIXELS)[:-1]},
        "dimensions 10 × 2 × 3, 75 bytes; it must have",
    ),
    (
        {IMAGES: idx(PIXELS) + b"\0"},
        "dimensions 10 × 2 × 3, 76 or more bytes; it must have",
    ),
    ({IMAGES: idx(PIXELS[:, :0])}, "dimensions 10 × 0 × 3, 16 bytes; it must have"),
    ({LABELS: idx(NUMBERS[:0])}, "dimensions 0, 8 bytes; it must have"),
    ({LABELS: gzip.compress(idx(NUMBERS))[:-9]}, f"{LABELS}: damaged gzip (Compressed file ended"),
    ({LABELS: b"\x1f\x8b" + bytes(30)}, f"{LABELS}: damaged gzip (Unknown compression method); do"),
    (
        {LABELS: idx(NUMBERS)},
        f"{IMAGES} has 7 images, but {LABELS} has 10 labels",
    ),
    (
        {TEST_LABELS: idx(NUMBERS[:1])},
        f"{TEST_IMAGES} has 3 images, but {TEST_LABELS} has 1 labels",
    ),
    (
        {LABELS: idx(NUMBERS[:7] * 3)},
        "0 to 9, got 12 in row 4; pass a data set of the MNIST family",
    ),
    (
        {TEST_IMAGES: idx(PIXELS[:3, :, :2])},
        f"{TEST_IMAGES}: images of 2 × 2 pixels, but {IMAGES} has 2 × 3; pass the files of one "
        "data set",
    ),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_errors(tmp_path: Path, changes: dict[str, bytes], message: str) -> None:
    with pytest.raises(SourceError) as fault:
        build(family(tmp_path, changes), tmp_path / "out", progress=False)
    assert message in str(fault.value)


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    source = family(tmp_path)
    (tmp_path / f"{TEST_LABELS}.gz").unlink()
    message = f"no {TEST_LABELS} or {TEST_LABELS}.gz, one of the four files as their publisher"
    with pytest.raises(SourceError, match=message):
        _ = source.splits


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"noise": 0.5},
            "noise is 0.5, but a view of pictures has none; remove it or use noise",
        ),
        ({"noise_law": "uniform"}, "noise_law is 'uniform', but a view of pictures has none"),
        (
            {"view_kind": "noise", "noise_law": "uniform", "noise_std": 2},
            "noise_std is 2.0, but uniform noise has none; remove it or use gaussian",
        ),
        ({"view_kind": "noise", "noise": 1.5}, "noise must be less than or equal to 1"),
        ({"view_kind": "noise", "noise_std": -1}, "noise_std must be greater than or eq"),
        ({"view_kind": "noise", "noise_mean": "nan"}, "noise_mean must be a finite numbe"),
        ({"merge": "perhaps"}, "merge must be a valid boolean"),
    ],
)
def test_options(tmp_path: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(SourceError) as fault:
        family(tmp_path, **options)
    assert message in str(fault.value)


def test_built_from_the_command_line(tmp_path: Path) -> None:
    (files := tmp_path / "files").mkdir()
    family(files)
    words = [
        "shards",
        "build",
        "idx",
        "--folder",
        str(files),
        "--out",
        str(out := tmp_path / "out"),
    ]
    words += ["--merge", "true", "--view-kind", "noise", "--noise", "0.75", "--noise-mean", "-0.1"]
    assert main([*words, "--quiet"]) == 0
    manifest = load_manifest(out)
    assert manifest.rows("all") == 10 and verify(out).ok
    assert manifest.built_from.options["merge"] is True
    assert [file.name for file in manifest.built_from.files][:2] == [IMAGES, f"{LABELS}.gz"]


@pytest.mark.parametrize("name", ["mnist", "kmnist"])
def test_published_files(name: str) -> None:
    if not (DATA / name).exists():
        pytest.skip(f"no {name} in the data folder")
    source = make_source("idx", {"folder": DATA / name, "merge": True, "view_kind": "noise"})
    assert source.splits == {"all": 70_000}
    assert [view.shape for view in source.views] == [(784,), (784,)]
    rows = source.read("all", 59_990, 60_010)
    assert np.asarray(rows.views["view2"]).shape == (20, 784)
    if name == "mnist":
        assert rows.labels[10:].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
