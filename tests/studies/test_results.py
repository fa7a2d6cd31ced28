"""What of a study's folder is read, and what is refused, with which words."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from heron.base.artefact import sha256
from heron.base.errors import StudyError
from heron.studies.ledger import Ledger, read_rows
from heron.studies.results import (
    best,
    curves,
    grid,
    is_determined_by,
    lower_is_better,
    natural_x,
    points,
    read_results,
    worker_curves,
)
from heron.studies.study import dump_study, load_study
from heron.studies.text import markdown, mean_std, number
from heron.studies.worker import _failure_reason
from tests.studies import made


def test_rows_are_read_in_order_and_the_last_of_a_trial_counts(tmp_path: Path) -> None:
    lines = [
        made.trial("001", {"optim.lr": 0.2}),
        made.trial("000", {"optim.lr": 0.1}, status="failed", error="no luck", result=None),
        made.trial("000", {"optim.lr": 0.1}, result={"f1_weighted": 0.75}),
    ]
    results = read_results(made.study(tmp_path / "study", lines, {"001": 31}))
    assert list(results.table.index) == ["000", "001"]
    assert results.notes == ["Trial 000 has two rows; the last one counts (line 3)."]
    assert list(results.table["status"]) == ["done", "done"]
    columns = ["f1_weighted", "optim.lr", "batch", "negatives", "batch / workers"]
    assert results.table[columns].to_numpy().tolist() == [
        [0.75, 0.1, None, None, None],
        [0.5, 0.2, 31, 30, 31],
    ]
    assert results.varied == ["optim.lr"]  # workers, strategy and seed are there, and do not vary


@pytest.mark.parametrize(
    ("asked", "count"),
    [
        ({"vary": {"optim.lr": [1, 2, 3], "seed": [0, 1]}}, 6),
        ({"vary": {"optim.lr": [1, 2, 3]}, "cases": [{"workers": 1}, {"workers": 2}]}, 6),
        ({"cases": [{"workers": 1}, {"workers": 2}]}, 2),
        (
            {
                "vary": {"optim.lr": {"low": 1, "high": 2}},
                "search": {"sampler": "random", "trials": 7},
            },
            7,
        ),
    ],
)
def test_how_many_trials_there_will_be(tmp_path: Path, asked: dict[str, Any], count: int) -> None:
    results = read_results(made.study(tmp_path / "study", [], **asked))
    assert results.progress == f"The study is not finished: 0 trials done of {count}."


def test_a_step_whose_rate_is_no_number_tells_no_batch(tmp_path: Path) -> None:
    """A run writes null for what is not finite."""
    folder = made.study(tmp_path / "study", [made.trial("000", {"optim.lr": 0.1})])
    line = {"step": 0, "loss": None, "samples_per_s": None, "seconds": 0.1}
    (folder / "trials" / "000" / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert "batch" not in read_results(folder).table


def test_trials_that_are_under_way(tmp_path: Path) -> None:
    folder = made.study(tmp_path / "study", [made.trial("000", {"optim.lr": 0.1})])
    (folder / "trials" / "001").mkdir()
    said = "The study is not finished: 1 trial done; without a row yet: 001."
    assert read_results(folder).progress == said


def damage(folder: Path, line: str) -> Path:
    with (folder / "trials.jsonl").open("a") as stream:
        stream.write(line + "\n")
    return folder


GOOD = made.trial("000", {"optim.lr": 0.1})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            '{"trial": "001", "sta',
            "line 2 is damaged: not JSON (line 1: Unterminated string star",
        ),
        ("\x00\x00", "line 2 is damaged: not JSON (line 1: Expecting value)"),
        (
            "[1]",
            "it must be a valid dictionary or instance of Row, got [1]; remove",
        ),
        (
            json.dumps(made.sealed(GOOD | {"trial": 1})),
            "trial must be a valid string, got 1; remove",
        ),
        (
            json.dumps(GOOD | {"values": None}),
            "values must be a valid dictionary, got None",
        ),
        (
            json.dumps(GOOD | {"measured": 3}),
            "measured must be a valid dictionary, got 3; ",
        ),
        (
            json.dumps(GOOD | {"status": "well"}),
            "status must be 'done', 'failed' or",
        ),
        ('{"trial": "001"}', "line 2 is damaged: status is missing"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    folder = damage(made.study(tmp_path / "study", [GOOD]), line)
    with pytest.raises(StudyError) as error:
        read_results(folder)
    assert message in str(error.value) and str(folder / "trials.jsonl") in str(error.value)


def test_what_is_no_study_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    for folder, found in ((tmp_path, "notes.txt"), (tmp_path / "none", "nothing")):
        with pytest.raises(StudyError, match=f"only {found}; pass the folder that `heron study"):
            read_results(folder)
    assert len(read_results(made.study(tmp_path / "a study", [made.trial("000", {})])).table) == 1
    folder = made.study(tmp_path / "study", [])
    (folder / "trials.jsonl").unlink()
    with pytest.raises(StudyError, match="trials.jsonl does not exist: no trial has ended yet, or"):
        read_results(folder)
    (folder / "study.yaml").write_text("title: [")
    with pytest.raises(StudyError, match="cannot read .*study.yaml: "):
        read_results(folder)
    (folder / "study.yaml").write_text("title: no measure\nbase: a.yaml\nvary: {seed: [0]}")
    remedy = "run the study again in a new folder"
    with pytest.raises(StudyError, match=f"measure is missing; {remedy}"):
        read_results(folder)
    (folder / "study.yaml").write_bytes(b"title: \xff")
    with pytest.raises(StudyError, match=f"cannot read .*study.yaml: .*; {remedy}"):
        read_results(folder)


def test_curves_are_apart_where_other_keys_are(tmp_path: Path) -> None:
    """Repeats are one point; a key that follows from x tells nothing apart."""
    lines: list[dict[str, Any]] = []
    for lr in (0.2, 0.1):
        for kind in ("sgd", "adam"):
            for seed in (0, 1):
                values = {"optim.lr": lr, "optim.kind": kind, "train.epochs": 10 * lr, "seed": seed}
                score = lr + seed + (10 if kind == "adam" else 0)
                name = f"{len(lines):03}"
                lines.append(made.trial(name, values, result={"f1_weighted": score}))
    lines[-1] |= {"status": "failed", "error": "no luck"}
    results = read_results(made.study(tmp_path / "study", lines))
    others = [key for key in results.varied if key != "optim.lr"]
    assert [key for key in others if is_determined_by(results.done, ["optim.lr"], key)] == [
        "train.epochs"
    ]
    found = points(curves(results, "optim.lr", "f1_weighted"))
    assert list(found["curve"].unique()) == ["optim.kind sgd", "optim.kind adam"]
    sgd, adam = (part.set_index("x") for _, part in found.groupby("curve", sort=False))
    assert sgd["count"].to_dict() == {0.1: 2, 0.2: 2}
    assert list(sgd["mean"]) == pytest.approx([0.6, 0.7])
    assert sgd["std"][0.1] == pytest.approx(0.5**0.5)
    assert list(adam["count"]) == [1, 2]  # one of 0.1 failed
    assert mean_std(*adam.loc[0.1, ["mean", "std", "count"]]) == "10.1"
    most = best(results, "f1_weighted")  # not trial 006, whose setting has one repeat left
    assert most is not None and most.trials == ["002", "003"] and most.left_out == 1
    assert most.setting == "optim.lr 0.2, optim.kind adam" and most.mean == pytest.approx(10.7)
    measure = results.study.measure.model_copy(update={"mode": "min", "score": "f1_weighted"})
    study = results.study.model_copy(update={"measure": measure})
    least = best(replace(results, study=study), "f1_weighted")
    assert least is not None and least.trials == ["004", "005"]


def test_the_best_is_not_a_lucky_seed(tmp_path: Path) -> None:
    """0.2 has the highest score of all, 0.1 the higher mean; of 0.3 one of three has ended."""
    scores = {0.1: (0.7, 0.72, 0.74), 0.2: (0.5, 0.6, 0.9), 0.3: (0.95,)}
    lines = [
        made.trial(f"0{int(10 * lr)}{seed}", {"optim.lr": lr, "seed": seed}, result={"f1": score})
        for lr, of in scores.items()
        for seed, score in enumerate(of)
    ]
    found = best(read_results(made.study(tmp_path / "study", lines)), "f1")
    assert found is not None
    assert found.describe("f1") == (
        "f1 0.72 ± 0.02 (n = 3): trials 010, 011, 012 (optim.lr 0.1); 1 of too few repeats not "
        "compared"
    )


def test_a_grid_has_means_and_holes(tmp_path: Path) -> None:
    lines = [
        made.trial(f"{a}{b}", {"objective.a": a, "objective.b": b}, result={"f1_weighted": a * b})
        for a in (1, 2, 3)
        for b in (10, 5)
    ]
    lines[0] |= {"status": "failed", "error": "no luck"}
    found = grid(read_results(made.study(tmp_path / "study", lines)), "f1_weighted")
    assert found is not None
    assert (found.columns.name, list(found.columns)) == ("objective.a", [1, 2, 3])
    assert (found.index.name, list(found.index)) == ("objective.b", [5, 10])
    assert str(found.to_numpy().tolist()) == "[[5.0, 10.0, 15.0], [nan, 20.0, 30.0]]"
    assert grid(read_results(tmp_path / "study"), "auc_macro") is None
    few = [made.trial(str(a), {"objective.a": a, "objective.b": a}) for a in range(9)]
    assert grid(read_results(made.study(tmp_path / "line", few)), "f1_weighted") is None


def test_workers_at_one_batch_and_at_one_share(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = []
    batches = {}
    for workers, rows in ((1, 64), (2, 64), (2, 128), (4, 256)):
        name = f"{len(lines):03}"
        batches[name] = rows
        values = {"workers": workers, "data.batch.unlabelled": rows}
        lines.append(made.trial(name, values, measured={"samples_per_s": 100.0 * workers}))
    results = read_results(made.study(tmp_path / "study", lines, batches))
    scaled = points(worker_curves(results, "samples_per_s"))
    found = {name: list(workers) for name, workers in scaled.groupby("curve")["x"]}
    assert found == {"64 rows in all": [1, 2], "64 rows a worker": [1, 2, 4]}


def test_the_negative_set_stands_for_the_rows_of_a_stream(tmp_path: Path) -> None:
    results = read_results(made.negatives(tmp_path / "study"))
    assert natural_x(results, "data.batch.unlabelled") == "negatives"
    assert natural_x(results, "optim.lr") == "optim.lr"
    found = points(curves(results, "negatives", "step_s"))
    assert set(found["curve"]) == {""}
    assert list(found["x"]) == [100, 250, 500, 1000, 2500, 5000]


def test_of_what_less_is_better() -> None:
    less = {"step_s", "train_seconds", "seconds", "peak_memory_bytes", "loss", "bytes_per_step"}
    more = {"samples_per_s", "f1_weighted", "auc_macro", "accuracy"}
    assert {name for name in less | more if lower_is_better(name)} == less


def test_numbers_for_people() -> None:
    texts = [number(x) for x in (1234567.0, 0.00012345, 0.5, 2.0, 1e-9, float("nan"), 0.0)]
    assert texts == ["1,235,000", "0.0001234", "0.5", "2", "1.000e-09", "–", "0"]


def test_the_group_names_the_curves(tmp_path: Path) -> None:
    """As of one view and two: what goes with the group is not named beside it."""
    lines: list[dict[str, Any]] = []
    for views, weight in (([{"stored": "a"}], 0.0), ([{"stored": "a"}, {"stored": "b"}], 0.1)):
        for noise in (0.0, 0.5, 1.0):
            values = {"data.views": views, "w.weight": weight, "data.path": f"n{noise}"}
            lines.append(made.trial(f"{len(lines):03}", values | {"data.build.noise": noise}))
    measure = {"x": "data.build.noise", "y": ["f1_weighted"], "group": "w.weight"}
    results = read_results(made.study(tmp_path / "study", lines, measure=measure))
    found = points(curves(results, "data.build.noise", "f1_weighted"))
    assert found["curve"].value_counts().to_dict() == {
        "w.weight 0.0": 3,
        "w.weight 0.1": 3,
    }


def test_a_changed_digit_of_a_row_is_refused(tmp_path: Path) -> None:
    """By file, trial and remedy, by the report and by a study that goes on."""
    folder = made.study(tmp_path / "study", [GOOD, made.trial("001", {"optim.lr": 0.2})])
    path = folder / "trials.jsonl"
    study, text = load_study(folder / "study.yaml"), path.read_text()
    (folder / "study.yaml").write_text(dump_study(study))
    for changed in (
        text.replace('"f1_weighted": 0.5', '"f1_weighted": 0.9', 1),
        text.replace('"optim.lr": 0.2', '"optim.lr": 0.3'),
        text.replace('"error": null, ', "", 1),
    ):
        path.write_text(changed)
        for read in (read_results, lambda out: Ledger(study, out)):
            with pytest.raises(StudyError) as error:
                read(folder)
            number, trial = (2, "001") if "0.3" in changed else (1, "000")
            said = str(error.value)
            assert said.startswith(
                f"{path}, line {number} is damaged: the fingerprint of trial {trial} is sha256:"
            )
            assert said.endswith(
                "remove the line and run the study again: it runs the trials without a line"
            )


def test_any_flipped_bit_of_a_row_is_refused_or_seen(tmp_path: Path) -> None:
    """A row's end and blanks between its parts are not what it says."""
    folder = made.study(tmp_path / "study", [GOOD])
    path = folder / "trials.jsonl"
    whole = path.read_bytes()
    sealed = json.loads(whole)
    for place in range(0, 8 * len(whole), 7):
        flipped = bytearray(whole)
        flipped[place // 8] ^= 1 << place % 8
        path.write_bytes(flipped)
        try:
            rows = [row.model_dump(exclude_unset=True) for _, row in read_rows(path)]
        except StudyError as error:
            assert len(str(error).splitlines()) == 1
        else:
            assert rows == [sealed]


def test_a_row_of_another_run_is_refused(tmp_path: Path) -> None:
    """Where the run is still there; a row says of which result.json it tells."""
    folder = made.study(tmp_path / "study", [GOOD])
    result = folder / "trials" / "000" / "result.json"
    result.write_text('{"f1_weighted": 0.5}')
    line = made.sealed(GOOD | {"result_sha256": sha256(result)})
    (folder / "trials.jsonl").write_text(json.dumps(line) + "\n")
    assert read_results(folder).notes == []
    result.write_text('{"f1_weighted": 0.9}')
    with pytest.raises(StudyError) as error:
        read_results(folder)
    assert str(error.value) == (
        f"{folder}/trials.jsonl, line 1: the result.json of trial 000 had the sha256 "
        f"{line['result_sha256'][:12]}…, but that of {result} is {sha256(result)[:12]}…; restore "
        "the run, or remove the line and run the study again: it runs the trials without a line"
    )
    result.unlink()
    assert len(read_results(folder).table) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"run": "../other"}, "run must match pattern"),
        ({"run": "/dev"}, "got '/dev'; remove the line"),
        (
            {"result": {"f1": 2**70}},
            "f1 must be 9223372036854775807 at most, got a number of 71 bits",
        ),
        ({"notes": 1}, "notes: extra inputs are not permitted (got 1)"),
        ({"values": {"workers": "two"}}, "trial 000 has 'two' workers; remove the line"),
        ({"values": {"workers": 0}}, "trial 000 has 0 workers; remove the line"),
    ],
)
def test_what_no_row_says(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = made.study(tmp_path / "study", [GOOD])
    (folder / "trials.jsonl").write_text(json.dumps(made.sealed(GOOD | change)) + "\n")
    with pytest.raises(StudyError) as error:
        read_results(folder)
    assert message in str(error.value) and len(str(error.value).splitlines()) == 1


def test_a_rate_beyond_all_numbers_tells_no_batch(tmp_path: Path) -> None:
    folder = made.study(tmp_path / "study", [GOOD])
    line = {"step": 0, "loss": 1.0, "samples_per_s": 1e300, "seconds": 1e300}
    (folder / "trials" / "000" / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert "batch" not in read_results(folder).table


def test_a_cell_of_several_lines_is_one_row() -> None:
    assert markdown(["a"], [["x\ny | z"]]).splitlines()[-1] == r"| x y \| z |"


def test_workers_that_failed_without_a_word_are_named(tmp_path: Path) -> None:
    class Failed(Exception):
        worker_failures: ClassVar = {1: KeyError(), 2: OSError("gone")}

    assert _failure_reason(tmp_path, Failed()) == f"rank 1: KeyError; see {tmp_path}/log-1.txt"
