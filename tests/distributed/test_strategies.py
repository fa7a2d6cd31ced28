"""The matrix: any strategy, precision and cut of a step against one process in float32."""

import itertools
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch import Tensor

from heron.api.job import pretrain
from heron.base.errors import CheckpointError, TrainingError
from heron.distributed import collectives
from heron.experiment.config import Config
from heron.training.checkpoint import complete_checkpoints
from heron.training.pretrained import from_pretrained
from heron.training.tracking import read_metrics
from tests import ranks
from tests.experiments import frames
from tests.weekly import WEEKLY

STRATEGIES = "ddp", "zero0", "zero1", "zero2", "zero3", "fsdp"
ROWS = 31  # of a step
CELLS = list(itertools.product(STRATEGIES, ("fp32", "bf16"), ("whole", "cut")))


def choose(strategy: str) -> None:
    """Say what accelerate's launcher would have said."""
    AcceleratorState._reset_state(reset_partial_state=True)
    for name in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"):
        os.environ.pop(name, None)
    if strategy == "fsdp":
        os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    if strategy.startswith("zero"):
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        os.environ["ACCELERATE_DEEPSPEED_ZERO_STAGE"] = strategy[4:]


def cell(folder: Path, name: str, strategy: str, precision: str, cut: str, **more: Any) -> Config:
    """A run of five steps; "cut" has two micro-batches on any number of processes."""
    choose(strategy)
    world = collectives.world_size()
    longest = -(-ROWS // world)
    train = {"precision": precision, "micro_batch": -(-longest // 2) if cut == "cut" else None}
    optim = {"kind": "sgd", "lr": 0.02, "momentum": 0.9, "weight_decay": 0.01, "warmup_epochs": 1}
    changes: dict[str, Any] = {"train": train, "optim": optim}
    for key, value in more.items():
        changes[key] = changes.get(key, {}) | value
    return frames(folder, name, **changes)


def cells(folder: str, wanted: list[tuple[str, str, str]]) -> list[str]:
    """Run some cells, one after another; what each says that it ran."""
    world, said = collectives.world_size(), []
    for strategy, precision, cut in wanted:
        name = f"{world}-{strategy}-{precision}-{cut}"
        result = pretrain(cell(Path(folder), name, strategy, precision, cut))
        said.append(f"{result['strategy']}, {result['precision']}, {result['world_size']}")
    return said


def losses(run: Path) -> Tensor:
    rows = [row for row in read_metrics(run / "metrics.jsonl") if "loss" in row]
    names = sorted(key for key in rows[0] if key == "loss" or key.startswith("loss/"))
    return torch.tensor([[row[key] for key in names] for row in rows])


def weights(run: Path, kind: str = "model") -> dict[str, Tensor]:
    return load_file(run / "checkpoints" / "latest" / f"{kind}.safetensors")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the runs of one process, whole and cut, in both precisions."""
    folder = tmp_path_factory.mktemp("matrix")
    ranks.run(1, cells, str(folder), [c for c in CELLS if c[0] == "ddp"])
    return folder


def difference(run: Path, other: Path) -> tuple[float, float]:
    """Largest differences of the losses, relative, and of the final weights, absolute."""
    mine, theirs = losses(run), losses(other)
    assert len(mine) == 5
    found, expected = weights(run), weights(other)
    assert found.keys() == expected.keys()
    apart = [float((found[k] - expected[k]).abs().max()) for k in expected]
    return float(((mine - theirs) / theirs).abs().max()), max(apart)


def few(world: int) -> list[tuple[str, str, str]]:
    """Micro-batches in float32 under every strategy, and one cell in bfloat16; all if asked for."""
    if WEEKLY:
        return CELLS if world > 1 else [c for c in CELLS if c[0].startswith("zero")]
    return [c for c in CELLS if c[1:] == ("fp32", "cut") or c == ("zero2", "bf16", "whole")]


WORLDS = [1, 2, 3] if WEEKLY else [2]


@pytest.mark.timeout(1500)  # with the runs of the fixture, and all cells when asked for
@pytest.mark.parametrize("world", WORLDS)
def test_any_strategy_is_one_process(folder: Path, world: int) -> None:
    """In float32 to 1e-5; bfloat16 has 8 bits, so a number is right to 4e-3."""
    wanted = few(world)
    said = ranks.run(world, cells, str(folder), wanted)
    for (strategy, precision, cut), words in zip(wanted, said[0], strict=True):
        kind = {"ddp": "DDP", "fsdp": "FSDP2"}.get(strategy, f"DeepSpeed ZeRO {strategy[4:]}")
        assert words == f"{kind}, {precision}, {world}"
        run = folder / f"{world}-{strategy}-{precision}-{cut}"
        of_losses, of_weights = difference(run, folder / f"1-ddp-fp32-{cut}")
        print(f"{run.name}: losses {of_losses:.1e}, weights {of_weights:.1e}")
        assert of_losses < (1e-5 if precision == "fp32" else 2e-2), run.name
        assert of_weights < (1e-5 if precision == "fp32" else 5e-2), run.name


CHAIN = [
    (2, ["zero2", "fsdp", "zero3", "zero1"]),
    (1, ["ddp"]),
]  # but for the first, from a state
if WEEKLY:
    CHAIN += [(3, ["ddp", "zero3", "zero2"]), (1, ["zero1", "zero3"]), (2, ["zero0", "ddp"])]


def legs(folder: str, strategies: list[str], first: int) -> None:
    """Go on a step under each strategy; AdamW's state has two tensors a parameter, and a count."""
    for steps, strategy in enumerate(strategies, start=first):
        more: dict[str, Any] = {
            "optim": {"kind": "adamw", "lr": 0.005},
            "train": {"steps": steps},
            "run": {"resume": "auto"},
        }
        result = pretrain(cell(Path(folder), "chain", strategy, "fp32", "whole", **more))
        assert result["steps"] == steps


def test_a_run_goes_on_under_other_strategies_and_numbers_of_processes(folder: Path) -> None:
    """A step a leg, each under another strategy: the end is that of one process throughout."""
    done = 0
    for world, strategies in CHAIN:
        ranks.run(world, legs, str(folder), strategies, done + 1)
        done += len(strategies)
    (folder / "chain").rename(folder / "legs")
    ranks.run(1, legs, str(folder), ["ddp"], done)
    for file in ("model", "optimizer"):
        found, expected = weights(folder / "legs", file), weights(folder / "chain", file)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=name)
    torch.testing.assert_close(losses(folder / "legs"), losses(folder / "chain"), rtol=1e-5, atol=0)


def test_what_a_run_trained_can_be_loaded_alone(folder: Path) -> None:
    """Out of parts that ZeRO 3 kept on two processes."""
    run = folder / "2-zero3-fp32-cut"
    model = from_pretrained(run)
    assert not model.training
    x = [torch.randn(4, *shape) for shape in ([273], [112])]
    features = model(x, torch.arange(4), [4])
    assert features["logits"][0].shape == (4, 4)
    assert features["projections"][0].shape == (4, 8)
    again = from_pretrained(complete_checkpoints(run / "checkpoints")[-1])
    assert torch.equal(again(x, torch.arange(4), [4])["hidden"][0], features["hidden"][0])
    with pytest.raises(
        CheckpointError, match="has no complete checkpoint; pass the folder of a run"
    ):
        from_pretrained(folder / "frames")


def offloaded(folder: str) -> str:
    """ZeRO 3 whose optimiser state and parameters are kept on the CPU's side."""
    os.environ["ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE"] = "cpu"
    os.environ["ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE"] = "cpu"
    return str(pretrain(cell(Path(folder), "away", "zero3", "fp32", "cut"))["strategy"])


def test_offloading_changes_nothing(folder: Path) -> None:
    said = ranks.run(2, offloaded, str(folder))
    assert said[0] == "DeepSpeed ZeRO 3, optimizer on the cpu, param on the cpu"
    assert max(difference(folder / "away", folder / "1-ddp-fp32-cut")) < 1e-5


REFUSED = [
    (
        "UNUSED",
        "",
        "fsdp",
        "lars",
        "optim.kind is lars, .* under FSDP2 the optimiser sees only parts",
    ),
    ("FSDP_VERSION", "1", "fsdp", "sgd", "must have fsdp_version: 2, got 1"),
    ("UNUSED", "", "zero1", "lars", "optim.kind is lars, .* under ZeRO 1 the optimiser sees"),
    ("ACCELERATE_MIXED_PRECISION", "bf16", "ddp", "sgd", "mixed_precision must be no .*, got bf16"),
    (
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        "2",
        "zero2",
        "sgd",
        "must be 1 .*use train.micro_batch",
    ),
    (
        "ACCELERATE_GRADIENT_CLIPPING",
        "1.0",
        "zero2",
        "sgd",
        "'gradient_clipping': 1.0, but optim.clip",
    ),
]


def refused(folder: str) -> list[str]:
    """The messages of runs that cannot be as they are configured."""
    said = []
    for name, value, strategy, kind, _ in REFUSED:
        config = cell(Path(folder), "refused", strategy, "fp32", "whole", optim={"kind": kind})
        os.environ[name] = value
        try:
            pretrain(config)
            said.append("it ran")
        except TrainingError as error:
            said.append(str(error))
        del os.environ[name]
    return said


def test_what_would_change_the_numbers_is_refused(folder: Path) -> None:
    for said in ranks.run(2, refused, str(folder)):
        for line, (*_, message) in zip(said, REFUSED, strict=True):
            assert re.search(message, line), line
