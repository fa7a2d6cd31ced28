"""The page's map, outlines, labels, examples, files and exports, in a real browser."""

import base64
import csv
import json
import re
from io import BytesIO, StringIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from heron.report.pages import PageLinks
from heron.retrieval.query import Retriever
from tests.serve.browsing import (
    Browser,
    BrowserContext,
    Page,
    Route,
    expect,
    focused,
    keys,
    opened,
    shoot,
)
from tests.serve.served import Site, picture, retriever, running


def mapped(page: Page) -> Page:
    """A page whose map is drawn."""
    expect(page.locator("#map")).to_have_attribute("data-drawn", re.compile(r"\d+"))
    keys(page)
    return page


def coloured_pixels(page: Page) -> int:
    """Pixels of the map that are coloured, as the screen has them."""
    page.locator("#over").blur()  # its frame is coloured too
    page.wait_for_timeout(100)
    with Image.open(BytesIO(page.locator("#points").screenshot())) as image:
        pixels = np.asarray(image.convert("RGB"), int)
    return int((pixels.max(2) - pixels.min(2) > 60).sum())


def test_the_map_pans_zooms_and_picks(context: BrowserContext, faces: Site) -> None:
    page = mapped(opened(context, f"{faces.url}?key=000007"))
    note = page.locator("#map-note")
    expect(note).to_contain_text("PCA of 192 dimensions")
    expect(note).to_contain_text("48 points.")
    whole = coloured_pixels(page)
    assert whole > 48 * 4
    label = page.locator("#over").get_attribute("aria-label")
    assert label == "Map of 48 samples; 24 results are marked"
    shoot(page, "map")
    box = page.locator("#over").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 30, box["y"] + 30)
    page.mouse.down()
    page.mouse.move(box["x"] + 30 + 2 * box["width"], box["y"] + 40, steps=5)
    page.mouse.up()
    assert coloured_pixels(page) == 0  # all are beyond the edge
    page.locator("#over").press("0")
    assert coloured_pixels(page) == whole
    page.locator("#over").press("+")
    assert coloured_pixels(page) not in (0, whole)
    page.locator("#over").press("0")

    found = faces.found.index.sample_map()
    assert found is not None
    x, y = found.grid.astype(float).T
    scale = 0.94 * min(box["width"] / x.max(), box["height"] / y.max())
    alone = int(np.argmax(x))  # at the edge
    left = box["x"] + box["width"] / 2 + (x[alone] - x.max() / 2) * scale
    top = box["y"] + box["height"] / 2 - (y[alone] - y.max() / 2) * scale
    held: list[Route] = []
    page.route("**/api/sample/*", lambda route: held.append(route))
    with page.expect_request("**/api/sample/*"):
        page.mouse.move(left, top)
    page.mouse.move(5, 5)  # off the map, before the answer
    with page.expect_response("**/api/sample/*"):
        held[0].continue_()
    page.unroute("**/api/sample/*")
    page.wait_for_timeout(100)
    expect(page.locator("#under")).to_be_hidden()
    page.mouse.click(left, top)
    key = faces.found.samples.key(alone)
    expect(page.locator("#query-title")).to_have_text(f"Sample {key}")
    expect(page.locator("#colour option").first).to_have_text("nothing")
    expect(page.locator("#map")).to_have_attribute("data-colour", "")
    page.select_option("#colour", label="Smiling")
    expect(page.locator("#legend")).to_contain_text("not Smiling")
    place = faces.found.samples.names.index("Smiling")
    expect(page.locator("#map")).to_have_attribute("data-colour", str(place))
    assert f"colour={place}" in page.url
    page.reload()
    expect(page.locator("#map")).to_have_attribute("data-colour", str(place))


