"""MATLAB files: numeric matrices mapped into memory, however many rows they have."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shards.errors import DOWNLOAD, SourceError
from shards.scratch import Scratch

HDF5 = b"\x89HDF\r\n\x1a\n"
HEADER = 128  # bytes before the first element of a v5 file
HEAD = 4096  # bytes of an element that surely hold all that comes before its numbers
CHUNK = 1 << 20  # bytes held at a time while a matrix is unpacked
LARGEST_CHUNK = 1 << 28  # bytes of a chunk of HDF5, which is held as a whole
MATRIX, COMPRESSED = 14, 15  # types of an element of a v5 file
COMPLEX = 0x0800  # flag of a v5 array
KINDS = ["", "cell", "struct", "object", "char", "sparse", "double", "single"]  # by their numbers
KINDS += ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
NUMERIC = [*KINDS[6:], "logical"]
STORED = ["", "i1", "u1", "i2", "u2", "i4", "u4", "f4", "", "f8", "", "", "i8", "u8"]  # the same


class Numbers(NamedTuple):
    """Where the numbers of a matrix are, column after column."""

    dtype: np.dtype[Any]  # as stored: MATLAB writes small whole numbers of a double as bytes
    offset: int  # in the file or, where they are packed, nothing
    unpack: Callable[[BinaryIO], None] | None = None  # writes them out


class Variable(NamedTuple):
    """A variable: its name, MATLAB's class of it (or "complex"), and numbers if it has such."""

    name: str
    kind: str
    shape: tuple[int, ...]
    numbers: Numbers | None = None


class MatlabFile:
    """A MATLAB file of v5 (which `save -v6` and `-v7` write, too) or of v7.3.

    Opening it reads the heads of its variables alone. A matrix is mapped into memory where it
    lies; a packed one is first unpacked, a piece at a time, into a scratch file that all processes
    share that have this file open.
    """

    def __init__(self, path: Path) -> None:
        """List the variables; SourceError where this is no MATLAB file, or a damaged one."""
        self.path = path
        with path.open("rb") as stream:
            start = stream.read(512 + len(HDF5))  # v7.3 puts its own 512 bytes before HDF5's
        hdf5 = start.startswith(HDF5) or start.endswith(HDF5)
        found = _hdf5_variables(path) if hdf5 else _variables(path, start)
        # What else there is has no name in MATLAB: `#refs#` of v7.3, or mischief such as `../x`.
        self.variables = {v.name: v for v in found if v.name.isascii() and v.name.isidentifier()}
        packed = any(v.numbers and v.numbers.unpack for v in self.variables.values())
        self._scratch = Scratch(path) if packed else None
        self._mapped: dict[str, NDArray[Any]] = {}

    def shape(self, name: str) -> tuple[int, int]:
        """Rows and columns of a matrix; SourceError where there is none of real numbers."""
        if (variable := self.variables.get(name)) is None:
            known = ", ".join(self.variables) or "none"
            raise SourceError(
                f"{self.path.name}: no variable {name}; it has {known}; expected the file as its "
                f"publisher made it; {DOWNLOAD}"
            )
        rows, columns = variable.shape if len(variable.shape) == 2 else (0, 0)
        if variable.numbers is None or not rows * columns:
            raise SourceError(
                f"{self.path.name}: {name} is {variable.kind} {_times(variable.shape)}; expected "
                "a matrix of real numbers, full and not empty"
            )
        return rows, columns

    def matrix(self, name: str) -> NDArray[Any]:
        """A matrix [rows, columns], mapped into memory, in the type that is stored."""
        shape, numbers = self.shape(name), self.variables[name].numbers
        if name not in self._mapped and numbers is not None:
            path, offset = self.path, numbers.offset
            if numbers.unpack is not None and self._scratch is not None:
                size = math.prod(shape) * numbers.dtype.itemsize
                path, offset = self._scratch.file(f"{name}.bin", size, numbers.unpack), 0
            mapped = np.memmap(path, numbers.dtype, "r", offset, shape, "F")
            self._mapped[name] = mapped.view(np.ndarray)  # a memmap's slices are slower
        return self._mapped[name]


