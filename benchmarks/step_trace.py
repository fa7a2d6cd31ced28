"""Counts the files that a training step of HeroCon passes through, and the moves between them.

    python -m benchmarks.step_trace           one line: files, pairs of files, moves
    python -m benchmarks.step_trace --list    and each move, in order

A move is a call from a line of one file of `heron/` to a function of another; calls through other
libraries count from the last line of ours. The step traced is the third, where everything that is
made once is there, on one thread of one process; loader workers are off.
"""

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import heron
from heron.api.job import pretrain
from heron.training.trainer import Trainer
from tests import reference_runs

ROOM = str(Path(heron.__file__).parent)
STEP = 2  # the third


def moves_of_step(method: str = "herocon") -> list[tuple[str, str]]:
    """Returns caller, `file:function`, and callee of each move of a step, in order."""
    moves: list[tuple[str, str]] = []
    step = Trainer.step

    def traced(self: Trainer, t: int, source: Any) -> None:
        if t != STEP:
            return step(self, t, source)
        path = [("training/trainer.py", "step")]

        def look(frame: FrameType, event: str, _: Any) -> None:
            file = frame.f_code.co_filename
            if not file.startswith(ROOM) or frame.f_code.co_name.startswith("<"):
                return
            name = file.removeprefix(ROOM + "/"), frame.f_code.co_name
            if event == "call":
                if name[0] != path[-1][0]:
                    moves.append((":".join(path[-1]), ":".join(name)))
                path.append(name)
            elif event == "return" and len(path) > 1:
                path.pop()

        sys.setprofile(look)
        try:
            return step(self, t, source)
        finally:
            sys.setprofile(None)

    Trainer.step = traced  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as folder:
            reference_runs.data(Path(folder))
            config = reference_runs.experiment(Path(folder), method, method, steps=STEP + 2)
            pretrain(config)
    finally:
        Trainer.step = step  # type: ignore[method-assign]
    return moves


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--method", default="herocon")
    parser.add_argument("--list", action="store_true", help="each move, in order")
    options = parser.parse_args()
    moves = moves_of_step(options.method)
    if options.list:
        print(*(f"{a} -> {b}" for a, b in moves), sep="\n")
    files = {name.partition(":")[0] for move in moves for name in move}
    pairs = Counter((a.partition(":")[0], b.partition(":")[0]) for a, b in moves)
    print(f"{options.method}: {len(files)} files, {len(pairs)} pairs, {len(moves)} moves")


if __name__ == "__main__":
    main()
