"""Population based training, with runs that take no time: who takes over what, come what may."""

import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from heron.base.artefact import fingerprint
from heron.distributed.watchdog import Watchdog
from heron.experiment.config import dump_config
from heron.studies import population
from heron.studies.ledger import Ledger, write_rows
from heron.studies.population import POPULATION, choose_donors, perturb, run_pbt
from heron.studies.study import Study
from heron.studies.trials import LINEAGE, RUNGS, Trial, plan
from heron.training import checkpoint
from heron.training.tracking import read_lines
from tests.experiments import FRAMES
from tests.launch.runs import weights

RATES = {"low": 1e-3, "high": 1, "log": True}
TREE: dict[str, Any] = {
    "title": "A population",
    "vary": {"optim.lr": RATES, "optim.momentum": [0.0, 0.5, 0.9]},
    "search": {"sampler": "random", "scheduler": "pbt", "trials": 4, "steps": 3, "every_steps": 1},
    "measure": {"x": "optim.lr", "y": ["score"], "score": "score"},
}


def study(folder: Path, **changes: Any) -> Study:
    data = FRAMES["data"] | {"path": "frames"}
    base = {"data": data, "objective": {"cross_entropy": {"weight": 1.0}}, "optim": {"kind": "sgd"}}
    (folder / "base.yaml").write_text(yaml.safe_dump(base))
    return Study.model_validate(TREE | {"base": str(folder / "base.yaml")} | changes)


class Runs:
    """What Tune does for `run_pbt`: each run's weights depend on all that it has been through."""

    def __init__(self, study: Study, ledger: Ledger, failing: Sequence[tuple[str, int]] = ()):
        self.study, self.ledger, self.failing = study, ledger, failing
        self.made: list[tuple[str, int]] = []

    def __call__(self, trials: Sequence[Trial], rung: int) -> None:
        for trial in trials:
            if (trial.name, rung) in self.failing:
                self.ledger.append(trial, "failed", "no disk")
                continue
            now, run = trial.current(), trial.run
            told = read_lines(run / RUNGS)
            if rung not in {line["step"] for line in told}:
                score = self._train(now, rung)
                write_rows(run / RUNGS, [*told, {"step": rung, "score": score}])
            if rung == self.study.search.rungs[-1]:
                self.ledger.append(now, "done")

    def _train(self, trial: Trial, rung: int) -> float:
        """To a rung; the checkpoint is saved at every step, and refused under other values."""
        self.made.append((trial.name, rung))
        config = trial.config(rung)
        folder = trial.run / "checkpoints"
        state, step = torch.tensor([int(trial.name) + 1.0]), 0
        if checkpoint.complete_checkpoints(folder):
            snapshot, _ = checkpoint.resume(folder, config, "", Watchdog(math.inf))
            assert snapshot is not None
            state, step = snapshot.model["w"], snapshot.position.step
        texts = {"config.yaml": dump_config(config), "model.json": "{}"}
        for now in range(step + 1, rung + 1):
            state = torch.sin(state * 7 + config.optim.lr + now)
            place, kept = checkpoint.Position(now, 0, now), {"w": state}
            checkpoint.save(folder, checkpoint.Snapshot(place, kept, kept, {}), texts, 2)
        return float(state)


def end(out: Path) -> dict[str, Any]:
    """All that a population leaves, apart from the folder's own name."""
    rows = []
    for row in read_rows(out):
        assert row.pop("fingerprint") == fingerprint(row)  # which depends on the folder's name
        rows.append(json.loads(json.dumps(row).replace(str(out), "")))
    runs = sorted((out / "trials").iterdir())
    return {
        "rows": sorted(rows, key=lambda row: str(row["trial"])),
        "met": read_lines(out / POPULATION),
        "weights": {run.name: weights(run)["w"].item() for run in runs},
        "lineage": {run.name: read_lines(run / LINEAGE) for run in runs},
        "scores": {run.name: read_lines(run / RUNGS) for run in runs},
    }


def read_rows(out: Path) -> list[dict[str, Any]]:
    return read_lines(out / "trials.jsonl")


def go(folder: Path, out: Path, **options: Any) -> Runs:
    """Begin a population, or go on with it."""
    asked = study(folder)
    ledger = Ledger(asked, out)
    ledger.begin()
    runs = Runs(asked, ledger, **options)
    run_pbt(plan(asked, out), ledger, runs)
    return runs


def test_a_population_takes_over_weights(tmp_path: Path) -> None:
    go(tmp_path, tmp_path / "out")
    found = end(tmp_path / "out")
    assert [row["status"] for row in found["rows"]] == ["done"] * 4
    assert [line["step"] for line in found["met"]] == [1, 2]
    for line in found["met"]:
        by_score = sorted(line["scores"], key=line["scores"].__getitem__)
        assert list(line["takes"]) == by_score[:1]  # a quarter of four
        for name, take in line["takes"].items():
            assert take["from"] == by_score[-1]
            assert {"step": line["step"], **take} in found["lineage"][name]
    for row in found["rows"]:
        past = found["lineage"][row["trial"]]
        assert row["lineage"] == past
        values = past[-1]["values"] if past else plan(study(tmp_path))[int(row["trial"])].values
        assert {key: row["values"][key] for key in values} == values


