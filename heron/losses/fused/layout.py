"""How tensors are laid out for the kernels: dtype, scale, padding, tiles."""

import contextlib
import functools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from heron.losses.fused.switch import interpreted, require

Precision = Literal["fp16", "bf16", "ieee"]
PRECISION = "HERON_PRECISION"
WIDEST = 512  # columns of vectors that a tile holds
WIDEST_SLICE = 256  # columns of a gradient that a program computes beside labels
WIDEST_SIDE = 128  # columns of labels or pair weights that a tile holds beside them
LOG2E = 1.4426950408889634

# Number of keys whose products the matrix units add up. They truncate float32 instead of rounding:
# a sum over a million keys comes out 1e-3 too small, one over a chain of this length 1e-4. The sums
# of chains are then added as usual, with one launch each: in one kernel this would cost registers.
CHAIN = 65_536
TOP = 14  # coefficients of a gradient are scaled below 2^14: fp16 ends at 2^16


@dataclass(frozen=True)
class Tiling:
    """The tile of one program, and Triton's options for it.

    A program of `warps` warps keeps `rows` rows of one side and loops over the other, `columns`
    rows at a time, with `stages` tiles of it in flight.
    """

    rows: int
    columns: int
    warps: int
    stages: int


Kind = Literal[
    "sum", "weighted_sum", "pull", "weighted_pull", "label", "label_gradient", "pair", "label_pair"
]

# For vectors of up to 128, 256 and 512 columns. No tile spills registers (255 a thread; a gradient
# of rows x columns of vectors stays in them) under any Triton that `make kernels` tries. `sum` and
# `pull` are the fastest of those timed on an H200 (docs/results.md); the others were chosen by
# `benchmarks.kernels`: the fewest instructions, or room for two programs on a multiprocessor. The
# weighted ones hold weights of pairs beside the vectors, for which larger tiles have no room.
BLOCKS: dict[Kind, tuple[Tiling, Tiling, Tiling]] = {
    "sum": (Tiling(64, 64, 4, 3), Tiling(128, 128, 8, 2), Tiling(64, 64, 4, 2)),
    "weighted_sum": (Tiling(64, 64, 4, 3), Tiling(64, 64, 4, 2), Tiling(64, 32, 4, 2)),
    "pull": (Tiling(64, 64, 4, 3), Tiling(64, 64, 4, 2), Tiling(64, 64, 8, 2)),
    "weighted_pull": (Tiling(64, 64, 4, 3), Tiling(64, 64, 4, 2), Tiling(64, 32, 8, 2)),
    "label": (Tiling(64, 64, 4, 3), Tiling(64, 64, 4, 2), Tiling(64, 32, 4, 2)),
    "label_gradient": (Tiling(64, 64, 4, 2), Tiling(64, 32, 4, 2), Tiling(64, 32, 8, 2)),
    "pair": (Tiling(64, 64, 4, 3), Tiling(128, 64, 8, 2), Tiling(64, 32, 8, 2)),
    "label_pair": (Tiling(128, 64, 8, 3), Tiling(128, 32, 8, 3), Tiling(128, 16, 8, 2)),
}
TALLEST = 128  # rows or columns of any tile, a power of two
COLLECT = Tiling(16, 1, 4, 1)  # rows whose gradients, one per label, are added up
PREPARE = Tiling(8, 1, 4, 1)  # rows that are normalised or cast
SLOPES = Tiling(4096, 1, 8, 1)  # rows at a time of the one program that scales slopes
EXACT = Tiling(16, 16, 4, 1)  # `ieee` runs on the ordinary units: for comparisons, not for speed
INTERPRETED = Tiling(32, 32, 4, 1)  # small, so that small tests cross the borders of blocks

# Few anchors make few blocks, but a GPU needs several for each of its 132 multiprocessors: then the
# keys are split as well, and the splits' sums added in order. The number of programs is fixed, not
# the device's, so that every GPU computes the same sums.
PROGRAMS = 528
PROGRAMS_INTERPRETED = 4

_preferred: Precision = "fp16"


def set_default_precision(precision: Precision) -> None:
    """Sets the default precision of products."""
    global _preferred
    _preferred = precision


def choose_tile(kind: Kind, precision: Precision, width: int) -> Tiling:
    """Returns the tile of a kernel for vectors of `width` columns."""
    if interpreted():
        return INTERPRETED
    if precision == "ieee":
        return EXACT
    return BLOCKS[kind][(width > 128) + (width > 256)]


