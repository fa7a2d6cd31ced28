"""Files behind a URL: servers that fail in every way."""

import hashlib
import importlib
import logging
import pickle
import re
import sys
import time
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from heron.base.errors import ShardError
from heron.shards.body import enforce_speed
from heron.shards.cache import ShardCache
from heron.shards.remote import Remote, Retry
from heron.shards.store import Store, open_store
from tests.shards.servers import Fault, Web, web

DATA = bytes(range(256)) * 1000
SIZE = len(DATA)
SUM = hashlib.sha256(DATA).hexdigest()
RETRY = Retry(attempts=3, pause_s=0.001, timeout_s=0.8)
EXPECTED = f" instead of 256,000 bytes with sha256 {SUM}"


@pytest.fixture
def site() -> Iterator[Web]:
    with web({"set/a.tar": DATA}) as served:
        yield served


def store(url: str, folder: Path, **options: Any) -> Store:
    return open_store(url, ShardCache(folder / "cache", 10 * SIZE), options, RETRY)


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "cache").glob("*") if path.name != "lock")


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize(
    ("faults", "requests"),
    [
        ([], 1),
        ([Fault("status", status=500), Fault("status", status=503)], 3),
        ([Fault("status", status=429)], 2),
        ([Fault("drop", 200_000), Fault("close", 1000)], 3),
        ([Fault("close", 0)], 2),
        ([Fault("stall", 5000)], 2),
        ([Fault("stall", 0)], 2),
        ([Fault("cut", 500)], 2),
        ([Fault("pad")], 2),
        ([Fault("flip", 70_000)], 2),
        ([Fault("stall", 5000), Fault("flip", 7)], 3),
    ],
)
def test_a_file_comes_whole_in_spite_of(
    faults: list[Fault],
    requests: int,
    ranges: bool,
    site: Web,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    site.faults["set/a.tar"], site.ranges = list(faults), ranges
    remote = store(f"{site.url}/set/", tmp_path)
    for _ in range(2):  # the second time it is there
        with remote.local("a.tar", SIZE, SUM) as held:
            assert held.path.read_bytes() == DATA
    assert len(site.requests) == requests and left(tmp_path) == [SUM]
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == requests - 1
    for number, line in enumerate(warnings, 2):
        assert f"{site.url}/set/a.tar: " in line and f"; attempt {number} of 3 follows in" in line
    if faults and faults[0] == Fault("stall", 5000):  # goes on where it broke
        assert [asked for _, asked in site.requests[:2]] == [None, "bytes=5000-"]
        assert "nothing arrived for 0.8 s" in warnings[0]
    if len(faults) == 2 and faults[1].kind == "flip":  # a flipped byte: all of it again
        assert site.requests[2] == ("set/a.tar", None)


FAILED = "failed 3 times, the last time with: "


@pytest.mark.parametrize(
    ("faults", "requests", "message"),
    [
        ([Fault("status")] * 3, 3, FAILED + "HTTP 503 Service Unavailable; check that the server"),
        (
            [Fault("stall", 9)] * 3,
            3,
            FAILED + "nothing arrived for 0.8 s; check that the server can be reached",
        ),
        ([Fault("close", 9)] * 3, 3, FAILED + "ClientPayloadError: Response payload is not compl"),
        ([Fault("cut", 500)] * 2, 2, "500 bytes with sha256 [0-9a-f]{64}" + EXPECTED),
        ([Fault("flip", 70)] * 2, 2, "256,000 bytes with sha256 [0-9a-f]{64}" + EXPECTED),
        ([Fault("pad")] * 2, 2, f"more than the 256,000 bytes with sha256 {SUM}"),
        ([Fault("status", status=404)], 1, "no such file, but the manifest lists it; restore it"),
        ([Fault("status", status=403)], 1, r"not allowed \(HTTP 403 Forbidden\)"),
        ([Fault("status", status=400)], 1, "HTTP 400 Bad Request; check the"),
    ],
)
def test_what_does_not_come_is_an_error_and_leaves_nothing(
    faults: list[Fault], requests: int, message: str, site: Web, tmp_path: Path
) -> None:
    site.faults["set/a.tar"] = list(faults)
    remote = store(f"{site.url}/set", tmp_path)
    with pytest.raises(ShardError, match=f"{re.escape(site.url)}/set/a.tar: {message}") as error:
        remote.local("a.tar", SIZE, SUM)
    assert "\n" not in str(error.value)
    assert len(site.requests) == requests and left(tmp_path) == []


def test_a_body_that_comes_too_slowly(
    site: Web, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site.faults["set/a.tar"] = [Fault("slow")] * 2
    retry = Retry(attempts=2, pause_s=0.001, timeout_s=0.2, slowest=5000)
    remote = open_store(f"{site.url}/set", ShardCache(tmp_path / "cache", 10 * SIZE), {}, retry)
    message = (
        r"a.tar: failed 2 times, the last time with: only [0-9]{2} bytes in 0.2[0-9]* s, less than "
    )
    with pytest.raises(ShardError, match=f"{message}5,000 a second; check that the server"):
        remote.local("a.tar", SIZE, SUM)
    (first, _), (second, asked) = site.requests
    assert first == second and asked is not None  # what came was kept
    site.faults["set/a.tar"] = [Fault("slow")]
    slow = Retry(attempts=1, timeout_s=0.2, slowest=50)  # some 150 come
    site.files["set/a.tar"] = DATA[:60]
    remote = open_store(f"{site.url}/set", ShardCache(tmp_path / "cache", 10 * SIZE), {}, slow)
    assert remote.read_bytes("a.tar") == DATA[:60]


def test_time_that_is_spent_elsewhere_is_not_the_servers(site: Web) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(4):
            yield bytes(9)

    came = []
    for chunk in enforce_speed(chunks(), 1e9, 0.05):
        time.sleep(0.1)  # a disk
        came.append(chunk)
    assert len(came) == 4


@pytest.mark.parametrize("raw", [True, False])
def test_a_restart_cuts_what_came_before(raw: bool, site: Web, tmp_path: Path) -> None:
    site.faults["set/a.tar"] = [Fault("pad")]  # four bytes more than the second answer
    with (tmp_path / "file").open("w+b", buffering=0) if raw else BytesIO() as stream:
        Remote(f"{site.url}/set", retry=RETRY).fetch("a.tar", stream, sha256=SUM)
        stream.seek(0)
        assert stream.read() == DATA and site.count("set/a.tar") == 2


def test_a_file_that_shrinks_between_two_attempts(
    site: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shrink(pause_s: float) -> None:
        site.files["set/a.tar"] = b""

    monkeypatch.setattr("heron.shards.remote.time.sleep", shrink)
    site.faults["set/a.tar"], site.ranges = [Fault("stall", 5000)], False
    remote = store(f"{site.url}/set", tmp_path)
    assert remote.read_bytes("a.tar") == b""


def test_what_does_not_end(site: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heron.shards.store.MAX_MANIFEST_BYTES", 3 * SIZE)
    monkeypatch.setattr("heron.shards.remote.MAX_UNSIZED_BYTES", 4 * SIZE)
    remote = store(f"{site.url}/set", tmp_path)

    direct = Remote(f"{site.url}/set", retry=RETRY)

    def copy(sizes: dict[str, int]) -> None:
        with remote.local_copies(sizes):
            pass

    calls: dict[str, Callable[[str], object]] = {
        "more than 768,000 bytes arrived, which is the limit; restore": remote.read_bytes,
        "more than 1,024,000 bytes arrived": lambda n: direct.fetch(n, BytesIO()),
        "more than the 256,000 bytes with sha256": lambda n: remote.local(n, SIZE, SUM),
        "more than 500 bytes arrived, which is the limit": lambda n: copy({n: 500}),
    }
    for message, call in calls.items():
        site.faults["set/a.tar"], site.sent = [Fault("endless")] * 9, 0
        with pytest.raises(ShardError, match=f"{site.url}/set/a.tar: {message}"):
            call("a.tar")
        assert site.sent < 80 * SIZE and left(tmp_path) == []  # sockets hold some


def test_what_is_compressed_on_its_way_is_refused(site: Web, tmp_path: Path) -> None:
    site.files["set/a.tar"] = bytes(10**7)  # ten thousand bytes on the way
    site.faults["set/a.tar"] = [Fault("gzip")]
    with pytest.raises(ShardError, match="a.tar: the server sent Content-Encoding 'gzip'"):
        store(f"{site.url}/set", tmp_path).read_bytes("a.tar")
    assert len(site.requests) == 1


def test_redirects_to_another_host_need_leave(site: Web, tmp_path: Path) -> None:
    with web({"x/b.tar": DATA, "x/c.tar": DATA}) as other:
        site.files |= {"set/b.tar": b"", "set/c.tar": b"", "set/d.tar": b""}
        site.redirects = {
            "set/b.tar": f"{other.url}/x/b.tar?sig=hunter22",
            "set/c.tar": "/set/a.tar",
        }
        site.redirects["set/d.tar"] = "d.tar"
        remote = store(f"{site.url}/set", tmp_path)
        message = (
            f"^{site.url}/set/b.tar: the server redirects to http://127.0.0.1:[0-9]+, another host"
        )
        with pytest.raises(ShardError, match=message) as error:
            remote.local("b.tar", SIZE, SUM)
        assert "allow_redirects: true" in str(error.value) and "hunter22" not in str(error.value)
        assert not other.requests and len(site.requests) == 1
        assert remote.read_bytes("c.tar") == DATA  # within the host
        with pytest.raises(
            ShardError, match="d.tar: more than 5 redirects; use the final address of the"
        ):
            remote.read_bytes("d.tar")
        allowed = store(f"{site.url}/set", tmp_path, allow_redirects=True)
        with allowed.local("b.tar", SIZE, SUM) as held:
            assert held.path.read_bytes() == DATA
        assert other.requests == [("x/b.tar", None)]


@pytest.mark.parametrize(
    ("here", "there", "allowed"),
    [
        ("https://a.org/x/f", "https://a.org:443/f", True),
        ("https://a.org/x/f", "https://A.org/f", True),
        ("https://joe:pw@a.org/x/f", "../f", True),
        ("https://a.org/x/f", "http://a.org/f", False),
        ("http://a.org/x/f", "https://a.org/f", True),
        ("http://a.org/x/f", "https://b.org/f", False),
        ("http://a.org/x/f", "//b.org/f", False),
        ("http://a.org/x/f", "http://a.org:81/f", False),
        ("http://a.org/x/f", "http://a.org@b.org/f", False),
        ("http://a.org/x/f", "file:///etc/passwd", False),
    ],
)
def test_what_is_another_host(here: str, there: str, allowed: bool) -> None:
    remote = Remote(here.rpartition("/")[0])
    if allowed:
        assert remote._follow_redirect("f", here, there).endswith("/f")
        return
    with pytest.raises(ShardError, match="f: the server redirects to .*, another host"):
        remote._follow_redirect("f", here, there)


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    with web({}) as site:
        url = site.url
    with pytest.raises(ShardError, match="failed 3 times, the last time with: ClientConnectorErr"):
        store(url, tmp_path).read_bytes("manifest.json")


def test_pauses_grow_and_are_bounded() -> None:
    retry = Retry()
    assert (retry.attempts, retry.timeout_s) == (5, 60)
    for failed, whole in ((1, 0.5), (2, 1), (3, 2), (7, 30), (1000, 30)):
        assert all(whole / 2 <= retry.pause(failed) <= whole for _ in range(100))


def test_secrets_are_sent_but_never_shown(
    site: Web, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secret, faults = "sig=Xy12345%2Bz", [Fault("status")] * 3
    host = site.url.removeprefix("http://")
    for url, options, need in [
        (f"{site.url}/set?{secret}", {}, secret),
        (f"http://joe:hunter22@{host}/set", {}, "Basic am9lOmh1bnRlcjIy"),
        (f"{site.url}/set", {"headers": {"Authorization": "Bearer hunter22"}}, "Bearer hunter22"),
    ]:
        remote = store(url, tmp_path / need[:3], **options)
        site.need = need
        assert remote.read_bytes("a.tar") == DATA
        site.need = "something else"
        shown = [repr(remote), str(remote), remote.where("a.tar")]
        for named in (list(faults), []):
            site.faults["set/a.tar"] = named
            with pytest.raises(ShardError) as error:
                remote.local("a.tar", SIZE, SUM)
            shown.append(str(error.value))
        shown.append(caplog.text)
        assert not re.search("sig=|hunter22|Xy12345", "\n".join(shown)), shown
    words = Remote("s3://b", {"key": "AKIA", "client": {"aws_secret": "hush"}})._describe(
        OSError("no AKIA with hush")
    )
    assert words == "OSError: no … with …"


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("xyz://b/p", {}, "^xyz://b/p: ValueError: Protocol not known: xyz; use a local folder"),
        ("gs://b/p", {}, "^gs://b/p: Please install gcsfs .*; install what reads this protocol"),
        ("s3://b/p", {}, r"^s3://b/p: Install s3fs .*: pip install 'heron-pretrain\[remote\]' has"),
        (
            "http://[b/p",
            {},
            r"^cannot read http://\[b/p/manifest.json: ValueError: Invalid IPv6 URL",
        ),
    ],
)
def test_what_cannot_be_opened(
    url: str, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = importlib.import_module("fsspec.registry")._registry
    for protocol, package in (("gs", "gcsfs"), ("s3", "s3fs")):
        monkeypatch.delitem(known, protocol, raising=False)
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ShardError, match=message):
        open_store(url, options=options, retry=RETRY).read_bytes("manifest.json")


def test_secrets_by_names_in_capitals() -> None:
    remote = Remote("https://host/set", {"headers": {"Authorization": "Bearer abc"}})
    assert "abc" not in remote._describe(ValueError("no header 'Bearer abc'"))


def test_a_copy_in_another_process_connects_by_itself(tmp_path: Path) -> None:
    remote = Remote(f"file://{tmp_path}", retry=RETRY)
    (tmp_path / "a").write_text("a")
    assert remote.names() == {"a"} and remote._connection is not None
    assert pickle.loads(pickle.dumps(remote))._connection is None
