"""`heron check`: Heron's losses pass, and planted faults are found."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from heron.base.errors import TrainingError
from heron.cli.main import main
from heron.distributed import collectives
from heron.losses import check
from heron.losses.check import Finding, Result, _alone, _compare, evaluate, passed
from heron.losses.check_inputs import Inputs, LossSpec, guess_form
from heron.losses.named_terms import named_terms
from tests import ranks

ROWS = 12
LOSSES = [f"heron.losses.{section.loss.__name__}" for section in named_terms().values()]
SPECS = [LossSpec(path, {}, "heron") for path in LOSSES] + [
    LossSpec("heron.losses.Hard", {"supervised": False, "positives": "augmentation"}, "heron"),
    LossSpec("heron.losses.Mulco", {"kind": "soft"}, "heron"),
]


def shares_of(world: int, even: bool) -> list[int]:
    return {2: [6, 6], 3: [4, 4, 4]}[world] if even else {2: [9, 3], 3: [6, 4, 2]}[world]


def on_this_process(even: bool, specs: Sequence[LossSpec] = SPECS) -> list[list[Any]]:
    """The results of losses for this process's rows."""
    shares, rank = shares_of(collectives.world_size(), even), collectives.rank()
    start = sum(shares[:rank])
    found = []
    for spec in specs:
        own = Inputs.draw(spec.inputs, ROWS).double().rows(slice(start, start + shares[rank]))
        result = evaluate(spec, own)
        found.append([result.value, list(result.gradients), list(result.learnt), result.error])
    return found


def read(found: Sequence[Any]) -> Result:
    """A result as a process returns it."""
    value, gradients, learnt, error = found
    return Result(value, tuple(gradients), tuple(learnt), error)


@pytest.mark.parametrize(("world", "even"), [(2, True), (2, False), (3, False)])
def test_every_loss_of_heron_is_exact_on_processes(world: int, even: bool) -> None:
    ranks_found = ranks.run(world, on_this_process, even)
    for number, spec in enumerate(SPECS):
        results = [read(found[number]) for found in ranks_found]
        true = evaluate(spec, Inputs.draw(spec.inputs, ROWS).double())
        finding = _compare(spec.path, true, results)
        assert finding.passed, (spec, finding)
        assert finding.text == "value exact, gradient exact", (spec, finding)


@pytest.mark.parametrize("spec", SPECS, ids=[spec.path.split(".")[-1] for spec in SPECS])
def test_every_loss_of_heron_passes_alone(spec: LossSpec) -> None:
    draw = Inputs.draw(spec.inputs, ROWS)
    true = evaluate(spec, draw.double())
    assert not true.error and true.gradients
    findings = _alone(spec, draw, true)
    assert passed(findings), findings


def test_faults_are_found(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["check", "tests.losses.faulty.Detached", "--processes", "2"]) == 1
    out = capsys.readouterr().out
    assert "tests.losses.faulty.Detached, called as loss(z1, z2)" in out
    even = next(line for line in out.splitlines() if "2 processes, even" in line)
    assert "FAILS" in even and "value exact, gradient of another loss" in even


def test_the_time_runs_when_all_have_built_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow import is no loss that waits for ever."""
    monkeypatch.setattr(check, "WAIT_S", 3)
    spec = LossSpec("tests.losses.faulty.slow", {}, "views")
    began = time.monotonic()
    results = check.on_processes(spec, [6, 6])
    finding = _compare("", evaluate(spec, Inputs.draw("views", ROWS).double()), results)
    assert time.monotonic() - began > 4 and finding.text == "value exact, gradient exact", finding


@pytest.mark.parametrize(
    ("name", "case", "text"),
    [
        ("Halved", "2 processes, even", "value exact, gradient 0.500 of the true one"),
        ("Own", "2 processes, even", "on average, gradient of another loss"),
    ],
)
def test_what_a_gathering_does_wrong_is_said(name: str, case: str, text: str) -> None:
    spec = LossSpec(f"tests.losses.faulty.{name}", {}, "pair")
    results = [read(found[0]) for found in ranks.run(2, on_this_process, True, [spec])]
    finding = _compare(case, evaluate(spec, Inputs.draw("pair", ROWS).double()), results)
    assert finding.passed is False and text in finding.text, finding


def test_what_one_process_does_wrong_is_said() -> None:
    found: dict[tuple[str, str], Finding] = {}
    for name in ("unguarded", "Drawn"):
        spec = LossSpec(f"tests.losses.faulty.{name}", {}, "pair")
        draw = Inputs.draw("pair", ROWS)
        found |= {(name, f.case): f for f in _alone(spec, draw, evaluate(spec, draw.double()))}
    assert found["unguarded", "a row of zeros"].passed is False
    assert found["unguarded", "second derivative"] == ("second derivative", True, "right")
    assert found["Drawn", "called twice"] == ("called twice", False, "other bits")


def test_every_number_of_processes_has_rows_for_each() -> None:
    for world in range(2, check.MOST + 1):
        for shares in check.shares_of(world):
            assert len(shares) == world and sum(shares) == ROWS and min(shares) > 0
    assert check.shares_of(2) == ([6, 6], [9, 3]) and check.shares_of(5)[0] == [3, 3, 2, 2, 2]
    for world in (1, check.MOST + 1):
        with pytest.raises(TrainingError, match=f"--processes {world}: a check takes 2 to 6"):
            check.check_loss(SPECS[0], [world])


def test_how_a_loss_is_called_is_guessed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = Result(error="TypeError: it is not called here")
    monkeypatch.setattr(check, "on_processes", lambda spec, shares: [Result(torch.ones(())), wrong])
    assert guess_form("tests.losses.faulty.Own") == "pair"
    assert guess_form("torch.nn.CrossEntropyLoss") == "labelled"
    assert main(["check", "torch.nn.CrossEntropyLoss", "--inputs", "logits", "label_smoothing=.1"])
    assert "FAILS    raised TypeError: it is not called here" in capsys.readouterr().out
    assert main(["check", "torch.nn.CrossEntropyLoss", "--inputs", "clip"]) == 1
    told = capsys.readouterr().err
    assert "cannot be called with clip: " in told and "say what it takes by --inputs" in told
    assert main(["check", "torch.nn.nothing"]) == 1
    assert "cannot import torch.nn.nothing (AttributeError" in capsys.readouterr().err
    assert main(["check", "torch.relu"]) == 1
    assert "say how by --inputs (views: loss([z1, z2]);" in capsys.readouterr().err