def splits(n_rows: int, n_columns: int, tile: Tiling) -> tuple[int, int]:
    """Returns the number of splits of the looped side, and the number of columns of each."""
    programs = PROGRAMS_INTERPRETED if interpreted() else PROGRAMS
    tiles = -(-n_columns // tile.columns)
    count = min(max(1, programs // -(-n_rows // tile.rows)), tiles)
    per_split = -(-tiles // count)
    return -(-tiles // per_split), per_split * tile.columns


def chains(count: int) -> Iterator[tuple[int, int]]:
    """Yields the begin and the end of each chain of `count` keys."""
    for begin in range(0, count, CHAIN):
        yield begin, min(begin + CHAIN, count)


def sum_in_place(tensors: Iterable[Tensor]) -> Tensor:
    """Returns the sum of one or more new tensors, holding two at a time."""
    return functools.reduce(Tensor.add_, tensors)


def choose_precision(precision: str | None, *vectors: Tensor) -> Precision:
    """Returns the precision of products: the given one, HERON_PRECISION, or the default.

    The default is bf16 for vectors in bfloat16, and else that of `set_default_precision`. `tf32` is
    read as `fp16`, which has its 11 bits at the rate of bf16.

    Raises:
        ValueError: an unknown precision.
        TypeError: vectors of a dtype that the fused path does not support.
    """
    for x in vectors:
        if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise TypeError(
                f"the fused path needs float32, bfloat16 or float16, got {x.dtype}; the block-wise "
                "engine takes float64"
            )
    precision = precision or os.environ.get(PRECISION)
    if precision is None:
        is_bf16 = vectors and all(x.dtype == torch.bfloat16 for x in vectors)
        return "bf16" if is_bf16 else _preferred
    if precision == "tf32":
        return "fp16"
    if precision not in ("fp16", "bf16", "ieee"):
        raise ValueError(f"precision must be fp16, bf16 or ieee, got {precision!r}")
    return precision  # type: ignore[return-value]


def check_vectors(anchors: Tensor, keys: Tensor) -> None:
    """Raises ValueError for unequal or too large widths, TrainingError for an unsuitable device."""
    if anchors.shape[1] != keys.shape[1]:
        raise ValueError(
            f"anchors and keys must have the same number of columns, got {anchors.shape[1]} and "
            f"{keys.shape[1]}"
        )
    if keys.shape[1] > WIDEST:
        raise ValueError(
            f"vectors must have at most {WIDEST} columns, got {keys.shape[1]}; the block-wise "
            "engine takes wider ones"
        )
    require(anchors.device, "a fused term was called")


def operands(
    x: Tensor, y: Tensor, precision: Precision, factor: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Casts both sides of products for the kernels, and pads them with zeros to whole tiles.

    fp16 has 11 bits between 2^-14 and 2^16. x is multiplied, and y divided, by a power of two that
    brings their largest elements together: the error of an element is 2^-12 of itself or 2^-25,
    whichever is more. x is also multiplied by `factor`. Returns x, y and the power of two.
    """
    from heron.losses.fused.sum_kernels import cast_kernel

    x, y = x.detach().float(), y.detach().float()
    balanced, dtype = precision == "fp16" and min(x.numel(), y.numel()) > 0, type_of(precision)
    if interpreted() and precision == "bf16":  # which it would multiply as whole numbers
        x, y, factor = (x * factor).bfloat16().float(), y.bfloat16().float(), 1.0
    width, power = whole(x.shape[1]), x.new_empty(())
    a, k = (x.new_empty(len(v) + -len(v) % TALLEST, width, dtype=dtype) for v in (x, y))
    top = [torch.linalg.vector_norm(v, torch.inf) if balanced else power for v in (x, y)]
    x, y, rows = x.contiguous(), y.contiguous(), PREPARE.rows
    programs = [-(-len(v) // rows) for v in (a, k)]
    launch(
        cast_kernel, (max(sum(programs), 1),), PREPARE, a,
        x, y, *top, a, k, power, len(x), len(y), len(k), x.shape[1], y.shape[1],
        programs[0], factor,
        D=width, ROWS=rows, BALANCED=balanced,
    )  # fmt: skip
    return a, k, power


def type_of(precision: Precision) -> torch.dtype:
    """Returns the type of products; the interpreter has bf16's numbers in float32."""
    if precision == "fp16":
        return torch.half
    return torch.float32 if precision == "ieee" or interpreted() else torch.bfloat16


def unit_rows(x: Float[Tensor, "rows dim"], tau: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns rows of unit length, these divided by tau, and the lengths, 1 for rows of zeros."""
    from heron.losses.fused.sum_kernels import unit_kernel

    x = x.contiguous()
    vectors, scaled, length = torch.empty_like(x), torch.empty_like(x), x.new_empty(len(x))
    launch(
        unit_kernel, (-(-len(x) // PREPARE.rows),), PREPARE, x,
        x, vectors, scaled, length, len(x), x.shape[1], tau, D=whole(x.shape[1]), ROWS=PREPARE.rows,
    )  # fmt: skip
    return vectors, scaled, length


def unit_gradient(
    grads: tuple[Tensor | None, Tensor | None], vectors: Tensor, length: Tensor, tau: float
) -> Float[Tensor, "rows dim"]:
    """Returns the gradient of `unit_rows`, of those of its vectors and of these divided by tau."""
    from heron.losses.fused.sum_kernels import unit_gradient_kernel

    result = torch.empty_like(vectors)
    both = [vectors if x is None else x.contiguous() for x in grads]
    launch(
        unit_gradient_kernel, (-(-len(vectors) // PREPARE.rows),), PREPARE, vectors,
        *both, vectors, length, result, len(vectors), vectors.shape[1], tau,
        D=whole(vectors.shape[1]), ROWS=PREPARE.rows,
        OF_VECTORS=grads[0] is not None, OF_SCALED=grads[1] is not None,
    )  # fmt: skip
    return result


def scale_slopes(
    slopes: tuple[Tensor, Tensor], sums: tuple[Tensor, Tensor], power: Tensor, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Scales both sides' slopes, [rows, moments], into fp16's range by their sums.

    Returns them as [heads, rows], and the factor of the gradient that they give.
    """
    from heron.losses.fused.sum_kernels import slope_kernel

    own, of_keys = (x.contiguous() for x in slopes)
    scaled = [x.new_empty(heads, len(x)) for x in (own, of_keys)]
    factor = power.new_empty(())
    launch(
        slope_kernel, (1,), SLOPES, power,
        own, of_keys, *(x.contiguous() for x in sums), *scaled, power, factor, len(own),
        len(of_keys), len(sums[1]), own.shape[1],
        D=heads, ROWS=SLOPES.rows, TOP=TOP,
    )  # fmt: skip
    return scaled[0], scaled[1], factor


def whole(columns: int) -> int:
    """Returns the smallest power of two, 16 or more, that is at least `columns`."""
    return max(16, 1 << (columns - 1).bit_length())


def balance(x: Tensor, y: Tensor) -> Tensor:
    """Returns the power of two that brings the largest elements of power x and y / power together.

    It is 1 where there are none.
    """
    one = x.new_ones(())
    if not x.numel() or not y.numel():
        return one
    ratio = y.abs().amax() / x.abs().amax()
    root = torch.exp2((ratio.log2() / 2).round())
    return torch.where((root > 0) & root.isfinite(), root, one)


def headroom(bound: Tensor) -> Tensor:
    """Returns powers of two that bring numbers of up to `bound` below 2^14, for fp16.

    The error of a coefficient is then 2^-12 of itself or 2^-38 of its bound, whichever is more.
    """
    # `exponent` of numbers that are not finite may be any.
    return torch.exp2(TOP - torch.frexp(bound).exponent.clamp(-112, 128))


def constant(numbers: Tensor) -> Tensor:
    """Marks numbers that are never written again, whose `tile_ranges` are kept."""
    numbers.is_constant = True  # type: ignore[attr-defined]
    return numbers


def tile_ranges(numbers: Tensor, size: int) -> Tensor:
    """Returns the smallest and the largest of each `size` numbers, [2, tiles]."""
    kept = hasattr(numbers, "is_constant")
    return _kept_ranges(numbers, size) if kept else _tile_ranges(numbers, size)


def _tile_ranges(numbers: Tensor, size: int) -> Tensor:
    from heron.losses.fused.tiles import range_kernel

    numbers = numbers.contiguous()
    ranges = numbers.new_empty(2, -(-len(numbers) // size))
    tile = Tiling(size, 1, 1, 1)
    launch(
        range_kernel, (ranges.shape[1],), tile, numbers,
        numbers, ranges, len(numbers), ranges.shape[1], ROWS=size,
    )  # fmt: skip
    return ranges


_kept_ranges = functools.lru_cache(maxsize=64)(_tile_ranges)


def launch(
    kernel: Any, grid: tuple[int, ...], tile: Tiling, tensor: Tensor, *args: Any, **constants: Any
) -> None:
    """Launches a kernel on the device of a tensor, which need not be the current one."""
    device = tensor.device
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        kernel[grid](
            *args,
            **constants,
            num_warps=tile.warps,
            num_stages=tile.stages,
            enable_fp_fusion=True,  # a x + b in one step; Triton 3.9 warns if it is not set
        )
