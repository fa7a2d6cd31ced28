"""Time, memory and accuracy of every contrastive term, next to what else could compute it.

    python -m benchmarks.objectives
    python -m benchmarks.objectives --device cuda --json cuda.json
    python -m benchmarks.objectives --terms cmc supcon --sizes 1024 4096 --compiled

A forward and backward of N samples, of two views where a term has views. Everything is measured in
this run, each case in a process of its own; what counts are the ratios.

- `ours`: the terms of `heron.losses`, from vectors in float32.
- `dense`: the formula on whole matrices with autograd, `benchmarks/dense.py`.
- `compiled`: the same under torch.compile: with --compiled, and on a GPU at N = 16,384. It leaves
  much of `weighted_supervised` as it is, where every label's block has a shape of its own.
- `inf-cl`: Inf-CL's InfoNCE (`pip install inf-cl`, arXiv:2410.17243) on a GPU, in tf32, where a
  term has its shape: `cmc` is the same loss, `nt_xent` the same but for the anchor itself.
- `siglip-kernel`: its loss (`pip install siglip-kernel`) on a GPU, in bf16, of as many pairs as
  `nt_xent`, whose neighbour it is and not its equal: a sigmoid of each pair, no sum over keys.
- `products`: of anchors x keys x d, bare, as many as stand in brackets.
- `floor`, on a GPU: those products and the term's exponentials, at the rates of a large square
  product and of exponentials in registers.

MulCo's term has 256 queries against a queue of N. On a GPU products are taken in tf32 (ours in fp16
of as many bits), then in bf16: ours as a run of that `train.precision` does, dense by autocast.
Without --sizes, d = 256 is measured at N = 65,536 alone. Beyond N = 65,536 the anchors are 16,384
samples, the keys those of all: a GPU's share in a large run. Out of memory is a dash with the
gigabytes it would take, by those of fewer pairs.
"""

import argparse
import json
import logging
import math
import os
import resource
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.isolation import OUT_OF_MEMORY, Outcome, alone
from benchmarks.rates import Rates, best, prepare, rates
from benchmarks.table import Case, Line, Table
from benchmarks.workloads import HEROCON, TERMS, Draw, Inputs
from heron.losses.products import RunPrecision, set_run_precision

CPU_SIZES = {True: (1024, 4096, 8192), False: (4096,)}  # of HeroCon's two terms, of the others
CUDA_SIZES = (4096, 16_384, 65_536, 1_048_576)
WIDE_SIZE, COMPILED_SIZE = 65_536, 16_384  # where further widths, and torch.compile, are measured
WHOLE, ROWS = 65_536, 16_384  # samples up to which all are anchors on a GPU, and how many else
CHECKED = 8192  # samples up to which strips in float64 tell the error
TINY = 512  # samples with which kernels are compiled, several at a time, before the clock runs


def plan(arguments: argparse.Namespace) -> list[Line]:
    """The lines of the table."""
    cuda, sizes = arguments.device == "cuda", arguments.sizes
    dims = arguments.dims or ((128, 256) if cuda else (128,))
    lines: list[Line] = []
    for name in arguments.terms:
        term = TERMS[name]
        for dim in dims:
            for size in sizes or (CUDA_SIZES if cuda else CPU_SIZES[name in HEROCON]):
                further = dim != dims[0] and not sizes
                if cuda and (size > term.largest or (further and size != WIDE_SIZE)):
                    continue
                rows = ROWS if cuda and size > WHOLE and term.anchors else None
                for precision in precisions(arguments.device):
                    case = Case(name, "ours", size, dim, precision, arguments.device,
                                arguments.threads, rows)  # fmt: skip
                    lines.append((case, beside(case, arguments)))
    return lines


def precisions(device: str) -> Sequence[str]:
    if device != "cuda":
        return ("float32",)
    precision = os.environ.get("HERON_PRECISION")
    return (precision,) if precision else ("tf32", "bf16")


