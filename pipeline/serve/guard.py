"""What a connection and a request have to be before the web page looks at them."""

import asyncio
import hmac
import json
import socket
from collections.abc import Sequence
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

HEADERS = {  # of every answer: browsers are to keep to this origin
    "Content-Security-Policy": "default-src 'self'; img-src 'self' blob:; object-src 'none'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
LINGER_S = 2.0  # seconds in which a client may still send what is no longer read


class Gate:
    """Refuses requests under a foreign name, or without the token."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str], token: str | None, cookie: str) -> None:
        """Stands before an app; no hosts: any name will do; no token: none is asked for."""
        self._app, self._hosts, self._token, self._cookie = app, hosts, token, cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers itself what is not let in; a token in the address becomes a cookie."""
        headers, answer = Headers(scope=scope), self._app
        called = headers.get("host", "")
        if self._hosts and host_name(called) not in self._hosts:
            text = f"this server is not '{called}'; expected {', '.join(self._hosts)}"
            answer = JSONResponse({"error": text}, 421)
        elif self._token is not None and not self._known(self._given(headers)):
            answer = self._exchange(scope)
        await answer(scope, receive, send)

    def _known(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), str(self._token).encode())

    def _given(self, headers: Headers) -> str:
        """The token of a request: in its cookie, or as `Authorization: Bearer TOKEN`."""
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            return bearer.strip()
        # As browsers do: http.cookies reads none after one that breaks its rules, such as JSON.
        return cookie_parser(headers.get("cookie", "")).get(self._cookie, "")

    def _exchange(self, scope: Scope) -> Response:
        """Has the token of the page's address become a cookie; refuses all else."""
        query = QueryParams(scope["query_string"])
        if (
            scope["path"] == "/"
            and scope["method"] == "GET"
            and self._known(query.get("token", ""))
        ):
            rest = urlencode([(name, x) for name, x in query.multi_items() if name != "token"])
            found = RedirectResponse(f"/?{rest}", 303, {"Cache-Control": "no-store"})
            token = str(self._token)
            found.set_cookie(self._cookie, token, httponly=True, samesite="strict")
            return found
        text = "this server needs a token; open the address that heron serve printed when it began"
        return JSONResponse({"error": text}, 401, {"WWW-Authenticate": "Bearer"})


def host_name(host: str) -> str | None:
    """Returns the name in a Host header, without its port; None where it is no host."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


class Lingering:
    """A transport that closes once the client has sent all it wants to, or in `LINGER_S`.

    Closed before, it would reset what still comes, which may reach the client before the answer.
    """

    def __init__(self, transport: asyncio.Transport, connection: "BoundedConnection") -> None:
        """Stands before a transport; all but closing is its own."""
        self._transport, self._connection, self._ended = transport, connection, False

    def __getattr__(self, name: str) -> Any:
        """Returns what the transport has under a name."""
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Returns whether nothing more is sent."""
        return self._ended or self._transport.is_closing()

    def close(self) -> None:
        """Ends what is sent, then waits for the other side to do the same."""
        if self.is_closing():
            return
        conn = self._connection.conn
        if conn.trailing_data[0] or conn.their_state in (h11.SEND_BODY, h11.ERROR):
            self._ended = True
            self._transport.write_eof()
            self._connection.flow.resume_reading()
            self._connection.wait_for("the end", LINGER_S)
        else:
            self._transport.close()


class BoundedConnection(H11Protocol):
    """A connection that waits for its client so long and no longer.

    A head, a body and the reading of an answer have `wait_s` each. Where there are too many
    connections, the one that has waited longest goes, so that the slow ones keep no other out.
    """

    wait_s = 20.0  # seconds
    most = 400  # connections
    waiting: ClassVar[dict["BoundedConnection", None]] = {}  # of one server, the longest first

    def __init__(self, config: Config, server_state: ServerState, *rest: Any, **more: Any) -> None:
        """Begins with nothing received."""
        super().__init__(config, server_state, *rest, **more)
        self._awaited = ""
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Waits for the first head, in place of another connection where there are too many."""
        # Or a body would wait until its head is acknowledged. asyncio sets this itself on sockets
        # that name their protocol, which these do not.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        transport.set_write_buffer_limits(0)  # so that it is told when all has been read
        super().connection_made(Lingering(transport, self))  # type: ignore[arg-type]
        if len(self.connections) > self.most and self.waiting:
            next(iter(self.waiting)).drop()
        self.wait_for("a head", self.wait_s)

    def data_received(self, data: bytes) -> None:
        """Takes what comes, unless the answer has ended before it."""
        if not self.transport.is_closing():
            super().data_received(data)
            self._look()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Answers what was asked whole and refuses what was not, then closes."""
        if self._awaited == "a body" or (self._awaited == "a head" and self.conn.trailing_data[0]):
            self.send_400_response(f"the request ended early; expected the rest of {self._awaited}")
        if self._awaited or self.cycle is None:
            return self._awaited == "its reading"
        self.cycle.keep_alive = False
        return True

    def on_response_complete(self) -> None:
        """Waits for the next request."""
        super().on_response_complete()
        self._look()

    def pause_writing(self) -> None:
        """Waits for the client to read."""
        super().pause_writing()
        self.wait_for("its reading", self.wait_s)

    def resume_writing(self) -> None:
        """Goes on once it has read all."""
        super().resume_writing()
        if self._awaited == "its reading":
            self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        """Waits no more."""
        super().connection_lost(exc)
        self._stop()

    def send_400_response(self, msg: str) -> None:
        """Says what is wrong, where no answer has begun, and closes."""
        if self.cycle is not None:  # whose answer would come too late
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return self.drop()
        text = json.dumps({"error": msg.rstrip(".").lower()}).encode()
        plain = {"Content-Type": "application/json", "Connection": "close"} | HEADERS
        headers = [*plain.items(), ("Content-Length", str(len(text)))]
        refusal = h11.Response(status_code=400, headers=headers)
        for event in (refusal, h11.Data(data=text), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def wait_for(self, what: str, seconds: float) -> None:
        """Begins to wait for the client, unless it is waited for this already."""
        if what != self._awaited:
            self._stop()
            self._awaited, self.waiting[self] = what, None
            self._deadline = self.loop.call_later(seconds, self.drop)

    def drop(self) -> None:
        """Ends the connection now."""
        self._stop()
        self.transport.abort()

    def _look(self) -> None:
        """Waits for the client where it is its turn."""
        if self.transport.is_closing() or self.flow.write_paused:
            return
        if self.conn.their_state is h11.SEND_BODY:  # the app's own limit is to come first
            self.wait_for("a body", self.wait_s + LINGER_S)
        elif self.conn.their_state is not h11.IDLE:
            self._stop()
            if self.conn.trailing_data[0]:  # more than was announced, or a row of requests
                self.cycle.keep_alive = False
        elif self.conn.trailing_data[0]:
            self.wait_for("a head", self.wait_s)
        else:  # uvicorn's own limit is to come first
            self.wait_for("the next", self.timeout_keep_alive + LINGER_S)

    def _stop(self) -> None:
        self._awaited = ""
        self.waiting.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
