"""What a connection and a request have to be before the web page looks at them."""

import asyncio
from urllib.parse import urlsplit

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADERS = {  # of every answer: browsers are to keep to this origin
    "Content-Security-Policy": "default-src 'self'; img-src 'self' blob:; object-src 'none'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


def host_name(host: str) -> str | None:
    """Returns the name in a Host header, without its port; None where it is no host."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


class TimedHead(H11Protocol):
    """A connection that has to send the head of a request in time: idle ones would add up."""

    head_s = 20.0  # seconds
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Waits for the first head."""
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """Stops waiting once a head is whole; waits for the next from its first byte on."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop()
        elif self._deadline is None and self.conn.trailing_data[0]:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Waits no more."""
        super().connection_lost(exc)
        self._stop()

    def _await_head(self) -> None:
        self._deadline = self.loop.call_later(self.head_s, self.transport.close)

    def _stop(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
