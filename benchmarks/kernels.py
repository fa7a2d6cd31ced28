"""Registers, spills, shared memory and instructions of every fused kernel, compiled without a GPU.

    python -m benchmarks.kernels
    python -m benchmarks.kernels --dims 256 --precisions fp16 --json kernels.json

`make kernels` does so under each Triton that Heron's versions of torch bring; the status is 1 where
a kernel spills, misses the matrix units or asks for more shared memory than a multiprocessor has.

Triton compiles for sm_90a with the ptxas of its own wheel, in the tiles that a GPU would be given.
A spill is a stack frame; `wgmma` are the products on Hopper's matrix units, as PTX names them;
instructions are those of the innermost loop in SASS, for each element of a tile of logits.
"""

import argparse
import importlib
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from heron.losses import fused
from heron.losses.fused import layout, switch

LABELS = 40
WITHOUT_PRODUCTS = tuple(
    f".{name}_kernel"
    for name in ("collect", "cast", "slope", "label_slope", "range", "unit", "unit_gradient")
)
PRECISION_OF = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "ieee"}
TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
}


@dataclass(frozen=True)
class Variant:
    """A kernel with what its compilation depends on; `signature` names types and constants."""

    kernel: str
    dim: int
    precision: str
    signature: tuple[tuple[str, Any], ...]
    tile: layout.Tiling

    @property
    def name(self) -> str:
        """The kernel, and the constants that are switched on."""
        signature = dict(self.signature)
        words = [
            n.lower() for n, x in signature.items() if x is True or n == "SECOND" and x != "none"
        ]
        return " ".join([self.kernel.rpartition(".")[2].removesuffix("_kernel"), *words])


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a variant: registers, bytes, instructions of the inner loop."""

    registers: int
    spill: int
    shared: int
    wgmma: int
    loop: int
    kinds: dict[str, int] = field(default_factory=dict)


def workload(dim: int) -> Iterator[Callable[[Any], Any]]:
    """Calls of the fused path as terms make them, forward and backward, of vectors of `dim`."""
    rows = 32
    a, k = (torch.randn(rows, dim).requires_grad_() for _ in range(2))
    tag = torch.arange(rows, dtype=torch.int32)
    y = (torch.rand(rows, LABELS) < 0.3).float()
    weight = torch.rand(rows, LABELS)
    tags: dict[str, Any] = {"anchor_tag": tag, "key_tag": tag}

    def of_sums(**options: Any) -> Callable[[Any], Any]:
        return lambda precision: torch.autograd.grad(
            fused.exponential_sums(a, k, precision=precision, **options).sum(), [a, k]
        )

    yield of_sums(**tags)  # nt_xent, supcon, debiased; each head of L_u
    yield (
        lambda precision: fused.mutual_operands(a, k, precision=precision, **tags).gradient(
            (weight[:, :1], weight[:, :1]),
            bound=weight[0, 0],  # the same, of own rows
        )
    )
    yield lambda precision: fused.mutual_operands(a, k, precision=precision, **tags).gradient(
        (weight[:, :1], weight[:, :1]), (weight[:, :1], weight[:, :1])
    )
    yield lambda precision: fused.unit_gradient((a, a), *fused.unit_rows(a, 0.5)[::2], 0.5)
    yield of_sums(moments=(2.0, 1.0), **tags)  # hard, beta = 1
    yield of_sums(moments=(1.0, 0.0), floor=0.0, **tags)  # hard, by a threshold
    yield of_sums(anchor_weight=weight, key_weight=weight)  # mulco
    yield lambda precision: torch.autograd.grad(
        fused.label_sums(a, k, y, y, "hamming", precision).sum(), [a, k]
    )
    yield lambda precision: fused.pair_losses(
        a, k, torch.zeros(rows, LABELS), y, y, torch.ones(LABELS), tag, "hamming", precision
    )
    yield lambda precision: fused.tagged_pair_losses(
        a, k, torch.zeros(rows), tag % 4, tag % 4, tag, torch.ones(rows), precision
    )


def telling(variant: Variant) -> bool:
    """Returns whether a variant represents others, which take fewer registers and less memory."""
    return variant.name in (
        "sum tags",
        "sum weights",
        "pull of_x of_y tags",
        "pull of_x weights",
        "label_sum twice",
        "label_gradient rows_are_anchors twice",
        "pair hamming rows_are_anchors gradient",
        "collect",
    )


@contextmanager
def recorded() -> Iterator[list[Variant]]:
    """Records launches instead of making them; results are whatever was in memory."""
    launched_variants: list[Variant] = []

    def launch(
        kernel: Any, grid: Any, cut: layout.Tiling, tensor: Tensor, *args: Any, **constants: Any
    ) -> None:
        arguments = dict(zip(kernel.arg_names, args, strict=False))
        types: dict[str, str | None] = {}
        for name, value in arguments.items():
            if isinstance(value, Tensor):
                types[name] = TYPES[value.dtype]
            else:
                types[name] = (
                    None if value is None else "fp32" if isinstance(value, float) else "i32"
                )
        kernel_name = f"{kernel.fn.__module__}.{kernel.__name__}"
        dim, precision = constants.get("D", 0), PRECISION_OF.get(tensor.dtype, "ieee")
        variant = Variant(kernel_name, dim, precision, (*types.items(), *constants.items()), cut)
        if variant not in launched_variants:
            launched_variants.append(variant)

    with (
        mock.patch.object(layout, "launch", launch),
        mock.patch.object(layout, "require"),
    ):
        yield launched_variants


def variants(dims: Sequence[int], precisions: Sequence[str]) -> list[Variant]:
    """Returns the variants that the workload launches."""
    with recorded() as launched:
        for dim in dims:
            for precision in precisions:
                for call in workload(dim):
                    call(precision)
    return launched


def compiled(variant: Variant) -> Compiled:
    """Compiles a variant for sm_90a, and reads the results."""
    triton = importlib.import_module("triton")
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    module, _, name = variant.kernel.rpartition(".")
    kernel = getattr(importlib.import_module(module), name)
    signature, names = dict(variant.signature), kernel.arg_names
    types = {n: x for n, x in signature.items() if isinstance(x, str) and n.islower()}
    fixed = {n: x for n, x in signature.items() if n not in types}
    source = importlib.import_module("triton.compiler").ASTSource(
        kernel,
        {n: types.get(n, "constexpr") for n in names},
        {(names.index(n),): x for n, x in fixed.items()},
        {(names.index(n),): [["tt.divisibility", 16]] for n, x in types.items() if x[0] == "*"},
    )
    options = {"num_warps": variant.tile.warps, "num_stages": variant.tile.stages}
    result = triton.compile(source, target=target, options=options | {"enable_fp_fusion": True})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(result.asm["cubin"])
        file.flush()
        usage = dumped("--dump-resource-usage", file.name)
        loop = inner_loop(dumped("-sass", file.name))
    usage_numbers = {name: int(number) for name, number in re.findall(r"(REG|STACK):(\d+)", usage)}
    kinds: dict[str, int] = {}
    for word in loop:
        kinds[word] = kinds.get(word, 0) + 1
    return Compiled(
        registers=usage_numbers["REG"],
        spill=usage_numbers["STACK"],
        shared=result.metadata.shared,
        wgmma=result.asm["ptx"].count("wgmma.mma_async"),
        loop=len(loop),
        kinds=kinds,
    )


def dumped(*words: str) -> str:
    """What the cuobjdump of Triton's wheel prints."""
    triton = importlib.import_module("triton")
    tool = Path(str(triton.__file__)).parent / "backends/nvidia/bin/cuobjdump"
    return subprocess.run([tool, *words], check=True, capture_output=True, text=True).stdout


