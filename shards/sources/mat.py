"""MATLAB files of several views: a cell of matrices, or matrices by name, and their labels."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, FilePath

from heron.shards.errors import SourceError, times
from heron.shards.matlab import MatlabFile
from heron.shards.matlab_values import read_value
from heron.shards.sources.named import NamedArrays


class Mat(NamedArrays):
    """A MATLAB file of v5 or v7.3: matrices, full or sparse, by name or in a cell, and labels.

    The matrices of a cell X are the arrays X1, X2, ...; a cell of texts is an array of names.
    Samples are the rows or the columns, whichever the labels have as many of, and are the last
    axis of pictures (uint8 height x width x channels x samples). Labels are a vector of class
    numbers, a cell of class names, or a matrix of 0 and 1.
    """

    name: ClassVar[str] = "mat"
    examples: ClassVar[str] = (
        "heron shards build mat --mat handwritten.mat --labels-name gt --out data/handwritten"
    )

    mat: FilePath = Field(description="the file, of MATLAB v5 or v7.3")
    labels_name: str = Field(
        "Y", description="the variable of the labels; without it no row has a label"
    )
    samples: Literal["rows", "columns"] | None = Field(
        None, description="what samples are in a matrix (default: what their number tells)"
    )

    @property
    def dataset(self) -> str:
        """The name of the file."""
        return self.mat.stem

    @property
    def files(self) -> list[Path]:
        """The file."""
        return [self.mat]

    @property
    def names(self) -> Sequence[str]:
        """The variables, and those that are ignored; of a cell, its matrices."""
        return [*self._stored, *(name for name in self.ignore if name not in self._stored)]

    def where(self, name: str) -> str:
        """Returns the name of the file."""
        return self.mat.name

    def array(self, name: str) -> NDArray[Any]:
        """Returns an array, its samples along the first axis."""
        array = self._stored[name]
        if name == self.labels_name:
            return self._label_array(array)
        return np.moveaxis(array, -1, 0) if self._turned(name) else array

    @cached_property
    def _stored(self) -> dict[str, NDArray[Any]]:
        """The arrays as the file has them."""
        file, arrays = MatlabFile(self.mat), dict[str, NDArray[Any]]()
        for name in file.variables:
            if name in self.ignore:
                continue
            value = read_value(file, name)
            values = enumerate(value, 1) if isinstance(value, list) else [("", value)]
            arrays |= {f"{name}{number}": one for number, one in values}
        if unknown := set(self.ignore).difference(file.variables, arrays):
            raise SourceError(
                f"{self.mat.name}: no variable {unknown.pop()!r} to ignore; it has "
                f"{', '.join(file.variables)}; expected one of them"
            )
        return arrays

    @cached_property
    def _count(self) -> int:
        """The number of samples: that of the labels, or the one that all views share."""
        label = self._stored.get(self.labels_name) if self.label_kind != "none" else None
        if label is not None and label.size == max(label.shape, default=0):
            return int(label.size)
        arrays = {n: a for n, a in self._stored.items() if n not in self.ignore and a.size > 1}
        chosen = arrays if self.view_names is None else {}
        chosen = chosen or {name: arrays[name] for name in self.view_names or () if name in arrays}
        if label is not None:
            chosen[self.labels_name] = label
        ends = [{array.shape[0], array.shape[-1]} for array in chosen.values()]
        shared = set.intersection(*ends) if ends else set()
        if len(shared) > 1 and self.samples:
            first = next(iter(chosen.values()))
            return int(first.shape[0 if self.samples == "rows" else -1])
        if len(shared) != 1:
            shapes = ", ".join(f"{name} {times(array.shape)}" for name, array in chosen.items())
            found = "two numbers" if shared else "no number"
            raise SourceError(
                f"{self.mat.name}: {found} of samples that fit all of {shapes or 'no array'}; "
                "expected one; say which arrays are not used with --ignore, which are the labels "
                "with --labels-name, and what samples are with --samples rows or columns"
            )
        return int(shared.pop())

    def _turned(self, name: str) -> bool:
        """Returns whether the samples of an array are along its last axis."""
        array, count = self._stored[name], self._count
        if array.ndim < 2 or count not in (array.shape[0], array.shape[-1]):
            return False
        if array.shape[0] == array.shape[-1] and self.samples is None:
            raise SourceError(
                f"{self.mat.name}: {name} is {times(array.shape)}; expected to know what its "
                "samples are; say --samples rows or columns"
            )
        if array.shape[0] == array.shape[-1]:
            return self.samples == "columns"
        return bool(array.shape[0] != count)

    def _may_view(self, name: str) -> bool:
        return self._count in self.array(name).shape[:1] and super()._may_view(name)

    def _conversion(self, name: str) -> str:
        said = [super()._conversion(name)]
        if self._turned(name):
            said.append(f"view {name!r} is {times(self._stored[name].shape)}: samples are last")
        return "; ".join(filter(None, said))

    def _label_array(self, array: NDArray[Any]) -> NDArray[Any]:
        """Returns labels as whole numbers [rows] or [rows, labels], or as names [rows]."""
        if array.size == self._count:
            array = array.reshape(-1)
        elif self._turned(self.labels_name):
            array = array.T
        if array.dtype.kind != "f" or self.unknown == "allow":
            return array
        if len(bad := np.argwhere(~(np.isfinite(array) & (array == np.floor(array))))):
            raise SourceError(
                f"{self.mat.name}: {self.labels_name}, row {bad[0][0]} is {array[tuple(bad[0])]}; "
                "expected whole numbers: unknown labels and real ones are not read"
            )
        return array.astype(np.int64)
