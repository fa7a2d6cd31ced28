"""The page in a real browser: with a mouse, with the keyboard alone, and as wide as a phone."""

import os
import re
import shutil
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest

from heron.pipeline.retrieval.query import Retriever
from tests.serve.served import MARKUP, retriever, running

CHROMIUM = shutil.which("chromium")
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
if CHROMIUM is None:
    pytest.skip("there is no chromium (Debian: apt-get install chromium)", allow_module_level=True)

from playwright.sync_api import Browser, BrowserContext, Page, expect  # noqa: E402

WAIT_MS = 10_000  # for what is there in some milliseconds, on a machine that does much else
SHOTS = os.environ.get("HERON_SCREENSHOTS")  # a folder to keep pictures of the page in


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=WAIT_MS)
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield found
        found.close()


@pytest.fixture(scope="module")
def faces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Retriever]]:
    found = retriever(tmp_path_factory.mktemp("faces"), "faces")
    with running(found) as url:
        yield url, found


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    """A window; nothing may be fetched from elsewhere, and no script may fail."""
    found = browser.new_context(viewport={"width": 1200, "height": 900}, reduced_motion="reduce")
    found.set_default_timeout(WAIT_MS)
    faults: list[str] = []
    found.on("weberror", lambda fault: faults.append(str(fault.error)))
    found.on("console", lambda said: faults.append(said.text) if said.type == "error" else None)
    found.on("request", lambda asked: faults.append(asked.url) if _foreign(asked.url) else None)
    yield found
    found.close()
    assert [fault for fault in faults if "400 (Bad Request)" not in fault] == []


def _foreign(url: str) -> bool:
    return not url.startswith(("http://127.0.0.1:", "blob:http://127.0.0.1:"))


def opened(context: BrowserContext, address: str) -> Page:
    page = context.new_page()
    page.goto(address)
    return page


def keys(page: Page) -> list[str]:
    """The keys of the results, once they are there."""
    expect(page.locator("#hits")).not_to_have_attribute("aria-busy", "true")
    expect(page.locator("#hits a").first).to_be_visible()
    found = page.locator("#hits a b").all_text_contents()
    return found or page.locator("#hits a").all_text_contents()


def shoot(page: Page, name: str) -> None:
    if SHOTS:
        page.wait_for_timeout(300)
        page.screenshot(path=Path(SHOTS) / f"{name}.png")


def focused(page: Page) -> str:
    """What has the focus: its id, or its text."""
    return str(page.evaluate("document.activeElement.id || document.activeElement.textContent"))


def test_search_filter_tabs_and_the_way_back(
    context: BrowserContext, faces: tuple[str, Retriever]
) -> None:
    url, found = faces
    page = opened(context, url)
    expect(page.locator("#about")).to_contain_text("48")
    for fact in ("flat", "cosine", "hidden, 192 dimensions", "Recall"):
        expect(page.locator("#about")).to_contain_text(fact)
    expect(page).to_have_url(re.compile(r"key=0000\d\d"))  # at random: the page is never empty

    page.fill("#key", "00000")
    expect(page.locator("#keys option")).to_have_count(9)
    page.fill("#key", "000007")
    page.click("text=Show")
    expect(page.locator("#query-title")).to_have_text("Sample 000007")
    best = [hit.key for hit in found.by_key("000007", 24).hits]
    assert keys(page) == best
    expect(page.locator("#status")).to_have_text("24 neighbours of 47 samples to choose from.")
    expect(page.locator("#hits img").first).to_have_js_property("naturalWidth", 32)
    shoot(page, "desktop")

    page.fill("#where", "Smiling and not Male")
    page.click("text=Apply")
    expect(page.locator("#status")).to_contain_text("with the filter")
    wanted = found.by_key("000007", 24, "Smiling and not Male")
    assert keys(page) == [hit.key for hit in wanted.hits]
    page.locator("#hits li button", has_text="Young").first.click()
    expect(page.locator("#where")).to_have_value("Smiling and not Male and Young")
    page.go_back()
    expect(page.locator("#where")).to_have_value("Smiling and not Male")
    page.click("text=Clear")
    expect(page.locator("#status")).to_have_text("24 neighbours of 47 samples to choose from.")

    page.click("text=Hard negatives")
    expect(page.locator("#tab-hard")).to_have_attribute("aria-selected", "true")
    expect(page.locator("#status")).to_contain_text("whose labels differ by")
    hard = found.by_key("000007", 24, relation="hard")
    assert keys(page) == [hit.key for hit in hard.hits]

    page.locator("#hits a").nth(2).click()
    third = hard.hits[2].key
    expect(page.locator("#query-title")).to_have_text(f"Sample {third}")
    assert f"key={third}&relation=hard" in page.url
    shared = opened(context, page.url)  # a link that someone else opens
    assert keys(shared) == keys(page)
    shared.close()
    page.go_back()
    expect(page.locator("#query-title")).to_have_text("Sample 000007")
    assert keys(page) == [hit.key for hit in hard.hits]
    page.go_forward()
    expect(page.locator("#query-title")).to_have_text(f"Sample {third}")


