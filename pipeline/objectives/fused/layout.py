"""How tensors come to the kernels: type, scale, padding, and the cut into blocks."""

import contextlib
import functools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from heron.pipeline.objectives.fused.switch import enabled, interpreted, require

Precision = Literal["fp16", "bf16", "ieee"]
PRECISION = "HERON_PRECISION"
WIDEST = 512  # columns of vectors that a tile holds
WIDEST_PART = 256  # columns of a gradient that a program makes beside labels
WIDEST_SIDE = 128  # columns of labels or pair weights that it holds beside them
LOG2E = 1.4426950408889634

# Keys whose products the matrix units add up by themselves. They cut float32 off, others round it,
# so that a sum over a million keys comes out 1e-3 too small, one over as many as these 1e-4. The
# sums of chains are added up as usual, a launch each: within a kernel that would cost registers.
CHAIN = 65_536
TOP = 14  # coefficients of a gradient are scaled below 2^14: fp16 ends at 2^16


@dataclass(frozen=True)
class Tiling:
    """The tile of one program, and what Triton makes of it.

    Attributes:
        rows: of the side that a program keeps.
        columns: of the side that it loops over, at a time.
        warps: of 32 threads, that share a program.
        stages: tiles of the looped side in flight.
    """

    rows: int
    columns: int
    warps: int
    stages: int


Kind = Literal["sum", "pull", "label", "label_gradient", "pair", "label_pair"]

# For vectors of up to 128, 256 and 512 columns. Chosen for Hopper by `benchmarks.kernels`: no tile
# spills registers (255 a thread; a gradient of rows x columns of vectors stays in them), and most
# leave a multiprocessor's 227 KiB to two programs. `pair` has short rows: a class, not the batch.
BLOCKS: dict[Kind, tuple[Tiling, Tiling, Tiling]] = {
    "sum": (Tiling(64, 64, 4, 3), Tiling(64, 64, 4, 2), Tiling(64, 32, 4, 2)),
    "pull": (Tiling(64, 64, 4, 3), Tiling(64, 64, 4, 2), Tiling(64, 32, 8, 2)),
    "label": (Tiling(64, 64, 4, 3), Tiling(64, 64, 4, 2), Tiling(64, 32, 4, 2)),
    "label_gradient": (Tiling(64, 64, 4, 2), Tiling(64, 32, 4, 2), Tiling(64, 32, 8, 2)),
    "pair": (Tiling(64, 64, 4, 3), Tiling(64, 64, 4, 2), Tiling(64, 32, 8, 2)),
    "label_pair": (Tiling(64, 64, 4, 3), Tiling(64, 32, 4, 2), Tiling(64, 32, 8, 2)),
}
TALLEST = 128  # rows or columns of any tile, a power of two
COLLECT = Tiling(16, 1, 4, 1)  # rows whose gradients, one a label, are added up
EXACT = Tiling(16, 16, 4, 1)  # `ieee` runs on the ordinary units: for comparisons, not for speed
INTERPRETED = Tiling(32, 32, 4, 1)  # small, so that small tests cross the borders of blocks

# Few anchors make few blocks, and a GPU wants several for each of its 132 multiprocessors: then
# the keys are cut as well, and the parts added up in their order. The number is fixed, not the
# device's, so that every GPU gives the same sums.
PROGRAMS = 528
PROGRAMS_INTERPRETED = 4

_preferred: Precision = "fp16"


def prefer(precision: Precision) -> None:
    """Products are taken in this precision from now on, where nothing else is asked for."""
    global _preferred
    _preferred = precision


def blocks(kind: Kind, precision: Precision, width: int) -> Tiling:
    """The tile of a kernel.

    Args:
        kind: what a program keeps: sums, a gradient, either for labels, or pairs without and with.
        precision: of the products.
        width: columns of the vectors.
    """
    if interpreted():
        return INTERPRETED
    if precision == "ieee":
        return EXACT
    return BLOCKS[kind][(width > 128) + (width > 256)]