def _variables(path: Path, start: bytes) -> Iterator[Variable]:
    """The variables of a v5 file; numbers that are not asked for are not even read."""
    order = {b"\x00\x01IM": "<", b"\x01\x00MI": ">"}.get(start[124:HEADER])  # v5, and its ends
    if order is None:
        raise SourceError(_stranger(path, start))
    at, size = HEADER, path.stat().st_size
    with path.open("rb") as stream:
        while at < size:
            stream.seek(at)
            tag = stream.read(8)
            kind, length = struct.unpack(f"{order}II", tag.ljust(8, b"\0"))
            end = at + 8 + (length if len(tag) == 8 else 0)
            if len(tag) < 8 or (kind in (MATRIX, COMPRESSED) and end > size):
                raise SourceError(
                    f"{path.name}: {size:,} bytes; expected {end:,} at least, to the end of its "
                    f"variable at byte {at:,}: it is cut short; {DOWNLOAD}"
                )
            try:
                if kind == COMPRESSED:
                    head = next(_inflated(stream, length))
                    yield _variable(path, order, head, (at + 8, length))
                elif kind == MATRIX:
                    yield _variable(path, order, tag + stream.read(min(HEAD, length)), at)
                else:
                    raise ValueError(f"an element of type {kind}")
            except (ValueError, struct.error, zlib.error) as fault:
                raise SourceError(
                    f"{path.name}: damaged at byte {at:,} ({fault}); expected a variable; "
                    f"{DOWNLOAD}"
                ) from None
            at = end


def _variable(path: Path, order: str, head: bytes, place: int | tuple[int, int]) -> Variable:
    """A variable from the head of its element.

    `place` is where the element begins or, of a compressed one, where its zlib data do and their
    bytes.
    """
    kind, length = struct.unpack_from(f"{order}II", head)
    flags_at, _, flags_end, _ = _piece(head, 8, order)
    (flags,) = struct.unpack_from(f"{order}I", head, flags_at)
    if kind != MATRIX or not 0 < flags & 0xFF < len(KINDS):
        return Variable("", "opaque", ())  # a function or a class of the user's, laid out otherwise
    at, size, end, _ = _piece(head, flags_end, order)
    shape = struct.unpack_from(f"{order}{size // 4}I", head, at)
    at, size, end, _ = _piece(head, end, order)
    name, kind_name = head[at : at + size].decode("latin-1"), KINDS[flags & 0xFF]
    if flags & COMPLEX or kind_name not in NUMERIC:
        kind_name = f"complex {kind_name}" if flags & COMPLEX else kind_name
        return Variable(name, kind_name, shape)
    at, size, _, stored = _piece(head, end, order)
    if stored >= len(STORED) or not STORED[stored]:
        raise ValueError(f"numbers of type {stored} in {name}")
    dtype = np.dtype(order + STORED[stored])
    if size != math.prod(shape) * dtype.itemsize or at + size > 8 + length:
        raise ValueError(f"{name} of {_times(shape)} in {size:,} bytes of {dtype.name}")
    if isinstance(place, int):
        return Variable(name, kind_name, shape, Numbers(dtype, place + at))
    return Variable(
        name, kind_name, shape, Numbers(dtype, 0, partial(_unpack, path, name, *place, at, size))
    )


