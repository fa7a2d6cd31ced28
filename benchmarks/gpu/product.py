"""The product itself on a GPU: the default experiment, resumed, compiled, under ZeRO, embedded."""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.common import DRY, say, work_folder

ROOT = Path(__file__).parents[2]
SMALL = ["evaluate.baselines=false", "evaluate.seeds=1"]
TINY = ["data.build.train=300", "data.build.test=50", "data.protocol.labelled=80"]
TINY += ["data.batch={labelled: 16, unlabelled: 16}", "evaluate.map=never"]
SIZE = TINY if DRY else []
FIXED_STEPS = 4 if DRY else 40
RESULTS = (
    "contrast", "precision", "strategy", "mfu", "train_seconds", "peak_memory_bytes", "f1_weighted",
    "auc_macro", "steps",
)  # fmt: skip
Steps = list[dict[str, Any]]


def environment() -> dict[str, str]:
    """That of a run: Triton's interpreter would be too slow for one."""
    return {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}


def job(name: str, words: list[str], seconds: float, launcher: tuple[str, ...] = ()) -> Steps:
    """Runs the main job in a process of its own, and says what it gave; no steps if it failed."""
    folder, data = work_folder() / name, work_folder() / f"{os.environ['GPU_PART']}-data"
    command = [sys.executable, *launcher, "pipeline/pretrain.py", "--config", "faces"]
    command += [f"data.path={data}", f"run.dir={folder}", *SMALL, *SIZE, *words]
    start = time.time()
    status, text = finish(command, work_folder() / f"{name}.log", seconds)
    took = round(time.time() - start, 1)
    print(f"--- {name}: status {status}, {took} s\n{text[-3000:]}", flush=True)
    if status:
        told = [x for x in text.splitlines() if "rror" in x and "ChildFailed" not in x]
        lines = [x for x in told if "error_file" not in x] or ["no line says why"]
        say(what="job", name=name, ok=False, status=status, wall_s=took, error=lines[-1][:300])
        return []
    result = json.loads((folder / "result.json").read_text())
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    steps = [x for x in map(json.loads, lines) if "seconds" in x]
    late = steps[len(steps) // 2 :]
    medians = {key: statistics.median(x[key] for x in late) for key in ("seconds", "data_wait_s")}
    say(what="job", name=name, ok=True, wall_s=took, **{k: result.get(k) for k in RESULTS},
        step_ms=medians["seconds"] * 1e3, data_wait_ms=medians["data_wait_s"] * 1e3,
        last_loss=steps[-1]["loss"])  # fmt: skip
    return steps


def finish(command: list[str], log: Path, seconds: float) -> tuple[int | str, str]:
    """Returns a command's status, or `late`, and its output."""
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=environment()
        )
        status: int | str
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.terminate()  # a run saves and ends
            try:
                process.wait(8)
            except subprocess.TimeoutExpired:
                process.kill()
            status = "late"
    return status, log.read_text(errors="replace")


def faces(_: int) -> None:
    """The default experiment as a user has it, alone on the GPU."""
    job("faces", [f"train.steps={4 if DRY else 400}"], 30)


def checks(_: int) -> None:
    """The default experiment deterministic twice, then resumed, then embedded."""
    precision = "fp32" if DRY else "bf16"
    fixed = ["train.deterministic=true", f"train.precision={precision}"]
    whole, half = (f"train.steps={steps}" for steps in (FIXED_STEPS, FIXED_STEPS // 2))
    one, two = (job(name, [*fixed, whole], 40) for name in ("fixed-1", "fixed-2"))
    losses = [[step["loss"] for step in run] for run in (one, two)]
    say(what="deterministic", ok=bool(one) and losses[0] == losses[1])
    resumed = job("resumed", [*fixed, half], 40)
    resumed = job("resumed", [*fixed, whole, "run.resume=auto"], 40) if resumed else []
    last = [run[-1]["loss"] for run in (one, resumed) if run]
    say(what="resumed", ok=len(last) == 2 and last[0] == last[1], losses=last)
    command = [sys.executable, "-m", "heron", "embed", str(work_folder() / "fixed-1")]
    start = time.time()
    log = work_folder() / "embed.log"
    status, text = finish([*command, "--out", str(work_folder() / "embeddings")], log, 30)
    say(what="embed", ok=status == 0, status=status, wall_s=round(time.time() - start, 1),
        tail=text[-300:])  # fmt: skip


def compiled(_: int) -> None:
    """`train.compile` in the product: the first steps compile."""
    job("compile", ["train.compile=true", f"train.steps={2 if DRY else 100}"], 70)


def half(_: int) -> None:
    """float16 with a loss scale, an average of the weights, and a clipped gradient."""
    options = ["train.precision=fp16", "train.ema=0.99", "optim.clip_norm=1.0"]
    job("half", [*options, f"train.steps={2 if DRY else 100}"], 40)


def zero(_: int) -> None:
    """ZeRO 2 of one process, over NCCL."""
    kind = "cpu_zero2" if DRY else "zero2"
    launcher = ("-m", "accelerate.commands.launch", "--num_processes", "1",
                "--config_file", f"launch/accelerate/{kind}.yaml")  # fmt: skip
    job("zero2", [f"train.steps={3 if DRY else 60}"], 45, launcher)
