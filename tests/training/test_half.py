"""Training in float16: the scale of the loss, the steps that it skips, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from heron.api.job import pretrain
from heron.config.errors import TrainingError
from heron.training.tracking import read_metrics
from heron.training.values import refuse_nonfinite
from tests import ranks
from tests.distributed.test_strategies import cell, difference, losses

STEPS = 6
LARGE = {"cross_entropy": {"weight": 3.0}}  # its gradient overflows until the scale has fallen
TERMS = {"cross_entropy": 1.0, "weighted_unsupervised": 0.5, "weighted_supervised": 0.2}


def run(folder: Path, name: str, strategy: str = "ddp", kind: str = "fp16", **more: Any) -> None:
    options = {"optim": {"kind": "adamw", "lr": 0.005}, **more}
    pretrain(cell(folder, name, strategy, kind, "whole", **options))


def small(folder: Path, name: str, strategy: str = "ddp", kind: str = "fp16") -> None:
    """A gradient of a 1,024th, with a learning rate of 1,024 times: nothing overflows."""
    objective = {name: {"weight": weight / 1024} for name, weight in TERMS.items()}
    optim = {"kind": "sgd", "lr": 0.02 * 1024, "weight_decay": 0.01 / 1024}
    run(folder, name, strategy, kind, objective=objective, optim=optim)


def both(folder: Path) -> None:
    small(folder, "ddp")
    small(folder, "fsdp", "fsdp")


def test_half_precision_is_near_single(tmp_path: Path) -> None:
    """On one process, and on two under DDP and FSDP2; float16 has 11 bits."""
    ranks.run(1, small, tmp_path, "single", "ddp", "fp32")
    ranks.run(1, small, tmp_path, "one")
    ranks.run(2, both, tmp_path)
    for name in ("one", "ddp", "fsdp"):
        of_losses, of_weights = difference(tmp_path / name, tmp_path / "single")
        assert 1e-6 < of_losses < 2e-3 and of_weights < 5e-3, (name, of_losses, of_weights)
        assert {row["loss_scale"] for row in rows(tmp_path / name)} == {65536}


def rows(run: Path) -> list[dict[str, Any]]:
    return [row for row in read_metrics(run / "metrics.jsonl") if "loss" in row]


def tensors(run: Path, step: int, file: str) -> dict[str, Tensor]:
    return load_file(run / "checkpoints" / f"step-{step:08d}" / f"{file}.safetensors")


def large(folder: Path, name: str, steps: list[int], strategy: str = "ddp") -> None:
    for last in steps:
        train = {"steps": last, "save_every_steps": 1, "keep_checkpoints": STEPS}
        run(folder, name, strategy, objective=LARGE, train=train, run={"resume": "auto"})


def test_a_step_whose_gradient_overflows_is_skipped(tmp_path: Path) -> None:
    """The weights stay, the scale is halved, and Adam counts the other steps alone."""
    ranks.run(1, large, tmp_path, "run", [STEPS])
    run, skipped = tmp_path / "run", 0
    for step, row in enumerate(rows(run), start=1):
        assert row["loss_scale"] == 65536 / 2**skipped
        overflows = row["gradient_norm"] is None
        skipped += overflows
        state = tensors(run, step, "optimizer")
        assert state["loss_scale/scale"] == 65536 / 2**skipped
        if step > skipped:
            assert state["loss_scale/updates"] == step - skipped
        if step > 1:
            before, after = (tensors(run, at, "model") for at in (step - 1, step))
            still = {k for k in after if torch.equal(before[k], after[k])}
            weights = {k for k in after if k.endswith((".weight", ".bias"))}
            assert (weights <= still) == overflows
    assert 2 <= skipped <= STEPS - 2


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_run_that_was_stopped_has_the_same_bits(strategy: str, tmp_path: Path) -> None:
    """Stopped between a skipped step and one that is not; two processes skip the same ones."""
    ranks.run(2, large, tmp_path, "whole", [STEPS], strategy)
    ranks.run(2, large, tmp_path, "cut", [1, 4, STEPS], strategy)
    assert torch.equal(losses(tmp_path / "cut"), losses(tmp_path / "whole"))
    for file in ("model", "optimizer"):
        cut, whole = (tensors(tmp_path / name, STEPS, file) for name in ("cut", "whole"))
        assert cut.keys() == whole.keys()
        assert all(torch.equal(cut[name], whole[name]) for name in cut), file
    assert None in [row["gradient_norm"] for row in rows(tmp_path / "cut")]


def test_a_run_goes_on_in_another_precision(tmp_path: Path) -> None:
    """Where it is asked for: from the scaled state without a scale, and back."""
    ranks.run(1, forced, tmp_path)
    assert "loss_scale/scale" in tensors(tmp_path / "run", 5, "optimizer")
    assert "loss_scale" not in rows(tmp_path / "run")[3]


def forced(folder: Path) -> None:
    optim = {"kind": "adamw", "lr": 0.005}
    for last, kind in ((3, "fp16"), (4, "fp32"), (5, "fp16")):
        train = {"steps": last}
        pretrain(
            cell(
                folder,
                "run",
                "ddp",
                kind,
                "whole",
                optim=optim,
                train=train,
                run={"resume": "force"},
            )
        )


def refused(folder: Path) -> list[str]:
    said = []
    for stage in "0123":
        with pytest.raises(TrainingError) as error:
            run(folder, f"zero{stage}", f"zero{stage}")
        said.append(str(error.value))
    return said


def test_deepspeed_would_not_scale_the_loss(tmp_path: Path) -> None:
    for said in ranks.run(2, refused, tmp_path):
        assert all("fp16, but DeepSpeed would not scale the loss" in line for line in said)


INFINITE = {"loss": 1.0, "gradient_norm": float("inf")}


@pytest.mark.parametrize(
    ("values", "refused"),
    [
        (INFINITE, "gradient_norm is inf"),
        (INFINITE | {"loss_scale": 2.0}, None),
        (INFINITE | {"loss_scale": 1.0}, "gradient_norm is inf.*try train.precision=tf32, since"),
        ({"loss": float("nan"), "gradient_norm": 1.0, "loss_scale": 2.0}, "loss is nan"),
    ],
)
def test_only_a_gradient_may_overflow(
    values: dict[str, float], refused: str | None, tmp_path: Path
) -> None:
    """And only as long as a smaller scale could mend it."""
    if refused is None:
        refuse_nonfinite(values, 3, tmp_path, {})
        return
    with pytest.raises(TrainingError, match=refused):
        refuse_nonfinite(values, 3, tmp_path, {})
