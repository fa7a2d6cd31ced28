"""Labels of an audit that are decided on a page: kept at once, gone on with, and bounded."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from heron.audit.report import audit, pictures_of
from heron.base.atomic import locked
from heron.base.decisions import DECIDED, Decision, read_decisions, write_decisions
from heron.base.errors import RetrievalError
from heron.cli.main import main
from heron.data.amend import Amended
from heron.data.reader import Reader
from heron.retrieval.embeddings import Embeddings
from heron.serve.admission import BINARY
from heron.serve.decide import Decisions
from heron.serve.server import address, listen, make_decision_server
from heron.shards.build import build
from heron.sources import make_source
from tests.retrieval import made
from tests.serve.browsing import BrowserContext, expect, opened, shoot
from tests.serve.served import MARKUP, Site, in_thread

ROWS = 80


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The audit of 80 faces whose features are noise: 200 labels are listed."""
    folder = tmp_path_factory.mktemp("decide")
    source = make_source("faces", {"train": ROWS, "test": 0, "size": 32})
    build(source, folder / "faces", progress=False)
    reader = Reader(folder / "faces")
    rows = np.arange(ROWS)
    x = np.random.default_rng(0).normal(size=(ROWS, 8))
    embeddings = made.embeddings(
        folder / "e", {"hidden": x}, reader.targets(rows), reader.manifest.labels.names,
        "multi_label", reader.sample_keys(rows), data=str(folder / "faces"),
    )  # fmt: skip
    audit(embeddings, folder / "audit")
    return folder


@contextmanager
def serving(folder: Path) -> Iterator[Site]:
    listening = listen("127.0.0.1", 0)
    server = make_decision_server(Decisions(folder), *pictures_of(folder), listening)
    with in_thread(server, listening):
        yield Site(address(listening), cast(Any, None))


def decide(site: Site, line: int, choice: str, status: int = 200, kind: str = BINARY) -> Any:
    path = f"/api/decide/{line}?choice={choice}"
    return site.json(path, status, method="POST", Content_Type=kind)


def fresh(audited: Path, name: str) -> Path:
    """A copy of the audit without decisions."""
    folder = audited / name
    folder.mkdir()
    for file in ("labels.csv", "audit.json"):
        (folder / file).write_bytes((audited / "audit" / file).read_bytes())
    return folder


def test_decisions_are_written_at_once_and_survive_a_restart(audited: Path) -> None:
    folder = fresh(audited, "restart")
    with serving(folder) as site:
        answer = site.json("/api/lines")
        assert len(answer["lines"]) == 200 and answer["views"] == ["image"] and not answer["why"]
        for line, choice in ((0, "wrong"), (3, "right"), (1, "skip"), (3, "")):
            decide(site, line, choice)
        kept = read_decisions(folder / DECIDED, "", RetrievalError)
        assert [line.decision for line in kept] == ["wrong", "skip"]
        response, data = site.ask("/api/picture/0?view=image")
        assert response.getheader("content-type") == "image/jpeg" and len(data) > 500
    with serving(folder) as site:
        lines = [Decision(*line) for line in site.json("/api/lines")["lines"]]
        assert [lines[n].decision for n in (0, 1, 3)] == ["wrong", "skip", ""]
    options = {"data": str(audited / "faces"), "decisions": folder / DECIDED}
    assert Amended.model_validate(options).amendment.counts == {
        "changed": 1,
        "removed": 0,
        "left_out": 0,
    }


def test_decisions_on_labels_that_are_not_listed_any_more_stay(audited: Path) -> None:
    folder = fresh(audited, "others")
    other = Decision("gone", "Smiling", "0", "1", "", "wrong")
    write_decisions(folder / DECIDED, [other])
    decisions = Decisions(folder)
    assert decisions.decide(5, "unknown") == 1
    assert read_decisions(folder / DECIDED, "", RetrievalError)[0] == other
    again = Decisions(folder)
    assert again.lines[5].decision == "unknown" and again.decide(5, "") == 0


def test_decisions_are_on_what_a_label_was_then(audited: Path) -> None:
    """A file of an audit before the data changed decided labels the other way."""
    folder = fresh(audited, "turned")
    decisions = Decisions(folder)
    decisions.decide(0, "wrong")
    line = decisions.lines[0]
    text = (folder / "labels.csv").read_text()
    old = f"{line.key},{line.label},{line.given},{line.likely},"
    assert old in text
    (folder / "labels.csv").write_text(
        text.replace(old, f"{line.key},{line.label},{line.likely},{line.given},")
    )
    with pytest.raises(RetrievalError, match=r"was changed meanwhile; stop heron serve and start"):
        decisions.decide(1, "right")
    again = Decisions(folder)
    assert again.lines[0].decision == "" and again.decide(1, "right") == 1
    assert [kept.decision for kept in read_decisions(folder / DECIDED, "", RetrievalError)] == [
        "wrong", "right",
    ]  # fmt: skip
    again.decide(0, "right")  # replaces the one on the label that is no more
    assert [kept.decision for kept in read_decisions(folder / DECIDED, "", RetrievalError)] == [
        "right", "right",
    ]  # fmt: skip


def test_edits_by_hand_are_never_overwritten(audited: Path) -> None:
    folder = fresh(audited, "edited")
    decisions = Decisions(folder)
    decisions.decide(0, "right")
    text = (folder / DECIDED).read_text().replace("right", "drop")
    (folder / DECIDED).write_text(text)
    with pytest.raises(RetrievalError, match="was changed meanwhile"):
        decisions.decide(1, "right")
    assert (folder / DECIDED).read_text() == text


