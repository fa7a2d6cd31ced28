"""What a connection may cost: slow clients keep no other out, and answers wait for nothing."""

import asyncio
import errno
import re
import socket
import time
from asyncio import Transport
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPConnection
from threading import Event, Lock
from typing import Any, ClassVar, cast
from unittest.mock import Mock
from urllib.parse import urlsplit

import pytest
from fastapi import HTTPException, Request

from heron.retrieval.answer import Answer
from heron.retrieval.query import Retriever
from heron.retrieval.samples import Samples
from heron.serve.admission import BINARY, Limits, Uploads
from heron.serve.guard import LINGER_S, BoundedConnection, Lingering
from tests.serve.served import LIMITS, POST, Site, answered, begun, picture, running

GET = "GET /page.js HTTP/1.1", "Host: localhost"
SLOW = {  # what a client sends and does not go on with
    "nothing": (),
    "a head": ("GET / HTTP/1.1", "Host: localhost"),
    "a body": (*POST, "Content-Length: 100000", "", "abc"),
    "a body that nobody asked for": (*GET, "Content-Length: 1000000000", "", "abc"),
    "a body that is refused": (POST[0], POST[1], "Content-Length: 1000000", "", "abc"),
}


def ended(line: socket.socket, seconds: float) -> float:
    """Seconds until the server ends a connection, to which a byte is sent ten times a second."""
    begin = time.monotonic()
    line.settimeout(0.1)
    while time.monotonic() - begin < seconds:
        try:
            line.send(b"a")
            while line.recv(65536):
                pass
            break
        except TimeoutError:
            pass
        except OSError:
            break
    return time.monotonic() - begin


@pytest.mark.parametrize("what", SLOW)
def test_a_byte_a_moment_is_not_enough(faces: Site, what: str) -> None:
    with begun(faces, *SLOW[what]) as line:
        assert (0 if what == "a body that is refused" else 0.4) < ended(line, 6) < 4


@pytest.mark.parametrize("what", SLOW)
def test_slow_clients_keep_no_other_out(faces: Site, what: str) -> None:
    with running(faces.found, Limits(connections=40, body_s=20)) as url:
        site = Site(url, faces.found)
        slow = [begun(site, *SLOW[what]) for _ in range(150)]
        begin = time.monotonic()
        assert site.json("/api/neighbours?key=000007&k=3")["hits"]
        assert site.upload(picture(faces, 11))["hits"][0]["number"] == 11
        assert time.monotonic() - begin < 1
        for line in slow:
            line.close()


def test_bodies_that_never_end_leave_room_for_others(faces: Site) -> None:
    data = picture(faces, 11)
    assert 1_000 < len(data) < 10_000
    with running(faces.found, Limits(upload_bytes=10_000, uploads=2, body_s=20)) as url:
        site = Site(url, faces.found)
        slow = [begun(site, *POST, "Content-Length: 9000", "", "a" * 8_000) for _ in range(5)]
        for line in slow[:3]:  # there is room for two
            answer = answered(line)
            assert answer.startswith(b"HTTP/1.1 503") and b"need the memory of this" in answer
            assert b"retry-after: 1" in answer.lower()
        assert site.upload(data)["hits"][0]["number"] == 11
        for line in slow:
            line.close()
        for _ in range(6):  # the room is given back
            assert site.upload(data)["hits"][0]["number"] == 11


