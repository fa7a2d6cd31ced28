"""Kernels: the attraction of pairs that share a label, log1p(D / (sigma f)), and its gradient.

Anchors and keys are *entries*, one for every label that a row has, sorted by label: the pairs of a
label are then a rectangle, and only these are visited. An entry names its row, so nothing is
copied, and the range of the other side's entries with its label.
"""

from typing import no_type_check

import triton
import triton.language as tl

from heron.losses.fused.tiles import (
    LN2,
    add_product,
    gather_rows,
    log2,
    product,
    reciprocal,
    store_part,
    touch,
)


@triton.jit
@no_type_check
def log1p(x):
    """Returns log(1 + x), by its series where 1 + x would round x off."""
    small = tl.minimum(x, 0.02)
    series = small * (1 - small * (0.5 - small * (1 / 3 - small * 0.25)))
    return tl.where(x < 0.02, series, LN2 * log2(1 + x))


@triton.jit
@no_type_check
def only_pairs(
    tile, x_tags, x_tag, y_tag, x_own, y_own, x_ranges, y_ranges, x_tile, n, m, column, stop,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sets log2(D / f) of a tile to -inf for other labels and for the anchor itself.

    Most tiles lie within one label and off the diagonal: they skip the comparisons. Tags ascend.
    """
    low, high = tl.load(y_tag + column), tl.load(y_tag + tl.minimum(column + COLUMNS, m) - 1)
    first, last = x_tile * ROWS, tl.minimum(x_tile * ROWS + ROWS, n) - 1
    special = (low != high) | (low != tl.load(x_tags + first)) | (column + COLUMNS > stop)
    special = special | (low != tl.load(x_tags + last))
    x_tiles, y_tiles = tl.cdiv(n, ROWS), tl.cdiv(m, COLUMNS)
    special = special | touch(x_ranges, y_ranges, x_tile, x_tiles, column // COLUMNS, y_tiles)
    if special:
        columns = column + tl.arange(0, COLUMNS)
        inside = columns < stop
        tag = tl.load(y_tag + columns, mask=inside, other=0)
        own = tl.load(y_own + columns, mask=inside, other=-1)
        keep = inside[None, :] & (x_tag[:, None] == tag[None, :])
        keep = keep & (x_own[:, None] != own[None, :])
        tile = tl.where(keep, tile, float("-inf"))
    return tile


@triton.jit
@no_type_check
def hamming_ratio(ratio, size, size_y, product_of_labels, labels, ROWS_ARE_ANCHORS: tl.constexpr):
    """Returns r = D / (sigma f) and r / (1 + r) from D / f, by one reciprocal for both.

    Where keys are the rows, only the second is used.
    """
    unit = 1 / labels
    sigma = (1 - unit * size)[:, None] - (unit * size_y)[None, :]
    sigma -= 2 * unit * product_of_labels
    sigma = tl.maximum(sigma, 0.001)  # of a pair it is at least 1 / labels
    denominator = sigma + ratio
    if ROWS_ARE_ANCHORS:
        inverse = ratio * reciprocal(sigma * denominator)
        return inverse * denominator, inverse * sigma
    else:
        return ratio, ratio * reciprocal(denominator)


@triton.jit
@no_type_check
def pair_kernel(
    x_vectors, y_vectors,
    x_row, y_row,  # [n], [m]: the row of the vectors that an entry stands for
    x_tag, y_tag,  # [n], [m], ascending
    x_own, y_own,  # of a key its row, of an anchor the key row that is itself: no pair where equal
    x_owns, y_owns,  # [2, tiles]: least and largest of a tile
    first_y,  # [n]: the entries of y that share an entry's tag start here
    last_y,  # [n]: and end before this
    x_label, y_label,  # [rows, WIDTH], as label_kernels takes them
    x_size, y_size,
    log_total,  # of the anchors' entries: log2 D
    weight,  # of the anchors' entries
    losses,  # [n]: of the anchors' entries, before their weight
    shares,  # [n]: d loss / d log D
    gradient,  # [n, D]
    n, m,
    link,  # the number of the chain among the entries of y that a block visits
    labels,
    D: tl.constexpr, OUT: tl.constexpr, WIDTH: tl.constexpr,
    HAMMING: tl.constexpr, ROWS_ARE_ANCHORS: tl.constexpr, GRADIENT: tl.constexpr,
    CHAIN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Visits a block of entries of x, and all entries of y that share a tag with any of them."""
    block, first_out = tl.program_id(0), tl.program_id(1) * OUT  # first column of the gradient
    entries = block * ROWS + tl.arange(0, ROWS)
    inside = entries < n
    rows = tl.load(x_row + entries, mask=inside, other=0)
    tag = tl.load(x_tag + entries, mask=inside, other=0)
    own = tl.load(x_own + entries, mask=inside, other=0)
    x = gather_rows(x_vectors, rows, 0, D, D)
    if HAMMING:
        label = gather_rows(x_label, rows, 0, WIDTH, WIDTH)
        size = tl.load(x_size + rows)
    if ROWS_ARE_ANCHORS:
        total = tl.load(log_total + entries, mask=inside, other=0.0)[:, None]
    loss = tl.load(losses + entries, mask=inside, other=0.0)  # of earlier chains
    share = tl.load(shares + entries, mask=inside, other=0.0)
    start = tl.load(first_y + block * ROWS) // COLUMNS * COLUMNS + link * CHAIN
    stop = tl.load(last_y + tl.minimum(block * ROWS + ROWS, n) - 1)
    change = tl.zeros((ROWS, OUT), tl.float32)
    for column in range(start, tl.minimum(start + CHAIN, stop), COLUMNS):
        columns = column + tl.arange(0, COLUMNS)
        y_inside = columns < stop
        y_rows = tl.load(y_row + columns, mask=y_inside, other=0)
        y = gather_rows(y_vectors, y_rows, 0, D, D)
        if not ROWS_ARE_ANCHORS:
            total = tl.load(log_total + columns, mask=y_inside, other=0.0)[None, :]
        tile = only_pairs(
            total - product(x, y), x_tag, tag, y_tag, own, y_own, x_owns, y_owns,
            block, n, m, column, stop, ROWS, COLUMNS,
        )  # fmt: skip
        ratio = tl.exp2(tile)
        if HAMMING:
            label_y = gather_rows(y_label, y_rows, 0, WIDTH, WIDTH)
            size_y, shared = tl.load(y_size + y_rows), product(label, label_y)
            ratio, shrunk = hamming_ratio(ratio, size, size_y, shared, labels, ROWS_ARE_ANCHORS)
        else:
            shrunk = ratio * reciprocal(1 + ratio)
        if ROWS_ARE_ANCHORS:
            loss += tl.sum(log1p(ratio), 1)
        if GRADIENT:
            if ROWS_ARE_ANCHORS:
                share += tl.sum(shrunk, 1)
            else:
                shrunk *= tl.load(weight + columns, mask=y_inside, other=0.0)[None, :]
            y_part = y if OUT == D else gather_rows(y_vectors, y_rows, first_out, OUT, D)
            change = add_product(change, shrunk, y_part)
    if GRADIENT:
        if ROWS_ARE_ANCHORS:
            change *= tl.load(weight + entries, mask=inside, other=0.0)[:, None]
        store_part(gradient, change, block * ROWS, first_out, n, ROWS, OUT, D)
    if ROWS_ARE_ANCHORS and first_out == 0:
        tl.store(losses + entries, loss, mask=inside)
        tl.store(shares + entries, share, mask=inside)


@triton.jit
@no_type_check
def collect_kernel(
    entry_grads,  # [entries, D]
    entry_of,  # [n, labels]: the entry of a row's label, or -1
    shares, weight,  # [entries], of anchors
    given,  # [n, labels], of anchors: D, or log D
    power, room,  # of the vectors, and of keys' weights
    row_grads,  # [n, D]
    d_total,  # [n, labels], of anchors: its gradient
    n, labels, fold,
    D: tl.constexpr, ROWS: tl.constexpr, OF_ANCHORS: tl.constexpr, IS_LOG: tl.constexpr,
):  # fmt: skip
    """Adds up the gradients of a row's entries, which are negative, in the order of the labels."""
    first = tl.program_id(0) * ROWS
    rows = first + tl.arange(0, ROWS)
    columns = tl.arange(0, D)[None, :]
    total = tl.zeros((ROWS, D), tl.float32)
    for label in range(labels):
        place = rows.to(tl.int64) * labels + label
        entry = tl.load(entry_of + place, mask=rows < n, other=-1)
        offsets = entry.to(tl.int64)[:, None] * D + columns
        total += tl.load(entry_grads + offsets, mask=(entry >= 0)[:, None], other=0.0)
        if OF_ANCHORS:
            share = tl.load(shares + entry, mask=entry >= 0, other=0.0)
            share *= tl.load(weight + entry, mask=entry >= 0, other=0.0)
            if not IS_LOG:  # where D is 0, so is the share
                share /= tl.maximum(tl.load(given + place, mask=rows < n, other=1.0), 1e-37)
            tl.store(d_total + place, share, mask=rows < n)
    factor = tl.load(power)
    if not OF_ANCHORS:
        factor = 1.0 / (fold * factor * tl.load(room))
    store_part(row_grads, -total * factor, first, 0, n, ROWS, D, D)
