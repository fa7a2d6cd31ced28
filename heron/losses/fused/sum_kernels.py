"""Kernels: sums of weighted exponentials over an anchor's keys, and the gradient of a row.

And what prepares them: vectors of unit length, operands cast for products, slopes in fp16's range.
"""

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
    anchors, keys, anchor_tag, key_tag,
    anchor_range, key_range,  # [2, tiles]: least and largest tag
    anchor_weight, key_weight,
    sums,  # [splits, 2 or 1, n]
    n, m, per_split, ratio, floor,
    D: tl.constexpr, WIDTH: tl.constexpr, TAGS: tl.constexpr, WEIGHTS: tl.constexpr,
    FLOOR: tl.constexpr, SECOND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
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
def scale(own, y_scale, columns, stop, OF_X: tl.constexpr, OF_Y: tl.constexpr):
    """Returns s_i, s_k or s_i + s_k, the factor of a tile."""
    factor = own[:, None]
    if OF_Y:
        other = tl.load(y_scale + columns, mask=columns < stop, other=0.0)[None, :]
        factor = factor + other if OF_X else other
    return factor


@triton.jit
@no_type_check
def pull_kernel(
    x_vectors, y_vectors, x_tag, y_tag, x_range, y_range, x_weight, y_weight,
    x_scale,  # [2 or 1, n]: d loss / d sums of x as anchors, times the moment
    y_scale,  # [2 or 1, m]: the same of y as anchors
    factor,  # of the result
    pulls,  # [splits, n, D]
    n, m,  # rows of x, and of y
    begin, end,  # the rows of y of this launch
    per_split, ratio, floor,
    D: tl.constexpr, WIDTH: tl.constexpr, TAGS: tl.constexpr, WEIGHTS: tl.constexpr,
    FLOOR: tl.constexpr, SECOND: tl.constexpr, OF_X: tl.constexpr, OF_Y: tl.constexpr,
    SCALED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
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


@triton.jit
@no_type_check
def places(rows, n, width, D: tl.constexpr):
    """Returns the offsets of rows of `width` columns, and which of D columns they have."""
    columns = tl.arange(0, D)
    mask = (rows < n)[:, None] & (columns < width)[None, :]
    return rows.to(tl.int64)[:, None] * width + columns[None, :], mask


@triton.jit
@no_type_check
def power_of_two(exponent):
    """Returns 2 to a whole number, or 1 where no float32 holds it or it is not finite."""
    fits = (exponent > -126) & (exponent < 127)
    whole = tl.where(fits, exponent, 0.0).to(tl.int32)
    return ((whole + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
@no_type_check
def unit_kernel(
    x, vectors, scaled, length, n, width, tau, D: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Divides rows by their length, and these vectors by tau; rows of zeros stay zero."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    offsets, mask = places(rows, n, width, D)
    values = tl.load(x + offsets, mask=mask, other=0.0)
    norm = tl.sqrt_rn(tl.sum(values * values, 1))
    norm = tl.where(norm == 0, 1.0, norm)
    unit = tl.div_rn(values, tl.broadcast_to(norm[:, None], values.shape))
    tl.store(vectors + offsets, unit, mask=mask)
    tl.store(scaled + offsets, tl.div_rn(unit, tl.zeros_like(unit) + tau), mask=mask)
    tl.store(length + rows, norm, mask=rows < n)


@triton.jit
@no_type_check
def unit_gradient_kernel(
    of_vectors, of_scaled, vectors, length, gradient, n, width, tau,
    D: tl.constexpr, ROWS: tl.constexpr, OF_VECTORS: tl.constexpr, OF_SCALED: tl.constexpr,
):  # fmt: skip
    """Takes the part of a gradient along its vector away, and divides by the length."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    offsets, mask = places(rows, n, width, D)
    unit = tl.load(vectors + offsets, mask=mask, other=0.0)
    grad = tl.zeros_like(unit)
    if OF_VECTORS:
        grad += tl.load(of_vectors + offsets, mask=mask, other=0.0)
    if OF_SCALED:
        grad += tl.load(of_scaled + offsets, mask=mask, other=0.0) * (1.0 / tau)
    norm = tl.load(length + rows, mask=rows < n, other=1.0)
    across = grad - unit * tl.sum(grad * unit, 1)[:, None]
    tl.store(gradient + offsets, across / norm[:, None], mask=mask)


@triton.jit
@no_type_check
def cast_kernel(
    x, y, x_top, y_top, a, k, power, n, m, y_rows, x_width, y_width, x_programs, factor,
    D: tl.constexpr, ROWS: tl.constexpr, BALANCED: tl.constexpr,
):  # fmt: skip
    """Casts both sides of a product, padded with zeros: see `layout.operands`."""
    root = tl.full((), 1.0, tl.float32)
    if BALANCED:
        ratio = tl.load(y_top) / (tl.load(x_top) * tl.abs(factor))
        root = power_of_two(tl.floor(tl.log2(ratio) * 0.5 + 0.5))
    program = tl.program_id(0)
    if program < x_programs:
        rows = program * ROWS + tl.arange(0, ROWS)
        offsets, mask = places(rows, n, x_width, D)
        values = tl.load(x + offsets, mask=mask, other=0.0) * factor * root
        padded = rows.to(tl.int64)[:, None] * D + tl.arange(0, D)[None, :]
        tl.store(a + padded, values.to(a.dtype.element_ty))
    else:
        rows = (program - x_programs) * ROWS + tl.arange(0, ROWS)
        offsets, mask = places(rows, m, y_width, D)
        values = tl.load(y + offsets, mask=mask, other=0.0) * (1.0 / root)
        padded = rows.to(tl.int64)[:, None] * D + tl.arange(0, D)[None, :]
        tl.store(k + padded, values.to(k.dtype.element_ty), mask=(rows < y_rows)[:, None])
    if program == 0:
        tl.store(power, root)


@triton.jit
@no_type_check
def slope_kernel(
    own, of_keys, own_sums, key_sums, own_scaled, keys_scaled, power, factor, n, m, summed, moments,
    D: tl.constexpr, ROWS: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    """Brings D slopes of each row below 2^TOP / their exponentials, which their sums bound."""
    own_top = tl.zeros((ROWS,), tl.float32)
    key_top = tl.zeros((ROWS,), tl.float32)
    for start in range(0, n, ROWS):
        rows = start + tl.arange(0, ROWS)
        for r in tl.static_range(D):
            slope = tl.load(own + rows * moments + r, mask=rows < n, other=0.0)
            total = tl.load(own_sums + rows * moments + r, mask=rows < n, other=0.0)
            own_top = tl.maximum(own_top, tl.abs(slope * total))
    for start in range(0, summed, ROWS):
        rows = start + tl.arange(0, ROWS)
        for r in tl.static_range(D):
            slope = tl.load(of_keys + rows * moments + r, mask=rows < summed, other=0.0)
            total = tl.load(key_sums + rows * moments + r, mask=rows < summed, other=0.0)
            key_top = tl.maximum(key_top, tl.abs(slope * total))
    bound = tl.max(own_top, 0) + tl.max(key_top, 0)
    room = power_of_two(TOP - tl.ceil(tl.log2(bound)))
    tl.store(factor, tl.load(power) / room)
    for start in range(0, n, ROWS):
        rows = start + tl.arange(0, ROWS)
        for r in tl.static_range(D):
            slope = tl.load(own + rows * moments + r, mask=rows < n, other=0.0)
            tl.store(own_scaled + r * n + rows, slope * room, mask=rows < n)
    for start in range(0, m, ROWS):
        rows = start + tl.arange(0, ROWS)
        for r in tl.static_range(D):
            slope = tl.load(of_keys + rows * moments + r, mask=rows < m, other=0.0)
            tl.store(keys_scaled + r * m + rows, slope * room, mask=rows < m)
