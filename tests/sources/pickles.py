"""Pickles to test with: as Python 2 and its NumPy wrote them, and ones that call something."""

import struct
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np


def dumps2(value: Any) -> bytes:
    """Protocol 2, texts as bytes, an array's data too: what the published CIFAR files are."""
    numbers = count(1)

    def put() -> bytes:
        number = next(numbers)
        return b"q" + bytes([number]) if number < 256 else b"r" + struct.pack("<I", number)

    def string(data: bytes) -> bytes:
        short = len(data) < 256
        return b"U" + bytes([len(data)]) if short else b"T" + struct.pack("<i", len(data))

    def whole(number: int) -> bytes:
        if 0 <= number < 256:
            return b"K" + bytes([number])
        if 0 <= number < 1 << 16:
            return b"M" + struct.pack("<H", number)
        return b"J" + struct.pack("<i", number)

    def write(value: Any) -> bytes:
        if isinstance(value, dict):
            head = b"}" + put()
            items = (write(key) + write(item) for key, item in value.items())
            return head + b"(" + b"".join(items) + b"u"
        if isinstance(value, list):
            return b"]" + put() + b"(" + b"".join(map(write, value)) + b"e"
        if isinstance(value, bytes):
            return string(value) + value + put()
        if isinstance(value, np.ndarray):
            head = b"cnumpy.core.multiarray\n_reconstruct\n" + put() + b"cnumpy\nndarray\n" + put()
            shape = b"".join(map(whole, value.shape)) + {1: b"\x85", 2: b"\x86"}[value.ndim]
            kind: bytes = value.dtype.str[1:].encode()
            dtype = b"cnumpy\ndtype\n" + put() + b"U" + bytes([len(kind)]) + kind + b"K\0K\1\x87R"
            dtype += put() + b"(K\3U\1|NNN" + whole(-1) * 2 + b"K\0tb"
            data: bytes = value.tobytes()
            head += b"K\0\x85U\1b\x87R" + put() + b"(K\1" + shape + dtype + b"\x89"
            return head + string(data) + data + b"tb"
        return whole(int(value))

    return b"\x80\x02" + write(value) + b"."


class Call:
    """What a malicious pickle does: it calls what it names."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call
