"""MATLAB files: numeric matrices mapped into memory, however many rows they have."""

import hashlib
import math
import os
import struct
import weakref
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from heron.shards.cache import LocalFile, ShardCache
from heron.shards.errors import DOWNLOAD, SourceError, times

HDF5 = b"\x89HDF\r\n\x1a\n"
HEADER = 128  # bytes before the first element of a v5 file
HEAD = 4096  # bytes of an element that surely hold all that comes before its numbers
CHUNK = 1 << 20  # bytes held at a time while a matrix is unpacked
LARGEST_CHUNK = 1 << 28  # bytes of a chunk of HDF5, which is held as a whole
# Bytes of a matrix unpacked, or so many times the file's, if that is more.
MOST_UNPACKED, MOST_FOLD = 1 << 30, 100
MATRIX, COMPRESSED = 14, 15  # types of an element of a v5 file
COMPLEX = 0x0800  # flag of a v5 array
KINDS = ["", "cell", "struct", "object", "char", "sparse", "double", "single"]  # by their numbers
KINDS += ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
NUMERIC = [*KINDS[6:], "logical"]
NO_NUMBERS = np.dtype(np.void)
STORED = ["", "i1", "u1", "i2", "u2", "i4", "u4", "f4", "", "f8", "", "", "i8", "u8"]  # the same