class Moments:
    """Those before each write of a population, of which one is an interrupt."""

    def __init__(self) -> None:
        self.passed, self.last = 0, 0

    def begin(self, last: int = 0) -> None:
        """Count anew; at `last` there is an interrupt, with 0 there is none."""
        self.passed, self.last = 0, last

    def before(self, write: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.passed += 1
            if self.passed == self.last:
                raise KeyboardInterrupt
            return write(*arguments, **options)

        return call


def test_an_interrupted_population_takes_the_same_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any of its writes: the same weights, lineages and rows, no rung trained twice."""
    moments = Moments()
    for module in (population, sys.modules[__name__]):
        monkeypatch.setattr(module, "write_rows", moments.before(write_rows))
    patched = vars(checkpoint) | {"save": moments.before(checkpoint.save)}
    monkeypatch.setattr("heron.studies.population.checkpoint", SimpleNamespace(**patched))
    made = go(tmp_path, tmp_path / "straight").made
    straight, count = end(tmp_path / "straight"), moments.passed
    assert len(straight["met"]) == 2 and count == 4 * 3 + 2 * 3
    for last in range(1, count + 1):
        moments.begin(last)
        out = tmp_path / f"out-{last}"
        with pytest.raises(KeyboardInterrupt):
            go(tmp_path, out)
        moments.begin()
        again = go(tmp_path, out).made
        assert end(out) == straight, f"interrupted at {last} of {count}"
        assert again == made[len(made) - len(again) :]


def test_a_trial_that_fails_is_not_waited_for(tmp_path: Path) -> None:
    """The last to reach a rung may be the one that fails; run again, it follows the others."""
    out = tmp_path / "out"
    runs = go(tmp_path, out, failing=[("003", 1), ("001", 2)])
    first = end(out)
    assert [row["status"] for row in first["rows"]] == ["done", "failed", "done", "failed"]
    assert [sorted(line["scores"]) for line in first["met"]] == [
        ["000", "001", "002"],
        ["000", "002"],
    ]
    assert [len(line["takes"]) for line in first["met"]] == [1, 1]
    ledger = Ledger(study(tmp_path), out)
    ledger.forget_failed()
    ledger.begin()
    runs = go(tmp_path, out)
    second = end(out)
    assert runs.made == [("003", 1), ("001", 2), ("003", 2), ("001", 3), ("003", 3)]
    assert [row["status"] for row in second["rows"]] == ["done"] * 4
    assert second["met"] == first["met"]  # what was decided stays decided
    assert all(second["weights"][name] == first["weights"][name] for name in ("000", "002"))


def test_all_fail(tmp_path: Path) -> None:
    """Nobody meets, so that all can meet where they are run again."""
    out = tmp_path / "out"
    runs = go(tmp_path, out, failing=[(f"{n:03}", 1) for n in range(4)])
    assert runs.made == [] and read_lines(out / POPULATION) == []
    ledger = Ledger(study(tmp_path), out)
    ledger.forget_failed()
    ledger.begin()
    go(tmp_path, out)
    go(tmp_path, tmp_path / "straight")
    assert end(out) == end(tmp_path / "straight")


def test_who_takes_over(tmp_path: Path) -> None:
    asked = study(tmp_path)
    values = {f"{n:03}": {"optim.lr": 0.1, "optim.momentum": 0.5} for n in range(8)}
    scores = {name: float(int(name)) for name in values}
    found = choose_donors(asked, 2, scores, values)
    assert sorted(found) == ["000", "001"]
    assert {take["from"] for take in found.values()} <= {"006", "007"}
    assert (
        choose_donors(asked, 2, scores, values) == found != choose_donors(asked, 4, scores, values)
    )
    less = study(tmp_path, measure=TREE["measure"] | {"mode": "min"})
    assert sorted(choose_donors(less, 2, scores, values)) == ["006", "007"]
    assert sorted(choose_donors(asked, 2, scores | {"007": float("nan")}, values)) == ["000", "007"]
    few = {name: scores[name] for name in ("000", "001")}
    assert choose_donors(asked, 2, few, values)["000"]["from"] == "001"
    assert choose_donors(asked, 2, {"000": 1.0}, values) == {}


def test_how_values_are_perturbed(tmp_path: Path) -> None:
    """By 0.8 or 1.2 within the range, to the next of a list; drawn anew a quarter of the time."""
    asked, random = study(tmp_path), np.random.default_rng(0)
    given = {"optim.lr": 0.1, "optim.momentum": 0.9}
    found = [perturb(asked, given, random) for _ in range(2000)]
    rates = [values["optim.lr"] for values in found]
    share = {rate: rates.count(rate) / 2000 for rate in (0.08, 0.12)}
    assert all(0.33 < part < 0.42 for part in share.values())  # of 0.375 each
    others = [rate for rate in rates if rate not in share]
    assert min(others) < 0.01 and 0.5 < max(others) <= 1
    near = [values["optim.momentum"] for values in found]  # at the end of its list
    shares = [near.count(momentum) / 2000 for momentum in (0.0, 0.5, 0.9)]
    assert shares == pytest.approx([0.25 / 3, 0.375 + 0.25 / 3, 0.375 + 0.25 / 3], abs=0.04)
    ends = [perturb(asked, given | {"optim.lr": 1.0}, random)["optim.lr"] for _ in range(200)]
    assert max(ends) == 1.0 and 0.8 in ends
