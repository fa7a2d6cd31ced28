"""How much of the web page's server runs at once, and how its bodies arrive."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fastapi import HTTPException, Request
from starlette.requests import ClientDisconnect

BINARY = "application/octet-stream"  # which another origin's page cannot send without asking
CLOSE = {"Connection": "close"}  # what is left of the body is not read


@dataclass(frozen=True)
class Limits:
    """How much one server does at once, and how long it waits."""

    upload_bytes: int = 16 * 2**20  # of a body
    body_s: float = 20.0  # in which a head or a body has to arrive, or an answer to be read
    searches: int = 2  # that run at once, and as many pictures
    uploads: int = 4  # bodies of full size that there is room for; one runs
    waiting: int = 100  # searches and uploads, each, that may wait; the next ones get a 503
    connections: int = 400  # open at once; for more, those that have been slow for longest go


class Admission:
    """Lets some requests through at once, has some wait, and refuses the rest."""

    def __init__(self, what: str, at_once: int, waiting: int) -> None:
        """Begins with none; `what` they are is for the message."""
        self._what, self._most, self._inside = what, at_once + waiting, 0
        self._free = asyncio.Semaphore(at_once)

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[None]:
        """Holds a place, or raises a 503 where as many wait as may."""
        if self._inside >= self._most:
            raise busy(f"{self._inside} {self._what} are under way or wait")
        self._inside += 1
        try:
            async with self._free:
                yield
        finally:
            self._inside -= 1


class Uploads:
    """Reads bodies into room for some; where there is none, the one that takes longest goes."""

    def __init__(self, limits: Limits) -> None:
        """Begins with none."""
        self._limits, self._room = limits, limits.uploads * limits.upload_bytes
        self._arriving: dict[asyncio.Timeout, None] = {}  # the longest first

    @asynccontextmanager
    async def __call__(self, request: Request) -> AsyncIterator[bytes]:
        """Holds the bytes of an upload."""
        data = bytearray()
        try:
            await self._read(request, data)
            yield bytes(data)
        finally:
            self._room += len(data)

    async def _read(self, request: Request, data: bytearray) -> None:
        """Reads a body, refused as soon as it is too long or too slow."""
        most, seconds = self._limits.upload_bytes, self._limits.body_s
        kind = request.headers.get("content-type", "none")
        if kind != BINARY:
            text = f"the body is '{kind}'; expected '{BINARY}': the bytes of one file, as they are"
            raise HTTPException(415, text, CLOSE)
        text = f"the upload has more than {most:,} bytes; expected at most these"
        too_large = HTTPException(413, f"{text}; give a smaller file", CLOSE)
        if int(request.headers.get("content-length", "0")) > most:  # the server saw that it is one
            raise too_large
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                self._arriving[limit] = None
                async for chunk in request.stream():
                    if len(data) + len(chunk) > most:
                        raise too_large
                    data += chunk
                    self._room -= len(chunk)
                    if self._room < 0:
                        longest = next(iter(self._arriving))
                        longest.reschedule(0)
                        del self._arriving[longest]
        except TimeoutError:
            if limit not in self._arriving:
                raise busy("later uploads need the room of this slow one", CLOSE) from None
            text = f"the upload did not arrive in {seconds:g} s; found {len(data):,} bytes; "
            raise HTTPException(408, f"{text}try again, or give a smaller file", CLOSE) from None
        except ClientDisconnect:
            raise HTTPException(400, "the upload ended early") from None
        finally:
            self._arriving.pop(limit, None)
        if not data:
            raise HTTPException(400, "the upload is empty; expected the bytes of one file")


def busy(text: str, headers: Mapping[str, str] | None = None) -> HTTPException:
    """Returns the answer to one who may come back."""
    more = {"Retry-After": "1"} | dict(headers or {})
    return HTTPException(503, f"{text}; try again in a second", more)
