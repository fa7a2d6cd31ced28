"""`heron pretrain`: in one process or several, it ends with the status of the run."""

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from heron.api import job
from heron.base.errors import INTERRUPTED, ConfigError, TrainingError
from heron.base.shipped import ACCELERATE, STUDIES, find_shipped
from heron.cli.main import main
from heron.cli.pretrain import SIGNALS, environments, run_together
from heron.distributed.signals import REPEAT_S
from heron.training import trainer
from heron.training.tracking import read_metrics
from tests import forked
from tests.launch import runs


def slow_steps(words: Sequence[str]) -> int:
    """`heron`, with steps of which each but the first three takes a minute."""
    step = trainer.Trainer.step

    def slow(self: trainer.Trainer, t: int, source: Any) -> None:
        step(self, t, source)
        time.sleep(60 * (t > 2))

    trainer.Trainer.step = slow  # type: ignore[method-assign]
    return main(words)


def start(config: Path, *words: str, program: forked.Main = main) -> forked.Command:
    given = ["pretrain", str(config), *words]
    return forked.start(given, runs.ROOT, program, runs.environment())


def await_steps(run: Path) -> None:
    metrics = run / "metrics.jsonl"
    runs.await_that("steps", lambda: metrics.exists() and len(read_metrics(metrics)) > 2, 120, str)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
@pytest.mark.parametrize("several", [(), ("--processes", "2")], ids=["one", "two"])
def test_a_signal_reaches_the_run_which_saves_and_goes_on(
    several: tuple[str, ...], number: signal.Signals, tmp_path: Path
) -> None:
    """A terminal sends Ctrl-C to all processes at once."""
    config = runs.experiment(tmp_path, "run", train={**runs.LENGTH, "epochs": 400})
    process, metrics = start(config, *several), tmp_path / "run" / "metrics.jsonl"
    await_steps(tmp_path / "run")
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    status, said = runs.finish(process, 60)
    assert status == runs.SAVED, said
    assert said.count("a signal came; step ") == 1, said
    assert runs.saved_step(tmp_path / "run") == runs.steps(tmp_path / "run")
    assert "run again with run.resume=auto to continue" in said
    assert f"next: heron pretrain {config} run.resume=auto" in said
    after = read_metrics(metrics)[-1]["step"] + 3
    more = several if number == signal.SIGTERM else ()  # one process is forked, and faster
    again = start(config, *more, "run.resume=auto", f"train.steps={after}")
    status, said = runs.finish(again, 120)
    assert status == 0, said


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    config = runs.experiment(tmp_path, "run", train={**runs.LENGTH, "epochs": 400})
    process = start(config, program=slow_steps)
    await_steps(tmp_path / "run")
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)  # as of a launcher that passes on the first
    time.sleep(REPEAT_S + 0.2)
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    status, said = runs.finish(process, 30)
    assert status == INTERRUPTED and "Traceback" not in said, said
    assert said.count("Ctrl-C: the run saves after this step and stops; once more") == 1
    assert (
        "stopped: immediately, by Ctrl-C, at the newest checkpoint; run again with run.re" in said
    )


def test_ctrl_c_before_the_first_step_ends_at_once(tmp_path: Path) -> None:
    """Nothing would be saved; here a data set is built that takes minutes."""
    build = {"source": "frames", "train": 2_000_000, "test": 70, "classes": 4}
    config = runs.experiment(tmp_path, "run", data={"build": build})
    process = start(config)
    begun = lambda: any((tmp_path / "frames").glob("*"))  # noqa: E731
    runs.await_that("the build", begun, 60, str)
    os.killpg(process.pid, signal.SIGINT)
    status, said = runs.finish(process, 30)
    assert status == INTERRUPTED and "Traceback" not in said, said


@pytest.mark.parametrize("several", [(), ("--accelerate", "cpu")], ids=["one", "two"])
def test_an_error_is_status_1(several: tuple[str, ...], tmp_path: Path) -> None:
    config = runs.experiment(tmp_path, "run")
    status, said = runs.finish(start(config, *several, "data.split=none"), 120)
    assert status == 1 and "Traceback" not in said
    assert "none" in said


def test_without_its_shards_an_experiment_says_how_to_build_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert job.main(["--config", "scene"]) == 1
    command = "heron shards build mulan --arff scene-train.arff scene-test.arff --xml scene.xml"
    command += " --view-kind scene --noise 0.01"
    assert f"build them with `{command} --out data/scene`" in capsys.readouterr().err
    assert job.main(["--config", "scene", "data.path=other"]) == 1
    assert "cannot read the manifest other/manifest.json" in capsys.readouterr().err


