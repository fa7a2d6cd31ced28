"""Sums of weighted exponentials over the keys of an anchor, and their gradient."""

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
def summands(
    tile,
    x_tag,
    y_tag,
    x_weight,
    y_weight,
    y_inside,
    moment_0,
    moment_1,
    floor,
    TAGS: tl.constexpr,
    WEIGHTS: tl.constexpr,
    FLOOR: tl.constexpr,
    SECOND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Both moments' summands of a tile of logits; 0 where the pair does not count."""
    keep = y_inside[None, :]
    if TAGS:
        keep = keep & (x_tag[:, None] != y_tag[None, :])
    if FLOOR:
        keep = keep & (tile >= floor)
    first = tl.exp2(tile * (moment_0 * LOG2E))
    if SECOND == "root":  # moment_0 = 2 moment_1: one exponential, the scarcest unit, serves both
        second = tl.exp2(tile * (moment_1 * LOG2E))
        first = second * second
    elif SECOND == "free":
        second = tl.exp2(tile * (moment_1 * LOG2E))
    else:  # a count of the pairs, or not wanted
        second = tl.full(tile.shape, 1.0, tl.float32)
    if WEIGHTS:
        weight = product(x_weight, tl.trans(y_weight), PRECISION)
        first *= weight
        second *= weight
    return tl.where(keep, first, 0.0), tl.where(keep, second, 0.0)


@triton.jit
@no_type_check
def sum_kernel(
    anchors,
    keys,
    anchor_tag,
    key_tag,
    anchor_weight,
    key_weight,
    sums,  # [splits, 2 or 1, n]
    pulls,  # [splits, n, D]: sum_k summand_ik keys_k, of the first moment
    n,
    m,
    per_split,
    moment_0,
    moment_1,
    floor,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    OUT: tl.constexpr,
    WIDTH: tl.constexpr,
    TAGS: tl.constexpr,
    WEIGHTS: tl.constexpr,
    FLOOR: tl.constexpr,
    SECOND: tl.constexpr,
    PULL: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A block of anchors, a range of keys, OUT columns of the pull."""
    split = tl.program_id(1)
    part = tl.program_id(2)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < n
    x = load_rows(anchors, rows, inside, 0, D, CHUNK)
    tag, weight = rows, x  # stand for what there may not be: Triton knows no name without a value
    if TAGS:
        tag = tl.load(anchor_tag + rows, mask=inside, other=0)
    if WEIGHTS:
        weight = load_rows(anchor_weight, rows, inside, 0, WIDTH, WIDTH)
    total_0 = tl.zeros((ROWS,), tl.float32)
    total_1 = tl.zeros((ROWS,), tl.float32)
    pull = tl.zeros((ROWS, OUT), tl.float32)
    start = split * per_split
    stop = tl.minimum(start + per_split, m)
    for column in range(start, stop, COLUMNS):
        columns = column + tl.arange(0, COLUMNS)
        y_inside = columns < stop
        y = load_rows(keys, columns, y_inside, part * OUT, D, OUT)
        tile = logits(x, y, anchors, keys, rows, columns, inside, y_inside, D, CHUNK, PRECISION)
        y_tag, y_weight = columns, y
        if TAGS:
            y_tag = tl.load(key_tag + columns, mask=y_inside, other=0)
        if WEIGHTS:
            y_weight = load_rows(key_weight, columns, y_inside, 0, WIDTH, WIDTH)
        first, second = summands(
            tile, tag, y_tag, weight, y_weight, y_inside, moment_0, moment_1, floor,
            TAGS, WEIGHTS, FLOOR, SECOND, PRECISION,
        )  # fmt: skip
        total_0 += tl.sum(first, 1)
        if SECOND != "none":
            total_1 += tl.sum(second, 1)
        if PULL:
            pull = add_product(pull, first, y, PRECISION)
    line = split.to(tl.int64) * n
    if part == 0:
        if SECOND == "none":
            tl.store(sums + line + rows, total_0, mask=inside)
        else:
            tl.store(sums + 2 * line + rows, total_0, mask=inside)
            tl.store(sums + 2 * line + n + rows, total_1, mask=inside)
    if PULL:
        store_rows(pulls + line * D, pull, rows, inside, part * OUT, D, OUT)


@triton.jit
@no_type_check
def sum_gradient_kernel(
    x_vectors,
    y_vectors,
    x_tag,
    y_tag,
    x_weight,
    y_weight,
    scale,  # [2 or 1, anchors]: d sums * moment
    gradient,  # [splits, n, D]
    n,  # rows of x
    m,  # rows of y
    per_split,
    moment_0,
    moment_1,
    floor,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    OUT: tl.constexpr,
    WIDTH: tl.constexpr,
    TAGS: tl.constexpr,
    WEIGHTS: tl.constexpr,
    FLOOR: tl.constexpr,
    SECOND: tl.constexpr,
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
    tag, weight = rows, x
    if TAGS:
        tag = tl.load(x_tag + rows, mask=inside, other=0)
    if WEIGHTS:
        weight = load_rows(x_weight, rows, inside, 0, WIDTH, WIDTH)
    if ROWS_ARE_ANCHORS:
        scale_0 = tl.load(scale + rows, mask=inside, other=0.0)[:, None]
        scale_1 = scale_0
        if SECOND != "none":
            scale_1 = tl.load(scale + n + rows, mask=inside, other=0.0)[:, None]
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
        tag_y, weight_y = columns, y
        if TAGS:
            tag_y = tl.load(y_tag + columns, mask=y_inside, other=0)
        if WEIGHTS:
            weight_y = load_rows(y_weight, columns, y_inside, 0, WIDTH, WIDTH)
        if not ROWS_ARE_ANCHORS:
            scale_0 = tl.load(scale + columns, mask=y_inside, other=0.0)[None, :]
            scale_1 = scale_0
            if SECOND != "none":
                scale_1 = tl.load(scale + m + columns, mask=y_inside, other=0.0)[None, :]
        first, second = summands(
            tile, tag, tag_y, weight, weight_y, y_inside, moment_0, moment_1, floor,
            TAGS, WEIGHTS, FLOOR, SECOND, PRECISION,
        )  # fmt: skip
        change = first * scale_0
        if SECOND != "none":
            change += second * scale_1
        total = add_product(total, change, y, PRECISION)
    line = split.to(tl.int64) * n * D
    store_rows(gradient + line, total, rows, inside, part * OUT, D, OUT)
