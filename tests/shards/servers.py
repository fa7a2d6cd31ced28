"""A web server on loopback that fails as it is told."""

from __future__ import annotations

import gzip
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal


@dataclass(frozen=True)
class Fault:
    """What goes wrong in one answer, after so many bytes of its body where it has one.

    drop resets the connection, close ends it in good order, stall sends no more until the server
    ends, cut promises and sends fewer bytes, pad more; flip changes the byte at `after`; endless
    begins again at the end of the body, slow sends two hundred bytes a second, gzip says that the
    body is compressed.
    """

    kind: Literal[
        "status", "drop", "close", "stall", "cut", "pad", "flip", "endless", "slow", "gzip"
    ]
    after: int = 0
    status: int = 503


@dataclass
class Web:
    """The files, the faults to come (first in, first out, by file), and the requests that came."""

    files: dict[str, bytes] = field(default_factory=dict)
    faults: dict[str, list[Fault]] = field(default_factory=dict)
    ranges: bool = True
    redirects: dict[str, str] = field(default_factory=dict)  # by file, where it lies
    need: str | None = None  # the query or header that every request must have
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    sent: int = 0  # bytes of endless bodies
    url: str = ""
    ended: threading.Event = field(default_factory=threading.Event)

    def count(self, name: str) -> int:
        """How often a file was asked for."""
        return sum(asked == name for asked, _ in self.requests)


class _Handler(BaseHTTPRequestHandler):
    web: Web
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:  # noqa: N802
        web, (path, _, query) = self.web, self.path.partition("?")
        name = path.removeprefix("/")
        asked = self.headers.get("Range")
        web.requests.append((name, asked))
        faults = web.faults.get(name, [])
        fault = faults.pop(0) if faults else None
        if web.need is not None and web.need not in (query, self.headers.get("Authorization")):
            fault = Fault("status", status=403)
        if name not in web.files or (fault is not None and fault.kind == "status"):
            self.send_response(fault.status if fault else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if name in web.redirects:
            self.send_response(302)
            self.send_header("Location", web.redirects[name])
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        data = web.files[name]
        part = asked is not None and web.ranges
        start, _, stop = (asked or "").removeprefix("bytes=").partition("-")
        first = int(start) if part else 0
        if first and first >= len(data):
            self.send_response(416)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        body = bytearray(data[first : int(stop) + 1 if part and stop else None])
        if fault and fault.kind == "cut":
            del body[fault.after :]
        if fault and fault.kind == "pad":
            body += b"more"
        if fault and fault.kind == "flip":
            body[fault.after] ^= 1
        self.send_response(206 if part else 200)
        if part:
            last = first + len(body) - 1
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
        if fault and fault.kind == "gzip":
            body = bytearray(gzip.compress(body))
            self.send_header("Content-Encoding", "gzip")
        if fault is None or fault.kind != "endless":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if fault is None or fault.kind not in ("drop", "close", "stall", "endless", "slow"):
            self.wfile.write(body)
            return
        while fault.kind == "endless":
            self.wfile.write(body)
            web.sent += len(body)
        for byte in body[fault.after :] if fault.kind == "slow" else b"":
            self.wfile.write(bytes([byte]))
            if web.ended.wait(0.005):
                return
        self.wfile.write(body[: fault.after])
        self.wfile.flush()
        if fault.kind == "stall":
            web.ended.wait(20)
        elif fault.kind == "drop":  # what lingers no time is reset
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        self.close_connection = True


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def server_bind(self) -> None:
        """Bounds what a socket holds that nobody reads, which a busy host lets grow."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**16)
        super().server_bind()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are part of the tests."""


@contextmanager
def web(files: dict[str, bytes]) -> Iterator[Web]:
    """Serve files at `web.url`, on a free port of loopback."""
    site = Web(files)
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"web": site}))
    site.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield site
    finally:
        site.ended.set()
        server.shutdown()
        thread.join()
        server.server_close()