def test_two_fingers_zoom_about_their_middle_and_move_it(browser: Browser, faces: Site) -> None:
    touch = browser.new_context(viewport={"width": 390, "height": 900}, has_touch=True)
    page = mapped(opened(touch, f"{faces.url}?key=000007"))
    box = page.locator("#over").bounding_box()
    found = faces.found.index.sample_map()
    assert box is not None and found is not None
    fingers = touch.new_cdp_session(page)

    def send(kind: str, *places: tuple[float, float], first: int = 0) -> None:
        """`touchEnd` lifts the fingers at these places, numbered from `first`; none: all."""
        page.locator("#over").scroll_into_view_if_needed()
        now = page.locator("#over").bounding_box()
        assert now is not None
        points = [
            {"x": now["x"] + x, "y": now["y"] + y, "id": n}
            for n, (x, y) in enumerate(places, first)
        ]
        fingers.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    def seen() -> list[int]:
        """Left, bottom, right and top of what is seen, on the grid."""
        page.click("#in-view")
        expect(page).to_have_url(re.compile("lasso="))
        corners = re.search(r"lasso=([\d%C,]+)", page.url)
        assert corners
        numbers = [int(n) for n in corners[1].replace("%2C", ",").split(",")]
        expect(page.locator("#status")).to_contain_text("with the outline")
        page.click("#unlasso")
        expect(page).not_to_have_url(re.compile("lasso="))
        # Results that come later, above the map, would move it away from the fingers.
        expect(page.locator("#status")).not_to_contain_text("with the outline")
        return [numbers[0], numbers[5], numbers[2], numbers[1]]

    width, height = box["width"], box["height"]
    x, y = found.grid.astype(float).T
    scale = 0.94 * min(width / x.max(), height / y.max())
    # The fingers go three times as far apart, and their middle to that of the map.
    start, spread = (0.4 * width, 0.6 * height), 20
    send("touchStart", (start[0] - spread, start[1]))
    send("touchStart", (start[0] - spread, start[1]), (start[0] + spread, start[1]))
    for part in np.linspace(0, 1, 6)[1:].tolist():
        left, top = (0.4 + 0.1 * part) * width, (0.6 - 0.1 * part) * height
        apart = spread * (1 + 2 * part)
        send("touchMove", (left - apart, top), (left + apart, top))
    send("touchEnd")
    middle = x.max() / 2 - 0.1 * width / scale, y.max() / 2 - 0.1 * height / scale
    half = width / (6 * scale), height / (6 * scale)
    expected = np.array([*np.subtract(middle, half), *np.add(middle, half)])
    assert seen() == pytest.approx(expected.clip(0, 65_536).tolist(), abs=400)
    # One that is left of two moves the map on, and neither picks a sample.
    send("touchStart", (20, 20))
    send("touchStart", (20, 20), (60, 20))
    send("touchEnd", (60, 20), first=1)
    send("touchMove", (20 + width / 3, 20))
    send("touchEnd")
    moved = expected - np.array([1, 0, 1, 0]) * width / (9 * scale)
    assert seen() == pytest.approx(moved.clip(0, 65_536).tolist(), abs=400)
    assert "key=000007" in page.url
    touch.close()


def test_a_lasso_has_only_what_is_inside(context: BrowserContext, faces: Site) -> None:
    page = mapped(opened(context, f"{faces.url}?key=000007&k=48"))
    box = page.locator("#over").bounding_box()
    assert box is not None
    page.click("#lasso")
    expect(page.locator("#lasso")).to_have_attribute("aria-pressed", "true")
    left, top, width, height = box["x"], box["y"], box["width"], box["height"]
    page.mouse.move(left + width / 2, top + 2)
    page.mouse.down()
    for x, y in ((width - 2, 2), (width - 2, height - 2), (width / 2, height - 2)):
        page.mouse.move(left + x, top + y, steps=4)
    page.mouse.up()
    expect(page.locator("#status")).to_contain_text("with the outline")
    expect(page.locator("#lasso")).to_have_attribute("aria-pressed", "false")
    outline = re.search(r"lasso=([\d%C,]+)", page.url)
    found = faces.found.index.sample_map()
    assert outline and found
    inside = np.flatnonzero(found.inside(outline[1].replace("%2C", ",")))
    right = np.flatnonzero(found.grid[:, 0] > found.grid[:, 0].max() / 2 + 1000)
    assert {*right} <= {*inside} and 5 < len(inside) < 45
    shown = keys(page)
    assert sorted(shown) == sorted(faces.found.samples.key(int(n)) for n in inside if n != 6)[:24]
    note = f"Among {len(inside)} of 48 samples."
    expect(page.locator("#facets-note")).to_have_text(note)
    shared = mapped(opened(context, page.url))
    assert keys(shared) == shown
    shared.close()
    page.click("#export summary")
    with page.expect_download() as download:
        page.click("#keys-csv")
    rows = csv.reader(StringIO(Path(download.value.path()).read_text()))
    assert [row[0] for row in rows][1:] == [faces.found.samples.key(int(n)) for n in inside]
    page.click("#unlasso")
    expect(page.locator("#status")).to_have_text("24 neighbours of 47 samples to choose from.")
    page.click("#in-view")  # without a pointer: what is seen
    expect(page.locator("#facets-note")).to_have_text("Among all 48 samples.")
    assert "lasso=" in page.url


