"""The report as a page and as tables: what it says, and that nothing is fetched."""

import csv
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from heron.cli.main import main
from heron.studies.results import read_results
from tests.studies import made


class Text(HTMLParser):
    """The text of a page, its headings, and what it would fetch."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text, self.fetched, self.tags = "", list[str](), list[str]()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [v[:40] for name, v in attrs if name in ("src", "href") and v is not None]

    def handle_data(self, data: str) -> None:
        self.text += data


LOG = {"type": "log", "dtick": "D2"}  # ticks at 1, 2 and 5 of a decade


def charts(folder: Path) -> list[dict[str, Any]]:
    """What the page of a study has Plotly draw."""
    page = (folder / "report" / "report.html").read_text()
    found = re.findall(r'<script type="application/json">(.*?)</script>', page)
    return [json.loads(text) for text in found]


def report(folder: Path, *words: str) -> Text:
    assert main(["report", str(folder), *words]) == 0
    return Text((folder / "report" / "report.html").read_text())


def test_time_against_the_negative_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made.negatives(tmp_path / "study", exponent=1.7)
    page = report(folder)
    f1, time = charts(folder)
    assert not {"img", "link", "iframe"} & set(page.tags) and not page.fetched
    assert f1["layout"]["xaxis"]["title"]["text"] == "size of the negative set |N_i|"
    assert f1["layout"]["xaxis"]["type"] == "log" and "type" not in f1["layout"]["yaxis"]
    assert f1["layout"]["xaxis"]["ticktext"] == ["100", "250", "500", "1,000", "2,500", "5,000"]
    assert len(f1["traces"]) == 1 and f1["traces"][0]["error_y"]["array"] == [0.004] * 6
    assert time["layout"]["yaxis"] == {"title": {"text": "time of a step, s"}, **LOG}
    names = [trace["name"] for trace in time["traces"] if trace.get("showlegend", True)]
    assert names == ["measured", "x^1.70", "x² (HeroCon, Figure 4b)"]
    assert "step_s = 2.00e-06 · x^1.700; 95% interval of the exponent 1.700 to 1.700" in page.text
    assert "f1_weighted = " not in page.text  # a score is no power of anything
    assert "No law is fitted to f1_weighted, which is not a time, size or rate." in page.text
    assert "proportional to the square of |N_i|" in page.text
    assert "Measured: exponent 1.70; 2 is over its interval" in page.text
    assert "Time of a step, s against size of the negative set |N_i|" in page.text
    best = "f1_weighted 0.6599 ± 0.004 (n = 3): trials 015, 016, 017 (batch.unlabelled 4951)."
    assert f"Best by the mean over repeats, {best}" in page.text
    assert "18 trials done." in page.text
    assert "accelerate launch pipeline/pretrain.py data.batch.unlabelled=4951 seed=2" in page.text
    assert re.search(r"5,0000\.6599 ± 0\.004 \(n = 3\)", page.text)  # x and F1, side by side
    shown = capsys.readouterr().out
    assert (folder / "report" / "table.md").read_text() in shown
    assert "| 017 | done | 2 | 4,951 | 5,000 | 0.6639 | 4.001 |" in shown
    assert f"report: {folder}/report/report.html" in shown


def test_a_square_is_said_to_be_one(tmp_path: Path) -> None:
    page = report(made.negatives(tmp_path / "study", exponent=2.0, bend=0.02))
    assert "Measured: exponent 2.00; 2 is inside its interval" in page.text


def test_tables_hold_every_column(tmp_path: Path) -> None:
    lines = [
        made.trial("000", {"optim.lr": 0.1, "model.widths": [8, 4], "data.standardise": True}),
        made.trial("001", {"optim.lr": "x | <b>", "model.widths": None}, status="stopped"),
        made.trial("002", {"optim.lr": 1}, status="failed", error="a <b>\nc", result=None)
        | {"measured": None},
    ]
    folder = made.study(tmp_path / "study", lines)
    page = report(folder, "--out", str(tmp_path / "study" / "report"))
    parquet = pq.read_table(folder / "report" / "table.parquet").to_pylist()
    with (folder / "report" / "table.csv").open(newline="") as stream:
        cells = list(csv.DictReader(stream))
    assert [row["optim.lr"] for row in parquet] == ["0.1", "x | <b>", "1"]  # of mixed kinds: text
    assert [row["model.widths"] for row in parquet] == ["[8, 4]", None, None]
    assert [row["data.standardise"] for row in parquet] == [True, None, None]
    assert [row["step_s"] for row in parquet] == [1.0, 1.0, None]
    assert [row["steps"] for row in parquet] == [9, 9, None]
    assert [row["error"] for row in parquet] == [None, None, "a <b>\nc"]
    assert [row["run"] for row in parquet] == [f"trials/00{i}" for i in range(3)]
    for line, row in zip(cells, parquet, strict=True):
        assert line.keys() == row.keys()
        assert line["command"] == row["command"] and line["optim.lr"] == row["optim.lr"]
    assert r"| x \| <b> |" in (folder / "report" / "table.md").read_text()
    assert "1 trial done, 1 failed, 1 stopped." in page.text
    assert "002: a <b>\nc" in page.text and "b" not in page.tags


def test_a_table_of_lists_as_long_as_each_other(tmp_path: Path) -> None:
    views = [[{"stored": "a"}], [{"stored": "b"}]]
    lines = [made.trial(f"00{i}", {"data.views": value}) for i, value in enumerate(views)]
    folder = made.study(tmp_path / "study", lines)
    report(folder, "--x", "data.views")
    parquet = pq.read_table(folder / "report" / "table.parquet").to_pylist()
    assert [json.loads(row["data.views"]) for row in parquet] == views


def test_a_score_that_no_trial_has_makes_no_heat_map(tmp_path: Path) -> None:
    lines = [
        made.trial(f"{a}{b}", {"objective.a": a, "objective.b": b}, result={"auc_macro": None})
        for a in (1, 2)
        for b in (3, 4)
    ]
    measure = {"x": "objective.a", "y": ["auc_macro"]}
    lines[0]["status"], lines[0]["result"] = "stopped", {"auc_macro": 0.5}
    page = report(made.study(tmp_path / "study", lines, measure=measure), "--y", "auc_macro")
    assert "No trial that is done has 'auc_macro'" in page.text and "framed" not in page.text


def test_the_best_is_none_that_failed_or_was_stopped(tmp_path: Path) -> None:
    scores = {"000": ("failed", 0.9), "001": ("stopped", 0.8), "002": ("done", 0.6)}
    scores["003"] = ("done", 0.7)
    lines = [
        made.trial(name, {"optim.lr": score}, status=status, result={"f1_weighted": score})
        for name, (status, score) in scores.items()
    ]
    folder = made.study(tmp_path / "study", lines)
    assert "f1_weighted 0.7: trial 003 (optim.lr 0.7)" in report(folder).text
    measure = {"x": "optim.lr", "y": ["f1_weighted"], "score": "f1_weighted", "mode": "min"}
    folder = made.study(tmp_path / "least", lines, measure=measure)
    assert "f1_weighted 0.6: trial 002" in report(folder).text


def test_a_heat_map_of_two_keys(tmp_path: Path) -> None:
    lines = [
        made.trial(
            f"{a}{b}",
            {"objective.a.weight": 0.1 * a, "objective.b.weight": float(b)},
            result={"f1_weighted": 0.5 + 0.01 * a * b},
        )
        for a in range(3)
        for b in range(3)
    ]
    measure = {"x": "objective.a.weight", "y": ["f1_weighted"]}
    page = report(made.study(tmp_path / "study", lines, measure=measure))
    assert "F1, weighted over a.weight and b.weight" in page.text
    heat = charts(tmp_path / "study")[1]["traces"][0]
    assert heat["text"][2] == ["0.5", "0.52", "0.54"] and heat["x"] == ["0", "0.1", "0.2"]


def test_a_heat_map_has_a_column_for_each_value_however_near(tmp_path: Path) -> None:
    """To six digits 1,048,576 and 1,048,577 would be one category, drawn over each other."""
    settings = [(rows, lr) for rows in (2**20, 2**20 + 1) for lr in (0.1, 0.2)]
    lines = [
        made.trial(f"{n:03}", {"data.batch.unlabelled": rows, "optim.lr": lr})
        for n, (rows, lr) in enumerate(settings)
    ]
    assert main(["report", str(made.study(tmp_path / "study", lines))]) == 0
    heat = charts(tmp_path / "study")[1]["traces"][0]
    assert sorted([*heat["x"], *heat["y"]]) == ["0.1", "0.2", "1048576", "1048577"]


@pytest.mark.parametrize(("mode", "best"), [("max", (1.5, 1.5)), ("min", (-0.5, -0.5))])
def test_a_heat_map_frames_what_the_study_calls_best(
    tmp_path: Path, mode: str, best: tuple[float, float]
) -> None:
    lines = [
        made.trial(
            f"{a}{b}",
            {"objective.a.weight": 0.1 * a, "objective.b.weight": float(b)},
            result={"f1_weighted": 0.5 + 0.01 * (a + b)},
        )
        for a in range(3)
        for b in range(3)
    ]
    asked = {"x": "objective.a.weight", "y": ["f1_weighted"], "score": "f1_weighted", "mode": mode}
    folder = made.study(tmp_path / "study", lines, measure=asked)
    report(folder)
    (frame,) = charts(folder)[1]["layout"]["shapes"]
    assert (frame["x0"], frame["y0"]) == best


def test_settings_are_compared_over_the_same_repeats(tmp_path: Path) -> None:
    """By hand: 0.1 less 0.2 is .01, .02, .03 over seeds 0 to 2: t = .02 / (.01 / sqrt 3)."""
    scores = {(0.1, 0): 0.61, (0.1, 1): 0.72, (0.1, 2): 0.83}
    scores |= {(0.2, 0): 0.6, (0.2, 1): 0.7, (0.2, 2): 0.8, (0.2, 3): 0.1, (0.3, 0): 0.5}
    lines = [
        made.trial(f"00{i}", {"optim.lr": lr, "seed": seed}, result={"f1_weighted": score})
        for i, ((lr, seed), score) in enumerate(scores.items())
    ]
    page = report(made.study(tmp_path / "study", lines))
    assert "F1, weighted: optim.lr 0.1, which is best, less each other" in page.text
    assert "otherrepeatsdifferencetpoptim.lr 0.23+0.02003.460.074Means over" in page.text
    alone = [made.trial(f"00{lr}", {"optim.lr": lr, "seed": lr}) for lr in (1, 2)]
    assert "which is best, less" not in report(made.study(tmp_path / "alone", alone)).text


def test_speed_up_of_workers(tmp_path: Path) -> None:
    lines, batches = [], {}
    for workers, rate in ((1, 100.0), (2, 160.0), (4, 240.0)):
        batches[f"00{workers}"] = 64 * workers
        measured = {"samples_per_s": rate, "step_s": 64 * workers / rate}
        values = {"workers": workers, "data.batch.unlabelled": 64 * workers}
        lines.append(made.trial(f"00{workers}", values, measured=measured))
    lines.append(lines[0] | {"trial": "009", "run": "trials/001"})  # a repeat of one worker
    measure = {"x": "workers", "y": ["step_s"]}
    page = report(made.study(tmp_path / "study", lines, batches, measure=measure))
    for line in (
        "1100 ± 0 (n = 2)" + "1" + "1",
        "2160" + "1.600" + "0.800",
        "4240" + "2.400" + "0.600",
    ):
        digits = re.sub(r"1\.000", "1", page.text)
        assert f"64 rows a worker{line}" in digits


def test_a_study_that_is_not_finished_says_so(tmp_path: Path) -> None:
    lines = [made.trial("000", {"optim.lr": 0.1}), made.trial("001", {"optim.lr": 0.2})]
    folder = made.study(tmp_path / "study", lines, vary={"optim.lr": [0.1, 0.2, 0.3, 0.4]})
    (folder / "trials" / "002").mkdir()
    said = "The study is not finished: 2 trials done of 4; without a row yet: 002."
    assert read_results(folder).progress == said
    assert said in report(folder).text
    (folder / "trials.jsonl").write_text("")
    assert "No trial is done, so that there is nothing to draw." in report(folder).text


@pytest.mark.parametrize(
    ("words", "asked", "message"),
    [
        (
            ["--x", "optim.rate"],
            {},
            "no trial has 'optim.rate'; set measure.x and measure.y of the study, or ",
        ),
        (["--y", "f2"], {}, "no trial has 'f2'; set measure.x and measure.y of the study, or --x"),
        (
            [],
            {"measure": {"x": "optim.lr", "y": ["step_s"], "fits": ["cubic"]}},
            "measure.fits.0 must be 'power', 'linear' or 'quadratic', got 'cubic'; run",
        ),
    ],
)
def test_what_is_asked_for_and_not_there(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    asked: dict[str, Any],
    message: str,
) -> None:
    folder = made.study(tmp_path / "study", [made.trial("000", {"optim.lr": 0.1})], **asked)
    assert main(["report", str(folder), *words]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_columns_asked_for_on_the_command_line(tmp_path: Path) -> None:
    folder = made.negatives(tmp_path / "study")
    page = report(folder, "--x", "batch", "--y", "samples_per_s")
    assert "Samples / s against batch" in page.text and "Figure 4b" not in page.text
