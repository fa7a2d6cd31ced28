"""The MNIST family: the idx files of images and labels, as their publishers distribute them."""

import math
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import DirectoryPath, Field, model_validator

from heron.base.errors import DOWNLOAD_AGAIN, SourceError, format_shape
from heron.shards.manifest import Labels
from heron.sources.base import Column, FileSource, Loaded, split_ranges
from heron.sources.zips import open_unpacked

STEMS, KINDS = ("train", "t10k"), ("images-idx3", "labels-idx1")  # in the names of files
CLASSES = 10
MAX_UNPACKED_BYTES = 1 << 30  # of a file unpacked; EMNIST, the largest of the family, has 640 MB
UNSIGNED_BYTES = 0x0800  # the magic number of an idx file of them, less its number of axes


class Idx(FileSource):
    """The MNIST family (MNIST, KMNIST, Fashion): its four idx files, gzipped or not.

    A row is a grey picture or, with `--view-kind vectors`, its pixels in [0, 1], in row-major
    order, as `configs/kmnist.yaml` takes them. With `--view-kind noise` rows are such vectors of
    HeroCon's N-MNIST (Section 4.4): a share of the pixels gets Gaussian noise with the mean and
    standard deviation of all pixels, the sum is clipped to [0, 1], and the noise of the two views
    is independent. A pixel that has noise at one share has the same noise at every larger share.
    A row's noise is drawn from the seed, its file and its row in the file, merged or not.
    """

    name: ClassVar[str] = "idx"
    examples: ClassVar[str] = "heron shards build idx --folder mnist --out data/mnist"
    named_by: ClassVar[str] = "folder"

    folder: DirectoryPath = Field(
        description="folder of train-images-idx3-ubyte, train-labels-idx1-ubyte and the same of "
        "t10k, each with .gz at its end or without (the one without, where there are both)"
    )
    merge: bool = Field(
        False, description="true: one split `all`, train and then test; false: train and test"
    )
    view_kind: Literal["pictures", "vectors", "noise"] = Field(
        "pictures",
        description="pictures: one view `image`, grey; vectors: one view `image` of its pixels in "
        "[0, 1]; noise: `view1` and `view2`, vectors, N-MNIST's",
    )
    noise: float = Field(
        1.0, ge=0, le=1, description="probability that a pixel of a view gets noise"
    )
    noise_law: Literal["gaussian", "uniform"] = Field(
        "gaussian", description="law of the noise; uniform: on [0, 1), HeroCon's Section 4.1"
    )
    noise_mean: float | None = Field(
        None, allow_inf_nan=False, description="mean of Gaussian noise (default: of all pixels)"
    )
    noise_std: float | None = Field(
        None,
        ge=0,
        allow_inf_nan=False,
        description="standard deviation of Gaussian noise (default: of all pixels)",
    )

    @model_validator(mode="after")
    def _refuse_unused_options(self) -> Self:
        unused, where, remedy = ["noise_mean", "noise_std"], "uniform noise has", "gaussian"
        if self.view_kind != "noise":
            unused, where, remedy = (
                ["noise", "noise_law", *unused],
                f"a view of {self.view_kind} has",
                "noise",
            )
        elif self.noise_law == "gaussian":
            unused = []
        for name in unused:
            if (value := getattr(self, name)) != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name} is {value!r}, but {where} none; remove it or use {remedy}"
                )
        return self

    def options(self) -> dict[str, Any]:
        """Returns the options; vectors have the name of earlier folders."""
        return super().options() | ({"view_kind": "plain"} if self.view_kind == "vectors" else {})

    @property
    def files(self) -> list[Path]:
        """The training images and labels, and the test images and labels."""
        return [_find(self.folder, f"{stem}-{kind}-ubyte") for stem in STEMS for kind in KINDS]

    def load(self) -> Loaded:
        """Reads the four files; pixels stay bytes until their rows are read."""
        train, train_labels, test, test_labels = self.files
        images, numbers = _read_pair(train, train_labels)
        test_images, test_numbers = _read_pair(test, test_labels)
        if images.shape[1:] != test_images.shape[1:]:
            raise SourceError(
                f"{test.name}: images of {format_shape(test_images.shape[1:])} pixels, but "
                f"{train.name} has {format_shape(images.shape[1:])}; pass the files of one data set"
            )
        pictures = np.concatenate([images, test_images])[..., None]
        pixels = pictures.reshape(len(pictures), -1)
        views = {"image": Column(pictures.shape, pictures.__getitem__)}
        if self.view_kind == "vectors":
            views = {"image": Column(pixels.shape, lambda rows: pixels[rows] / np.float32(255))}
        if self.view_kind == "noise":
            mean, std = _moments(pixels)
            mean = mean if self.noise_mean is None else self.noise_mean
            std = std if self.noise_std is None else self.noise_std

            @lru_cache(1)  # the second view reads the same rows
            def draw(rows: tuple[int, ...]) -> NDArray[np.float32]:
                out = np.empty((2, len(rows), pixels.shape[1]), np.float32)
                for number, row in enumerate(rows):
                    # The noise of an image depends on its file and its row in it, merged or not.
                    origin = (0, row) if row < len(images) else (1, row - len(images))
                    random = np.random.default_rng([self.seed, *origin])
                    shape, uniform = (2, pixels.shape[1]), self.noise_law == "uniform"
                    noise = random.random(shape) if uniform else random.normal(mean, std, shape)
                    noise[random.random(shape) >= self.noise] = 0
                    out[:, number] = np.clip(pixels[row] / 255 + noise, 0, 1)
                return out

            views = {
                "view1": Column(pixels.shape, lambda rows: draw(tuple(rows.tolist()))[0]),
                "view2": Column(pixels.shape, lambda rows: draw(tuple(rows.tolist()))[1]),
            }
        return Loaded(
            views=views,
            targets=np.concatenate([numbers, test_numbers]).astype(np.int64),
            labels=Labels(kind="multi_class", names=[str(number) for number in range(CLASSES)]),
            splits=split_ranges({"train": len(numbers), "test": len(test_numbers)}, self.merge),
        )


