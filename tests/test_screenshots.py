"""The script that photographs what people see: terminals, and pages at each width and scheme."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from heron import load_config
from heron.cli.arguments import Group, Verb, parse
from heron.cli.main import VERBS
from tests.weekly import weekly

ROOT = Path(__file__).parent.parent
CHROMIUM = shutil.which("chromium")


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")


def test_the_last_screen_is_what_a_terminal_would_show() -> None:
    """A bar of two lines is written twice; then a line follows."""
    from make_screenshots import last_screen

    from tests.base.test_terminal import on_a_terminal

    once = "\r\x1b[2Kstep 1\nloss 2\r\x1b[2K\x1b[1A\x1b[2K\x1b[31mstep 2\x1b[0m\nloss 1\n"
    assert last_screen(f"before\r\n{once}after") == ("before\n\x1b[31mstep 2\x1b[0m\nloss 1\nafter")
    code = (
        "from heron.base.terminal import Bar\nwith Bar(9, 'step') as bar:\n"
        "    for step in range(9):\n        bar.update(shown=f'loss {step}')\n"
        "        print('line', step)\n"
    )
    lines = last_screen(on_a_terminal(code, NO_COLOR="1")).splitlines()
    assert [line.split()[1] for line in lines if line.startswith("line")] == [*"012345678"]
    assert sum("of 9" in line for line in lines) == 1, "the bar is there once"


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium (apt-get install chromium)")
def test_a_page_is_photographed_at_each_width_in_each_scheme(tmp_path: Path) -> None:
    from make_screenshots import photograph

    page = tmp_path / "page.html"
    style = "@media (prefers-color-scheme: dark) { body { background: #000; color: #fff } }"
    text = f"<!doctype html><html lang='en'><title>Page</title><style>{style}</style>"
    page.write_text(f"{text}<body style='height: 1500px'><main><h1>Page</h1></main>")
    found = {path.name: path for path in photograph(page.as_uri(), "page", tmp_path)}
    grounds = {}
    for name, path in found.items():
        with Image.open(path) as picture:
            assert picture.height >= 1500
            grounds[name] = picture.width, picture.convert("L").getpixel((5, 5))
    assert grounds == {
        f"page-{width}-{scheme}.png": (width, ground)
        for width in (1400, 390)
        for scheme, ground in (("light", 255), ("dark", 0))
    }


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium (apt-get install chromium)")
def test_what_a_screen_reader_cannot_tell_ends_it(tmp_path: Path) -> None:
    from make_screenshots import photograph

    page = tmp_path / "page.html"
    page.write_text("<!doctype html><html lang='en'><title>Page</title><main><h1>A</h1><img src=x>")
    with pytest.raises(SystemExit, match=r"page-1400-light: image-alt \(critical\): .*<img src"):
        photograph(page.as_uri(), "page", tmp_path)


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium (apt-get install chromium)")
@weekly("a tool that is run by hand, for the pictures of the docs")
def test_the_script_photographs_a_surface(tmp_path: Path) -> None:
    """The quickest one, as `make screenshots` does all."""
    subprocess.run(
        [sys.executable, ROOT / "docs" / "make_screenshots.py", "study"],
        check=True,
        env=os.environ | {"HERON_SCREENSHOTS": str(tmp_path), "PYTHONPATH": str(ROOT)},
    )
    grounds = {}
    for path in tmp_path.iterdir():
        with Image.open(path) as picture:
            assert picture.height > 1000
            grounds[path.stem] = picture.convert("L").getpixel((5, 5))
    assert grounds == {
        f"study-{width}-{scheme}": ground
        for width in (1400, 390)
        for scheme, ground in (("light", 255), ("dark", 22))
    }


def test_the_other_surfaces_have_options_and_verbs_that_there_are() -> None:
    """Their run takes a minute or two; here what it is asked for is read alone."""
    from make_screenshots import AFTER, SMALL

    assert load_config("faces", *SMALL).train.epochs == 3
    for text in AFTER:
        first, *words = text.split()
        verb = VERBS.verbs[first]
        if isinstance(verb, Group):
            verb, words = verb.verbs[words[0]], words[1:]
        assert isinstance(verb, Verb) and callable(parse("heron", verb, words))


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium (apt-get install chromium)")
def test_a_study_s_charts_are_svg_with_ticks_and_legends(tmp_path: Path) -> None:
    from playwright.sync_api import sync_playwright

    from heron.cli.main import main
    from tests.studies import made

    folder = made.negatives(tmp_path / "study")
    assert main(["report", str(folder)]) == 0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 390, "height": 900})
        asked = list[str]()
        page.on("request", lambda request: asked.append(request.url))
        page.goto((folder / "report" / "report.html").as_uri())
        page.wait_for_selector("html[data-drawn]")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
        charts = page.locator(".chart")
        f1, seconds = (charts.nth(n).inner_text() for n in range(2))
        for tick in ("100", "250", "500", "1,000", "2,500", "5,000"):
            assert tick in f1 and tick in seconds
        assert "x² (HeroCon, Figure 4b)" in seconds and "measured" in seconds
        browser.close()