def test_one_who_does_not_read_is_cut_off(faces: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    made = BoundedConnection.connection_made

    def narrow(connection: BoundedConnection, transport: Transport) -> None:
        found = transport.get_extra_info("socket")
        found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        made(connection, transport)

    monkeypatch.setattr(BoundedConnection, "connection_made", narrow)
    monkeypatch.setattr(Samples, "keys_with", lambda *_: ["a" * 1000] * 300)
    with socket.socket() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        line.connect((urlsplit(faces.url).hostname, urlsplit(faces.url).port))
        line.sendall(b"GET /api/samples HTTP/1.1\r\nHost: localhost\r\n\r\n")
        time.sleep(1)  # it has half a second
        line.settimeout(5)
        found = b""
        with suppress(ConnectionResetError):
            while more := line.recv(100):
                found += more
    whole = re.search(rb"content-length: (\d+)", found, re.I)
    assert whole and int(whole[1]) > 300_000 > len(found)


def test_cached_pictures_come_at_once(faces: Site) -> None:
    """Heads and bodies in sends of their own waited 44 ms for an acknowledgement each."""
    connection = HTTPConnection(urlsplit(faces.url).netloc, timeout=5)
    for _ in range(2):  # the second time they are cached
        begin = time.monotonic()
        for number in range(24):
            connection.request("GET", f"/api/picture/{number}")
            assert connection.getresponse().read()
    assert time.monotonic() - begin < 0.5  # 1.06 s before
    connection.close()


def test_answers_wait_for_no_acknowledgement(faces: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    undelayed: list[bool] = []
    made = BoundedConnection.connection_made

    def seen(connection: BoundedConnection, transport: Transport) -> None:
        made(connection, transport)
        found = transport.get_extra_info("socket")
        undelayed.append(bool(found.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)))

    monkeypatch.setattr(BoundedConnection, "connection_made", seen)
    for path in ("/api/picture/3", "/page.js", "/nothing"):
        faces.ask(path)
    assert undelayed == [True] * 3


def test_a_refusal_reaches_one_who_still_sends(faces: Site) -> None:
    with begun(faces, *POST, "Content-Length: 5000000", "") as line:
        for _ in range(50):  # it goes on after the answer, and is not reset
            line.sendall(bytes(10_000))
            time.sleep(0.002)
        assert answered(line).startswith(b"HTTP/1.1 413")
    connection = HTTPConnection(urlsplit(faces.url).netloc, timeout=5)
    connection.request(
        "POST", "/api/upload", bytes(LIMITS.upload_bytes * 10), {"Content-Type": BINARY}
    )
    assert connection.getresponse().status == 413
    connection.close()


def test_a_client_that_is_gone_is_waited_for_as_another() -> None:
    """The socket says so when the sending side is ended, in the middle of a server's end."""
    transport, connection = Mock(), Mock()
    transport.is_closing.return_value = False
    transport.write_eof.side_effect = OSError(errno.ENOTCONN, "not connected")
    connection.conn.trailing_data = b"rest", False
    lingering = Lingering(transport, connection)
    lingering.close()
    connection.wait_for.assert_called_once_with("the end", LINGER_S)
    assert lingering.is_closing()


class Arriving:
    """Stands for a request whose body arrives in pieces."""

    headers: ClassVar[dict[str, str]] = {"content-type": BINARY}

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces

    async def stream(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            yield piece
            await asyncio.sleep(0)


def test_an_upload_that_is_refused_puts_no_other_out() -> None:
    uploads = Uploads(Limits(upload_bytes=10, uploads=1))

    async def status(*pieces: bytes) -> int:
        try:
            async with uploads(cast(Request, Arriving(*pieces))):
                return 200
        except HTTPException as refusal:
            return refusal.status_code

    async def both() -> tuple[int, int]:
        a, b = await asyncio.gather(status(b"a" * 6, b"a", b"a"), status(b"b" * 6, b"b", b"b"))
        return a, b

    assert asyncio.run(both()) == (503, 200)


def test_an_upload_that_arrives_alone_waits_for_memory(
    faces: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, by_file = picture(faces, 11), Retriever.by_file
    searching, released = Event(), Event()

    def held(*args: Any, **options: Any) -> Answer:
        searching.set()
        assert released.wait(10)
        return by_file(*args, **options)

    monkeypatch.setattr(Retriever, "by_file", held)
    with (
        running(faces.found, Limits(upload_bytes=len(data), uploads=1)) as url,
        ThreadPoolExecutor() as threads,
    ):
        site = Site(url, faces.found)
        first = threads.submit(site.upload, data)
        assert searching.wait(10)
        with begun(site, *POST, f"Content-Length: {len(data)}", "") as line:
            line.sendall(data[:-1])
            time.sleep(0.3)
            released.set()
            line.sendall(data[-1:])
            assert answered(line).startswith(b"HTTP/1.1 200")
        assert first.result(10)["hits"][0]["number"] == 11


def test_exports_run_few_at_once(faces: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    key, lock, counts = Samples.key, Lock(), [0, 0]  # that run now, and that ran at most

    def counted(samples: Samples, number: int) -> str:
        with lock:
            counts[0] += 1
            counts[1] = max(counts)
        time.sleep(0.001)
        with lock:
            counts[0] -= 1
        return key(samples, number)

    monkeypatch.setattr(Samples, "key", counted)
    with (
        running(faces.found, Limits(searches=2)) as url,
        ThreadPoolExecutor(8) as threads,
    ):
        site = Site(url, faces.found)
        answers = [*threads.map(site.ask, ["/api/export?format=csv"] * 8)]
        assert {len(data.splitlines()) for _, data in answers} == {49}
        assert counts[1] <= 2


def test_exports_that_are_not_read_keep_no_other_out(
    faces: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Samples, "key", lambda *_: "a" * 200_000)
    with running(faces.found, Limits(searches=1)) as url:
        site = Site(url, faces.found)
        lines = ("GET /api/export?format=csv HTTP/1.1", "Host: localhost", "")
        unread = [begun(site, *lines) for _ in range(3)]
        time.sleep(0.5)
        assert len(site.ask("/api/export?format=csv")[1]) > 48 * 200_000
        for line in unread:
            line.close()
