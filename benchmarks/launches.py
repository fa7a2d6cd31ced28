"""Launches and copies of a GPU's step of each loss, counted without a GPU.

    python -m benchmarks.launches
    python -m benchmarks.launches --losses NtXent Supcon --rows 64 --list
    python -m benchmarks.launches --json before.json
    python -m benchmarks.launches --beside before.json

A step is the forward and the backward pass of a loss module of two views, called as in a run: its
labels were checked when its data were read. The path is a GPU's: fused kernels, and strips of a
GPU's size. Kernels are counted, not run; torch computes everything else on the CPU, an operation of
which is one launch, though CUDA's sort, unique and nonzero launch several. Views and memory without
numbers launch nothing. `up` are copies from the host to the device, of Python's numbers; `down` are
what the host waits for: numbers that it reads, and sizes that the data decide.
"""

import argparse
import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from heron import losses
from heron.losses import Loss, classes, engine, fused, mirroring
from heron.losses.fused import layout
from heron.losses.products import recording
from tests.host_syncs import WAITING
from tests.losses import nets
from tests.losses.nets import CASES, CLASSES, Seen, wrong_labels

# What gives memory without a launch.
FREE = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "detach", "alias"}
UP = "lift_fresh"  # a tensor of Python's numbers
DOWN = WAITING - {UP}
NAMES = [name for name in CASES if "," not in name]
DIM, QUEUE = 128, 4096
MAKERS: dict[str, Callable[[], Loss]] = {  # whose queue must hold a batch
    "Comco": lambda: losses.Comco(DIM, CLASSES, queue=QUEUE, neighbours=2, neighbour_epochs=2),
    "Mulco": lambda: losses.Mulco(DIM, CLASSES, queue=QUEUE, tau=0.3),
    "Pico": lambda: losses.Pico(DIM, wrong_labels(), queue=QUEUE, phi_epochs=2),
}
HEAD = "| loss | rows | launches | up | down |"


@dataclass
class Counts:
    """What a device is asked for, by operation.

    Attributes:
        launches: operations and kernels.
        up: copies from the host.
        down: what the host waits for.
    """

    launches: Counter[str] = field(default_factory=Counter)
    up: Counter[str] = field(default_factory=Counter)
    down: Counter[str] = field(default_factory=Counter)

    def totals(self) -> list[int]:
        """Returns the three numbers."""
        return [x.total() for x in (self.launches, self.up, self.down)]


class _Dispatched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations while it is open."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        result = func(*args, **(kwargs or {}))
        masks = name.startswith(("index", "_index_put")) and any(
            x is not None and x.dtype == torch.bool
            for x in (args[1] if isinstance(args[1], list | tuple) else ())
        )
        if name == UP:
            self.counts.up[name] += 1
        elif name in DOWN or masks:
            self.counts.down["index by a mask" if masks else name] += 1
        if name not in FREE | {UP} and not _is_view(func, args, result):
            self.counts.launches[name] += 1
        return result


def _is_view(func: Any, args: Sequence[Any], result: Any) -> bool:
    """Whether an operation computes nothing: its results are its argument's memory, or empty."""
    results = [x for x in (result if isinstance(result, list | tuple) else [result])]
    tensors = [x for x in results if isinstance(x, Tensor)]
    if tensors and not any(x.numel() for x in tensors):
        return True
    if func._schema.is_mutable or not tensors or not args or not isinstance(args[0], Tensor):
        return bool(func.namespace == "prim")
    memory = args[0].untyped_storage().data_ptr()
    return all(x.untyped_storage().data_ptr() == memory for x in tensors)


@contextlib.contextmanager
def counting() -> Iterator[Counts]:
    """Counts what a GPU would be asked for while it is open; results are not right."""
    counts = Counts()

    def launch(kernel: Any, *args: Any, **constants: Any) -> None:
        counts.launches[kernel.__name__] += 1

    on_gpu = {"cpu": engine.STRIP_ELEMENTS["cuda"]}, {"cpu": classes.FEWEST_ROWS["cuda"]}
    with (
        mock.patch.object(layout, "launch", launch),
        mock.patch.object(layout, "require"),
        mock.patch.object(fused, "enabled", lambda device: True),
        mock.patch.object(fused, "trusted", lambda kernel, device: True),
        mock.patch.dict(engine.STRIP_ELEMENTS, on_gpu[0]),
        mock.patch.dict(classes.FEWEST_ROWS, on_gpu[1]),
        mock.patch.dict(mirroring.KEPT, {"cpu": mirroring.KEPT["cuda"]}),
        recording(set()),
        _Dispatched(counts),
    ):
        yield counts


def drawn(rows: int) -> Seen:
    """Returns random inputs, of which those that a network computes take a gradient."""
    draw = torch.Generator().manual_seed(0)

    def features(width: int) -> Tensor:
        return torch.randn(rows, width, generator=draw).requires_grad_()

    number = torch.arange(rows)
    labels = (torch.rand(rows, CLASSES, generator=draw) > 0.7).float()
    numbers = number % CLASSES
    paths = torch.stack([numbers // 2, numbers, number % 2], 1)
    wrong = torch.nn.functional.one_hot(number * 7 % CLASSES, CLASSES).float()
    return Seen(
        [features(6).detach() for _ in range(2)], [features(DIM) for _ in range(2)],
        features(CLASSES), features(CLASSES), features(DIM).detach(), labels, numbers, wrong, paths,
        number, 0.5,
    )  # fmt: skip


def step(name: str, rows: int) -> Counts:
    """Returns what the second step of a loss asks for; the first makes what is kept."""
    torch.manual_seed(0)
    make, call = CASES[name]
    with mock.patch.multiple(nets, DIM=DIM, ROWS=rows):  # a loss with a memory knows every row
        loss = MAKERS.get(name, make)()
    for _ in range(2):
        seen = drawn(rows)
        leaves = [*seen.z, seen.logits, seen.second, *loss.parameters()]
        with counting() as counts:
            value = call(loss, seen)
            torch.autograd.grad(value, leaves, torch.ones_like(value), allow_unused=True)
        counts.launches["ones_like"] -= 1
    return counts


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--losses", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 1024], help="N")
    parser.add_argument("--list", action="store_true", help="print each operation, too")
    parser.add_argument("--json", type=Path, help="a file for the numbers")
    parser.add_argument("--beside", type=Path, help="numbers from before, printed as BEFORE → NOW")
    options = parser.parse_args()
    before = json.loads(options.beside.read_text()) if options.beside else {}
    numbers: dict[str, list[int]] = {}
    print(HEAD, "|---|---:|---:|---:|---:|", sep="\n")
    for name in options.losses:
        for rows in options.rows:
            counts, key = step(name, rows), f"{name} {rows}"
            numbers[key] = counts.totals()
            cells = [str(x) for x in numbers[key]]
            if key in before:
                cells = [f"{old} → {new}" for old, new in zip(before[key], cells, strict=True)]
            print(f"| {name} | {rows:,} | {' | '.join(cells)} |", flush=True)
            if options.list:
                print(*(f"{n} x {what}" for what, n in counts.launches.most_common()), sep=", ")
                print(dict(counts.up), dict(counts.down))
    if options.json:
        options.json.write_text(json.dumps(numbers, indent=1))


if __name__ == "__main__":
    main()
