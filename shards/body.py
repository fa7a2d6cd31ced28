"""The body of an answer: what came of a file, how fast, and whether it is the one expected."""

import hashlib
import time
from collections.abc import Iterator
from itertools import islice
from typing import BinaryIO


class Damaged(Exception):
    """What came is not the file that was asked for."""


class Slow(Exception):
    """The file comes more slowly than anyone can wait for."""


class Unwritable(Exception):
    """The disk, not the network, failed: its cause is the fault."""


def timely(chunks: Iterator[bytes], slowest: float, window_s: float) -> Iterator[bytes]:
    """Yields chunks; raises Slow where fewer bytes a second come, over so many seconds of waiting.

    What is done with the chunks takes its time, and so may the first of them.
    """
    came, waited = 0, 0.0
    yield from islice(chunks, 1)
    while True:
        began = time.monotonic()
        if not (chunk := next(chunks, b"")):
            return
        came, waited = came + len(chunk), waited + time.monotonic() - began
        if waited > window_s:
            if came < slowest * waited:
                raise Slow(
                    f"{came:,} bytes in {waited:.3g} s; expected {slowest:,.0f} a second at least"
                )
            came, waited = 0, 0.0
        yield chunk


class Body:
    """What came of a file, hashed as it came."""

    def __init__(self, stream: BinaryIO, size: int | None, sha256: str | None) -> None:
        """Begins at the beginning of a stream."""
        self.stream, self.size, self.sha256 = stream, size, sha256
        self.written, self.hash = 0, hashlib.sha256()

    def write(self, chunk: bytes) -> None:
        """Takes the next bytes, and no more than are expected."""
        if self.size is not None and self.written + len(chunk) > self.size:
            raise Damaged(
                f"more than {self.size:,} bytes; expected {self.size:,} bytes with sha256 "
                f"{self.sha256}"
            )
        try:
            left = memoryview(chunk)
            while left:  # a raw file may take a part
                left = left[self.stream.write(left) :]
        except OSError as fault:
            raise Unwritable from fault
        self.hash.update(chunk)
        self.written += len(chunk)

    def restart(self) -> None:
        """Forgets what came."""
        self.stream.seek(0)
        self.written, self.hash = 0, hashlib.sha256()

    def check(self) -> None:
        """Raises where it is not what was expected."""
        found, size = self.hash.hexdigest(), self.size
        wrong = size is not None and self.written != size
        if wrong or self.sha256 not in (None, found):
            expected = f"{size:,} bytes" if size is not None else "an index"
            raise Damaged(
                f"{self.written:,} bytes with sha256 {found}; expected {expected} "
                f"with sha256 {self.sha256}"
            )
