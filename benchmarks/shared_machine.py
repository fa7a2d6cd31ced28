"""Commands on a machine that is shared: alone, two at once, and beside a job that only spins.

    python -m benchmarks.shared_machine --turns 3
    python -m benchmarks.shared_machine --jobs pretrain --waits heron libgomp 10000 passive

A job is the whole command, from its start to its end, over data made before. `--waits` says how
threads wait for each other: as Heron's commands choose (heron), as libgomp does where nothing is
set (libgomp: 300,000 spins), after so many spins, or without spinning (passive). The jobs of one
turn follow each other, so that what else the machine does is spread over all of them.

With C cores, a second job of the same kind leaves half of them, and a spinning job C - 1. A
slowdown is told as it is, and as a multiple of what the cores that are left would explain.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from heron.base.cores import SPIN_KEYS, cores

ROOT = Path(__file__).resolve().parents[1]
HERON = [sys.executable, "-m", "heron"]
SPIN = [sys.executable, "-c", "while True: pass"]
UNSCORED = ["evaluate.map=never", "evaluate.baselines=false", "train.evaluate_every_epochs=1000"]
TESTS = ["tests/losses", "tests/models"]
BESIDE = ("nothing", "a second", "a spinning job")
LIBGOMP = "300000"  # its spins where nothing is set


class Jobs:
    """The commands to time, over the data, run and embeddings of one folder."""

    def __init__(self, folder: Path, steps: int, rows: int) -> None:
        self.folder, self.steps, self.number = folder, steps, 0
        self.data = [f"data.path={folder / 'data'}", f"data.build.train={rows}"]
        trained, embedded = folder / "trained", folder / "embedded"
        for words in (self._pretrain(trained, 2), self._embed(trained, embedded)):
            subprocess.run([*HERON, *words], check=True, capture_output=True, cwd=ROOT)
        self.trained, self.embedded = trained, embedded

    def command(self, job: str) -> list[str]:
        """Returns a command that writes a folder of its own."""
        self.number += 1
        out = self.folder / f"{job}-{self.number}"
        if job == "pretrain":
            return [*HERON, *self._pretrain(out, self.steps)]
        if job == "processes":
            return [*HERON, *self._pretrain(out, self.steps), "--processes", "2"]
        if job == "embed":
            return [*HERON, *self._embed(self.trained, out)]
        if job == "index":
            return [*HERON, "index", str(self.embedded), "--out", str(out), "--kind", "ivf"]
        return [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile", *TESTS]

    def _pretrain(self, out: Path, steps: int) -> list[str]:
        length = [f"train.total_steps={steps}", "train.epochs=null"]
        return ["pretrain", "faces", f"run.dir={out}", *length, *self.data, *UNSCORED]

    def _embed(self, run: Path, out: Path) -> list[str]:
        return ["embed", str(run), "--out", str(out), "--quiet"]


def environment(wait: str) -> dict[str, str]:
    """Returns the environment of a job whose threads wait in a way of `--waits`."""
    kept = {key: value for key, value in os.environ.items() if key not in SPIN_KEYS}
    if wait == "passive":
        return kept | {"OMP_WAIT_POLICY": "PASSIVE"}
    return kept | ({} if wait == "heron" else {"GOMP_SPINCOUNT": wait.replace("libgomp", LIBGOMP)})


def seconds(commands: Sequence[Sequence[str]], env: Mapping[str, str], spinning: bool) -> float:
    """Returns how long commands that start together take, on average."""
    with ExitStack() as stack:
        if spinning:
            spinner = stack.enter_context(subprocess.Popen(SPIN))
            stack.callback(spinner.kill)
        began, ends = time.perf_counter(), dict[int, float]()
        running = {
            number: subprocess.Popen(
                words, env=env, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
            )
            for number, words in enumerate(commands)
        }
        while len(ends) < len(running):
            for number, process in running.items():
                if number not in ends and process.poll() is not None:
                    ends[number] = time.perf_counter() - began
                    if process.returncode:
                        sys.exit(f"{' '.join(commands[number])}: {process.communicate()[1]!r}")
            time.sleep(0.02)
    return statistics.mean(ends.values())


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    jobs = ["pretrain", "processes", "embed", "index", "test"]
    parser.add_argument("--jobs", nargs="+", choices=jobs, default=jobs)
    parser.add_argument("--waits", nargs="+", default=["heron", "libgomp"])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--small", action="store_true", help="too small to mean anything")
    if parser.parse_args(words).small:
        parser.set_defaults(jobs=["index"], waits=["heron"], turns=1, rows=2000)
    arguments = parser.parse_args(words)
    left = {"nothing": 1.0, "a second": 1 / 2, "a spinning job": 1 - 1 / cores()}
    with tempfile.TemporaryDirectory() as folder:
        made = Jobs(Path(folder), arguments.steps, arguments.rows)
        print(
            f"{cores()} cores, medians of {arguments.turns} turns, seconds (x: over what is left)"
        )
        for job in arguments.jobs:
            times: dict[tuple[str, str], list[float]] = defaultdict(list)
            for _ in range(arguments.turns):
                for beside in BESIDE:
                    for wait in arguments.waits:
                        commands = [made.command(job) for _ in range(1 + (beside == "a second"))]
                        spent = seconds(commands, environment(wait), beside == "a spinning job")
                        times[wait, beside].append(spent)
            for wait in arguments.waits:
                found = {beside: statistics.median(times[wait, beside]) for beside in BESIDE}
                cells = [
                    f"{beside} {spent:6.1f} ({spent / found['nothing'] * left[beside]:4.2f} x)"
                    for beside, spent in found.items()
                ]
                print(f"{job:10} {wait:8} " + "   ".join(cells), flush=True)


if __name__ == "__main__":
    main()
