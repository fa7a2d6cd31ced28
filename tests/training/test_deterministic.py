"""Deterministic kernels: asked for of torch, exact resume under them, and what has none."""

from pathlib import Path
from typing import Any

import pytest
import torch

from heron.api.job import pretrain
from heron.base.errors import TrainingError
from heron.training.trainer import Trainer
from tests.experiments import frames
from tests.test_pretrain import losses, weights

ON: dict[str, Any] = {"deterministic": True, "steps": 4}


@pytest.fixture(autouse=True)
def restored() -> Any:
    yield
    torch.use_deterministic_algorithms(False)


def test_a_run_in_two_parts_is_the_run_in_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pretrain(frames(tmp_path, "whole", train=ON))
    assert torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.deterministic
    assert "one process, fp32, deterministic kernels\n" in capsys.readouterr().out
    pretrain(frames(tmp_path, "parts", train=ON | {"steps": 2}))
    pretrain(frames(tmp_path, "parts", train=ON, run={"resume": "auto"}))
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    for name, value in weights(tmp_path / "whole").items():
        assert torch.equal(weights(tmp_path / "parts")[name], value), name


def test_a_kernel_that_does_not_repeat_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(*_: Any) -> Any:
        return torch.zeros(2).put_(torch.tensor([0]), torch.ones(1)).unbind()

    monkeypatch.setattr(Trainer, "step", step)
    with pytest.raises(
        TrainingError, match="train.deterministic is true, but .*: put_.*use another"
    ):
        pretrain(frames(tmp_path, train=ON))
