"""The page's server, over HTTP: what it answers, what it refuses, what it bounds."""

import socket
import time
from http.client import HTTPConnection, HTTPResponse
from io import BytesIO
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any
from urllib.parse import quote, urlsplit

import numpy as np
import pytest
import uvicorn
from PIL import Image

from heron.base.errors import RetrievalError, ShardError
from heron.cli.retrieval import serve
from heron.retrieval.query import Retriever
from heron.serve import server
from heron.serve.admission import BINARY, Limits
from heron.serve.server import listen, page_files
from tests.serve.served import LIMITS, MARKUP, POST, Site, answered, begun, picture, running


def test_page_and_its_headers(faces: Site) -> None:
    for path, kind, text in (
        ("/", "text/html", b"<title>Heron</title>"),
        ("/page.css", "text/css", b"prefers-color-scheme"),
        ("/page.js", "text/javascript", b"heron serve"),
        ("/icon.svg", "image/svg+xml", b"<svg"),
    ):
        response, data = faces.ask(path)
        assert response.status == 200 and text in data
        assert response.headers["Content-Type"].startswith(kind)
    for path, file in (page_files("index.html") | page_files("decide.html")).items():
        script = file.read_bytes()
        if file.suffix != ".html" and not file.name.startswith("decide"):
            response, sent = faces.ask(f"/{path}")
            assert response.status == 200 and sent == script
            assert response.headers["Cache-Control"] == "no-cache"
        for way_in in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert way_in.encode() not in script
        assert b"http" not in script.replace(b"http://www.w3.org/2000/svg", b"")  # no other place
    for path in ("/", "/api/about", "/nothing", "/api/neighbours?k=0"):  # errors have them too
        response, _ = faces.ask(path)
        policy = response.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'self';") and "unsafe" not in policy
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert response.headers["Referrer-Policy"] == "no-referrer"
        assert "Access-Control-Allow-Origin" not in response.headers


@pytest.mark.parametrize(
    "path",
    ["/page/", "/page/page.js", "/../serve.py", "/%2e%2e/serve.py", "/page.js/../../serve.py"]
    + ["//etc/passwd", "/docs", "/openapi.json", "/api/picture/..%2f..%2fserve.py"],
)
def test_there_are_no_other_files(faces: Site, path: str) -> None:
    faces.error(path, 404)


