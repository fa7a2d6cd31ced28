"""Reads MATLAB files: maps numeric matrices of any number of rows into memory."""

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

from heron.base.errors import DOWNLOAD_AGAIN, SourceError, format_shape
from heron.shards.cache import LocalFile, ShardCache

HDF5 = b"\x89HDF\r\n\x1a\n"
HEADER_BYTES = 128  # before the first element of a v5 file
HEAD_BYTES = 4096  # of an element; enough for everything that precedes its numbers
CHUNK = 1 << 20  # bytes held at a time while a matrix is decompressed
MAX_CHUNK_BYTES = 1 << 28  # bytes of an HDF5 chunk, which is held whole
# Limits of a decompressed matrix: in bytes, and as a multiple of the file size; the larger counts.
MAX_UNPACKED_BYTES, MAX_UNPACKED_RATIO = 1 << 30, 100
MATRIX, COMPRESSED = 14, 15  # element types of a v5 file
COMPLEX_FLAG = 0x0800  # of a v5 array
# MATLAB classes, and dtypes of stored numbers, by their codes.
KINDS = ["", "cell", "struct", "object", "char", "sparse", "double", "single"]
KINDS += ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
NUMERIC = [*KINDS[6:], "logical"]
NOT_NUMERIC = np.dtype(np.void)
STORED = ["", "i1", "u1", "i2", "u2", "i4", "u4", "f4", "", "f8", "", "", "i8", "u8"]


