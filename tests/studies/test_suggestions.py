"""Suggestions by optuna: the same for the same scores, once written never asked for again."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heron.base.errors import StudyError
from heron.base.extras import MissingPackage
from heron.studies.study import Range, Study, Values
from heron.studies.suggestions import Told, Tpe
from heron.studies.trials import Trial, journal, plan, suggest
from heron.training.tracking import read_lines

RATES, WIDTHS = Range(low=1e-4, high=1.0, log=True), [16, 32, [64, 64], "auto"]
RANGES: dict[str, Values] = {"lr": RATES, "width": WIDTHS}
TREE: dict[str, Any] = {
    "title": "A study",
    "base": "configs/frames.yaml",
    "vary": {"optim.lr": {"low": 1e-3, "high": 1, "log": True}},
    "cases": [{"optim.kind": "sgd"}, {"optim.kind": "adamw"}],
    "search": {"sampler": "optuna", "trials": 12, "startup_trials": 4},
    "measure": {"x": "optim.lr", "y": ["accuracy"], "score": "accuracy"},
}


def worth(values: dict[str, Any]) -> float:
    """Best at a rate of 0.03 and the third width."""
    return -abs(math.log10(values["lr"]) + 1.5) - float(values["width"] != [64, 64])


def searched(folder: Path, trials: int, seed: int = 0, startup: int = 6) -> list[Told]:
    """A search to its end by one trial at a time."""
    tpe, told = Tpe(folder, RANGES, seed), list[Told]()
    draw = np.random.default_rng(seed)
    for number in range(trials):
        values = tpe.journal().get(number)
        if values is None and number < startup:
            values = {"lr": RATES.draw(draw), "width": WIDTHS[number % 4]}
        elif values is None:
            values = tpe.suggest(number, told)
        tpe.write(number, values)
        told.append(Told(values, worth(values)))
    return told


def test_it_finds_what_random_draws_do_not(tmp_path: Path) -> None:
    """Over ten seeds, the second half of a search is better than its random beginning."""
    begun, ended = [], []
    for seed in range(10):
        told = searched(tmp_path / str(seed), 24, seed)
        begun += [trial.score for trial in told[:6]]
        ended += [trial.score for trial in told[12:]]
    assert np.mean(np.array(ended, float)) > np.mean(np.array(begun, float)) + 0.5


def test_a_suggestion_depends_on_what_was_told_alone(tmp_path: Path) -> None:
    told = searched(tmp_path / "a", 14)
    assert searched(tmp_path / "b", 14) == told
    first = Tpe(tmp_path / "c", RANGES, 0).suggest(14, told)
    code = (
        "from tests.studies.test_suggestions import *; "
        "told = searched(Path(sys.argv[1]), 14); print(Tpe(Path(), RANGES, 0).suggest(14, told))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "d")]
    said = subprocess.run(command, capture_output=True, text=True)
    assert said.stdout == f"{first}\n", said.stderr
    tpe = Tpe(tmp_path, RANGES, 0)
    assert first != tpe.suggest(15, told) != tpe.suggest(14, told[:-1])
    assert first != Tpe(tmp_path, RANGES, 1).suggest(14, told)


def test_what_failed_was_stopped_or_runs_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import optuna

    made: list[Any] = []
    create = optuna.trial.create_trial

    def spy(**of: Any) -> Any:
        made.append(of)
        return create(**of)

    monkeypatch.setattr(optuna.trial, "create_trial", spy)
    own = {"lr": 0.1, "width": 16}
    told = [
        Told(own, 0.5),
        Told(own, math.nan),
        Told(own),
        Told(own, -math.inf),
        Told(own, 0.4, steps=8),
        Told(own, running=True),
        Told({"lr": 7.0, "width": 16}, 0.9),  # outside the ranges, as an experiment can be
    ]
    Tpe(tmp_path, RANGES, 0).suggest(7, told)
    states = [one.get("state", optuna.trial.TrialState.COMPLETE).name for one in made]
    assert states == ["COMPLETE", "FAIL", "FAIL", "FAIL", "PRUNED", "RUNNING"]
    assert made[0]["value"] == 0.5 and made[4]["intermediate_values"] == {8: 0.4}


def test_a_journal_belongs_to_one_search(tmp_path: Path) -> None:
    searched(tmp_path, 3)
    with pytest.raises(
        StudyError, match=r"suggestions.jsonl belongs to another search \(other ranges or another"
    ):
        Tpe(tmp_path, RANGES, 1).journal()
    with pytest.raises(StudyError, match="belongs to another search"):
        Tpe(tmp_path, {"lr": RANGES["lr"]}, 0).journal()
    assert len(searched(tmp_path / "other", 3, 1)) == 3  # as it says
    lines = read_lines(tmp_path / "suggestions.jsonl")
    assert [line["trial"] for line in lines] == [0, 1, 2]
    Tpe(tmp_path, RANGES, 0).write(1, {"lr": 0.5, "width": 16})  # which it has
    assert read_lines(tmp_path / "suggestions.jsonl") == lines


def test_a_study_takes_its_suggestions_again(tmp_path: Path) -> None:
    study = Study.model_validate(TREE)
    trials = plan(study, tmp_path)
    assert study.planned == 12 and len(trials) == 4  # the others are not known yet

    def row(trial: Trial) -> dict[str, Any]:
        score = -abs(math.log10(trial.values["optim.lr"]) + 1)
        status = "failed" if trial.name == "002" else "done"
        result = None if status == "failed" else {"accuracy": score, "steps": 9}
        return {"status": status, "result": result}

    rows: dict[str, Any] = {}
    while len(trials) < 12:
        rows |= {trial.name: row(trial) for trial in trials}
        trials.append(suggest(trials, rows))
        for trial in trials:
            journal(trial)
        assert plan(study, tmp_path) == trials
    assert trials[-1].values.keys() == {"optim.kind", "optim.lr"} and trials[-1].name == "011"
    random = Study.model_validate(TREE | {"search": {"sampler": "random", "trials": 12}})
    assert [t.values for t in plan(random)[:4]] == [t.values for t in trials[:4]]


def test_optuna_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MissingPackage, match=r"sampler optuna needs .*heron-pretrain\[study\]"):
        Tpe(tmp_path, RANGES, 0).suggest(0, [])
