"""What every kernel is made of: a tile of rows, its logits, operands at the products' precision.

Imported by kernel files only, which are imported when a fused term first runs: Triton is not
installed everywhere, and decides at its import whether its interpreter runs the kernels.

`no_type_check` keeps type checkers, at rest and under the tests, off functions that are no Python:
Triton compiles their text.
"""

from typing import no_type_check

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)  # exp(x) = 2 ** (x log2 e), the GPU's own instruction


@triton.jit
@no_type_check
def load_rows(pointer, rows, inside, first, STRIDE: tl.constexpr, WIDTH: tl.constexpr):
    """Columns `first` to `first + WIDTH` of some rows of a matrix; rows not `inside` are 0."""
    columns = first + tl.arange(0, WIDTH)
    # In 64 bits: eight million rows of 256 pass what 32 bits can count.
    place = rows.to(tl.int64)[:, None] * STRIDE + columns[None, :]
    return tl.load(pointer + place, mask=inside[:, None], other=0.0)


@triton.jit
@no_type_check
def store_rows(pointer, tile, rows, inside, first, STRIDE: tl.constexpr, WIDTH: tl.constexpr):
    """Write a tile where `load_rows` would read it."""
    columns = first + tl.arange(0, WIDTH)
    place = rows.to(tl.int64)[:, None] * STRIDE + columns[None, :]
    tl.store(pointer + place, tile, mask=inside[:, None])


@triton.jit
@no_type_check
def operand(tile, like, PRECISION: tl.constexpr):
    """A float32 tile as an operand of a product: the type of `like`, rounded to nearest.

    The matrix units cut float32 off at 10 bits of mantissa when they multiply in tf32, which makes
    every sum too small; adding half of the last bit that they keep undoes that.
    """
    if PRECISION == "tf32":
        bits = (tile.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
        tile = bits.to(tl.float32, bitcast=True)
    return tile.to(like.dtype)


@triton.jit
@no_type_check
def product(x, y, PRECISION: tl.constexpr):
    """``x @ y`` with float32 sums."""
    return tl.dot(x, y, input_precision="tf32" if PRECISION == "tf32" else "ieee")


@triton.jit
@no_type_check
def add_product(total, x, y, PRECISION: tl.constexpr):
    """``total + x @ y``, the x rounded to the products' precision."""
    precision: tl.constexpr = "tf32" if PRECISION == "tf32" else "ieee"
    return tl.dot(operand(x, y, PRECISION), y, total, input_precision=precision)


@triton.jit
@no_type_check
def logits(
    x,
    y,
    x_pointer,
    y_pointer,
    x_rows,
    y_rows,
    x_inside,
    y_inside,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The tile ``X @ Y.T``: of the loaded x and y when they are whole, else chunk by chunk."""
    if CHUNK == D:
        tile = product(x, tl.trans(y), PRECISION)
    else:
        tile = tl.zeros((x_rows.shape[0], y_rows.shape[0]), tl.float32)
        for first in range(0, D, CHUNK):
            x_part = load_rows(x_pointer, x_rows, x_inside, first, D, CHUNK)
            y_part = load_rows(y_pointer, y_rows, y_inside, first, D, CHUNK)
            tile += product(x_part, tl.trans(y_part), PRECISION)
    return tile