class Variable(NamedTuple):
    """A variable: its name, MATLAB class ("complex …" included), shape, and where its numbers are.

    `dtype` is that of the stored numbers, since MATLAB stores doubles with small integer values as
    bytes; it is NOT_NUMERIC unless the variable is an array of real numbers. The rest is for v5:
    where the element starts, the bytes before its numbers, and its length if it is compressed.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any] = NOT_NUMERIC
    start: int = 0
    skip: int = 0
    packed: int | None = None


class MatlabFile:
    """A MATLAB file of v5 (as `save -v6` and `-v7` write it) or v7.3.

    Opening it reads only the heads of its variables. A matrix is mapped in place, a compressed one
    after it is unpacked to a cached file that all processes share and the last one removes;
    scipy.io.loadmat would hold it whole in each process.
    """

    def __init__(self, path: Path) -> None:
        """Lists the variables; SourceError where the file is damaged or not a MATLAB file."""
        self.path = path
        with path.open("rb") as stream:
            start = stream.read(512 + len(HDF5))  # v7.3 puts its own 512 bytes before HDF5's
        self.hdf5 = start.startswith(HDF5) or start.endswith(HDF5)
        variables = _read_hdf5_variables(path) if self.hdf5 else _read_variables(path, start)
        # Other names are not variables: `#refs#` of v7.3, or malicious ones such as `../x`.
        named = [v for v in variables if v.name.isascii() and v.name.isidentifier()]
        self.variables = {variable.name: variable for variable in named}
        self._mapped: dict[str, NDArray[Any]] = {}

    def shape(self, name: str) -> tuple[int, int]:
        """Returns rows and columns of a matrix; SourceError unless it is one of real numbers."""
        if (variable := self.variables.get(name)) is None:
            names = ", ".join(self.variables) or "none"
            raise SourceError(
                f"{self.path.name} has no variable {name}, only {names}; {DOWNLOAD_AGAIN}"
            )
        rows, columns = variable.shape if len(variable.shape) == 2 else (0, 0)
        if variable.dtype == NOT_NUMERIC or not rows * columns:
            raise SourceError(
                f"{self.path.name}: {name} must be a matrix of real numbers, full and not empty, "
                f"got {variable.kind} {format_shape(variable.shape)}"
            )
        return rows, columns

    def element(self, name: str) -> bytes:
        """Returns a v5 file with only one variable, unpacked, of at most MAX_UNPACKED_BYTES."""
        variable = self.variables[name]
        with self.path.open("rb") as stream:
            header = stream.read(HEADER_BYTES)
            byte_order = "<" if header.endswith(b"IM") else ">"
            stream.seek(variable.start)
            if variable.packed is None:
                tag = stream.read(8)
                return header + tag + stream.read(struct.unpack(f"{byte_order}II", tag)[1])
        data = bytearray()
        for chunk in _element_chunks(self.path, variable):
            data += chunk
            if len(data) > MAX_UNPACKED_BYTES:
                raise SourceError(
                    f"{self.path.name}: {name} has more than {MAX_UNPACKED_BYTES:,} bytes "
                    "unpacked, which is the limit; save its matrices separately, as full ones"
                )
        return header + bytes(data)

    def matrix(self, name: str) -> NDArray[Any]:
        """Returns a matrix [rows, columns], mapped into memory, in its stored dtype."""
        if name not in self._mapped:
            shape, variable = self.shape(name), self.variables[name]
            path, offset = self.path, variable.start + variable.skip
            if self.hdf5 or variable.packed is not None:
                path, offset = self._unpacked_file(variable), 0
            mapped = np.memmap(path, variable.dtype, "r", offset, shape, "F")
            self._mapped[name] = mapped.view(np.ndarray)  # slicing a memmap is slower
        return self._mapped[name]

    def _unpacked_file(self, variable: Variable) -> Path:
        """Returns a file with only the numbers, which the first process to ask for it writes."""
        cache = ShardCache(ShardCache(limit=0).folder / "unpacked", limit=1 << 60)
        cache.clear()  # removes the leftovers of killed builds
        status = self.path.stat()
        identity = self.path.resolve(), status.st_ino, status.st_size, status.st_mtime_ns, variable
        size = math.prod(variable.shape) * variable.dtype.itemsize
        if size > (max_bytes := max(MAX_UNPACKED_BYTES, MAX_UNPACKED_RATIO * status.st_size)):
            raise SourceError(
                f"{self.path.name}: {variable.name} has {size:,} bytes unpacked, too many for a "
                f"file of {status.st_size:,}, where the limit is {max_bytes:,}; save it "
                "uncompressed with `save -v6`"
            )

        def unpack(stream: BinaryIO) -> None:
            with open(os.dup(stream.fileno()), "r+b") as out:
                (_unpack_hdf5 if self.hdf5 else _unpack)(self.path, variable, out)

        name = hashlib.sha256(repr(identity).encode()).hexdigest()
        local_file = cache.get(name, size, unpack, of_content=False)
        weakref.finalize(self, _release, local_file, cache)
        return local_file.path


def _release(local_file: LocalFile, cache: ShardCache) -> None:
    local_file.close()
    cache.clear(wait=False)


def _read_variables(path: Path, start: bytes) -> Iterator[Variable]:
    """Yields the variables of a v5 file; reads only their heads."""
    signature = start[124:HEADER_BYTES]  # of v5, in its byte order
    byte_order = {b"\x00\x01IM": "<", b"\x01\x00MI": ">"}.get(signature)
    if byte_order is None:
        raise SourceError(_unknown_file_message(path, start))
    offset, size = HEADER_BYTES, path.stat().st_size
    with path.open("rb") as stream:
        while offset < size:
            stream.seek(offset)
            tag = stream.read(8)
            kind, length = struct.unpack(f"{byte_order}II", tag.ljust(8, b"\0"))
            end = offset + 8 + (length if len(tag) == 8 else 0)
            if len(tag) < 8 or (kind in (MATRIX, COMPRESSED) and end > size):
                raise SourceError(
                    f"{path.name} is cut short: it has {size:,} bytes, but its variable at byte "
                    f"{offset:,} ends at {end:,}; {DOWNLOAD_AGAIN}"
                )
            try:
                if kind == COMPRESSED:
                    variable = _parse_variable(byte_order, next(_inflate_chunks(stream, length)))
                    yield variable._replace(start=offset + 8, packed=length)
                elif kind == MATRIX:
                    head = tag + stream.read(min(HEAD_BYTES, length))
                    variable = _parse_variable(byte_order, head)
                    yield variable._replace(start=offset)
                else:
                    raise ValueError(f"an element of type {kind}")
            except (ValueError, struct.error, zlib.error) as fault:
                raise SourceError(
                    f"{path.name} is damaged at byte {offset:,} ({fault}), where a variable "
                    f"should be; {DOWNLOAD_AGAIN}"
                ) from None
            offset = end


def _parse_variable(byte_order: str, head: bytes) -> Variable:
    """Parses the head of an element, laid out as in MathWorks' "MAT-File Level 5 File Format"."""
    element_type, length = struct.unpack_from(f"{byte_order}II", head)
    flags_start, _, flags_end, _ = _subelement(head, 8, byte_order)
    (flags,) = struct.unpack_from(f"{byte_order}I", head, flags_start)
    if element_type != MATRIX or not 0 < flags & 0xFF < len(KINDS):
        return Variable("", "opaque", ())  # a function or user class, in another layout
    start, size, end, _ = _subelement(head, flags_end, byte_order)
    shape = struct.unpack_from(f"{byte_order}{size // 4}I", head, start)
    start, size, end, _ = _subelement(head, end, byte_order)
    name, class_name = head[start : start + size].decode("latin-1"), KINDS[flags & 0xFF]
    if flags & COMPLEX_FLAG or class_name not in NUMERIC:
        return Variable(name, "complex " * bool(flags & COMPLEX_FLAG) + class_name, shape)
    start, size, _, stored_type = _subelement(head, end, byte_order)
    if stored_type >= len(STORED) or not STORED[stored_type]:
        raise ValueError(f"numbers of type {stored_type} in {name}")
    dtype = np.dtype(byte_order + STORED[stored_type])
    if size != math.prod(shape) * dtype.itemsize or start + size > 8 + length:
        raise ValueError(f"{name} of {format_shape(shape)} in {size:,} bytes of {dtype.name}")
    return Variable(name, class_name, shape, dtype, skip=start)