class Variable(NamedTuple):
    """A variable: its name, MATLAB's class of it (or "complex"), its shape, where its numbers are.

    `dtype` is that of the stored numbers, since MATLAB writes small whole numbers of a double as
    bytes, and NO_NUMBERS where the variable is no array of real ones. The rest is of a v5 file:
    where the element begins, its bytes before the numbers, its length where it is compressed.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any] = NO_NUMBERS
    start: int = 0
    skip: int = 0
    packed: int | None = None


class MatlabFile:
    """A MATLAB file of v5 (which `save -v6` and `-v7` write, too) or of v7.3.

    Opening it reads the heads of its variables alone. A matrix is mapped into memory where it
    lies; a packed one is first unpacked, a piece at a time, into a file of the cache's folder that
    all processes share, and that the last of them removes. (scipy.io.loadmat would hold the whole
    matrix in memory, in each of them.)
    """

    def __init__(self, path: Path) -> None:
        """Lists the variables; SourceError where this is no MATLAB file, or a damaged one."""
        self.path = path
        with path.open("rb") as stream:
            start = stream.read(512 + len(HDF5))  # v7.3 puts its own 512 bytes before HDF5's
        self.hdf5 = start.startswith(HDF5) or start.endswith(HDF5)
        variables = _hdf5_variables(path) if self.hdf5 else _variables(path, start)
        # What else there is has no name in MATLAB: `#refs#` of v7.3, or mischief such as `../x`.
        named = [v for v in variables if v.name.isascii() and v.name.isidentifier()]
        self.variables = {variable.name: variable for variable in named}
        self._mapped: dict[str, NDArray[Any]] = {}

    def shape(self, name: str) -> tuple[int, int]:
        """Returns rows and columns of a matrix; SourceError where it is none of real numbers."""
        if (variable := self.variables.get(name)) is None:
            known = ", ".join(self.variables) or "none"
            raise SourceError(
                f"{self.path.name}: no variable {name}; it has {known}; expected the file as its "
                f"publisher made it; {DOWNLOAD}"
            )
        rows, columns = variable.shape if len(variable.shape) == 2 else (0, 0)
        if variable.dtype == NO_NUMBERS or not rows * columns:
            raise SourceError(
                f"{self.path.name}: {name} is {variable.kind} {times(variable.shape)}; expected "
                "a matrix of real numbers, full and not empty"
            )
        return rows, columns

    def element(self, name: str) -> bytes:
        """Returns a v5 file of one variable alone, unpacked, of MOST_UNPACKED bytes at most."""
        variable = self.variables[name]
        with self.path.open("rb") as stream:
            header = stream.read(HEADER)
            order = "<" if header.endswith(b"IM") else ">"
            stream.seek(variable.start)
            if variable.packed is None:
                tag = stream.read(8)
                return header + tag + stream.read(struct.unpack(f"{order}II", tag)[1])
            data = bytearray()
            try:
                for piece in _inflated(stream, variable.packed):
                    data += piece
                    if len(data) > MOST_UNPACKED:
                        raise SourceError(
                            f"{self.path.name}: {name} has more than {MOST_UNPACKED:,} bytes "
                            "unpacked; expected so many at most; save its matrices as full "
                            "variables of their own"
                        )
            except zlib.error as fault:
                raise SourceError(
                    f"{self.path.name}: {name} is damaged ({fault}); {DOWNLOAD}"
                ) from None
        return header + bytes(data)

    def matrix(self, name: str) -> NDArray[Any]:
        """Returns a matrix [rows, columns], mapped into memory, in the type that is stored."""
        if name not in self._mapped:
            shape, variable = self.shape(name), self.variables[name]
            path, offset = self.path, variable.start + variable.skip
            if self.hdf5 or variable.packed is not None:
                path, offset = self._unpacked(variable), 0
            mapped = np.memmap(path, variable.dtype, "r", offset, shape, "F")
            self._mapped[name] = mapped.view(np.ndarray)  # a memmap's slices are slower
        return self._mapped[name]

    def _unpacked(self, variable: Variable) -> Path:
        """Returns a file of the numbers alone, which the first process that asks for it writes."""
        cache = ShardCache(ShardCache(limit=0).folder / "unpacked", limit=1 << 60)
        cache.clear()  # of what builds that were killed have left
        state = self.path.stat()
        identity = self.path.resolve(), state.st_ino, state.st_size, state.st_mtime_ns, variable
        size = math.prod(variable.shape) * variable.dtype.itemsize
        if size > (most := max(MOST_UNPACKED, MOST_FOLD * state.st_size)):
            raise SourceError(
                f"{self.path.name}: {variable.name} has {size:,} bytes unpacked; expected {most:,} "
                f"at most, of a file of {state.st_size:,}; save it uncompressed with `save -v6`"
            )

        def unpack(stream: BinaryIO) -> None:
            with open(os.dup(stream.fileno()), "r+b") as out:
                (_unpack_hdf5 if self.hdf5 else _unpack)(self.path, variable, out)

        name = hashlib.sha256(repr(identity).encode()).hexdigest()
        held = cache.get(name, size, unpack, of_content=False)
        weakref.finalize(self, _leave, held, cache)
        return held.path


def _leave(held: LocalFile, cache: ShardCache) -> None:
    held.close()
    cache.clear(wait=False)


def _variables(path: Path, start: bytes) -> Iterator[Variable]:
    """Reads the heads of the variables of a v5 file, and none of their numbers."""
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
                    variable = _variable(order, next(_inflated(stream, length)))
                    yield variable._replace(start=at + 8, packed=length)
                elif kind == MATRIX:
                    variable = _variable(order, tag + stream.read(min(HEAD, length)))
                    yield variable._replace(start=at)
                else:
                    raise ValueError(f"an element of type {kind}")
            except (ValueError, struct.error, zlib.error) as fault:
                raise SourceError(
                    f"{path.name}: damaged at byte {at:,} ({fault}); expected a variable; "
                    f"{DOWNLOAD}"
                ) from None
            at = end


def _variable(order: str, head: bytes) -> Variable:
    """Parses the head of an element: its tag, flags, dimensions, name, and the tag of its numbers.

    The layout is that of MathWorks' "MAT-File Level 5 File Format".
    """
    kind, length = struct.unpack_from(f"{order}II", head)
    flags_at, _, flags_end, _ = _part(head, 8, order)
    (flags,) = struct.unpack_from(f"{order}I", head, flags_at)
    if kind != MATRIX or not 0 < flags & 0xFF < len(KINDS):
        return Variable("", "opaque", ())  # a function or a class of the user's, laid out otherwise
    at, size, end, _ = _part(head, flags_end, order)
    shape = struct.unpack_from(f"{order}{size // 4}I", head, at)
    at, size, end, _ = _part(head, end, order)
    name, kind_name = head[at : at + size].decode("latin-1"), KINDS[flags & 0xFF]
    if flags & COMPLEX or kind_name not in NUMERIC:
        return Variable(name, "complex " * bool(flags & COMPLEX) + kind_name, shape)
    at, size, _, stored = _part(head, end, order)
    if stored >= len(STORED) or not STORED[stored]:
        raise ValueError(f"numbers of type {stored} in {name}")
    dtype = np.dtype(order + STORED[stored])
    if size != math.prod(shape) * dtype.itemsize or at + size > 8 + length:
        raise ValueError(f"{name} of {times(shape)} in {size:,} bytes of {dtype.name}")
    return Variable(name, kind_name, shape, dtype, skip=at)


def _part(head: bytes, at: int, order: str) -> tuple[int, int, int, int]:
    """Returns where the data of a part begin, their bytes, where the next part is, their type."""
    kind, size = struct.unpack_from(f"{order}II", head, at)
    if kind >> 16:  # four bytes at most lie within the tag
        return at + 4, kind >> 16, at + 8, kind & 0xFFFF
    return at + 8, size, at + 8 + -(-size // 8) * 8, kind


def _inflated(stream: BinaryIO, length: int) -> Iterator[bytes]:
    """Inflates the next `length` bytes of a stream, at most CHUNK at a time."""
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


def _unpack(path: Path, variable: Variable, out: BinaryIO) -> None:
    """Writes the numbers of a compressed element."""
    assert variable.packed is not None
    size = left = math.prod(variable.shape) * variable.dtype.itemsize
    skip = variable.skip
    try:
        with path.open("rb") as stream:
            stream.seek(variable.start)
            for piece in _inflated(stream, variable.packed):
                left -= out.write(memoryview(piece)[skip : skip + left])
                skip = max(skip - len(piece), 0)
        fault = f"{left:,} of {size:,} bytes are missing" if left else ""
    except zlib.error as error:
        fault = str(error)
    if fault:
        raise SourceError(f"{path.name}: {variable.name} is damaged ({fault}); {DOWNLOAD}")


def _hdf5_variables(path: Path) -> list[Variable]:
    """Reads the heads of the variables of a v7.3 file."""
    import h5py  # here: only files of v7.3 need it

    try:
        with h5py.File(path, "r") as file:
            return [
                _hdf5_variable(name, file[name])
                for name in file
                # Other links may lead to any file.
                if isinstance(file.get(name, getlink=True), h5py.HardLink)
            ]
    except (OSError, RuntimeError, KeyError, TypeError, ValueError) as fault:
        raise SourceError(f"{path.name}: damaged HDF5 ({fault}); {DOWNLOAD}") from None


def _hdf5_variable(name: str, item: Any) -> Variable:
    """Describes an object of the file, whose axes MATLAB stores in reverse."""
    kind = matlab_class(item)
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
    return Variable(name, kind, shape[::-1], dtype)


def matlab_class(item: Any) -> str:
    """Returns MATLAB's class of an object of HDF5, "" where none is stated."""
    kind = item.attrs.get("MATLAB_class", "")
    if isinstance(kind, bytes):  # as MATLAB writes it; others write a text
        return kind.decode("latin-1")
    return kind if isinstance(kind, str) else "unknown"


