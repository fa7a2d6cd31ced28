"""Arrays of your own: an .npz, or .npy files larger than memory, of any views and labels."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, FilePath, model_validator

from heron.shards.errors import SourceError
from heron.shards.manifest import Labels, View
from heron.shards.sources.base import WHOLE, Rows, Source
from heron.shards.sources.npy import map_npy, read_npz

LABELS = "labels"
SPLIT = "split"  # the array that parts the rows


def _named_file(value: str) -> str:
    name, _, file = value.partition("=")
    if not name or not file:
        raise ValueError("expected NAME=FILE.npy")
    if not Path(file).is_file():
        raise ValueError(f"no file {file}")
    return value


class Arrays(Source):
    """Arrays of your own: views and labels in an .npz, or in .npy files larger than memory.

    A view is floats [rows, width], or raw pictures: uint8 [rows, height, width, channels], or
    without the last axis where there is one channel. A row without a label has -1 for its class,
    for all of its classes, or for all of its labels (255 where those are uint8). An array `split`
    of strings, one a row, parts the rows; without one they are the split `all`. Files of --npy are
    mapped into memory, a block of rows at a time.
    """

    name: ClassVar[str] = "arrays"
    examples: ClassVar[str] = (
        "heron shards build arrays --npz mine.npz --view-names audio video --out data/mine\n"
        "  heron shards build arrays --npy audio=audio.npy labels=labels.npy --out data/mine"
    )

    npz: FilePath | None = Field(None, description="the .npz file, as numpy.savez writes it")
    npy: list[Annotated[str, AfterValidator(_named_file)]] | None = Field(
        None,
        min_length=1,
        description="instead of it, NAME=FILE.npy for each array, as numpy.save writes it",
    )
    view_names: list[str] | None = Field(
        None,
        description="the arrays that are views (default: all files of --npy but labels and split; "
        "of an .npz, every 2-D float array and every uint8 array in three dimensions or four)",
    )
    labels_name: str = Field(
        LABELS, description="the array of labels; without it no row has a label"
    )
    label_kind: (
        Literal["multi_label", "multi_class", "hierarchical", "complementary", "none"] | None
    ) = Field(
        None,
        description="what a label is (default: multi_label for 0/1 in two dimensions, "
        "multi_class for whole numbers in one)",
    )
    label_names: list[str] | None = Field(
        None, description="names of the labels or classes (default: their numbers)"
    )

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.npz is None) == (self.npy is None):
            raise ValueError("expected either npz or npy; give one of them")
        names = [value.partition("=")[0] for value in self.npy or []]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"npy: two files are called {twice[0]!r}; give each a name of its own")
        return self

    @property
    def dataset(self) -> str:
        """The name of the .npz, or of the folder of the first .npy."""
        return self.npz.stem if self.npz else self.files[0].resolve().parent.name

    @cached_property
    def views(self) -> list[View]:
        """The arrays that are views; their shapes alone are looked at."""
        return [self._view(name) for name in self._view_names]

    @cached_property
    def labels(self) -> Labels:
        """The kind and names of the labels, inferred where no option gives them."""
        array = self._labels
        if array is None:
            return Labels(kind="none", names=self.label_names or [])
        kind = self.label_kind or ("multi_class" if array.ndim == 1 else "multi_label")
        levels = None
        if kind == "hierarchical":
            levels = [_numbers(int(column.max()) + 1) for column in array.T]
        count = int(array.max()) + 1 if array.ndim == 1 else array.shape[1]
        names = self.label_names or (levels[-1] if levels else _numbers(count))
        if levels:
            levels[-1] = names
        labels = Labels(kind=kind, names=names, levels=levels)
        if (fault := labels.fault(array.astype(labels.dtype), len(array))) is not None:
            raise SourceError(
                f"{self._where(self.labels_name)}: {fault}; see --label-kind and --label-names"
            )
        return labels

    @property
    def splits(self) -> dict[str, int]:
        """The splits, in the order in which they first appear."""
        return {split: len(rows) for split, rows in self._rows.items()}

    @property
    def files(self) -> list[Path]:
        """The files of arrays."""
        return [self.npz] if self.npz else list(self._paths.values())

    def options(self) -> dict[str, Any]:
        """Returns the options, files by name alone."""
        named = [f"{name}={path.name}" for name, path in self._paths.items()]
        return super().options() | ({"npy": named} if self.npy else {})

    def read(self, split: str, start: int, stop: int) -> Rows:
        """Returns rows of a split, in the order of the file."""
        rows = self._rows[split][start:stop]
        views: dict[str, NDArray[Any] | list[bytes]] = {}
        for view in self.views:
            array = self._array(view.name)[rows]
            vector = view.kind == "vector"
            views[view.name] = (
                self._finite(view.name, array, rows) if vector else array.reshape(-1, *view.shape)
            )
        if self._labels is None:
            return Rows(views, np.full(len(rows), self.labels.unlabelled))
        return Rows(views, self._labels[rows].astype(self.labels.dtype))

    def _finite(
        self, name: str, array: NDArray[Any], rows: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        with np.errstate(over="ignore"):  # what is too large becomes infinite
            values = array.astype(np.float32, copy=False)
        if len(bad := np.argwhere(~np.isfinite(values))):
            place, column = (int(i) for i in bad[0])
            raise SourceError(
                f"{self._where(name)}: view {name!r}, row {rows[place]}, column {column} is "
                f"{array[place, column]}; expected a finite float32; fill, scale or drop it first"
            )
        return values

    @cached_property
    def _paths(self) -> dict[str, Path]:
        """The .npy file of each array."""
        parts = [value.partition("=") for value in self.npy or []]
        return {name: Path(file) for name, _, file in parts}

    def _where(self, name: str) -> str:
        """Returns the name of the file that an array is in."""
        return self.npz.name if self.npz else self._paths[name].name

    @cached_property
    def _npz(self) -> dict[str, NDArray[Any]]:
        return read_npz(self.npz) if self.npz else {}

    @property
    def _names(self) -> list[str]:
        """The arrays there are."""
        return list(self._npz or self._paths)

    def _array(self, name: str) -> NDArray[Any]:
        """Returns an array of the .npz, or an .npy mapped anew: what was read leaves memory."""
        if name not in self._names:
            files = self.npz.name if self.npz else "--npy"
            raise SourceError(f"{files}: no array {name!r}; it has {', '.join(self._names)}")
        return self._npz[name] if self.npz else map_npy(self._paths[name])

    @cached_property
    def _view_names(self) -> list[str]:
        others = (self.labels_name, SPLIT)
        names = self.view_names or [
            name
            for name in self._names
            if name not in others and (self.npy or _looks_like_view(self._npz[name]))
        ]
        if not names:
            raise SourceError(
                f"{', '.join(path.name for path in self.files)}: no 2-D float array and no uint8 "
                "one in three dimensions or four; expected one for each view"
            )
        return names

    def _view(self, name: str) -> View:
        array = self._array(name)
        picture = array.dtype == np.uint8 and array.ndim in (3, 4)
        if not (picture or (array.ndim == 2 and array.dtype.kind in "fiub")) or 0 in array.shape:
            raise SourceError(
                f"{self._where(name)}: view {name!r} is {array.dtype} {array.shape}; expected "
                "numbers [rows, width], or uint8 [rows, height, width, channels]"
            )
        self._check_length(name, array)
        if not picture:
            return View(name=name, kind="vector", shape=array.shape[1:], dtype="float32")
        shape = array.shape[1:] if array.ndim == 4 else (*array.shape[1:], 1)
        return View(name=name, kind="image", shape=shape, dtype="uint8")

    @cached_property
    def _labels(self) -> NDArray[Any] | None:
        """The array of labels, or None where there is none."""
        name = self.labels_name
        if self.label_kind == "none" or (name not in self._names and not self._labels_wanted):
            return None
        array = np.array(self._array(name))
        if array.ndim not in (1, 2) or array.dtype.kind not in "iub" or not array.size:
            raise SourceError(
                f"{self._where(name)}: {name!r} is {array.dtype} {array.shape}; expected "
                "whole numbers [rows], or 0/1 [rows, labels]"
            )
        multi = array.ndim == 2 and self.label_kind != "hierarchical"
        numbers = array.reshape(len(array), -1)
        unlabelled = (numbers == -1).all(1) | (multi & (numbers == 255).all(1))
        outside = (numbers < 0) | (multi & (numbers > 1))
        if len(bad := np.argwhere(outside & ~unlabelled[:, None])):
            row, column = (int(i) for i in bad[0])
            raise SourceError(
                f"{self._where(name)}: label of row {row} is {numbers[row, column]}; expected "
                f"{'0 or 1' if multi else 'a class number from 0 on'}, or -1 in all of a row that "
                "has no label"
            )
        return array

    @property
    def _labels_wanted(self) -> bool:
        """Whether labels that are not there are missed: asked for, or perhaps misspelt."""
        if self.label_kind is not None or self.labels_name != LABELS:
            return True
        unused = [name for name in self._names if name not in (*self._view_names, SPLIT)]
        if unused:
            raise SourceError(
                f"{', '.join(path.name for path in self.files)}: no array {LABELS!r}, but "
                f"{unused[0]!r}, which is no view; name the labels with --labels-name, or say "
                "--label-kind none where there are none"
            )
        return False

    @cached_property
    def _rows(self) -> dict[str, NDArray[np.int64]]:
        if SPLIT not in self._names:
            return {WHOLE: np.arange(self._length[1])}
        split = np.array(self._array(SPLIT))
        if split.dtype.kind != "U" or split.ndim != 1:
            raise SourceError(
                f"{self._where(SPLIT)}: 'split' is {split.dtype} {split.shape}; expected strings "
                "[rows]"
            )
        self._check_length(SPLIT, split)
        return {name: np.flatnonzero(split == name) for name in dict.fromkeys(split.tolist())}

    @cached_property
    def _length(self) -> tuple[str, int]:
        """The array that the others must be as long as, and its rows."""
        if self._labels is not None:
            return self.labels_name, len(self._labels)
        return self._view_names[0], len(self._array(self._view_names[0]))

    def _check_length(self, name: str, array: NDArray[Any]) -> None:
        other, rows = self._length
        if len(array) != rows:
            raise SourceError(
                f"{self._where(name)}: {name!r} has {len(array)} rows and {other!r} {rows}; "
                "expected the same rows in every array"
            )


def _looks_like_view(array: NDArray[Any]) -> bool:
    if array.dtype == np.uint8:
        return array.ndim in (3, 4)
    return array.ndim == 2 and array.dtype.kind == "f"


def _numbers(count: int) -> list[str]:
    return [str(number) for number in range(max(1, count))]
