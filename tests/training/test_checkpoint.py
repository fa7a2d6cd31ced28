"""Checkpoints that cannot be trusted, and those that cannot be written."""

import json
import math
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from heron.api.job import pretrain
from heron.base.errors import CheckpointError, ConfigError, ShardError
from heron.distributed.watchdog import Watchdog
from heron.experiment.config import Config, load_config
from heron.training import checkpoint
from heron.training.checkpoint import (
    Position,
    Snapshot,
    complete_checkpoints,
    find_damage,
    save,
)
from heron.training.pretrained import locate
from heron.training.tracking import read_metrics
from tests import ranks
from tests.experiments import frames
from tests.sealed import seal

SAVING: dict[str, Any] = {"steps": 9, "save_every_steps": 3, "keep_checkpoints": 3}
SUM = {"bytes": 1, "sha256": "0" * 64}
TEXTS = {"config.yaml": "seed: 0\n", "model.json": "{}"}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints at steps 3, 6 and 9."""
    folder = tmp_path_factory.mktemp("checkpoints")
    pretrain(frames(folder, train=SAVING))
    names = [path.name for path in complete_checkpoints(folder / "run" / "checkpoints")]
    assert names == ["step-00000003", "step-00000006", "step-00000009"]
    return folder


def copied(straight: Path, to: Path) -> Path:
    shutil.copytree(straight / "run", to / "run", symlinks=True)
    shutil.copytree(straight / "frames", to / "frames")
    return to / "run" / "checkpoints"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "config.yaml"])
def test_a_damaged_one_is_passed_over_for_the_one_before(
    straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    """One flipped bit; the log says so, and the run ends as it would have."""
    checkpoints = copied(straight, tmp_path)
    flip(checkpoints / "step-00000009" / file)
    (checkpoints / "step-00000006" / "state.json").unlink()
    pretrain(frames(tmp_path, train=SAVING, run={"resume": "auto"}))
    said = capsys.readouterr().out
    assert f"step-00000009 is damaged ({file} was altered: its sha256 is " in said
    assert "step-00000006 has no state.json" in said
    assert "continuing from step-00000003, the one before" in said
    weights = load_file(checkpoints / "latest" / "model.safetensors")
    for name, value in load_file(
        straight / "run" / "checkpoints" / "latest" / "model.safetensors"
    ).items():
        assert torch.equal(weights[name], value), name


def test_times_and_memory_of_a_run_that_goes_on(straight: Path, tmp_path: Path) -> None:
    """Its steps' seconds are those of all; where it has no step left, it is the earlier result."""
    copied(straight, tmp_path)
    earlier = json.loads((straight / "run" / "result.json").read_text())
    for length in (9, 12):
        changes = SAVING | {"steps": length}
        result = pretrain(frames(tmp_path, train=changes, run={"resume": "auto"}))
        taken = [row.get("seconds", 0.0) for row in read_metrics(tmp_path / "run/metrics.jsonl")]
        assert result["train_seconds"] == pytest.approx(sum(taken))
        assert result["train_seconds"] >= earlier["train_seconds"] > 0
        assert (result == earlier) == (length == 9) and result["peak_memory_bytes"] > 0


def test_when_all_are_damaged_nothing_begins_anew(straight: Path, tmp_path: Path) -> None:
    checkpoints = copied(straight, tmp_path)
    for path in complete_checkpoints(checkpoints):
        flip(path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match="there is no other checkpoint; restore one, or run with"
    ):
        pretrain(frames(tmp_path, train=SAVING, run={"resume": "auto"}))


def resumed(tmp_path: Path, **data: Any) -> None:
    pretrain(frames(tmp_path, train=SAVING, run={"resume": "auto"}, data=data))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 1}, "format is 1, but this version of heron reads 4"),
        ({"position": {"step": 8, "epoch": 1, "step_in_epoch": 3}}, "is in step-00000009, but"),
        (
            {"position": {"step": -9, "epoch": 1, "step_in_epoch": 3}},
            "position.step must be greater",
        ),
        (
            {"position": {"step": 2**64, "epoch": 0, "step_in_epoch": 0}},
            "position.step must be less",
        ),
        ({"files": {}}, "lists no model.safetensors, optimizer.safetensors, memories.safetensors"),
        ({"files": {"model.safetensors": {"bytes": 1, "sha256": ""}}}, "sha256 must "),
        ({"files": {"../model.safetensors": SUM}}, r"files...* must match pattern"),
        ({"files": {"a\0b": SUM}}, "files.* must match pattern"),
        ({"surprise": 1}, "surprise: extra inputs are not permitted"),
        (None, "its fingerprint is 'sha256:.*, its content has sha256:"),
    ],
)
def test_a_manifest_that_was_altered(
    straight: Path, tmp_path: Path, changes: dict[str, Any] | None, message: str
) -> None:
    checkpoints = copied(straight, tmp_path)
    for step in (3, 6):
        shutil.rmtree(checkpoints / f"step-{step:08d}")
    path = checkpoints / "step-00000009" / "state.json"
    if changes is None:  # the position alone, by somebody without our code
        path.write_text(path.read_text().replace('"step": 9', '"step": 3'))
    else:
        seal(path, **changes)
    with pytest.raises(
        CheckpointError, match=f"{message}.*there is no other checkpoint; restore one"
    ):
        resumed(tmp_path)
    with pytest.raises(CheckpointError, match=f"{message}"):
        locate(tmp_path / "run")