def splits(n_rows: int, n_columns: int, cut: Tiling) -> tuple[int, int]:
    """In how many parts the looped side is cut, and how many columns make a part."""
    programs = PROGRAMS_INTERPRETED if interpreted() else PROGRAMS
    tiles = -(-n_columns // cut.columns)
    parts = min(max(1, programs // -(-n_rows // cut.rows)), tiles)
    per_part = -(-tiles // parts)
    return -(-tiles // per_part), per_part * cut.columns


def chains(count: int) -> Iterator[tuple[int, int]]:
    """The begin and the end of each chain of so many keys."""
    for begin in range(0, count, CHAIN):
        yield begin, min(begin + CHAIN, count)


def total(parts: Iterable[Tensor]) -> Tensor:
    """The sum of one or more new tensors, of which two are held at a time."""
    return functools.reduce(Tensor.add_, parts)


def choose(precision: str | None, *vectors: Tensor) -> Precision:
    """The precision of the products: as asked, else HERON_PRECISION, else by the vectors' type.

    `fp16` has the 11 bits of `tf32`, which is another word for it here, at the rate of bf16.

    Raises:
        ValueError: an unknown precision.
        TypeError: vectors of a type that the fused path does not take.
    """
    for x in vectors:
        if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise TypeError(
                f"the fused path has vectors of {x.dtype}; expected float32, bfloat16 or float16; "
                "the block-wise engine takes float64"
            )
    precision = precision or os.environ.get(PRECISION)
    if precision is None:
        return "bf16" if all(x.dtype == torch.bfloat16 for x in vectors) else _preferred
    if precision == "tf32":
        return "fp16"
    if precision not in ("fp16", "bf16", "ieee"):
        raise ValueError(f"precision is {precision!r}; expected fp16, bf16 or ieee")
    return precision  # type: ignore[return-value]


def describe(device: torch.device) -> str:
    """How contrastive terms of float32 vectors are computed on a device, for a run's record."""
    if not enabled(device):
        return "strips, float32"
    return f"fused kernels, {choose(None, torch.empty(0))}"


def check(anchors: Tensor, keys: Tensor) -> None:
    """Stop where the vectors do not fit each other or the fused path does not fit the device.

    Raises:
        ValueError: their widths differ, or are too large.
        TrainingError: the fused path cannot run on their device.
    """
    if anchors.shape[1] != keys.shape[1]:
        raise ValueError(
            f"anchors have {anchors.shape[1]} columns and keys {keys.shape[1]}; expected as many"
        )
    if keys.shape[1] > WIDEST:
        raise ValueError(
            f"vectors have {keys.shape[1]} columns; expected at most {WIDEST}: the block-wise "
            "engine takes wider ones"
        )
    require(anchors.device, "a fused term was called")


def operands(
    x: Tensor, y: Tensor, precision: Precision, factor: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Both sides of products as the kernels take them: padded with zeros to fill whole tiles.

    fp16 has 11 bits between 2^-14 and 2^16. x is multiplied and y divided by a power of two that
    gives both the same largest element, so that products stay what they are: an element is off by
    2^-12 of itself or 2^-25, whichever is more.

    Args:
        x: [rows, columns].
        y: [rows, columns].
        precision: of the products.
        factor: by which x is multiplied beside that.

    Returns:
        x, y, and the power of two that is in x.
    """
    x, y = x.detach().float() * factor, y.detach().float()
    power = x.new_ones(())
    if precision == "fp16" and x.numel() and y.numel():
        ratio = y.abs().amax() / x.abs().amax()
        found = torch.exp2((ratio.log2() / 2).round())
        power = torch.where((found > 0) & found.isfinite(), found, power)
        x, y = x * power, y / power
    return narrowed(x, precision), narrowed(y, precision), power


def narrowed(x: Tensor, precision: Precision) -> Tensor:
    """A float32 matrix in the type of the products, with zeros in the rest of its last tile."""
    columns = max(16, 1 << (x.shape[1] - 1).bit_length())
    if precision == "fp16":
        x = x.half()
    elif precision == "bf16":
        # The interpreter would multiply the bits of bfloat16 as if they were integers.
        x = x.bfloat16().float() if interpreted() else x.bfloat16()
    return pad(x, (0, columns - x.shape[1], 0, -len(x) % TALLEST)).contiguous()


def headroom(bound: Tensor) -> Tensor:
    """Powers of two that bring numbers of up to `bound` below 2^14, into the range of fp16.

    A coefficient of a gradient is then off by 2^-12 of itself or 2^-38 of its bound, whichever is
    more.
    """
    found = torch.exp2(TOP - bound.log2().ceil())
    return torch.where((found > 0) & found.isfinite(), found, 1.0)


def ranges(numbers: Tensor, size: int) -> Tensor:
    """The least and the largest of each `size` numbers, [2, tiles]."""
    filled = pad(numbers, (0, -len(numbers) % size))
    if len(numbers):
        filled[len(numbers) :] = numbers[-1]
    least, most = filled.view(-1, size).aminmax(dim=1)
    return torch.stack([least, most])


def launch(
    kernel: Any, grid: tuple[int, ...], cut: Tiling, tensor: Tensor, *args: Any, **constants: Any
) -> None:
    """Run a kernel on the device of a tensor, which need not be the current one."""
    device = tensor.device
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        kernel[grid](
            *args,
            **constants,
            num_warps=cut.warps,
            num_stages=cut.stages,
            enable_fp_fusion=True,  # a x + b in one step; Triton 3.9 warns where it is not said
        )
