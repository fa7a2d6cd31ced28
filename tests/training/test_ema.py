"""The average of the weights against a loop over checkpoints, on any number of processes."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from heron.api.job import pretrain
from heron.base.errors import CheckpointError, ConfigError, TrainingError
from heron.evaluation.evaluator import Evaluator
from heron.models.options import OwnEncoder
from heron.training.pretrained import from_pretrained
from heron.training.tracking import read_metrics
from tests import ranks
from tests.distributed.test_strategies import cell

STEPS, DECAY = 5, 0.5
OPTIM = {"kind": "adamw", "lr": 0.005}


def run(folder: Path, name: str, strategy: str = "ddp", **more: Any) -> dict[str, Any]:
    train = {"ema": DECAY, "steps": STEPS} | more.pop("train", {})
    options: dict[str, Any] = {"optim": OPTIM, "train": train, "run": {"resume": "auto"}, **more}
    return pretrain(cell(folder, name, strategy, "fp32", "whole", **options))


def tensors(folder: Path, step: int, file: str) -> dict[str, Tensor]:
    return load_file(folder / "checkpoints" / f"step-{step:08d}" / f"{file}.safetensors")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process that was never stopped, with a checkpoint after each step."""
    folder = tmp_path_factory.mktemp("ema")
    every = {"save_every_steps": 1, "keep_checkpoints": STEPS}
    ranks.run(1, partial(run, train=every), folder, "straight")
    return folder / "straight"


def test_the_average_is_that_of_a_loop(straight: Path) -> None:
    """Whose initial weights are those of a run that learns nothing."""
    still = partial(run, optim={"kind": "sgd", "lr": 1e-30}, train={"steps": 1})
    ranks.run(1, still, straight.parent, "still")
    initial = tensors(straight.parent / "still", 1, "weights")
    first = tensors(straight, 1, "model")
    counts = {name for name, value in first.items() if not value.is_floating_point()}
    expected = {
        name: value if "running" in name else initial[name] * 2 / 11 + after * 9 / 11
        for (name, value), after in zip(
            first.items(), tensors(straight, 1, "weights").values(), strict=True
        )
    }
    for step in range(1, STEPS + 1):
        found, weights = tensors(straight, step, "model"), tensors(straight, step, "weights")
        decay = min(DECAY, (1 + step) / (10 + step))
        for name, value in found.items():
            if name in counts:
                assert torch.equal(value, weights[name])
                continue
            if step > 1:
                expected[name] = decay * expected[name] + (1 - decay) * weights[name]
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-7)
    apart = [float((found[name] - weights[name]).abs().max()) for name in found]
    assert max(apart) > 1e-3


def noted(folder: Path) -> list[dict[str, Tensor]]:
    """The weights that were scored."""
    seen, evaluate = list[dict[str, Tensor]](), Evaluator.evaluate

    def spy(self: Evaluator, model: Any, *args: Any, **options: Any) -> Any:
        seen.append({name: value.clone() for name, value in model.state_dict().items()})
        return evaluate(self, model, *args, **options)

    Evaluator.evaluate = spy  # type: ignore[method-assign]
    run(folder, "noted", train={"evaluate_every_steps": 3})
    return seen


def test_the_average_is_what_is_scored_and_what_others_load(straight: Path) -> None:
    (scored,) = ranks.run(1, noted, straight.parent)
    for step, weights in zip((3, STEPS), scored, strict=True):
        expected = tensors(straight, step, "model")
        assert all(torch.equal(value, expected[name]) for name, value in weights.items())
    loaded = from_pretrained(straight).state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in scored[-1].items())


def other(folder: Path, strategies: list[str]) -> None:
    """An evaluation in the middle swaps the weights twice."""
    for strategy in strategies:
        run(folder, strategy, strategy, train={"evaluate_every_steps": 2})


