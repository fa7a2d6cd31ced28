"""Clients that hold connections of a server for as long as it lets them."""

import socket
from contextlib import suppress
from threading import Event, Thread

POST = b"POST /api/upload HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/octet-stream\r\n"
GET = b"GET /page.js HTTP/1.1\r\nHost: 127.0.0.1\r\n"
KINDS = {  # what each sends at once, and then in every second
    "silent": (b"", b""),
    "head": (b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nA: ", b"a"),
    "body": (POST + b"Content-Length: 1000000\r\n\r\n", b"a"),
    "unasked body": (GET + b"Content-Length: 1000000\r\n\r\n", b"a"),
    "deaf": ((GET + b"\r\n") * 1000, b"\r\n"),  # asks for much, and reads nothing
}


class SlowClients(Thread):
    """Keeps so many of a kind at it; they come back within a second where they are dropped."""

    def __init__(self, place: str, count: int, kind: str) -> None:
        super().__init__(daemon=True)
        host, _, port = place.rpartition(":")
        self._place, self._ended = (host, int(port)), Event()
        self._deaf = kind == "deaf"
        self._first, self._then = KINDS[kind]
        self._lines = [self._opened() for _ in range(count)]
        self.dropped = 0

    def run(self) -> None:
        while not self._ended.wait(1):
            for number, line in enumerate(self._lines):
                if not self._holds(line):
                    line.close()
                    self._lines[number] = self._opened()
                    self.dropped += 1
        for line in self._lines:
            line.close()

    def end(self) -> None:
        self._ended.set()
        self.join()

    def _opened(self) -> socket.socket:
        line = socket.create_connection(self._place, 10)
        line.setblocking(False)
        with suppress(OSError):  # a deaf one sends more than there is room for
            line.send(self._first)
        return line

    def _holds(self, line: socket.socket) -> bool:
        """Sends what it has to, and looks whether the other end is gone."""
        try:
            line.send(self._then)
            return self._deaf or line.recv(65536) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False
