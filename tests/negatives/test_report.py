"""The report on negatives: its page, its numbers, its table of pairs, and the verb."""

import html
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pyarrow.parquet as pq
import pytest

from heron.base.errors import RetrievalError, ShardError
from heron.cli.arguments import Verb, parse
from heron.cli.reports import negatives
from heron.evaluation.negatives import RELATIONS
from heron.negatives.measure import MIN_EXPECTED
from heron.negatives.neighbours import NearPairs, Question, find_neighbours
from heron.negatives.report import percent, report
from heron.negatives.repulsion import Temperatures, near_weights
from heron.report.charts import Chart
from heron.report.pages import PageLinks, figure, plain_json, render
from heron.retrieval.build import build_index
from heron.retrieval.embeddings import Embeddings
from heron.shards.build import build
from heron.sources import make_source
from tests.axe import violations
from tests.negatives.loops import drawn
from tests.negatives.test_planted import clusters, labelled_signs
from tests.retrieval import made


def page_of(e: Embeddings, question: Question, out: Path) -> str:
    report(e, question, out)
    return read(out / "report.html")


def read(page: Path) -> str:
    """A page in one line, where its source breaks one says nothing; without Plotly and scripts."""
    text = page.read_text()
    text = re.sub(r"<script(?! type=.application/json)[^>]*>.*?</script>", "", text, flags=re.S)
    return " ".join(text.split())


def charts(page: Path) -> list[dict[str, Any]]:
    """What the page hands to Plotly, chart by chart."""
    found = re.findall(r'<script type="application/json">(.*?)</script>', page.read_text())
    return [json.loads(text) for text in found]


def verb(*words: str | Path | int) -> None:
    parse("heron negatives", Verb(negatives), [str(word) for word in words])()


CHROMIUM = shutil.which("chromium")
Written = tuple[NearPairs, dict[str, Any], Path]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tmp_path_factory.mktemp("report")
    e = drawn(folder / "e")
    question = Question(k=10, anchors=0)
    numbers = report(e, question, folder / "out")
    return find_neighbours(e, question), numbers, folder / "out"


def test_the_page_opens_from_disk_and_says_what_was_found(written: Written) -> None:
    near, numbers, out = written
    text = read(out / "report.html")
    assert sorted(p.name for p in out.iterdir()) == [
        "negatives.json", "pairs.parquet", "report.html",
    ]  # fmt: skip
    assert text.startswith("<!doctype html>") and text.count('class="plot"') == 5
    assert not re.findall(r'src="(?!data:)|<(?!a )\w+ [^>]*href=', text)  # nothing is fetched
    there = "http://127.0.0.1:8000/"  # of heron serve
    assert text.count("http") == text.count(there) > 50
    assert "<h1>Negatives of e</h1>" in text and "nan" not in text.lower().split("base64")[0]
    rate = float(numbers["false_negatives"]["close"]["near"].value[near.ks.index(10)])
    assert f"Of the 10 nearest neighbours {percent(rate)}" in text
    assert "samples without labels are excluded, also as" in text
    assert "pictures: " in text and "pass it with --data" in text
    assert "Does HeroCon's weight g fall" in text and "Assumption 1" in text
    assert text.count('class="pair"') > 12


@pytest.mark.parametrize(("labels", "written_out"), [(200, True), (201, False)])
def test_matrices_of_labels_are_written_up_to_200(
    tmp_path: Path, labels: int, written_out: bool
) -> None:
    random = np.random.default_rng(0)
    targets = (random.random((30, labels)) < 0.3).astype(np.uint8)
    vectors: dict[Any, Any] = {"hidden": random.normal(size=(30, 4))}
    e = made.embeddings(tmp_path / "e", vectors, targets, [f"l{n}" for n in range(labels)])
    report(e, Question(k=3, anchors=0), tmp_path / "out")
    confusion = json.loads((tmp_path / "out" / "negatives.json").read_text())["confusion"]
    assert [confusion[name] is not None for name in ("swapped", "expected")] == [written_out] * 2
    (cells,) = [
        one["traces"][0] for one in charts(tmp_path / "out" / "report.html") if one["links"]
    ]
    assert len(cells["x"]) == 40  # the chart has fewer


