"""Compiled encoders and augmentations: the numbers, the names, and what is refused."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from heron.api.job import pretrain
from heron.base.errors import ConfigError
from heron.data.random_keys import opaque_uniforms, uniforms
from heron.distributed import collectives
from heron.experiment.config import Config
from heron.models.encoders import build_encoder
from heron.models.options import Mlp
from heron.training import trainer as job
from tests import ranks
from tests.experiments import frames
from tests.test_pretrain import losses, weights

ON: dict[str, Any] = {"compile": True, "precision": "fp64", "steps": 3}
OPTIM = {"kind": "sgd", "lr": 0.02}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the run that is not compiled; GradCache, dropout of uneven widths, batch norm."""
    folder = tmp_path_factory.mktemp("compiled")
    pretrain(config(folder, "plain", compile=False))
    return folder


def config(folder: Path, name: str, **train: Any) -> Config:
    """Two micro-batches on any number of processes."""
    half = {"micro_batch": 16 // collectives.world_size()}
    resume = {"resume": "auto"}
    return frames(folder, name, train=ON | half | train, optim=OPTIM, run=resume)


def graphs(folder: str) -> list[list[dict[str, Any]]]:
    """A run that is traced, and compiled by nothing, straight and in two parts."""
    job.COMPILER, where = "aot_eager", Path(folder)
    world = collectives.world_size()
    pretrain(config(where, f"whole-{world}"))
    pretrain(config(where, f"parts-{world}", steps=2))
    pretrain(config(where, f"parts-{world}"))
    return [losses(where / f"{kind}-{world}") for kind in ("whole", "parts")]


@pytest.mark.parametrize("world", [1, 2])
def test_a_traced_run_is_the_plain_one(folder: Path, world: int) -> None:
    """To rounding, on two processes as well; and a resumed one to the bit."""
    whole, parts = ranks.run(world, graphs, str(folder))[0]
    assert whole == parts
    for mine, theirs in zip(whole, losses(folder / "plain"), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9)
    found, expected = weights(folder / f"whole-{world}"), weights(folder / "plain")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-8, atol=1e-9, msg=name)
        assert torch.equal(weights(folder / f"parts-{world}")[name], found[name]), name


def test_a_run_says_so_and_goes_on_only_so(folder: Path) -> None:
    with pytest.raises(Exception, match="train.compile is false, not true|train.compile is true"):
        pretrain(config(folder, "whole-1", steps=4, compile=False))


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_kernels_drop_what_plain_ones_drop() -> None:
    """12 wide: torch 2.13's inductor gives other numbers there, so they are no part of a graph."""
    keys, x = torch.arange(10), torch.randn(10, 20, dtype=torch.float64)
    assert torch.equal(opaque_uniforms(keys, 100, 12), uniforms(keys, 100, 12))
    encoder, _ = build_encoder(Mlp(widths=[12], dropout=0.5), [20], salt=100)
    expected, names = encoder.double()(x, keys), list(encoder.state_dict())
    encoder.compile(dynamic=False)
    torch.testing.assert_close(encoder(x, keys), expected, rtol=1e-10, atol=1e-12)
    assert list(encoder.state_dict()) == names


def test_rows_that_lack_views_are_refused(tmp_path: Path) -> None:
    hidden = {"protocol": {"hide_views": {"view1": 0.5}}}
    with pytest.raises(ConfigError, match="train.compile is true, but some rows lack views"):
        pretrain(frames(tmp_path, data=hidden, train={"compile": True}))
