"""A web page over an index: a sample, its neighbours, and its hard and false negatives.

What a browser sends is bounded before it is used: numbers and texts by the query's own types,
bodies by their bytes and by a time, searches and uploads by how many run and how many wait. The
page and its API are of one origin; nothing is fetched from elsewhere, and no other origin may read.
"""

import asyncio
import re
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import uvicorn
from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from PIL import Image
from starlette.exceptions import HTTPException as RouteError
from starlette.requests import ClientDisconnect

from heron.pipeline.config.errors import CheckpointError, ConfigError, RetrievalError
from heron.pipeline.retrieval.answer import Answer, Relation
from heron.pipeline.retrieval.query import Retriever
from heron.pipeline.serve.guard import HEADERS, BoundedConnection, Gate
from heron.shards.errors import ShardError

MOST_HITS = 200
LONGEST = 500  # characters of a key or a filter
SUGGESTED = 20  # keys that begin with what was typed
THUMBNAIL_PIXELS = 256  # longest side of a picture that is sent
THUMBNAILS = 2_000  # pictures that are kept
LOOPBACK = ("127.0.0.1", "localhost", "::1")
BINARY = "application/octet-stream"  # which another origin's page cannot send without asking
PAGE = {  # all files that are served, and what they are
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
EXPECTED = (RetrievalError, ConfigError, CheckpointError, ShardError, OSError)
Text = Annotated[str, Query(max_length=LONGEST)]
CLOSE = {"Connection": "close"}  # what is left of the body is not read
Count = Annotated[int, Query(ge=1, le=MOST_HITS)]
TOKEN = re.compile(r"[A-Za-z0-9_-]{16,200}")


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


def make_app(
    retriever: Retriever,
    limits: Limits | None = None,
    hosts: Sequence[str] = LOOPBACK,
    token: str | None = None,
    cookie: str = "heron",
) -> FastAPI:
    """Returns the page and its API; searches run in threads, the model once at a time.

    `hosts` are the names by which the server may be called, so that no page elsewhere can reach it
    through a name of its own that points here; none for any. Each request has to bring the `token`,
    as a rule in the `cookie`, which the address with the token sets.
    """
    limits = limits or Limits()
    app = FastAPI(title="Heron", docs_url=None, redoc_url=None, openapi_url=None)
    samples, facts = retriever.samples, about(retriever, limits)
    searching = Admission("searches", limits.searches, limits.waiting)
    drawing = Admission("pictures", limits.searches, limits.waiting * 10)  # a page asks for 200
    encoding, uploaded = Admission("uploads", 1, limits.waiting), Uploads(limits)
    generator = np.random.default_rng()
    samples.keys_with_prefix("", 1)  # sorts the keys now: a first request would stop all others
    thumbnail = lru_cache(THUMBNAILS)(lambda number: _thumbnail(retriever, number))

    for path, (name, kind) in PAGE.items():
        app.get(path)(_page_file(name, kind))

    @app.get("/api/about")
    async def describe() -> dict[str, Any]:
        return facts

    @app.get("/api/samples")
    async def suggest(prefix: Text = "") -> dict[str, list[str]]:
        return {"keys": samples.keys_with_prefix(prefix, SUGGESTED)}

    @app.get("/api/random")
    async def draw() -> dict[str, str]:
        return {"key": samples.key(int(generator.integers(len(samples))))}

    def plain(answer: Answer) -> dict[str, Any]:
        """The answer for JSON; the query says whether it has labels, be it none of them."""
        found, number = answer.plain(), answer.query.number
        found["query"]["labelled"] = number is not None and bool(samples.known[number])
        return found

    @app.get("/api/neighbours")
    async def neighbours(
        key: Text, k: Count = 24, where: Text = "", relation: Relation = "neighbours"
    ) -> dict[str, Any]:
        async with searching():
            return await asyncio.to_thread(lambda: plain(retriever.by_key(key, k, where, relation)))

    @app.get("/api/text")
    async def by_text(text: Text, k: Count = 24, where: Text = "") -> dict[str, Any]:
        async with encoding():
            return await asyncio.to_thread(lambda: plain(retriever.by_text(text, k, where)))

    @app.post("/api/upload")
    async def upload(request: Request, k: Count = 24, where: Text = "") -> dict[str, Any]:
        async with uploaded(request) as data, encoding():
            return await asyncio.to_thread(
                lambda: plain(retriever.by_file(data, k, where, name="the upload"))
            )

    @app.get("/api/picture/{number}")
    async def picture(number: int) -> Response:
        if not 0 <= number < len(samples):
            text = f"no sample has the number {number}; found {len(samples):,} samples"
            raise HTTPException(404, text)
        async with drawing():
            data = await asyncio.to_thread(thumbnail, number)
        if data is None:
            raise HTTPException(404, f"sample {samples.key(number)} has no picture")
        # The page's addresses name the index: what a cache holds is of the same one.
        return Response(data, 200, {"Cache-Control": "private, max-age=3600"}, "image/jpeg")

    app.add_middleware(Gate, hosts=hosts, token=token, cookie=cookie)
    _answer_faults(app)
    return app


def about(retriever: Retriever, limits: Limits) -> dict[str, Any]:
    """Returns what the page says of the index, and what it may ask for."""
    manifest, recall = retriever.index.manifest, retriever.index.manifest.recall
    measured = "not measured"
    if recall is not None:
        measured = f"{recall.value:.3f} at {recall.k}, of {recall.queries:,} held-out queries"
    try:
        pictures = retriever.picture(0) is not None
    except EXPECTED:
        pictures = False
    try:
        texts = retriever.takes_text
    except EXPECTED:
        texts = False
    return manifest.model_dump(include={"kind", "metric", "layer", "dim", "count"}) | {
        "data": Path(retriever.data).name,
        "recall": measured,
        "names": retriever.samples.names,
        "of": manifest.embeddings_fingerprint[7:19],
        "longest": LONGEST,
        "pictures": pictures,
        "texts": texts,
        "upload_bytes": limits.upload_bytes,
    }


def _thumbnail(retriever: Retriever, number: int) -> bytes | None:
    """The picture of a sample as a JPEG that is small enough for a page."""
    picture = retriever.picture(number)
    if picture is None:
        return None
    picture.thumbnail((THUMBNAIL_PIXELS, THUMBNAIL_PIXELS), Image.Resampling.LANCZOS)
    picture.save(out := BytesIO(), "JPEG", quality=90, subsampling=0)  # colours of small pictures
    return out.getvalue()


def _page_file(name: str, kind: str) -> Callable[[], Awaitable[Response]]:
    """A route that answers with a file of the page; the browser asks anew each time."""
    data = (files("heron.pipeline.serve") / "page" / name).read_bytes()

    async def answer() -> Response:
        return Response(data, 200, {"Cache-Control": "no-cache"}, kind)

    return answer


def _answer_faults(app: FastAPI) -> None:
    """Answers what goes wrong with a status and words, never with a traceback."""

    def words(status: int, text: str, headers: Mapping[str, str] | None = None) -> Response:
        return JSONResponse({"error": text}, status, headers)

    async def refused(request: Request, fault: Any) -> Response:
        return words(fault.status_code, fault.detail, fault.headers)

    async def unrouted(request: Request, fault: Any) -> Response:
        text = f"{request.method} {request.url.path}: {fault.detail.lower()}"
        return words(fault.status_code, text, fault.headers)

    async def invalid(request: Request, fault: Any) -> Response:
        found = fault.errors()[0]
        given = str(found["input"])
        shown = given if len(given) <= 40 else f"{given[:40]}…"
        return words(400, f"{found['loc'][-1]} is '{shown}': {found['msg'].lower()}")

    async def expected(request: Request, fault: Exception) -> Response:
        return words(400 if isinstance(fault, RetrievalError) else 500, str(fault))

    async def broken(request: Request, fault: Exception) -> Response:
        return words(500, "the server failed; its log says how")

    app.add_exception_handler(HTTPException, refused)
    app.add_exception_handler(RouteError, unrouted)
    app.add_exception_handler(RequestValidationError, invalid)
    for kind in EXPECTED:
        app.add_exception_handler(kind, expected)
    app.add_exception_handler(Exception, broken)


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that waits for connections; port 0 takes a free one.

    Raises:
        RetrievalError: the port is taken, or the address is none of this machine.
    """
    if not 0 <= port < 2**16:
        raise RetrievalError(f"port {port}; expected 0 to {2**16 - 1:,}; 0 takes a free one")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=512)
    except OSError as fault:
        raise RetrievalError(
            f"cannot listen on {host} port {port}: {fault.strerror}; give --port 0 for a free one, "
            "or another --host"
        ) from None


def choose_token(listening: socket.socket, given: str | None) -> str | None:
    """Returns the token that requests have to bring: by default a random one, on loopback none.

    Raises:
        ConfigError: the one that is given can be guessed, or cannot stand in an address.
    """
    if given is None:
        return None if _on_loopback(listening) else secrets.token_urlsafe(32)
    if not TOKEN.fullmatch(given):
        raise ConfigError(
            f"a token of {len(given)} characters; expected 16 to 200 letters, digits, '-' and '_'; "
            "give another --token or HERON_TOKEN, or none for a random one"
        )
    return given


def _on_loopback(listening: socket.socket) -> bool:
    return listening.getsockname()[0] in LOOPBACK


def address(listening: socket.socket, token: str | None = None) -> str:
    """Returns the URL of the page; the token in it becomes a cookie when it is opened."""
    host, port = listening.getsockname()[:2]
    found = f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"
    return found if token is None else f"{found}?token={token}"


def make_server(
    retriever: Retriever,
    listening: socket.socket,
    limits: Limits | None = None,
    token: str | None = None,
) -> uvicorn.Server:
    """Returns a server of the page, to `run(sockets=[listening])`; see `listen`, `choose_token`.

    On loopback it answers to loopback's names alone; elsewhere it needs a token.
    """
    limits, local = limits or Limits(), _on_loopback(listening)
    if token is None and not local:
        raise ValueError("a server that others reach needs a token; see choose_token")
    bounds = {"wait_s": limits.body_s, "most": limits.connections, "waiting": {}}
    cookie = f"heron-{listening.getsockname()[1]}"  # a host's ports share their cookies
    config = uvicorn.Config(
        make_app(retriever, limits, LOOPBACK if local else (), token, cookie),
        http=type("_Bounded", (BoundedConnection,), bounds),
        ws="none",
        lifespan="off",
        loop="asyncio",
        log_level="error",  # a client's faults are told to the client
        access_log=False,
        headers=list(HEADERS.items()),
        server_header=False,
        proxy_headers=False,
        limit_concurrency=2 * limits.connections,  # where none of them is slow; then a 503
        timeout_graceful_shutdown=5,
    )
    return uvicorn.Server(config)
