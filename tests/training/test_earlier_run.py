"""A folder with an earlier run: a finished one is refused or moved aside whole, seeds and all."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from heron.api.job import pretrain
from heron.base.artefact import sha256
from heron.base.errors import ConfigError, TrainingError
from heron.cli.main import main
from heron.distributed.watchdog import Watchdog
from heron.experiment.config import load_config
from heron.training.run_lock import LOCK, RunLock, holder
from tests import ranks
from tests.experiments import frames


def contents(folder: Path) -> dict[str, str]:
    """The sha256 of each file by its place in the folder, without locks."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != LOCK)
    return {str(path.relative_to(folder)): sha256(path) for path in files}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with two seeds and the plain network."""
    folder = tmp_path_factory.mktemp("finished")
    pretrain(frames(folder, evaluate={"seeds": 2, "baselines": "plain"}))
    return folder


def test_a_finished_run_is_refused_and_untouched(finished: Path) -> None:
    before = contents(finished / "run")
    assert {"result.json", "report.html", "seed-4/result.json", "plain/result.json"} <= set(before)
    score = json.loads((finished / "run/result.json").read_text())["f1_weighted"]
    message = (
        rf"run has a finished run \(.*f1_weighted {score:.4f}, 5 steps\), .* run.dir=\S+/run-1\. "
        rf"To train it further, .* \(train.steps=null to its end\)\. To start over: --overwrite"
    )
    with pytest.raises(TrainingError, match=message):
        pretrain(frames(finished, train={"steps": 2}))
    assert contents(finished / "run") == before
    assert not (finished / "run-1").exists()


@pytest.mark.parametrize(
    ("length", "schedule", "more"),
    [
        ({"epochs": 1, "steps": None}, "constant", "train.epochs=2"),
        ({"total_steps": 3, "epochs": None, "steps": None}, "constant", "train.total_steps=5"),
        ({"epochs": 1, "steps": None}, "cosine", ""),
    ],
)
def test_a_run_at_its_end_goes_on_where_its_learning_rate_does(
    tmp_path: Path, length: dict[str, Any], schedule: str, more: str
) -> None:
    config = frames(tmp_path, train=length, optim={"schedule": schedule})
    steps = pretrain(config)["steps"]
    with pytest.raises(TrainingError, match="To train it further, where its learning rate has not"):
        pretrain(config)
    if more:
        words = ["run.resume=auto", more]
        assert pretrain(load_config(tmp_path / "run/config.yaml", words))["steps"] > steps


def test_each_remedy_that_the_refusal_names(finished: Path) -> None:
    """Another folder, its other steps, and a new beginning that keeps the whole old run."""
    before = contents(finished / "run")
    assert pretrain(frames(finished, "other", train={"steps": 2}))["steps"] == 2
    assert contents(finished / "run") == before
    more = frames(finished, "more", train={"steps": 2})
    pretrain(more)
    again = ["run.resume=auto", "train.steps=null"]
    whole = pretrain(load_config(finished / "more/config.yaml", again))
    assert (whole["steps"], whole["epochs"]) == (22, 2)
    for number in (1, 2):
        whole = contents(finished / "run")
        assert (
            pretrain(frames(finished, train={"steps": number}), overwrite=True)["steps"] == number
        )
        assert contents(finished / f"run-{number}") == whole
        assert not (finished / "run/plain").exists()
    assert contents(finished / "run-1") == before


def test_a_stopped_run_is_moved_aside_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = frames(tmp_path, train={"save_every_steps": 2})
    pretrain(config)
    (tmp_path / "run/result.json").unlink()  # as if it had been killed before its end
    (tmp_path / "run/notes.txt").write_text("mine")
    before = contents(tmp_path / "run")
    pretrain(config)
    assert contents(tmp_path / "run-1") == before
    said = f"that was stopped after 5 steps is now in {tmp_path}/run-1; run.resume=auto would"
    assert said in capsys.readouterr().out


def test_a_run_without_checkpoints_is_not_begun_again_unasked(tmp_path: Path) -> None:
    """`run.resume=auto` goes on; where nothing is left to go on from, it destroys nothing."""
    pretrain(frames(tmp_path))
    shutil.rmtree(tmp_path / "run/checkpoints")
    before = contents(tmp_path / "run")
    with pytest.raises(
        TrainingError, match="no checkpoint to continue from, .*=never and --overwrite"
    ):
        pretrain(frames(tmp_path, run={"resume": "auto"}))
    assert contents(tmp_path / "run") == before
    with pytest.raises(
        ConfigError, match="starts again, but run.resume=auto continues; remove one"
    ):
        pretrain(frames(tmp_path, run={"resume": "auto"}), overwrite=True)
    pretrain(frames(tmp_path), overwrite=True)
    assert contents(tmp_path / "run-1") == before


def both(folder: str) -> str:
    try:
        pretrain(frames(Path(folder)))
    except TrainingError as error:
        return str(error)
    return "ended"


def test_every_process_is_refused(tmp_path: Path) -> None:
    assert ranks.run(2, both, str(tmp_path)) == ["ended", "ended"]
    one, two = ranks.run(2, both, str(tmp_path))
    assert one == two and "has a finished run" in one


def test_the_lock_follows(tmp_path: Path) -> None:
    """A run that waits for a folder which is moved away under it locks the new one."""
    with RunLock(tmp_path / "run") as lock:
        lock.acquire(Watchdog(60))
        lock.move(lambda: str((tmp_path / "run").rename(tmp_path / "run-1")))
        assert holder(tmp_path / "run") and holder(tmp_path / "run-1") is None
    assert holder(tmp_path / "run") is None


def test_the_command_line(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"data.path={finished}/faces", f"run.dir={finished}/cli", "train.steps=1"]
    words += ["data.build.train=80", "data.build.test=20", "data.protocol.labelled=20"]
    words += [
        "data.batch.labelled=10",
        "data.batch.unlabelled=20",
        "evaluate.seeds=1",
        "evaluate.baselines=false",
    ]
    assert main(["pretrain", "faces", *words]) == 0
    before = contents(finished / "cli")
    assert main(["pretrain", "faces", *words]) == 1
    assert "error: " in (error := capsys.readouterr().err) and "--overwrite" in error
    assert main(["pretrain", "faces", *words, "--overwrite"]) == 0
    assert contents(finished / "cli-1") == before