def test_what_the_server_refuses(audited: Path) -> None:
    folder = fresh(audited, "refused")
    with serving(folder) as site:
        # Another origin's page could send these without a preflight.
        for kind in ("text/plain", "application/x-www-form-urlencoded"):
            decide(site, 0, "wrong", 415, kind)
        decide(site, 0, "perhaps", 400)
        for line in (-1, 200, 10**9):
            decide(site, line, "wrong", 404)
            site.error(f"/api/picture/{line}", 404)
        site.error("/api/picture/0?view=none")
        site.error("/map.js", 404)  # a file of the other page
    assert not (folder / DECIDED).exists()


def test_the_verb(
    audited: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = fresh(audited, "verb")
    monkeypatch.setattr("uvicorn.Server.run", lambda *_, **__: None)
    assert main(["serve", str(folder), "--port", "0"]) == 0
    assert f"{folder}: 200 labels at http://127.0.0.1:" in capsys.readouterr().out
    assert main(["serve", str(folder), str(folder)]) == 2
    assert "an audit is served alone, without --export; pass one folder" in said(capsys)
    with locked(folder):
        assert main(["serve", str(folder), "--port", "0"]) == 1
    assert "verb" in said(capsys)
    (folder / "labels.csv").write_text("key\n")
    assert main(["serve", str(folder), "--port", "0"]) == 1
    assert "labels.csv has no column 'decision'" in said(capsys)
    (folder / "labels.csv").unlink()
    assert main(["serve", str(folder), "--port", "0"]) == 1
    assert "its audit had no labels to judge; open its report.html" in said(capsys)


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().err.split())


def test_pictures_that_are_not_there_are_said_and_none_is_fetched(audited: Path) -> None:
    folder = fresh(audited, "moved")
    tree = json.loads((folder / "audit.json").read_text())
    for named, why in (
        ("s3://bucket/e", "is behind a URL; to read it, pass it with --embeddings"),
        (str(audited / "none"), "there are no pictures: cannot read the manifest"),
        (3, "there are no pictures"),
    ):
        (folder / "audit.json").write_text(json.dumps(tree | {"embeddings": named}))
        shown, text = pictures_of(folder)
        assert shown is None and why in text
    shown, text = pictures_of(folder, str(audited / "e"))
    assert shown is not None and not text
    with pytest.raises(RetrievalError):
        pictures_of(folder, str(audited / "none"))
    with serving(folder) as site:
        assert site.json("/api/lines")["why"].startswith("there are no pictures")
        site.error("/api/picture/0", 404)
    assert len(Embeddings.open(audited / "e")) == ROWS


def test_the_page_by_its_keys(audited: Path, context: BrowserContext) -> None:
    folder = fresh(audited, "keys")
    text = (folder / "labels.csv").read_text()
    label = text.splitlines()[1].split(",")[1]
    (folder / "labels.csv").write_text(text.replace(f",{label},", f",{MARKUP},", 1))
    with serving(folder) as site:
        page = opened(context, site.url)
        expect(page.locator("#question")).to_contain_text(MARKUP)  # as text
        expect(page.locator("#progress")).to_have_text("1 of 200 labels, 0 decided")
        expect(page.locator("#pictures img")).to_have_count(1)
        page.keyboard.press("w")
        expect(page.locator("#progress")).to_have_text("2 of 200 labels, 1 decided")
        page.keyboard.press("s")
        expect(page.locator("#progress")).to_have_text("3 of 200 labels, 1 decided")
        page.keyboard.press("ArrowLeft")
        expect(page.locator("[data-choice=skip]")).to_have_attribute("aria-pressed", "true")
        page.click("[data-choice=right]")
        expect(page.locator("#progress")).to_have_text("3 of 200 labels, 2 decided")
        shoot(page, "decide")
        for _ in range(2):
            page.keyboard.press("ArrowLeft")
        page.evaluate(
            """for (const key of "rwudrw")
              document.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }))"""
        )
        expect(page.locator("#progress")).to_have_text("7 of 200 labels, 6 decided")
        for _ in range(100):  # until the last is written
            if len(read_decisions(folder / DECIDED, "", RetrievalError)) == 6:
                break
            page.wait_for_timeout(50)
        kept = read_decisions(folder / DECIDED, "", RetrievalError)
        assert [line.decision for line in kept] == [
            "right",
            "wrong",
            "unknown",
            "drop",
            "right",
            "wrong",
        ]
        for _ in range(6):
            page.keyboard.press("ArrowLeft")
        page.keyboard.press("w")
        page.keyboard.press("r")
        expect(page.locator("#progress")).to_have_text("3 of 200 labels, 6 decided")
        page.reload()
        expect(page.locator("#progress")).to_contain_text("of 200 labels, 6 decided")
        page.select_option("#label", MARKUP)
        expect(page.locator("#progress")).to_have_text("1 of 1 label, 1 decided")
        refusal = {"error": "the disk is full"}
        page.route("**/api/decide/*", lambda route: route.fulfill(status=400, json=refusal))
        page.keyboard.press("u")
        expect(page.locator("#fault")).to_have_text("the disk is full")
        expect(page.locator("[data-choice=wrong]")).to_have_attribute("aria-pressed", "true")
