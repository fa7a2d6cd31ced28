"""Runs that the first edition began go on: its checkpoints, and keys that have other names now."""

import json
import shutil
from pathlib import Path

import pytest

from heron.config.errors import ConfigError
from heron.config.experiment import load_config, load_run_config
from heron.config.renamed import move_renamed
from heron.job import pretrain
from heron.objectives.deepmtmv import TaskGroups
from heron.training.pretrained import from_pretrained
from tests.reference_runs import data, values

RUNS = Path(__file__).parents[1] / "first_edition"  # ten steps of its commit 0266dff


@pytest.mark.parametrize("method", ["pico", "deepmtmv"])
def test_a_run_goes_on_as_the_first_edition_would(tmp_path: Path, method: str) -> None:
    data(tmp_path)
    shutil.copytree(RUNS / method, tmp_path / "run")
    kind = "multi_class" if method == "pico" else "multi_label"
    overrides = [
        f"run.dir={tmp_path}/run",
        "run.resume=auto",
        "train.steps=20",
        f"data.path={tmp_path}/{kind}",
        f"data.build.npz={tmp_path}/{kind}.npz",
    ]
    pretrain(load_run_config(RUNS / method / "config.yaml", overrides))
    expected = json.loads((RUNS / f"{method}.json").read_text())
    found = values(tmp_path / "run")
    assert len(found) == len(expected) == 21
    for row, straight in zip(found, expected, strict=True):
        assert row == pytest.approx(straight, rel=1e-4, abs=1e-5)  # another machine rounds
    model = from_pretrained(tmp_path / "run")
    assert isinstance(model.classifier, TaskGroups) == (method == "deepmtmv")
    assert from_pretrained(RUNS / method / "checkpoints" / "step-00000010").views == 2


def test_an_experiment_with_an_old_key_is_refused_with_the_new_one(tmp_path: Path) -> None:
    config = RUNS / "deepmtmv" / "config.yaml"
    with pytest.raises(
        ConfigError, match=r"model.task_groups is .*; this key is now objective.deep"
    ):
        load_config(config)
    message = "model.label_autoencoder is .*; this key is now objective.c2ae, with its keys hidden"
    given = ["model.task_groups=null", "model.label_autoencoder={hidden: 7}"]
    with pytest.raises(ConfigError, match=message):
        load_config(config, given)


def test_what_a_run_has_written_is_moved() -> None:
    tree = {
        "model": {"label_autoencoder": {"hidden": 7, "width": 3}, "task_groups": None},
        "objective": {"c2ae": {"alpha": 0.1}, "bce": None, "custom": {}},
        "data": {"canvas": 64},
    }
    move_renamed(tree)
    moved = {"c2ae": {"alpha": 0.1, "hidden": 7, "code": 3}, "bce": None}
    assert tree == {"model": {}, "objective": moved, "data": {"decode_size": 64}}