def test_what_each_configuration_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in runs.environment().keys() ^ os.environ.keys():
        monkeypatch.delenv(name, raising=False)
    two = environments(ACCELERATE / "cpu.yaml", None)
    assert [one["RANK"] for one in two] == [one["LOCAL_RANK"] for one in two] == ["0", "1"]
    assert {one["WORLD_SIZE"] for one in two} == {"2"}
    assert len({one["MASTER_PORT"] for one in two}) == 1
    three = environments(ACCELERATE / "cpu_zero2.yaml", 3)
    assert len(three) == 3
    assert {one["ACCELERATE_DEEPSPEED_ZERO_STAGE"] for one in three} == {"2"}
    parted = environments(ACCELERATE / "fsdp.yaml", 2)
    assert [(one["RANK"], one["ACCELERATE_USE_FSDP"]) for one in parted] == [
        ("0", "true"),
        ("1", "true"),
    ]
    assert {one["FSDP_VERSION"] for one in parted} == {"2"}
    (alone,) = environments(ACCELERATE / "single_gpu.yaml", None)
    assert "RANK" not in alone


def test_what_cannot_be_started_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(
        TrainingError, match="is for 2 machines, but .* processes on one; for several, use"
    ):
        environments(ACCELERATE / "multi_node.yaml", None)
    (tmp_path / "none.yaml").write_text(yaml.safe_dump({"compute_environment": "NOWHERE"}))
    with pytest.raises(TrainingError, match=r"accelerate cannot read .*none.yaml \("):
        environments(tmp_path / "none.yaml", None)
    assert main(["launchers", str(tmp_path / "cluster")]) == 0
    assert len(environments(tmp_path / "cluster" / "accelerate" / "cpu.yaml", 2)) == 2
    with pytest.raises(ConfigError, match="No study named 'nosie'. Did you mean 'noise'"):
        find_shipped("nosie", STUDIES, "study")
    assert main(["pretrain", "facse"]) == 1
    assert "Did you mean 'faces'?" in capsys.readouterr().err
    assert main(["pretrain", "faces", "--accelerate", "cpu_zero"]) == 1
    assert "No Accelerate configuration named 'cpu_zero'. Did you mean" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a: [\n", "accelerate cannot read .*given.yaml .while parsing a flow node"),
        ("distributed_type: MULTI_GPU, num_processes: 0", "must start 1 or more processes, got 0"),
        (
            "distributed_type: MULTI_CPU, num_processes: 2",
            "starts one process, but 2 were requested",
        ),
        ("distributed_type: 'NO', num_processes: 2", "starts one process, but 2 were requested"),
    ],
)
def test_a_configuration_that_starts_no_such_processes(
    tmp_path: Path, text: str, fault: str
) -> None:
    """Of two processes that were asked for, one ran, and nothing said so."""
    if text[0] == "d":
        text = f"{{compute_environment: LOCAL_MACHINE, use_cpu: true, num_machines: 1, {text}}}"
    (tmp_path / "given.yaml").write_text(text)
    with pytest.raises(TrainingError, match=fault) as told:
        environments(tmp_path / "given.yaml", None)
    assert "\n" not in str(told.value)


def test_a_process_that_cannot_be_started_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would wait for it, and this process ignore Ctrl-C from there on."""
    begun: list[subprocess.Popen[bytes]] = []

    def one_alone(command: Sequence[str], **given: Any) -> subprocess.Popen[bytes]:
        if begun:
            raise BlockingIOError("no room for a process")
        begun.append(start_process(["sleep", "60"], **given))
        return begun[0]

    start_process = subprocess.Popen
    monkeypatch.setattr("subprocess.Popen", one_alone)
    before = [signal.getsignal(one) for one in SIGNALS]
    try:
        with pytest.raises(BlockingIOError):
            run_together([], [{}, {}])
        assert begun[0].poll() == -signal.SIGKILL
        assert [signal.getsignal(one) for one in SIGNALS] == before
    finally:
        begun[0].kill()
        for one, handler in zip(SIGNALS, before, strict=True):
            signal.signal(one, handler)


def test_more_processes_than_a_configuration_starts() -> None:
    with pytest.raises(
        TrainingError,
        match="starts one process, but 3 were .*; pass --processes 1, or --accelerate cpu",
    ):
        environments(ACCELERATE / "single_gpu.yaml", 3)
    assert len(environments(ACCELERATE / "single_gpu.yaml", 1)) == 1
    for name in ("cpu", "ddp", "fsdp"):
        assert len(environments(ACCELERATE / f"{name}.yaml", 3)) == 3


def test_launchers_are_copied_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "cluster"
    assert main(["launchers", str(out)]) == 0
    assert f"{out}/slurm/pretrain.sbatch\n" in capsys.readouterr().out
    assert os.access(out / "hosts" / "pretrain.sh", os.X_OK)
    assert main(["launchers", str(out)]) == 1
    assert f"{out} already exists; choose a new folder" in capsys.readouterr().err
