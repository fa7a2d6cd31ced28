"""Bounds of the web page's server: how many requests run at once, and how uploads are read."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fastapi import HTTPException, Request
from starlette.requests import ClientDisconnect

BINARY = "application/octet-stream"  # another origin's page cannot send it without a preflight
CLOSE = {"Connection": "close"}  # for a refusal, since the rest of the body is not read


@dataclass(frozen=True)
class Limits:
    """How much one server does at once, and how long it waits."""

    upload_bytes: int = 16 * 2**20  # the largest body
    body_s: float = 20.0  # for a head or a body to arrive, or for a client to read an answer
    searches: int = 2  # running at once; as many pictures run beside them
    uploads: int = 4  # bodies of full size that fit in memory at once; one of them is encoded
    waiting: int = 100  # searches that may wait, and uploads too; further ones get a 503
    connections: int = 400  # open at once; beyond, the one that has been slow for longest is cut


class Admission:
    """Lets some requests run at once, has some wait, and refuses the rest."""

    def __init__(self, noun: str, at_once: int, waiting: int) -> None:
        """Starts empty; `noun` names the requests in the refusal."""
        self._noun, self._capacity, self._admitted = noun, at_once + waiting, 0
        self._running = asyncio.Semaphore(at_once)

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[None]:
        """Waits for a turn and holds it; raises a 503 where too many wait already."""
        if self._admitted >= self._capacity:
            raise busy(f"{self._admitted} {self._noun} are running or waiting")
        self._admitted += 1
        try:
            async with self._running:
                yield
        finally:
            self._admitted -= 1


class Uploads:
    """Reads bodies into bounded memory.

    When the memory is full, the arriving upload that began first is refused; the last one waits
    for the uploads that have arrived to be answered.
    """

    def __init__(self, limits: Limits) -> None:
        """Starts with all memory free."""
        self._limits, self._free_bytes = limits, limits.uploads * limits.upload_bytes
        self._arriving: dict[asyncio.Timeout, bytearray] = {}  # in the order in which they began
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def __call__(self, request: Request) -> AsyncIterator[bytes]:
        """Reads the bytes of an upload, and counts them until the context ends."""
        data = bytearray()
        try:
            await self._read(request, data)
            yield bytes(data)
        finally:
            self._free(data)

    def _free(self, data: bytearray) -> None:
        self._free_bytes += len(data)
        data.clear()
        self._freed.set()

    async def _make_room(self) -> None:
        """Refuses the oldest of several arriving uploads; a single one waits for memory."""
        if len(self._arriving) > 1:
            oldest = next(iter(self._arriving))
            self._free(self._arriving.pop(oldest))
            oldest.reschedule(0)
        else:
            self._freed.clear()
            await self._freed.wait()

    async def _read(self, request: Request, data: bytearray) -> None:
        """Reads a body into `data`; refuses it as soon as it is too long or too slow."""
        max_bytes, seconds = self._limits.upload_bytes, self._limits.body_s
        kind = request.headers.get("content-type", "none")
        if kind != BINARY:
            text = f"the body must be '{BINARY}', the bytes of one file, got '{kind}'"
            raise HTTPException(415, text, CLOSE)
        text = f"the upload has more than {max_bytes:,} bytes, the limit; use a smaller file"
        too_large = HTTPException(413, text, CLOSE)
        # h11 has checked that the length is a number.
        if int(request.headers.get("content-length", "0")) > max_bytes:
            raise too_large
        deadline = asyncio.timeout(seconds)
        try:
            async with deadline:
                self._arriving[deadline] = data
                async for chunk in request.stream():
                    if len(data) + len(chunk) > max_bytes:
                        raise too_large
                    data += chunk
                    self._free_bytes -= len(chunk)
                    while self._free_bytes < 0 and deadline in self._arriving:
                        await self._make_room()
                    if deadline not in self._arriving:  # refused, now or before this chunk
                        raise TimeoutError
        except TimeoutError:
            if deadline not in self._arriving:
                raise busy("later uploads need the memory of this slow one", CLOSE) from None
            if self._free_bytes < 0:
                raise busy("earlier uploads take all the memory", CLOSE) from None
            text = f"the upload did not arrive in {seconds:g} s, only {len(data):,} bytes of it; "
            raise HTTPException(408, f"{text}try again, or use a smaller file", CLOSE) from None
        except ClientDisconnect:
            raise HTTPException(400, "the upload ended early") from None
        finally:
            self._arriving.pop(deadline, None)
        if not data:
            raise HTTPException(400, "the upload is empty; send the bytes of one file")


def busy(text: str, headers: Mapping[str, str] | None = None) -> HTTPException:
    """Returns a 503 that asks the client to try again."""
    return HTTPException(
        503, f"{text}; try again in a second", {"Retry-After": "1"} | dict(headers or {})
    )
