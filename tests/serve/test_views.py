"""Samples of several views: all of them are shown, and each has a place for a file."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from heron.base.errors import RetrievalError
from heron.retrieval.embed import embed
from heron.serve.routes import files_of
from heron.shards.build import build
from heron.sources import make_source
from tests.retrieval import made
from tests.retrieval.test_some_views import file, index, made_of, stored
from tests.serve.browsing import BrowserContext, expect, keys, opened, shoot
from tests.serve.served import Site, running

CNN = {"kind": "cnn", "channels": [4, 8], "widths": None, "dropout": None}
MLP = {"kind": "mlp", "widths": [8], "dropout": 0.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two cameras and a sensor of 40 samples."""
    draw = np.random.default_rng(0)
    coarse = draw.integers(0, 256, (2, 40, 4, 3, 3), np.uint8)
    a, b = coarse.repeat(8, 2).repeat(8, 3)
    rows = {"a": a, "b": b, "c": draw.normal(size=(40, 5)).astype(np.float32)}
    model = {"encoder": CNN, "encoders": {"c": MLP}}
    return made_of(tmp_path_factory.mktemp("views"), rows, np.arange(40) % 2, model)


@pytest.fixture(scope="module")
def site(folder: Path) -> Iterator[Site]:
    found = index(folder, "index")
    with running(found) as url:
        yield Site(url, found)


def png(folder: Path, number: int, view: str, name: str) -> Any:
    return {"name": name, "mimeType": "image/png", "buffer": file(stored(folder, number)[view])}


def test_any_of_the_views_may_be_uploaded(site: Site, folder: Path) -> None:
    files = {view: file(row) for view, row in stored(folder, 9).items()}
    for given in ("a", "b", "c", "cb", "abc"):
        body = b"".join(files[view] for view in given)
        query = "&".join(f"view={view}&size={len(files[view])}" for view in given)
        found = site.upload(body, query=f"?k=3&{query}")
        assert site.found.samples.rows[found["hits"][0]["number"]] == 9
        assert found["hits"][0]["score"] == pytest.approx(1, abs=1e-5)
        assert bool(found["query"]["compares"]) == (given != "abc")
    found = site.upload(files["c"], query="?k=3")  # only one view reads it
    assert found["query"]["compares"] == "c with the same view of each sample; a, b are not given"
    told = site.upload(files["a"], 400)["error"]
    assert told.startswith("the file fits several views (a, b); say which")
    told = site.upload(files["a"], 400, f"?view=d&size={len(files['a'])}")["error"]
    assert told == "no view named 'd'; pass one or more of a, b, c"
    for query in ("?view=a", "?view=a&size=1", f"?size={len(files['a'])}"):
        assert "must have a `view` and a `size`" in site.upload(files["a"], 400, query)["error"]
    told = site.upload(b"x", 400, "?view=a&size=-1")["error"]
    assert told.startswith("size must ") and told.endswith(", got '-1'")


def test_a_body_is_cut_as_it_is_said() -> None:
    assert files_of(b"abcde", ["x", "y"], [2, 3]) == {"x": b"ab", "y": b"cde"}
    assert files_of(b"abc", [], []) == b"abc"
    with pytest.raises(RetrievalError, match="must have .* got 3 bytes for x, x, of 1, 2 bytes"):
        files_of(b"abc", ["x", "x"], [1, 2])


def test_every_view_of_a_sample_is_shown(context: BrowserContext, site: Site, folder: Path) -> None:
    about = site.json("/api/about")
    assert about["picture_views"] == ["a", "b"]
    assert about["inputs"] == [
        {"name": "a", "kind": "image"},
        {"name": "b", "kind": "image"},
        {"name": "c", "kind": "vector"},
    ]
    key = site.found.samples.key(4)
    page = opened(context, f"{site.url}?key={key}")
    assert len(keys(page)) == 24
    assert page.locator("#query figcaption").all_text_contents() == ["a", "b"]
    assert page.locator("#hits li").first.locator("img").count() == 2
    for number in range(2):
        image = page.locator("#query img").nth(number)
        expect(image).to_have_js_property("naturalWidth", 24)
        expect(page.locator("#hits img").nth(number)).to_have_js_property("naturalWidth", 24)
    shoot(page, "views")
    assert "use one of a, b" in site.error("/api/picture/4?view=c")


