"""Small batches on a CPU: each term beside its formula on whole matrices, in turn, one thread.

    python -m benchmarks.small_batches
    python -m benchmarks.small_batches --terms nt_xent --sizes 64 --turns 20

A forward and backward pass of N samples of two views, d = 128, in milliseconds of the processor:
the median of passes that are timed one by one. Ours and `benchmarks.dense` take turns, so that
what else runs on the machine is in both.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.workloads import TERMS, Draw

DIM, PASSES = 128, 20
NAMES = ("nt_xent", "cmc", "supcon", "weighted_unsupervised", "weighted_supervised", "debiased")


def timed(work: Callable[[], object]) -> list[float]:
    """Returns the milliseconds of each pass, after some that do not count."""
    for _ in range(PASSES // 4):
        work()
    taken = []
    for _ in range(PASSES):
        start = time.process_time()
        work()
        taken.append(1e3 * (time.process_time() - start))
    return taken


def compared(name: str, size: int, turns: int) -> tuple[float, float]:
    """Returns the medians of ours and of dense."""
    term = TERMS[name]
    inputs = term.draw(Draw(size, DIM, "cpu"))
    tensors = [x for value in inputs.values() for x in (value if type(value) is list else [value])]
    leaves = [x for x in tensors if x.requires_grad]

    def passes(loss: Callable[..., torch.Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(loss(**inputs, **term.options), leaves)

    taken: tuple[list[float], list[float]] = [], []
    for _ in range(turns):
        for loss, of_loss in zip((term.ours, term.dense), taken, strict=True):
            of_loss.extend(timed(passes(loss)))
    return statistics.median(taken[0]), statistics.median(taken[1])


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--terms", nargs="+", default=NAMES, choices=list(TERMS))
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 128, 256], help="N")
    parser.add_argument("--turns", type=int, default=10, help=f"of {PASSES} passes of each")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| term | N | ours, ms | dense, ms | ratio |", "|---|---:|---:|---:|---:|", sep="\n")
    for name in options.terms:
        for size in options.sizes:
            ours, dense = compared(name, size, options.turns)
            print(
                f"| {name} | {size} | {ours:.2f} | {dense:.2f} | {ours / dense:.2f} |", flush=True
            )


if __name__ == "__main__":
    main()
