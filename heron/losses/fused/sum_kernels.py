"""Kernels: sums of weighted exponentials over an anchor's keys, and the gradient of a row."""

from typing import no_type_check

import triton
import triton.language as tl

from heron.losses.fused.tiles import add_product, load_tile, product, store_part, touch


@triton.jit
@no_type_check
def only_pairs(
    tile, x_tag, y_tag, x_range, y_range, x_tile, x_tiles, y_tiles, column, stop, m, floor,
    TAGS: tl.constexpr, FLOOR: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sets the logits of a tile to -inf where the pair does not count.

    Only the last tile has keys past the end, and only tiles whose ranges of tags overlap can have
    equal tags: the others skip the comparison.
    """
    special = column + COLUMNS > stop
    if TAGS:
        y_tile = column // COLUMNS
        special = special | touch(x_range, y_range, x_tile, x_tiles, y_tile, y_tiles)
    if special:
        columns = column + tl.arange(0, COLUMNS)
        keep = (columns < stop)[None, :]
        if TAGS:
            tag = tl.load(y_tag + columns, mask=columns < stop, other=0)
            keep = keep & (x_tag[:, None] != tag[None, :])
        tile = tl.where(keep, tile, float("-inf"))
    if FLOOR:
        tile = tl.where(tile >= floor, tile, float("-inf"))
    return tile


@triton.jit
@no_type_check
def exponentials(tile, ratio, SECOND: tl.constexpr):
    """Returns both moments' exponentials of a tile, whose logits contain the first moment."""
    if SECOND == "root":  # one exponential, the scarcest unit, serves both
        second = tl.exp2(tile * 0.5)
        first = second * second
    else:
        first = tl.exp2(tile)
        second = first
        if SECOND == "free":
            second = tl.exp2(tile * ratio)
        elif SECOND == "count":
            second = tl.where(tile > float("-inf"), 1.0, 0.0)
    return first, second


@triton.jit
@no_type_check
def sum_kernel(
    anchors,
    keys,
    anchor_tag,
    key_tag,
    anchor_range,  # [2, tiles]: least and largest tag
    key_range,
    anchor_weight,
    key_weight,
    sums,  # [splits, 2 or 1, n]
    n,
    m,
    per_split,
    ratio,
    floor,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    TAGS: tl.constexpr,
    WEIGHTS: tl.constexpr,
    FLOOR: tl.constexpr,
    SECOND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Computes the sums of a block of anchors over a range of keys."""
    block, split = tl.program_id(0), tl.program_id(1)
    rows = block * ROWS + tl.arange(0, ROWS)
    inside = rows < n
    x = load_tile(anchors, block * ROWS, ROWS, D)
    tag, weight = rows, x  # placeholders: Triton wants every name defined
    if TAGS:
        tag = tl.load(anchor_tag + rows, mask=inside, other=0)
    if WEIGHTS:
        weight = load_tile(anchor_weight, block * ROWS, ROWS, WIDTH)
    total_0 = tl.zeros((ROWS,), tl.float32)
    total_1 = tl.zeros((ROWS,), tl.float32)
    start = split * per_split
    stop = tl.minimum(start + per_split, m)
    for column in range(start, stop, COLUMNS):
        y = load_tile(keys, column, COLUMNS, D)
        tile = only_pairs(
            product(x, y), tag, key_tag, anchor_range, key_range, block, tl.cdiv(n, ROWS),
            tl.cdiv(m, COLUMNS), column, stop, m, floor, TAGS, FLOOR, COLUMNS,
        )  # fmt: skip
        first, second = exponentials(tile, ratio, SECOND)
        if WEIGHTS:
            weights = product(weight, load_tile(key_weight, column, COLUMNS, WIDTH))
            first *= weights
            second *= weights
        total_0 += tl.sum(first, 1)
        if SECOND != "none":
            total_1 += tl.sum(second, 1)
    offset = split.to(tl.int64) * n
    if SECOND == "none":
        tl.store(sums + offset + rows, total_0, mask=inside)
    else:
        tl.store(sums + 2 * offset + rows, total_0, mask=inside)
        tl.store(sums + 2 * offset + n + rows, total_1, mask=inside)


@triton.jit
@no_type_check
def scale(own, y_scale, places, stop, OF_X: tl.constexpr, OF_Y: tl.constexpr):
    """Returns s_i, s_k or s_i + s_k, the factor of a tile."""
    factor = own[:, None]
    if OF_Y:
        other = tl.load(y_scale + places, mask=places < stop, other=0.0)[None, :]
        factor = factor + other if OF_X else other
    return factor


@triton.jit
@no_type_check
def pull_kernel(
    x_vectors,
    y_vectors,
    x_tag,
    y_tag,
    x_range,
    y_range,
    x_weight,
    y_weight,
    x_scale,  # [2 or 1, n]: d loss / d sums of x as anchors, times the moment
    y_scale,  # [2 or 1, m]: the same of y as anchors
    factor,  # of the result
    pulls,  # [splits, n, D]
    n,  # rows of x
    m,  # rows of y
    begin,  # the rows of y of this launch
    end,
    per_split,
    ratio,
    floor,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    TAGS: tl.constexpr,
    WEIGHTS: tl.constexpr,
    FLOOR: tl.constexpr,
    SECOND: tl.constexpr,
    OF_X: tl.constexpr,
    OF_Y: tl.constexpr,
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Computes sum_k (s_i + s_k) e_ik y_k of a block of x: its gradient as anchor, key or both."""
    block, split = tl.program_id(0), tl.program_id(1)
    rows = block * ROWS + tl.arange(0, ROWS)
    inside = rows < n
    x = load_tile(x_vectors, block * ROWS, ROWS, D)
    tag, weight = rows, x
    if TAGS:
        tag = tl.load(x_tag + rows, mask=inside, other=0)
    if WEIGHTS:
        weight = load_tile(x_weight, block * ROWS, ROWS, WIDTH)
    own_0, own_1 = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    if OF_X:
        own_0 = tl.load(x_scale + rows, mask=inside, other=0.0)
        if SECOND != "none":
            own_1 = tl.load(x_scale + n + rows, mask=inside, other=0.0)
    start = begin + split * per_split
    stop = tl.minimum(start + per_split, end)
    total = tl.zeros((ROWS, D), tl.float32)
    for column in range(start, stop, COLUMNS):
        columns = column + tl.arange(0, COLUMNS)
        y = load_tile(y_vectors, column, COLUMNS, D)
        tile = only_pairs(
            product(x, y), tag, y_tag, x_range, y_range, block, tl.cdiv(n, ROWS),
            tl.cdiv(m, COLUMNS), column, stop, m, floor, TAGS, FLOOR, COLUMNS,
        )  # fmt: skip
        first, second = exponentials(tile, ratio, SECOND)
        change = first * scale(own_0, y_scale, columns, stop, OF_X, OF_Y)
        if SECOND != "none":
            change += second * scale(own_1, y_scale, m + columns, m + stop, OF_X, OF_Y)
        if WEIGHTS:
            change *= product(weight, load_tile(y_weight, column, COLUMNS, WIDTH))
        total = add_product(total, change, y)
    if SCALED:
        total *= tl.load(factor)
    offset = split.to(tl.int64) * n * D
    store_part(pulls + offset, total, block * ROWS, 0, n, ROWS, D, D)