def _moments(pixels: NDArray[np.uint8]) -> tuple[float, float]:
    """Returns the mean and the standard deviation of all pixels, in [0, 1]."""
    counts = np.zeros(256)
    for rows in np.array_split(pixels, 1 + len(pixels) // 4096):
        counts += np.bincount(rows.ravel(), minlength=256)
    values = np.arange(256) / 255
    mean = float(counts @ values / counts.sum())
    return mean, math.sqrt(counts @ (values - mean) ** 2 / counts.sum())


def _find(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise SourceError(
        f"{folder.resolve().name} has no {name} or {name}.gz, one of the four files as their "
        "publisher names them; download it, or use another --folder"
    )


def _read_pair(images: Path, labels: Path) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    pixels, numbers = read_idx(images, 3), read_idx(labels, 1)
    if len(pixels) != len(numbers):
        raise SourceError(
            f"{images.name} has {len(pixels)} images, but {labels.name} has {len(numbers)} "
            "labels; pass the files of one data set"
        )
    if len(bad := np.flatnonzero(numbers >= CLASSES)):
        row = int(bad[0])
        raise SourceError(
            f"{labels.name}: labels must be 0 to {CLASSES - 1}, got {numbers[row]} in row {row}; "
            "pass a data set of the MNIST family"
        )
    return pixels, numbers


def read_idx(path: Path, axes: int) -> NDArray[np.uint8]:
    """Reads the bytes of an idx file: [rows] of labels, [rows, height, width] of images.

    The file has a magic number (two zeros, 8 for unsigned bytes, the number of axes), the lengths
    of the axes as big-endian uint32, and the bytes. Raises SourceError if it has anything else.
    """
    start = 4 + 4 * axes
    with open_unpacked(path) as stream:
        data = bytearray(stream.read(start))
        shape = tuple(int.from_bytes(data[i : i + 4], "big") for i in range(4, start, 4))
        size = start + math.prod(shape)
        # No further than the header says, whatever it unpacks to; gzip checks its sum at the end.
        data += stream.read(max(0, min(size, MAX_UNPACKED_BYTES) + 1 - len(data)))
    magic, expected = int.from_bytes(data[:4], "big"), UNSIGNED_BYTES + axes
    if magic == expected and 0 not in shape and len(data) == size <= MAX_UNPACKED_BYTES:
        return np.frombuffer(data, np.uint8, offset=start).reshape(shape)
    count = f"{min(len(data), size):,}{' or more' if len(data) > size else ''}"
    raise SourceError(
        f"{path.name}: magic number 0x{magic:08x}, dimensions {format_shape(shape)}, {count} "
        f"bytes; it must have 0x{expected:08x}, as an idx file of unsigned bytes in {axes} "
        f"dimensions, and the {size:,} bytes of its header and dimensions, 1 to "
        f"{MAX_UNPACKED_BYTES:,}; {DOWNLOAD_AGAIN}"
    )
