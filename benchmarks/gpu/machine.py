"""What is there and what it does at best; collectives over NCCL; exact search by torch."""

import importlib
import json
import os
import pkgutil
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu.common import DEVICE, DRY, clock, fault, say, unit, work_folder

PACKAGES = (
    "transformers", "accelerate", "deepspeed", "pandas", "pydantic", "timm", "faiss-cpu",
    "webdataset", "triton",
)  # fmt: skip


def env(_: int) -> None:
    """Versions, the import of every file, and the ceilings."""
    name = "cpu" if DRY else torch.cuda.get_device_name()
    say(what="versions", python=platform.python_version(), torch=torch.__version__,
        numpy=np.__version__, cuda=torch.version.cuda, device=name)  # fmt: skip
    if not DRY:
        p = torch.cuda.get_device_properties(0)
        say(what="gpu", sms=p.multi_processor_count, memory=p.total_memory,
            l2=getattr(p, "L2_cache_size", None), capability=[p.major, p.minor],
            shared=getattr(p, "shared_memory_per_block_optin", None))  # fmt: skip
        query = "name,driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu"
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv"]
        print(subprocess.run(command, capture_output=True, text=True).stdout)
    say(what="imports", failed=failed_imports())
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "is not there"
    say(what="packages", **found)
    if not DRY:
        rates()


def failed_imports() -> list[str]:
    """The modules of the product that cannot be imported, and why; `serve` is an extra."""
    failed = []
    heron = importlib.import_module("heron")
    for info in pkgutil.walk_packages(heron.__path__, "heron."):
        if info.name.startswith("heron.serve") or info.name.endswith("__main__"):
            continue
        if info.name.endswith("_kernels") or info.name.endswith("fused.tiles"):
            continue  # which need Triton; `right` runs them
        try:
            importlib.import_module(info.name)
        except Exception as error:
            failed.append(f"{info.name}: {fault(error)}")
    return failed


def rates() -> None:
    """The ceilings: bytes, products, exponentials."""
    from benchmarks.exponential_kernel import STEPS, exponentials

    say(what="copy", tb_s=copied() / 1e12)
    made = {}
    for name, dtype, mode in (
        ("bf16", torch.bfloat16, "highest"),
        ("fp16", torch.float16, "highest"),
        ("tf32", torch.float32, "high"),
        ("fp32", torch.float32, "highest"),
    ):
        torch.set_float32_matmul_precision(mode)
        a = torch.randn(8192, 8192, device="cuda", dtype=dtype)
        made[name] = 2 * 8192**3 / clock(lambda a=a: a @ a)  # type: ignore[misc]
        say(what="product", dtype=name, tflops=made[name] / 1e12)
    torch.set_float32_matmul_precision("highest")
    v = torch.rand(1 << 22, device="cuda")
    made["exp"] = v.numel() * STEPS / clock(lambda: exponentials(v))
    say(what="exponentials", per_s=made["exp"])
    for d in (128, 256, 512, 768):  # as strips make them: halves in, float32 out
        a = torch.randn(16384, d, device="cuda", dtype=torch.bfloat16)
        seconds = clock(lambda a=a: torch.mm(a, a.T, out_dtype=torch.float32))  # type: ignore[misc]
        say(what="thin product", d=d, tflops=2 * 16384**2 * d / seconds / 1e12)
    Path(os.environ["GPU_RATES"]).write_text(json.dumps(made))


def copied() -> float:
    """Bytes a second that a copy of 2 GiB reads and writes."""
    x = torch.randn(1 << 29, device="cuda")
    y = torch.empty_like(x)
    return 2 * x.numel() * 4 / clock(lambda: y.copy_(x))


def nccl(_: int) -> None:
    """The product's collectives of one process over NCCL, whose shortcuts for one are not taken."""
    from heron.distributed import collectives as c

    meeting = f"file://{work_folder()}/rendezvous-{time.time()}"
    backend = "gloo" if DRY else "nccl"
    dist.init_process_group(backend, init_method=meeting, rank=0, world_size=1)
    x = torch.randn(1000, 7, device=DEVICE)

    def sums() -> bool:
        y = x.clone()
        work = dist.all_reduce(y, async_op=True)
        assert work is not None
        work.wait()
        return torch.equal(x, y)

    def gathered() -> bool:
        out = torch.empty(x.numel() * 4, dtype=torch.uint8, device=DEVICE)
        c._all_gather(out, x.reshape(-1).view(torch.uint8))
        return torch.equal(out.view(torch.float32).view(1000, 7), x)

    def scattered() -> bool:
        out = torch.empty_like(x)
        c._reduce_scatter(out, x)
        return torch.equal(out, x)

    def objects() -> bool:
        values = [None]
        dist.all_gather_object(values, {"a": 1})
        dist.broadcast_object_list(values, src=0)
        return values == [{"a": 1}]

    calls: dict[str, Callable[[], bool]] = {
        "all_reduce async": sums,
        "all_gather of bytes": gathered,
        "reduce_scatter": scattered,
        "objects": objects,
        "device": lambda: str(c._device()).startswith(DEVICE),
        "store": lambda: c.default_store("x") is not None,
        "barrier": lambda: dist.barrier() is None,
    }
    if not DRY:
        calls["GpuBatchNorm in bf16"] = normed
    for name, call in calls.items():
        try:
            say(what="nccl", call=name, ok=call())
        except Exception as error:
            say(what="nccl", call=name, ok=False, error=fault(error))
    dist.destroy_process_group()


def normed() -> bool:
    """Whether batch norm over processes keeps bfloat16, forward and backward."""
    from heron.distributed.sync_batchnorm import GpuBatchNorm

    norm = GpuBatchNorm(8).to(DEVICE)
    x = torch.randn(64, 8, 4, 4, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        y: Tensor = norm(x)
    y.float().sum().backward()  # type: ignore[no-untyped-call]
    return y.dtype == torch.bfloat16


def search(_: int) -> None:
    """Exact neighbours by torch: what a GPU index would have to beat. FAISS's GPU part, if any."""
    n, d, q, k = (2000, 32, 20, 10) if DRY else (1_000_000, 256, 4096, 100)
    dtype = torch.float32 if DRY else torch.bfloat16
    base, queries = unit(n, d), unit(q, d)
    half, half_queries = base.to(dtype), queries.to(dtype)
    block = 1 << 17

    def exact() -> Tensor:
        scores, rows = half_queries.new_empty(q, 0).float(), torch.empty(q, 0, device=DEVICE)
        rows = rows.long()
        for at in range(0, n, block):
            part = (half_queries @ half[at : at + block].T).float()
            best, row = part.topk(min(k, part.shape[1]), 1)
            scores, place = torch.cat([scores, best], 1).topk(k, 1)
            rows = torch.cat([rows, row + at], 1).gather(1, place)
        return rows

    seconds = clock(exact)
    truth = (queries[:64].double() @ base.double().T).topk(k, 1).indices
    pairs = zip(exact()[: len(truth)].tolist(), truth.tolist(), strict=True)
    recall = statistics.mean(len(set(a) & set(b)) / k for a, b in pairs)
    say(what="search", by="torch", n=n, d=d, queries=q, k=k, ms=seconds * 1e3,
        queries_s=q / seconds, recall=recall)  # fmt: skip
    try:
        import faiss

        say(what="search", by="faiss", version=faiss.__version__, gpus=faiss.get_num_gpus(),
            gpu_build=hasattr(faiss, "StandardGpuResources"))  # fmt: skip
    except Exception as error:
        say(what="search", by="faiss", error=fault(error))
