"""A web page over an index: a sample, its neighbours, and its hard and false negatives.

What a browser sends is bounded before it is used: numbers and texts by the query's own types,
bodies by their bytes and by a time, searches and uploads by how many run and how many wait. The
page and its API are of one origin; nothing is fetched from elsewhere, and no other origin may read.
"""

import asyncio
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
from heron.pipeline.serve.guard import HEADERS, TimedHead, host_name
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
Count = Annotated[int, Query(ge=1, le=MOST_HITS)]
Answers = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Limits:
    """How much one server does at once, and how long it waits."""

    upload_bytes: int = 16 * 2**20  # of a body
    body_s: float = 20.0  # seconds in which a body, or the head of a request, has to arrive
    searches: int = 2  # that run at once, and as many pictures
    uploads: int = 4  # bodies that are read at once
    waiting: int = 100  # of each of these, how many more may wait; the next ones get a 503
    connections: int = 500  # open at once


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
            text = f"{self._inside} {self._what} are under way or wait; try again in a second"
            raise HTTPException(503, text, {"Retry-After": "1"})
        self._inside += 1
        try:
            async with self._free:
                yield
        finally:
            self._inside -= 1


def make_app(
    retriever: Retriever, limits: Limits | None = None, hosts: Sequence[str] = LOOPBACK
) -> FastAPI:
    """Returns the page and its API; searches run in threads, the model once at a time.

    `hosts` are the names by which the server may be called, so that no page elsewhere can reach it
    through a name of its own that points here; none for any.
    """
    limits = limits or Limits()
    app = FastAPI(title="Heron", docs_url=None, redoc_url=None, openapi_url=None)
    samples, facts = retriever.samples, about(retriever, limits)
    searching = Admission("searches", limits.searches, limits.waiting)
    drawing = Admission("pictures", limits.searches, limits.waiting * 10)  # a page asks for 200
    reading = Admission("uploads", limits.uploads, limits.waiting)
    encoding = Admission("uploads", 1, limits.uploads)
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

    @app.post("/api/upload")
    async def upload(request: Request, k: Count = 24, where: Text = "") -> dict[str, Any]:
        async with reading():  # until it is done, so that no more bodies than these are held
            data = await _body(request, limits)
            async with encoding():
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

    @app.middleware("http")
    async def refuse_other_names(request: Request, answer: Answers) -> Response:
        called = request.headers.get("host", "")
        if hosts and host_name(called) not in hosts:
            text = f"this server is not '{called}'; expected {', '.join(hosts)}"
            return JSONResponse({"error": text}, 421)
        return await answer(request)

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
    return manifest.model_dump(include={"kind", "metric", "layer", "dim", "count"}) | {
        "data": Path(retriever.data).name,
        "recall": measured,
        "names": retriever.samples.names,
        "of": manifest.embeddings_sha256[:12],
        "longest": LONGEST,
        "pictures": pictures,
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


async def _body(request: Request, limits: Limits) -> bytes:
    """The bytes of an upload, refused as soon as they are too many or too slow."""
    kind, most = request.headers.get("content-type", "none"), limits.upload_bytes
    if kind != BINARY:
        text = f"the body is '{kind}'; expected '{BINARY}': the bytes of one file, as they are"
        raise HTTPException(415, text)
    close = {"Connection": "close"}  # what is left of the body is not read
    text = f"the upload has more than {most:,} bytes; expected at most these; give a smaller file"
    too_large = HTTPException(413, text, close)
    if int(request.headers.get("content-length", "0")) > most:  # the server checked that it is one
        raise too_large
    data = bytearray()
    try:
        async with asyncio.timeout(limits.body_s):
            async for chunk in request.stream():
                if len(data) + len(chunk) > most:
                    raise too_large
                data += chunk
    except TimeoutError:
        text = f"the upload did not arrive in {limits.body_s:g} s; found {len(data):,} bytes; "
        raise HTTPException(408, f"{text}try again, or give a smaller file", close) from None
    except ClientDisconnect:
        raise HTTPException(400, "the upload ended early") from None
    if not data:
        raise HTTPException(400, "the upload is empty; expected the bytes of one file")
    return bytes(data)


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


def address(listening: socket.socket) -> str:
    """Returns the URL of the page."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def make_server(
    retriever: Retriever, listening: socket.socket, limits: Limits | None = None
) -> uvicorn.Server:
    """Returns a server of the page, to `run(sockets=[listening])`; see `listen`.

    On loopback it answers to loopback's names alone.
    """
    limits = limits or Limits()
    host = listening.getsockname()[0]
    config = uvicorn.Config(
        make_app(retriever, limits, LOOPBACK if host in LOOPBACK else ()),
        http=type("_TimedHead", (TimedHead,), {"head_s": limits.body_s}),
        ws="none",
        lifespan="off",
        loop="asyncio",
        log_level="warning",
        access_log=False,
        headers=list(HEADERS.items()),
        server_header=False,
        proxy_headers=False,
        limit_concurrency=limits.connections,
        timeout_graceful_shutdown=5,
    )
    return uvicorn.Server(config)
