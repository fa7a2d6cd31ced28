"""The MNIST family: idx files of images and of labels, as their publishers hand them out."""

from __future__ import annotations

import gzip
import math
import zlib
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import DirectoryPath, Field, model_validator

from heron.shards.errors import DOWNLOAD, SourceError
from heron.shards.manifest import Labels, View
from heron.shards.sources.base import InMemory, Loaded, Rows, split_ranges

STEMS = {"train": "train", "test": "t10k"}  # what the publishers call the splits
CLASSES = 10
UNSIGNED_BYTES = 0x0800  # the magic number of an idx file of them, less its number of axes


class Idx(InMemory):
    """The MNIST family (MNIST, KMNIST, Fashion): its four idx files, gzipped or not.

    Rows are pixels in [0, 1], row of pixels after row. With `--view-kind noise` they are HeroCon's
    N-MNIST (Section 4.4): a share of the pixels gets Gaussian noise of the mean and the standard
    deviation of all pixels, the sum is cut to [0, 1], and the noise of the two views is
    independent. A pixel's noise is the same at every share, and in every share above the first
    that has it. A row is drawn from the seed, its file and its place there, merged or not.
    """

    name: ClassVar[str] = "idx"
    examples: ClassVar[str] = "heron shards build idx --folder mnist --out data/mnist"

    folder: DirectoryPath = Field(
        description="folder of train-images-idx3-ubyte, train-labels-idx1-ubyte and the same of "
        "t10k, each with .gz at its end or without (the one without, where there are both)"
    )
    merge: bool = Field(
        False, description="true: one split `all`, train and then test; false: train and test"
    )
    view_kind: Literal["plain", "noise"] = Field(
        "plain", description="plain: one view, `image`; noise: `view1` and `view2`, N-MNIST's"
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
    def _nothing_in_vain(self) -> Self:
        """Refuses an option without effect, which is a mistake."""
        gaussian = ["noise_mean", "noise_std"]
        if self.view_kind == "plain":
            unused, where, remedy = ["noise", "noise_law", *gaussian], "a plain view has", "noise"
        else:
            unused, where, remedy = gaussian, "uniform noise has", "gaussian"
            if self.noise_law == "gaussian":
                return self
        for name in unused:
            if (value := getattr(self, name)) != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name} is {value!r}, but {where} none; leave it out, or ask for {remedy}"
                )
        return self

    @property
    def dataset(self) -> str:
        """The name of the folder."""
        return self.folder.resolve().name

    @property
    def views(self) -> list[View]:
        """`image`, or `view1` and `view2`; vectors of height x width, in [0, 1]."""
        width = self.loaded.views["pixels"].shape[1]
        names = ["image"] if self.view_kind == "plain" else ["view1", "view2"]
        return [View(name=name, kind="vector", shape=(width,), dtype="float32") for name in names]

    @property
    def files(self) -> list[Path]:
        """The four files."""
        return [path for pair in self._paths.values() for path in pair]

    def load(self) -> Loaded:
        """Reads the four files; the pixels stay bytes until rows are asked for."""
        parts = {split: _read_pair(*paths) for split, paths in self._paths.items()}
        train, test = (part[0].shape[1:] for part in parts.values())
        if train != test:
            names = [self._paths[split][0].name for split in ("test", "train")]
            raise SourceError(
                f"{names[0]}: images of {_times(test)} pixels; expected "
                f"{_times(train)}, as in {names[1]}; give the files of one data set"
            )
        pixels = np.concatenate([images for images, _ in parts.values()])
        rows = {split: len(numbers) for split, (_, numbers) in parts.items()}
        # The noise of an image depends on its file and its place there, merged or not.
        origins = [(part, place) for part, n in enumerate(rows.values()) for place in range(n)]
        return Loaded(
            views={"pixels": pixels.reshape(len(pixels), -1), "origins": np.array(origins)},
            targets=np.concatenate([numbers for _, numbers in parts.values()]).astype(np.int64),
            labels=Labels(kind="multi_class", names=[str(number) for number in range(CLASSES)]),
            splits=split_ranges(rows, self.merge),
        )

    def read(self, split: str, start: int, stop: int) -> Rows:
        """Returns rows of a split in the order of its files."""
        rows = super().read(split, start, stop)
        pixels = np.asarray(rows.views["pixels"])
        if self.view_kind == "plain":
            return Rows({"image": pixels.astype(np.float32) / np.float32(255)}, rows.labels)
        view1, view2 = self._noisy(pixels, np.asarray(rows.views["origins"]))
        return Rows({"view1": view1, "view2": view2}, rows.labels)

    def _noisy(self, pixels: NDArray[np.uint8], origins: NDArray[np.int64]) -> NDArray[np.float32]:
        """Returns both views of rows, [2, rows, width]; an origin is a file and a place in it."""
        out = np.empty((2, *pixels.shape), np.float32)
        for row, (image, origin) in enumerate(zip(pixels, origins, strict=True)):
            random = np.random.default_rng([self.seed, *origin])
            shape = (2, len(image))
            if self.noise_law == "uniform":
                noise = random.random(shape)
            else:
                noise = random.normal(*self._moments, shape)
            noise[random.random(shape) >= self.noise] = 0
            out[:, row] = np.clip(image / 255 + noise, 0, 1)
        return out

    @cached_property
    def _moments(self) -> tuple[float, float]:
        """Mean and standard deviation of Gaussian noise: those given, or those of all pixels."""
        counts = np.zeros(256)
        pixels = self.loaded.views["pixels"]
        for rows in np.array_split(pixels, 1 + len(pixels) // 4096):
            counts += np.bincount(rows.ravel(), minlength=256)
        values = np.arange(256) / 255
        mean = float(counts @ values / counts.sum())
        std = math.sqrt(counts @ (values - mean) ** 2 / counts.sum())
        return (
            mean if self.noise_mean is None else self.noise_mean,
            std if self.noise_std is None else self.noise_std,
        )

    @cached_property
    def _paths(self) -> dict[str, tuple[Path, Path]]:
        """The files of images and of labels of each split."""
        return {
            split: (
                _find(self.folder, f"{stem}-images-idx3-ubyte"),
                _find(self.folder, f"{stem}-labels-idx1-ubyte"),
            )
            for split, stem in STEMS.items()
        }


def _find(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise SourceError(
        f"{folder.resolve().name}: no {name} or {name}.gz; expected the four files as their "
        "publisher names them; download it, or give another --folder"
    )


def _read_pair(images: Path, labels: Path) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    pixels, numbers = read_idx(images, 3), read_idx(labels, 1)
    if len(pixels) != len(numbers):
        raise SourceError(
            f"{images.name}: {len(pixels)} images, but {labels.name} has {len(numbers)} labels; "
            "expected a label for each image; give the files of one data set"
        )
    if len(bad := np.flatnonzero(numbers >= CLASSES)):
        row = int(bad[0])
        raise SourceError(
            f"{labels.name}: label of row {row} is {numbers[row]}; expected 0 to {CLASSES - 1}; "
            "give a data set of the MNIST family"
        )
    return pixels, numbers


def read_idx(path: Path, axes: int) -> NDArray[np.uint8]:
    """Reads the bytes of an idx file: [rows] of labels, [rows, height, width] of images.

    It has a magic number (two zeros, 8 for unsigned bytes, the number of axes), the axes as
    big-endian uint32, and the bytes. Raises SourceError where it is anything else.
    """
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":  # gzip, whatever the name says
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as fault:
            raise SourceError(f"{path.name}: damaged gzip ({fault}); {DOWNLOAD}") from None
    start = 4 + 4 * axes
    magic, expected = int.from_bytes(data[:4], "big"), UNSIGNED_BYTES + axes
    if len(data) >= 4 and magic != expected:
        raise SourceError(
            f"{path.name}: magic number 0x{magic:08x}; expected 0x{expected:08x}, an idx file of "
            f"unsigned bytes in {axes} dimensions; {DOWNLOAD}"
        )
    if len(data) < start:
        raise SourceError(
            f"{path.name}: {len(data)} bytes; expected a header of {start} at least; {DOWNLOAD}"
        )
    shape = tuple(np.frombuffer(data, ">u4", axes, 4).tolist())
    if 0 in shape:
        raise SourceError(f"{path.name}: dimensions {_times(shape)}; expected none of 0")
    if len(data) != (whole := start + math.prod(shape)):
        problem = "it is cut short" if len(data) < whole else "something comes after its end"
        raise SourceError(
            f"{path.name}: {len(data):,} bytes; expected {whole:,}, a header of {start} and "
            f"{_times(shape)}: {problem}; {DOWNLOAD}"
        )
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def _times(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape))
