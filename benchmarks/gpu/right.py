"""Every fused term against float64: twice for equal bits, over memory full of NaN."""

import multiprocessing
import os
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.common import DEVICE, DRY, FIVE, FUSED, chosen, poison, say, sync, told, unit
from benchmarks.objectives import double, forward_backward
from benchmarks.table import Case
from benchmarks.workloads import TERMS, Draw, Inputs
from heron.losses import fused
from heron.losses.fused import layout

Job = tuple[str, int, int, tuple[str, ...]]  # precision, d, N, terms
AT_ONCE = 9  # processes on one GPU: most of the time they compile and wait
LONGEST = 20_000  # rows beyond which float32 strips stand for float64, which would take too long
BOUNDS = {"bf16": (1e-3, 2e-2), "fp16": (1e-4, 3e-3)}  # of the loss and of a gradient


def jobs() -> list[Job]:
    if DRY:
        return [
            ("bf16", 32, 70, ("nt_xent", "weighted_supervised", "h_scl")),
            ("fp16", 40, 33, ("weighted_unsupervised",)),
        ]
    both = "bf16", "fp16"
    listed: list[Job] = [(p, 256, 8192, FUSED) for p in both]
    listed += [(p, d, 4099, FUSED) for d in (512, 128, 96) for p in both]
    listed += [(p, 768, 4099, FIVE) for p in both]  # by strips
    listed += [("bf16", 256, 65_536 + 40, ("nt_xent",))]
    listed += [("fp16", 256, 33_001, ("weighted_supervised",))]
    kept = [(p, d, n, tuple(t for t in terms if chosen(t, d))) for p, d, n, terms in listed]
    return [job for job in kept if job[3]]


def right(_: int) -> None:
    """All jobs side by side: kernels are compiled on the host's cores."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1 if DRY else AT_ONCE, maxtasksperchild=1) as pool:
        sums = None if DRY else pool.apply_async(million)
        list(pool.imap_unordered(one_job, jobs(), chunksize=1))
        if sums is not None:
            sums.get()


def one_job(job: Job) -> None:
    """Compares the terms of a job, one after the other."""
    precision, dim, size, names = job
    os.environ["HERON_PRECISION"] = precision
    launches: list[str] = []
    real = layout.launch

    def counted(kernel: Any, *args: Any, **kwargs: Any) -> None:
        launches.append(kernel.__name__)
        real(kernel, *args, **kwargs)

    layout.launch = counted
    for name in names:
        row: dict[str, Any] = dict(what="right", term=name, precision=precision, d=dim, n=size)
        with told(**row):
            launches.clear()
            found = compare(name, precision, dim, size)
            say(**row, **found, path="+".join(sorted(set(launches))) or "strips")


def compare(name: str, precision: str, dim: int, size: int) -> dict[str, Any]:
    """Errors of a term's loss and gradients, relative to their length and their largest element."""
    os.environ["HERON_FUSED"] = "auto"
    case = Case(name, "ours", size, dim, precision, DEVICE, 1, None)
    inputs = TERMS[name].draw(Draw(size, dim, DEVICE))
    poison()
    start = time.time()
    found = forward_backward(case, inputs)()
    sync()
    first = time.time() - start
    poison()
    again = forward_backward(case, inputs)()
    same = all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    os.environ["HERON_FUSED"] = "never"
    if size > LONGEST:
        os.environ["HERON_PRECISION"] = "ieee"
    expected = forward_backward(case, reference(inputs, in_float64=size <= LONGEST))()
    os.environ["HERON_PRECISION"] = precision
    lengths, largest = [], []
    for a, b in zip(found, expected, strict=True):
        difference, b = a.double() - b.double(), b.double()
        lengths.append(float(difference.norm() / b.norm()))
        largest.append(float(difference.abs().max() / b.abs().max()))
    loss_bound, bound = BOUNDS[precision]
    ok = same and lengths[0] < loss_bound and max(lengths[1:]) < bound  # false for NaN
    return dict(ok=ok, loss=lengths[0], grad=max(lengths[1:]), grad_max=max(largest[1:]),
                same=same, first_s=round(first, 1),
                against="float64" if size <= LONGEST else "float32")  # fmt: skip


def reference(inputs: Inputs, in_float64: bool) -> Inputs:
    """The same inputs for strips, which count as right."""

    def copy(x: Tensor) -> Tensor:
        if in_float64:
            return double(x)
        return x.detach().clone().requires_grad_(x.requires_grad)

    copies: Mapping[str, Any] = {
        name: [copy(x) for x in value] if isinstance(value, list) else copy(value)
        for name, value in inputs.items()
    }
    return dict(copies)


def million() -> None:
    """Matrix units cut float32 sums off: sums over a million keys against float64."""
    with told(what="million"):
        torch.manual_seed(0)
        n, m, d, labels = 64, 1 << 20, 128, 40
        a, k = unit(n, d) * 2, unit(m, d)
        y, of_keys = ((torch.rand(rows, labels, device=DEVICE) < 0.225).float() for rows in (n, m))
        exact = torch.exp(a.double() @ k.double().T)
        y_, k_ = y.double(), of_keys.double()
        distances = y_ @ (1 - k_).T + (1 - y_) @ k_.T
        by_label, total = (distances * exact) @ (1 - k_), exact.sum(1)
        expected = exact @ k.double()
        precisions: tuple[fused.Precision, ...] = ("bf16", "fp16")
        for p in precisions:
            leaf = a.clone().requires_grad_()
            found = fused.label_sums(leaf, k, y, of_keys, "hamming", p)
            sums = fused.exponential_sums(leaf, k, precision=p)
            (gradient,) = torch.autograd.grad(sums.sum(), leaf)
            say(what="million", precision=p,
                bias_labels=float((found.double() / by_label - 1).mean()),
                bias_sums=float((sums[:, 0].double() / total - 1).mean()),
                grad=float((gradient.double() - expected).norm() / expected.norm()))  # fmt: skip
