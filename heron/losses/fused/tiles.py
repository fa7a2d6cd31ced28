"""Building blocks of the kernels: loading and storing rows, products, the GPU's own functions.

Only kernel files import this file, when a fused term first runs: Triton is not installed
everywhere, and decides at its import whether its interpreter runs the kernels. `no_type_check`
keeps type checkers off functions whose text Triton compiles. Logits are in units of log 2, since
log2 e is inside the anchors: their exponential is one instruction.
"""

from typing import no_type_check

import triton
import triton.language as tl

from heron.losses.fused.switch import interpreted

LN2 = tl.constexpr(0.6931471805599453)
# The interpreter has no assembly, and its own logarithm is exact.
INTERPRETED = tl.constexpr(interpreted())


@triton.jit
@no_type_check
def load_tile(pointer, start, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Loads ROWS rows, from `start` on, of a matrix of WIDTH columns, padded to whole tiles."""
    return load_part(pointer, start, 0, ROWS, WIDTH, WIDTH)


@triton.jit
@no_type_check
def load_part(pointer, start, first, ROWS: tl.constexpr, OUT: tl.constexpr, WIDTH: tl.constexpr):
    """Loads OUT columns, from `first` on, of such rows."""
    # The start needs 64 bits: eight million rows of 256 overflow 32. The other offsets are the same
    # for every tile.
    corner = pointer + tl.full((), WIDTH, tl.int64) * start + first
    return tl.load(corner + tl.arange(0, ROWS)[:, None] * WIDTH + tl.arange(0, OUT)[None, :])


@triton.jit
@no_type_check
def gather_rows(pointer, rows, first, OUT: tl.constexpr, WIDTH: tl.constexpr):
    """Loads OUT columns, from `first` on, of the given rows of a matrix of WIDTH columns."""
    offsets = rows.to(tl.int64)[:, None] * WIDTH + tl.arange(0, OUT)[None, :]
    return tl.load(pointer + first + offsets)


@triton.jit
@no_type_check
def store_part(
    pointer, tile, start, first, n, ROWS: tl.constexpr, OUT: tl.constexpr, WIDTH: tl.constexpr
):
    """Stores a tile where `load_part` would load it, without the rows from n on."""
    corner = pointer + tl.full((), WIDTH, tl.int64) * start + first
    rows = tl.arange(0, ROWS)
    offsets = rows[:, None] * WIDTH + tl.arange(0, OUT)[None, :]
    tl.store(corner + offsets, tile, mask=(start + rows < n)[:, None])


@triton.jit
@no_type_check
def product(x, y):
    """Returns ``x @ y.T`` with float32 sums."""
    return tl.dot(x, tl.trans(y), input_precision="ieee")


@triton.jit
@no_type_check
def add_product(total, x, y):
    """Returns ``total + x @ y``, with x rounded to the dtype of y."""
    return tl.dot(x.to(y.dtype), y, total, input_precision="ieee")


@triton.jit
@no_type_check
def log2(x):
    """Returns the binary logarithm of x > 0, to 22 bits."""
    if INTERPRETED:
        y = tl.log2(x)
    else:
        y = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return y


@triton.jit
@no_type_check
def reciprocal(x):
    """Returns 1 / x, to 23 bits."""
    if INTERPRETED:
        y = 1.0 / x
    else:
        y = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return y


@triton.jit
@no_type_check
def touch(x_range, y_range, x_tile, x_tiles, y_tile, y_tiles):
    """Whether the numbers of two tiles have overlapping ranges; see `layout.tile_ranges`."""
    before = tl.load(x_range + x_tiles + x_tile) < tl.load(y_range + y_tile)
    after = tl.load(x_range + x_tile) > tl.load(y_range + y_tiles + y_tile)
    return (before | after) == 0


@triton.jit
@no_type_check
def range_kernel(numbers, ranges, n, tiles, ROWS: tl.constexpr):
    """Finds the least and the largest number of a tile."""
    tile = tl.program_id(0)
    values = tl.load(numbers + tl.minimum(tile * ROWS + tl.arange(0, ROWS), n - 1))
    tl.store(ranges + tile, tl.min(values, 0))
    tl.store(ranges + tiles + tile, tl.max(values, 0))
