"""Training in float16: the scale of the loss, the steps that it skips, and what is refused."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from heron.api.job import pretrain
from heron.base.errors import CheckpointError, TrainingError
from heron.models.options import OwnEncoder
from heron.training import checkpoint
from heron.training.checkpoint import Position, Snapshot, save
from heron.training.run_log import refuse_nonfinite
from heron.training.tracking import read_metrics
from tests import ranks
from tests.distributed.test_strategies import cell, difference, losses

STEPS = 6
LARGE = {"cross_entropy": {"weight": 3.0}}  # its gradient overflows until the scale has fallen
CLIP = 1.0
TERMS = {"cross_entropy": 1.0, "weighted_unsupervised": 0.5, "weighted_supervised": 0.2}


def run(folder: Path, name: str, strategy: str = "ddp", kind: str = "fp16", **more: Any) -> None:
    options = {"optim": {"kind": "adamw", "lr": 0.005}, **more}
    pretrain(cell(folder, name, strategy, kind, "whole", **options))


def small(
    folder: Path, name: str, strategy: str = "ddp", kind: str = "fp16", cut: str = "whole"
) -> None:
    """A gradient of a 1,024th, with a learning rate of 1,024 times: nothing overflows.

    It is clipped, to a third of its length.
    """
    objective = {name: {"weight": weight / 1024} for name, weight in TERMS.items()}
    optim = {"kind": "sgd", "lr": 0.02 * 1024, "weight_decay": 0.01 / 1024}
    options = {"objective": objective, "optim": optim | {"clip_norm": CLIP / 1024}}
    pretrain(cell(folder, name, strategy, kind, cut, **options))


def both(folder: Path) -> None:
    for strategy, cut in itertools.product(("ddp", "fsdp"), ("whole", "cut")):
        small(folder, f"{strategy}-{cut}", strategy, "fp16", cut)


def test_half_precision_is_near_single(tmp_path: Path) -> None:
    """On one process, and on two under DDP and FSDP2; float16 has 11 bits."""
    for cut in ("whole", "cut"):
        ranks.run(1, small, tmp_path, f"single-{cut}", "ddp", "fp32", cut)
        ranks.run(1, small, tmp_path, f"one-{cut}", "ddp", "fp16", cut)
    ranks.run(2, both, tmp_path)
    assert min(row["gradient_norm"] for row in rows(tmp_path / "single-whole")) > 2 * CLIP / 1024
    for way, cut in itertools.product(("one", "ddp", "fsdp"), ("whole", "cut")):
        name = f"{way}-{cut}"
        of_losses, of_weights = difference(tmp_path / name, tmp_path / f"single-{cut}")
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
        assert state.get("loss_scale/skipped", 0) == (skipped if step > skipped else 0)
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
    """Where it is asked for; Adam's count of updates stays, wherever the run is cut."""
    ranks.run(1, forced, tmp_path, "whole", [(4, "fp16"), (7, "fp32"), (8, "fp16")])
    ranks.run(1, forced, tmp_path, "cut", [(4, "fp16"), (5, "fp32"), (7, "fp32"), (8, "fp16")])
    ranks.run(2, forced, tmp_path, "two", [(4, "fp16"), (5, "fp32"), (7, "fp32"), (8, "fp16")])
    whole, cut, two = (tensors(tmp_path / n, 8, "optimizer") for n in ("whole", "cut", "two"))
    assert all(torch.equal(cut[name], value) for name, value in whole.items())
    assert 1 <= whole["loss_scale/skipped"] <= 3
    assert whole["loss_scale/skipped"] == two["loss_scale/skipped"]
    assert "loss_scale" not in rows(tmp_path / "whole")[4]


def forced(folder: Path, name: str, legs: list[tuple[int, str]]) -> None:
    for last, kind in legs:
        train = {"steps": last}
        run(folder, name, "ddp", kind, objective=LARGE, train=train, run={"resume": "force"})


@pytest.mark.parametrize(
    "crafted",
    [
        {"scale": torch.tensor(float("nan")), "streak": torch.tensor(0.0)},
        {"scale": torch.tensor(-2.0), "streak": torch.tensor(0.0)},
        {"scale": torch.tensor(0.0), "streak": torch.tensor(0.0)},
        {"scale": torch.tensor([2.0, 2.0]), "streak": torch.tensor(0.0)},
        {"scale": torch.tensor(2.0)},
        {"skipped": torch.tensor(float("nan"))},
        {"skipped": torch.tensor(7.0)},
    ],
)
def test_an_impossible_scale_is_refused(crafted: dict[str, Tensor], tmp_path: Path) -> None:
    optimizer = {f"loss_scale/{name}": value for name, value in crafted.items()}
    snapshot = Snapshot(Position(3, 0, 3), {}, optimizer, {})
    with pytest.raises(CheckpointError, match="impossible loss scale"):
        checkpoint.load(save(tmp_path, snapshot, {"config.yaml": "", "model.json": ""}, 1))


class Steep(nn.Module):
    """Its numbers are too large for float16 for a moment."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 8)

    def forward(self, x: Tensor, rng_keys: Tensor) -> Tensor:
        found: Tensor = self.layer(x) * 1e7 / 1e7
        return found


class SteepEncoder(OwnEncoder):
    def build(self, shape: Sequence[int], salt: int) -> tuple[nn.Module, int]:
        return Steep(shape[0]), 8


def steep(folder: Path, kind: str) -> str:
    encoder = {"kind": f"{__name__}.SteepEncoder", "widths": None, "dropout": None}
    try:
        run(folder, kind, "ddp", kind, model={"encoder": encoder})
    except TrainingError as error:
        return str(error)
    return "it ran"


def test_what_overflows_before_the_loss_runs_in_another_precision(tmp_path: Path) -> None:
    (said,) = ranks.run(1, steep, tmp_path, "fp16")
    assert "is nan; this step was not saved" in said
    assert said.endswith("or use train.precision=tf32, as float16 ends at 65,504")
    assert ranks.run(1, steep, tmp_path, "tf32") == ["it ran"]


def refused(folder: Path) -> list[str]:
    said = []
    for stage in "0123":
        with pytest.raises(TrainingError) as error:
            run(folder, f"zero{stage}", f"zero{stage}")
        said.append(str(error.value))
    return said


def test_deepspeed_would_not_scale_the_loss(tmp_path: Path) -> None:
    for said in ranks.run(2, refused, tmp_path):
        assert all("fp16, which Heron does not support under DeepSpeed" in line for line in said)


INFINITE = {"loss": 1.0, "gradient_norm": float("inf")}


@pytest.mark.parametrize(
    ("values", "refused"),
    [
        (INFINITE, "gradient_norm is inf"),
        (INFINITE | {"loss_scale": 2.0}, None),
        (INFINITE | {"loss_scale": 1.0}, "gradient_norm is inf.*use train.precision=tf32, as"),
        ({"loss": float("nan"), "gradient_norm": 1.0, "loss_scale": 2.0}, "loss is nan"),
    ],
)
def test_only_a_gradient_may_overflow(
    values: dict[str, float], refused: str | None, tmp_path: Path
) -> None:
    """And only as long as a smaller scale could mend it."""
    if refused is None:
        (line,) = refuse_nonfinite(values, 3, tmp_path)
        assert "step 3: the gradient overflowed in float16, so the step was skipped" in line
        return
    with pytest.raises(TrainingError, match=refused):
        refuse_nonfinite(values, 3, tmp_path)
