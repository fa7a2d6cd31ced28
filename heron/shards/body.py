"""The body of a response: what was received of a file, how fast, and whether it is as expected."""

import hashlib
import time
from collections.abc import Iterator
from itertools import islice
from typing import BinaryIO


class Damaged(Exception):
    """The bytes received are not those of the requested file."""


class Slow(Exception):
    """The file arrives more slowly than the limit."""


class Unwritable(Exception):
    """Writing to the disk failed, not the network; the OSError is the cause."""


def enforce_speed(chunks: Iterator[bytes], min_rate: float, window_s: float) -> Iterator[bytes]:
    """Yields chunks; raises Slow below `min_rate` bytes per second over `window_s` of waiting.

    The time spent on processing the chunks, and on waiting for the first, does not count.
    """
    received, waited_s = 0, 0.0
    yield from islice(chunks, 1)
    while True:
        began = time.monotonic()
        if not (chunk := next(chunks, b"")):
            return
        received, waited_s = received + len(chunk), waited_s + time.monotonic() - began
        if waited_s > window_s:
            if received < min_rate * waited_s:
                raise Slow(
                    f"only {received:,} bytes in {waited_s:.3g} s, less than {min_rate:,.0f} a "
                    "second"
                )
            received, waited_s = 0, 0.0
        yield chunk


class Body:
    """The received bytes of a file, written to a stream and hashed."""

    def __init__(self, stream: BinaryIO, size: int | None, sha256: str | None) -> None:
        """Takes a stream at its beginning, and what is known about the file."""
        self.stream, self.size, self.sha256 = stream, size, sha256
        self.written, self.hash = 0, hashlib.sha256()

    def write(self, chunk: bytes) -> None:
        """Writes the next bytes; Damaged where they are more than expected."""
        if self.size is not None and self.written + len(chunk) > self.size:
            raise Damaged(
                f"more than the {self.size:,} bytes with sha256 {self.sha256} that it should have"
            )
        try:
            remaining = memoryview(chunk)
            while remaining:  # a raw file may write less than asked
                remaining = remaining[self.stream.write(remaining) :]
        except OSError as fault:
            raise Unwritable from fault
        self.hash.update(chunk)
        self.written += len(chunk)

    def restart(self) -> None:
        """Starts over at the beginning of the stream, and drops what it holds."""
        self.stream.seek(0)
        if self.size is None:  # else the next bytes replace all, and the size may be reserved
            self.stream.truncate()
        self.written, self.hash = 0, hashlib.sha256()

    def check(self) -> None:
        """Raises Damaged where size or checksum are not as expected."""
        actual, size = self.hash.hexdigest(), self.size
        wrong_size = size is not None and self.written != size
        if wrong_size or self.sha256 not in (None, actual):
            expected = f"{size:,} bytes" if size is not None else "an index"
            raise Damaged(
                f"{self.written:,} bytes with sha256 {actual} instead of {expected} with sha256 "
                f"{self.sha256}"
            )
