"""Activation checkpointing: same numbers and names, fewer bytes kept, statistics that move once."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from heron.api.job import pretrain
from heron.base.errors import ConfigError
from heron.models.encoders import build_encoder
from heron.models.options import Cnn, Mlp, Resnet, Timm, Transformer
from heron.models.recompute import recompute_blocks
from tests import ranks
from tests.experiments import frames
from tests.test_pretrain import losses, weights

VIT = {"model_type": "vit", "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
BERT = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
CASES: list[tuple[Any, list[int], int]] = [
    (Mlp(widths=[16, 16, 16], dropout=0.3), [12], 1),
    (Cnn(channels=[8, 8, 8]), [32, 32, 3], 1),
    (Resnet(widths=[8, 8, 16], depths=[2, 2, 1]), [16, 16, 3], 3),
    (Transformer(config=VIT | {"patch_size": 8, "intermediate_size": 32}), [16, 16, 3], 3),
    (Transformer(config=BERT | {"intermediate_size": 32}), [7, 30], 3),
    (Timm(name="vit_tiny_patch16_224", options={"depth": 3}), [32, 32, 3], 3),
]


def saved_bytes(encoder: nn.Module, x: Tensor) -> tuple[int, Tensor, list[Tensor]]:
    """What a graph keeps from forward to backward but parameters; the features; the gradients."""
    kept: dict[int, int] = {}
    own = {p.data_ptr() for p in encoder.parameters()}

    def pack(t: Tensor) -> Tensor:
        if t.data_ptr() not in own:
            kept[t.data_ptr()] = t.numel() * t.element_size()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        features = encoder(x, torch.arange(len(x)))
    before = sum(kept.values())
    features.square().sum().backward()
    return before, features, [p.grad for p in encoder.parameters() if p.grad is not None]


@pytest.mark.parametrize(("config", "shape", "blocks"), CASES, ids=lambda c: type(c).__name__)
def test_less_is_kept_and_the_numbers_are_the_same(
    config: Any, shape: list[int], blocks: int
) -> None:
    if isinstance(config, Timm):
        pytest.importorskip("timm", exc_type=ImportError)
    plain, _ = build_encoder(config, shape, salt=1)
    again = copy.deepcopy(plain)
    assert recompute_blocks(again) == blocks
    again = copy.deepcopy(again)  # a copy is one of itself
    assert list(again.state_dict()) == list(plain.state_dict())
    x = torch.rand(6, shape[2], *shape[:2]) if len(shape) == 3 else torch.rand(6, *shape)
    if len(shape) == 2:
        x = torch.randint(0, shape[1], (6, shape[0]), dtype=torch.int32)
    bytes_of_plain, expected, gradients = saved_bytes(plain, x)
    kept, found, others = saved_bytes(again, x)
    assert torch.equal(found, expected)
    assert all(map(torch.equal, others, gradients)) and len(others) == len(gradients)
    for name, value in plain.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name  # running statistics too
    assert kept < 0.7 * bytes_of_plain


def run(folder: str) -> str:
    world = torch.distributed.get_world_size()
    train = {"activation_checkpointing": True, "steps": 3, "micro_batch": 16 // world}
    result = pretrain(frames(Path(folder), f"again-{world}", train=train | {"precision": "fp64"}))
    return str(result["strategy"])


def test_a_run_is_the_same_on_any_number_of_processes(tmp_path: Path) -> None:
    train = {"steps": 3, "micro_batch": 16, "precision": "fp64"}
    pretrain(frames(tmp_path, "plain", train=train))
    for world in (1, 2):
        ranks.run(world, run, str(tmp_path))
        for mine, theirs in zip(
            losses(tmp_path / f"again-{world}"), losses(tmp_path / "plain"), strict=True
        ):
            assert mine == pytest.approx(theirs, rel=1e-12 if world == 1 else 1e-9)
        for name, value in weights(tmp_path / "plain").items():
            other = weights(tmp_path / f"again-{world}")[name]
            torch.testing.assert_close(other, value, rtol=1e-8, atol=1e-9, msg=name)


def test_both_ways_to_compute_again_are_refused(tmp_path: Path) -> None:
    both = {"activation_checkpointing": True, "compile": True}
    with pytest.raises(
        ConfigError, match="train: .*both be true, because a compiled graph decides"
    ):
        frames(tmp_path, train=both)