def test_no_file_beside_those_of_the_page(
    faces: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("index.html", "notes.txt", "page.js~"):
        (tmp_path / name).write_text("x")
    (tmp_path / "__pycache__").mkdir()
    monkeypatch.setattr(server, "PAGE", tmp_path)
    with running(faces.found) as url:
        site = Site(url, faces.found)
        assert site.ask("/")[0].status == 200
        for name in ("notes.txt", "page.js~", "__pycache__"):
            site.error(f"/{name}", 404)


def test_about(faces: Site, frames: Site) -> None:
    about = faces.json("/api/about")
    assert about["kind"] == "flat" and about["metric"] == "cosine" and about["count"] == 48
    assert about["layer"] == "hidden" and about["dim"] == 192 and about["pictures"] is True
    assert about["data"] == "faces" and "Smiling" in about["names"]
    assert about["recall"] == "not measured" or "held-out queries" in about["recall"]
    assert about["upload_bytes"] == LIMITS.upload_bytes
    about = frames.json("/api/about")
    assert about["pictures"] is False and about["names"][0] == MARKUP


def test_keys_are_suggested(faces: Site) -> None:
    keys = [faces.found.samples.key(number) for number in range(48)]
    first = sorted(key for key in keys if key.startswith("00004"))
    assert faces.json("/api/samples?part=00004")["keys"] == ["000004", *first]
    assert faces.json("/api/samples")["keys"] == sorted(keys)[:20]
    assert faces.json("/api/samples?part=47")["keys"] == ["000047"]
    assert faces.json("/api/samples?part=zzz")["keys"] == []
    assert faces.json("/api/samples?part=%00%C3%A9")["keys"] == []
    assert faces.json("/api/random")["key"] in keys


def test_neighbours_are_the_nearest(faces: Site) -> None:
    found = faces.json("/api/neighbours?key=000007&k=5")
    vectors = faces.found.index.vectors(np.arange(48))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = sorted(((float(v @ vectors[6]), -n) for n, v in enumerate(vectors) if n != 6))[::-1]
    assert [hit["number"] for hit in found["hits"]] == [-n for _, n in cosines[:5]]
    np.testing.assert_allclose(
        [h["score"] for h in found["hits"]], [c for c, _ in cosines[:5]], 1e-5
    )
    samples = faces.found.samples
    assert found["query"]["labels"] == samples.label_names(6) and found["query"]["labelled"] is True
    assert found["allowed"] == 47 and found["relation"] == "neighbours"


def test_filter_and_relations(faces: Site, frames: Site) -> None:
    found = faces.json(f"/api/neighbours?key=000007&k=40&where={quote('Smiling and not Male')}")
    assert 0 < len(found["hits"]) == found["allowed"] < 40
    for hit in found["hits"]:
        assert "Smiling" in hit["labels"] and "Male" not in hit["labels"]
    found = faces.json("/api/neighbours?key=000007&k=20&relation=hard")
    assert min(hit["label_distance"] for hit in found["hits"]) >= found["far"] > 0
    key = quote(frames.found.samples.key(0))
    own = frames.found.samples.label_names(0)
    for relation, same in (("hard", False), ("false", True)):
        found = frames.json(f"/api/neighbours?key={key}&k=4&relation={relation}")
        assert found["hits"] and all((hit["labels"] == own) is same for hit in found["hits"])


@pytest.mark.parametrize(
    "query, words",
    [
        ("key=00000", "no sample has the key '00000'"),
        ("", "key is missing"),
        ("key=000007&k=0", "k must be greater than or equal to 1, got '0'"),
        ("key=000007&k=201", "k must be less than or equal to 200, got '201'"),
        ("key=000007&k=nine", "k must be a valid integer"),
        ("key=000007&k=48", "k must be 1 to 47, because"),
        ("key=000007&where=Smilin", "Did you mean Smiling?"),
        ("key=000007&where=Smiling+and", "cannot read the filter at character"),
        ("key=000007&where=" + "(" * 400, "parentheses"),
        (
            "key=000007&where=" + "x" * 501,
            "where must have at most 500 characters, got 'xxxx",
        ),
        ("key=" + "x" * 501, "key must have at most 500 characters, got 'xxxx"),
        ("key=%ff%00%f0", "no sample has the key"),
        ("key=000007&relation=odd", "relation must be 'neighbours', 'hard' or 'false', got 'odd'"),
    ],
)
def test_bad_queries_are_refused_in_words(faces: Site, query: str, words: str) -> None:
    assert words in faces.error(f"/api/neighbours?{query}")


def test_pictures(faces: Site, frames: Site) -> None:
    response, data = faces.ask("/api/picture/3?of=some")
    assert response.headers["Content-Type"] == "image/jpeg"
    with Image.open(BytesIO(data)) as image:
        assert image.size == (32, 32)
    stored = faces.found.picture(3)
    assert stored is not None
    with Image.open(BytesIO(data)) as image:
        assert np.abs(np.asarray(image, int) - np.asarray(stored, int)).mean() < 6
    for number in (-1, 48, 10**30):
        assert "no sample has the number" in faces.error(f"/api/picture/{number}", 404)
    assert "number must be a valid integer" in faces.error("/api/picture/x")
    assert "has no picture" in frames.error("/api/picture/0", 404)


def test_large_bodies_are_refused_before_they_are_read(faces: Site) -> None:
    words = b"more than 200,000 bytes"
    with begun(faces, *POST, "Content-Length: 1000000000000", "") as line:  # nothing follows
        answer = answered(line)
        assert answer.startswith(b"HTTP/1.1 413") and words in answer
    with begun(faces, *POST, "Transfer-Encoding: chunked", "") as line:  # no length is given
        for _ in range(51):
            line.sendall(b"1000\r\n" + bytes(4096) + b"\r\n")
        answer = answered(line)  # the body has not ended
        assert answer.startswith(b"HTTP/1.1 413") and words in answer
    assert "more than" in faces.upload(bytes(200_001), 413)["error"]
    assert "the file" in faces.upload(b"\x89PNG" + bytes(199_996), 400)["error"]  # is let in


def test_slow_bodies_and_heads_are_cut_off(faces: Site) -> None:
    started = time.monotonic()
    with begun(faces, *POST, "Content-Length: 100", "", "a") as line, begun(faces, POST[0]) as head:
        answer = answered(line)
        assert answer.startswith(b"HTTP/1.1 408") and b"only 3 bytes of it" in answer
        assert head.recv(100) == b""
    assert 0.4 < time.monotonic() - started < 3
    with begun(faces, *POST, "Content-Length: 100", "", "abc") as line:
        line.shutdown(socket.SHUT_WR)
    assert faces.json("/api/random")


def test_a_connection_that_idles_between_requests_stays(faces: Site) -> None:
    connection = HTTPConnection(urlsplit(faces.url).netloc, timeout=5)
    for _ in range(2):
        connection.request("GET", "/api/random")
        assert connection.getresponse().read()
        time.sleep(0.6)  # longer than a head may take
    assert connection.sock is not None
    connection.close()


def test_foreign_hosts_are_refused(faces: Site) -> None:
    port = urlsplit(faces.url).port
    for host in ("localhost", f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}"):
        assert faces.ask("/api/random", Host=host)[0].status == 200
    for host in (
        "evil.example",
        f"evil.example:{port}",
        "localhost.evil.example",
        "",
        "[::1",
        "a]",
    ):
        assert "this server is not" in faces.error("/api/random", 421, Host=host)


class Held:
    """A retriever whose searches wait until they are let go, and say how many ran at once."""

    def __init__(self, found: Retriever) -> None:
        self._found, self.go, self.inside, self.most = found, Event(), 0, 0
        self._lock = Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._found, name)

    def _hold(self) -> None:
        with self._lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        self.go.wait(5)
        with self._lock:
            self.inside -= 1

    def by_key(self, *args: Any, **options: Any) -> Any:
        self._hold()
        return self._found.by_key(*args, **options)

    def by_file(self, *args: Any, **options: Any) -> Any:
        self._hold()
        return self._found.by_file(*args, **options)


