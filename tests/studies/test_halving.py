"""Asynchronous successive halving: which trials go on, and that what was decided stays decided."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heron.base.errors import StudyError
from heron.studies.drive import HALVING, goes_on, ray_rule
from heron.studies.study import Study
from heron.training.earlier_run import begin_anew

TREE: dict[str, Any] = {
    "title": "A search",
    "base": "configs/frames.yaml",
    "vary": {"optim.lr": [0.1, 0.2, 0.3]},
    "search": {
        "sampler": "random",
        "scheduler": "asha",
        "trials": 9,
        "steps": 64,
        "grace_steps": 4,
    },
}


def halving(folder: Path, mode: str = "max") -> Callable[[str, dict[str, Any]], bool]:
    measure = {"x": "optim.lr", "y": ["loss"], "score": "loss", "mode": mode}
    return partial(goes_on, Study.model_validate(TREE | {"measure": measure}), folder)


@pytest.mark.parametrize(("mode", "sign"), [("max", 1), ("min", -1)])
def test_the_best_quarter_of_those_there_goes_on(tmp_path: Path, mode: str, sign: int) -> None:
    """Of fewer than four, the best; of eight, whoever is among two; another rung has others."""
    scores = [0.5, 0.4, 0.6, 0.5, 0.55, 0.59, 0.3, 0.59, 0.7]
    found = halving(tmp_path, mode)
    on = [found(f"{n:03}", {"step": 4, "loss": sign * s}) for n, s in enumerate(scores)]
    assert on == [True, False, True, False, False, False, False, True, True]
    assert found("001", {"step": 16, "loss": sign * 0.1})


def test_of_equal_ones_a_quarter_goes_on(tmp_path: Path) -> None:
    found = halving(tmp_path)
    on = [found(f"{n:03}", {"step": 4, "loss": 0.5}) for n in range(12)]
    assert [n for n, went in enumerate(on) if went] == [0, 7, 11]


def test_what_is_no_number_does_not_go_on(tmp_path: Path) -> None:
    found = halving(tmp_path)
    assert found("000", {"step": 4, "loss": 0.1})
    assert not found("001", {"step": 4, "loss": float("nan")})
    assert found("002", {"step": 4, "loss": 0.2})


def test_a_trial_that_goes_on_goes_on_after_an_interruption(tmp_path: Path) -> None:
    """In whatever order trials tell their rungs again, and however good those are that came since.

    A trial that was under way would else be stopped where it has no result.
    """
    found = halving(tmp_path)
    told = [("000", 0.5), ("001", 0.4), ("002", 0.6), ("003", 0.9)]
    on = {name: found(name, {"step": 4, "loss": score}) for name, score in told}
    assert on == {"000": True, "001": False, "002": True, "003": True}
    again = halving(tmp_path)
    for name, score in reversed(told):
        assert again(name, {"step": 4, "loss": score}) == on[name]
    assert not again("004", {"step": 4, "loss": 0.7})  # the others count, each once


RAYS = [
    {"scheduler": "median", "steps": 32, "every_steps": 4, "grace_steps": 8},
    {"scheduler": "async_hyperband", "steps": 64, "grace_steps": 4, "factor": 2, "brackets": 2},
]


def told_to_ray(folder: Path, options: dict[str, Any], restarts: int) -> dict[str, list[bool]]:
    """Of 16 trials that run four at a time, what Ray's scheduler said; begun anew now and then."""
    search = {"sampler": "random", "trials": 16, "seed": 3} | options
    asked = Study.model_validate(
        TREE | {"search": search, "measure": {"x": "optim.lr", "y": ["loss"], "score": "loss"}}
    )
    draw = np.random.default_rng(5)
    levels, trend = draw.random(16) / 5, draw.random((16, 1)) * range(16)
    rule, said = ray_rule(asked, folder), dict[str, list[bool]]()
    waiting, running, reports = list(range(16)), list[int](), 0
    while waiting or running:
        running += [waiting.pop(0) for _ in range(min(4 - len(running), len(waiting)))]
        for trial in [*running]:
            name = f"{trial:03}"
            past = said.setdefault(name, [])
            step, reports = asked.search.rungs[len(past)], reports + 1
            score = float("nan") if trial == 7 else levels[trial] + trend[trial, len(past)]
            if restarts and reports % restarts == 0:
                np.random.seed(reports)  # a process has another state
                rule = ray_rule(asked, folder)
            result = {"step": step, "loss": score}
            past.append(goes_on(asked, folder, name, result, rule))
            assert goes_on(asked, folder, name, result, rule) == past[-1]  # reported again
            if not past[-1] or len(past) == len(asked.search.rungs):
                running.remove(trial)
    return said


@pytest.mark.parametrize("options", RAYS, ids=lambda options: str(options["scheduler"]))
def test_rays_schedulers_go_on_from_what_they_decided(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    for name in ("straight", "killed", "killed always"):
        (tmp_path / name).mkdir()
    straight = told_to_ray(tmp_path / "straight", options, 0)
    lengths = {len(past) for past in straight.values() if not past[-1]}
    assert len(lengths) > 1, "none was stopped early, or all of them at once"
    assert told_to_ray(tmp_path / "killed", options, 7) == straight
    assert told_to_ray(tmp_path / "killed always", options, 1) == straight
    (path,) = (tmp_path / "killed").glob(HALVING)
    path.write_text(path.read_text().replace("false", "true"))
    with pytest.raises(
        StudyError, match="scheduler now decides otherwise for trial .*with --overw"
    ):
        told_to_ray(tmp_path / "killed", options, 1)
    begin_anew(tmp_path / "killed")  # as --overwrite does
    assert told_to_ray(tmp_path / "killed", options, 1) == straight
