"""Reads untrusted pickles: checks them first, and allows no globals but those of NumPy arrays."""

import math
import pickle
import pickletools
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heron.base.errors import DOWNLOAD_AGAIN, SourceError
from heron.sources.zips import HTML, is_html

MAX_OPCODES = 1 << 19  # CIFAR-100's train batch has some 210,000; each may cost 100 bytes
MAX_TUPLES = 1000  # an array has four; Python's hash of tuples within tuples overflows the stack
# Opcodes that make or look up instances; lists, numbers and arrays need none of them.
INSTANCES = ("INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4", "PERSID", "BINPERSID")
EXPECTED = "it may have lists, texts, numbers and arrays of bytes only"


class _Refused(Exception):
    """A pickle holds what no data set needs; the message says what."""


class _Dtype:
    """Stands in for numpy.dtype, whose state could corrupt memory."""

    def __init__(self, name: Any, *_: Any) -> None:
        if name not in ("u1", b"u1"):  # as Python 3 and Python 2 write it
            raise _Refused(f"an array of dtype {name!r:.40}")

    def __setstate__(self, _: Any) -> None:
        """Ignores byte order and alignment."""


class _Array:
    """Stands in for an array until its shape and bytes are read."""

    def __init__(self, *_: Any) -> None:
        self.values: NDArray[np.uint8] = np.zeros(0, np.uint8)

    def __setstate__(self, state: Any) -> None:
        """Takes (version, shape, dtype, whether in Fortran order, bytes)."""
        _, shape, dtype, columns_first, data = state
        if not isinstance(dtype, _Dtype) or not isinstance(data, bytes):
            raise _Refused("an array of other than bytes")
        if columns_first:
            raise _Refused("an array in Fortran's order")
        if any(type(n) is not int or n < 0 for n in shape) or len(data) != math.prod(shape):
            raise ValueError(f"{len(data):,} bytes for an array of another size")
        self.values = np.frombuffer(data, np.uint8).reshape(shape)


ALLOWED: dict[str, Any] = {
    "numpy.core.multiarray._reconstruct": _Array,
    "numpy._core.multiarray._reconstruct": _Array,  # since NumPy 2
    "numpy.ndarray": "numpy.ndarray",  # an argument of the former, never called
    "numpy.dtype": _Dtype,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Returns the stand-in of a global in `ALLOWED`; refuses others without a lookup."""
        if (stand_in := ALLOWED.get(f"{module}.{name}")) is None:
            raise _Refused(f"the global {f'{module}.{name}'[:80]!r}")
        return stand_in


def read_pickle(data: bytes, where: str) -> Any:
    """Returns the value of a pickle: dicts, lists, tuples, texts, bytes, numbers, uint8 arrays.

    The only globals allowed are the three of a NumPy array, replaced by stand-ins that check their
    arguments, so that a pickle can run nothing. Keys of a top-level dict are texts. It reads
    pickles of Python 2 and 3 (protocols 2 to 5); all else is a SourceError that says `where`.
    """
    try:
        _check_opcodes(data)
        value = _Unpickler(BytesIO(data), encoding="bytes").load()
        if isinstance(value, dict):
            return {
                decode_text(key): item.values if isinstance(item, _Array) else item
                for key, item in value.items()
            }
        return value
    except _Refused as fault:
        raise SourceError(
            f"{where}: a pickle with {fault}; {EXPECTED}; it was not executed; {DOWNLOAD_AGAIN} "
            "from its publisher"
        ) from None
    except Exception as fault:  # a damaged pickle makes Python's reader raise anything
        found = HTML if is_html(data) else f"a pickle cut short or damaged ({fault})"
        raise SourceError(f"{where}: {found} instead of a whole pickle; {DOWNLOAD_AGAIN}") from None


def _check_opcodes(data: bytes) -> None:
    """Refuses pickles that would take far more memory than their size, before loading them."""
    tuples = 0
    for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        if count == MAX_OPCODES:
            raise _Refused(f"more than {MAX_OPCODES:,} opcodes")
        tuples += "TUPLE" in opcode.name
        if tuples > MAX_TUPLES:
            raise _Refused(f"more than {MAX_TUPLES:,} tuples")
        # Python's reader allocates 16 bytes for each number up to that of a memo.
        if "PUT" in opcode.name and argument is not None and argument > MAX_OPCODES:
            raise _Refused(f"memo number {argument:,}")
        if opcode.name in INSTANCES:
            raise _Refused(f"the opcode {opcode.name}")


def decode_text(value: Any) -> str:
    """Decodes a text, which is bytes in a pickle of Python 2."""
    if isinstance(value, bytes):
        return value.decode()
    if not isinstance(value, str):
        raise ValueError(f"a {type(value).__name__} where a text should be")
    return value
