"""Seconds that a run waits for its checkpoints, and until they are on disk.

    python -m benchmarks.checkpoints
    python -m benchmarks.checkpoints --width 2048 --saves 2 --folder /mnt/shared

Two processes train wide MLPs on frames, under DDP and FSDP2, and save a checkpoint every few
steps. Each strategy runs in several ways, in turn: `wait` as ours, but training waits for the disk;
`ours`; and, under FSDP2, `torch.distributed.checkpoint.async_save` into safetensors (`dcp`), each
process its shards, without a checksum. A warm-up of the disk is left out: the first checkpoint of
each run is not counted.
"""

import argparse
import io
import os
import shutil
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.multiprocessing.spawn import spawn

from heron.api.job import pretrain
from heron.distributed.collectives import background_group
from heron.experiment.config import parse_config
from heron.training.saver import Saver

WAYS = {"ddp": ("wait", "ours"), "fsdp": ("wait", "ours", "dcp")}
EVERY = 8  # steps between two checkpoints: longer than one takes to write


class Clock:
    """Times the saves of a run; `way` says how they are done."""

    def __init__(self, way: str) -> None:
        self.way = way
        self.waited: list[float] = []  # s, of each checkpoint
        self.last: Any = None  # checkpoint of `dcp`, and its process group
        self.group: Any = None
        self.ends: list[float] = []  # when training went on
        self.written: list[float] = []  # s until it was on disk

    def begin(self, saver: Saver, position: Any, strategy: Any, *others: Any) -> None:
        """Stands for `Saver.begin`."""
        start = time.perf_counter()
        if self.way == "dcp":
            self._begin_dcp(saver, position, strategy, start)
        else:
            BEGIN(saver, position, strategy, *others)
            self._note(saver._work, start)
            if self.way == "wait":
                saver.wait()
        self.ends.append(time.perf_counter())
        self.waited.append(self.ends[-1] - start)

    def _begin_dcp(self, saver: Saver, position: Any, strategy: Any, start: float) -> None:
        if self.last is not None:
            self.last.result()
        state = {f"model/{name}": x for name, x in strategy.model.state_dict().items()}
        state |= {f"optimizer/{name}": x for name, x in strategy._optimizer_tensors().items()}
        folder = saver._folder / f"dcp-{position.step:08d}"
        self.group = self.group or background_group()
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        self.last = async_save(state, storage_writer=writer, process_group=self.group)
        self._note(self.last, start)

    def _note(self, work: Any, start: float) -> None:
        work.add_done_callback(lambda _: self.written.append(time.perf_counter() - start))


BEGIN = Saver.begin


def experiment(folder: Path, name: str, options: argparse.Namespace) -> Any:
    """A run of `--saves` checkpoints of networks of `--width`."""
    tree = {
        "run": {"dir": str(folder / name)},
        "data": {
            "path": str(folder / "frames"),
            "build": {"source": "frames", "train": 2000, "test": 70, "classes": 4, "seed": 1},
            "protocol": {"labelled": 400, "test": "test"},
            "batch": {"labelled": 64, "unlabelled": 192},
            "views": [{"stored": "view1"}, {"stored": "view2"}],
        },
        "model": {"encoder": {"kind": "mlp", "widths": [options.width] * 3}},
        "objective": {"cross_entropy": {"weight": 1.0}, "nt_xent": {"weight": 1.0}},
        "optim": {"kind": "adamw", "lr": 1e-3},
        "train": {
            "epochs": 1000,
            "steps": EVERY * (options.saves + 1),
            "save_every_steps": EVERY,
            "keep_checkpoints": 1,
            "cpu_threads": 1,
        },
        "evaluate": {"map": "never", "baselines": False},
    }
    return parse_config(tree)


def of_rank(rank: int, folder: str, options: argparse.Namespace, cases: list[Any]) -> None:
    """Runs all cases on one of the two processes; the first prints a line for each."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    for number, (strategy, way) in enumerate(cases):
        if strategy == "fsdp":
            os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
        clock, run = Clock(way), f"{number}-{strategy}-{way}"

        def begin(saver: Saver, *args: Any, clock: Clock = clock) -> None:
            clock.begin(saver, *args)

        silent = redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO())
        with patch.object(Saver, "begin", begin), silent[0], silent[1]:
            pretrain(experiment(Path(folder), run, options))
            if clock.last is not None:
                clock.last.result()
        dist.barrier()
        if rank == 0:
            saved = Path(folder) / run / "checkpoints"
            newest = max(saved.glob("[ds]*-0*"), key=lambda path: path.name)
            size = sum(path.stat().st_size for path in newest.iterdir())
            waited, written = median(clock.waited[1:-1]), median(clock.written[1:-1])
            print(
                f"| {strategy} | {way} | {size / 1e6:,.0f} | {waited:.2f} | {written:.2f} | "
                f"{clock.ends[-1] - clock.ends[0]:.1f} |",
                flush=True,
            )
            shutil.rmtree(saved)
        dist.barrier()


def main() -> None:
    """Prints a table in Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--width", type=int, default=3072, help="units of each of three layers")
    parser.add_argument("--saves", type=int, default=5, help="checkpoints of a run that count")
    parser.add_argument("--folder", help="on the disk to measure; default: temporary files")
    options = parser.parse_args()
    cases = [(strategy, way) for strategy, ways in WAYS.items() for way in ways]
    print(
        "| strategy | way | MB | s waited | s until on disk | s of training and saving |\n"
        + "|---" * 6
        + "|"
    )
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        spawn(of_rank, (folder, options, cases), 2)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
