"""Requests of the page's map that fail or come late, in a real browser."""

from tests.serve.browsing import BrowserContext, Page, Route, expect, opened
from tests.serve.served import Site
from tests.serve.test_map_and_facets import coloured_pixels, mapped


def refuse(page: Page, pattern: str, error: str) -> None:
    page.route(pattern, lambda route: route.fulfill(status=400, json={"error": error}))


def centre(page: Page) -> tuple[float, float]:
    """The centre of the map on the screen."""
    box = page.locator("#over").bounding_box()
    assert box is not None
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def test_the_map_says_that_a_sample_cannot_be_fetched(context: BrowserContext, faces: Site) -> None:
    page = mapped(opened(context, f"{faces.url}?key=000007"))
    fault = page.locator("#map-fault")
    expect(fault).to_be_hidden()
    for _ in range(12):  # all points lie at the centre
        page.click("#farther")
    left, top = centre(page)
    refuse(page, "**/api/sample/*", "samples are out")
    page.mouse.move(left, top)
    expect(fault).to_have_text("samples are out")
    page.unroute("**/api/sample/*")
    page.mouse.move(left + 1, top)
    expect(page.locator("#under")).to_be_visible()
    expect(fault).to_be_hidden()
    refuse(page, "**/api/sample/*", "clicks are out")
    page.mouse.click(left, top)
    expect(fault).to_have_text("clicks are out")
    expect(page.locator("#query-title")).to_have_text("Sample 000007")


def test_the_map_says_that_colours_cannot_be_fetched(context: BrowserContext, faces: Site) -> None:
    page = context.new_page()
    refuse(page, "**/api/colours?*", "colours are out")
    page.goto(f"{faces.url}?key=000007&colour=3")
    mapped(page)
    fault = page.locator("#map-fault")
    expect(fault).to_have_text("colours are out")
    assert coloured_pixels(page) > 0  # the points are drawn all the same
    page.unroute("**/api/colours?*")
    page.locator("#hits a").first.click()  # the next query tries again
    expect(page.locator("#map")).to_have_attribute("data-colour", "3")
    expect(fault).to_be_hidden()


def test_colours_that_come_late_do_not_replace_newer_ones(
    context: BrowserContext, faces: Site
) -> None:
    page = mapped(opened(context, f"{faces.url}?key=000007"))
    slow: list[Route] = []
    page.route("**/api/colours?label=3&*", lambda route: slow.append(route))
    with page.expect_request("**/api/colours?label=3&*"):
        page.select_option("#colour", "3")
    page.select_option("#colour", "5")
    expect(page.locator("#map")).to_have_attribute("data-colour", "5")
    with page.expect_response("**/api/colours?label=3&*"):
        slow[0].continue_()
    page.wait_for_timeout(200)
    expect(page.locator("#map")).to_have_attribute("data-colour", "5")