def test_the_token_opens_the_page_and_leaves_the_address(
    context: BrowserContext, faces: tuple[str, Retriever]
) -> None:
    token = "a-token_of-20-letter"
    with running(faces[1], token=token) as url:
        page = opened(context, f"{url}&key=000007")
        assert len(keys(page)) == 24 and page.url == f"{url.split('?')[0]}?key=000007"
        expect(page.locator("#hits img").first).to_have_js_property("naturalWidth", 32)
        assert page.evaluate("document.cookie") == "" and token not in page.content()
        (kept,) = context.cookies()
        assert kept["httpOnly"] and kept["sameSite"] == "Strict" and kept["value"] == token
        page.goto("about:blank")


def test_faults_are_told_in_words(context: BrowserContext, faces: tuple[str, Retriever]) -> None:
    page = opened(context, f"{faces[0]}?key=000007&where=Smilin")
    expect(page.get_by_role("alert")).to_contain_text("did you mean Smiling?")
    expect(page.locator("#hits")).to_be_empty()
    page.fill("#where", "Smiling and (Male")
    page.click("text=Apply")
    expect(page.get_by_role("alert")).to_contain_text("this '(' is not closed")
    shoot(page, "fault")
    page.click("text=Clear")
    expect(page.get_by_role("alert")).to_be_hidden()
    page.fill("#key", "no such key")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("no sample has the key 'no such key'")
    page.click("text=Random")
    assert len(keys(page)) == 24


def test_uploads(context: BrowserContext, faces: tuple[str, Retriever]) -> None:
    url, found = faces
    picture = found.picture(11)
    assert picture is not None
    picture.save(png := BytesIO(), "PNG")
    key = found.samples.key(11)
    page = opened(context, f"{url}?key=000007")
    assert len(keys(page)) == 24
    page.set_input_files(
        "#file", {"name": "me.png", "mimeType": "image/png", "buffer": png.getvalue()}
    )
    expect(page.locator("#query-title")).to_have_text("Upload me.png")
    assert keys(page)[0] == key and "upload=me.png" in page.url
    expect(page.locator("#query img")).to_have_js_property("naturalWidth", 32)
    for relation in ("hard", "false"):
        tab = page.locator(f"#tab-{relation}")
        expect(tab).to_have_attribute("aria-disabled", "true")
        tab.click(force=True)  # as a mouse does; Playwright waits until it is enabled
        expect(page.locator("#status")).to_contain_text("The query has no labels")
    shoot(page, "upload")
    page.fill("#where", "Male")
    page.click("text=Apply")
    expect(page.locator("#status")).to_contain_text("with the filter")
    page.locator("#hits a").first.click()
    expect(page.locator("#query-title")).to_contain_text("Sample")
    page.go_back()
    expect(page.locator("#query-title")).to_have_text("Upload me.png")
    page.reload()
    expect(page.get_by_role("alert")).to_contain_text("choose it again")
    page.set_input_files("#file", {"name": "a.jpg", "mimeType": "image/jpeg", "buffer": b"words"})
    expect(page.get_by_role("alert")).to_contain_text("expected")


