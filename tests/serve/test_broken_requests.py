"""Requests that are not what HTTP or the page expects: each is refused in words, and no more."""

import json
import logging
import socket
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import quote_from_bytes

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.serve.served import POST, Site, answered, begun, picture

FAULTS = ("uvicorn.error", "asyncio", "concurrent.futures", "fastapi")


@pytest.fixture(autouse=True)
def no_log(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing that a client sends is worth a line of the server's log."""
    with caplog.at_level(logging.WARNING):
        yield
    records = caplog.get_records("call")
    assert [r.getMessage() for r in records if r.name in FAULTS] == []


def told(site: Site, *lines: str, body: bytes = b"", half: bool = False) -> tuple[int, str, bool]:
    """Status and error of what is sent, and whether the server then closes."""
    with begun(site, *lines) as line:
        line.sendall(body)
        if half:
            line.shutdown(socket.SHUT_WR)
        found = answered(line)
        head, _, text = found.partition(b"\r\n\r\n")
        line.settimeout(3)
        try:
            closed = line.recv(1) == b""
        except ConnectionResetError:  # closed, with bytes of ours that nobody asked for unread
            closed = True
    assert b"Traceback" not in found and b"content-security-policy" in head.lower()
    return int(head.split()[1]), json.loads(text)["error"], closed


CUT = {
    "a body": ((*POST, "Content-Length: 100", ""), b"abc", "rest of a body"),
    "no byte of a body": ((*POST, "Content-Length: 100", ""), b"", "rest of a body"),
    "a chunk": ((*POST, "Transfer-Encoding: chunked", ""), b"5\r\nabc", "rest of a body"),
    "the last chunk": ((*POST, "Transfer-Encoding: chunked", ""), b"1\r\na\r\n", "rest of a body"),
    "a head": (POST, b"", "rest of a head"),
}


@pytest.mark.parametrize("what", CUT)
def test_what_ends_early_is_refused(faces: Site, what: str) -> None:
    lines, body, words = CUT[what]
    status, error, closed = told(faces, *lines, body=body, half=True)
    assert status == 400 and closed and "the request ended early" in error and words in error


NO_REQUEST = {
    "no HTTP": ("hello", ""),
    "another version": ("GET / HTTP/9", "Host: localhost", ""),
    "no host": ("GET / HTTP/1.1", ""),
    "a length that is none": (*POST, "Content-Length: a", ""),
    "a negative length": (*POST, "Content-Length: -1", ""),
    "a length of 5,000 digits": (*POST, f"Content-Length: {'9' * 5_000}", ""),
    "two lengths": (*POST, "Content-Length: 3", "Content-Length: 4", ""),
    "an unknown coding": (*POST, "Transfer-Encoding: gzip", ""),
    "a chunk without a size": (*POST, "Transfer-Encoding: chunked", "", "zz"),
    "a chunk without an end": (*POST, "Transfer-Encoding: chunked", "", "1", "abc"),
    "a size of a chunk": (*POST, "Transfer-Encoding: chunked", "", "f" * 300),
    "a header without an end": ("GET / HTTP/1.1", "A: " + "a" * 100_000),
    "a target without an end": ("GET /" + "a" * 100_000,),
    "a NUL": ("GET /\0 HTTP/1.1", "Host: localhost", ""),
    "a letter that is not ASCII": ("GET /é HTTP/1.1", "Host: localhost", ""),
}


@pytest.mark.parametrize("what", NO_REQUEST)
def test_what_is_no_request_is_refused(faces: Site, what: str) -> None:
    assert told(faces, *NO_REQUEST[what]) == (400, "invalid http request received", True)


def test_a_bad_body_after_the_answer_ends_the_connection(faces: Site) -> None:
    with begun(
        faces, "GET /api/random HTTP/1.1", POST[1], "Transfer-Encoding: chunked", ""
    ) as line:
        assert answered(line).startswith(b"HTTP/1.1 200")
        line.sendall(b"zz\r\n\r\n")
        with suppress(ConnectionResetError):
            assert line.recv(100) == b""


def test_more_than_the_length_is_not_read(faces: Site) -> None:
    data = picture(faces, 3)
    with begun(faces, *POST, f"Content-Length: {len(data)}", "") as line:
        line.sendall(data + b"GET /api/random HTTP/1.1\r\nHost: localhost\r\n\r\n")
        found = answered(line)
        assert found.startswith(b"HTTP/1.1 200") and b'"number":3' in found
        assert line.recv(100) == b""
    short = (*POST, f"Content-Length: {len(data) // 2}", "")
    status, error, closed = told(faces, *short, body=data)
    assert status == 400 and "damaged" in error and closed


def test_bodies_need_a_length_or_chunks(faces: Site) -> None:
    data = picture(faces, 3)
    status, error, _ = told(faces, *POST, "Connection: close", "", body=data)
    assert status == 400 and error == "the upload is empty; send the bytes of one file"
    with begun(faces, *POST, "Transfer-Encoding: chunked", "") as line:
        half = len(data) // 2
        for part in (data[:half], data[half:], b""):
            line.sendall(b"%x\r\n%b\r\n" % (len(part), part))
        found = answered(line)
        assert found.startswith(b"HTTP/1.1 200") and b'"number":3' in found


PATHS = [
    "/api/neighbours",
    "/api/facets",
    "/api/export",
    "/api/map",
    "/api/colours",
    "/api/sample/",
    "/api/samples",
    "/api/picture/",
    "/api/random",
    "/api/upload",
    "/",
    "/x",
]
NAMES = [
    "key",
    "k",
    "where",
    "relation",
    "part",
    "lasso",
    "label",
    "format",
    "token",
    "of",
    "k[]",
    "",
]
NUMBERS = ["-1", "0", "1e9", "NaN", "1_0", "٣", "9" * 30, "9" * 10_000, "0x10", "", "5.0", " 5"]
texts = st.one_of(
    st.binary(max_size=40),
    st.sampled_from([number.encode() for number in NUMBERS]),
    st.sampled_from(
        [b"000007", b"Smiling and not Male", b"hard", b"\0", b"\xff\xfe", b"\xed\xa0\x80"]
    ),
    st.sampled_from([b"(" * 499, b"not " * 120, b"a" * 100_000, b"'" * 77, "\u2028ß".encode()]),
)
queries = st.lists(st.tuples(st.sampled_from(NAMES), texts), max_size=4)


@given(
    method=st.sampled_from(["GET", "GET", "GET", "POST", "HEAD", "PUT", "OPTIONS", "X"]),
    path=st.sampled_from(PATHS),
    rest=st.one_of(st.just(b""), texts),
    query=queries,
    header=st.one_of(st.just(b"a"), st.binary(max_size=30)),
    raw=st.booleans(),
)
@settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_no_request_breaks_the_server(
    faces: Site,
    method: str,
    path: str,
    rest: bytes,
    query: list[tuple[str, bytes]],
    header: bytes,
    raw: bool,
) -> None:
    encoded = [rest, *(text for _, text in query)]
    if not raw:
        encoded = [quote_from_bytes(text, safe="").encode() for text in encoded]
    pairs = zip((name for name, _ in query), encoded[1:], strict=True)
    asked = b"&".join(b"%b=%b" % (name.encode(), text) for name, text in pairs)
    target = path.encode() + encoded[0] + (b"?" + asked if asked else b"")
    with begun(faces) as line:
        line.sendall(
            b"%b %b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            % (method.encode(), target)
        )
        line.sendall(b"A: %b\r\nContent-Type: application/octet-stream\r\n\r\n" % header)
        found = b""
        while more := line.recv(65_536):
            found += more
    head, _, text = found.partition(b"\r\n\r\n")
    status = int(head.split()[1])
    assert head.startswith(b"HTTP/1.1 ") and status < 500 and b"Traceback" not in found
    if status >= 400 and method != "HEAD":
        assert list(json.loads(text)) == ["error"]
