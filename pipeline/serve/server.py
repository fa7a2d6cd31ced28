"""A web page over an index: a sample, its neighbours, and its hard and false negatives.

What a browser sends is bounded before it is used: numbers and texts by the query's own types,
bodies by their bytes and by a time, searches and uploads by how many run and how many wait. The
page and its API are of one origin; nothing is fetched from elsewhere, and no other origin may read.
"""

import re
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as RouteError

from heron.pipeline.config.errors import ConfigError, RetrievalError
from heron.pipeline.retrieval.query import Retriever
from heron.pipeline.serve.admission import Limits
from heron.pipeline.serve.guard import HEADERS, BoundedConnection, Gate
from heron.pipeline.serve.routes import EXPECTED, Bounds, index_routes

LOOPBACK = ("127.0.0.1", "localhost", "::1")
PAGE = Path(__file__).parent / "page"
TYPES = {  # of the page's files, and no others are served
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
TOKEN = re.compile(r"[A-Za-z0-9_-]{16,200}")


def _page_file(file: Path) -> Callable[[], Awaitable[Response]]:
    """A route that answers with a file of the page; the browser asks anew each time."""
    # Held in memory: many who ask at once are to be answered without a wait for the disk.
    data, kind = file.read_bytes(), TYPES[file.suffix]

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
        return words(400, f"{found['loc'][:2][-1]} is '{shown}': {found['msg'].lower()}")

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
    retrievers: Retriever | Mapping[str, Retriever],
    listening: socket.socket,
    limits: Limits | None = None,
    token: str | None = None,
) -> uvicorn.Server:
    """Returns a server of the page, to `run(sockets=[listening])`; see `listen`, `choose_token`.

    Several indexes have names; the API of the first is `/api`, of the next `/api/1`. Searches run
    in threads, the model once at a time. On loopback the server answers to loopback's names alone,
    so that no page elsewhere reaches it through a name of its own that points here; elsewhere it
    needs a token, which a request brings in a cookie, as a rule, that the address with it sets.
    """
    limits, local = limits or Limits(), _on_loopback(listening)
    if token is None and not local:
        raise ValueError("a server that others reach needs a token; see choose_token")
    app = FastAPI(title="Heron", docs_url=None, redoc_url=None, openapi_url=None)
    for file in PAGE.iterdir():
        if file.suffix in TYPES:
            app.get("/" if file.name == "index.html" else f"/{file.name}")(_page_file(file))
    named = retrievers if isinstance(retrievers, Mapping) else {"": retrievers}
    bounds = Bounds(limits)
    for number, retriever in enumerate(named.values()):
        routes = index_routes(retriever, bounds, [*named])
        app.include_router(routes, prefix=f"/api/{number}" if number else "/api")
    cookie = f"heron-{listening.getsockname()[1]}"  # a host's ports share their cookies
    app.add_middleware(Gate, hosts=LOOPBACK if local else (), token=token, cookie=cookie)
    _answer_faults(app)
    waits = {"wait_s": limits.body_s, "most": limits.connections, "waiting": {}}
    config = uvicorn.Config(
        app,
        http=type("_Bounded", (BoundedConnection,), waits),
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