def test_without_a_mark_of_completeness_nothing_begins_anew(straight: Path, tmp_path: Path) -> None:
    for path in complete_checkpoints(copied(straight, tmp_path)):
        (path / "COMPLETE").unlink()
    with pytest.raises(CheckpointError, match="step-00000009 is not complete: COMPLETE is missing"):
        resumed(tmp_path)


def test_a_run_goes_on_with_its_own_data_alone(
    straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Data of the same shapes and other bytes; and `force`, which says that it goes on."""
    copied(straight, tmp_path)
    manifest = tmp_path / "frames" / "manifest.json"
    found = json.loads((tmp_path / "run/checkpoints/latest/state.json").read_text())["data"]
    assert found == json.loads(manifest.read_text())["fingerprint"]
    seal(manifest, seed=7)
    other = json.loads(manifest.read_text())["fingerprint"]
    with pytest.raises(CheckpointError, match=f"other data: fingerprint {found}, not {other}; run"):
        resumed(tmp_path, build=None)
    changed = SAVING | {"steps": 10}
    options: dict[str, Any] = {"optim": {"lr": 0.01}, "data": {"build": None}}
    with pytest.raises(CheckpointError, match="another configuration: optim.lr is .*, not 0.01"):
        pretrain(frames(tmp_path, train=changed, run={"resume": "auto"}, **options))
    assert pretrain(frames(tmp_path, train=changed, run={"resume": "force"}, **options))
    wider: dict[str, Any] = {"model": {"projection_width": 9}}
    with pytest.raises(
        CheckpointError, match="model.projection_width is .*, not 9; its weights do"
    ):
        pretrain(frames(tmp_path, train=changed, run={"resume": "force"}, **options, **wider))
    said = capsys.readouterr().out
    assert (
        "continuing anyway: step-00000009 was made with another configuration: optim.lr is" in said
    )
    assert "continuing anyway: step-00000009 was made with other data: fingerprint" in said


def test_other_versions_are_told(
    straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = copied(straight, tmp_path) / "step-00000009" / "state.json"
    made_with = json.loads(path.read_text())["made_with"]
    assert set(made_with) == {"heron", "code", "torch", "numpy"}
    seal(path, made_with=made_with | {"torch": "1.0"})
    resumed(tmp_path)
    told = "step-00000009 was made with other versions: torch is 1.0, not 2."
    assert told in capsys.readouterr().out


def taken_up(run: Path, config: Config) -> Position:
    """Where a run would go on under a configuration, with the data that it was made with."""
    data = json.loads((run / "checkpoints/latest/state.json").read_text())["data"]
    snapshot, _ = checkpoint.resume(run / "checkpoints", config, data, Watchdog(math.inf))
    assert snapshot is not None
    return snapshot.position


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train": {"micro_batch": 16}}, "train.micro_batch is null, not 16"),
        ({"train": {"precision": "fp64"}}, "train.precision is fp32, not fp64"),
        ({"train": {"ema": 0.9}}, "train.ema is null, not 0.9"),
        ({"optim": {"clip_norm": 1.0}}, "optim.clip_norm is null, not 1.0"),
        ({"seed": 4}, "seed is 3, not 4"),
        ({"optim": {"lr": 0.04}}, "optim.lr is 0.05, not 0.04"),
        ({"optim": {"schedule": "cosine"}}, "optim.schedule is constant, not cosine"),
        ({"data": {"window_rows": 65}}, "data.window_rows is 64, not 65"),
        ({"data": {"batch": {"labelled": 12}}}, "data.batch.labelled is 10, not 12"),
        ({"data": {"protocol": {"labelled": 61}}}, "data.protocol.labelled is 60, not 61"),
        ({"model": {"projection_width": 9}}, "model.projection_width is 8, not 9"),
        ({"objective": {"weighted_supervised": {"tau": 0.4}}}, "weighted_supervised.tau is 0.5, n"),
    ],
)
def test_what_decides_how_a_run_goes_on_may_not_change(
    straight: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(CheckpointError) as refused:
        taken_up(straight / "run", frames(straight, **changes))
    assert said in str(refused.value) and "step-00000009/config.yaml" in str(refused.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"run": {"dir": "elsewhere"}},
        {"train": {"steps": 99, "epochs": 7, "save_every_steps": 1, "timeout_s": 9}},
        {"evaluate": {"batch": 7, "baselines": True}},
        {"data": {"path": "moved", "build": None, "workers": 3, "verify": False}},
        {"data": {"on_error": "skip", "max_bad_fraction": 0.5, "cache": {"dir": "elsewhere"}}},
    ],
)
def test_what_decides_nothing_may_change(straight: Path, changes: dict[str, Any]) -> None:
    assert taken_up(straight / "run", frames(straight, **changes)) == Position(9, 0, 9)


def test_the_length_of_a_cosine_may_not_change(straight: Path, tmp_path: Path) -> None:
    shutil.copytree(straight / "frames", tmp_path / "frames")
    cosine = frames(tmp_path, optim={"schedule": "cosine"}, train={"steps": 1})
    pretrain(cosine)
    assert taken_up(tmp_path / "run", cosine) == Position(1, 0, 1)
    longer = frames(tmp_path, optim={"schedule": "cosine"}, train={"epochs": 3})
    with pytest.raises(CheckpointError, match="train.epochs is 2, not 3"):
        taken_up(tmp_path / "run", longer)


def test_a_save_that_was_cut_short_leaves_the_one_before(tmp_path: Path) -> None:
    """Left by a kill: part of a folder under a temporary name."""
    snapshot = Snapshot(
        Position(3, 0, 3), {"w": torch.ones(2)}, {"w/momentum_buffer": torch.ones(2)}, {}
    )
    save(tmp_path, snapshot, TEXTS, 2)
    (tmp_path / ".step-00000006.part").mkdir()
    (tmp_path / ".step-00000006.part" / "model.safetensors").write_bytes(b"half")
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-00000003"]
    later = Snapshot(Position(6, 1, 0), snapshot.model, snapshot.optimizer, {})
    assert find_damage(save(tmp_path, later, TEXTS, 1)) == ""
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-00000006"]
    assert (tmp_path / "latest").resolve().name == "step-00000006"
    assert not list(tmp_path.glob(".step*"))


def full(folder: str) -> str:
    """A run on a disk that has room for 20 kB of each file of a checkpoint, and no more."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def without_room(*args: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        try:
            save_file(*args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    setattr(checkpoint, "save_file", without_room)  # noqa: B010
    try:
        pretrain(frames(Path(folder), train=SAVING | {"steps": 12}, run={"resume": "auto"}))
    except CheckpointError as error:
        return str(error)
    return "it was written"


def test_a_disk_without_room_ends_the_run_and_keeps_what_is_there(
    straight: Path, tmp_path: Path
) -> None:
    checkpoints = copied(straight, tmp_path)
    for said in ranks.run(2, full, str(tmp_path)):
        assert "cannot write the checkpoint of step 12 to" in said
        assert "last checkpoint: " in said and "step-00000009; free some space" in said
    assert [find_damage(path) for path in complete_checkpoints(checkpoints)] == ["", "", ""]
    assert not list(checkpoints.glob(".step*"))


def test_data_that_is_pinned(straight: Path, tmp_path: Path) -> None:
    copied(straight, tmp_path)
    found = json.loads((tmp_path / "frames" / "manifest.json").read_text())["fingerprint"]
    resumed(tmp_path, fingerprint=found)
    other = "sha256:" + "0" * 64
    with pytest.raises(
        ShardError, match=f"has the fingerprint {found}, but data.fingerprint pins {other}"
    ):
        resumed(tmp_path, fingerprint=other)
    with pytest.raises(ConfigError, match="data.fingerprint must match pattern .*, got '0+…"):
        resumed(tmp_path, fingerprint="0" * 64)


def test_the_watchdog_waits_while_bytes_are_read_and_not_while_others_are(
    straight: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a process that died in between would be waited for without end."""
    run, watchdog = straight / "run", Watchdog(math.inf)
    busy: dict[str, list[bool]] = {}

    def seen(name: str) -> None:
        real = getattr(checkpoint, name)

        def call(*args: Any) -> Any:
            busy.setdefault(name, []).append(watchdog._busy)
            return real(*args)

        monkeypatch.setattr(checkpoint, name, call)

    for name in ("find_damage", "load", "broadcast_object"):
        seen(name)
    data = json.loads((run / "checkpoints/latest/state.json").read_text())["data"]
    config = load_config(run / "checkpoints/latest/config.yaml")
    assert checkpoint.resume(run / "checkpoints", config, data, watchdog)[0] is not None
    assert busy == {"find_damage": [True], "load": [True], "broadcast_object": [False]}
