"""Goodput under kills: a run that is killed at random and restarted, against an unkilled one.

    python -m benchmarks.goodput --minutes 10 --between 20
    python -m benchmarks.goodput --world 2 1 --kills 10 --inside 0.5

After a time drawn from an exponential distribution (the mean time between failures), one process of
the run or all are killed by SIGKILL, and the run is started again with run.resume=auto, until it
ends. Its weights must equal those of the unkilled run bit by bit; if the number of processes
changes between starts, they must be close, since sums are taken in another order. Goodput is the
time of the unkilled run, divided by the time of this one from its first start to its end.
"""

import argparse
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import load_file

from heron.training.checkpoint import find_damage

ROOT = Path(__file__).resolve().parents[1]
SET = ["evaluate.map=never", "evaluate.baselines=false", "train.timeout_s=60", "run.resume=auto"]
FP64 = ["train.precision=fp64", "optim.kind=sgd", "optim.lr=0.01"]  # AdamW makes rounding grow
CLOSE = 1e-3  # of the largest weight: rounding, 1e-16 at first, grows with the steps


def start(folder: Path, world: int, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Starts the default run, as a launcher does, in a session of its own."""
    zero = options.zero
    kind = "cpu_zero2" if zero else "cpu"
    launch = ["--config_file", f"launch/accelerate/{kind}.yaml", "--num_processes", str(world)]
    single = ["--num_processes", "1", "--cpu", "--mixed_precision", "no", "--dynamo_backend", "no"]
    several = world > 1 or zero
    command = [sys.executable, "-m", "accelerate.commands.launch", *(launch if several else single)]
    data = ["data.path=" + str(folder.parent / "data"), "data.build.train=2000"]
    length = [
        "train.epochs=1000",
        f"train.steps={options.steps}",
        f"train.save_every_steps={options.every}",
    ]
    length += FP64 if len(options.world) > 1 else []
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


def saving(folder: Path, since: float) -> bool:
    """Returns whether a save begun after `since` is running; a kill leaves its folder behind."""
    with suppress(FileNotFoundError):  # it was just renamed
        unfinished = folder.glob("checkpoints/.step-*.part")
        return any(path.stat().st_ctime > since for path in unfinished)
    return False


def killed_run(options: argparse.Namespace, folder: Path) -> tuple[int, int, float]:
    """Runs to the end under kills; returns the kills, those inside a save, and the seconds."""
    draw, kills, inside, began = random.Random(options.seed), 0, 0, time.monotonic()
    while True:
        since = time.time()
        process = start(folder, options.world[kills % len(options.world)], options)
        wait = draw.expovariate(1 / options.between) if kills < options.kills else math.inf
        deadline = time.monotonic() + wait
        await_save = draw.random() < options.inside
        while process.poll() is None:
            late = time.monotonic() > deadline
            if late and (not await_save or saving(folder, since)):
                break
            time.sleep(0.002)
        else:
            if process.returncode == 0:
                return kills, inside, time.monotonic() - began
        inside += saving(folder, since)
        kills += 1
        pids = workers(process.pid)
        if draw.random() < 0.5 and pids:  # one alone: the others find out
            os.kill(draw.choice(pids), signal.SIGKILL)
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
    parser.add_argument("--kills", type=int, default=10**6, help="at most (default: no end)")
    parser.add_argument("--inside", type=float, default=1 / 3, help="share of kills in a save")
    parser.add_argument("--world", type=int, nargs="+", default=[1], help="processes of each start")
    parser.add_argument("--zero", action="store_true", help="DeepSpeed's ZeRO 2 instead of DDP")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        began = time.monotonic()
        straight = start(folder / "straight", options.world[0], options)
        if straight.wait():
            raise SystemExit((folder / "straight.log").read_text()[-2000:])
        unkilled_seconds = time.monotonic() - began
        kills, inside, seconds = killed_run(options, folder / "killed")
        a, b = (
            load_file(newest(folder / run) / "model.safetensors") for run in ("straight", "killed")
        )
        largest = max(float(x.abs().max()) for x in a.values())
        difference = max(float((a[name] - b[name]).abs().max()) for name in a) / largest
        same = a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        fine = same or (len(options.world) > 1 and difference < CLOSE)
        assert find_damage(newest(folder / "killed")) == ""
        strategy = "ZeRO 2" if options.zero else "DDP" if max(options.world) > 1 else "one process"
        print(
            f"{strategy}, {' and '.join(map(str, options.world))} process(es), {options.steps} "
            f"steps, a checkpoint every {options.every}: unkilled {unkilled_seconds:.0f} s; "
            f"{kills} kills ({inside} inside a save) at {options.between:g} s on average, "
            f"{seconds:.0f} s; goodput {unkilled_seconds / seconds:.2f}; "
            f"weights {'the same bits' if same else f'{difference:.1e} apart'}"
        )
        if not fine:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
