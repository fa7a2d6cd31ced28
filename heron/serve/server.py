"""A web page over an index: a sample, its neighbours, and its hard and false negatives.

What a browser sends is bounded before it is used: numbers and texts by the types of the query
parameters, bodies by size and time, searches and uploads by how many run and how many wait. The
page and its API share one origin; nothing is fetched from elsewhere, and no other origin may read.

`write_site` writes the page as files, for any web server: answers, map and pictures, made before. A
sample's neighbours, hard and false negatives are those that the server gives. What needs a search
of its own (filters, outlines, uploads, means of several samples) is not on such a page.
"""

import json
import re
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as RouteError

from heron.config.errors import ConfigError, RetrievalError
from heron.retrieval.answer import RELATIONS, Answer
from heron.retrieval.query import Retriever
from heron.serve.guard import HEADERS, BoundedConnection, Gate, Limits
from heron.serve.routes import EXPECTED, Bounds, about, index_routes, picture_bytes

LOOPBACK = ("127.0.0.1", "localhost", "::1")
PAGE = Path(__file__).parent / "page"
TYPES = {  # no other files of the page's folder are served
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
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
    limits, local = limits or Limits(), _on_loopback(listening)
    if token is None and not local:
        raise ValueError("a server that others can reach needs a token; see choose_token")
    app = FastAPI(title="Heron", docs_url=None, redoc_url=None, openapi_url=None)
    for file in PAGE.iterdir():
        if file.suffix in TYPES:
            app.get("/" if file.name == "index.html" else f"/{file.name}")(_page_file(file))
    by_name = retrievers if isinstance(retrievers, Mapping) else {"": retrievers}
    bounds = Bounds(limits)
    for number, retriever in enumerate(by_name.values()):
        routes = index_routes(retriever, bounds, [*by_name])
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


MAX_SAMPLES = 50_000  # three searches each; beyond it a server is the better way
HITS = 24  # of each relation
BLOCK = 100  # samples of a file: a query fetches one


def write_site(retriever: Retriever, folder: Path, update: Callable[[int], None]) -> None:
    """Writes the page of an index to an empty folder; `update` is told of samples as they are done.

    Raises a RetrievalError if there are more than `MAX_SAMPLES` samples, or a single one.
    """
    samples = retriever.samples
    if len(samples) > MAX_SAMPLES:
        raise RetrievalError(
            f"the index has {len(samples):,} samples, but a page of files can have at most "
            f"{MAX_SAMPLES:,}; run `heron serve` without --export"
        )
    if len(samples) < 2:
        raise RetrievalError("the index has only one sample, so there are no neighbours to show")
    _write_page(folder)
    (folder / "data").mkdir()
    _write_data(retriever, folder / "data", update)


def _write_page(folder: Path) -> None:
    for file in PAGE.iterdir():
        if file.suffix in TYPES:
            text = file.read_text()
            if file.name == "index.html":
                # The scripts look for the mark; the answers of the server's paths are files here.
                text = text.replace("<body>", "<body data-static>")
                text = text.replace('href="api/about"', 'href="data/about.json"')
            (folder / file.name).write_text(text)


def _write_data(retriever: Retriever, folder: Path, update: Callable[[int], None]) -> None:
    samples, sample_map = retriever.samples, retriever.index.sample_map()
    description = about(retriever, Limits(), sample_map)
    # What the page offers follows from its description: nothing here that needs a search.
    description |= {"static": True, "indexes": [""], "inputs": [], "texts": False, "hits": HITS}
    description["values"] = False  # without the shards there are no texts or numbers to show
    with suppress(*EXPECTED):
        description["values"] = any(retriever.values([0]).values())
    _save(folder / "about.json", description)
    if sample_map is not None:
        (folder / "map.bin").write_bytes(sample_map.bytes)
    codes = [
        samples.targets[n].nonzero()[0].tolist() if samples.known[n] else None
        for n in range(len(samples))
    ]
    _save(folder / "samples.json", {"keys": [*map(samples.key, range(len(samples)))], "of": codes})
    for name in ("answers", "values"):
        (folder / name).mkdir()
    for first in range(0, len(samples), BLOCK):
        numbers = range(first, min(first + BLOCK, len(samples)))
        name = f"{first // BLOCK}.json"
        _save(folder / "answers" / name, [_answers(retriever, number) for number in numbers])
        if description["values"]:
            _save(folder / "values" / name, retriever.values(numbers))
        for number, view, data in _pictures(retriever, numbers, description["picture_views"]):
            file = folder / "pictures" / str(view) / str(first // BLOCK) / f"{number}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        update(len(numbers))


def _answers(retriever: Retriever, number: int) -> dict[str, Any]:
    """Returns what the server answers to the key of a sample, by relation; an error as its text."""
    samples, found = retriever.samples, dict[str, Any]()
    key, k = samples.key(number), min(HITS, len(samples) - 1)
    for relation in RELATIONS if samples.names and samples.known[number] else RELATIONS[:1]:
        try:
            found[relation] = _compact(retriever.by_key(key, k, relation=relation))
        except RetrievalError as error:  # such as no sample with other labels
            found[relation] = str(error)
    return found


def _compact(answer: Answer) -> dict[str, Any]:
    """Returns an answer without what the page has already: keys and labels of the hits."""
    hits = [(hit.number, float(f"{hit.score:.6g}"), hit.label_distance) for hit in answer.hits]
    return {
        "hits": hits,
        "compares": answer.query.compares,
        "allowed": answer.allowed,
        "far": answer.far,
        "close": answer.close,
        "instead": answer.instead,
    }


def _pictures(
    retriever: Retriever, numbers: range, views: list[str]
) -> Iterator[tuple[int, int, bytes]]:
    """Yields the pictures of samples as JPEG, with the number of the sample and of the view."""
    for number in numbers:
        for position, view in enumerate(views):
            # As the page asks: of one view, by no name.
            data = picture_bytes(retriever, number, view if len(views) > 1 else "")
            if data is not None:
                yield number, position, data


def _save(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, separators=(",", ":"), allow_nan=False))