@pytest.mark.parametrize("uploads", [False, True])
def test_what_runs_at_once_is_bounded(faces: Site, uploads: bool) -> None:
    held: Any = Held(faces.found)
    data = picture(faces, 1)
    with running(held, Limits(searches=1, uploads=1, waiting=2)) as url:
        site = Site(url, held)
        answers: list[tuple[HTTPResponse, bytes]] = []

        def one() -> None:
            path = "/api/upload?k=2" if uploads else "/api/neighbours?key=000007&k=2"
            rest: dict[str, Any] = (
                {"method": "POST", "body": data, "Content_Type": BINARY} if uploads else {}
            )
            answers.append(site.ask(path, **rest))

        threads = [Thread(target=one) for _ in range(6)]
        for thread in threads:
            thread.start()
        until = time.monotonic() + 5
        while len(answers) < 3 and time.monotonic() < until:
            time.sleep(0.01)
        assert len(answers) == 3  # one runs, two wait, the others have been told to come back
        for response, text in answers:
            assert response.status == 503 and response.headers["Retry-After"] == "1"
            assert b"are running or waiting" in text
        assert site.json("/api/about")  # the event loop is free
        held.go.set()
        for thread in threads:
            thread.join(5)
        assert sorted(r.status for r, _ in answers) == [200] * 3 + [503] * 3 and held.most == 1
        assert (site.upload(data) if uploads else site.json("/api/neighbours?key=000007"))["hits"]


def test_faults_are_told_without_a_traceback(
    faces: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(fault: Exception) -> Any:
        def by_key(*_: object, **__: object) -> None:
            raise fault

        monkeypatch.setattr(faces.found, "by_key", by_key)
        return faces.error("/api/neighbours?key=000007", 500)

    assert fail(ShardError("a shard is missing")) == "a shard is missing"
    assert fail(ZeroDivisionError("secret")) == "the server failed; see its log"
    assert "405" not in faces.error("/api/upload", 405) + faces.error("/", 405, method="POST")


def test_ports_that_cannot_be_had() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RetrievalError, match=f"port {port}: Address already in use.*--port 0"):
            listen("127.0.0.1", port)
    with pytest.raises(RetrievalError, match="port must be 0 to 65,535 .*, got 70000"):
        listen("127.0.0.1", 70_000)


def test_the_verb_prints_where_the_page_is(
    faces: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    listening: list[int] = []

    def run(server: uvicorn.Server, sockets: list[socket.socket]) -> None:
        listening.append(sockets[0].getsockname()[1])
        sockets[0].close()

    monkeypatch.setattr(uvicorn.Server, "run", run)
    serve(str(faces.found.index.folder), port=0)
    assert f"48 samples at http://127.0.0.1:{listening[0]}/" in capsys.readouterr().out
