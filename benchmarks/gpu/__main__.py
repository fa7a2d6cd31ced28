"""Everything that needs a GPU, in one command: right, then fast, then a step, then what is left.

    python -m benchmarks.gpu --out OUT --minutes 7                       # on a machine with a GPU
    python -m benchmarks.gpu --out OUT --minutes 3 --parts right fast    # a rerun of what failed
    python -m benchmarks.gpu --out OUT --dry                             # on a CPU: tiny

Each part is a process of its own with a time limit of its own. One that dies or hangs costs its own
limit alone, and parts of many cases go on after the case that killed them. `results.jsonl` gets a
line a result the moment it is known, `log.txt` all output. The table comes last.
"""

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]
# By part: its file, the seconds it may take, in the order of their value.
PARTS: dict[str, tuple[str, float]] = {
    "env": ("machine", 60), "right": ("right", 105), "checks": ("product", 105),
    "zero": ("product", 60), "nccl": ("machine", 30), "compiled": ("product", 105),
    "half": ("product", 45),
    "fast": ("fast", 100), "faces": ("product", 30), "step": ("step", 95), "peers": ("fast", 60),
    "search": ("machine", 20), "tiles": ("fast", 60),
}  # fmt: skip
TOGETHER = "right", "checks", "zero", "nccl", "compiled", "half"  # side by side: nothing is timed
STALL_S = {"fast": 45, "peers": 65, "step": 100, "tiles": 30}  # without a line, a case hangs
NEEDED_S = 12  # to start a part
TABLE = (
    "died", "versions", "imports", "product", "exponentials", "right", "million", "job",
    "deterministic", "resumed", "embed", "nccl", "search", "step", "tile", "fast",
)  # fmt: skip
Row = dict[str, Any]


