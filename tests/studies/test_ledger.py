"""The rows of a study: whole or not there, of one study, the best of those that did not fail."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from heron.api.job import pretrain
from heron.base.artefact import fingerprint, sha256
from heron.base.errors import ConfigError
from heron.base.shipped import ACCELERATE
from heron.experiment.config import dump_config, load_config
from heron.studies.ledger import Ledger, measure, write_rows
from heron.studies.results import Results, best, read_results
from heron.studies.study import Study
from heron.studies.trials import Trial, plan
from heron.training.earlier_run import begin_anew
from heron.training.tracking import read_lines, read_metrics
from tests.experiments import frames
from tests.launch.runs import assert_same_weights

TREE: dict[str, Any] = {
    "title": "A study",
    "base": str(Path(__file__).parent.parent.parent / "configs" / "frames.yaml"),
    "vary": {"optim.lr": [0.1, 0.2, 0.3], "workers": [1, 2]},
    "measure": {"x": "workers", "y": ["step_s"], "score": "accuracy"},
}


def study(**changes: Any) -> Study:
    return Study.model_validate(TREE | changes)


def ran(ledger: Ledger, trial: Trial, accuracy: float | None) -> None:
    """Leave what a run leaves."""
    run = trial.run
    run.mkdir(parents=True)
    (run / "result.json").write_text(json.dumps({"accuracy": accuracy, "peak_memory_bytes": 7}))
    rows = [
        {"step": n, "loss": 1.0, "seconds": 9.0 if n < 3 else n, "samples_per_s": 2.0 * n}
        | {"data_wait_s": 0.5}
        for n in range(8)
    ]
    text = "".join(json.dumps(row) + "\n" for row in [*rows, {"step": 7, "test/accuracy": 1}])
    (run / "metrics.jsonl").write_text(text)


def test_a_row_is_what_docs_say(tmp_path: Path) -> None:
    ledger = Ledger(study(), tmp_path)
    trial = plan(ledger.study, ledger.out)[3]
    ran(ledger, trial, 0.5)
    ledger.append(trial, "done")
    (row,) = read_lines(tmp_path / "trials.jsonl")
    assert row["command"].startswith(f"accelerate launch --config_file {ACCELERATE}/cpu.yaml ")
    assert row["command"].endswith(f"optim.lr=0.2 train.cpu_threads=1 run.dir={tmp_path}/again/003")
    assert {key: row[key] for key in row if key != "command"} == {
        "trial": "003",
        "status": "done",
        "error": None,
        "values": {"workers": 2, "strategy": "ddp", "seed": 0, "optim.lr": 0.2},
        "run": "trials/003",
        "result": {"accuracy": 0.5, "peak_memory_bytes": 7},
        "result_sha256": sha256(trial.run / "result.json"),
        "fingerprint": fingerprint(row),
        "measured": {
            "step_s": 5,
            "samples_per_s": 10.0,
            "data_wait_s": 0.5,
            "peak_memory_bytes": 7,
            "counted_steps": 5,
        },
    }


RUNG, END = 4, 8
SEARCHES: dict[str, dict[str, Any]] = {
    "none": {},
    "asha": {"steps": END, "grace_steps": RUNG},
    "median": {"steps": END, "every_steps": RUNG},
    "async_hyperband": {"steps": END, "grace_steps": RUNG, "brackets": 2},
    "pbt": {"steps": END, "every_steps": RUNG},
}


@pytest.mark.parametrize("rung", [RUNG, None], ids=["stopped", "done"])
@pytest.mark.parametrize("scheduler", SEARCHES)
def test_a_row_s_command_repeats_the_run_that_went_from_rung_to_rung(
    tmp_path: Path, scheduler: str, rung: int | None
) -> None:
    """Rungs stop a run, they do not shorten the cosine, which ends with the experiment's steps."""
    length = {"epochs": None, "steps": None, "total_steps": 12}
    base = frames(tmp_path, optim={"schedule": "cosine", "warmup_epochs": 0}, train=length)
    (tmp_path / "base.yaml").write_text(dump_config(base))
    search = {"sampler": "random", "trials": 2, "scheduler": scheduler} | SEARCHES[scheduler]
    path = str(tmp_path / "base.yaml")
    ledger = Ledger(study(base=path, search=search, vary={"optim.lr": [0.1, 0.2]}), tmp_path)
    trial, *_ = plan(ledger.study, ledger.out)
    stop = None if scheduler == "none" else rung
    for at in ledger.study.search.rungs:
        pretrain(trial.config(at))  # as `studies.worker` does
        if at == stop:
            break
    row = ledger.append(trial, "stopped" if stop else "done", rung=stop)
    _, *words = row["command"].partition(" --config ")[2].split(" ")
    again = pretrain(load_config(path, words))
    assert row["result"]["steps"] == again["steps"] == (12 if scheduler == "none" else stop or END)
    assert row["result"]["fingerprint"] == again["fingerprint"]
    assert_same_weights(tmp_path / "again/000", trial.run)
    rates = [line["lr"] for line in read_metrics(trial.run / "metrics.jsonl") if "lr" in line]
    lr = trial.values["optim.lr"]
    expected = [lr * (1 + math.cos(math.pi * t / 12)) / 2 for t in range(again["steps"])]
    assert rates == pytest.approx(expected)


