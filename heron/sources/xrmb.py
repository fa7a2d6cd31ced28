"""XRMB, the Wisconsin X-ray Microbeam: frames of sound and articulation; and drawn ones."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, FilePath

from heron.base.errors import DOWNLOAD_AGAIN, SourceError, format_shape
from heron.shards.manifest import Labels, View
from heron.shards.source import Rows
from heron.sources.base import Column, FileSource, Loaded, SyntheticSource, vectors
from heron.sources.matlab import MatlabFile

VIEWS = ("view1", "view2")  # acoustic, articulatory
MAX_LABEL = 255  # of a phone; published are 0 to 39


class _Names(NamedTuple):
    """The publisher's names of the variables of a split."""

    view1: str  # in the first file
    view2: str  # in the second
    labels: str  # in the second


PARTS = {
    "train": _Names("X1", "X2", "trainLabel"),
    "tune": _Names("XV1", "XV2", "tuneLabel"),
    "test": _Names("XTe1", "XTe2", "testLabel"),
}


class Xrmb(FileSource):
    """XRMB: frames of speech, seven to a row, as sound (273) and as articulation (112).

    Its two MATLAB files, XRMBf2KALDI_window7_single1.mat and ...single2.mat, hold X1 and X2,
    trainLabel; XV1, XV2, tuneLabel; XTe1, XTe2, testLabel: the splits train, tune and test. A
    label is its phone's number in the file; a phone that no row has leaves a name unused.
    HeroCon's 50,000 rows: `--parts train --classes 20 --per-class 2500 --shuffle true`.
    """

    name: ClassVar[str] = "xrmb"
    examples: ClassVar[str] = (
        "heron shards build xrmb --single1 XRMBf2KALDI_window7_single1.mat "
        "--single2 XRMBf2KALDI_window7_single2.mat --out data/xrmb"
    )

    single1: FilePath = Field(description="the file of X1, XV1 and XTe1, of MATLAB v5 or v7.3")
    single2: FilePath = Field(description="the file of X2, XV2, XTe2 and of the labels")
    parts: list[Literal["train", "tune", "test"]] | None = Field(
        None, min_length=1, description="the splits to read (default: all that the files hold)"
    )
    classes: int | None = Field(
        None, gt=0, description="keep the classes 0 to classes - 1 (default: all)"
    )
    per_class: int | None = Field(
        None, gt=0, description="keep the first so many rows of each class (default: all)"
    )
    shuffle: bool = Field(
        False,
        description="true: the rows of a split in a random order given by the seed, since those "
        "of a speaker follow one another, in an unshuffled fold as well; false: in the file's",
    )

    def load(self) -> Loaded:
        """Opens the files, and concatenates the splits that are read."""
        files = MatlabFile(self.single1), MatlabFile(self.single2)
        variables = {*files[0].variables, *files[1].variables}
        present = [split for split in PARTS if variables.intersection(PARTS[split])]
        requested: Sequence[str] = self.parts or present or ["train"]
        names = {split: PARTS[split] for split in PARTS if split in requested}
        columns = {
            split: {view: _column(files[i], names[split][i]) for i, view in enumerate(VIEWS)}
            for split in names
        }
        labels = {split: _labels(files[1], names[split].labels) for split in names}
        largest = max(int(numbers.max()) for numbers in labels.values())
        if self.classes is not None and self.classes > largest + 1:
            raise SourceError(
                f"{self.single2.name}: its labels go to {largest}, not from 0 to "
                f"{self.classes - 1}; use a --classes of at most {largest + 1}"
            )
        widths = [column.shape[1] for column in next(iter(columns.values())).values()]
        for split, numbers in labels.items():
            shapes = [column.shape for column in columns[split].values()]
            if shapes != [(len(numbers), width) for width in widths]:
                found = [*map(format_shape, shapes), f"{len(numbers):,}"]
                pairs = zip(names[split], found, strict=True)
                raise SourceError(
                    f"{self.single1.name}, {self.single2.name}: "
                    f"{', '.join(f'{name} is {shape}' for name, shape in pairs)}; a split must "
                    f"have as many rows in each, of {widths[0]} and {widths[1]} columns as in the "
                    "first split; pass the files of one data set"
                )
        starts = np.cumsum([0, *(len(numbers) for numbers in labels.values())])
        chosen = {split: self._choose(split, labels[split]) for split in names}
        count = self.classes or 1 + max(int(labels[split][chosen[split]].max()) for split in names)

        def column(view: str) -> Column:
            split_columns = [columns[split][view] for split in names]

            def read(rows: NDArray[np.int64]) -> Any:
                # The rows of one call are all of one split.
                index = int(np.searchsorted(starts, rows[0], side="right")) - 1
                return split_columns[index][rows - starts[index]]

            return Column((int(starts[-1]), *split_columns[0].shape[1:]), read)

        return Loaded(
            views={view: column(view) for view in VIEWS},
            targets=np.concatenate(list(labels.values())),
            labels=Labels(kind="multi_class", names=[str(number) for number in range(count)]),
            splits={s: start + chosen[s] for s, start in zip(names, starts[:-1], strict=True)},
        )

    def _choose(self, split: str, labels: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the row numbers, in the file, of the rows that are kept."""
        where = f"{self.single2.name}: {PARTS[split].labels}"
        keep = np.ones(len(labels), bool) if self.classes is None else labels < self.classes
        if not keep.any():
            raise SourceError(
                f"{where} begins with {labels.min()}, but classes must be below {self.classes}; "
                f"use a larger --classes, or leave {split} out with --parts"
            )
        for number in np.unique(labels[keep]) if self.per_class else []:
            rows = np.flatnonzero(labels == number)
            if self.per_class and len(rows) < self.per_class:
                raise SourceError(
                    f"{where} has {len(rows):,} rows of class {number}, not {self.per_class:,}; "
                    f"lower --per-class, or leave {split} out with --parts"
                )
            keep[rows[self.per_class :]] = False
        chosen = np.flatnonzero(keep)
        if self.shuffle:
            np.random.default_rng([self.seed, list(PARTS).index(split)]).shuffle(chosen)
        return chosen


def _column(file: MatlabFile, name: str) -> Column:
    """Returns a view of a split; its matrix is opened when rows are read."""
    where = f"{file.path.name}: {name}"
    return vectors(file.shape(name), lambda rows: file.matrix(name)[rows], where, DOWNLOAD_AGAIN)


def _labels(file: MatlabFile, name: str) -> NDArray[np.int64]:
    """Reads a vector of class numbers."""
    values = file.matrix(name)
    if 1 not in values.shape:
        raise SourceError(
            f"{file.path.name}: {name} must be a column, a class number for each row, got "
            f"{format_shape(values.shape)}; {DOWNLOAD_AGAIN}"
        )
    values = values.reshape(-1)
    bad = np.flatnonzero(~((values >= 0) & (values <= MAX_LABEL) & (values == np.floor(values))))
    if len(bad):
        raise SourceError(
            f"{file.path.name}: {name} must be integers from 0 to {MAX_LABEL}, got "
            f"{values[bad[0]]} in row {bad[0]:,}; {DOWNLOAD_AGAIN}"
        )
    return values.astype(np.int64)


WINDOW = 7  # frames stacked in a row, as in XRMB
WIDTHS = {"view1": 39, "view2": 16}  # acoustic, articulatory; of one frame: 273 and 112 in all
NOISE = (1.5, 0.9)  # of each view, so that either view alone leaves doubt
LATENT = 6  # dimensions of the trajectory that both views see
HIDDEN = 24  # of the map from a latent state to a view's frame
SPREAD = 0.65  # of speakers, in units of the trajectories' own


class Frames(SyntheticSource):
    """Synthetic frames in the shape of XRMB: views of 273 and 112, seven frames of each.

    A class is a trajectory in a latent space; a row is a section of it, at its speaker's speed and
    offset. Each view is a fixed random map of that section, with noise of its own.
    """

    name: ClassVar[str] = "frames"
    examples: ClassVar[str] = "heron shards build frames --out data/frames --train 20000"

    train: int = Field(20_000, gt=0, description="rows to train on")
    test: int = Field(5_000, ge=0, description="rows to test on")
    classes: int = Field(20, ge=2, le=40, description="classes, of 40 there are")

    @property
    def views(self) -> list[View]:
        """`view1`, acoustic, and `view2`, articulatory."""
        return [
            View(name=name, kind="vector", shape=(WINDOW * width,), dtype="float32")
            for name, width in WIDTHS.items()
        ]

    @property
    def labels(self) -> Labels:
        """Numbered classes, which stand in for phones."""
        return Labels(kind="multi_class", names=[f"phone{n:02d}" for n in range(self.classes)])

    def read(self, split: str, start: int, stop: int) -> Rows:
        """Returns rows of a split, drawn block by block."""
        size = self.block_rows or 1
        first = start // size
        blocks = [self._draw_block(split, block) for block in range(first, -(-stop // size))]
        keep = slice(start - first * size, stop - first * size)
        *views, labels = (np.concatenate(arrays)[keep] for arrays in zip(*blocks, strict=True))
        return Rows(dict(zip(WIDTHS, views, strict=True)), labels)

    @cached_property
    def _shared(self) -> tuple[Any, ...]:
        """What all rows share: the trajectories, and each view's map of latent states."""
        random = np.random.default_rng([self.seed, 0])
        waves = random.normal(size=(40, 3, 2, LATENT)) / np.array([1.0, 1.5, 2.5])[:, None, None]
        inputs = [random.normal(size=(LATENT, HIDDEN)) for _ in WIDTHS]
        outputs = [random.normal(size=(HIDDEN, w)) / np.sqrt(HIDDEN) for w in WIDTHS.values()]
        return waves, inputs, outputs

    def _draw_block(self, split: str, block: int) -> tuple[NDArray[Any], ...]:
        rows = self.block_rows or 1
        waves, inputs, outputs = self._shared
        random = np.random.default_rng([self.seed, 1 + (split == "test"), block])
        labels = random.integers(0, self.classes, rows)
        middle = random.uniform(0.3, 0.7, (rows, 1))  # of the phone, where the row is centred
        speed = random.uniform(0.05, 0.1, (rows, 1))  # of a phone, per frame
        time = middle + speed * (np.arange(WINDOW) - WINDOW // 2)
        angle = np.pi * time[..., None] * np.arange(1, 4)  # [rows, frames, harmonics]
        circle = np.stack([np.sin(angle), np.cos(angle)], -1)
        latent = np.einsum("rfhs,rhsl->rfl", circle, waves[labels])
        latent += SPREAD * random.normal(size=(rows, 1, LATENT))
        views = []
        for into, out, noise in zip(inputs, outputs, NOISE, strict=True):
            frames = np.tanh(latent @ into * 0.5) @ out
            frames += noise * random.normal(size=frames.shape)
            views.append(frames.reshape(rows, -1).astype(np.float32))
        return *views, labels.astype(np.int64)
