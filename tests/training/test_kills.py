"""A run that is killed at any moment and started again ends as one that was never killed."""

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from heron.api import job as pretrain
from heron.training.tracking import read_metrics
from tests.launch import runs, slow_disk

LENGTH: dict[str, Any] = {
    "train": {
        "steps": None,
        "epochs": 3,
        "save_every_steps": 3,
        "evaluate_every_epochs": 1,
        "keep": "best",
        "timeout_s": 60,
    },
    "evaluate": {"batch": 2, "map_rows": 20},  # slow enough to be killed in
    "data": {"verify": False, "protocol": {"validation": 0.2}},
    "optim": {"kind": "sgd"},  # LARS cannot be sharded
}
MOMENTS = "save", "one", "evaluation", "all"
TRIES = int(os.environ.get("HERON_KILLS", "1"))
STRATEGIES = ("ddp",) if TRIES < 2 else ("ddp", "fsdp")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the runs that are never killed, one of each strategy."""
    folder = tmp_path_factory.mktemp("kills")
    for strategy in STRATEGIES:
        runs.run_pair(runs.experiment(folder, strategy, **LENGTH), strategy=strategy)
    return folder


def reached(run: Path, kind: str, draw: random.Random) -> Callable[[], bool]:
    """Whether a run has come to the drawn moment of a kind."""
    step = draw.randrange(2, 29)
    if kind == "save":
        return lambda: runs.steps(run) > step and any(run.glob("checkpoints/.step-*.part"))
    if kind == "evaluation":  # of the first or the second epoch, 11 steps each
        step = draw.choice([10, 21])
        return lambda: any(
            row["step"] == step and "loss" in row for row in read_metrics(run / "metrics.jsonl")
        )
    return lambda: runs.steps(run) > step


def end(pair: list[runs.Started]) -> list[int]:
    return [runs.finish(process, 120)[0] for process in pair]


def test_a_run_that_is_done_does_not_fail_in_the_interpreters_end(tmp_path: Path) -> None:
    runs.run_pair(runs.experiment(tmp_path, "done", train={"steps": 2}), runs.BAD_END)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("number", "kind"), list(zip(range(TRIES), itertools.cycle(MOMENTS))))
def test_killed_and_started_again(straight: Path, number: int, kind: str, strategy: str) -> None:
    """The weights are those of the unkilled run, bit for bit; every step is told of once."""
    draw, name = random.Random(number), f"killed-{strategy}-{number}"
    config = runs.experiment(straight, name, **LENGTH)
    run = straight / name
    program = slow_disk.main if kind == "save" else pretrain.main
    pair = runs.start_pair(config, runs.free_port(), program, strategy)
    come = reached(run, kind, draw)
    while not come() and all(process.poll() is None for process in pair):
        time.sleep(0.002)
    time.sleep(draw.random() * 0.05)
    for process in pair[:1] if kind == "one" and draw.random() < 0.5 else pair[1:]:
        process.send_signal(signal.SIGKILL)
    if kind != "one":
        pair[0].send_signal(signal.SIGKILL)
    assert 0 not in end(pair)  # one that lives ends too, and not as if all were well
    assert runs.steps(run) < 33
    assert end(runs.start_pair(config, runs.free_port(), strategy=strategy)) == [0, 0]
    runs.assert_same_weights(run, straight / strategy)
    runs.assert_resumed(run, 33)


@pytest.mark.skipif(TRIES < 2, reason="one kill by default: HERON_KILLS=20 for all")
def test_killed_on_two_processes_and_ended_on_one(straight: Path) -> None:
    config = runs.experiment(straight, "fewer", **LENGTH)
    pair = runs.start_pair(config, runs.free_port())
    while runs.steps(straight / "fewer") < 17:
        time.sleep(0.01)
    for process in pair:
        process.kill()
    end(pair)
    alone = subprocess.run(
        [sys.executable, "pipeline/pretrain.py", "--config", str(config), "run.resume=auto"],
        cwd=runs.ROOT,
        env=runs.environment(),
        check=False,
        capture_output=True,
    )
    assert alone.returncode == 0, alone.stderr[-2000:]
    expected = runs.weights(straight / "ddp")
    for name, value in runs.weights(straight / "fewer").items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.skipif(TRIES < 2, reason="tests/launch sends signals too: HERON_KILLS=20 for this")
def test_a_signal_to_one_saves_and_stops_all(straight: Path) -> None:
    """Also with reading processes, which hear the signal as well; SIGUSR1: see test_slurm.py."""
    number, name = signal.SIGTERM, "signalled"
    config = runs.experiment(straight, name, **LENGTH | {"data": LENGTH["data"] | {"workers": 1}})
    run = straight / name
    pair = runs.start_pair(config, runs.free_port())
    while runs.steps(run) < 5:
        time.sleep(0.01)
    pair[1].send_signal(number)
    for reader in subprocess.run(
        ["pgrep", "-P", str(pair[1].pid)], capture_output=True, text=True, check=True
    ).stdout.split():
        os.kill(int(reader), number)
    outputs = [runs.finish(process, 120) for process in pair]
    assert [status for status, _ in outputs] == [runs.SAVED, runs.SAVED], outputs
    assert "is saved in" in outputs[0][1]
    assert runs.saved_step(run) == runs.steps(run) < 33
    assert end(runs.start_pair(config, runs.free_port())) == [0, 0]
    runs.assert_same_weights(run, straight / "ddp")


def test_a_process_that_stands_still_is_named(straight: Path) -> None:
    """Stopped, not killed: its connections stay open, and only time tells."""
    changes = LENGTH | {"train": LENGTH["train"] | {"timeout_s": 10}}
    config = runs.experiment(straight, "still", **changes)
    pair = runs.start_pair(config, runs.free_port())
    while runs.steps(straight / "still") < 5:
        time.sleep(0.01)
    pair[1].send_signal(signal.SIGSTOP)
    began = time.monotonic()
    status, output = runs.finish(pair[0], 60)
    assert status == runs.BROKEN
    assert time.monotonic() - began < 10 + 20
    assert "nothing has moved for 10 s: this is rank 0 on" in output
    assert "rank 1 on" in output and "run again with run.resume=auto" in output
    pair[1].kill()
    runs.finish(pair[1], 60)
