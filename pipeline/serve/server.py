"""A web page over an index: a sample, its neighbours, and its hard and false negatives.

What a browser sends is bounded before it is used: numbers and texts by the query's own types,
bodies by their bytes and by a time, searches and uploads by how many run and how many wait. The
page and its API are of one origin; nothing is fetched from elsewhere, and no other origin may read.
"""

import asyncio
import socket
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import uvicorn
from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from PIL import Image
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from heron.pipeline.config.errors import CheckpointError, ConfigError, RetrievalError
from heron.pipeline.retrieval.answer import Answer, Relation
from heron.pipeline.retrieval.query import Retriever
from heron.pipeline.retrieval.samples import Samples
from heron.pipeline.serve.guard import Guard, Prompt
from heron.shards.errors import ShardError

MOST_HITS = 200
LONGEST = 500  # characters of a key or a filter
PREFIXED = 20  # keys that are suggested
SHOWN_PIXELS = 256  # longest side of a picture that is sent
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


@dataclass(frozen=True)
class Limits:
    """How much one server does at once, and how long it waits.

    Attributes:
        upload_bytes: of a body.
        body_s: seconds in which a body, or the head of a request, has to arrive.
        searches: that run at once, and as many pictures.
        uploads: bodies that are read at once.
        waiting: of each of these, how many more may wait; the next ones are told to come back.
        connections: open at once.
    """

    upload_bytes: int = 16 * 2**20
    body_s: float = 20.0
    searches: int = 2
    uploads: int = 4
    waiting: int = 100
    connections: int = 500


class Refused(Exception):
    """A request that is answered with a status and words."""

    def __init__(self, status: int, text: str, **headers: str) -> None:
        """Keep what to answer; `retry_after="1"` becomes a header."""
        super().__init__(text)
        self.status, self.text = status, text
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


class Gate:
    """Lets some through at once, has some wait, and refuses the rest."""

    def __init__(self, what: str, at_once: int, waiting: int) -> None:
        """Count from none."""
        self._what, self._most, self._inside = what, at_once + waiting, 0
        self._free = asyncio.Semaphore(at_once)

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[None]:
        """Hold a place.

        Raises:
            Refused: 503, where as many wait as may.
        """
        if self._inside >= self._most:
            raise Refused(
                503,
                f"{self._inside} {self._what} are under way or wait; try again in a second",
                retry_after="1",
            )
        self._inside += 1
        try:
            async with self._free:
                yield
        finally:
            self._inside -= 1


class Keys:
    """The keys in order, to find those that begin with a text."""

    def __init__(self, samples: Samples) -> None:
        """Sort them."""
        self._sorted = np.sort(samples.keys)

    def starting(self, prefix: str, most: int) -> list[str]:
        """The first keys that begin with a text; at most `most`."""
        wanted = prefix.encode()
        if len(wanted) > self._sorted.dtype.itemsize:  # numpy would make all keys as long
            return []
        first = int(np.searchsorted(self._sorted, np.bytes_(wanted)))
        near = (bytes(key) for key in self._sorted[first : first + most].tolist())
        return [key.decode() for key in near if key.startswith(wanted)]


class Pictures:
    """Pictures as JPEG, small enough for a page; the last ones are kept."""

    def __init__(self, retriever: Retriever, kept: int = 2_000) -> None:
        """Keep none yet."""
        self._retriever, self._most = retriever, kept
        self._kept: OrderedDict[int, bytes] = OrderedDict()

    def __call__(self, number: int) -> bytes | None:
        """The picture of a sample, or None where it has none."""
        if (found := self._kept.get(number)) is not None:
            return found
        picture = self._retriever.picture(number)
        if picture is None:
            return None
        picture = picture.convert("L" if picture.mode in ("1", "L", "I;16") else "RGB")
        picture.thumbnail((SHOWN_PIXELS, SHOWN_PIXELS), Image.Resampling.LANCZOS)
        picture.save(out := BytesIO(), "JPEG", quality=90)
        self._kept[number] = out.getvalue()
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)
        return out.getvalue()


