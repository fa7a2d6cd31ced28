"""A step of encoders on a CPU, as C's allocator is, and with freed memory kept.

    python -m benchmarks.allocator

Forward and backward of each encoder on pictures, one thread, in float32: each setting in a process
of its own, by turns; medians of the rounds. Faults are pages that the kernel cleared in a step.
"""

import argparse
import resource
import statistics
import time
from collections.abc import Sequence

import torch

from benchmarks.isolation import CONTEXT
from heron.pipeline.config.model import Cnn, Convnet, Encoder, Resnet, Vgg
from heron.pipeline.models.allocator import keep_freed_memory
from heron.pipeline.models.encoders import build_encoder

ENCODERS: dict[str, Encoder] = {
    "cnn": Cnn(),
    "convnet": Convnet(),
    "resnet": Resnet(widths=[16, 32, 64], depths=[1, 1, 1]),
    "vgg, a quarter as wide": Vgg(channels=[16, 32, 64, 128, 128], widths=[256], places=1),
}
Measured = tuple[float, float, float]  # seconds and faults of a step, peak in MB


def measure(encoder: Encoder, rows: int, size: int, steps: int, kept: bool) -> Measured:
    """One setting, in this process."""
    torch.set_num_threads(1)
    if kept and not keep_freed_memory():
        raise SystemExit("no glibc here, or the environment sets its malloc; expected neither")
    torch.manual_seed(0)
    network, _ = build_encoder(encoder, [size, size, 3], salt=0)
    x, keys = torch.rand(rows, 3, size, size), torch.arange(rows)

    def step() -> None:
        network.zero_grad()
        network(x, keys).square().mean().backward()

    step()
    begun, clock = resource.getrusage(resource.RUSAGE_SELF), time.process_time()
    for _ in range(steps):
        step()
    seconds, ended = time.process_time() - clock, resource.getrusage(resource.RUSAGE_SELF)
    faults = ended.ru_minflt - begun.ru_minflt
    return seconds / steps, faults / steps, ended.ru_maxrss / 1024


def alone(*args: object) -> Measured:
    """The same, in a process of its own."""
    with CONTEXT.Pool(1) as pool:
        result: Measured = pool.apply(measure, args)
    return result


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--size", type=int, default=64, help="of a picture's side")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--encoders", nargs="+", choices=ENCODERS, default=[*ENCODERS])
    asked = parser.parse_args(words)
    print(f"torch {torch.__version__}, {asked.rows} pictures of {asked.size} x {asked.size}\n")
    print(
        "| encoder | s a step, default | kept | ratio | faults, default | kept | peak MB | kept |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name in asked.encoders:
        given = ENCODERS[name], asked.rows, asked.size, asked.steps
        rounds = [[alone(*given, kept) for kept in (False, True)] for _ in range(asked.rounds)]
        (was, old, held), (now, new, more) = (
            [statistics.median(values) for values in zip(*setting, strict=True)]
            for setting in zip(*rounds, strict=True)
        )
        ratio = statistics.median(a[0] / b[0] for a, b in rounds)
        print(f"| {name} | {was:.3f} | {now:.3f} | {ratio:.2f} | {old:,.0f} | {new:,.0f} ", end="")
        print(f"| {held:,.0f} | {more:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
