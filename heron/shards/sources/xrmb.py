"""XRMB, the Wisconsin X-ray Microbeam: seven frames of sound and articulation, and a phone."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, FilePath

from heron.shards.errors import DOWNLOAD_AGAIN, SourceError, format_shape
from heron.shards.manifest import Labels
from heron.shards.matlab import MatlabFile
from heron.shards.sources.base import Column, FileSource, Loaded, vectors

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
        description="true: the rows of a split in an order drawn from the seed, since those of a "
        "speaker follow one another, in an unshuffled fold as well; false: in the file's",
    )

    def load(self) -> Loaded:
        """Opens the files, and concatenates the splits that are read."""
        files = MatlabFile(self.single1), MatlabFile(self.single2)
        names = self._names(*files)
        columns = {
            split: {view: _column(files[i], names[split][i]) for i, view in enumerate(VIEWS)}
            for split in names
        }
        first = next(iter(names))
        for split in names:
            for i, view in enumerate(VIEWS):
                width, expected = (columns[s][view].shape[1] for s in (split, first))
                if width != expected:
                    raise SourceError(
                        f"{files[i].path.name}: {names[split][i]} has {width} columns; expected "
                        f"{expected}, as in {names[first][i]}; give the files of one data set"
                    )
        labels = {split: _labels(files[1], names[split].labels) for split in names}
        largest = max(int(numbers.max()) for numbers in labels.values())
        if self.classes is not None and self.classes > largest + 1:
            raise SourceError(
                f"{self.single2.name}: its labels go to {largest}; expected {self.classes} classes "
                f"from 0 on; give a --classes of at most {largest + 1}"
            )
        for split, (view1, view2, label) in names.items():
            rows, view2_rows = (columns[split][view].shape[0] for view in VIEWS)
            for name, count in [(view2, view2_rows), (label, len(labels[split]))]:
                if count != rows:
                    raise SourceError(
                        f"{self.single2.name}: {name} has {count:,} rows; expected {rows:,}, as "
                        f"{view1} has in {self.single1.name}; give the files of one data set"
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

    def _names(self, first: MatlabFile, second: MatlabFile) -> dict[str, _Names]:
        variables = {*first.variables, *second.variables}
        present = [split for split in PARTS if variables.intersection(PARTS[split])]
        requested: Sequence[str] = self.parts or present or ["train"]
        names = {split: PARTS[split] for split in PARTS if split in requested}
        for view1, view2, _ in names.values():
            for name, file in ((view2, first), (view1, second)):
                if view1 not in first.variables and name in file.variables:
                    raise SourceError(
                        f"{file.path.name}: found {name}, but no {view1} in {first.path.name}; "
                        f"expected {view1} in --single1 and {view2} in --single2: are the two "
                        "swapped?"
                    )
        return names

    def _choose(self, split: str, labels: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the row numbers, in the file, of the rows that are kept."""
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
            f"{file.path.name}: {name} is {format_shape(values.shape)}; expected a "
            f"column, a class number for each row; {DOWNLOAD_AGAIN}"
        )
    values = values.reshape(-1)
    bad = np.flatnonzero(~((values >= 0) & (values <= MAX_LABEL) & (values == np.floor(values))))
    if len(bad):
        raise SourceError(
            f"{file.path.name}: {name}, row {bad[0]:,} is {values[bad[0]]}; expected a whole "
            f"number from 0 to {MAX_LABEL}; {DOWNLOAD_AGAIN}"
        )
    return values.astype(np.int64)
