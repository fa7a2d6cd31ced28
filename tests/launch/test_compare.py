"""Methods side by side: what is drawn, kept and told, and intervals by hand."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from scipy.stats import t as student

from heron.api import job as job
from heron.api.job import pretrain
from heron.base.errors import STOPPED, Stopped
from heron.base.shipped import find_config
from heron.cli.compare import SPACE
from heron.cli.main import main
from heron.data.dataset import build_data
from heron.experiment.config import dump_config, load_config
from heron.studies.comparison import Comparison, FoldResult, shared_rows
from heron.studies.engine import Batch, Job
from heron.studies.repeats import corrected_interval
from heron.studies.search import load_space
from heron.studies.suggestions import JOURNAL
from heron.training.tracking import read_lines
from tests.data.endless import WIDTH, vectors
from tests.experiments import frames
from tests.shards.others import write_wds


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compare")
    config = frames(folder, train={"steps": 3}, data={"epoch": "labelled"})
    build_data(config.data, progress=False)
    (folder / "mine.yaml").write_text(dump_config(config))
    return folder / "mine.yaml"


def test_a_stream_of_tars_is_indexed_first(
    experiment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = yaml.safe_load(experiment.read_text())
    left_out = {"path", "build", "split", "epoch"}
    tree["data"] = {key: value for key, value in tree["data"].items() if key not in left_out}
    tree["data"]["protocol"] = {"validation": 0.2}
    tree["data"] |= {"views": [{"stored": "vector"}, {"stored": "vector"}]}
    stream = {"labelled": f"{tmp_path}/tars/train.tar", "samples_per_epoch": 60, "label": "cls"}
    stream |= {"vector": {"npy": WIDTH}, "classes": 3}
    tree["data"]["webdataset"] = stream
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(tree))
    (tmp_path / "tars").mkdir()
    write_wds(tmp_path / "tars" / "train.tar", vectors(0, 60))
    words = ["--methods", "dnn", "--trials", 1, "--out", tmp_path / "out"]
    assert run("tune", tmp_path / "mine.yaml", *words) == 1
    assert "so there are no folds; index the shards" in capsys.readouterr().err
    assert run("shards", "index", tmp_path / "tars", "--vector", "npy", "--label", "cls") == 0
    overrides = ["data.webdataset=null", f"data.path={tmp_path}/tars", "data.protocol.labelled=30"]
    assert run("tune", tmp_path / "mine.yaml", *overrides, *words) == 0, capsys.readouterr().err


def run(*words: object) -> int:
    return main([str(word) for word in words])


def test_an_interval_by_hand() -> None:
    values = [0.1, 0.3, 0.2, 0.4]
    apart, shared = corrected_interval(values, 0.0), corrected_interval(values, 0.1)
    spread = np.std(values, ddof=1)
    assert apart.mean == pytest.approx(0.25) and (apart.sign, shared.sign) == (1, 1)
    assert apart.high - 0.25 == pytest.approx(student.ppf(0.975, 3) * spread / 2)
    wider = student.ppf(0.975, 3) * spread * math.sqrt(1 / 4 + 0.1 / 0.9)  # test / labelled = 1/9
    assert shared.high - 0.25 == pytest.approx(wider) == pytest.approx(0.25 - shared.low)
    assert corrected_interval([-x for x in values], 0.0).sign == -1
    assert corrected_interval([0.5], 0.0).description == "+0.5000 (one fold: no interval)"
    assert corrected_interval(values, 1.0).sign == 0
    assert corrected_interval([*values, math.nan], 0.0) == apart
    assert (
        corrected_interval([math.nan] * 2, 0.0).description == "not known (no fold has both scores)"
    )


def test_what_folds_share() -> None:
    rows = np.arange(100)
    draws = [np.random.default_rng(n).permutation(100) for n in range(30)]
    few = [one[:10] for one in draws]
    assert shared_rows(few, [one[10:] for one in draws]) == pytest.approx(0.1, abs=0.02)
    assert shared_rows([one[:90] for one in draws], few) == pytest.approx(0.1, abs=0.02)
    apart = np.split(rows, 5)
    assert shared_rows(apart, [np.setdiff1d(rows, one) for one in apart]) == 0
    assert shared_rows([rows] * 3, [rows] * 3) == 1


def rows_of(name: str, pretrained: bool, validation: float, *scores: float) -> list[FoldResult]:
    return [FoldResult(name, pretrained, validation, {"accuracy": x}, {}, []) for x in scores]


@pytest.mark.parametrize(
    ("scores", "told", "taken"),
    [
        ((0.9, 0.8, 0.95), "helps on these data: herocon less logistic on raw", "herocon"),
        ((0.7, 0.9, 0.8), "makes no difference that these folds show", "logistic on raw features"),
        ((0.2, 0.1, 0.25), "does not help on these data", "logistic on raw features"),
    ],
)  # fmt: skip
def test_what_a_comparison_says(scores: tuple[float, ...], told: str, taken: str) -> None:
    rows = {
        "dnn": rows_of("dnn", False, 0.6, 0.65, 0.55, 0.6),
        "herocon": rows_of("herocon", True, 0.8, *scores),
        "simclr": rows_of("simclr", True, 0.7, 0.99, 0.99, 0.98),  # not first by validation
        "logistic on raw features": rows_of("logistic on raw features", False, 0.7, 0.7, 0.6, 0.75),
    }
    comparison = Comparison("mine", "accuracy", True, [0, 1, 2], rows, 0.0)
    first, *others = comparison.verdict()[0]
    assert told in first and first.endswith(f"take {taken}.")
    assert [line.split()[0] for line in others] == ["herocon", "simclr"]
    assert "simclr is above the plain network: +0.3867" in others[1]
    text = comparison.markdown()
    assert "| dnn | 0.6000 ± 0.0500 |" in text and "accuracy less dnn |" in text


def test_a_fold_whose_test_rows_lack_a_class_is_left_out() -> None:
    """Its score is null: it made every difference NaN, and the verdict "no difference"."""
    rows = {
        "dnn": rows_of("dnn", False, 0.6, 0.55, 0.5, 0.6, math.nan),
        "herocon": rows_of("herocon", True, 0.8, 0.75, 0.71, 0.8, math.nan),
    }
    comparison = Comparison("mine", "accuracy", True, [0, 1, 2, 3], rows, 0.0)
    (told,) = comparison.verdict()[0]
    assert told.startswith("Pretraining helps on these data: herocon less dnn,")
    assert "| herocon | 0.7533 ± 0.0451 (n = 3) |" in comparison.markdown()


def test_pretraining_must_be_above_what_the_validation_rows_overlooked_too() -> None:
    rows = {
        "dnn": rows_of("dnn", False, 0.7, 0.6, 0.5, 0.55),
        "herocon": rows_of("herocon", True, 0.8, 0.7, 0.61, 0.64),
        "forest on raw features": rows_of("forest on raw features", False, 0.6, 0.68, 0.64, 0.62),
    }
    first, *_ = Comparison("mine", "accuracy", True, [0, 1, 2], rows, 0.0).verdict()[0]
    assert first.startswith(
        "Pretraining makes no difference that these folds show: herocon less dnn"
    )
    assert "is +0.1000 (" in first and "but less forest on raw features, which tests best" in first
    assert first.endswith("; take forest on raw features.")


def test_a_row_that_tests_above_what_the_validation_rows_chose_is_taken() -> None:
    """On yeast they chose the best of four trials of a network; logistic regression was above."""
    rows = {
        "dnn": rows_of("dnn", False, 0.7, 0.6, 0.5, 0.55),
        "herocon": rows_of("herocon", True, 0.6, 0.6, 0.51, 0.54),
        "logistic on raw": rows_of("logistic on raw", False, 0.5, 0.7, 0.61, 0.64),
    }
    first, *_ = Comparison("mine", "accuracy", True, [0, 1, 2], rows, 0.0).verdict()[0]
    assert first.startswith("Pretraining makes no difference that these folds show")
    assert "; logistic on raw tests above dnn: +0.1000 (" in first
    assert first.endswith("; take logistic on raw.")


def test_a_quick_comparison_names_what_to_do_next(
    experiment: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its verdict was "take the forest on raw features", and the next command `heron tune`."""
    monkeypatch.setattr("heron.studies.quick.ROWS", 20)
    monkeypatch.setattr("heron.studies.quick.MIN_STEPS", 3)
    monkeypatch.setattr("heron.studies.quick.SECONDS", 0)
    out = experiment.parent / "quick"
    words: list[Any] = ["compare", "--quick", experiment, "--folds", 2, "--out", out]
    words += ["--baselines", "logistic", "--overwrite"]
    assert run(*words) == 0
    told, err = capsys.readouterr()
    assert told.startswith("quick: about 0 minutes for 2 folds of dnn and own, 1 trial of each")
    assert json.loads((out / "quick.json").read_text()) == {"steps": 2}  # its two epochs
    assert ": runs of 2 steps\n" in told and "16 labelled, 4 validation" in told
    tree = json.loads((out / "compare.json").read_text())
    assert [*tree["rows"]] == ["dnn", "own", "logistic on raw features"]
    assert f"; take {tree['take']}." in tree["verdicts"][0]
    for take, expected in [
        ("own", f"next: heron tune {experiment} --methods own\n"),
        ("forest on herocon", f"next: heron tune {experiment} --methods herocon\n"),
        ("logistic on raw features", ""),
    ]:
        monkeypatch.setattr(Comparison, "verdict", lambda _, take=take: ([], take))
        assert run(*words[:-1]) == 0
        told, err = capsys.readouterr()
        assert err.endswith(expected) and ("next:" in err) == bool(expected)
        assert ("its options are in" in told) == (not expected)
    assert run("compare", "--quick", "seed=1") == 2
    assert "pass exactly one experiment (a name or a file), got none" in capsys.readouterr().err


