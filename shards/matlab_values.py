"""What is no full matrix in a MATLAB file: cells of matrices or texts, sparse ones, more axes."""

import math
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heron.shards.errors import DOWNLOAD, SourceError, times
from heron.shards.matlab import LARGEST_CHUNK, MOST_UNPACKED, NUMERIC, MatlabFile

Value = NDArray[Any] | list[NDArray[Any]]


def read_value(file: MatlabFile, name: str) -> Value:
    """Returns an array of numbers, or of texts, or the matrices of a cell, column by column.

    A full matrix is mapped into memory; anything else is read as a whole, of 1 GiB at most. A
    cell of texts is one array of them.

    Raises:
        SourceError: the variable is none of these, is too large, or is damaged.
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
                value = _of_item(opened, opened[name], where)
        else:
            from scipy.io import loadmat

            loaded = loadmat(BytesIO(file.element(name)), variable_names=[name])
            value = _plain(loaded[name], where)
    except SourceError:
        raise
    except (OSError, RuntimeError, KeyError, TypeError, ValueError) as fault:
        raise SourceError(f"{where} is damaged ({fault}); {DOWNLOAD}") from None
    if isinstance(value, list):
        if any(isinstance(one, list) for one in value):
            raise SourceError(f"{where} is a cell of cells; expected matrices or texts in it")
        if value and all(one.dtype.kind == "U" for one in value):
            return np.array([str(one) for one in value])
    return value


def _plain(value: Any, where: str) -> Any:
    """Returns what SciPy made of a variable as arrays and lists of them."""
    if hasattr(value, "check_format"):
        return _dense(value, where)
    if value.dtype == object:
        return [_plain(one, where) for one in value.ravel("F")]
    if value.dtype.kind == "U":
        return np.array("".join(value.ravel().tolist()))
    return _real(value, where)


def _dense(sparse: Any, where: str) -> NDArray[Any]:
    """Returns a sparse matrix as a full one, its indices checked."""
    _bound(sparse.shape, 8, where)
    sparse.check_format(full_check=True)  # or a number would be written anywhere in memory
    return _real(sparse.toarray(), where)


def _real(value: Any, where: str) -> NDArray[Any]:
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiub":
        raise SourceError(
            f"{where} has a {'complex' if value.dtype.kind == 'c' else 'struct or another object'}"
            "; expected matrices of real numbers, or texts; leave it out with --ignore"
        )
    return value


def _bound(shape: tuple[int, ...], item_bytes: int, where: str) -> None:
    if (size := math.prod(shape) * item_bytes) > MOST_UNPACKED:
        raise SourceError(
            f"{where} is {times(shape)}, {size:,} bytes in memory; expected {MOST_UNPACKED:,} at "
            "most; save its matrices as full variables of their own"
        )


def _of_item(opened: Any, item: Any, where: str, inner: bool = False) -> Any:
    """Returns an object of a v7.3 file, whose axes are stored in reverse."""
    import h5py

    kind = item.attrs.get("MATLAB_class", b"").decode("latin-1")
    if isinstance(item, h5py.Group) and "MATLAB_sparse" in item.attrs:
        from scipy.sparse import csc_array

        parts = [_numbers(item[part], where) for part in ("data", "ir", "jc") if part in item]
        rows, columns = int(item.attrs["MATLAB_sparse"]), len(parts[-1]) - 1
        _bound((rows, columns), 8, where)
        parts = parts if len(parts) == 3 else [np.empty(0), np.empty(0, int), parts[-1]]
        return _dense(csc_array(tuple(parts), shape=(rows, columns)), where)
    if isinstance(item, h5py.Group):
        raise SourceError(f"{where} has a struct or another object; leave it out with --ignore")
    if kind == "cell" and not inner:
        _bound(item.shape, 8, where)
        return [_of_item(opened, opened[ref], where, True) for ref in item[()].ravel().tolist()]
    if kind == "cell":
        return []
    values = _numbers(item, where).T
    if kind == "char":
        text = "".join(map(chr, values.ravel("F").tolist()))
        return np.array("" if "MATLAB_empty" in item.attrs else text)
    return _real(values, where)


def _numbers(item: Any, where: str) -> NDArray[Any]:
    """Reads a data set of HDF5 that lies in this file."""
    if item.is_virtual or item.external:
        raise SourceError(f"{where} lies in another file; expected its numbers here; {DOWNLOAD}")
    _bound(item.shape, item.dtype.itemsize, where)
    if item.chunks and (held := math.prod(item.chunks) * item.dtype.itemsize) > LARGEST_CHUNK:
        raise SourceError(
            f"{where} has chunks of {held:,} bytes; expected {LARGEST_CHUNK:,} at most; {DOWNLOAD}"
        )
    values: NDArray[Any] = item[()]
    return values