def test_the_keyboard_alone(context: BrowserContext, faces: tuple[str, Retriever]) -> None:
    page = opened(context, f"{faces[0]}?key=000007")
    first = keys(page)
    order = []
    for _ in range(40):
        page.keyboard.press("Tab")
        order.append(focused(page))
        if order[-1].startswith(first[0]):
            break
    assert order[:4] == ["key", "Show", "random", "file"]
    wanted = ["where", "Apply", "clear", "count", "All labels", "tab-neighbours"]
    assert [name for name in order if name in wanted] == wanted
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineWidth")
    assert float(outline.removesuffix("px")) >= 2  # it can be seen where one is

    page.keyboard.press("ArrowRight")
    assert focused(page).startswith(first[1])
    page.keyboard.press("ArrowDown")
    columns = first.index(focused(page)[:6]) - 1
    assert columns > 2
    page.keyboard.press("ArrowUp")
    page.keyboard.press("End")
    assert focused(page).startswith(first[-1])
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    expect(page.locator("#query-title")).to_have_text(f"Sample {first[1]}")
    assert focused(page) == "query-title"  # what was chosen, not the top of the page

    page.locator("#tab-neighbours").focus()
    page.keyboard.press("ArrowRight")
    assert focused(page) == "tab-hard"
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert focused(page) == "tab-false"
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    expect(page.locator("#tab-hard")).to_have_attribute("aria-selected", "true")
    expect(page.locator("#tab-hard")).to_have_attribute("tabindex", "0")
    assert page.locator("[role=tab][tabindex='0']").count() == 1 and focused(page) == "tab-hard"
    hard = keys(page)
    page.keyboard.press("Tab")
    assert focused(page).startswith(hard[0])
    page.keyboard.press("Tab")  # to the labels of this result
    label = focused(page)
    page.keyboard.press("Enter")
    expect(page.locator("#where")).to_have_value(label)
    expect(page.get_by_role("status")).to_contain_text("with the filter")
    page.go_back()
    expect(page.locator("#where")).to_have_value("")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone(browser: Browser, faces: tuple[str, Retriever], scheme: str) -> None:
    context = browser.new_context(
        viewport={"width": 360, "height": 740},
        color_scheme="dark" if scheme == "dark" else "light",
        has_touch=True,
        is_mobile=True,
    )
    page = opened(context, f"{faces[0]}?key=000007&relation=hard")
    assert len(keys(page)) > 10
    page.click("text=All labels")
    width = "document.documentElement.scrollWidth"
    assert page.evaluate(width) <= 360
    assert contrast(page, "body", "body") > 7
    for selector, behind in (
        ("#meaning", "body"),
        ("#hits a", "#hits li"),
        (".measure", "#hits li"),
    ):
        assert contrast(page, selector, behind) > 4.5, selector
    for selector in (".labels button:not(.differs)", ".labels .differs", "#clear"):
        assert contrast(page, selector, selector) > 4.5, selector
    page.locator("#hits a").first.tap()
    expect(page.locator("#query-title")).not_to_have_text("Sample 000007")
    shoot(page, f"phone-{scheme}")
    page.goto(f"{faces[0]}?key=000007&where={'x' * 300}")
    expect(page.get_by_role("alert")).to_be_visible()
    assert page.evaluate(width) <= 360  # an error as long as this breaks
    context.close()


def contrast(page: Page, text: str, behind: str) -> float:
    """WCAG's ratio of the luminances of a text and of what is behind it."""
    style = "element => getComputedStyle(element)"
    colours = (
        page.locator(text).first.evaluate(f"{style}.color"),
        page.locator(behind).first.evaluate(f"{style}.backgroundColor"),
    )
    light = []
    for colour in colours:
        parts = np.array([float(part) / 255 for part in re.findall(r"[\d.]+", colour)[:3]])
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        light.append(float(linear @ np.array([0.2126, 0.7152, 0.0722])))
    return (max(light) + 0.05) / (min(light) + 0.05)


def test_vectors_are_a_table_and_labels_are_no_markup(
    context: BrowserContext, tmp_path: Path
) -> None:
    found = retriever(tmp_path, "frames")
    samples = found.samples
    number = int(np.flatnonzero(samples.targets[:, 0])[0])
    with running(found) as url:
        page = opened(context, f"{url}?key={samples.key(number)}&relation=false")
        own = keys(page)
        assert page.locator("#hits table tbody tr").count() == len(own)
        expect(page.locator("#query .labels button")).to_have_text(MARKUP)
        expect(page.locator("#hits img, #query img")).to_have_count(0)
        assert page.title() == f"Sample {samples.key(number)} · Heron"
        page.locator("#query .labels button").click()  # it is quoted on its way into the filter
        expect(page.get_by_role("status")).to_contain_text("with the filter")
        assert keys(page) == own
        page.click("text=All labels")
        page.fill("#where", "")
        page.locator("#labels button", has_text="a b's").click()
        expect(page.get_by_role("alert")).to_contain_text("no other sample")  # of another class
        page.go_back()
        assert keys(page) == own
        page.locator("#hits a").first.focus()
        page.keyboard.press("ArrowDown")
        assert focused(page) == own[1]
        row = found._encoder.model.reader.read("view1", np.array([number]))[0]
        np.save(npy := BytesIO(), row)
        page.set_input_files(
            "#file",
            {"name": "row.npy", "mimeType": "application/x-npy", "buffer": npy.getvalue()},
        )
        expect(page.locator("#query-title")).to_have_text("Upload row.npy")
        assert keys(page)[0] == samples.key(number)
        shoot(page, "table")
        page.set_viewport_size({"width": 360, "height": 740})
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        page.goto("about:blank")