def make_app(
    retriever: Retriever, limits: Limits | None = None, hosts: Sequence[str] = LOOPBACK
) -> FastAPI:
    """The page and its API.

    Args:
        retriever: answers the queries; searches run in threads, the model once at a time.
        limits: of what runs at once.
        hosts: names by which the server may be called, so that no page elsewhere can reach it
            through a name of its own that points here; none for any.
    """
    limits = limits or Limits()
    app = FastAPI(title="Heron", docs_url=None, redoc_url=None, openapi_url=None)
    samples, facts = retriever.samples, about(retriever, limits)
    keys, pictures = Keys(samples), Pictures(retriever)
    searching = Gate("searches", limits.searches, limits.waiting)
    drawing = Gate("pictures", limits.searches, limits.waiting * 10)  # a page asks for up to 200
    reading = Gate("uploads", limits.uploads, limits.waiting)
    encoding = Gate("uploads", 1, limits.uploads)
    generator = np.random.default_rng()

    for address, (name, kind) in PAGE.items():
        data = (files("heron.pipeline.serve") / "page" / name).read_bytes()
        app.get(address)(_constant(data, kind))

    @app.get("/api/about")
    async def describe() -> dict[str, Any]:
        return facts

    @app.get("/api/samples")
    async def suggest(prefix: Text = "") -> dict[str, list[str]]:
        return {"keys": keys.starting(prefix, PREFIXED)}

    @app.get("/api/random")
    async def draw() -> dict[str, str]:
        return {"key": samples.key(int(generator.integers(len(samples))))}

    @app.get("/api/neighbours")
    async def neighbours(
        key: Text, k: Count = 24, where: Text = "", relation: Relation = "neighbours"
    ) -> dict[str, Any]:
        async with searching():
            return await asyncio.to_thread(
                lambda: _plain(retriever.by_key(key, k, where, relation), samples)
            )

    @app.post("/api/upload")
    async def upload(request: Request, k: Count = 24, where: Text = "") -> dict[str, Any]:
        async with reading():  # until it is done, so that no more bodies than these are held
            data = await _body(request, limits)
            async with encoding():
                return await asyncio.to_thread(
                    lambda: _plain(retriever.by_file(data, k, where, name="the upload"), samples)
                )

    @app.get("/api/picture/{number}")
    async def picture(number: int) -> Response:
        if not 0 <= number < len(samples):
            raise Refused(404, f"no sample has the number {number}; found {len(samples):,} samples")
        async with drawing():
            data = await asyncio.to_thread(pictures, number)
        if data is None:
            raise Refused(404, f"sample {samples.key(number)} has no picture")
        # The page's addresses name the index: what a cache holds is of the same one.
        return Response(data, 200, {"Cache-Control": "private, max-age=3600"}, "image/jpeg")

    _answer_faults(app)
    app.add_middleware(Guard, hosts=tuple(hosts))
    return app


def about(retriever: Retriever, limits: Limits) -> dict[str, Any]:
    """What the page says of the index, and what it may ask for."""
    manifest, samples = retriever.index.manifest, retriever.samples
    recall = manifest.recall
    return {
        "data": Path(retriever.data).name,
        "kind": manifest.kind,
        "metric": manifest.metric,
        "layer": manifest.layer,
        "dim": manifest.dim,
        "count": manifest.count,
        "recall": f"{recall.value:.3f} at {recall.k}, of {recall.queries:,} held-out queries"
        if recall
        else "not measured",
        "names": samples.names,
        "of": manifest.embeddings_sha256[:12],
        "longest": LONGEST,
        "pictures": _has_pictures(retriever),
        "upload_bytes": limits.upload_bytes,
    }


def _has_pictures(retriever: Retriever) -> bool:
    try:
        return retriever.picture(0) is not None
    except EXPECTED:
        return False


def _plain(answer: Answer, samples: Samples) -> dict[str, Any]:
    """An answer for JSON; the query says whether it has labels, be it none of them."""
    plain = answer.plain()
    number = answer.query.number
    plain["query"]["labelled"] = number is not None and bool(samples.known[number])
    return plain


