"""Time and memory of the contrastive terms: ours, dense autograd, and the products any need.

    python -m benchmarks.objectives                      # N = 1,024 ... 16,384 on the CPU
    python -m benchmarks.objectives --device cuda --sizes 4096 65536

Every measurement is a process of its own (peak memory is then its own, too), forward and backward,
the best of a few repeats after a warm-up. What counts are the ratios within one run:

- `products`: the three N x N x d products of one head (logits, and the gradients of anchors and
  keys) for L_s; six (2N) x (2N) x d products for L_u, whose anchors and keys are both views.
- `dense`: the formula with whole N x N matrices and autograd.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from pipeline.objectives.engine import unit
from pipeline.objectives.supervised import weighted_supervised
from pipeline.objectives.unsupervised import weighted_unsupervised

LABELS, DIM, TAU, DENSITY = 40, 128, 0.5, 0.225  # CelebA: 9 of 40 attributes hold on average
METHODS = ("ours", "dense", "products")
TERMS = ("weighted_supervised", "weighted_unsupervised")


def dense_weighted_supervised(s: Tensor, y: Tensor) -> Tensor:
    """Eq. 7 on whole matrices, label by label."""
    f = torch.exp(unit(s) @ unit(s).T / TAU)
    dist = y @ (1 - y).T + (1 - y) @ y.T
    attract, repel = (1 - dist / LABELS) * f, dist * f
    others = ~torch.eye(len(y), dtype=torch.bool, device=y.device)
    total = s.new_zeros(())
    for a in range(LABELS):
        positive = y[:, a] == 1
        mine = attract[positive][:, positive]
        inside = mine + repel[positive][:, ~positive].sum(1, keepdim=True)
        pairs = others[positive][:, positive]
        total = total + (inside.log() - mine.log())[pairs].mean()
    return total / LABELS


def dense_weighted_unsupervised(z: list[Tensor], h: list[Tensor]) -> Tensor:
    """Eq. 5 on whole matrices."""
    batch = len(z[0])
    vectors, weights = unit(torch.cat(z)), unit(torch.cat(h))
    f = torch.exp(vectors @ vectors.T / TAU)
    cross = torch.exp(1 - vectors @ weights.T)
    own = torch.arange(2 * batch, device=vectors.device) % batch
    negative = ((cross + cross.T) / 2 * f * (own[:, None] != own)).sum(1)
    positive = torch.exp((vectors * vectors.roll(batch, 0)).sum(1) / TAU)
    return ((positive + negative).log() - positive.log()).mean()


def products(size: int, count: int, device: str) -> Callable[[], object]:
    """`count` products of size x size x DIM, a strip at a time so that memory is no matter."""
    a = torch.randn(size, DIM, device=device)
    strip = min(size, 1024)
    block = torch.empty(strip, size, device=device)

    def work() -> None:
        for start in range(0, size, strip):
            rows = a[start : start + strip]
            for _ in range(count // 3):
                torch.mm(rows, a.T, out=block[: len(rows)])
                _ = block[: len(rows)] @ a
                _ = block[: len(rows)].T @ rows

    return work


def workload(term: str, method: str, size: int, device: str) -> Callable[[], object]:
    """One forward and backward."""
    torch.manual_seed(0)
    if method == "products":
        supervised = term == "weighted_supervised"
        return products(size if supervised else 2 * size, 3 if supervised else 6, device)
    if term == "weighted_supervised":
        s = torch.randn(size, DIM, device=device, requires_grad=True)
        y = (torch.rand(size, LABELS, device=device) < DENSITY).float()
        if method == "dense":
            return lambda: dense_weighted_supervised(s, y).backward()  # type: ignore[no-untyped-call]
        return lambda: weighted_supervised(s, y, tau=TAU).backward()  # type: ignore[no-untyped-call]
    z = [torch.randn(size, DIM, device=device, requires_grad=True) for _ in range(2)]
    h = [torch.rand(size, DIM, device=device, requires_grad=True) for _ in range(2)]
    if method == "dense":
        return lambda: dense_weighted_unsupervised(z, h).backward()  # type: ignore[no-untyped-call]
    return lambda: weighted_unsupervised(z, h, tau=TAU).backward()  # type: ignore[no-untyped-call]


def resident(device: str) -> int:
    """The peak of memory so far, in bytes."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(term: str, method: str, size: int, device: str, threads: int) -> None:
    """Time one case and print it as JSON."""
    torch.set_num_threads(threads)
    work = workload(term, method, size, device)
    before = resident(device)
    seconds = []
    for _ in range(4 if size <= 4096 else 2):
        start = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    print(json.dumps({"seconds": min(seconds), "bytes": resident(device) - before}))


def run(term: str, method: str, size: int, arguments: argparse.Namespace) -> dict[str, float]:
    """One case in a process of its own; NaN where it does not fit in memory."""
    command = [sys.executable, "-m", "benchmarks.objectives", "--case", term, method, str(size)]
    command += ["--device", arguments.device, "--threads", str(arguments.threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == -9 or "out of memory" in done.stderr:
        return {"seconds": float("nan"), "bytes": float("nan")}
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--dense-up-to", type=int, default=8192, help="largest N for dense")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        term, method, size = arguments.case
        measure(term, method, int(size), arguments.device, arguments.threads)
        return
    print(f"{arguments.device}, {arguments.threads} threads, c = {LABELS}, d = {DIM}, float32")
    print(
        "| term | N | ours s | dense s | products s | dense / ours | ours / products |"
        " ours MB | dense MB |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for term in TERMS:
        for size in arguments.sizes:
            skip = {"seconds": float("nan"), "bytes": float("nan")}
            ours, dense, bare = (
                skip
                if method == "dense" and size > arguments.dense_up_to
                else run(term, method, size, arguments)
                for method in METHODS
            )
            print(
                f"| {term} | {size:,} | {ours['seconds']:.3f} | {dense['seconds']:.3f} "
                f"| {bare['seconds']:.3f} | {dense['seconds'] / ours['seconds']:.1f} "
                f"| {ours['seconds'] / bare['seconds']:.1f} | {ours['bytes'] / 1e6:.0f} "
                f"| {dense['bytes'] / 1e6:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
