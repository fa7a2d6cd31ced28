"""MATLAB files of several views: a cell of matrices, or matrices by name, and their labels."""

import math
from collections.abc import Sequence
from functools import cached_property
from io import BytesIO
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, FilePath

from heron.base.errors import DOWNLOAD_AGAIN, SourceError, format_shape
from heron.sources.matlab import (
    MAX_CHUNK_BYTES,
    MAX_UNPACKED_BYTES,
    NUMERIC,
    MatlabFile,
    matlab_class,
)
from heron.sources.named_arrays import WHOLE_LABELS, NamedArrays

Value = NDArray[Any] | list[NDArray[Any]]


class Mat(NamedArrays):
    """A MATLAB file of v5 or v7.3: matrices, full or sparse, by name or in a cell, and labels.

    The matrices of a cell X are the arrays X1, X2, ...; a cell of texts is an array of names, of
    the classes where it has one for each.
    Samples are the rows or the columns, whichever the labels match in number, and are the last
    axis of pictures (uint8 height x width x channels x samples). Labels are a vector of class
    numbers, a cell of class names, or a matrix of 0 and 1.
    """

    name: ClassVar[str] = "mat"
    named_by: ClassVar[str] = "mat"
    examples: ClassVar[str] = (
        "heron shards build mat --mat handwritten.mat --labels-name gt --out data/handwritten"
    )

    mat: FilePath = Field(description="the file, of MATLAB v5 or v7.3")
    labels_name: str = Field(
        "Y",
        description="the variable of the labels (default: Y, or the only one called gnd, truth, "
        "labels or alike, in upper or lower case); without it no row has a label",
    )
    samples: Literal["rows", "columns"] | None = Field(
        None, description="what samples are in a matrix (default: found from their number)"
    )

    @property
    def names(self) -> Sequence[str]:
        """The arrays that are read, and the variables that are ignored."""
        return [*self._stored, *(name for name in self.ignore if name not in self._stored)]

    def where(self, name: str) -> str:
        """Returns the name of the file."""
        return self.mat.name

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of an array as it is stored."""
        return self._stored[name].shape

    def array(self, name: str) -> NDArray[Any]:
        """Returns an array, its samples along the first axis."""
        array = self._stored[name]
        if name == self.label_array:
            return self._orient_labels(array)
        return np.moveaxis(array, -1, 0) if self._samples_last(name) else array

    @cached_property
    def _stored(self) -> dict[str, NDArray[Any]]:
        """The arrays as the file stores them, by name; those of a cell are numbered from 1."""
        file, arrays = MatlabFile(self.mat), dict[str, NDArray[Any]]()
        variable_of = {name: name for name in self.ignore if name in file.variables}
        for name in file.variables:
            if name in self.ignore:
                continue
            value = read_value(file, name)
            values = enumerate(value, 1) if isinstance(value, list) else [("", value)]
            for number, array in values:
                array_name = f"{name}{number}"
                if other := variable_of.get(array_name):
                    raise SourceError(
                        f"{self.mat.name}: variables {other!r} and {name!r} both have an array "
                        f"{array_name!r}, since the matrices of a cell are numbered from 1; "
                        "rename a variable in the file, or drop the cell with --ignore"
                    )
                arrays[array_name], variable_of[array_name] = array, name
        if unknown := set(self.ignore).difference(file.variables, arrays):
            raise SourceError(
                f"{self.mat.name}: no variable {unknown.pop()!r} to ignore; choose one of "
                f"{', '.join(file.variables)}"
            )
        return arrays

    @cached_property
    def _count(self) -> int:
        """The number of samples: that of the labels, or the one length that all views share."""
        label = self._stored.get(self.label_array) if self.label_kind != "none" else None
        if label is not None and label.size == max(label.shape, default=0):
            return int(label.size)
        arrays = {n: a for n, a in self._stored.items() if n not in self.ignore and a.size > 1}
        arrays = {n: a for n, a in arrays.items() if a.dtype.kind != "U"}
        chosen = arrays if self.view_names is None else {}
        chosen = chosen or {name: arrays[name] for name in self.view_names or () if name in arrays}
        if label is not None:
            chosen[self.label_array] = label
        ends = [{array.shape[0], array.shape[-1]} for array in chosen.values()]
        shared = set.intersection(*ends) if ends else set()
        if len(shared) > 1 and self.samples:
            first = next(iter(chosen.values()))
            return int(first.shape[0 if self.samples == "rows" else -1])
        if len(shared) != 1:
            shapes = ", ".join(
                f"{name} {format_shape(array.shape)}" for name, array in chosen.items()
            )
            count = "two numbers" if shared else "no number"
            raise SourceError(
                f"{self.mat.name}: {count} of samples that fit all of {shapes or 'no array'}; "
                "name the arrays that are not used with --ignore, the labels with --labels-name, "
                "and what samples are with --samples rows or columns"
            )
        return int(shared.pop())

    def _samples_last(self, name: str) -> bool:
        array, count = self._stored[name], self._count
        if array.ndim < 2 or count not in (array.shape[0], array.shape[-1]):
            return False
        if array.shape[0] == array.shape[-1] and self.samples is None:
            raise SourceError(
                f"{self.mat.name}: {name} is {format_shape(array.shape)}, and samples may be its "
                "rows or columns; use --samples rows or columns"
            )
        if array.shape[0] == array.shape[-1]:
            return self.samples == "columns"
        return bool(array.shape[0] != count)

    def _can_be_view(self, name: str) -> bool:
        return self._count in self.array(name).shape[:1] and super()._can_be_view(name)

    def _describe_conversion(self, name: str) -> str:
        notes = [super()._describe_conversion(name)]
        if self._samples_last(name):
            notes.append(
                f"view {name!r} is {format_shape(self._stored[name].shape)}: samples are last"
            )
        return "; ".join(filter(None, notes))

    def _orient_labels(self, array: NDArray[Any]) -> NDArray[Any]:
        """Returns labels as whole numbers [rows] or [rows, labels], or as names [rows]."""
        if array.size == self._count:
            array = array.reshape(-1)
        elif self._samples_last(self.label_array):
            array = array.T
        if array.dtype.kind != "f" or self.unknown == "allow":
            return array
        if len(bad := np.argwhere(~(np.isfinite(array) & (array == np.floor(array))))):
            raise SourceError(
                f"{self.mat.name}: {self.label_array}, row {bad[0][0]} is {array[tuple(bad[0])]}; "
                f"{WHOLE_LABELS}"
            )
        return array.astype(np.int64)


def read_value(file: MatlabFile, name: str) -> Value:
    """Returns an array of numbers, or of texts, or the matrices of a cell, column by column.

    A full matrix is mapped into memory; anything else is read into memory, 1 GiB at most. A cell of
    texts becomes one array. Raises SourceError for other, larger or damaged variables.
    """
    variable = file.variables[name]
    if variable.kind in NUMERIC and len(variable.shape) == 2 and 0 not in variable.shape:
        return file.matrix(name)
    where = f"{file.path.name}: {name}"
    value: Value
    try:
        if file.hdf5:
            import h5py

            with h5py.File(file.path, "r") as opened:
                value = _from_hdf5(opened, opened[name], where)
        else:
            from scipy.io import loadmat

            loaded = loadmat(BytesIO(file.element(name)), variable_names=[name])
            value = _from_scipy(loaded[name], where)
    except SourceError:
        raise
    except (OSError, RuntimeError, KeyError, TypeError, ValueError) as fault:
        raise SourceError(f"{where} is damaged ({fault}); {DOWNLOAD_AGAIN}") from None
    if isinstance(value, list):
        if any(isinstance(item, list) for item in value):
            raise SourceError(f"{where} is a cell of cells; a cell must have matrices or texts")
        if value and all(item.dtype.kind == "U" and not item.ndim for item in value):
            return np.array([str(item) for item in value])
    return value


def _from_scipy(value: Any, where: str) -> Any:
    """Converts a variable that SciPy loaded to an array, or for a cell to a list of arrays."""
    if hasattr(value, "check_format"):
        return _dense(value, where)
    if value.dtype == object:
        return [_from_scipy(item, where) for item in value.ravel("F")]
    if value.dtype.kind == "U":
        return _of_texts(value.ravel().tolist())
    return _check_real(value, where)


def _of_texts(rows: list[str]) -> NDArray[np.str_]:
    """Returns the text of an array of characters, or those of its rows, without their padding."""
    return np.array([row.rstrip() for row in rows] if len(rows) > 1 else "".join(rows))


def _dense(sparse: Any, where: str) -> NDArray[Any]:
    """Converts a sparse matrix to a full one, after checking its indices."""
    _check_size(sparse.shape, 8, where)
    sparse.check_format(full_check=True)  # or a number would be written anywhere in memory
    return _check_real(sparse.toarray(), where)


def _check_real(value: Any, where: str) -> NDArray[Any]:
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiub":
        raise SourceError(
            f"{where} is a {'complex' if value.dtype.kind == 'c' else 'struct or another object'}, "
            "not a matrix of real numbers, or texts; drop it with --ignore "
            f"{where.rpartition(' ')[2]}"
        )
    return value


def _check_size(shape: tuple[int, ...], item_bytes: int, where: str) -> None:
    if (size := math.prod(shape) * item_bytes) > MAX_UNPACKED_BYTES:
        raise SourceError(
            f"{where} is {format_shape(shape)}, {size:,} bytes in memory, and the limit is "
            f"{MAX_UNPACKED_BYTES:,}; save its matrices as separate full variables"
        )


def _from_hdf5(opened: Any, item: Any, where: str, in_cell: bool = False) -> Any:
    """Converts an object of a v7.3 file, whose axes are stored in reverse order."""
    import h5py

    kind = matlab_class(item)
    if isinstance(item, h5py.Group) and "MATLAB_sparse" in item.attrs:
        from scipy.sparse import csc_array

        arrays = [_read_dataset(item[key], where) for key in ("data", "ir", "jc") if key in item]
        rows, columns = int(item.attrs["MATLAB_sparse"]), len(arrays[-1]) - 1
        _check_size((rows, columns), 8, where)
        arrays = arrays if len(arrays) == 3 else [np.empty(0), np.empty(0, int), arrays[-1]]
        return _dense(csc_array(tuple(arrays), shape=(rows, columns)), where)
    if isinstance(item, h5py.Group):
        name = where.rpartition(" ")[2]
        raise SourceError(f"{where} has a struct or another object; drop it with --ignore {name}")
    if "MATLAB_empty" in item.attrs:  # its numbers are its shape
        return [] if kind == "cell" else np.array("") if kind == "char" else np.empty((0, 0))
    if kind == "cell" and not in_cell:
        _check_size(item.shape, 8, where)
        references = item[()].ravel().tolist()
        return [_from_hdf5(opened, opened[ref], where, in_cell=True) for ref in references]
    if kind == "cell":
        return []
    values = _read_dataset(item, where).T
    if kind == "char":
        return _of_texts(["".join(map(chr, row)) for row in np.atleast_2d(values).tolist()])
    return _check_real(values, where)


def _read_dataset(item: Any, where: str) -> NDArray[Any]:
    """Reads an HDF5 data set that is stored in this file."""
    if item.is_virtual or item.external:
        raise SourceError(f"{where} is in another file, where it cannot be read; {DOWNLOAD_AGAIN}")
    _check_size(item.shape, item.dtype.itemsize, where)
    if item.chunks and (size := math.prod(item.chunks) * item.dtype.itemsize) > MAX_CHUNK_BYTES:
        raise SourceError(
            f"{where} has chunks of {size:,} bytes, and the limit is {MAX_CHUNK_BYTES:,}; "
            f"{DOWNLOAD_AGAIN}"
        )
    values: NDArray[Any] = item[()]
    return values
