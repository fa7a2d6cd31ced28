"""Clipped gradients against a step by hand, under every strategy."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from heron.api.job import pretrain
from heron.training.tracking import read_metrics
from tests import ranks
from tests.distributed.test_strategies import STRATEGIES, cell

LR, LARGEST = 0.25, 0.5


def step(
    folder: Path, name: str, strategy: str, clip_norm: float | None, kind: str = "sgd"
) -> None:
    """Plain SGD takes a step of its rate times the gradient."""
    optim = {"kind": kind, "lr": LR, "momentum": 0.0, "weight_decay": 0.0, "warmup_epochs": 0}
    options: dict[str, Any] = {"optim": optim | {"clip_norm": clip_norm}, "train": {"steps": 1}}
    pretrain(cell(folder, name, strategy, "fp32", "whole", **options))


def every(folder: Path) -> None:
    for strategy in STRATEGIES:
        step(folder, strategy, strategy, LARGEST)


def one(folder: Path) -> None:
    step(folder, "still", "ddp", 1e-30)
    step(folder, "free", "ddp", None)
    step(folder, "wide", "ddp", 1e6)
    for kind in ("lars", "adamw"):
        step(folder, kind, "ddp", LARGEST, kind)


def weights(run: Path) -> dict[str, Tensor]:
    """The trained ones: batch norm's statistics are none."""
    state = load_file(run / "checkpoints" / "latest" / "model.safetensors")
    return {k: v.double() for k, v in state.items() if k.endswith((".weight", ".bias"))}


def test_a_longer_gradient_is_scaled_to_the_largest_norm(tmp_path: Path) -> None:
    """On one process and on two; a shorter one stays, bit for bit."""
    ranks.run(1, one, tmp_path)
    ranks.run(2, every, tmp_path)
    before, free = weights(tmp_path / "still"), weights(tmp_path / "free")
    moved = {name: free[name] - before[name] for name in before}
    length = torch.stack([x.norm() for x in moved.values()]).norm()
    assert length > 2 * LR * LARGEST  # the norm of the gradient is over 1
    norm = read_metrics(tmp_path / "free" / "metrics.jsonl")[0]["gradient_norm"]
    assert norm == pytest.approx(float(length / LR), rel=1e-4)
    assert all(torch.equal(free[k], v) for k, v in weights(tmp_path / "wide").items())
    for strategy in STRATEGIES:
        found = weights(tmp_path / strategy)
        for name, change in moved.items():
            expected = before[name] + change * (LARGEST / norm)
            torch.testing.assert_close(found[name], expected, rtol=0, atol=2e-6, msg=strategy)
        said = read_metrics(tmp_path / strategy / "metrics.jsonl")[0]["gradient_norm"]
        assert said == pytest.approx(norm, rel=1e-5), strategy  # that of before


def test_other_optimisers_see_the_clipped_gradient(tmp_path: Path) -> None:
    """LARS's step is no longer than the clipped gradient has it; Adam's average is a tenth."""
    ranks.run(1, one, tmp_path)
    before = weights(tmp_path / "still")
    state = load_file(tmp_path / "adamw" / "checkpoints" / "latest" / "optimizer.safetensors")
    averages = [value.norm() for name, value in state.items() if name.endswith("/exp_avg")]
    assert float(torch.stack(averages).norm()) == pytest.approx(0.1 * LARGEST, rel=1e-4)
    moved = [v - before[k] for k, v in weights(tmp_path / "lars").items()]
    assert torch.stack([x.norm() for x in moved]).norm() <= LR * LARGEST * 1.001
