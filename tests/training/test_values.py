"""What is not finite, or refused by a term, stops a run before it is saved, by name."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from heron.api.job import pretrain
from heron.base.errors import TrainingError
from heron.losses.classification import Bce
from heron.training.checkpoint import complete_checkpoints
from heron.training.run_log import refuse_nonfinite
from heron.training.tracking import read_metrics
from tests.experiments import frames


def test_a_loss_that_is_no_number_stops_the_run_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = Bce.share, iter(range(9))

    def broken(*args: Any) -> Tensor:
        return real(*args) * (float("nan") if next(calls) == 2 else 1.0)

    monkeypatch.setattr(Bce, "share", broken)
    terms = {"cross_entropy": None, "bce": {"weight": 1.0}}
    config = frames(tmp_path, objective=terms)
    with pytest.raises(TrainingError, match=r"step 2: loss/bce is nan, .* last checkpoint: none"):
        pretrain(config)
    done = [row for row in read_metrics(tmp_path / "run/metrics.jsonl") if "loss" in row]
    assert len(done) == 2  # what was done before is kept


@pytest.mark.parametrize("last", [False, True])
def test_a_step_with_a_nan_is_not_saved(
    last: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its numbers are read a step later, and yet before a checkpoint, also that of the end."""
    real, calls = Bce.share, iter(range(9))

    def broken(*args: Any) -> Tensor:
        return real(*args) * (float("nan") if next(calls) == 2 else 1.0)

    monkeypatch.setattr(Bce, "share", broken)
    length = {"steps": 3} if last else {"steps": 9, "save_every_steps": 1}
    terms = {"cross_entropy": None, "bce": {"weight": 1.0}}
    with pytest.raises(TrainingError, match="step 2: loss/bce is nan.*; this step was not saved"):
        pretrain(frames(tmp_path, objective=terms, train=length))
    kept = [path.name for path in complete_checkpoints(tmp_path / "run/checkpoints")]
    assert kept == ([] if last else ["step-00000001", "step-00000002"])


def test_a_term_that_refuses_its_input_is_named(tmp_path: Path) -> None:
    terms = {"hard": {"tau": 0.01, "hardening": "exp", "beta": 9.0}}
    config = frames(tmp_path, objective=terms)
    with pytest.raises(
        TrainingError, match="objective.hard: temperature tau, divided by 1 .* got 0.001"
    ):
        pretrain(config)


def test_a_gradient_that_is_no_number_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nan = torch.tensor(float("nan"))
    monkeypatch.setattr(torch.nn.utils, "get_total_norm", lambda gradients: nan)
    with pytest.raises(TrainingError, match="step 0: gradient_norm is nan"):
        pretrain(frames(tmp_path))


def test_an_infinite_term_is_named(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="step 7: loss/b is inf"):
        refuse_nonfinite({"loss": math.inf, "loss/a": 1.0, "loss/b": math.inf}, 7, tmp_path)
