"""Clients that keep connections to a server open for as long as it allows."""

import socket
from contextlib import suppress
from threading import Event, Thread

POST = b"POST /api/upload HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/octet-stream\r\n"
GET = b"GET /page.js HTTP/1.1\r\nHost: 127.0.0.1\r\n"
KINDS = {  # what each sends at first, and then every second
    "silent": (b"", b""),
    "head": (b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nA: ", b"a"),
    "body": (POST + b"Content-Length: 1000000\r\n\r\n", b"a"),
    "unasked body": (GET + b"Content-Length: 1000000\r\n\r\n", b"a"),
    "deaf": ((GET + b"\r\n") * 1000, b"\r\n"),  # asks for much, and reads nothing
}


class SlowClients(Thread):
    """Keeps a number of slow clients of one kind connected; dropped ones return within a second."""

    def __init__(self, netloc: str, count: int, kind: str) -> None:
        super().__init__(daemon=True)
        host, _, port = netloc.rpartition(":")
        self._address, self._ended = (host, int(port)), Event()
        self._deaf = kind == "deaf"
        self._first, self._then = KINDS[kind]
        self._connections = [self._open() for _ in range(count)]
        self.dropped = 0

    def run(self) -> None:
        while not self._ended.wait(1):
            for number, connection in enumerate(self._connections):
                if not self._is_open(connection):
                    connection.close()
                    self._connections[number] = self._open()
                    self.dropped += 1
        for connection in self._connections:
            connection.close()

    def end(self) -> None:
        self._ended.set()
        self.join()

    def _open(self) -> socket.socket:
        connection = socket.create_connection(self._address, 10)
        connection.setblocking(False)
        with suppress(OSError):  # a deaf client sends more than the buffers hold
            connection.send(self._first)
        return connection

    def _is_open(self, connection: socket.socket) -> bool:
        """Sends the next bytes, and returns whether the server has kept the connection."""
        try:
            connection.send(self._then)
            return self._deaf or connection.recv(65536) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False