class Results:
    """The results so far; a line a result is written as soon as it is known."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.rows: list[Row] = []
        self._start, self._lock = time.time(), threading.Lock()
        self._log: IO[str] = (folder / "log.txt").open("a")
        self._file: IO[str] = (folder / "results.jsonl").open("a")

    def log(self, part: str, line: str) -> None:
        with self._lock:
            self._log.write(f"{part}| {line}")
            self._log.flush()

    def add(self, part: str, row: Row) -> None:
        row = {"part": part, "t": round(self.seconds(), 1)} | row
        with self._lock:
            self.rows.append(row)
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()

    def close(self) -> None:
        self._log.close()
        self._file.close()

    def seconds(self) -> float:
        """Seconds since the command began."""
        return time.time() - self._start

    def table(self) -> Iterator[str]:
        """What matters, short."""
        compared = [row for row in self.rows if row["what"] == "right"]
        wrong = [row for row in compared if not row["ok"]]
        yield f"right: {len(compared) - len(wrong)} of {len(compared)}"
        for what in TABLE:
            for row in wrong if what == "right" else self.rows:
                if row["what"] == what:
                    shown = {k: v for k, v in row.items() if k not in ("what", "tail", "part", "t")}
                    yield f"{what}: " + " ".join(f"{k}={_short(v)}" for k, v in shown.items())


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)[:120]


def run_part(name: str, seconds: float, results: Results, command: Sequence[str]) -> str:
    """Runs a part; goes on after the case that killed it, or hangs, while there is time."""
    end, at, begun = time.time() + seconds, 0, -1
    stall = STALL_S.get(name, math.inf)
    while time.time() < end - 3:
        with _worker(name, [*command, str(at)], end, stall) as (process, seen):
            assert process.stdout is not None
            for line in process.stdout:
                seen[0] = time.time()
                results.log(name, line)
                if line.startswith("@ "):
                    row = json.loads(line[2:])
                    if row["what"] == "begin":
                        begun = row["number"]
                    else:
                        results.add(name, row)
            status = process.wait()
        if status == 0:
            return "done"
        if time.time() >= end - 3:
            results.add(name, {"what": "died", "case": begun, "status": f"after {seconds:.0f} s"})
            return f"stopped after {seconds:.0f} s"
        results.add(name, {"what": "died", "case": begun, "status": status})
        if begun < at:  # it did not even begin
            return f"died with status {status}"
        at = begun + 1
    return "no time left"


@contextlib.contextmanager
def _worker(
    name: str, command: Sequence[str], end: float, stall: float
) -> Iterator[tuple[subprocess.Popen[str], list[float]]]:
    """Starts a worker in a group of its own; kills it at the end, or after `stall` s of silence.

    Gives the process, and the time of its last line, which the caller keeps.
    """
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", process_group=0,
        env=os.environ | {"PYTHONUNBUFFERED": "1", "GPU_PART": name},
    )  # fmt: skip
    seen, over = [time.time()], threading.Event()

    def kill() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def watch() -> None:
        while not over.wait(0.5):
            if time.time() > end or time.time() - seen[0] > stall:
                kill()
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield process, seen
    finally:
        over.set()
        watcher.join()
        kill()  # its children
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def prepare(arguments: argparse.Namespace, out: Path) -> None:
    """Sets the environment of the workers."""
    os.environ["GPU_RATES"] = str(out / "rates.json")
    os.environ["GPU_WORK"] = str(out / "work")
    (out / "work").mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1" if arguments.dry else "2")
    os.environ["PYTHONPATH"] = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    os.environ["GPU_TERMS"] = " ".join(arguments.terms)
    os.environ["GPU_DIMS"] = " ".join(map(str, arguments.dims))
    if arguments.dry:
        os.environ |= {"GPU_DRY": "1", "TRITON_INTERPRET": "1"}


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="the folder of what comes back")
    parser.add_argument("--minutes", type=float, default=7, help="for all parts together")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), help="all; dry: not compiled")
    parser.add_argument("--terms", nargs="+", default=[], help="of right, fast and peers")
    parser.add_argument("--dims", nargs="+", type=int, default=[], help="of right, fast and peers")
    parser.add_argument("--dry", action="store_true", help="tiny, on a CPU, kernels interpreted")
    arguments = parser.parse_args(words)
    if arguments.parts is None:  # a CPU's compiler takes longer than all other parts together
        arguments.parts = [name for name in PARTS if not (arguments.dry and name == "compiled")]
    return arguments


def main(words: Sequence[str] | None = None) -> int:
    """Runs the parts; returns 1 where a part died or a result was wrong."""
    arguments = parse(words)
    out: Path = arguments.out.resolve()
    prepare(arguments, out)
    parts, results = arguments.parts, Results(out)
    if not (arguments.dry or (out / "rates.json").exists()) and {"fast", "peers"} & {*parts}:
        parts = list(dict.fromkeys(["env", *parts]))  # floors need its rates
    stop = arguments.minutes * 60 - 8

    def run(name: str) -> None:
        begin = results.seconds()
        if stop - begin < NEEDED_S:
            print(f"{name}: no time left", flush=True)
            return
        limit = min(PARTS[name][1] * (2 if arguments.dry else 1), stop - begin)
        command = [sys.executable, "-m", "benchmarks.gpu", name]
        end = run_part(name, limit, results, command)
        print(f"[{results.seconds():5.0f} s] {name}: {end}", flush=True)

    side_by_side = [name for name in parts if name in TOGETHER and not arguments.dry]
    for name in [x for x in parts if x == "env"]:
        run(name)
    threads = [threading.Thread(target=run, args=[name]) for name in side_by_side]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in parts:
        if name not in ("env", *side_by_side):
            run(name)
    results.close()
    print(*results.table(), sep="\n")
    bad = [row for row in results.rows if row["what"] == "died" or row.get("ok") is False]
    return 1 if bad else 0


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] in PARTS:  # a worker: its part and its first case
        file, _ = PARTS[sys.argv[1]]
        getattr(import_module(f"benchmarks.gpu.{file}"), sys.argv[1])(int(sys.argv[2]))
    else:
        sys.exit(main())