def _subelement(head: bytes, offset: int, byte_order: str) -> tuple[int, int, int, int]:
    """Returns start and size of a subelement's data, the start of the next one, the data type."""
    data_type, size = struct.unpack_from(f"{byte_order}II", head, offset)
    if data_type >> 16:  # up to four bytes are stored in the tag itself
        return offset + 4, data_type >> 16, offset + 8, data_type & 0xFFFF
    return offset + 8, size, offset + 8 + -(-size // 8) * 8, data_type


def _inflate_chunks(stream: BinaryIO, length: int) -> Iterator[bytes]:
    """Decompresses the next `length` bytes of a stream, yielding at most CHUNK bytes at a time."""
    decompressor = zlib.decompressobj()
    while not decompressor.eof:
        packed = decompressor.unconsumed_tail
        if not packed:
            packed = stream.read(min(CHUNK, length))
            length -= len(packed)
        chunk = decompressor.decompress(packed, CHUNK)
        if not packed and not chunk:
            raise zlib.error("it ends too early")
        yield chunk


def _unpack(path: Path, variable: Variable, out: BinaryIO) -> None:
    """Writes the numbers of a compressed v5 element."""
    size = remaining = math.prod(variable.shape) * variable.dtype.itemsize
    skip = variable.skip
    for chunk in _element_chunks(path, variable):
        remaining -= out.write(memoryview(chunk)[skip : skip + remaining])
        skip = max(skip - len(chunk), 0)
    if remaining:
        raise _damaged(path, variable, f"{remaining:,} of {size:,} bytes are missing")


def _element_chunks(path: Path, variable: Variable) -> Iterator[bytes]:
    """Yields the bytes of a compressed v5 element."""
    assert variable.packed is not None
    try:
        with path.open("rb") as stream:
            stream.seek(variable.start)
            yield from _inflate_chunks(stream, variable.packed)
    except zlib.error as fault:
        raise _damaged(path, variable, fault) from None


def _damaged(path: Path, variable: Variable, fault: object) -> SourceError:
    return SourceError(f"{path.name}: {variable.name} is damaged ({fault}); {DOWNLOAD_AGAIN}")


def _read_hdf5_variables(path: Path) -> list[Variable]:
    import h5py  # imported here, as only v7.3 files need it

    try:
        with h5py.File(path, "r") as file:
            return [
                _describe_hdf5(name, file[name])
                for name in file
                # Soft and external links could lead to any file.
                if isinstance(file.get(name, getlink=True), h5py.HardLink)
            ]
    except (OSError, RuntimeError, KeyError, TypeError, ValueError) as fault:
        raise SourceError(f"{path.name}: damaged HDF5 ({fault}); {DOWNLOAD_AGAIN}") from None


def _describe_hdf5(name: str, item: Any) -> Variable:
    """Describes an HDF5 object; MATLAB stores its axes in reverse order."""
    kind = matlab_class(item)
    shape = () if "MATLAB_empty" in item.attrs else getattr(item, "shape", None) or ()
    dtype = item.dtype if hasattr(item, "shape") else np.dtype("O")  # groups are structs or sparse
    if "MATLAB_sparse" in item.attrs or dtype.names:
        kind = f"{'complex' if dtype.names else 'sparse'} {kind}"
    elif not kind:  # written by other programs
        kind = {"f4": "single", "f8": "double"}.get(dtype.str[1:], dtype.name)
    if kind not in NUMERIC or dtype.kind not in "fiu":
        return Variable(name, kind, shape[::-1])
    if item.is_virtual or item.external:
        return Variable(name, f"{kind} in another file", shape[::-1])
    return Variable(name, kind, shape[::-1], dtype)


def matlab_class(item: Any) -> str:
    """Returns the MATLAB class of an HDF5 object, or "" where it states none."""
    kind = item.attrs.get("MATLAB_class", "")
    if isinstance(kind, bytes):  # as MATLAB writes it; others write str
        return kind.decode("latin-1")
    return kind if isinstance(kind, str) else "unknown"


def _unpack_hdf5(path: Path, variable: Variable, out: BinaryIO) -> None:
    """Writes the columns of an HDF5 data set, reading it by whole chunks."""
    import h5py

    name = variable.name
    with h5py.File(path, "r") as file:
        data = file[name]
        columns, rows = data.shape
        chunk_bytes = math.prod(data.chunks or (1, rows)) * data.dtype.itemsize
        if chunk_bytes > MAX_CHUNK_BYTES:
            raise SourceError(
                f"{path.name}: {name} has chunks of {chunk_bytes:,} bytes, and the limit is "
                f"{MAX_CHUNK_BYTES:,}; run `h5repack -l {name}:CHUNK=1x65536` on it"
            )
        # Data without chunks are contiguous in the file, and read a column at a time.
        positions = (
            data.iter_chunks() if data.chunks else (np.s_[i : i + 1, :] for i in range(columns))
        )
        for position in positions:
            try:
                block = data[position]
            except OSError as fault:
                raise _damaged(path, variable, fault) from None
            first_column, first_row = position[0].start, position[1].start or 0
            for column, values in enumerate(block, first_column):
                out.seek((column * rows + first_row) * values.itemsize)
                out.write(values)


def _unknown_file_message(path: Path, start: bytes) -> str:
    remedy = f"save one of MATLAB v4 again with `save -v7`, or {DOWNLOAD_AGAIN}"
    found = f"it has {path.stat().st_size:,} bytes, and begins with {start[:16]!r}"
    return f"{path.name} is not a file of MATLAB v5 or v7.3: {found}; {remedy}"