def test_a_quick_search_writes_an_experiment_of_full_length(
    experiment: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its runs are short and of few rows; what it writes has the experiment's steps and rows."""
    monkeypatch.setattr("heron.studies.quick.ROWS", 20)
    monkeypatch.setattr("heron.studies.quick.MIN_STEPS", 3)
    monkeypatch.setattr("heron.studies.quick.SECONDS", 0)
    out, longer = experiment.parent / "tune-quick", ["train.steps=null", "train.total_steps=50"]
    words = ["tune", "--quick", experiment, *longer, "--trials", 3, "--out", out]
    assert run(*words) == 0
    told = capsys.readouterr().out
    assert "quick: about 0 minutes for 3 trials of own, at most 20 labelled rows\n" in told
    assert json.loads((out / "quick.json").read_text()) == {"steps": 3}
    assert ": runs of 3 steps\n" in told and "scikit-learn" not in told
    assert "by 4 validation rows: a gain not well above 0.250 may be chance" in told
    whole, trial = load_config(out / "own.yaml"), json.loads((out / "own.json").read_text())
    assert len(trial["trials"]) == 3 and whole.train.total_steps == 50 and whole.evaluate.test
    assert whole.data.protocol.labelled == load_config(experiment).data.protocol.labelled
    best = max(trial["trials"], key=lambda one: one["validation"])
    assert all(load_value(whole, key) == value for key, value in best["values"].items())
    for number in range(3):
        run_of = json.loads((out / "own" / f"{number:03}" / "result.json").read_text())
        assert run_of["steps"] == 3
    written = (out / "own.yaml").read_bytes(), (out / "own.json").read_bytes()
    assert run(*words) == 0  # goes on, with the steps that it had
    assert "ms" not in capsys.readouterr().out
    assert written == ((out / "own.yaml").read_bytes(), (out / "own.json").read_bytes())
    short = load_config(out / "own" / "000" / "config.yaml")
    assert short.optim.warmup_epochs == 0 and short.train.total_steps == 3


def load_value(config: Any, key: str) -> Any:
    value = config.model_dump(mode="json")
    for part in key.split("."):
        value = value[int(part) if isinstance(value, list) else part]
    return value


def test_a_verdict_where_nothing_is_pretrained() -> None:
    rows = {
        "own": rows_of("own", False, 0.7, 0.6, 0.5, 0.55),
        "forest on raw features": rows_of("forest on raw features", False, 0.5, 0.7, 0.61, 0.64),
    }
    better = Comparison("mine", "accuracy", True, [0, 1, 2], rows, 0.0)
    assert better.verdict()[1] == "forest on raw features"
    (line,) = better.verdict()[0]
    assert line.startswith("forest on raw features tests best: +0.1000 (")
    assert line.endswith(" of accuracy less own; take forest on raw features.")
    logistic = {"logistic on raw features": rows_of("logistic on raw features", False, 0.8, 0.6)}
    few = {name: own[:1] for name, own in rows.items()} | logistic  # one fold: no interval
    one = Comparison("mine", "accuracy", True, [0], few, 0.0)
    assert one.verdict()[0] == [
        "forest on raw features tests best: +0.1000 (one fold: no interval) of accuracy less own, "
        "which may be chance, so the test rows decide nothing; the validation rows rank logistic "
        "on raw features first; take logistic on raw features."
    ]
    alone = Comparison("mine", "accuracy", True, [0, 1, 2], {"own": rows["own"]}, 0.0)
    assert alone.verdict()[0] == ["own tests best of accuracy; take own."]


def test_a_comparison_goes_on_where_it_was_stopped(
    experiment: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = experiment.parent / "compared"
    words: list[Any] = ["compare", "--config", experiment, "--methods", "dnn", "own"]
    words += ["--out", out, "--baselines", "logistic", "--trials", 2]
    assert run(*words, "--folds", 1) == 0
    told = capsys.readouterr().out
    assert "fold-0/dnn 001 (optim.lr=" in told and "fold-0/dnn 000 (as it stands)" in told
    tests = [path for path in out.rglob("metrics.jsonl") if '"test/' in path.read_text()]
    assert tests == [], "a trial read the test rows"

    made: list[str] = []

    def spy(config: Any) -> dict[str, Any]:
        made.append(config.run.dir)
        return pretrain(config)

    monkeypatch.setattr(job, "pretrain", spy)
    assert run(*words, "--folds", 2) == 0
    assert len(made) == 4 and all("fold-1" in name for name in made)
    told = capsys.readouterr().out
    tree = json.loads((out / "compare.json").read_text())
    names = ["dnn", "logistic on dnn", "own", "logistic on own", "logistic on raw features"]
    assert [*tree["rows"]] == names and told.endswith((out / "compare.md").read_text())
    assert len([*(out / "fold-0").rglob("checkpoints")]) == 2  # of the chosen trials alone
    for name, row in ((n, one) for n in names for one in tree["rows"][n]["folds"]):
        assert 0 <= row["scores"]["accuracy"] <= 1
        if name.startswith("logistic"):  # as many as it takes until the log-loss rises
            best = min(row["trials"], key=lambda trial: trial["loss"])
            assert row["chosen"] == best["values"] and len(row["trials"]) > 2
        else:
            assert row["validation"] == max(trial["validation"] for trial in row["trials"])
            assert len(row["trials"]) == 2
    assert run(*words, "--folds", 2) == 0 and len(made) == 4
    assert run(*words, "--folds", 2, "--seed", 1) == 1
    assert "has results of another experiment, data set or search" in capsys.readouterr().err
    kept = shutil.copytree(out, out.with_name("kept"))
    few = ["compare", "--config", experiment, "--methods", "dnn", "--trials", 1, "--folds", 1]
    few += ["--baselines", "logistic", "--out", out]
    assert run(*few, "--seed", 1) == 1
    assert "has results of another experiment, data set or search" in capsys.readouterr().err
    assert run(*few, "--seed", 1, "--overwrite") == 0
    shutil.rmtree(out)
    kept.rename(out)
    path = out / "results" / "dnn-0.json"
    path.write_text(path.read_text().replace('"validation"', '"validatiom"', 1))
    assert run(*words, "--folds", 2) == 1
    assert "dnn-0.json: its fingerprint is 'sha256:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "fault", "most"),
    [
        (["compare", "--config", "EXPERIMENT", "--methods", "dnn", "dmm"], "unknown method", 0),
        (["tune", "EXPERIMENT", "--methods", "dnn", "dmm"], "unknown method", 0),
        (["tune", "EXPERIMENT", "--score", "f1"], "have no score 'f1', only accuracy", 1),
    ],
)
def test_what_no_run_can_have_costs_no_search(
    experiment: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    fault: str,
    most: int,
) -> None:
    made: list[str] = []

    def ends(config: Any) -> None:
        made.append(config.run.dir)
        Path(config.run.dir, "result.json").write_text('{"validation_accuracy": 0.5}')

    monkeypatch.setattr(job, "pretrain", ends)
    words = [str(experiment) if word == "EXPERIMENT" else word for word in words]
    assert run(*words, "--out", tmp_path / "out", "--trials", 3) == 1
    assert fault in capsys.readouterr().err and len(made) == most


def test_a_method_that_is_named_twice_counts_once(
    experiment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fold counted twice, and intervals were too narrow."""

    def score(asked: Any, own: Any, name: str, *rest: Any) -> Job[list[FoldResult]]:
        yield Batch({})
        return rows_of(name, False, 0.5, 0.5)

    for name in ("score_method", "score_raw"):
        monkeypatch.setattr(f"heron.studies.comparison.{name}", score)
    words = ["--methods", "dnn", "dnn", "--baselines", "logistic", "logistic", "--folds", 2]
    assert run("compare", "--config", experiment, *words, "--out", tmp_path) == 0
    rows = json.loads((tmp_path / "compare.json").read_text())["rows"]
    assert [len(row["folds"]) for row in rows.values()] == [2, 2]


def test_optuna_searches_as_many_trials_and_goes_on_as_it_began(
    experiment: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed before its last trial but one, and with more trials later, it is the same search."""
    out = experiment.parent / "suggested"
    words = ("tune", experiment, "--methods", "own", "dnn", "--sampler", "optuna", "--trials")
    assert run(*words, 7, "--out", out / "straight") == 0
    found = {}
    for name in ("own", "dnn"):
        trials = json.loads((out / "straight" / f"{name}.json").read_text())["trials"]
        journal = read_lines(out / "straight" / name / JOURNAL)
        assert [line["values"] for line in journal] == [trial["values"] for trial in trials]
        assert len(trials) == 7 and trials[0]["values"] == {}  # as it stands
        space, own = load_space(SPACE), load_config(find_config(str(experiment)))
        method = own if name == "own" else load_config(find_config(str(experiment)), [], "dnn")
        drawn = [space.draw(method, 0, number) for number in range(7)]
        assert [trial["values"] for trial in trials[:4]] == drawn[:4]
        assert all(trials[number]["values"] != drawn[number] for number in range(4, 7))
        found[name] = trials

    def stops(config: Any) -> dict[str, Any]:
        if config.run.dir.endswith("own/005"):
            raise Stopped("a signal came")
        return pretrain(config)

    with monkeypatch.context() as patch:
        patch.setattr(job, "pretrain", stops)
        assert run(*words, 7, "--out", out / "killed") == STOPPED
    suggested = read_lines(out / "killed" / "own" / JOURNAL)
    assert len(suggested) == 6 and not (out / "killed" / "dnn.json").exists()
    for trials in (6, 7):
        assert run(*words, trials, "--out", out / "killed") == 0
    for name, expected in found.items():
        assert json.loads((out / "killed" / f"{name}.json").read_text())["trials"] == expected
    capsys.readouterr()
    assert run(*words, 7, "--out", out / "killed", "--seed", 1) == 1
    assert "suggestions.jsonl belongs to another search" in capsys.readouterr().err


def test_a_search_writes_experiments_that_score_the_tests(
    experiment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = experiment.parent / "tuned here"
    words = ("tune", experiment, "--methods", "dnn", "--trials", 2, "--out", out)
    assert run(*words, "--score", "f1_macro") == 0
    told = capsys.readouterr()
    command = f"heron pretrain '{out}/dnn.yaml'"
    assert f"next: {command}" in told.err
    assert (out / "dnn.yaml").read_text().partition("\n")[0].endswith(f"; {command}")
    assert told.out.splitlines()[-1].startswith("dnn  f1_macro as it stands 0.")
    config = load_config(out / "dnn.yaml")
    tree = json.loads((out / "dnn.json").read_text())
    reached = [trial["validation"] for trial in tree["trials"]]
    result = pretrain(config)
    assert result["validation_f1_macro"] == max(reached) and "f1_macro" in result
    assert yaml.safe_load((out / "dnn.yaml").read_text())["data"]["protocol"]["validation"] == 0.2
    standing = out / "dnn" / "000" / "result.json"
    standing.write_text(json.dumps(result | {"validation_f1_macro": 0.0}))
    assert run(*words, "--score", "f1_macro") == 0
    assert "f1_macro as it stands 0.0000" in capsys.readouterr().out
    assert run(*words, "--score", "accuracy") == 1
    assert "was chosen by f1_macro, not by accuracy; choose another" in capsys.readouterr().err
    assert run(*words, "--score", "accuracy", "--overwrite") == 0
    other = [*words[:-1], experiment.parent / "other"]
    assert run(*other, "--score", "f2") == 1
    assert "the validation rows have no score 'f2', only accuracy" in capsys.readouterr().err
    assert run(*other, "--score", "f1_macro") == 0
    assert run(*other, "--score", "f1_macro", "evaluate.test=true") == 1
    assert "evaluate.test=true: this is set for each run" in capsys.readouterr().err
