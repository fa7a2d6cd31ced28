"""What the parts share: a line a result, clocks, memory full of NaN, small sizes on a CPU."""

import contextlib
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DRY = os.environ.get("GPU_DRY") == "1"
DEVICE = "cpu" if DRY else "cuda"
FUSED = (
    "weighted_unsupervised", "weighted_supervised", "nt_xent", "supcon", "h_scl", "cmc", "h_ucl",
    "debiased", "mulco", "single_view_unsupervised", "input_weighted_unsupervised",
)  # fmt: skip
FIVE = FUSED[:5]
BROKEN = 3  # the status of a worker whose device takes no further work


def say(**row: Any) -> None:
    """Writes one result: a line that the parent copies to results.jsonl."""
    os.write(1, ("@ " + json.dumps(row, default=str) + "\n").encode())


def fault(error: BaseException) -> str:
    """The first line of an error, with its type."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


@contextlib.contextmanager
def told(**row: Any) -> Iterator[None]:
    """Says an error instead of raising it; ends the process where the device is broken."""
    try:
        yield
    except Exception as error:
        say(**row, ok=False, error=fault(error))
        if "CUDA error" in str(error) or "illegal" in str(error):
            os._exit(BROKEN)
    finally:
        if DEVICE == "cuda":
            with contextlib.suppress(Exception):
                torch.cuda.empty_cache()


def numbered(cases: Sequence[Any], first: int) -> Iterator[Any]:
    """Yields the cases from `first` on, and says where each begins, for a worker after this one."""
    for number, case in enumerate(cases):
        if number >= first:
            say(what="begin", number=number)
            yield case


def chosen(term: str, dim: int) -> bool:
    """Whether --terms and --dims leave a case in."""
    terms, dims = (os.environ.get(name, "").split() for name in ("GPU_TERMS", "GPU_DIMS"))
    return (not terms or term in terms) and (not dims or str(dim) in dims)


def work_folder() -> Path:
    """Where runs of the product and their data go."""
    return Path(os.environ["GPU_WORK"])


def measured_rates() -> dict[str, float]:
    """The rates of products by precision, and of exponentials: `env` writes them."""
    path = Path(os.environ["GPU_RATES"])
    rates: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
    return rates


def clock(work: Callable[[], object], budget: float = 0.35, most: int = 50) -> float:
    """Median seconds of a piece of work: by CUDA's events, or the clock on a CPU."""
    if DEVICE == "cpu":
        return host_clock(work, 1)
    work()
    torch.cuda.synchronize()
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < 3 or (time.perf_counter() - begin < budget and len(times) < most):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        a.record()
        work()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b) / 1e3)
        if times[-1] > 2:
            break
    return statistics.median(times)


def host_clock(work: Callable[[], object], repeats: int = 4) -> float:
    """Median seconds of work that the host does."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def poison() -> None:
    """Leaves NaN in the memory that is handed out next: what a kernel does not write shows."""
    if DEVICE == "cuda":
        x = [torch.full((1 << k,), math.nan, device="cuda") for k in (27, 22, 17, 12)]
        del x


def sync() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def unit(rows: int, dim: int) -> Tensor:
    """Random vectors of length 1."""
    return torch.nn.functional.normalize(torch.randn(rows, dim, device=DEVICE), dim=1)
