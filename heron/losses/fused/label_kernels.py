"""Kernels: sums over each label's negatives, weighted by distances of label vectors (D of L_s).

The labels of an anchor are stored as y_i with -|y_i|, those of a key as v_k = 1 - y_k with |y_k|:
then one product suffices, since hamming(y_i, y_k) = |y_k| - |y_i| + 2 y_i.v_k, whichever of the two
is on the rows of a tile. Labels are 0 or 1, exact in bf16, which has the range of float32. Where 8
bits are too few, exponentials and gradients of sums are split into two bf16 numbers.
"""

from typing import no_type_check

import triton
import triton.language as tl

from heron.losses.fused.sum_kernels import places, power_of_two
from heron.losses.fused.tiles import add_product, load_part, load_tile, product, store_part


@triton.jit
@no_type_check
def distances(x_label, y_label, x_size, y_size, INDICATOR: tl.constexpr):
    """Returns dist(y_i, y_k) of a tile, exact in every precision since labels are 0 or 1."""
    hamming = x_size[:, None] + y_size[None, :] + 2 * product(x_label, y_label)
    if INDICATOR:
        hamming = tl.where(hamming > 0.5, 1.0, 0.0)
    return hamming


@triton.jit
@no_type_check
def label_sum_kernel(
    anchors, keys,
    anchor_label, key_label,  # [n, WIDTH]: y, and [m, WIDTH]: 1 - y
    anchor_size, key_size,  # [n]: -|y|, and [m]: |y|
    sums,  # [splits, n, WIDTH]
    n,
    begin, end,  # the keys of this launch
    per_split,
    D: tl.constexpr, WIDTH: tl.constexpr, INDICATOR: tl.constexpr, TWICE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Computes the sums of a block of anchors over a range of keys."""
    first, split = tl.program_id(0) * ROWS, tl.program_id(1)
    rows = first + tl.arange(0, ROWS)
    x = load_tile(anchors, first, ROWS, D)
    label = load_tile(anchor_label, first, ROWS, WIDTH)
    size = tl.load(anchor_size + rows, mask=rows < n, other=0.0)
    start = begin + split * per_split
    stop = tl.minimum(start + per_split, end)
    offset = split.to(tl.int64) * n * WIDTH
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for column in range(start, stop, COLUMNS):
        columns = column + tl.arange(0, COLUMNS)
        y = load_tile(keys, column, COLUMNS, D)
        y_label = load_tile(key_label, column, COLUMNS, WIDTH)
        y_size = tl.load(key_size + columns, mask=columns < stop, other=0.0)
        repulsion = tl.exp2(product(x, y)) * distances(label, y_label, size, y_size, INDICATOR)
        # Keys past the end need no mask: their labels, which multiply this, are zeros.
        if TWICE:
            high = (repulsion.to(tl.int32, bitcast=True) & -0x10000).to(tl.float32, bitcast=True)
            total = add_product(total, high, y_label)
            repulsion -= high
        total = add_product(total, repulsion, y_label)
    store_part(sums + offset, total, first, 0, n, ROWS, WIDTH, WIDTH)


@triton.jit
@no_type_check
def label_gradient_kernel(
    x_vectors, y_vectors, x_label, y_label, x_size, y_size,
    anchor_grad,  # [anchors, WIDTH]: the gradient of the sums, in the labels' type
    anchor_rest,  # [anchors, WIDTH]: what that type rounds off
    gradient,  # [splits, n, D]
    n,  # rows of x
    begin, end,  # the rows of y of this launch
    per_split,
    D: tl.constexpr, OUT: tl.constexpr, WIDTH: tl.constexpr, INDICATOR: tl.constexpr,
    ROWS_ARE_ANCHORS: tl.constexpr, TWICE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Computes the gradient of a block of x by a loop over y: anchors over keys, or the reverse."""
    first, split = tl.program_id(0) * ROWS, tl.program_id(1)
    first_out = tl.program_id(2) * OUT  # first column of the gradient: 512 do not fit the registers
    rows = first + tl.arange(0, ROWS)
    total = tl.zeros((ROWS, OUT), tl.float32)
    x = load_tile(x_vectors, first, ROWS, D)
    label = load_tile(x_label, first, ROWS, WIDTH)
    size = tl.load(x_size + rows, mask=rows < n, other=0.0)
    # dist exp is multiplied by sum_a dD_ia (1 - y_ka): a product of dD and the key's labels.
    x_factor, x_rest = label, label
    if ROWS_ARE_ANCHORS:
        x_factor = load_tile(anchor_grad, first, ROWS, WIDTH)
        if TWICE:
            x_rest = load_tile(anchor_rest, first, ROWS, WIDTH)
    start = begin + split * per_split
    stop = tl.minimum(start + per_split, end)
    offset = split.to(tl.int64) * n * D
    for column in range(start, stop, COLUMNS):
        columns = column + tl.arange(0, COLUMNS)
        y = load_tile(y_vectors, column, COLUMNS, D)
        label_y = load_tile(y_label, column, COLUMNS, WIDTH)
        size_y = tl.load(y_size + columns, mask=columns < stop, other=0.0)
        y_factor, y_rest = label_y, label_y
        if not ROWS_ARE_ANCHORS:
            y_factor = load_tile(anchor_grad, column, COLUMNS, WIDTH)
            if TWICE:
                y_rest = load_tile(anchor_rest, column, COLUMNS, WIDTH)
        change = tl.exp2(product(x, y)) * distances(label, label_y, size, size_y, INDICATOR)
        pull = product(x_factor, y_factor)
        if TWICE:
            pull = tl.dot(x_rest, tl.trans(y_rest), pull, input_precision="ieee")
        y_part = y if OUT == D else load_part(y_vectors, column, first_out, COLUMNS, OUT, D)
        total = add_product(total, change * pull, y_part)
    store_part(gradient + offset, total, first, first_out, n, ROWS, OUT, D)


@triton.jit
@no_type_check
def label_slope_kernel(
    grad,  # [n, labels]: d loss / d sums
    bound,  # [n], or of all rows: what its powers of two bring into fp16's range
    power,
    high,  # [n, WIDTH], padded
    rest,
    factor,  # of the gradient that they give
    n, labels, fold,
    WIDTH: tl.constexpr, OF_ANCHORS: tl.constexpr, TWICE: tl.constexpr, TOP: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Scales and casts the slopes of the sums, as two numbers where 8 bits are too few."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    offsets, mask = places(rows, n, labels, WIDTH)
    values = tl.load(grad + offsets, mask=mask, other=0.0)
    if OF_ANCHORS:
        top = tl.load(bound + rows, mask=rows < n, other=1.0)
        room = power_of_two(TOP - tl.ceil(tl.log2(tl.maximum(top, 1e-37))))
        tl.store(factor + rows, tl.load(power) / room, mask=rows < n)
        values *= room[:, None]
    else:
        room = power_of_two(TOP - tl.ceil(tl.log2(tl.maximum(tl.load(bound), 1e-37))))
        values *= room
        tl.store(factor, 1.0 / (fold * tl.load(power) * room))
    padded = rows.to(tl.int64)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    if TWICE:
        cut = (values.to(tl.int32, bitcast=True) & -0x10000).to(tl.float32, bitcast=True)
        tl.store(rest + padded, (values - cut).to(rest.dtype.element_ty))
        values = cut
    tl.store(high + padded, values.to(high.dtype.element_ty))
