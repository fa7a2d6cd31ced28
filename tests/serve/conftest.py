"""Two sites that a module's tests share, and a browser."""

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext

from tests.serve.served import LIMITS, Site, retriever, running


@pytest.fixture(scope="module")
def faces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    found = retriever(tmp_path_factory.mktemp("faces"), "faces")
    with running(found, LIMITS) as url:
        yield Site(url, found)


@pytest.fixture(scope="module")
def frames(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    found = retriever(tmp_path_factory.mktemp("frames"), "frames")
    with running(found, LIMITS) as url:
        yield Site(url, found)


@pytest.fixture(scope="module")  # no longer: while one is open, playwright opens no other
def browser() -> "Iterator[Browser]":
    """Chromium, which draws WebGL by the processor."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no chromium (Debian: apt-get install chromium)")
    sync_api.expect.set_options(timeout=10_000)
    drawn = ["--use-angle=swiftshader", "--enable-unsafe-swiftshader"]
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", *drawn])
        yield found
        found.close()


@pytest.fixture
def context(browser: "Browser") -> "Iterator[BrowserContext]":
    """A window; nothing may be fetched from elsewhere, and no script may fail."""
    found = browser.new_context(viewport={"width": 1400, "height": 1000}, reduced_motion="reduce")
    found.set_default_timeout(10_000)
    faults: list[str] = []
    found.on("weberror", lambda fault: faults.append(str(fault.error)))
    found.on("console", lambda said: faults.append(said.text) if said.type == "error" else None)
    found.on("request", lambda asked: faults.append(asked.url) if _foreign(asked.url) else None)
    yield found
    found.close()
    assert [fault for fault in faults if "400 (Bad Request)" not in fault] == []


def _foreign(url: str) -> bool:
    return not url.startswith(("http://127.0.0.1:", "blob:http://127.0.0.1:"))