def test_a_base_that_changed_since_the_study_began_is_refused(tmp_path: Path) -> None:
    """Its rows would be of two experiments, under one name."""
    path = tmp_path / "base.yaml"
    path.write_text(dump_config(frames(tmp_path)))
    Ledger(study(base=str(path)), tmp_path / "out").begin()
    Ledger(study(base=str(path)), tmp_path / "out").begin()
    path.write_text(dump_config(frames(tmp_path, model={"projection_width": 9})))
    changed = (
        r"has changed since the study in .*: model.projection_width is 9, not 8; restore it fr"
    )
    with pytest.raises(ConfigError, match=changed):
        Ledger(study(base=str(path)), tmp_path / "out").begin()
    path.write_text((tmp_path / "out/base.yaml").read_text())
    Ledger(study(base=str(path)), tmp_path / "out").begin()


def test_medians_of_few_steps(tmp_path: Path) -> None:
    assert measure(tmp_path, None) is None
    row = {"step": 0, "loss": 1.0, "seconds": 2.0, "samples_per_s": 3.0, "data_wait_s": 0.1}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    found = measure(tmp_path, None)
    assert found is not None
    assert (found["step_s"], found["counted_steps"], found["peak_memory_bytes"]) == (2.0, 1, None)


def test_the_best_is_not_one_that_failed(tmp_path: Path) -> None:
    ledger = Ledger(study(), tmp_path)
    trials = plan(ledger.study, ledger.out)
    ledger.begin()
    assert best(read_results(tmp_path), "accuracy") is None
    for trial, accuracy in zip(trials, (0.5, 0.9, 0.8, None, 0.95), strict=False):
        ran(ledger, trial, accuracy)
    ledger.append(trials[0], "done")
    ledger.append(trials[1], "failed", "the loss is not finite")  # though a result lies there
    ledger.append(trials[2], "done")
    ledger.append(trials[3], "done")  # without a score
    ledger.append(trials[4], "stopped", rung=4)  # of fewer steps than the others
    results = read_results(tmp_path)
    assert trials_of(results, "accuracy") == ["002"]
    assert ledger.rows["001"]["result"] is None
    low = replace(results, study=study(measure=TREE["measure"] | {"mode": "min"}))
    assert trials_of(low, "accuracy") == ["000"]
    ledger.rows["002"]["measured"]["step_s"] = 4
    ledger.rows["002"]["fingerprint"] = fingerprint(ledger.rows["002"])
    ledger.begin()
    # By what is measured, of which less.
    assert trials_of(read_results(tmp_path), "step_s") == ["002"]


def trials_of(results: Results, name: str) -> list[str]:
    found = best(results, name)
    assert found is not None
    return found.trials


def test_a_row_that_was_cut_short_is_no_row(tmp_path: Path) -> None:
    ledger = Ledger(study(), tmp_path)
    trials = plan(ledger.study, ledger.out)
    for trial in trials[:2]:
        ledger.append(trial, "failed", "no disk")
    path = tmp_path / "trials.jsonl"
    path.write_text(path.read_text()[:-20])
    again = Ledger(study(concurrent=1, retries=0), tmp_path)  # which may change
    assert list(again.rows) == ["000"]
    again.begin()
    again.append(trials[1], "failed", "no disk")
    assert [row["trial"] for row in read_lines(path)] == ["000", "001"]
    again.forget_failed()
    assert not again.rows and len(read_lines(path)) == 2  # it may be refused yet
    again.begin()
    assert read_lines(path) == []


def test_a_folder_holds_one_study(tmp_path: Path) -> None:
    """From the moment on at which trials can begin; what was refused before leaves nothing."""
    Ledger(study(workers=9), tmp_path)  # more than the cluster has, say
    assert list(tmp_path.iterdir()) == []
    Ledger(study(), tmp_path).begin()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "base.yaml",
        "study.yaml",
        "trials.jsonl",
    ]
    Ledger(study(), tmp_path)
    with pytest.raises(ConfigError) as error:
        Ledger(study(workers=2), tmp_path)
    assert str(error.value) == (
        f"{tmp_path} has another study: workers is 1, not 2; choose another --out, or add "
        f"--overwrite, which moves it to {tmp_path}-1"
    )
    Ledger(study(workers=2), tmp_path / "another").begin()
    begin_anew(tmp_path)  # as --overwrite does
    Ledger(study(workers=2), tmp_path).begin()
    assert (tmp_path.with_name(f"{tmp_path.name}-1") / "study.yaml").exists()


def test_a_step_without_a_rate_is_no_part_of_the_medians(tmp_path: Path) -> None:
    """A run writes null for what is not finite; where no step has one, there is no median."""
    steps = [{"step": n, "loss": 1.0, "seconds": 2.0, "samples_per_s": None} for n in range(6)]
    steps[4]["samples_per_s"] = 3.0
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in steps))
    found = measure(tmp_path, None)
    assert found is not None
    assert (found["step_s"], found["samples_per_s"], found["data_wait_s"]) == (2.0, 3.0, None)


def test_scores_that_are_not_finite_are_written_as_null(tmp_path: Path) -> None:
    write_rows(tmp_path / "some.jsonl", [{"step": 1, "scores": {"a": float("nan")}}])
    (line,) = (tmp_path / "some.jsonl").read_text().splitlines()
    assert line == '{"step": 1, "scores": {"a": null}}'
    trial = Trial(study(), tmp_path, "000", {})
    trial.run.mkdir(parents=True)
    write_rows(trial.run / "rungs.jsonl", [{"step": 1, "a": float("inf"), "b": 2.0}])
    assert math.isnan(trial.scores()[1]["a"]) and trial.scores()[1]["b"] == 2.0
