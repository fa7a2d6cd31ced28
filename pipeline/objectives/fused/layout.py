"""How tensors come to the kernels: type, padding, and the cut into blocks."""

import contextlib
import os
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from heron.pipeline.objectives.fused.switch import enabled, interpreted, require

Precision = Literal["tf32", "bf16", "ieee"]
PRECISION = "HERON_PRECISION"
WIDEST_SIDE = 128  # columns of labels or pair weights that a tile holds beside its vectors


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


Kind = Literal["sum", "gradient", "label", "pair"]

# For tiles of up to 128, 256, 384 and 512 columns, those of labels and weights included. Chosen for
# Hopper: the widest that spill no registers (255 a thread; a gradient of rows x columns of vectors
# stays in them) and fit 227 KiB of shared memory (the rows once, the looped side once a stage, in
# tf32 of twice the size and once more, to be transposed). Labels with 256 columns of vectors in
# tf32 do spill a little. `pair` has short rows: a class, not the batch.
BLOCKS: dict[tuple[Kind, Precision], tuple[Tiling, ...]] = {
    ("sum", "bf16"): (Tiling(128, 128, 8, 2), Tiling(128, 128, 8, 2), Tiling(128, 64, 8, 2)),
    ("sum", "tf32"): (Tiling(128, 64, 8, 3), Tiling(128, 32, 8, 2), Tiling(64, 32, 4, 2)),
    ("gradient", "bf16"): (Tiling(128, 64, 8, 3), Tiling(128, 64, 8, 2)),
    ("gradient", "tf32"): (Tiling(128, 64, 8, 2), Tiling(128, 32, 8, 2), Tiling(64, 32, 4, 2)),
    ("label", "bf16"): (Tiling(128, 64, 8, 3), Tiling(128, 64, 8, 3), Tiling(128, 64, 8, 2)),
    ("label", "tf32"): (Tiling(128, 32, 8, 2), Tiling(128, 32, 8, 2), Tiling(64, 32, 4, 2)),
    ("pair", "bf16"): (Tiling(64, 64, 4, 2), Tiling(64, 64, 4, 2), Tiling(64, 32, 4, 2)),
    ("pair", "tf32"): (Tiling(64, 32, 4, 2),),
}
EXACT = Tiling(32, 32, 4, 2)  # `ieee` runs on the ordinary units: for comparisons, not for speed
INTERPRETED = Tiling(32, 32, 4, 1)  # small, so that small tests cross the borders of blocks

# Few anchors make few blocks, and a GPU wants several for each of its 132 multiprocessors: then
# the keys are cut as well, and the parts added up in their order. The number is fixed, not the
# device's, so that every GPU gives the same sums.
PROGRAMS = 528
PROGRAMS_INTERPRETED = 4


def blocks(kind: Kind, precision: Precision, width: int) -> Tiling:
    """The tile of a kernel.

    Args:
        kind: what a program keeps: sums alone, a gradient, either for labels, or for pairs.
        precision: of the products.
        width: columns of a row of the tile: of vectors, and of labels or weights beside them.
    """
    if interpreted():
        return INTERPRETED
    if precision == "ieee":
        return EXACT
    choices = BLOCKS[kind, precision]
    return choices[min((width - 1) // 128, len(choices) - 1)]


def splits(n_rows: int, n_columns: int, cut: Tiling) -> tuple[int, int]:
    """In how many parts the looped side is cut, and how many columns make a part."""
    programs = PROGRAMS_INTERPRETED if interpreted() else PROGRAMS
    tiles = -(-n_columns // cut.columns)
    parts = min(max(1, programs // -(-n_rows // cut.rows)), tiles)
    per_part = -(-tiles // parts)
    return -(-tiles // per_part), per_part * cut.columns


def choose(precision: Precision | None, *vectors: Tensor) -> Precision:
    """The precision of the products: as asked, else HERON_PRECISION, else by the vectors' type.

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
    precision = precision or os.environ.get(PRECISION)  # type: ignore[assignment]
    if precision is None:
        return "bf16" if all(x.dtype == torch.bfloat16 for x in vectors) else "tf32"
    if precision not in ("tf32", "bf16", "ieee"):
        raise ValueError(f"precision is {precision!r}; expected tf32, bf16 or ieee")
    return precision


def describe(device: torch.device) -> str:
    """How contrastive terms of float32 vectors are computed on a device, for a run's record."""
    if not enabled(device):
        return "strips, float32"
    return f"fused kernels, {choose(None, torch.empty(0))}"


def check(anchors: Tensor, keys: Tensor) -> None:
    """Stop where the vectors do not fit each other or the fused path does not fit the device.

    Raises:
        ValueError: their widths differ.
        TrainingError: the fused path cannot run on their device.
    """
    if anchors.shape[1] != keys.shape[1]:
        raise ValueError(
            f"anchors have {anchors.shape[1]} columns and keys {keys.shape[1]}; expected as many"
        )
    require(anchors.device, "a fused term was called")


@dataclass(frozen=True)
class Widths:
    """How the columns of vectors are cut.

    Attributes:
        padded: columns with padding: a power of two up to 256, else a multiple of 256.
        chunk: columns that a product takes at a time; all of them up to 256.
        out: columns of a gradient that one program makes; more than 256 need several programs,
            each of which computes the logits again, so vectors wider than 512 are better off in
            the block-wise engine.
    """

    padded: int
    chunk: int
    out: int


def widths(d: int, precision: Precision) -> Widths:
    """The cut for vectors of d columns."""
    if d > 256:
        return Widths(-(-d // 256) * 256, 128 if precision == "bf16" else 64, 256)
    padded = _power(d)
    return Widths(padded, padded, padded)


def operand(x: Tensor, precision: Precision, width: int | None = None) -> Tensor:
    """A matrix as the kernels take it: contiguous, padded with zero columns, in their type.

    tf32 is float32 whose last 13 bits the matrix units ignore: they are rounded here, since being
    cut off would make all sums too small.

    Args:
        x: [rows, columns].
        precision: of the products.
        width: columns with padding; by default the next power of two, at least 16.
    """
    x = pad(x.detach(), (0, (width or _power(x.shape[1])) - x.shape[1]))
    if precision == "bf16":
        x = x.bfloat16()
        # The interpreter would multiply the bits of bfloat16 as if they were integers.
        return x.float().contiguous() if interpreted() else x.contiguous()
    x = x.float().contiguous()
    if precision == "tf32":
        rounded = ((x.view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)
        x = torch.where(x.isfinite(), rounded, x)
    return x


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


def _power(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())