def _constant(data: bytes, kind: str) -> Callable[[], Awaitable[Response]]:
    """A route that answers with a file of the page; the browser asks anew each time."""

    async def answer() -> Response:
        return Response(data, 200, {"Cache-Control": "no-cache"}, kind)

    return answer


async def _body(request: Request, limits: Limits) -> bytes:
    """The bytes of an upload, refused as soon as they are too many or too slow."""
    kind = request.headers.get("content-type", "none")
    if kind != BINARY:
        raise Refused(
            415, f"the body is '{kind}'; expected '{BINARY}': the bytes of one file, as they are"
        )
    too_large = Refused(
        413,
        f"the upload has more than {limits.upload_bytes:,} bytes; expected at most these; "
        "give a smaller file",
        connection="close",  # what is left of it is not read
    )
    declared = request.headers.get("content-length", "0")
    if int(declared) > limits.upload_bytes:  # the server has checked that it is a number
        raise too_large
    data = bytearray()
    try:
        async with asyncio.timeout(limits.body_s):
            async for chunk in request.stream():
                if len(data) + len(chunk) > limits.upload_bytes:
                    raise too_large
                data += chunk
    except TimeoutError:
        raise Refused(
            408,
            f"the upload did not arrive in {limits.body_s:g} s; found {len(data):,} bytes; "
            "try again, or give a smaller file",
            connection="close",
        ) from None
    except ClientDisconnect:
        raise Refused(400, "the upload ended early") from None
    if not data:
        raise Refused(400, "the upload is empty; expected the bytes of one file")
    return bytes(data)


def _answer_faults(app: FastAPI) -> None:
    """Answer what goes wrong with a status and words, never with a traceback."""

    def words(status: int, text: str, headers: Mapping[str, str] | None = None) -> Response:
        return JSONResponse({"error": text}, status, headers)

    async def refused(request: Request, fault: Exception) -> Response:
        assert isinstance(fault, Refused)
        return words(fault.status, fault.text, fault.headers)

    async def expected(request: Request, fault: Exception) -> Response:
        return words(400 if isinstance(fault, RetrievalError) else 500, str(fault))

    async def unknown(request: Request, fault: Exception) -> Response:
        assert isinstance(fault, HTTPException)
        text = f"{request.method} {request.url.path}: {fault.detail.lower()}"
        return words(fault.status_code, text, fault.headers)

    async def invalid(request: Request, fault: Exception) -> Response:
        assert isinstance(fault, RequestValidationError)
        found = fault.errors()[0]
        given = str(found["input"])
        shown = given if len(given) <= 40 else f"{given[:40]}…"
        return words(400, f"{found['loc'][-1]} is '{shown}': {found['msg'].lower()}")

    async def broken(request: Request, fault: Exception) -> Response:
        return words(500, "the server failed; its log says how")

    app.add_exception_handler(Refused, refused)
    for kind in EXPECTED:
        app.add_exception_handler(kind, expected)
    app.add_exception_handler(HTTPException, unknown)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(Exception, broken)


def listen(host: str, port: int) -> socket.socket:
    """A socket that waits for connections; port 0 takes a free one.

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
    """The URL of the page."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def make_server(
    retriever: Retriever, listening: socket.socket, limits: Limits | None = None
) -> uvicorn.Server:
    """A server of the page, to `run(sockets=[listening])`.

    Args:
        retriever: answers the queries.
        listening: see `listen`. On loopback the server answers to loopback's names alone.
        limits: of what runs at once.
    """
    limits = limits or Limits()
    host = listening.getsockname()[0]
    app = make_app(retriever, limits, LOOPBACK if host in LOOPBACK else ())
    config = uvicorn.Config(
        app,
        http=type("_Timed", (Prompt,), {"head_s": limits.body_s}),
        ws="none",
        lifespan="off",
        loop="asyncio",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=limits.connections,
        timeout_graceful_shutdown=5,
    )
    return uvicorn.Server(config)