def beside(case: Case, arguments: argparse.Namespace) -> list[str]:
    """The methods that are to be measured besides ours."""
    cuda, single = case.device == "cuda", case.precision != "bf16"
    most = math.inf if cuda else CPU_SIZES[case.term in HEROCON][-1]
    methods = ["dense"] if case.size <= (arguments.dense_up_to or most) else []
    if methods and (arguments.compiled or (cuda and single and case.size == COMPILED_SIZE)):
        methods.append("compiled")
    if cuda and single and TERMS[case.term].inf_cl is not None:
        methods.append("inf-cl")
    if cuda and not single and case.rows is None and TERMS[case.term].siglip is not None:
        methods.append("siglip-kernel")
    return methods


def forward_backward(case: Case, inputs: Inputs) -> Callable[[], list[Tensor]]:
    """The work of a case: it gives the loss, and the gradient of each vector that asks for one."""
    term = TERMS[case.term]
    peers = {"ours": term.ours, "inf-cl": term.inf_cl, "siglip-kernel": term.siglip}
    loss_of = peers.get(case.method, term.dense)
    assert loss_of is not None
    if case.method == "compiled":
        logging.getLogger("torch._dynamo").setLevel(logging.ERROR)  # graph breaks are no news here
        loss_of = torch.compile(loss_of)
    options = (
        dict(term.options) if case.rows is None else {**term.options, "rows": slice(case.rows)}
    )
    leaves = [x for x in tensors_of(inputs) if x.requires_grad]
    half = case.precision == "bf16" and case.method in ("dense", "compiled")

    def work() -> list[Tensor]:
        with torch.autocast(case.device, torch.bfloat16, enabled=half):
            loss = loss_of(**inputs, **options)
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    return work


def tensors_of(inputs: Inputs) -> list[Tensor]:
    return [x for value in inputs.values() for x in (value if isinstance(value, list) else [value])]


def measure(case: Case) -> Outcome:
    """Measure a case in this process, which should be its own."""
    ours = case.method == "ours"
    prepare(case.device, case.threads, rounds=case.precision == "tf32" and not ours)
    of_run: dict[str, RunPrecision] = {"tf32": "tf32", "bf16": "bf16"}
    if case.precision in of_run:  # else HERON_PRECISION has asked for it
        set_run_precision(of_run[case.precision])
    inputs = TERMS[case.term].draw(Draw(case.size, case.dim, case.device))
    work = forward_backward(case, inputs)
    if case.method == "compiled":
        work()  # takes longer than what is to be timed
    before = peak(case.device, fresh=True)
    seconds = best(work, case.device)
    outcome = Outcome(seconds, peak(case.device) - before)
    if case.device != "cuda":
        return outcome
    outcome = replace(outcome, capacity=torch.cuda.get_device_properties(0).total_memory)
    if case.method != "ours" or case.size > CHECKED:
        return outcome
    loss, *gradients = errors(case, inputs, work())
    return replace(outcome, loss_error=loss, gradient_error=max(gradients))


def errors(case: Case, inputs: Inputs, outputs: Sequence[Tensor]) -> list[float]:
    """Of the loss and each gradient, by strips in float64, relative to their largest element."""
    os.environ["HERON_FUSED"] = "never"
    exact = {
        name: [double(x) for x in value] if isinstance(value, list) else double(value)
        for name, value in inputs.items()
    }
    pairs = zip(outputs, forward_backward(case, exact)(), strict=True)
    return [float((x.double() - y).abs().max() / y.abs().max()) for x, y in pairs]


def double(x: Tensor) -> Tensor:
    return x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x


def peak(device: str, *, fresh: bool = False) -> float:
    """The peak of memory so far, in bytes; a fresh one starts at what is held now."""
    if device != "cuda":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if fresh:
        torch.cuda.reset_peak_memory_stats()
    return torch.cuda.max_memory_allocated()


