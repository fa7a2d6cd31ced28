"""Sums over the negatives of every label, weighted by the distance of label vectors (D of L_s).

The labels of an anchor come as y_i with -|y_i|, those of a key as v_k = 1 - y_k with |y_k|: then
one product serves everything, since hamming(y_i, y_k) = |y_k| - |y_i| + 2 y_i.v_k, whichever of
the two is on the rows of a tile.
"""

from typing import no_type_check

import triton
import triton.language as tl

from heron.pipeline.objectives.fused.tiles import (
    LOG2E,
    add_product,
    load_rows,
    logits,
    product,
    store_rows,
)


@triton.jit
@no_type_check
def distances(x_label, y_label, x_size, y_size, INDICATOR: tl.constexpr, PRECISION: tl.constexpr):
    """dist(y_i, y_k) of a tile; labels are 0 or 1, so that every precision gives it exactly."""
    both = product(x_label, tl.trans(y_label), PRECISION)
    hamming = x_size[:, None] + y_size[None, :] + 2 * both
    if INDICATOR:
        hamming = tl.where(hamming > 0.5, 1.0, 0.0)
    return hamming


@triton.jit
@no_type_check
def label_sum_kernel(
    anchors,
    keys,
    anchor_label,  # [n, WIDTH]: y
    key_label,  # [m, WIDTH]: 1 - y
    anchor_size,  # [n]: -|y|
    key_size,  # [m]: |y|
    sums,  # [splits, n, WIDTH]
    n,
    m,
    per_split,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,
    INDICATOR: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A block of anchors and a range of keys."""
    split = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < n
    x = load_rows(anchors, rows, inside, 0, D, CHUNK)
    label = load_rows(anchor_label, rows, inside, 0, WIDTH, WIDTH)
    size = tl.load(anchor_size + rows, mask=inside, other=0.0)
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    start = split * per_split
    stop = tl.minimum(start + per_split, m)
    for column in range(start, stop, COLUMNS):
        columns = column + tl.arange(0, COLUMNS)
        y_inside = columns < stop
        y = load_rows(keys, columns, y_inside, 0, D, CHUNK)
        tile = logits(x, y, anchors, keys, rows, columns, inside, y_inside, D, CHUNK, PRECISION)
        y_label = load_rows(key_label, columns, y_inside, 0, WIDTH, WIDTH)
        y_size = tl.load(key_size + columns, mask=y_inside, other=0.0)
        repulsion = distances(label, y_label, size, y_size, INDICATOR, PRECISION)
        repulsion *= tl.exp2(tile * LOG2E)
        # Keys past the end need no mask: their labels were read as zeros, and multiply this.
        total = add_product(total, repulsion, y_label, PRECISION)
    line = split.to(tl.int64) * n * WIDTH
    store_rows(sums + line, total, rows, inside, 0, WIDTH, WIDTH)


@triton.jit
@no_type_check
def label_gradient_kernel(
    x_vectors,
    y_vectors,
    x_label,
    y_label,
    x_size,
    y_size,
    anchor_grad,  # [anchors, WIDTH]: d sums, in the labels' type
    gradient,  # [splits, n, D]
    n,  # rows of x
    m,  # rows of y
    per_split,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    OUT: tl.constexpr,
    WIDTH: tl.constexpr,
    INDICATOR: tl.constexpr,
    ROWS_ARE_ANCHORS: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The gradient of a block of x, by a loop over y: of anchors over keys, or the reverse."""
    split = tl.program_id(1)
    part = tl.program_id(2)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < n
    x = load_rows(x_vectors, rows, inside, 0, D, CHUNK)
    label = load_rows(x_label, rows, inside, 0, WIDTH, WIDTH)
    size = tl.load(x_size + rows, mask=inside, other=0.0)
    # dist exp is to be multiplied by sum_a dD_ia (1 - y_ka): dD beside the key's labels.
    mix = label
    if ROWS_ARE_ANCHORS:
        mix = load_rows(anchor_grad, rows, inside, 0, WIDTH, WIDTH)
    total = tl.zeros((ROWS, OUT), tl.float32)
    start = split * per_split
    stop = tl.minimum(start + per_split, m)
    for column in range(start, stop, COLUMNS):
        columns = column + tl.arange(0, COLUMNS)
        y_inside = columns < stop
        y = load_rows(y_vectors, columns, y_inside, part * OUT, D, OUT)
        tile = logits(
            x, y, x_vectors, y_vectors, rows, columns, inside, y_inside, D, CHUNK, PRECISION
        )
        label_y = load_rows(y_label, columns, y_inside, 0, WIDTH, WIDTH)
        size_y = tl.load(y_size + columns, mask=y_inside, other=0.0)
        mix_y = label_y
        if not ROWS_ARE_ANCHORS:
            mix_y = load_rows(anchor_grad, columns, y_inside, 0, WIDTH, WIDTH)
        change = distances(label, label_y, size, size_y, INDICATOR, PRECISION)
        change *= tl.exp2(tile * LOG2E)
        change *= product(mix, tl.trans(mix_y), PRECISION)
        total = add_product(total, change, y, PRECISION)
    line = split.to(tl.int64) * n * D
    store_rows(gradient + line, total, rows, inside, part * OUT, D, OUT)
