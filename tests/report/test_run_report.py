"""The report of a run: what it shows, where it draws a map, and by whose clock."""

import json
import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from sklearn.metrics import f1_score, roc_auc_score

from heron.api.job import pretrain
from heron.data.reader import Reader
from heron.distributed import collectives
from heron.evaluation.evaluator import Predictions
from heron.evaluation.metrics import label_f1
from heron.report import charts
from heron.report.charts import MAX_POINTS, confusion, curves, label_map
from heron.report.pages import PageLinks
from heron.report.run_report import _labels, confused_classes, nearest_rows
from heron.training import tracking
from heron.training.tracking import LONG_S, wants_map
from tests import ranks
from tests.axe import violations
from tests.evaluation.known import NAMES, write
from tests.experiments import frames
from tests.training.test_run_baselines import small

CHROMIUM = shutil.which("chromium")


@pytest.mark.parametrize(
    ("asked", "seconds", "drawn"),
    [
        ("auto", LONG_S, True),
        ("auto", LONG_S - 1, False),
        ("always", 0.0, True),
        ("never", LONG_S, False),
    ],
)
def test_a_map_is_drawn_where_it_is_asked_for_or_the_run_is_long(
    asked: Literal["auto", "always", "never"], seconds: float, drawn: bool
) -> None:
    assert wants_map(asked, seconds) == drawn


def drawn(folder: Path) -> bool:
    return 'id="map"' in (folder / "run" / "report.html").read_text()


def alternately_long(folder: str) -> None:
    """A run whose clocks differ: it is long on rank 0 alone."""
    tracking.LONG_S = -math.inf if collectives.rank() == 0 else math.inf
    pretrain(frames(Path(folder), train={"steps": 1}))


def test_the_main_process_decides_about_the_map(tmp_path: Path) -> None:
    ranks.run(2, alternately_long, str(tmp_path))
    assert drawn(tmp_path)


def test_a_short_run_has_no_map(tmp_path: Path) -> None:
    pretrain(frames(tmp_path, train={"steps": 1}))
    assert not drawn(tmp_path)


def test_curves_are_means_of_so_many_steps_that_few_points_are_left() -> None:
    rows = [{"step": t, "loss": float(t), "lr": 0.1} for t in range(4 * MAX_POINTS)]
    rows += [{"step": 3, "test/f1_weighted": 0.5}]
    found, stride = curves(rows)
    assert stride == 4
    by_title = {chart.title: chart.traces for chart in found}
    assert by_title["Objective"][0]["y"][:2] == [1.5, 5.5]
    assert len(by_title["Objective"][0]["x"]) == MAX_POINTS
    assert by_title["F1, weighted (monitoring: test rows)"][0]["y"] == [0.5]


def test_curves_are_of_validation_rows_where_there_are_some() -> None:
    """The one score of test rows, at the end, is no curve, and no monitoring."""
    rows = [{"step": step, "validation/auc_macro": 0.5} for step in (1, 2)]
    found, _ = curves([*rows, {"step": 2, "test/auc_macro": 0.4}])
    assert [chart.title for chart in found] == ["AUC, macro (validation rows)"]


def test_steps_of_long_runs_keep_their_digits() -> None:
    rows = [{"step": step, "loss": 1.0} for step in (1234567, 1234568)]
    assert curves(rows)[0][0].traces[0]["x"] == [1234567, 1234568]


def test_a_short_curve_alone_has_markers() -> None:
    short = {"alignment": 1.0}
    rows = [
        {"step": n, "loss": 1.0, "uniformity": 1.0} | (short if n < 3 else {}) for n in range(40)
    ]
    modes = {line["name"]: line["mode"] for one in curves(rows)[0] for line in one.traces}
    assert (modes["alignment"], modes["uniformity"]) == ("lines+markers", "lines")


def test_a_map_of_features_that_are_all_the_same_is_one_point() -> None:
    keys, y = [str(n) for n in range(6)], np.zeros((6, 2), np.float32)
    found = label_map(np.full((6, 4), 0.3, np.float32), keys, y, ["a", "b"], [0, 1])
    assert found["x"] == found["y"] == [0.0] * 6
    near = np.full((6, 4), 1e-30, np.float32) * np.arange(6, dtype=np.float32)[:, None]
    assert label_map(near, keys, y, ["a", "b"], [0, 1])["x"] == [0.0] * 6
    column = label_map(np.arange(6, dtype=np.float32)[:, None], keys, y, ["a", "b"], [0, 1])
    assert len(set(zip(column["x"], column["y"], strict=True))) == 6


def test_confusion_counts_rows_of_the_true_class() -> None:
    (heat,) = confusion(np.array([[2, 1], [0, 1]]), ["a", "b"], [["/", "/"], ["", "/"]]).traces
    assert heat["customdata"] == [[2, 1], [0, 1]]
    assert heat["z"] == [[0.6667, 0.3333], [0.0, 1.0]]


