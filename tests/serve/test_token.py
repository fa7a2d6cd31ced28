"""Who is let in: by the token off loopback, by loopback's names on it."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn

from heron.base.errors import ConfigError
from heron.cli import main as cli
from heron.cli.retrieval import serve
from heron.serve.server import address, choose_token, listen, make_server
from tests.serve.served import Site, picture, running

TOKEN = "a-token_of-20-letter"
NEEDED = "this server needs a token"


@pytest.fixture(scope="module")
def locked(faces: Site) -> Iterator[Site]:
    with running(faces.found, token=TOKEN) as url:
        yield Site(url, faces.found)


def cookie(site: Site) -> str:
    return f"heron-{site.url.split(':')[2].split('/')[0]}"


def test_nothing_is_had_without_the_token(locked: Site) -> None:
    assert locked.url.endswith(f"/?token={TOKEN}")
    paths = ["/", "/page.js", "/api/about", "/api/neighbours?key=000007", "/api/picture/3"]
    for path in (*paths, "/nothing", f"/api/about?token={TOKEN}"):
        assert NEEDED in locked.error(path, 401)
    assert NEEDED in locked.error("/api/upload", 401, method="POST", body=b"abc")
    assert NEEDED in locked.error(f"/?token={TOKEN}", 401, method="POST")
    assert locked.ask("/")[0].headers["WWW-Authenticate"] == "Bearer"
    for given in ("", TOKEN[:-1], TOKEN + "a", TOKEN.upper(), "é" * 20, '"', ";=;", "a" * 9_000):
        named = {"Cookie": f"{cookie(locked)}={given}".encode().decode("latin-1")}
        assert NEEDED in locked.error("/api/about", 401, **named)
        bearer = f"Bearer {given}".encode().decode("latin-1")
        assert NEEDED in locked.error("/api/about", 401, Authorization=bearer)
    for given in (TOKEN[:-1], "%ff%00", TOKEN + "&token=b", "", "%C3%A9"):
        assert NEEDED in locked.error(f"/?token={given}", 401)
    named = {"Cookie": f"heron-1={TOKEN}"}  # of a server on another port
    assert NEEDED in locked.error("/api/about", 401, **named)


def test_the_address_becomes_a_cookie(locked: Site) -> None:
    response, _ = locked.ask(f"/?key=a+b&token={TOKEN}&where=%C3%A9")
    assert response.status == 303 and response.headers["Location"] == "/?key=a+b&where=%C3%A9"
    assert response.headers["Cache-Control"] == "no-store"
    name, *kept = response.headers["Set-Cookie"].split("; ")
    assert name == f"{cookie(locked)}={TOKEN}"
    assert {one.lower() for one in kept} == {"httponly", "samesite=strict", "path=/"}
    for path in ("/", "/page.js", "/api/about", "/api/neighbours?key=000007"):
        assert locked.ask(path, Cookie=f"other=1; {name}")[0].status == 200
        assert locked.ask(path, Authorization=f"Bearer {TOKEN}")[0].status == 200
    for other in ('prefs={"a": 1}', "a b=c", "none", "=;", '"'):  # of another server of the host
        assert locked.ask("/api/about", Cookie=f"{other}; {name}")[0].status == 200
    data, kind = picture(locked, 3), "application/octet-stream"
    found = locked.json("/api/upload", method="POST", body=data, Content_Type=kind, Cookie=name)
    assert found["hits"][0]["number"] == 3


def test_names_are_looked_at_before_tokens(locked: Site) -> None:
    words = locked.error(f"/?token={TOKEN}", 421, Host="evil.example")
    assert words == "this server is not 'evil.example'; use one of 127.0.0.1, localhost, ::1"


def test_a_server_that_others_reach_has_a_token(faces: Site) -> None:
    with listen("127.0.0.1", 0) as near, listen("0.0.0.0", 0) as far:
        assert choose_token(near, None) is None and choose_token(near, TOKEN) == TOKEN
        first, second = choose_token(far, None), choose_token(far, None)
        assert first and second and first != second and len(first) >= 43  # 256 bits
        assert address(far, first).endswith(f":{far.getsockname()[1]}/?token={first}")
        with pytest.raises(ValueError, match="needs a token"):
            make_server(faces.found, far)
        for given in (
            "",
            "short",
            "fifteen-letters",
            "a" * 201,
            "a b" * 10,
            "é" * 20,
            "a" * 16 + "\n",
        ):
            with pytest.raises(
                ConfigError, match=f"must have 16 to 200 .*, got {len(given)} characters"
            ):
                choose_token(far, given)


def test_the_verb_prints_the_token_once(
    faces: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(server: uvicorn.Server, sockets: list[socket.socket]) -> None:
        sockets[0].close()

    monkeypatch.setattr(uvicorn.Server, "run", run)
    index = Path(faces.found.index.folder)
    serve(str(index), host="0.0.0.0", port=0)
    output = capsys.readouterr().out
    drawn = output.split("/?token=")[1].split()[0]
    assert output.count("token") == 1 and output.count(drawn) == 1 and len(drawn) == 43
    monkeypatch.setenv("HERON_TOKEN", TOKEN)
    serve(str(index), host="0.0.0.0", port=0)
    assert f"/?token={TOKEN}\n" in capsys.readouterr().out
    serve(str(index), port=0, token="b" * 16)
    assert "http://127.0.0.1:" in (output := capsys.readouterr().out) and "token=bbb" in output
    assert cli.main(["serve", str(index), "--port", "0", "--token", ""]) == 1
    assert "'-' and '_', got 0 characters" in capsys.readouterr().err
    monkeypatch.delenv("HERON_TOKEN")
    serve(str(index), port=0)
    assert "token" not in capsys.readouterr().out