def scores(run: Path) -> list[float]:
    rows = [row for row in read_metrics(run / "metrics.jsonl") if "loss" not in row]
    return [value for key, value in rows[-1].items() if key.startswith("test/auc")]


def legs(folder: Path, name: str, first: int, strategies: list[str]) -> None:
    for steps, strategy in enumerate(strategies, start=first):
        run(folder, name, strategy, train={"steps": steps})


def test_any_strategy_and_any_cut_has_the_average_of_one_process(straight: Path) -> None:
    """The first legs are of two processes."""
    folder, strategies = straight.parent, ["ddp", "fsdp", "zero0", "zero1", "zero2"]
    ranks.run(2, other, folder, strategies)
    ranks.run(2, legs, folder, "legs", 1, ["fsdp", "zero2", "ddp", "fsdp"])
    ranks.run(1, legs, folder, "legs", STEPS, ["ddp"])
    ranks.run(1, partial(run, train={"ema": None}), folder, "without")
    assert scores(folder / "without") != pytest.approx(scores(straight), abs=1e-4)
    for name in [*strategies, "legs"]:
        assert scores(folder / name) == pytest.approx(scores(straight), abs=1e-6), name
        for file in ("model", "weights"):
            found, expected = tensors(folder / name, STEPS, file), tensors(straight, STEPS, file)
            assert found.keys() == expected.keys()
            for key, value in expected.items():
                torch.testing.assert_close(
                    found[key], value, rtol=1e-4, atol=1e-5, msg=f"{name} {key}"
                )


class Layers(nn.Module):
    """The weights of a layer have two names."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into, self.first, self.second = nn.Linear(width, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor, rng_keys: Tensor) -> Tensor:
        found: Tensor = self.second(self.first(self.into(x).relu()).relu())
        return found


class Tied(OwnEncoder):
    def build(self, shape: Sequence[int], salt: int) -> tuple[nn.Module, int]:
        return Layers(shape[0]), 8


def tied(folder: Path, name: str, every: int | None) -> None:
    train = {"steps": 4, "ema": 0.9, "evaluate_every_steps": every}
    encoder = {"kind": f"{__name__}.Tied", "widths": None, "dropout": None}
    run(folder, name, train=train, model={"encoder": encoder})


def test_tied_weights_are_swapped_once(straight: Path) -> None:
    """Else the second swap of a pair would not undo the first."""
    ranks.run(1, tied, straight.parent, "tied", None)
    ranks.run(1, tied, straight.parent, "scored", 1)
    for file in ("model", "weights", "optimizer"):
        found, expected = (tensors(straight.parent / name, 4, file) for name in ("scored", "tied"))
        assert all(torch.equal(found[name], value) for name, value in expected.items()), file


def test_a_run_that_was_stopped_has_the_same_bits(straight: Path) -> None:
    ranks.run(1, legs, straight.parent, "cut", 2, ["ddp"])
    ranks.run(1, legs, straight.parent, "cut", STEPS, ["ddp"])
    for file in ("model", "weights", "optimizer"):
        cut, whole = (
            folder / "checkpoints" / "latest" / f"{file}.safetensors"
            for folder in (straight.parent / "cut", straight)
        )
        assert cut.read_bytes() == whole.read_bytes(), file


def refused(folder: Path, strategy: str, name: str, **train: Any) -> str:
    try:
        run(folder, name, strategy, train=train)
    except (TrainingError, CheckpointError, ConfigError) as error:
        return str(error)
    return "it ran"


def test_what_is_refused(straight: Path) -> None:
    """A run does not go on with another decay; under ZeRO 3 there is no average."""
    for said in ranks.run(2, refused, straight.parent, "zero3", "zero3"):
        assert said.startswith("train.ema and train.keep=best keep weights, but under ZeRO 3")
    changed = partial(refused, steps=STEPS + 1, ema=0.9)
    (said,) = ranks.run(1, changed, straight.parent, "ddp", "straight")
    assert "was made with another configuration: train.ema is 0.5, not 0.9" in said
