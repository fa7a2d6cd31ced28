"""`heron serve --export`: the page as files, read by a browser from a plain web server."""

import json
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from threading import Thread
from urllib.parse import quote

import numpy as np
import pytest
from PIL import Image

from heron.base.errors import RetrievalError
from heron.cli.main import main
from heron.serve import static_site
from heron.serve.static_site import write_site
from tests.serve.browsing import Browser, BrowserContext, Page, expect, keys, opened, shoot
from tests.serve.served import Site


class Quiet(SimpleHTTPRequestHandler):
    """Python's own server of files, without its log."""

    timeout = 0.5  # of a connection that a browser holds open

    def log_message(self, *_: object) -> None:
        """Says nothing."""


class Files(ThreadingHTTPServer):
    """A server that ends with its connections."""

    daemon_threads = False


def written(site: Site, folder: Path) -> Path:
    counts: list[int] = []
    folder.mkdir(parents=True)
    write_site(site.found, folder, counts.append)
    assert counts == [48]
    return folder


@pytest.fixture(scope="module")
def address(faces: Site, frames: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Both pages as files, below the root of a server."""
    folder = tmp_path_factory.mktemp("www")
    for name, site in (("faces", faces), ("frames", frames)):
        written(site, folder / "deep" / name)
    server = Files(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/deep/"
    server.shutdown()
    server.server_close()
    thread.join()


def served(page: Page, relation: str) -> list[str]:
    page.locator(f"#tab-{relation}").click()
    return keys(page)


@pytest.mark.parametrize("name", ["faces", "frames"])
def test_the_files_answer_as_the_server(
    context: BrowserContext, address: str, faces: Site, frames: Site, name: str
) -> None:
    site = {"faces": faces, "frames": frames}[name]
    key = site.found.samples.key(7)
    files = opened(context, f"{address}{name}/?key={quote(key)}")
    live = opened(context, f"{site.url}?key={quote(key)}")
    for relation in ("neighbours", "hard", "false"):
        assert served(files, relation) == served(live, relation)
        for part in ("#status", "#query-title", "#meaning", "#query-body", "#hits"):
            said, expected = (page.locator(part).text_content() for page in (files, live))
            # The button + adds a result to a query of several, which a page of files lacks.
            assert str(said).replace("+", "") == str(expected).replace("+", ""), part
    assert files.locator("#hits .add").count() == 0 < live.locator("#hits .add").count()
    for hidden in ("#upload-field", "#where-field", "#lasso", "#facets", "#keys-csv"):
        expect(files.locator(hidden)).to_be_hidden()
    assert files.locator("#count option").all_text_contents() == ["12", "24"]
    second = keys(files)[1]
    files.locator("#hits a").nth(1).click()
    expect(files.locator("#query-title")).to_have_text(f"Sample {second}")
    files.go_back()
    expect(files.locator("#query-title")).to_have_text(f"Sample {key}")
    shoot(files, f"static-{name}")


def test_map_colours_and_keys(context: BrowserContext, address: str, faces: Site) -> None:
    page = opened(context, f"{address}faces/")
    keys(page)
    assert page.locator("#query-title").text_content() != "Sample "  # a random one
    for label in (0, 5):
        codes = page.evaluate(
            f"import('./static.js').then(async (m) => [...new Uint8Array(await m.answer("
            f"'api/colours?label={label}'))])"
        )
        assert codes == [*faces.ask(f"/api/colours?label={label}")[1]]
    grid = page.evaluate(
        "import('./static.js').then(async (m) => [...new Uint8Array(await m.answer('api/map'))])"
    )
    assert grid == [*faces.ask("/api/map")[1]]
    wanted = faces.found.samples.key(11)
    page.fill("#key", wanted)
    page.keyboard.press("Enter")
    expect(page.locator("#query-title")).to_have_text(f"Sample {wanted}")
    page.fill("#key", "no such key")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert").first).to_have_text("No sample has the key 'no such key'.")


def test_classes_have_the_colours_of_the_server(
    context: BrowserContext, address: str, frames: Site
) -> None:
    page = opened(context, f"{address}frames/")
    keys(page)
    codes = page.evaluate(
        "import('./static.js').then("
        "async (module) => [...new Uint8Array(await module.answer('api/colours'))])"
    )
    assert codes == [*frames.ask("/api/colours")[1]]


@pytest.mark.parametrize("width", [1400, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_width_overflows(browser: Browser, address: str, width: int, scheme: str) -> None:
    size = {"width": width, "height": 1000}
    with browser.new_context(color_scheme=scheme, viewport=size) as context:  # type: ignore[arg-type]
        page = opened(context, f"{address}faces/")
        keys(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        shoot(page, f"static-{width}-{scheme}")


def test_pictures_are_those_of_the_server(faces: Site, tmp_path: Path) -> None:
    written(faces, tmp_path / "site")
    for number in (0, 47):
        stored = (tmp_path / "site" / f"data/pictures/0/0/{number}.jpg").read_bytes()
        served = faces.ask(f"/api/picture/{number}")[1]
        assert Image.open(BytesIO(stored)).size == Image.open(BytesIO(served)).size
        assert stored == served
    answers = json.loads((tmp_path / "site/data/answers/0.json").read_text())
    assert len(answers) == 48
    answer = faces.json(f"/api/neighbours?key={quote(faces.found.samples.key(3))}&k=24")
    assert [hit[0] for hit in answers[3]["neighbours"]["hits"]] == [
        hit["number"] for hit in answer["hits"]
    ]
    scores = [hit[1] for hit in answers[3]["neighbours"]["hits"]]
    np.testing.assert_allclose(scores, [hit["score"] for hit in answer["hits"]], rtol=1e-5)


def test_the_verb(
    faces: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    index, site = str(faces.found.index.folder), tmp_path / "site"
    assert main(["serve", index, "--export", str(site)]) == 0
    out = capsys.readouterr().out
    assert f"{site}: 48 samples, " in out and f"http.server --directory {site}" in out
    assert main(["serve", index, "--export", str(site)]) == 1
    told = capsys.readouterr().err
    assert "choose another --export, or add --overwrite" in told
    assert main(["serve", index, "--export", str(site), "--overwrite"]) == 0  # as it proposes
    assert (tmp_path / "site-1" / "index.html").exists() and (site / "index.html").exists()
    (tmp_path / "here").mkdir()
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path / "here")
        assert main(["serve", index, "--export", "."]) == 0
        assert Path("index.html").exists() and "--directory .\n" in capsys.readouterr().out
        assert main(["serve", index, "--export", ".", "--overwrite"]) == 1
        assert "is the current folder" in capsys.readouterr().err
    monkeypatch.setattr(static_site, "MAX_SAMPLES", 47)
    assert main(["serve", index, "--export", str(tmp_path / "large")]) == 1
    told = capsys.readouterr().err
    assert "has 48 samples, but a page of files can have at most 47; run `heron serve`" in told

    def fail(*_: object) -> bytes:
        raise RetrievalError("the disk is gone")

    monkeypatch.setattr(static_site, "MAX_SAMPLES", 48)
    monkeypatch.setattr(static_site, "_pictures", fail)
    assert main(["serve", index, "--export", str(tmp_path / "half")]) == 1
    assert "the disk is gone" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "site", "site-1"]
