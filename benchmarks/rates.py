"""The work that every method has to do: bare matrix products, and on a GPU exponentials."""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from heron.base.cores import keep_freed_memory

LOGITS = {"cpu": 1 << 21, "cuda": 1 << 30}  # of a strip: what the cache keeps, what fills a GPU
PAIRS = {"cpu": 1 << 28, "cuda": 1 << 34}  # that are timed; more are reckoned from these
SQUARE, VALUES = 8192, 1 << 22  # for the rates of a GPU
LONG_S, SHORT_S = 20.0, 2.0

Shape = tuple[int, int]


@dataclass(frozen=True)
class Rates:
    """What the machine does at best.

    Attributes:
        products: seconds of one product of anchors x keys x d, by (anchors, keys); the mean of the
            logits and the two gradients, a strip at a time, logits written to memory.
        flops: of a second, in a square product that is too large to wait for memory; of a GPU.
        exponentials: of a second, one upon the other in registers; of a GPU.
    """

    products: dict[Shape, float] = field(default_factory=dict)
    flops: float = math.nan
    exponentials: float = math.nan

    def floor(self, shape: Shape, dim: int, products: int, exponentials: float) -> float:
        """Seconds of a term's products and exponentials, one after the other, at these rates."""
        pairs = shape[0] * shape[1]
        return pairs * (2 * dim * products / self.flops + exponentials / self.exponentials)


def best(work: Callable[[], object], device: str) -> float:
    """Seconds of the fastest run: of three after a warm-up, or of fewer where one takes long.

    Above 2 s one run after the warm-up; on a CPU, above 20 s, the first run is the only one.
    """

    def timed() -> float:
        synchronise(device)
        start = time.perf_counter()
        work()
        synchronise(device)
        return time.perf_counter() - start

    first = timed()
    if device == "cpu" and first > LONG_S:
        return first
    seconds = [timed()]
    while seconds[0] < SHORT_S and len(seconds) < 3:
        seconds.append(timed())
    return min(seconds)


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def rates(shapes: Iterable[Shape], dim: int, precision: str, device: str, threads: int) -> Rates:
    """Measure them all; a GPU's own rates only on a GPU."""
    prepare(device, threads, rounds=precision == "tf32")
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    products = {shape: product(shape, dim, dtype, device) for shape in shapes}
    if device != "cuda":
        return Rates(products)
    from benchmarks.exponential_kernel import STEPS, exponentials

    a = torch.randn(SQUARE, SQUARE, device=device, dtype=dtype)
    x = torch.rand(VALUES, device=device)
    return Rates(
        products,
        flops=2 * SQUARE**3 / best(lambda: a @ a, device),
        exponentials=VALUES * STEPS / best(lambda: exponentials(x), device),
    )


def product(shape: Shape, dim: int, dtype: torch.dtype, device: str) -> float:
    """Seconds of a product of anchors x keys x d; see `Rates`."""
    anchors, keys = shape
    step = min(anchors, max(32, LOGITS[device] // keys))
    timed_anchors = min(anchors, max(step, PAIRS[device] // keys))
    a, k = (torch.randn(rows, dim, device=device, dtype=dtype) for rows in (timed_anchors, keys))
    block, d_keys = torch.empty(step, keys, device=device, dtype=dtype), torch.zeros_like(k)

    def work() -> Tensor:
        for start in range(0, timed_anchors, step):
            strip = a[start : start + step]
            logits = torch.mm(strip, k.T, out=block[: len(strip)])
            torch.mm(logits, k)
            d_keys.addmm_(logits.T, strip)
        return d_keys

    return best(work, device) / 3 * anchors / timed_anchors


def prepare(device: str, threads: int, rounds: bool) -> None:
    """Sets what all methods share: threads, and freed memory kept.

    Freed memory is kept as in a run on CPUs; otherwise page faults take a fifth of L_s's time, and
    less of that of products. With `rounds` a GPU's float32 products are those of tf32, for rates
    and methods to compare with; a run sets no such thing, so neither does what measures ours.
    """
    torch.set_num_threads(threads)
    if device == "cpu":
        keep_freed_memory()
    if device == "cuda":
        torch.set_float32_matmul_precision("high" if rounds else "highest")
