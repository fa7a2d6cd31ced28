"""Pickles of others: read as text is, opcode by opcode; nothing that they name is ever called."""

from __future__ import annotations

import math
import pickletools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shards.errors import DOWNLOAD, SourceError
from shards.sources.zips import HTML, is_html

MOST_OPCODES = 1 << 19  # CIFAR-100's train batch has some 210,000; each may cost 100 bytes
BYTES = ("u1", b"u1")  # the only dtype of an array, as Python 3 and Python 2 write its name
ARRAY = "numpy.core.multiarray._reconstruct"
DTYPE = "numpy.dtype"
GLOBALS = {
    ARRAY: ARRAY,
    "numpy._core.multiarray._reconstruct": ARRAY,  # since NumPy 2
    "numpy.ndarray": "numpy.ndarray",
    DTYPE: DTYPE,
}


class _Array:
    """An array that is begun: its shape and bytes come with the next opcode."""


class _Bytes:
    """The dtype of unsigned bytes."""


class _Name(str):
    """A global, by its name alone."""


def read_pickle(data: bytes, where: str) -> Any:
    """What a pickle holds: dicts, lists, tuples, texts, bytes, whole numbers, uint8 arrays.

    Those are the opcodes that Python 2 and 3 (protocols 2 to 4) write for them. Of globals, the
    three of a NumPy array are known by name; any other is refused before it is even looked up, so
    a pickle can run nothing. Keys of a dict become text. `where` is what messages call the file.
    Raises SourceError where it holds anything else, or is damaged.
    """
    try:
        return _Machine(where).run(data)
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as fault:
        found = HTML if is_html(data) else f"a pickle cut short or damaged ({fault})"
        raise SourceError(f"{where}: {found}; expected a whole pickle; {DOWNLOAD}") from None


class _Machine:
    """The stack machine that a pickle is a program for, less all that could run something."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        for number, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            if number == MOST_OPCODES:
                raise self._refused(f"more than {MOST_OPCODES:,} opcodes")
            if opcode.name == "STOP":
                return self.stack.pop()
            self._step(opcode.name, argument)
        raise ValueError("no end")  # genops finds this first

    def _step(self, name: str, argument: Any) -> None:
        stack = self.stack
        match name:
            case "PROTO" | "FRAME":
                pass
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "NONE":
                stack.append(argument)
            case "NEWTRUE" | "NEWFALSE":
                stack.append(name == "NEWTRUE")
            case "BINUNICODE" | "SHORT_BINUNICODE" | "BINBYTES" | "SHORT_BINBYTES":
                stack.append(argument)
            case "BINSTRING" | "SHORT_BINSTRING":  # Python 2's str: bytes, given as Latin-1
                stack.append(argument.encode("latin-1"))
            case "BINPUT" | "LONG_BINPUT":
                self.memo[argument] = stack[-1]
            case "MEMOIZE":
                self.memo[len(self.memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self.memo[argument])
            case "MARK":
                self.marks.append(len(stack))
            case "EMPTY_LIST":
                stack.append([])
            case "APPEND":
                self._extend(self._last(1))
            case "APPENDS":
                self._extend(self._marked())
            case "EMPTY_DICT":
                stack.append({})
            case "SETITEM":
                self._update(self._last(2))
            case "SETITEMS":
                self._update(self._marked())
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(self._last(int(name[-1]))))
            case "TUPLE":
                stack.append(tuple(self._marked()))
            case "GLOBAL":
                stack.append(self._global(*argument.split(" ", 1)))
            case "STACK_GLOBAL":
                stack.append(self._global(*self._last(2)))
            case "REDUCE":
                stack.append(self._reduced(*self._last(2)))
            case "BUILD":
                stack.append(self._built(*self._last(2)))
            case "INST":
                self._global(*argument.split(" ", 1))
                raise self._refused("the opcode INST")
            case _:
                raise self._refused(f"the opcode {name}")

    def _last(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise ValueError("an opcode without its operands")
        items = self.stack[-count:]
        del self.stack[-count:]
        return items

    def _marked(self) -> list[Any]:
        items = self.stack[(mark := self.marks.pop()) :]
        del self.stack[mark:]
        return items

    def _extend(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise ValueError("items of no list")
        self.stack[-1].extend(items)

    def _update(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], dict):
            raise ValueError("items of no dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            self.stack[-1][text(key)] = value

    def _global(self, module: Any, name: Any) -> _Name:
        full = f"{text(module)}.{text(name)}"
        if full not in GLOBALS:
            raise self._refused(f"the global {full[:80]!r}")
        return _Name(GLOBALS[full])

    def _reduced(self, called: Any, arguments: tuple[Any, ...]) -> _Array | _Bytes:
        """What a global makes of arguments: those of an array are a mere promise of one."""
        if isinstance(called, _Name) and called == ARRAY:
            return _Array()
        if isinstance(called, _Name) and called == DTYPE:
            if (kind := arguments[0]) not in BYTES:
                raise self._refused(f"an array of dtype {_short(kind)}")
            return _Bytes()
        raise self._refused(f"a call of {_short(called)}")

    def _built(self, made: Any, state: Any) -> _Bytes | NDArray[np.uint8]:
        """An array of (version, shape, dtype, in Fortran's order, bytes)."""
        if isinstance(made, _Bytes):
            return made
        if not isinstance(made, _Array):
            raise self._refused(f"a state for {_short(made)}")
        _, shape, dtype, columns_first, data = state
        if not isinstance(dtype, _Bytes) or not isinstance(data, bytes):
            raise self._refused("an array of other than bytes")
        if columns_first or any(type(n) is not int or n < 0 for n in shape):
            raise self._refused("an array in Fortran's order, or of no shape")
        if len(data) != (size := math.prod(shape)):
            raise ValueError(f"{len(data):,} bytes for an array of {size:,}")
        return np.frombuffer(data, np.uint8).reshape(shape)

    def _refused(self, found: str) -> SourceError:
        return SourceError(
            f"{self.where}: a pickle with {found}; expected lists, texts, numbers and arrays of "
            f"bytes alone; it was not executed; {DOWNLOAD} from its publisher"
        )


def text(value: Any) -> str:
    """A text, which is bytes in a pickle of Python 2."""
    if isinstance(value, bytes):
        return value.decode()
    if not isinstance(value, str):
        raise ValueError(f"{_short(value)} where a text was due")
    return value


def _short(value: Any) -> str:
    """A value in few words: what is nested may be too long to print."""
    return f"{value[:40]!r}" if isinstance(value, str | bytes) else f"a {type(value).__name__}"
