"""A training step of encoders on a CPU, with C's default allocator and with freed memory kept.

    python -m benchmarks.allocator

Forward and backward of each encoder on pictures, one thread, in float32: each setting runs in a
process of its own, by turns; medians of the rounds. Faults are pages that the kernel clears per
step.
"""

import argparse
import resource
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

import torch

from benchmarks.isolation import CONTEXT
from heron.base.cores import keep_freed_memory
from heron.models.encoders import build_encoder
from heron.models.options import Cnn, Convnet, Encoder, Resnet, Vgg

ENCODERS: dict[str, Encoder] = {
    "cnn": Cnn(),
    "convnet": Convnet(),
    "resnet": Resnet(widths=[16, 32, 64], depths=[1, 1, 1]),
    "vgg, a quarter as wide": Vgg(channels=[16, 32, 64, 128, 128], widths=[256], places=1),
}
Measured = tuple[float, float, float]  # seconds and faults of a step, peak in MB


def measure(encoder: Encoder, rows: int, size: int, steps: int, keep_memory: bool) -> Measured:
    """Measures one setting in this process."""
    torch.set_num_threads(1)
    if keep_memory and not keep_freed_memory():
        raise SystemExit("no glibc here, or the environment sets its malloc; expected neither")
    torch.manual_seed(0)
    network, _ = build_encoder(encoder, [size, size, 3], salt=0)
    x, keys = torch.rand(rows, 3, size, size), torch.arange(rows)

    def step() -> None:
        network.zero_grad()
        network(x, keys).square().mean().backward()

    step()
    usage_before, clock = resource.getrusage(resource.RUSAGE_SELF), time.process_time()
    for _ in range(steps):
        step()
    seconds, usage_after = time.process_time() - clock, resource.getrusage(resource.RUSAGE_SELF)
    faults = usage_after.ru_minflt - usage_before.ru_minflt
    return seconds / steps, faults / steps, usage_after.ru_maxrss / 1024


def alone(*args: object) -> Measured:
    """Measures one setting in a process of its own."""
    with ProcessPoolExecutor(1, CONTEXT) as pool:  # `Pool` may wait for ever for one that it ends
        return pool.submit(measure, *args).result()  # type: ignore[arg-type]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--size", type=int, default=64, help="of a picture's side")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--encoders", nargs="+", choices=ENCODERS, default=[*ENCODERS])
    arguments = parser.parse_args(words)
    size = arguments.size
    print(f"torch {torch.__version__}, {arguments.rows} pictures of {size} x {size}\n")
    print(
        "| encoder | s a step, default | kept | ratio | faults, default | kept | peak MB | kept |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name in arguments.encoders:
        case = ENCODERS[name], arguments.rows, arguments.size, arguments.steps
        rounds = [
            [alone(*case, keep_memory) for keep_memory in (False, True)]
            for _ in range(arguments.rounds)
        ]
        (seconds, faults, peak), (kept_seconds, kept_faults, kept_peak) = (
            [statistics.median(values) for values in zip(*setting, strict=True)]
            for setting in zip(*rounds, strict=True)
        )
        ratio = statistics.median(a[0] / b[0] for a, b in rounds)
        print(f"| {name} | {seconds:.3f} | {kept_seconds:.3f} | {ratio:.2f} ", end="")
        print(f"| {faults:,.0f} | {kept_faults:,.0f} ", end="")
        print(f"| {peak:,.0f} | {kept_peak:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