def test_labels_are_included_and_excluded_by_a_click(context: BrowserContext, faces: Site) -> None:
    samples = faces.found.samples
    page = mapped(opened(context, f"{faces.url}?key=000007"))
    count = dict(zip(samples.names, samples.label_counts(), strict=True))
    row = page.locator("#facets li", has=page.get_by_label("Only samples with Smiling"))
    expect(row.locator("span")).to_have_text(str(count["Smiling"]))
    page.get_by_label("Only samples with Smiling").click()
    expect(page.locator("#where")).to_have_value("Smiling")
    expect(page.get_by_label("Only samples with Smiling")).to_have_attribute("aria-pressed", "true")
    assert focused(page) == "Smiling"  # the focus stays where it was
    page.get_by_label("Only samples without Male").click()
    expect(page.locator("#where")).to_have_value("Smiling and not Male")
    y = samples.targets
    passed = (y[:, samples.names.index("Smiling")] == 1) & (y[:, samples.names.index("Male")] == 0)
    expect(page.locator("#facets-note")).to_have_text(f"Among {passed.sum()} of 48 samples.")
    young = page.locator("#facets li", has=page.get_by_label("Only samples with Young"))
    expect(young.locator("span")).to_have_text(str(y[passed, samples.names.index("Young")].sum()))
    shoot(page, "facets")
    page.get_by_label("Only samples with Male").click()  # for what excluded it
    expect(page.locator("#where")).to_have_value("Smiling and Male")
    page.get_by_label("Only samples with Smiling").click()
    page.get_by_label("Only samples with Male").click()
    expect(page.locator("#where")).to_have_value("")
    page.fill("#where", "Male or Smiling")
    page.click("text=Apply")
    page.get_by_label("Only samples without Young").click()
    expect(page.locator("#where")).to_have_value("(Male or Smiling) and not Young")
    page.get_by_label("Only samples without Young").press("Enter")
    expect(page.locator("#where")).to_have_value("Male or Smiling")


def test_a_quoted_label_with_a_sign_is_left_out_by_a_second_click(
    context: BrowserContext, tmp_path: Path
) -> None:
    found = retriever(tmp_path, "frames")
    found.samples.names[2] = "R&B"
    with running(found) as url:
        page = mapped(opened(context, f"{url}?key={found.samples.key(7)}"))
        button = page.get_by_label("Only samples without R&B")
        button.click()
        expect(page.locator("#where")).to_have_value("not 'R&B'")
        expect(button).to_have_attribute("aria-pressed", "true")
        button.click()
        expect(page.locator("#where")).to_have_value("")
        page.goto("about:blank")


def test_several_examples(context: BrowserContext, faces: Site) -> None:
    page = mapped(opened(context, f"{faces.url}?key=000007"))
    second = keys(page)[1]
    page.get_by_label(f"Add {second} to the query").click()
    expect(page.locator("#query-title")).to_have_text("2 samples")
    wanted = [hit.key for hit in faces.found.by_keys(["000007", second], 24).hits]
    assert keys(page) == wanted
    expect(page.locator("#query img")).to_have_count(2)
    expect(page.locator("#tab-hard")).to_have_attribute("aria-disabled", "true")
    page.get_by_title("Remove 000007").click()
    expect(page.locator("#query-title")).to_have_text(f"Sample {second}")


@pytest.mark.parametrize("how", ["drop", "paste"])
def test_a_file_is_dropped_or_pasted(context: BrowserContext, faces: Site, how: str) -> None:
    page = mapped(opened(context, f"{faces.url}?key=000007"))
    data = base64.b64encode(picture(faces, 11)).decode()
    page.evaluate(
        """([data, how]) => {
          const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
          const held = new DataTransfer();
          held.items.add(new File([bytes], "me.png", { type: "image/png" }));
          const options = { bubbles: true, cancelable: true };
          if (how === "drop") {
            const send = (type) => document.body.dispatchEvent(
              new DragEvent(type, { ...options, dataTransfer: held }));
            send("dragover");
            window.shown = !document.getElementById("drop").hidden;
            send("drop");
          } else {
            window.shown = true;
            document.body.dispatchEvent(
              new ClipboardEvent("paste", { ...options, clipboardData: held }));
          }
        }""",
        [data, how],
    )
    assert page.evaluate("window.shown") is True
    expect(page.locator("#query-title")).to_have_text("Upload me.png")
    assert keys(page)[0] == faces.found.samples.key(11)
    expect(page.locator("#predicted")).to_contain_text("its 10 nearest samples")
    predicted, _ = faces.found.predict(faces.found.vector(11)[0])
    assert page.locator("#query .labels button").all_text_contents() == [*predicted]
    expect(page.locator("#drop")).to_be_hidden()
    shoot(page, how)