class Bench:
    """Runs cases, but not those of whole matrices that by a smaller case cannot fit."""

    def __init__(self, run: Callable[[Case], Outcome]) -> None:
        self.run = run
        self.bytes_a_pair: dict[tuple[str, str], float] = {}
        self.capacity = math.inf

    def __call__(self, case: Case) -> Outcome:
        key, pairs = (case.term, case.method), math.prod(case.shape)
        matrices = case.method in ("dense", "compiled")
        need = self.bytes_a_pair.get(key, math.nan) * pairs if matrices else math.nan
        if need > self.capacity:
            return Outcome(bytes=need, missing=OUT_OF_MEMORY)
        if matrices and case.rows is not None:
            return Outcome(missing=f"{case.method} takes whole batches only")
        outcome = self.run(case)
        if outcome.missing and case.method == "ours":
            raise SystemExit(f"{case}: {outcome.missing}")
        if outcome.missing == OUT_OF_MEMORY:
            return replace(outcome, bytes=need)
        if not outcome.missing:
            self.bytes_a_pair[key], self.capacity = outcome.bytes / pairs, outcome.capacity
        return outcome


def report(
    arguments: argparse.Namespace, run: Callable[[Case], Outcome], rate: Callable[..., Any]
) -> dict[str, Any]:
    """Measure and print the table; `run` measures a case, `rate` products and exponentials."""
    lines = plan(arguments)
    shapes: dict[tuple[int, str], list[tuple[int, int]]] = {}
    for case, _ in lines:
        shapes.setdefault((case.dim, case.precision), []).append(case.shape)
    rated = {}
    for (dim, precision), shapes_of_case in shapes.items():
        machine = rate(
            sorted(set(shapes_of_case)), dim, precision, arguments.device, arguments.threads
        )
        if not isinstance(machine, Rates):
            raise SystemExit(f"products in {precision}, d = {dim}: {machine.missing}")
        rated[dim, precision] = machine
        if arguments.device == "cuda":
            print(f"{precision}: {machine.flops / 1e12:.0f} Tflop/s in a square product beside "
                  f"d = {dim}, {machine.exponentials / 1e12:.2f}e12 exponentials/s")  # fmt: skip
    if arguments.device == "cuda":
        tiny = {replace(case, size=TINY, rows=None) for case, _ in lines}
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(run, tiny))
    table, bench = Table(lines), Bench(run)
    print(table.head(), flush=True)
    for case, methods in lines:
        outcomes = {m: bench(replace(case, method=m)) for m in ("ours", *methods)}
        print(table.line(case, outcomes, rated[case.dim, case.precision]), flush=True)
    for note_number, note in enumerate(table.notes, start=1):
        print(f"\n[{note_number}] {note}")
    return {"arguments": vars(arguments), "torch": torch.__version__, "lines": table.numbers}


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--terms", nargs="+", default=list(TERMS), choices=list(TERMS))
    parser.add_argument("--sizes", type=int, nargs="+", help="N, for all terms and widths")
    parser.add_argument("--dims", type=int, nargs="+", help="widths of the vectors")
    parser.add_argument("--dense-up-to", type=int, help="the largest N for dense")
    parser.add_argument("--compiled", action="store_true", help="dense under torch.compile, too")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--limit", type=float, default=180.0, help="seconds a case may take")
    parser.add_argument("--json", help="a file for the numbers")
    return parser.parse_args(words)


def main() -> None:
    arguments = parse()
    name = f"{arguments.threads} threads"
    if arguments.device == "cuda":
        if not torch.cuda.is_available():
            raise SystemExit("--device cuda, but torch finds no GPU; leave it out for the CPU")
        name = torch.cuda.get_device_name()
    print(f"{arguments.device}, {name}, torch {torch.__version__}; c = 40 labels, 100 classes")
    numbers = report(
        arguments,
        lambda case: alone(measure, case, limit_s=arguments.limit),
        lambda *args: alone(rates, *args, limit_s=arguments.limit),
    )
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(numbers, indent=1))


if __name__ == "__main__":
    main()
