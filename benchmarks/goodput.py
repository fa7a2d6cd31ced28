"""Goodput under kills: a run that is killed at random and started again, against an unkilled one.

    python -m benchmarks.goodput --minutes 10 --between 20

Every start is killed by SIGKILL after a time drawn from an exponential distribution (the mean time
between failures), one process of it or all, and started again with run.resume=auto, until the run
ends. Its weights must have the bits of the run that was never killed. Goodput is the time that the
unkilled run took, over the time that this one took from its first start to its end.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from heron.pipeline.training.checkpoint import damage

ROOT = Path(__file__).resolve().parents[1]
SET = ["evaluate.map=never", "evaluate.baselines=false", "train.timeout_s=60", "run.resume=auto"]


def start(folder: Path, world: int, zero: bool, steps: int, every: int) -> subprocess.Popen[bytes]:
    """Starts the default run, as a launcher does, in a session of its own."""
    kind = "cpu_zero2" if zero else "cpu"
    launch = ["--config_file", f"launch/accelerate/{kind}.yaml", "--num_processes", str(world)]
    single = ["--num_processes", "1", "--cpu", "--mixed_precision", "no", "--dynamo_backend", "no"]
    several = world > 1 or zero
    command = [sys.executable, "-m", "accelerate.commands.launch", *(launch if several else single)]
    data = ["data.path=" + str(folder.parent / "data"), "data.build.train=2000"]
    length = [f"train.steps={steps}", f"train.save_every_steps={every}"]
    return subprocess.Popen(
        [*command, "pipeline/pretrain.py", f"run.dir={folder}", *data, *length, *SET],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // world))},
        stdout=subprocess.DEVNULL,
        stderr=(folder.parent / f"{folder.name}.log").open("ab"),
        start_new_session=True,
    )


def workers(session: int) -> list[int]:
    """Returns the training processes of a session, without their launcher."""
    listed = subprocess.run(
        ["ps", "-o", "pid=,args=", "-s", str(session)], capture_output=True, text=True, check=False
    )
    rows = [line.split(None, 1) for line in listed.stdout.splitlines()]
    return [
        int(row[0]) for row in rows if "pipeline/pretrain.py" in row[1] and "launch" not in row[1]
    ]


def newest(folder: Path) -> Path:
    """Returns a run's last checkpoint."""
    return (folder / "checkpoints" / "latest").resolve()


def saving(folder: Path) -> bool:
    """Whether a save is going on."""
    return any(folder.glob("checkpoints/.step-*.part"))


def killed_run(options: argparse.Namespace, folder: Path) -> tuple[int, int, float]:
    """Runs to the end under kills; returns how many, how many inside a save, and the seconds."""
    draw, kills, inside, began = random.Random(options.seed), 0, 0, time.monotonic()
    while True:
        process = start(folder, options.world, options.zero, options.steps, options.every)
        deadline = time.monotonic() + draw.expovariate(1 / options.between)
        await_save = draw.random() < 1 / 3
        while process.poll() is None:
            late = time.monotonic() > deadline
            if late and (not await_save or saving(folder)):
                break
            time.sleep(0.002)
        else:
            if process.returncode == 0:
                return kills, inside, time.monotonic() - began
        inside += saving(folder)
        kills += 1
        found = workers(process.pid)
        if draw.random() < 0.5 and found:  # one alone: the others find out
            os.kill(draw.choice(found), signal.SIGKILL)
            process.wait(120)
        else:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if time.monotonic() - began > 60 * options.minutes:
            raise SystemExit(f"not ended after {options.minutes} minutes and {kills} kills")


def main() -> None:
    """Prints kills, goodput, and whether the weights are the same."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--between", type=float, default=20.0, help="mean seconds between kills")
    parser.add_argument("--minutes", type=float, default=30.0, help="after which it gives up")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--zero", action="store_true", help="DeepSpeed's ZeRO 2 instead of DDP")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        began = time.monotonic()
        straight = start(
            folder / "straight", options.world, options.zero, options.steps, options.every
        )
        if straight.wait():
            raise SystemExit((folder / "straight.log").read_text()[-2000:])
        alone = time.monotonic() - began
        kills, inside, seconds = killed_run(options, folder / "killed")
        a, b = (
            load_file(newest(folder / run) / "model.safetensors") for run in ("straight", "killed")
        )
        same = a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        assert damage(newest(folder / "killed")) == ""
        strategy = "ZeRO 2" if options.zero else "DDP" if options.world > 1 else "one process"
        print(
            f"{strategy}, {options.world} process(es), {options.steps} steps, a checkpoint every "
            f"{options.every}: unkilled {alone:.0f} s; {kills} kills ({inside} inside a save) at "
            f"{options.between:g} s on average, {seconds:.0f} s; goodput {alone / seconds:.2f}; "
            f"weights {'the same bits' if same else 'DIFFER'}"
        )
        if not same:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