def inner_loop(sass: str) -> list[str]:
    """The operations of the loop with most instructions among those that hold no other."""
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/ +(?:@!?U?P\w+ )?([A-Z][\w.]*)([^;]*);", sass)
    offsets = [int(offset, 16) for offset, _, _ in lines]
    spans = []
    for offset, operation, operands in lines:
        target = re.search(r"0x([0-9a-f]+)\s*$", operands)
        if operation.startswith("BRA") and target and int(target[1], 16) < int(offset, 16):
            spans.append((int(target[1], 16), int(offset, 16)))
    inner = [s for s in spans if not any(t != s and s[0] <= t[0] and t[1] <= s[1] for t in spans)]
    if not inner:
        return []
    first, last = max(inner, key=lambda s: s[1] - s[0])
    operations, resume = [], first
    for offset, (_, operation, operands) in zip(offsets, lines, strict=True):
        if not resume <= offset <= last:
            continue
        operations.append(operation if operation.startswith("MUFU") else operation.split(".")[0])
        target = re.search(r"0x([0-9a-f]+)\s*$", operands)
        if operation.startswith("BRA") and target:  # an ordinary tile takes it: the mask is skipped
            resume = max(resume, int(target[1], 16))
    return operations


def problem(variant: Variant, result: Compiled) -> str:
    """What would make a compiled kernel slow, or keep it from starting; empty where nothing."""
    if result.spill:
        return f"spills {result.spill} B a thread"
    if result.shared > switch.SHARED_KIB << 10:
        return f"takes {result.shared >> 10} KiB of shared memory; there are {switch.SHARED_KIB}"
    if not result.wgmma and not variant.kernel.endswith(WITHOUT_PRODUCTS):
        return "has products that miss the matrix units"
    return ""


def line(variant: Variant, result: Compiled) -> str:
    """A row of the table."""
    tile = variant.tile
    elements = tile.rows * tile.columns / (32 * tile.warps)  # elements of a thread's part of a tile
    cells = [variant.name, str(variant.dim), variant.precision]
    cells.append(f"{tile.rows} x {tile.columns}, {tile.warps}, {tile.stages}")
    cells += [str(result.registers), str(result.spill), f"{result.shared / 1024:.1f}"]
    cells += [str(result.wgmma), f"{result.loop / elements:.1f}"]
    return f"| {' | '.join(cells)} |"


HEAD = (
    "| kernel | d | products | tile, warps, stages | registers | spill B | shared KiB | wgmma | "
    "instructions |"
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dims", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--precisions", nargs="+", default=["fp16", "bf16"])
    parser.add_argument("--kernels", default="", help="only those whose name contains this")
    parser.add_argument("--kinds", action="store_true", help="print the inner loop's operations")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", help="a file for the numbers")
    arguments = parser.parse_args()
    print(f"{HEAD}\n{'|---' * 9}|", flush=True)
    selected = variants(arguments.dims, arguments.precisions)
    selected = [variant for variant in selected if arguments.kernels in variant.name]
    numbers, problems = [], []
    with ProcessPoolExecutor(arguments.processes) as pool:
        for variant, result in zip(selected, pool.map(compiled, selected), strict=True):
            print(line(variant, result), flush=True)
            if arguments.kinds:
                print(dict(sorted(result.kinds.items(), key=lambda pair: -pair[1])))
            if text := problem(variant, result):
                problems.append(f"{variant.name}, d = {variant.dim}, {variant.precision}: {text}")
            numbers.append({"variant": asdict(variant), "compiled": asdict(result)})
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(numbers, indent=1))
    triton = importlib.import_module("triton")
    print(f"Triton {triton.__version__}: {len(numbers)} kernels, {len(problems)} with a problem")
    if problems:
        raise SystemExit("\n".join(problems))


if __name__ == "__main__":
    main()