def test_results_are_exported(context: BrowserContext, faces: Site) -> None:
    page = mapped(opened(context, f"{faces.url}?key=000007&where=Young"))
    shown = keys(page)
    page.click("#export summary")
    found: dict[str, str] = {}
    for kind in ("csv", "json"):
        with page.expect_download() as download:
            page.click(f"#results-{kind}")
        assert download.value.suggested_filename == f"results.{kind}"
        found[kind] = Path(download.value.path()).read_text()
    rows = [*csv.DictReader(StringIO(found["csv"]))]
    assert [row["key"] for row in rows] == shown and all("Young" in row["labels"] for row in rows)
    assert [hit["key"] for hit in json.loads(found["json"])["hits"]] == shown
    with page.expect_download() as download:
        page.click("#keys-json")
    young = faces.found.samples.names.index("Young")
    keys_of = json.loads(Path(download.value.path()).read_text())
    assert len(keys_of) == faces.found.samples.targets[:, young].sum()


def test_a_query_without_false_negatives_stays(context: BrowserContext, faces: Site) -> None:
    samples = faces.found.samples
    number = next(
        n for n in range(48) if faces.found.by_key(samples.key(n), 5, relation="false").instead
    )
    page = mapped(opened(context, f"{faces.url}?key={samples.key(number)}&relation=false"))
    expect(page.locator("#status")).to_contain_text("No false negative")
    expect(page.locator("#status")).to_contain_text("nearest in label space")
    expect(page.locator("#query-title")).to_have_text(f"Sample {samples.key(number)}")
    expect(page.get_by_role("alert")).to_be_hidden()
    answer = faces.found.by_key(samples.key(number), 24, relation="false")
    assert keys(page) == [hit.key for hit in answer.hits]
    page.fill("#where", "Smilin")
    page.click("text=Apply")
    expect(page.get_by_role("alert")).to_contain_text("Did you mean Smiling?")
    expect(page.locator("#query-title")).to_be_visible()  # a fault of the filter is not the query's


def test_24_results_are_above_the_fold(context: BrowserContext, tmp_path: Path) -> None:
    found = retriever(tmp_path, "faces", 60)
    with running(found) as url:
        page = mapped(opened(context, f"{url}?key=000007"))
        found_bottoms = page.locator(".grid > li").evaluate_all(
            "cards => cards.map((card) => card.getBoundingClientRect().bottom)"
        )
        assert len(found_bottoms) == 24 and max(found_bottoms) <= 1000
        marks = page.locator(".grid > li").first.locator(".differ li").all_text_contents()
        assert len(marks) == 3 and all(mark[:2] in ("+ ", "− ") for mark in marks)
        page.locator("#size").fill("200")
        width = page.locator(".grid > li").first.bounding_box()
        assert width is not None and width["width"] >= 200
        page.reload()
        mapped(page)
        expect(page.locator("#size")).to_have_value("200")
        assert page.evaluate("document.documentElement.scrollWidth") <= 1400
        page.goto("about:blank")


def test_a_part_of_a_key_and_samples_with_labels(context: BrowserContext, faces: Site) -> None:
    page = mapped(opened(context, f"{faces.url}?key=000007"))
    page.fill("#key", "47")
    expect(page.locator("#keys option")).to_have_count(1)
    page.click("text=Show")
    expect(page.locator("#query-title")).to_have_text("Sample 000047")
    page.goto(f"{faces.url}?among=Smiling+and+not+Male&where=Male+and+not+Smiling")
    keys(page)
    labels = page.locator("#query .labels button").all_text_contents()
    assert "Smiling" in labels and "Male" not in labels


def test_a_link_of_confused_classes(context: BrowserContext, frames: Site) -> None:
    """A sample of the one class, and those of the other; their names have markup and quotes."""
    names = frames.found.samples.names
    page = mapped(opened(context, PageLinks(frames.url).confused(names[0], names[1])))
    assert page.locator("#query .labels button").all_text_contents() == [names[0]]
    labels = page.locator("#hits tbody tr td:last-child").all_text_contents()
    assert labels and all(f"+ {names[1]}" in text for text in labels)
    expect(page.get_by_label(f"Only samples with {names[1]}")).to_have_attribute(
        "aria-pressed", "true"
    )


def test_another_index(context: BrowserContext, faces: Site, frames: Site) -> None:
    both: dict[str, Retriever] = {"faces": faces.found, "frames": frames.found}
    with running(both) as url:
        page = mapped(opened(context, url))
        page.select_option("#index", "frames")
        expect(page.locator("#hits table")).to_be_visible()
        mapped(page)
        assert "index=frames" in page.url
        expect(page.locator("#map")).to_have_attribute("data-colour", "classes")
        first = keys(page)[0]
        page.locator("#hits a").first.click()
        expect(page.locator("#query-title")).to_have_text(f"Sample {first}")
        assert "index=frames" in page.url
        page.goto(f"{url}?index=none")
        expect(page.get_by_role("alert")).to_contain_text(
            "No index named 'none'. The indexes are faces"
        )
        page.goto("about:blank")