def _piece(head: bytes, at: int, order: str) -> tuple[int, int, int, int]:
    """Where the data of a part of an element begin, their bytes, where the next is, their type."""
    kind, size = struct.unpack_from(f"{order}II", head, at)
    if kind >> 16:  # four bytes at most lie within the tag
        return at + 4, kind >> 16, at + 8, kind & 0xFFFF
    return at + 8, size, at + 8 + -(-size // 8) * 8, kind


def _inflated(stream: BinaryIO, length: int) -> Iterator[bytes]:
    """What the next `length` bytes of a stream are when inflated, at most CHUNK at a time."""
    zipped = zlib.decompressobj()
    while not zipped.eof:
        packed = zipped.unconsumed_tail
        if not packed:
            packed = stream.read(min(CHUNK, length))
            length -= len(packed)
        piece = zipped.decompress(packed, CHUNK)
        if not packed and not piece:
            raise zlib.error("it ends too early")
        yield piece


def _unpack(
    path: Path, name: str, start: int, length: int, skip: int, size: int, out: BinaryIO
) -> None:
    """Write `size` bytes of the numbers of a compressed element, `skip` from its start."""
    left = size
    try:
        with path.open("rb") as stream:
            stream.seek(start)
            for piece in _inflated(stream, length):
                numbers = memoryview(piece)[skip : skip + left]
                skip = max(skip - len(piece), 0)
                left -= out.write(numbers)
        fault = f"{left:,} of {size:,} bytes are missing" if left else ""
    except zlib.error as error:
        fault = str(error)
    if fault:
        raise SourceError(f"{path.name}: {name} is damaged ({fault}); {DOWNLOAD}")


def _hdf5_variables(path: Path) -> list[Variable]:
    """The variables of a v7.3 file."""
    h5py = _h5py(path)
    try:
        with h5py.File(path, "r") as file:
            links = {name: file.get(name, getlink=True) for name in file}
            return [
                _hdf5_variable(path, name, file[name])
                for name, link in links.items()
                if isinstance(link, h5py.HardLink)  # others may lead to any file
            ]
    except (OSError, RuntimeError, KeyError, TypeError, ValueError) as fault:
        raise SourceError(f"{path.name}: damaged HDF5 ({fault}); {DOWNLOAD}") from None


def _h5py(path: Path) -> Any:
    try:
        import h5py
    except ImportError:
        raise SourceError(
            f"{path.name}: a file of MATLAB v7.3, which is HDF5; expected h5py to read it with; "
            "pip install h5py"
        ) from None
    return h5py


def _hdf5_variable(path: Path, name: str, item: Any) -> Variable:
    """A variable from its object in the file, whose axes MATLAB stores in reverse."""
    name_of_kind = item.attrs.get("MATLAB_class", b"")
    kind = name_of_kind.decode("latin-1") if isinstance(name_of_kind, bytes) else "unknown"
    shape = () if "MATLAB_empty" in item.attrs else getattr(item, "shape", None) or ()
    dtype = item.dtype if hasattr(item, "shape") else np.dtype("O")  # a group is a struct or sparse
    if "MATLAB_sparse" in item.attrs or dtype.names:
        kind = f"{'complex' if dtype.names else 'sparse'} {kind}"
    elif not kind:  # what other programs write
        kind = {"f4": "single", "f8": "double"}.get(dtype.str[1:], dtype.name)
    if kind not in NUMERIC or dtype.kind not in "fiu":
        return Variable(name, kind, shape[::-1])
    if item.is_virtual or item.external:
        return Variable(name, f"{kind} in another file", shape[::-1])
    offset = item.id.get_offset()  # of one stretch of the file; None for chunks
    if offset is not None and offset + item.nbytes > path.stat().st_size:
        raise OSError(f"{name} goes beyond the end of the file")
    unpack = partial(_unpack_hdf5, path, name) if offset is None else None
    return Variable(name, kind, shape[::-1], Numbers(dtype, offset or 0, unpack))


def _unpack_hdf5(path: Path, name: str, out: BinaryIO) -> None:
    """Write the columns of a data set of HDF5, reading whole chunks."""
    with _h5py(path).File(path, "r") as file:
        data = file[name]
        columns, rows = data.shape
        wide, high = data.chunks or (1, rows)
        held = wide * high * data.dtype.itemsize
        if held > LARGEST_CHUNK:
            raise SourceError(
                f"{path.name}: {name} has chunks of {held:,} bytes; expected {LARGEST_CHUNK:,} "
                f"at most; run `h5repack -l {name}:CHUNK=1x65536` on it"
            )
        step = max(1, 4 * CHUNK // held) * high
        for column in range(0, columns, wide):
            for row in range(0, rows, step):
                try:
                    block = data[column : column + wide, row : row + step]
                except OSError as fault:
                    raise SourceError(
                        f"{path.name}: {name} is damaged ({fault}); {DOWNLOAD}"
                    ) from None
                for number, values in enumerate(block, column):
                    out.seek((number * rows + row) * values.itemsize)
                    out.write(values)


def _stranger(path: Path, start: bytes) -> str:
    """What to say of a file that is neither v5 nor v7.3."""
    if start[:4].isascii() and 0 not in start[:4] and start[:6] != b"MATLAB"[: len(start)]:
        found = f"it begins with {start[:16]!r}"
    elif len(start) < HEADER:
        found = f"{len(start)} bytes"
    else:
        found = "MATLAB v4" if 0 in start[:4] else f"version {start[124:HEADER].hex()}"
    remedy = "save it again with `save -v7`" if found == "MATLAB v4" else DOWNLOAD
    return f"{path.name}: {found}; expected a file of MATLAB v5 or v7.3; {remedy}"


def _times(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape)) or "empty"
