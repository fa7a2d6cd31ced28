"""A web page over an index: a sample, its neighbours, and its hard and false negatives.

What a browser sends is bounded before it is used: numbers and texts by the types of the query
parameters, bodies by size and time, searches and uploads by how many run and how many wait. The
page and its API share one origin; nothing is fetched from elsewhere, and no other origin may read.
"""

import re
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import APIRouter, FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as RouteError

from heron.base.errors import ConfigError, RetrievalError
from heron.retrieval.query import Retriever
from heron.serve.admission import Limits
from heron.serve.decide import Decisions, Shown, decision_routes
from heron.serve.guard import HEADERS, BoundedConnection, Gate
from heron.serve.routes import EXPECTED, Bounds, index_routes

LOOPBACK = ("127.0.0.1", "localhost", "::1")
PAGE = Path(__file__).parent / "page"
TYPES = {  # no other files of the page's folder are served
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
SHARED = {"elements.js", "icon.svg", "page.css"}  # by both pages
TOKEN = re.compile(r"[A-Za-z0-9_-]{16,200}")


def _page_file(file: Path) -> Callable[[], Awaitable[Response]]:
    """Returns a route that answers with a file of the page, which browsers revalidate each time."""
    # Read once: many requests at once should not wait for the disk.
    data, kind = file.read_bytes(), TYPES[file.suffix]

    async def answer() -> Response:
        return Response(data, 200, {"Cache-Control": "no-cache"}, kind)

    return answer


def _answer_faults(app: FastAPI) -> None:
    """Answers every error with a status and a sentence, never with a traceback."""

    def error(status: int, text: str, headers: Mapping[str, str] | None = None) -> Response:
        return JSONResponse({"error": text}, status, headers)

    async def refused(request: Request, fault: Any) -> Response:
        return error(fault.status_code, fault.detail, fault.headers)

    async def unrouted(request: Request, fault: Any) -> Response:
        text = f"{request.method} {request.url.path}: {fault.detail.lower()}"
        return error(fault.status_code, text, fault.headers)

    async def invalid(request: Request, fault: Any) -> Response:
        first = fault.errors()[0]
        name, value = first["loc"][:2][-1], str(first["input"])
        if first["type"] == "missing":
            return error(400, f"{name} is missing")
        shown = value if len(value) <= 40 else f"{value[:40]}…"
        text = first["msg"].lower().removeprefix("input ").removeprefix("string ")
        return error(400, f"{name} {text.replace('should', 'must')}, got '{shown}'")

    async def expected(request: Request, fault: Exception) -> Response:
        return error(400 if isinstance(fault, RetrievalError) else 500, str(fault))

    async def unexpected(request: Request, fault: Exception) -> Response:
        return error(500, "the server failed; see its log")

    app.add_exception_handler(HTTPException, refused)
    app.add_exception_handler(RouteError, unrouted)
    app.add_exception_handler(RequestValidationError, invalid)
    for kind in EXPECTED:
        app.add_exception_handler(kind, expected)
    app.add_exception_handler(Exception, unexpected)


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket; port 0 takes a free one.

    Raises a RetrievalError if the port is taken, or the address is not one of this machine.
    """
    if not 0 <= port < 2**16:
        raise RetrievalError(f"port must be 0 to {2**16 - 1:,} (0: a free one), got {port}")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=512)
    except OSError as fault:
        raise RetrievalError(
            f"cannot listen on {host} port {port}: {fault.strerror}; use --port 0 for a free one, "
            "or another --host"
        ) from None


def choose_token(listening: socket.socket, token: str | None) -> str | None:
    """Returns the token that requests need; without one given, a random one, and on loopback None.

    Raises a ConfigError if the given token can be guessed, or cannot stand in an address.
    """
    if token is None:
        return None if _on_loopback(listening) else secrets.token_urlsafe(32)
    if not TOKEN.fullmatch(token):
        raise ConfigError(
            f"a token must have 16 to 200 letters, digits, '-' and '_', got {len(token)} "
            "characters; use another --token or HERON_TOKEN, or none for a random one"
        )
    return token


def _on_loopback(listening: socket.socket) -> bool:
    return listening.getsockname()[0] in LOOPBACK


def address(listening: socket.socket, token: str | None = None) -> str:
    """Returns the URL of the page; a token in it becomes a cookie when the page is opened."""
    host, port = listening.getsockname()[:2]
    url = f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"
    return url if token is None else f"{url}?token={token}"


def make_server(
    retrievers: Retriever | Mapping[str, Retriever],
    listening: socket.socket,
    limits: Limits | None = None,
    token: str | None = None,
) -> uvicorn.Server:
    """Returns a server of the page, to `run(sockets=[listening])`; see `listen`, `choose_token`.

    Several indexes need names; the API of the first is `/api`, of the next `/api/1`. Searches run
    in threads, the model for one request at a time. On loopback the server answers only to
    loopback's host names, so that no foreign page reaches it through a name that resolves to it
    (DNS rebinding). Elsewhere requests need a token, usually in the cookie that the address with
    the token sets.
    """
    by_name = retrievers if isinstance(retrievers, Mapping) else {"": retrievers}
    limits = limits or Limits()
    bounds = Bounds(limits)
    routers = [index_routes(retriever, bounds, [*by_name]) for retriever in by_name.values()]
    return _server("index.html", routers, listening, limits, token)


def make_decision_server(
    decisions: Decisions,
    shown: Shown | None,
    why: str,
    listening: socket.socket,
    token: str | None = None,
) -> uvicorn.Server:
    """Returns a server of the page of an audit: see `make_server` and `decision_routes`."""
    limits = Limits()
    routes = decision_routes(decisions, shown, why, Bounds(limits))
    return _server("decide.html", [routes], listening, limits, token)


def page_files(start: str) -> dict[str, Path]:
    """Returns the files of the page that begins with `start`, by the paths they have."""
    others = {file.name: file for file in PAGE.iterdir() if file.suffix in {*TYPES} - {".html"}}
    of_audits = {name for name in others if name.startswith("decide")}
    own = of_audits | SHARED if start == "decide.html" else others.keys() - of_audits
    return {"": PAGE / start} | {name: others[name] for name in sorted(own)}


def _server(
    start: str,
    routers: Sequence[APIRouter],
    listening: socket.socket,
    limits: Limits,
    token: str | None,
) -> uvicorn.Server:
    local = _on_loopback(listening)
    if token is None and not local:
        raise ValueError("a server that others can reach needs a token; see choose_token")
    app = FastAPI(title="Heron", docs_url=None, redoc_url=None, openapi_url=None)
    for path, file in page_files(start).items():
        app.get(f"/{path}")(_page_file(file))
    for number, routes in enumerate(routers):
        app.include_router(routes, prefix=f"/api/{number}" if number else "/api")
    cookie = f"heron-{listening.getsockname()[1]}"  # the ports of a host share their cookies
    app.add_middleware(Gate, hosts=LOOPBACK if local else (), token=token, cookie=cookie)
    _answer_faults(app)
    settings = {"wait_s": limits.body_s, "max_connections": limits.connections, "waiting": {}}
    config = uvicorn.Config(
        app,
        http=type("_Bounded", (BoundedConnection,), settings),
        ws="none",
        lifespan="off",
        loop="asyncio",
        log_level="error",  # errors of clients are reported to them
        access_log=False,
        headers=list(HEADERS.items()),
        server_header=False,
        proxy_headers=False,
        limit_concurrency=2 * limits.connections,  # beyond it, if no connection is slow, a 503
        timeout_graceful_shutdown=5,
    )
    return uvicorn.Server(config)