def test_pairs_and_confused_labels_open_the_page(written: Written, tmp_path: Path) -> None:
    near, numbers, out = written
    text = read(out / "report.html")
    row, column = near.examples("hard")[0]
    samples = near.embeddings.samples
    for number in (near.pairs.anchors[row], near.numbers[row, column]):
        key = samples.key(int(number))
        assert f'<a href="http://127.0.0.1:8000/?key={key}&amp;relation=hard">{key}</a>' in text
    links = PageLinks("https://host/a?b=c")
    assert parse_qs(urlsplit(links.confused("a b", "c")).query) == {
        "b": ["c"],
        "among": ["'a b' and not c"],
        "where": ["c and not 'a b'"],
    }
    assert links.confused("c", "c").endswith("?b=c&among=c&where=c")
    swap = numbers["confusion"]["worst"][0]
    assert html.escape(PageLinks().confused(swap["anchor"], swap["neighbour"])) in text
    with pytest.raises(RetrievalError, match="must be the address .*, got 'javascript:x'"):
        report(near.embeddings, near.question, tmp_path / "no", address="javascript:x")
    with pytest.raises(
        RetrievalError, match=r"--page must be .* such as http.*, got 'http://\[::1/'"
    ):
        PageLinks("http://[::1/")
    # A cell has its link: those without enough pairs are grey, and have none.
    confusion = charts(out / "report.html")[2]
    (heat,), names = confusion["traces"], samples.names
    counts, chance = (np.asarray(numbers["confusion"][n], float) for n in ("swapped", "expected"))
    assert heat["x"] == heat["y"] == names and (chance >= MIN_EXPECTED).sum() > 2
    for i, j in np.ndindex(*chance.shape):
        if chance[i, j] >= MIN_EXPECTED:
            assert heat["z"][i][j] == pytest.approx(counts[i, j] / chance[i, j], abs=1e-4)
            assert confusion["links"][i][j] == PageLinks().confused(names[i], names[j])
        else:
            assert heat["z"][i][j] is None and confusion["links"][i][j] == ""


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium (apt-get install chromium)")
def test_in_a_browser_a_cell_opens_the_page_and_dark_is_dark(written: Written) -> None:
    from playwright.sync_api import sync_playwright

    _, _, out = written
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        context = browser.new_context(viewport={"width": 390, "height": 900})
        context.route("http://**", lambda route: route.abort())
        asked, faults = list[str](), list[str]()
        context.on("request", lambda request: asked.append(request.url))
        page = context.new_page()
        page.on("pageerror", lambda fault: faults.append(str(fault)))
        page.goto((out / "report.html").as_uri())
        page.wait_for_selector("html[data-drawn]")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert page.locator(".chart .main-svg").count() >= 5 and not faults
        assert [url for url in asked if url.startswith("http")] == []
        assert violations(page) == []
        numbers = json.loads((out / "negatives.json").read_text())
        rates = numbers["false_negatives"]
        share = rates["close"]["near"]["value"][rates["k"].index(numbers["question"]["k"])]
        said = page.locator(".note").inner_text()
        assert f"{100 * share:.3g} % of the" in said and ("Do not mine" in said) == (share > 0.5)
        ground = "getComputedStyle(document.body).backgroundColor"
        assert page.evaluate(ground) == "rgb(255, 255, 255)"
        page.emulate_media(color_scheme="dark")
        assert page.evaluate(ground) == "rgb(18, 22, 29)"
        heat = page.locator(".chart", has_text="Which labels are confused")
        heat.scroll_into_view_if_needed()
        cells = heat.locator(".heatmaplayer image").bounding_box()
        links = charts(out / "report.html")[2]["links"]
        row, column = next((i, j) for i in range(5) for j in range(5) if links[i][j])
        assert cells is not None
        with context.expect_page() as opened:
            page.mouse.click(
                cells["x"] + (column + 0.5) * cells["width"] / 5,
                cells["y"] + (row + 0.5) * cells["height"] / 5,
            )
        opened.value.close()
        assert [url for url in asked if url.startswith("http")] == [links[row][column]]
        browser.close()


def test_the_numbers_are_json(written: Written) -> None:
    near, measured, out = written
    text = (out / "negatives.json").read_text()
    numbers = json.loads(text)
    assert "NaN" not in text and "Infinity" not in text
    assert numbers["false_negatives"]["same"]["near"]["value"] == pytest.approx(
        measured["false_negatives"]["same"]["near"].value.tolist()
    )
    assert numbers["neighbours"] == "exact" and numbers["recall"] is None
    assert numbers["question"] == {"layer": "hidden", "k": 10, "anchors": 0, "seed": 0}
    assert numbers["confusion"]["swapped"] == measured["confusion"]["swapped"].tolist()
    assert numbers["thresholds"]["far"] == np.median(near.hard) / 5
    assert set(numbers["repulsion"]) == set(numbers["assumption_1"]) == {"same", "close"}
    assert len(numbers["left_out"]) == 3


def test_pairs_are_a_table(written: Written) -> None:
    near, _, out = written
    rows = pq.read_table(out / "pairs.parquet").to_pylist()
    assert len(rows) == near.numbers.size == 39 * 20
    g, key = near_weights(near, Temperatures()), near.embeddings.samples.key
    assert g is not None
    for place in (0, 19, 20, 779):
        row, column = divmod(place, 20)
        assert rows[place] == {
            "anchor": key(int(near.pairs.anchors[row])),
            "neighbour": key(int(near.numbers[row, column])),
            "rank": column + 1,
            "similarity": float(near.cosine[row, column]),
            "label_distance": pytest.approx(near.difference[row, column] / 5),
            "g": float(g[row, column]),
            "relation": RELATIONS[near.relation[row, column]],
        }