def test_confused_classes_open_the_page_of_an_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As links of the cells, and of a list that needs no script; cells without a row have none."""
    pretrain(frames(tmp_path, train={"steps": 1}))
    reader = Reader(tmp_path / "frames")
    names = reader.manifest.labels.names
    y = np.eye(len(names), dtype=np.float32)[[0, 0, 0, 1]]
    taken = np.eye(len(names), dtype=np.float32)[[0, 1, 1, 1]]
    predictions = Predictions(taken, None, y, np.arange(4))
    found = confused_classes(predictions, reader, PageLinks())
    there = PageLinks().confused(names[0], names[1])
    assert found["worst"] == [(names[0], names[1], 2, there)]
    links = found["chart"].plot["links"]
    assert links[0][:2] == [PageLinks().confused(names[0], names[0]), there]
    assert links[1][0] == "" and links[1][1] != ""
    text = (tmp_path / "run" / "report.html").read_text()
    assert "predicted as" in text and 'href="http://127.0.0.1:8000/?among=' in text
    monkeypatch.setattr(charts, "MAX_CLASSES", len(names) - 1)
    of_many = confused_classes(predictions, reader, PageLinks())
    assert of_many == {"chart": None, "worst": found["worst"]}


@pytest.mark.parametrize("kind", ["multi_label", "multi_class"])
def test_each_label_of_the_table_has_its_own_numbers(kind: str, tmp_path: Path) -> None:
    """Rows, F1 and AUC by scikit-learn beside the label's name, the best AUC first."""
    folder = tmp_path / kind
    folder.mkdir()
    known = write(folder, kind, whole=True)
    probability, y = known.probability(known.test), known.y[known.test]
    given = Predictions(probability.astype("f4"), None, y.astype("f4"), known.test)
    shown = _labels(given, Reader(folder / "known"), 0.3)
    classes = np.eye(4)[probability.argmax(1)]
    f1 = f1_score(y, probability > 0.3 if kind == "multi_label" else classes, average=None)
    auc = [roc_auc_score(y[:, a], probability[:, a]) for a in range(4)]
    assert [row["number"] for row in shown] == np.argsort(-np.array(auc)).tolist()
    assert len(set(f1)) == 4  # else two that change places would not show
    for row in shown:
        a = row["number"]
        assert row["name"] == NAMES[a] and row["support"] == y[:, a].sum()
        assert (row["f1"], row["auc"]) == (pytest.approx(f1[a]), pytest.approx(auc[a]))


def test_f1_of_each_label_is_that_of_scikit_learn() -> None:
    generator = np.random.default_rng(0)
    y = (generator.random((50, 4)) < 0.4).astype(np.float32)
    probability = generator.random((50, 4)).astype(np.float32)
    expected = f1_score(y, probability > 0.3, average=None)
    assert label_f1(probability, y, 0.3) == pytest.approx(expected.tolist())
    y[::3, 1] = np.nan
    known = ~np.isnan(y[:, 1])
    of_known = f1_score(y[known, 1], probability[known, 1] > 0.3)
    assert label_f1(probability, y, 0.3)[1] == pytest.approx(of_known)


def test_neighbours_are_the_nearest_with_what_tells_them_apart(tmp_path: Path) -> None:
    pretrain(frames(tmp_path, train={"steps": 1}))
    reader = Reader(tmp_path / "frames")
    rows = np.arange(12)
    hidden = np.eye(12, dtype=np.float32)
    hidden[6] = hidden[1] + 0.1  # row 6 lies beside row 1
    embedding = Predictions(None, hidden, reader.ground_truth(rows), rows)
    lines = nearest_rows(embedding, reader)
    (line,) = [line for line in lines if line[0]["key"] == reader.sample_key(1)]
    assert line[1]["key"] == reader.sample_key(6) and line[1]["cosine"] > 0.9
    names = np.array(reader.manifest.labels.names)
    a, b = (embedding.y[row] == 1 for row in (1, 6))
    assert line[1]["more"] == names[b & ~a].tolist() and line[1]["fewer"] == names[a & ~b].tolist()


def note(seen: list[str], event: Any) -> None:
    seen.append(getattr(event, "url", str(event)))


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium (apt-get install chromium)")
def test_in_a_browser_the_report_draws_fits_and_fetches_nothing(tmp_path: Path) -> None:
    from playwright.sync_api import sync_playwright

    shown = {"map": "always", "map_rows": 30, "seeds": 2, "baselines": "plain"}
    result = small(str(tmp_path), "run", evaluate=shown)
    other = json.loads((tmp_path / "run" / "seed-1" / "result.json").read_text())
    mean = (result["auc_macro"] + other["auc_macro"]) / 2
    plain = (result["plain_auc_macro"] + other["plain_auc_macro"]) / 2
    assert result["auc_macro"] != other["auc_macro"]
    assert f"{plain:.3f}" != f"{result['plain_auc_macro']:.3f}"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for width in (390, 1400):
            page = browser.new_page(viewport={"width": width, "height": 900})
            faults, asked = list[str](), list[str]()
            page.on("pageerror", partial(note, faults))
            page.on("request", partial(note, asked))
            page.goto((tmp_path / "run" / "report.html").as_uri())
            page.wait_for_selector("html[data-drawn]")
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert not faults
            assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
            assert page.locator(".chart .main-svg").count() > 20
            assert violations(page) == []
            links = page.locator("nav a")
            targets = [str(one.get_attribute("href")) for one in links.all()]
            inside = [target for target in targets if target.startswith("#")]
            assert len(inside) >= 5 and all(page.locator(target).count() == 1 for target in inside)
            files = [tmp_path / "run" / target for target in targets if target not in inside]
            assert {"plain", "seed-1"} <= {file.parent.name for file in files}
            assert all(file.is_file() for file in files)
            assert page.locator(".card strong").first.inner_text().startswith(f"{mean:.3f}")
            assert f"plain network {plain:.3f}" in page.locator(".card").first.inner_text()
            assert page.locator(".near img").count() == 36
            page.select_option("#colour", index=1)
            chosen = page.locator("#colour option").nth(1).inner_text()
            assert f"not {chosen}" in page.locator("#map").inner_text()
        browser.close()
