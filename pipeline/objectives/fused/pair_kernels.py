"""The attraction of the pairs that share a label: log1p(D / (sigma f)) and its gradient.

Anchors and keys come as *entries*, one for every label that a row has, sorted by label: the pairs
of a label are then a rectangle, and only those are visited. An entry names its row, so nothing is
copied, and the range of the other side's entries that have its label.
"""

from typing import no_type_check

import triton
import triton.language as tl

from heron.pipeline.objectives.fused.label_kernels import distances
from heron.pipeline.objectives.fused.tiles import LOG2E, add_product, load_rows, logits, store_rows


@triton.jit
@no_type_check
def log1p(x):
    """log(1 + x), by its series where 1 + x would round x away."""
    small = tl.minimum(x, 0.02)
    series = small * (1 - small * (0.5 - small * (1 / 3 - small * 0.25)))
    return tl.where(x < 0.02, series, tl.log(1 + x))


@triton.jit
@no_type_check
def of_anchors(log_total, own, weight, entries, inside, AXIS: tl.constexpr):
    """Of anchors' entries log D, the key row that is the anchor itself and the weight, expanded."""
    total = tl.expand_dims(tl.load(log_total + entries, mask=inside, other=0.0), AXIS)
    number = tl.expand_dims(tl.load(own + entries, mask=inside, other=-1), AXIS)
    return total, number, tl.expand_dims(tl.load(weight + entries, mask=inside, other=0.0), AXIS)


@triton.jit
@no_type_check
def sigma(
    label, size, y_label, y_size, rows, keep, inside, labels,
    WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """1 - hamming / labels of the pairs to keep, which share a label, so that it is above 0."""
    label_y = load_rows(y_label, rows, inside, 0, WIDTH, WIDTH)
    size_y = tl.load(y_size + rows, mask=inside, other=0.0)
    hamming = distances(label, label_y, size, size_y, False, PRECISION)
    return tl.where(keep, 1 - hamming / labels, 1.0)


@triton.jit
@no_type_check
def pair_kernel(
    x_vectors,
    y_vectors,
    x_row,  # [n]: the row of x_vectors that an entry stands for
    y_row,  # [m]
    x_tag,  # [n], ascending
    y_tag,  # [m], ascending
    first_y,  # [n]: the entries of y that share an entry's tag start here
    last_y,  # [n]: and end before this
    x_label,  # [rows, WIDTH], as label_kernels takes them
    y_label,
    x_size,
    y_size,
    log_total,  # of the anchors' entries: log D
    own,  # of the anchors' entries: the key row that is the anchor itself, or -1
    weight,  # of the anchors' entries
    losses,  # [n]: of the anchors' entries, before their weight
    shares,  # [n]: d loss / d log D
    gradient,  # [n, D]
    n,
    labels,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    OUT: tl.constexpr,
    WIDTH: tl.constexpr,
    HAMMING: tl.constexpr,
    ROWS_ARE_ANCHORS: tl.constexpr,
    GRADIENT: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A block of entries of x against all of y that share a tag with any of them."""
    part = tl.program_id(1)
    start_x = tl.program_id(0) * ROWS
    entries = start_x + tl.arange(0, ROWS)
    inside = entries < n
    rows = tl.load(x_row + entries, mask=inside, other=0)
    tag = tl.load(x_tag + entries, mask=inside, other=0)
    x = load_rows(x_vectors, rows, inside, 0, D, CHUNK)
    if HAMMING:
        label = load_rows(x_label, rows, inside, 0, WIDTH, WIDTH)
        size = tl.load(x_size + rows, mask=inside, other=0.0)
    if ROWS_ARE_ANCHORS:
        total, number, scale = of_anchors(log_total, own, weight, entries, inside, 1)
    loss, share = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    change = tl.zeros((ROWS, OUT), tl.float32)
    stop = tl.load(last_y + tl.minimum(start_x + ROWS, n) - 1)
    for column in range(tl.load(first_y + start_x), stop, COLUMNS):
        columns = column + tl.arange(0, COLUMNS)
        y_inside = columns < stop
        y_rows = tl.load(y_row + columns, mask=y_inside, other=0)
        tag_y = tl.load(y_tag + columns, mask=y_inside, other=0)
        y = load_rows(y_vectors, y_rows, y_inside, part * OUT, D, OUT)
        tile = logits(
            x, y, x_vectors, y_vectors, rows, y_rows, inside, y_inside, D, CHUNK, PRECISION
        )
        if not ROWS_ARE_ANCHORS:
            total, number, scale = of_anchors(log_total, own, weight, columns, y_inside, 0)
        other = y_rows[None, :] if ROWS_ARE_ANCHORS else rows[:, None]
        keep = inside[:, None] & y_inside[None, :] & (tag[:, None] == tag_y[None, :])
        keep = keep & (other != number)
        ratio = tl.exp2((total - tile) * LOG2E)  # D / f
        if HAMMING:
            ratio /= sigma(
                label, size, y_label, y_size, y_rows, keep, y_inside, labels, WIDTH, PRECISION
            )
        ratio = tl.where(keep, ratio, 0.0)
        if ROWS_ARE_ANCHORS:
            loss += tl.sum(log1p(ratio), 1)
        if GRADIENT:
            ratio = ratio / (1 + ratio)
            if ROWS_ARE_ANCHORS:
                share += tl.sum(ratio, 1)
            change = add_product(change, ratio * -scale, y, PRECISION)
    if ROWS_ARE_ANCHORS and part == 0:
        tl.store(losses + entries, loss, mask=inside)
        tl.store(shares + entries, share, mask=inside)
    if GRADIENT:
        store_rows(gradient, change, entries, inside, part * OUT, D, OUT)


@triton.jit
@no_type_check
def collect_kernel(
    of_entries,  # [entries, D]
    place,  # [n, labels]: the entry of a row's label, or -1
    of_rows,  # [n, D]
    n,
    labels,
    D: tl.constexpr,
    OUT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Add up the gradients of a row's entries, in the order of the labels."""
    first = tl.program_id(1) * OUT
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < n
    total = tl.zeros((ROWS, OUT), tl.float32)
    for label in range(labels):
        entry = tl.load(place + rows.to(tl.int64) * labels + label, mask=inside, other=-1)
        total += load_rows(of_entries, entry, entry >= 0, first, D, OUT)
    store_rows(of_rows, total, rows, inside, first, D, OUT)
