"""A run that goes on from another's weights, with other values."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from heron.api.job import pretrain
from heron.base.errors import CheckpointError
from heron.experiment.config import dump_config
from heron.studies.population import exploit
from heron.studies.trials import LINEAGE
from heron.training import checkpoint
from heron.training.tracking import read_lines
from tests.experiments import frames
from tests.launch.runs import saved_step, steps


def test_a_run_goes_on_from_another_s_weights(tmp_path: Path) -> None:
    """With the optimiser's state, under its own values; what it was before is gone."""
    train = {"steps": 4}
    donor = frames(tmp_path, "donor", train=train, optim={"kind": "sgd", "lr": 0.1})
    pretrain(donor)
    own = {"train": train, "optim": {"kind": "sgd", "lr": 0.01}, "run": {"resume": "auto"}}
    taker = frames(tmp_path, "taker", **own)
    pretrain(taker)
    run, source = tmp_path / "taker", tmp_path / "donor" / "checkpoints" / "step-00000004"
    assert read_lines(run / LINEAGE) == []

    changed = frames(tmp_path, "taker", **own | {"optim": {"kind": "sgd", "lr": 0.08}})
    with pytest.raises(CheckpointError, match=r"optim.lr is 0.01, not 0.08"):
        pretrain(changed)
    exploit(source, changed, {"optim.lr": 0.08})
    for name in ("model", "optimizer"):
        found = load_file(run / "checkpoints" / "latest" / f"{name}.safetensors")
        expected = load_file(source / f"{name}.safetensors")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], value) for key, value in expected.items())
    assert read_lines(run / LINEAGE) == [{"step": 4, "from": "donor", "values": {"optim.lr": 0.08}}]
    assert saved_step(run) == 4 and len(list((run / "checkpoints").glob("step-*"))) == 1

    more = frames(
        tmp_path, "taker", **own | {"optim": changed.optim.model_dump(), "train": {"steps": 6}}
    )
    assert pretrain(more)["steps"] == 6
    assert saved_step(run) == steps(run) == 6


def test_a_damaged_checkpoint_is_not_taken_over(tmp_path: Path) -> None:
    config, taker = frames(tmp_path, "donor"), frames(tmp_path, "taker")
    position, state = checkpoint.Position(2, 0, 2), {"w": torch.ones(3)}
    texts = {"config.yaml": dump_config(config), "model.json": "{}"}
    snapshot = checkpoint.Snapshot(position, state, state, {})
    saved = checkpoint.save(tmp_path / "donor" / "checkpoints", snapshot, texts, 1)
    model = saved / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-4] + b"\0\0\0\0")
    with pytest.raises(CheckpointError) as error:
        exploit(saved, taker, {})
    assert f"{saved} is damaged (model.safetensors" in str(error.value)
    assert f"), but {tmp_path}/taker needs it to continue; restore it, or" in str(error.value)
    assert not (tmp_path / "taker").exists()


def test_mined_negatives_come_along(tmp_path: Path) -> None:
    """The steps after a take need the table that the donor's steps would have had."""
    config, taker = frames(tmp_path, "donor"), frames(tmp_path, "taker")
    position, state = checkpoint.Position(2, 0, 2), {"w": torch.ones(3)}
    texts = {"config.yaml": dump_config(config), "model.json": "{}"}
    snapshot = checkpoint.Snapshot(position, state, state, {})
    saved = checkpoint.save(tmp_path / "donor" / "checkpoints", snapshot, texts, 1)
    for name, table in (("donor", "step-00000002.npy"), ("taker", "step-00000001.npy")):
        (tmp_path / name / "negatives").mkdir(parents=True)
        (tmp_path / name / "negatives" / table).write_text(name)
    exploit(saved, taker, {})
    (found,) = (tmp_path / "taker" / "negatives").iterdir()
    assert (found.name, found.read_text()) == ("step-00000002.npy", "donor")
