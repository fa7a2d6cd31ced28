"""Runs on two processes, started as a launcher on a cluster starts them, and what they leave."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from heron.api.job import main
from heron.experiment.config import dump_config
from heron.training.checkpoint import complete_checkpoints
from heron.training.tracking import read_metrics
from tests.experiments import frames
from tests.forked import Command, Main, start

ROOT = Path(__file__).parent.parent.parent
SAVED = 75  # the exit status of processes that were told to stop, and saved
BROKEN = 76  # of processes one of which died or hung
LENGTH: dict[str, Any] = {"steps": None, "epochs": 4, "save_every_epochs": 1, "timeout_s": 15}
LAUNCHERS = re.compile(
    r"RANK|.*WORLD_SIZE|LOCAL_RANK|MASTER_|ACCELERATE_|SLURM|GLOO_|ZERO$|TORCHEL"
)


def experiment(folder: Path, name: str, **changes: Any) -> Path:
    """Write an experiment on a few hundred frames to a file; the run goes to `folder / name`."""
    config = frames(folder, name, **changes)
    path = folder / f"{name}.yaml"
    path.write_text(dump_config(config))
    return path


def environment(**more: str) -> dict[str, str]:
    """This process's environment without what a launcher sets, one thread a process."""
    kept = {name: value for name, value in os.environ.items() if not LAUNCHERS.match(name)}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHON": sys.executable} | more


BAD_END = (  # where the interpreter's end aborts, as a thread of a process group can make it
    "-c",
    "import atexit, os, sys; from heron.api.job import main; atexit.register(os.abort); "
    "sys.exit(main())",
)


Started = subprocess.Popen[str] | Command
Program = Main | Sequence[str]  # what Python is given, where its own end is asked about


def start_pair(
    config: Path, port: int, program: Program = main, strategy: str = "ddp"
) -> list[Started]:
    """Start a run on two processes of this host, with nothing but the environment variables."""
    both = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    both |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"} if strategy == "fsdp" else {}
    words = ["--config", str(config), "run.resume=auto"]
    pair: list[Started] = []
    for rank in ("0", "1"):
        variables = environment(**both, MASTER_PORT=str(port), RANK=rank, LOCAL_RANK=rank)
        if callable(program):
            pair.append(start(words, ROOT, program, variables))
            continue
        process = subprocess.Popen(
            [sys.executable, *program, *words],
            cwd=ROOT,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        pair.append(process)
    return pair


def finish(process: Started, timeout_s: float) -> tuple[int, str]:
    """The exit status and the output of a process; one that does not end is killed, an error."""
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        raise TimeoutError(f"not ended after {timeout_s} s:\n{output[-3000:]}") from None
    assert process.returncode is not None
    return process.returncode, output


def run_pair(config: Path, program: Program = main, strategy: str = "ddp") -> None:
    """Run to the end on two processes of this host."""
    pair = start_pair(config, free_port(), program, strategy)
    for status, output in [finish(process, 120) for process in pair]:
        assert status == 0, output[-3000:]


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("", 0))
        return int(taken.getsockname()[1])


def steps(run: Path) -> int:
    """How many steps a run has made."""
    return 1 + max((row["step"] for row in read_metrics(run / "metrics.jsonl")), default=-1)


def saved_step(run: Path) -> int:
    """Where the newest checkpoint of a run stands."""
    found = complete_checkpoints(run / "checkpoints")
    if not found:
        return 0
    return int(json.loads((found[-1] / "state.json").read_text())["position"]["step"])


def await_that(
    what: str,
    true: Callable[[], bool],
    timeout_s: float,
    say: Callable[[], str],
    going: Callable[[], bool] = lambda: True,
) -> None:
    """Wait until something holds; if it does not come, an error that ends with `say()`.

    Args:
        what: it is, for the error.
        true: whether it holds.
        timeout_s: how long to wait.
        say: what is known of why it did not come.
        going: false once it cannot come any more.
    """
    deadline = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > deadline or not (going() or true()):
            raise TimeoutError(f"{what}: not within {timeout_s} s, or no more\n{say()[-3000:]}")
        time.sleep(0.1)


def weights(run: Path) -> Mapping[str, Tensor]:
    return load_file(run / "checkpoints" / "latest" / "model.safetensors")


def assert_resumed(run: Path, last: int) -> None:
    """The run made every step once; begun anew, it would have set its checkpoints aside."""
    made = [row["step"] for row in read_metrics(run / "metrics.jsonl") if "loss" in row]
    assert made == list(range(last))
    assert not (run / "checkpoints-1").exists()


def assert_same_weights(run: Path, straight: Path) -> None:
    """Both runs ended at the same step, with the same bits: the model, and what it trains."""
    assert saved_step(run) == saved_step(straight)
    one, other = (
        {path.name: path.read_bytes() for path in (folder / "checkpoints/latest").glob("*.safet*")}
        for folder in (run, straight)
    )
    assert one.keys() == other.keys() and one
    assert [name for name in one if one[name] != other[name]] == []