def test_classes_without_projections(tmp_path: Path) -> None:
    text = page_of(clusters(tmp_path / "e"), Question(k=5, anchors=50), tmp_path / "out")
    assert "Of the 5 nearest neighbours 100 % (100 to 100 %) have exactly" in text
    assert "There is no hard negative among the nearest." in text
    assert "None among the nearest." in text  # on the sheet
    assert "weight g fall" not in text and "another class" in text
    assert pq.read_table(tmp_path / "out/pairs.parquet")["g"].null_count == 50 * 50


@pytest.mark.parametrize(
    ("weight", "says"),
    [
        ("z", "Yes. Spearman"),
        ("-z", "No: it rises. Spearman"),
        ("constant", "g is the same for all pairs"),
    ],
)
def test_what_is_said_of_g(weight: str, says: str, tmp_path: Path) -> None:
    e = labelled_signs(tmp_path / "e", weight)
    text = page_of(e, Question("projection", 5, 30), tmp_path / "out")
    assert says in text
    verdict = {"z": "less than InfoNCE", "-z": "more than InfoNCE"}
    for sign, words in verdict.items():
        assert (words in text) == (sign == weight)
    numbers = json.loads((tmp_path / "out/negatives.json").read_text())
    assert (numbers["weight"]["label_rank"]["value"] is None) == (weight == "constant")


def test_collapsed_embeddings_are_told(tmp_path: Path) -> None:
    x = np.ones((30, 3)) + 1e-4 * np.random.default_rng(0).normal(size=(30, 3))
    targets = np.eye(3, dtype=np.uint8)[np.arange(30) % 3]
    e = made.embeddings(tmp_path / "e", {"hidden": x}, targets, ["a", "b", "<c>"], "multi_class")
    text = page_of(e, Question(k=2, anchors=0), tmp_path / "out")
    assert "the embeddings have collapsed (uniformity is" in text
    assert "&lt;c&gt;" in text and "<c>" not in text


@pytest.fixture(scope="module")
def faces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faces")
    build(
        make_source("faces", {"train": 24, "test": 6, "size": 32}), folder / "data", progress=False
    )
    return folder


def of_faces(folder: Path, name: str, **manifest: Any) -> Embeddings:
    from heron.data.reader import Reader
    from heron.retrieval.embedding_model import read_samples

    reader = Reader(folder / "data")
    s = read_samples(reader, np.arange(30))
    hidden = np.random.default_rng(0).normal(size=(30, 8))
    keys = [s.key(i) for i in range(30)]
    return made.embeddings(
        folder / name, {"hidden": hidden}, s.targets, s.names, keys=keys, **manifest
    )


def test_sheets_show_pictures_of_the_shards(
    faces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    e = of_faces(faces, "named", data=str(faces / "data"))
    build_index(e, tmp_path / "index", kind="flat", progress=False)
    verb(e.folder, "--out", tmp_path / "out", "--k", 5, "--index", tmp_path / "index")
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("30 anchors: ") and said[-1] == f"report: {tmp_path}/out/report.html"
    text = read(tmp_path / "out/report.html")
    pairs = text.count('class="pair"')
    assert pairs and text.count('<img alt="0000') == 2 * pairs
    assert f"from the index {tmp_path / 'index'} (flat), recall" in text


def test_data_that_was_moved(faces: Path, tmp_path: Path) -> None:
    e = of_faces(faces, "moved", data="gone/faces")
    verb(e.folder, "--out", tmp_path / "a", "--k", 3, "--data", faces / "data")
    assert '<img alt="0000' in (tmp_path / "a/report.html").read_text()
    verb(e.folder, "--out", tmp_path / "b", "--k", 3)
    assert '<img alt="0000' not in (tmp_path / "b/report.html").read_text()
    with pytest.raises(ShardError):
        verb(e.folder, "--out", tmp_path / "c", "--k", 3, "--data", tmp_path)
    other = drawn(tmp_path / "other")
    with pytest.raises(RetrievalError, match="but 's000' in the index"):
        verb(other.folder, "--out", tmp_path / "c", "--k", 3, "--data", faces / "data")


def test_values_as_json_and_words() -> None:
    value = {"a": np.array([1.0, math.nan]), 2: (np.float32(0.5), math.inf), "q": Question()}
    assert json.loads(plain_json(value)) == {
        "a": [1.0, None],
        "2": [0.5, None],
        "q": {"layer": "hidden", "k": 10, "anchors": 2000, "seed": 0},
    }
    shares = (0.0, 1.0, 0.123456, 0.0000061, math.nan)
    assert [percent(s) for s in shares] == ["0 %", "100 %", "12.3 %", "0.00061 %", "–"]


def test_a_page_escapes_what_it_shows() -> None:
    text = render("base.html", name="a<b")
    assert "<title>a&lt;b</title>" in text and "<h1>a&lt;b</h1>" in text
    assert "<figcaption>&quot;</figcaption>" in figure(Chart('"', []))
