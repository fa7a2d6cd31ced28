"""XRMB, the Wisconsin X-ray Microbeam: seven frames of sound and of articulation, and a phone."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, FilePath

from heron.shards.errors import DOWNLOAD, SourceError
from heron.shards.manifest import Labels, View
from heron.shards.matlab import MatlabFile
from heron.shards.sources.base import Rows, Source

VIEWS = ("view1", "view2")  # acoustic, articulatory
LARGEST_LABEL = 255  # of a phone; published are 0 to 39
SLAB = 8192  # rows read at a time: a file has column after column, and 256 of each are too few


class _Names(NamedTuple):
    """What the publisher calls the variables of a split."""

    view1: str  # in the first file
    view2: str  # in the second
    labels: str  # in the second


PARTS = {
    "train": _Names("X1", "X2", "trainLabel"),
    "tune": _Names("XV1", "XV2", "tuneLabel"),
    "test": _Names("XTe1", "XTe2", "testLabel"),
}


class Xrmb(Source):
    """XRMB: frames of speech, seven to a row, as sound (273) and as articulation (112).

    Its two MATLAB files, XRMBf2KALDI_window7_single1.mat and ...single2.mat, hold X1 and X2,
    trainLabel; XV1, XV2, tuneLabel; XTe1, XTe2, testLabel: the splits train, tune and test. A
    label is the number of its phone in the file, so that one that no row has leaves a name unused.
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
        description="true: the rows of a split in an order drawn from the seed, since those of a "
        "speaker follow one another, in an unshuffled fold as well; false: in the file's",
    )

    @property
    def views(self) -> list[View]:
        """`view1`, acoustic, and `view2`, articulatory."""
        return [
            View(name=name, kind="vector", shape=(width,), dtype="float32")
            for name, width in self._widths.items()
        ]

    @cached_property
    def labels(self) -> Labels:
        """The numbers of the classes, from 0 to the largest, as names."""
        count = self.classes or 1 + max(int(part.labels.max()) for part in self._parts.values())
        return Labels(kind="multi_class", names=[str(number) for number in range(count)])

    @property
    def splits(self) -> dict[str, int]:
        """`train`, `tune` and `test`, or those of them that are asked for."""
        return {split: len(part.labels) for split, part in self._parts.items()}

    @property
    def files(self) -> list[Path]:
        """The two files."""
        return [self.single1, self.single2]

    def read(self, split: str, start: int, stop: int) -> Rows:
        """Returns rows of a split; SourceError where one of their values is not finite."""
        return self._parts[split].read(start, stop)

    @cached_property
    def _opened(self) -> tuple[MatlabFile, MatlabFile]:
        return MatlabFile(self.single1), MatlabFile(self.single2)

    @cached_property
    def _names(self) -> dict[str, _Names]:
        """The variables of every split that is read."""
        first, second = self._opened
        found = {*first.variables, *second.variables}
        names = {
            part: names
            for part, names in PARTS.items()
            if (found.intersection(names) if self.parts is None else part in self.parts)
        } or {"train": PARTS["train"]}
        for one in names.values():
            for name, file in ((one.view2, first), (one.view1, second)):
                if one.view1 not in first.variables and name in file.variables:
                    raise SourceError(
                        f"{file.path.name}: found {name}, but no {one.view1} in "
                        f"{first.path.name}; expected {one.view1} in --single1 and {one.view2} in "
                        "--single2: are the two swapped?"
                    )
        return names

    @cached_property
    def _widths(self) -> dict[str, int]:
        """The columns of each view, which are the same in all splits."""
        widths = {}
        for at, view in enumerate(VIEWS):
            file, names = self._opened[at], [names[at] for names in self._names.values()]
            columns = {name: file.shape(name)[1] for name in names}
            widths[view] = columns[names[0]]
            for name, count in columns.items():
                if count != widths[view]:
                    raise SourceError(
                        f"{file.path.name}: {name} has {count} columns; expected "
                        f"{widths[view]}, as in {names[0]}; give the files of one data set"
                    )
        return widths

    @cached_property
    def _parts(self) -> dict[str, _SplitReader]:
        _ = self._widths  # shapes are looked at before any numbers are
        first, second = self._opened
        labels = {split: _labels(second, names.labels) for split, names in self._names.items()}
        largest = max(int(numbers.max()) for numbers in labels.values())
        if self.classes is not None and self.classes > largest + 1:
            raise SourceError(
                f"{second.path.name}: its labels go to {largest}; expected {self.classes} classes "
                f"from 0 on; give a --classes of at most {largest + 1}"
            )
        parts = {}
        for split, names in self._names.items():
            rows = first.shape(names.view1)[0]
            for name, count in [
                (names.view2, second.shape(names.view2)[0]),
                (names.labels, len(labels[split])),
            ]:
                if count != rows:
                    raise SourceError(
                        f"{second.path.name}: {name} has {count:,} rows; expected {rows:,}, as "
                        f"{names.view1} has in {first.path.name}; give the files of one data set"
                    )
            chosen = self._choose(split, labels[split])
            kept = labels[split] if chosen is None else labels[split][chosen]
            views = {"view1": (first, names.view1), "view2": (second, names.view2)}
            parts[split] = _SplitReader(views, chosen, kept)
        return parts

    def _choose(self, split: str, labels: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Returns the rows that are kept, by their numbers in the file; None is all as they lie."""
        where = f"{self.single2.name}: {PARTS[split].labels}"
        keep = np.ones(len(labels), bool) if self.classes is None else labels < self.classes
        if not keep.any():
            raise SourceError(
                f"{where} begins with {labels.min()}; expected classes below "
                f"{self.classes}; give a larger --classes, or leave {split} out with --parts"
            )
        for number in np.unique(labels[keep]) if self.per_class else []:
            rows = np.flatnonzero(labels == number)
            if self.per_class and len(rows) < self.per_class:
                raise SourceError(
                    f"{where} has {len(rows):,} rows of class {number}; expected "
                    f"{self.per_class:,}; lower --per-class, or leave {split} out with --parts"
                )
            keep[rows[self.per_class :]] = False
        if keep.all() and not self.shuffle:
            return None
        chosen = np.flatnonzero(keep)
        if self.shuffle:
            np.random.default_rng([self.seed, list(PARTS).index(split)]).shuffle(chosen)
        return chosen


class _SplitReader:
    """Reads a split: it knows where the rows lie, and keeps the slab that was read last."""

    def __init__(
        self,
        views: dict[str, tuple[MatlabFile, str]],
        chosen: NDArray[np.int64] | None,
        labels: NDArray[np.int64],
    ) -> None:
        self.views, self.chosen, self.labels = views, chosen, labels
        self.slab: tuple[int, dict[str, NDArray[np.float32]]] = (-1, {})

    def read(self, start: int, stop: int) -> Rows:
        """Returns rows [start, stop)."""
        pieces: dict[str, list[NDArray[np.float32]]] = {name: [] for name in self.views}
        for first in range(start // SLAB * SLAB, stop, SLAB):
            for name, slab in self._slab_from(first).items():
                pieces[name].append(slab[max(start - first, 0) : stop - first])
        views: dict[str, NDArray[np.float32] | list[bytes]] = {}
        for name, arrays in pieces.items():
            views[name] = values = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
            if not np.isfinite(values).all():
                raise self._not_finite(name, start, values)
        return Rows(views, self.labels[start:stop])

    def _slab_from(self, first: int) -> dict[str, NDArray[np.float32]]:
        """Returns the SLAB rows from `first` on, of each view."""
        if self.slab[0] != first:
            self.slab = (-1, {})  # so that two are never in memory
            self.slab = (first, {view: self._slab(view, first) for view in self.views})
        return self.slab[1]

    def _slab(self, view: str, first: int) -> NDArray[np.float32]:
        file, variable = self.views[view]
        columns = file.matrix(variable).T  # in the order in which they lie in the file
        count = len(self.labels[first : first + SLAB])
        slab = np.empty((count, len(columns)), np.float32)
        with np.errstate(over="ignore"):  # what is too large becomes infinite, and is found
            if self.chosen is None:
                slab[:] = columns[:, first : first + count].T
            else:
                rows = self.chosen[first : first + count]
                order = np.argsort(rows)
                slab[order] = columns[:, rows[order]].T
        return slab

    def _not_finite(self, view: str, start: int, values: NDArray[np.float32]) -> SourceError:
        file, variable = self.views[view]
        row, column = (int(place) for place in np.argwhere(~np.isfinite(values))[0])
        at = start + row if self.chosen is None else int(self.chosen[start + row])
        found = file.matrix(variable)[at, column]
        return SourceError(
            f"{file.path.name}: {variable}, row {at:,}, column {column} is {found}; expected a "
            f"finite float32; {DOWNLOAD}"
        )


def _labels(file: MatlabFile, name: str) -> NDArray[np.int64]:
    """Reads a vector of class numbers."""
    values = file.matrix(name)
    if 1 not in values.shape:
        raise SourceError(
            f"{file.path.name}: {name} is {values.shape[0]:,} × {values.shape[1]:,}; expected a "
            f"column, a class number for each row; {DOWNLOAD}"
        )
    values = values.reshape(-1)
    bad = np.flatnonzero(
        ~((values >= 0) & (values <= LARGEST_LABEL) & (values == np.floor(values)))
    )
    if len(bad):
        raise SourceError(
            f"{file.path.name}: {name}, row {bad[0]:,} is {values[bad[0]]}; expected a whole "
            f"number from 0 to {LARGEST_LABEL}; {DOWNLOAD}"
        )
    return values.astype(np.int64)
