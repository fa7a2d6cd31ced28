"""The page in a real browser: with a mouse, with the keyboard alone, and as wide as a phone."""

import re
from contextlib import suppress
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest

from tests.serve.browsing import (
    Browser,
    BrowserContext,
    Error,
    Route,
    contrast,
    expect,
    focused,
    keys,
    opened,
    shoot,
)
from tests.serve.served import MARKUP, Site, retriever, running


def test_search_filter_tabs_and_the_way_back(context: BrowserContext, faces: Site) -> None:
    url, found = faces.url, faces.found
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
    assert page.locator("#query-title").is_visible()
    wanted = found.by_key("000007", 24, "Smiling and not Male")
    assert keys(page) == [hit.key for hit in wanted.hits]
    page.get_by_label("Only samples with Young").click()
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
    context: BrowserContext, faces: Site
) -> None:
    token = "a-token_of-20-letter"
    with running(faces.found, token=token) as url:
        page = opened(context, f"{url}&key=000007")
        assert len(keys(page)) == 24 and page.url == f"{url.split('?')[0]}?key=000007"
        expect(page.locator("#hits img").first).to_have_js_property("naturalWidth", 32)
        assert page.evaluate("document.cookie") == "" and token not in page.content()
        (kept,) = context.cookies()
        assert kept["httpOnly"] and kept["sameSite"] == "Strict" and kept["value"] == token
        page.goto("about:blank")


def test_faults_are_told_in_words(context: BrowserContext, faces: Site) -> None:
    page = opened(context, f"{faces.url}?key=000007&where=Smilin")
    expect(page.get_by_role("alert")).to_contain_text("Did you mean Smiling?")
    expect(page.locator("#hits")).to_be_empty()
    page.fill("#where", "Smiling and (Male")
    page.click("text=Apply")
    expect(page.get_by_role("alert")).to_contain_text("labels must be joined")
    shoot(page, "fault")
    expect(page.locator("#facets-note")).to_contain_text("labels must be joined")
    page.click("text=Clear")
    expect(page.get_by_role("alert")).to_be_hidden()
    page.fill("#key", "no such key")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("no sample has the key 'no such key'")
    page.click("text=Random")
    assert len(keys(page)) == 24


def test_a_random_sample_of_none_is_told_and_nothing_is_awaited(
    context: BrowserContext, faces: Site
) -> None:
    page = opened(context, f"{faces.url}?among=Smilin")
    expect(page.get_by_role("alert")).to_contain_text("Did you mean Smiling?")
    expect(page.locator("#hits")).not_to_have_attribute("aria-busy", "true")
    expect(page.locator("#facets-note")).to_have_text("Among all 48 samples.")


def test_uploads(context: BrowserContext, faces: Site) -> None:
    url, found = faces.url, faces.found
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
    expect(page.get_by_role("alert")).to_contain_text("is not a JPEG, PNG")


def test_the_keyboard_alone(context: BrowserContext, faces: Site) -> None:
    page = opened(context, f"{faces.url}?key=000007")
    first = keys(page)
    order = []
    for _ in range(40):
        page.keyboard.press("Tab")
        order.append(focused(page))
        if order[-1].startswith(first[0]):
            break
    assert order[:4] == ["key", "Show", "random", "file"]
    wanted = ["where", "Apply", "clear", "count", "size", "tab-neighbours"]
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
    page.keyboard.press("Tab")  # to what adds this result to the query
    assert focused(page) == "+"
    page.locator("#tab-neighbours").click()
    keys(page)
    page.locator("#hits a").nth(1).focus()
    page.keyboard.press("a")
    expect(page.locator("#query-title")).to_have_text("2 samples")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone(browser: Browser, faces: Site, scheme: str) -> None:
    context = browser.new_context(
        viewport={"width": 390, "height": 844},
        color_scheme="dark" if scheme == "dark" else "light",
        has_touch=True,
        is_mobile=True,
    )
    page = opened(context, f"{faces.url}?key=000007&relation=hard")
    assert len(keys(page)) > 10
    page.click("#facets summary")
    width = "document.documentElement.scrollWidth"
    assert page.evaluate(width) <= 390
    assert contrast(page, "body", "body") > 7
    for selector, behind in (
        ("#meaning", "body"),
        ("#hits a", "#hits li"),
        ("#hits .differ", "#hits li"),
        ("#hits ins", "#hits li"),
        ("#hits del", "#hits li"),
        ("#hits .measure", "#hits .measure"),
        ("#facets span", "body"),
        ("#map-note", "body"),
    ):
        assert contrast(page, selector, behind) > 4.5, selector
    for selector in (".labels button", "#clear"):
        assert contrast(page, selector, selector) > 4.5, selector
    page.locator("#hits a").first.tap()
    expect(page.locator("#query-title")).not_to_have_text("Sample 000007")
    shoot(page, f"phone-{scheme}")
    page.goto(f"{faces.url}?key=000007&where={'x' * 300}")
    expect(page.get_by_role("alert")).to_be_visible()
    assert page.evaluate(width) <= 390  # an error as long as this breaks
    context.close()


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
        page.get_by_label("Only samples with a b's").click()
        expect(page.locator("#where")).to_have_value("'a b''s'")  # of classes one at most
        expect(page.get_by_role("status")).to_contain_text("nearest in label space")
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


def test_suggestions_of_an_older_text_do_not_replace_newer_ones(
    context: BrowserContext, faces: Site
) -> None:
    page = opened(context, f"{faces.url}?key=000007")
    keys(page)
    slow: list[Route] = []

    def answer(route: Route) -> None:
        if "part=00001" in route.request.url:
            route.fulfill(json={"keys": ["newer"]})
        else:
            slow.append(route)

    page.route("**/api/samples?*", answer)
    suggested = page.locator("#keys option")
    with page.expect_request("**/api/samples?part=0000"):
        page.fill("#key", "0000")
    page.fill("#key", "00001")
    expect(suggested).to_have_count(1)
    expect(suggested).to_have_attribute("value", "newer")
    for route in slow:
        with suppress(Error):  # the page may have given up on it
            route.fulfill(json={"keys": ["older", "older still"]})
    page.wait_for_timeout(200)
    expect(suggested).to_have_count(1)
    expect(suggested).to_have_attribute("value", "newer")