def test_each_view_has_a_place_for_a_file(
    context: BrowserContext, site: Site, folder: Path
) -> None:
    page = opened(context, site.url)
    keys(page)
    labels = page.locator("#zones label").all_text_contents()
    assert labels == ["a", "b", "c"]
    wanted = site.found.samples.key(int(np.flatnonzero(site.found.samples.rows == 17)[0]))
    page.get_by_label("b", exact=True).set_input_files(png(folder, 17, "b", "face.png"))
    expect(page.locator("#query-title")).to_have_text("Upload b: face.png")
    assert keys(page)[0] == wanted
    expect(page.locator("#compares")).to_have_text(
        "Compared: b with the same view of each sample; a, c are not given."
    )
    expect(page.get_by_role("button", name="Search without b")).to_be_hidden()
    page.get_by_label("a", exact=True).set_input_files(png(folder, 17, "a", "other.png"))
    expect(page.locator("#query-title")).to_have_text("Upload b: face.png, a: other.png")
    assert page.locator("#query figcaption").all_text_contents() == ["b", "a"]
    expect(page.locator("#compares")).to_contain_text("c is not given")
    shoot(page, "zones")
    page.get_by_role("button", name="Search without b").click()
    expect(page.locator("#query-title")).to_have_text("Upload a: other.png")
    assert keys(page)[0] == wanted
    page.go_back()
    expect(page.locator("#query-title")).to_have_text("Upload b: face.png, a: other.png")
    row = file(stored(folder, 21)["c"])
    drop = """([zone, bytes, name]) => {
      const transfer = new DataTransfer();
      transfer.items.add(new File([new Uint8Array(bytes)], name));
      for (const type of ["dragover", "drop"]) {
        document.querySelector(zone).dispatchEvent(
          new DragEvent(type, { dataTransfer: transfer, bubbles: true, cancelable: true }));
      }
    }"""
    page.evaluate(drop, ["[data-view=c]", [*row], "row.npy"])
    expect(page.locator("#query-title")).to_contain_text("c: row.npy")
    expect(page.locator("#compares")).to_have_count(0)  # all three are given
    page.evaluate(drop, ["#hits", [*row], "anywhere.npy"])  # of the view that reads it
    expect(page.locator("#query-title")).to_have_text("Upload c: anywhere.npy")
    wanted = site.found.samples.key(int(np.flatnonzero(site.found.samples.rows == 21)[0]))
    assert keys(page)[0] == wanted


def test_a_filter_with_a_typo_keeps_the_results(context: BrowserContext, site: Site) -> None:
    page = opened(context, f"{site.url}?key={site.found.samples.key(4)}")
    before = keys(page)
    page.fill("#where", "no such label")
    page.click("text=Apply")
    expect(page.get_by_role("alert")).to_be_visible()
    assert keys(page) == before
    expect(page.locator("#query")).to_be_visible()
    expect(page.locator("#status")).to_have_text("These are the previous results.")
    page.click("text=Clear")
    expect(page.get_by_role("alert")).to_be_hidden()
    expect(page.locator("#status")).to_contain_text("24 neighbours")
    page.fill("#key", "no such key")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_be_visible()
    expect(page.locator("#hits")).to_be_empty()


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Sentences and numbers of 40 samples, without a picture."""
    folder, draw = tmp_path_factory.mktemp("words"), np.random.default_rng(0)
    sentences = [f"{'<b>red</b>' if n % 2 else 'blue'} thing {n}" for n in range(40)]
    columns = {
        "words": sentences,
        "v": draw.normal(size=(40, 5)).tolist(),
        "kind": [n % 2 for n in range(40)],
    }
    pq.write_table(pa.table(columns), folder / "rows.parquet")
    options = {
        "data": [folder / "rows.parquet"],
        "text": ["words"],
        "vector": ["v"],
        "label": ["kind"],
    }
    build(make_source("parquet", options), folder / "data", progress=False)
    bert = {"model_type": "bert", "hidden_size": 8, "num_hidden_layers": 1}
    bert |= {"num_attention_heads": 2, "intermediate_size": 16}
    encoders = {"words": {"kind": "transformers", "config": bert}, "v": MLP}
    data = {"views": [{"stored": "words", "tokens": 24}, {"stored": "v"}], "standardise": False}
    run = made.run(folder / "run", folder / "data", {"data": data, "model": {"encoders": encoders}})
    embed(run, folder / "embeddings", progress=False)
    found = index(folder, "index")
    with running(found) as url:
        yield Site(url, found)


def test_texts_and_numbers_of_samples_are_shown(
    context: BrowserContext, site: Site, words: Site
) -> None:
    found = site.json(f"/api/neighbours?key={site.found.samples.key(4)}&k=3")
    numbers = [4, *(hit["number"] for hit in found["hits"])]
    assert found["values"].keys() == {str(n) for n in numbers}
    assert [*found["values"]["4"]] == ["c"] and len(found["values"]["4"]["c"]) == 5
    page = opened(context, f"{site.url}?key={site.found.samples.key(4)}")
    keys(page)
    expect(page.locator("#query .numbers")).to_have_count(1)
    expect(page.locator("#hits li").first.locator(".numbers")).to_have_attribute(
        "title", re.compile("^c: ")
    )
    for width in (1400, 390):
        page.set_viewport_size({"width": width, "height": 1000})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        shoot(page, f"values-{width}")
    page = opened(context, f"{words.url}?key={words.found.samples.key(4)}")
    keys(page)
    assert (
        page.locator("#query .words").text_content()
        == words.json(f"/api/neighbours?key={words.found.samples.key(4)}")["values"]["4"]["words"]
    )
    expect(page.locator("#hits tr .words")).to_have_count(24)
    page.get_by_label("Words of words").fill("blue thing 6")
    page.keyboard.press("Enter")
    expect(page.locator("#query-title")).to_have_text("Upload words: “blue thing 6”")
    row = int(words.found.samples.rows[words.found.samples.find(keys(page)[0])])
    assert row == 6
    expect(page.locator("#compares")).to_have_text(
        "Compared: words with the same view of each sample; v is not given."
    )
    for width in (1400, 390):
        page.set_viewport_size({"width": width, "height": 1000})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        shoot(page, f"words-{width}")
