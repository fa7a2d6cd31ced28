"""Arrays of your own: an .npz, or .npy files larger than memory, of any views and labels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, FilePath, model_validator

from heron.shards.errors import ShardError, SourceError
from heron.shards.index import UNREADABLE, read_npz
from heron.shards.manifest import Labels
from heron.shards.sources.base import WHOLE, Column, FileSource, Loaded, Numbers, with_unknown

LABELS = "labels"
SPLIT = "split"  # the array that parts the rows
# Bytes of all arrays of an .npz, or so many times the file's, if that is more.
MOST_UNPACKED, MOST_FOLD = 2**30, 100
PICKLES = "arrays of Python objects are pickles, never decoded"


def _named_file(value: str) -> str:
    name, _, file = value.partition("=")
    if not name or not file:
        raise ValueError("expected NAME=FILE.npy")
    if not Path(file).is_file():
        raise ValueError(f"no file {file}")
    return value


class Arrays(FileSource):
    """Arrays of your own: views and labels in an .npz, or in .npy files larger than memory.

    A view is floats [rows, width], or raw pictures: uint8 [rows, height, width, channels], or
    without the last axis where there is one channel. A row without a label has -1 for its class,
    for all of its classes, or for all of its labels (255 where those are uint8). An array `split`
    of strings, one a row, parts the rows; without one they are the split `all`. Files of --npy are
    mapped into memory, a block of rows at a time.

    With `--missing allow` a row that is NaN throughout a view lacks it; pictures are always there.
    With `--unknown allow` single labels of a row may be unknown: NaN, -1 or 255 among 0 and 1.
    """

    left_out: ClassVar[tuple[str, ...]] = ("missing", "unknown")

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

    missing: Literal["refuse", "allow"] = Field(
        "refuse", description="whether rows may lack a view: NaN in all of its columns"
    )
    unknown: Literal["refuse", "allow"] = Field(
        "refuse", description="whether single labels may be unknown: NaN, -1 or 255"
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

    @property
    def files(self) -> list[Path]:
        """The files of arrays."""
        return [self.npz] if self.npz else list(self._paths.values())

    def options(self) -> dict[str, Any]:
        """Returns the options, files by name alone."""
        named = [f"{name}={path.name}" for name, path in self._paths.items()]
        return super().options() | ({"npy": named} if self.npy else {})

    def load(self) -> Loaded:
        """Looks at the shapes of the views, and reads the labels and the splits."""
        names = self._view_names()
        targets = self._labels(names)
        first = names[0] if targets is None else self.labels_name
        rows = len(self._array(first))
        views = {name: self._column(name) for name in names}
        lengths = {name: column.shape[0] for name, column in views.items()}
        split = None
        if SPLIT in self._names:
            split = np.array(self._array(SPLIT))
            if split.dtype.kind != "U" or split.ndim != 1:
                raise SourceError(
                    f"{self._where(SPLIT)}: {SPLIT!r} is {split.dtype} {split.shape}; expected "
                    "strings [rows]"
                )
            lengths[SPLIT] = len(split)
        for name, length in lengths.items():
            if length != rows:
                raise SourceError(
                    f"{self._where(name)}: {name!r} has {length} rows and {first!r} {rows}; "
                    "expected the same rows in every array"
                )
        parts = [] if split is None else dict.fromkeys(split.tolist())
        labels = self._describe(targets)
        if targets is not None and self.unknown == "allow":
            where = f"{self._where(self.labels_name)}: {self.labels_name!r}"
            targets, labels = with_unknown(targets, labels.names, where)
        return Loaded(
            views=views,
            targets=np.full(rows, -1) if targets is None else targets.astype(labels.dtype),
            labels=labels,
            splits={part: np.flatnonzero(split == part) for part in parts} or {WHOLE: range(rows)},
        )

    @cached_property
    def _paths(self) -> dict[str, Path]:
        """The .npy file of each array."""
        parts = [value.partition("=") for value in self.npy or []]
        return {name: Path(file) for name, _, file in parts}

    @cached_property
    def _npz(self) -> dict[str, NDArray[Any]]:
        return open_npz(self.npz) if self.npz else {}

    @property
    def _names(self) -> list[str]:
        """The arrays there are."""
        return list(self._npz or self._paths)

    @property
    def _titles(self) -> str:
        return ", ".join(path.name for path in self.files)

    def _where(self, name: str) -> str:
        """Returns the name of the file that an array is in."""
        return self.npz.name if self.npz else self._paths[name].name

    def _array(self, name: str) -> NDArray[Any]:
        """Returns an array of the .npz, or an .npy mapped anew: what was read leaves memory."""
        if name not in self._names:
            files = self.npz.name if self.npz else "--npy"
            raise SourceError(f"{files}: no array {name!r}; it has {', '.join(self._names)}")
        return self._npz[name] if self.npz else map_npy(self._paths[name])

    def _view_names(self) -> list[str]:
        others = (self.labels_name, SPLIT)
        names = self.view_names or [
            name
            for name in self._names
            if name not in others and (self.npy or _looks_like_view(self._npz[name]))
        ]
        if not names:
            raise SourceError(
                f"{self._titles}: no 2-D float array and no uint8 one in three dimensions or "
                "four; expected one for each view"
            )
        return names

    def _column(self, name: str) -> Column:
        array = self._array(name)
        picture = array.dtype == np.uint8 and array.ndim in (3, 4)
        if not (picture or (array.ndim == 2 and array.dtype.kind in "fiub")) or 0 in array.shape:
            raise SourceError(
                f"{self._where(name)}: view {name!r} is {array.dtype} {array.shape}; expected "
                "numbers [rows, width], or uint8 [rows, height, width, channels]"
            )
        if picture:
            shape = array.shape if array.ndim == 4 else (*array.shape, 1)
            return _Pixels(shape, lambda rows: self._array(name)[rows])
        where = f"{self._where(name)}: view {name!r}"
        allowed = self.missing == "allow"
        remedy = "fill, scale or drop it first"
        if not allowed:
            remedy += ", or `--missing allow` rows that are NaN throughout"
        read = lambda rows: self._array(name)[rows]  # noqa: E731
        return Numbers(array.shape, read, where, remedy, "allow" if allowed else None)

    def _labels(self, views: list[str]) -> NDArray[Any] | None:
        """Returns the array of labels, or None where there is none."""
        name = self.labels_name
        if self.label_kind == "none":
            return None
        if name not in self._names and (self.label_kind, name) == (None, LABELS):
            if unused := [other for other in self._names if other not in (*views, SPLIT)]:
                raise SourceError(
                    f"{self._titles}: no array {LABELS!r}, but {unused[0]!r}, which is no view; "
                    "name the labels with --labels-name, or say --label-kind none where there are "
                    "none"
                )
            return None
        array = np.array(self._array(name))
        if self.unknown == "allow":
            multi = array.ndim == 2 and self.label_kind in (None, "multi_label")
            if not multi or array.dtype.kind not in "iufb" or not array.size:
                raise SourceError(
                    f"{self._where(name)}: {name!r} is {array.dtype} {array.shape}, and single "
                    "labels may be unknown; expected numbers [rows, labels]; a class that is not "
                    "known is -1, without --unknown"
                )
            return array
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
            row, column = bad[0].tolist()
            raise SourceError(
                f"{self._where(name)}: label of row {row} is {numbers[row, column]}; expected "
                f"{'0 or 1' if multi else 'a class number from 0 on'}, or -1 in all of a row that "
                "has no label"
            )
        return array

    def _describe(self, array: NDArray[Any] | None) -> Labels:
        """Returns the kind and names of the labels, inferred where no option gives them."""
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
        if self.unknown == "allow":
            return labels  # which `with_unknown` looks at
        if (fault := labels.fault(array.astype(labels.dtype), len(array))) is not None:
            raise SourceError(
                f"{self._where(self.labels_name)}: {fault}; see --label-kind and --label-names"
            )
        return labels


@dataclass(frozen=True, eq=False)
class _Pixels:
    """A column of raw pictures, with an axis of channels where the array has none."""

    shape: tuple[int, ...]
    read: Callable[[NDArray[np.int64]], NDArray[np.uint8]]

    def __getitem__(self, rows: NDArray[np.int64], /) -> NDArray[np.uint8]:
        return self.read(rows).reshape(-1, *self.shape[1:])


def _looks_like_view(array: NDArray[Any]) -> bool:
    if array.dtype == np.uint8:
        return array.ndim in (3, 4)
    return array.ndim == 2 and array.dtype.kind == "f"


def _numbers(count: int) -> list[str]:
    return [str(number) for number in range(max(1, count))]


def open_npz(path: Path) -> dict[str, NDArray[Any]]:
    """Returns the arrays of an .npz by their names; SourceError where it is none."""
    try:
        with path.open("rb") as stream:
            return read_npz(stream, max(MOST_UNPACKED, MOST_FOLD * path.stat().st_size))
    except (*UNREADABLE, ShardError) as fault:
        reason = (
            PICKLES if "pickle" in str(fault) else f"expected what numpy.savez writes ({fault})"
        )
        raise SourceError(f"{path.name}: cannot be read: {reason}") from None


def map_npy(path: Path) -> NDArray[Any]:
    """Maps the array of an .npy, read-only, of which only what is used is read."""
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except UNREADABLE as fault:
        pickles = "Python objects" in str(fault)
        reason = PICKLES if pickles else f"{fault}; expected what numpy.save writes"
        raise SourceError(f"{path.name}: cannot be read: {reason}") from None