def _unpack_hdf5(path: Path, variable: Variable, out: BinaryIO) -> None:
    """Writes the columns of a data set of HDF5, reading whole chunks."""
    import h5py

    name = variable.name
    with h5py.File(path, "r") as file:
        data = file[name]
        columns, rows = data.shape
        held = math.prod(data.chunks or (1, rows)) * data.dtype.itemsize
        if held > LARGEST_CHUNK:
            raise SourceError(
                f"{path.name}: {name} has chunks of {held:,} bytes; expected {LARGEST_CHUNK:,} "
                f"at most; run `h5repack -l {name}:CHUNK=1x65536` on it"
            )
        # One stretch of the file where there are no chunks: a column at a time.
        places = (
            data.iter_chunks() if data.chunks else (np.s_[at : at + 1, :] for at in range(columns))
        )
        for place in places:
            try:
                block = data[place]
            except OSError as fault:
                raise SourceError(f"{path.name}: {name} is damaged ({fault}); {DOWNLOAD}") from None
            first, row = place[0].start, place[1].start or 0
            for column, values in enumerate(block, first):
                out.seek((column * rows + row) * values.itemsize)
                out.write(values)


def _stranger(path: Path, start: bytes) -> str:
    """Says what a file is that is neither v5 nor v7.3."""
    if start[:4].isascii() and 0 not in start[:4] and start[:6] != b"MATLAB"[: len(start)]:
        found = f"it begins with {start[:16]!r}"
    elif len(start) < HEADER:
        found = f"{len(start)} bytes"
    else:
        found = "MATLAB v4" if 0 in start[:4] else f"version {start[124:HEADER].hex()}"
    remedy = "save it again with `save -v7`" if found == "MATLAB v4" else DOWNLOAD
    return f"{path.name}: {found}; expected a file of MATLAB v5 or v7.3; {remedy}"
