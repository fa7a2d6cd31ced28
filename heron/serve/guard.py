"""Checks that connections and requests pass before the web page's app sees them."""

import asyncio
import hmac
import json
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, ClassVar
from urllib.parse import urlencode, urlsplit

import h11
from starlette.datastructures import Headers, QueryParams
from starlette.requests import cookie_parser
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

HEADERS = {  # of every answer; they confine browsers to this origin
    "Content-Security-Policy": "default-src 'self'; img-src 'self' blob:; object-src 'none'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
LINGER_S = 2.0  # seconds for which a client may still send what is no longer read


class Gate:
    """Refuses requests with a foreign Host header, or without the token."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str], token: str | None, cookie: str) -> None:
        """Wraps an app; without hosts any Host will do, and without a token none is needed."""
        self._app, self._hosts, self._token, self._cookie = app, hosts, token, cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or refuses it; a token in the page's address becomes a cookie."""
        headers, answer = Headers(scope=scope), self._app
        host = headers.get("host", "")
        if self._hosts and host_name(host) not in self._hosts:
            text = f"this server is not '{host}'; use one of {', '.join(self._hosts)}"
            answer = JSONResponse({"error": text}, 421)
        elif self._token is not None and not self._matches(self._token_of(headers)):
            answer = self._set_cookie_or_refuse(scope)
        await answer(scope, receive, send)

    def _matches(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(), str(self._token).encode())

    def _token_of(self, headers: Headers) -> str:
        """Returns the token in `Authorization: Bearer TOKEN`, or else in the cookie."""
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            return bearer.strip()
        # As browsers do: http.cookies reads none after one that breaks its rules, such as JSON.
        return cookie_parser(headers.get("cookie", "")).get(self._cookie, "")

    def _set_cookie_or_refuse(self, scope: Scope) -> Response:
        """Turns the token in the page's address into a cookie; refuses all else."""
        query = QueryParams(scope["query_string"])
        if (
            scope["path"] == "/"
            and scope["method"] == "GET"
            and self._matches(query.get("token", ""))
        ):
            rest = urlencode([(name, x) for name, x in query.multi_items() if name != "token"])
            redirect = RedirectResponse(f"/?{rest}", 303, {"Cache-Control": "no-store"})
            token = str(self._token)
            redirect.set_cookie(self._cookie, token, httponly=True, samesite="strict")
            return redirect
        text = "this server needs a token; open the address that heron serve printed at its start"
        return JSONResponse({"error": text}, 401, {"WWW-Authenticate": "Bearer"})


def host_name(host: str) -> str | None:
    """Returns the name in a Host header, without its port; None if the header is invalid."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


class Lingering:
    """A transport that closes once the client has stopped sending, or after `LINGER_S`.

    Closing earlier would send a reset, which may reach the client before the answer.
    """

    def __init__(self, transport: asyncio.Transport, connection: "BoundedConnection") -> None:
        """Wraps a transport, and changes nothing but how it closes."""
        self._transport, self._connection, self._ended = transport, connection, False

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the transport."""
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Returns whether nothing more can be sent."""
        return self._ended or self._transport.is_closing()

    def close(self) -> None:
        """Ends the sending side; while the client still sends, waits for it to end too."""
        if self.is_closing():
            return
        conn = self._connection.conn
        if conn.trailing_data[0] or conn.their_state in (h11.SEND_BODY, h11.ERROR):
            self._ended = True
            with suppress(OSError):  # the client is gone
                self._transport.write_eof()
            self._connection.flow.resume_reading()
            self._connection.wait_for("the end", LINGER_S)
        else:
            self._transport.close()


class BoundedConnection(H11Protocol):
    """A connection that waits for its client for a bounded time.

    A head, a body and the reading of an answer have `wait_s` each. When there are too many
    connections, the one that has waited longest is cut, so that slow clients keep no other out.
    """

    wait_s = 20.0  # seconds
    max_connections = 400
    waiting: ClassVar[dict["BoundedConnection", None]] = {}  # of one server, the longest wait first

    def __init__(
        self, config: Config, server_state: ServerState, *args: Any, **kwargs: Any
    ) -> None:
        """Starts with nothing received."""
        super().__init__(config, server_state, *args, **kwargs)
        self._awaited = ""
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Waits for the first head; cuts another connection if there are too many."""
        # Otherwise a body would wait until its head is acknowledged. asyncio sets this itself only
        # on sockets that name their protocol, which these do not.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        transport.set_write_buffer_limits(0)  # so that resume_writing means that all was read
        super().connection_made(Lingering(transport, self))  # type: ignore[arg-type]
        if len(self.connections) > self.max_connections and self.waiting:
            next(iter(self.waiting)).drop()
        self.wait_for("a head", self.wait_s)

    def data_received(self, data: bytes) -> None:
        """Handles received bytes, unless the connection is closing."""
        if not self.transport.is_closing():
            super().data_received(data)
            self._update_wait()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Answers a complete request, refuses an incomplete one, then closes."""
        if self._awaited == "a body" or (self._awaited == "a head" and self.conn.trailing_data[0]):
            self.send_400_response(f"the request ended early, before the rest of {self._awaited}")
        if self._awaited or self.cycle is None:
            return self._awaited == "its reading"
        self.cycle.keep_alive = False
        return True

    def on_response_complete(self) -> None:
        """Waits for the next request."""
        super().on_response_complete()
        self._update_wait()

    def pause_writing(self) -> None:
        """Waits for the client to read."""
        super().pause_writing()
        self.wait_for("its reading", self.wait_s)

    def resume_writing(self) -> None:
        """Goes on once the client has read everything."""
        super().resume_writing()
        if self._awaited == "its reading":
            self._update_wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops waiting."""
        super().connection_lost(exc)
        self._stop_waiting()

    def send_400_response(self, msg: str) -> None:
        """Refuses a malformed request, unless an answer has begun, and closes."""
        if self.cycle is not None:  # its answer would come too late
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return self.drop()
        text = json.dumps({"error": msg.rstrip(".").lower()}).encode()
        fixed = {"Content-Type": "application/json", "Connection": "close"} | HEADERS
        headers = [*fixed.items(), ("Content-Length", str(len(text)))]
        refusal = h11.Response(status_code=400, headers=headers)
        for event in (refusal, h11.Data(data=text), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def wait_for(self, event: str, seconds: float) -> None:
        """Starts to wait for something from the client, unless it waits for that already."""
        if event != self._awaited:
            self._stop_waiting()
            self._awaited, self.waiting[self] = event, None
            self._deadline = self.loop.call_later(seconds, self.drop)

    def drop(self) -> None:
        """Ends the connection now."""
        self._stop_waiting()
        self.transport.abort()

    def _update_wait(self) -> None:
        """Waits for the client if it is the client's turn, else stops waiting."""
        if self.transport.is_closing() or self.flow.write_paused:
            return
        if self.conn.their_state is h11.SEND_BODY:  # the app's own limit should expire first
            self.wait_for("a body", self.wait_s + LINGER_S)
        elif self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
            if self.conn.trailing_data[0]:  # more than was announced, or pipelined requests
                self.cycle.keep_alive = False
        elif self.conn.trailing_data[0]:
            self.wait_for("a head", self.wait_s)
        else:  # uvicorn's own limit should expire first
            self.wait_for("the next", self.timeout_keep_alive + LINGER_S)

    def _stop_waiting(self) -> None:
        self._awaited = ""
        self.waiting.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
