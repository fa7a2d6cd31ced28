"""Kernels: vectors of unit length, operands cast for products, slopes scaled for a gradient."""

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def unit_kernel(
    x, vectors, scaled, length, n, width, tau, D: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Divides rows by their length, and these vectors by tau; rows of zeros stay zero."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    offsets, mask = _places(rows, n, width, D)
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
    offsets, mask = _places(rows, n, width, D)
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
def _places(rows, n, width, D: tl.constexpr):
    """Returns the offsets of rows of `width` columns, and which of D columns they have."""
    columns = tl.arange(0, D)
    mask = (rows < n)[:, None] & (columns < width)[None, :]
    return rows.to(tl.int64)[:, None] * width + columns[None, :], mask


@triton.jit
@no_type_check
def _power_of_two(exponent):
    """Returns 2 to a whole number, or 1 where no float32 holds it or it is not finite."""
    fits = (exponent > -126) & (exponent < 127)
    whole = tl.where(fits, exponent, 0.0).to(tl.int32)
    return ((whole + 127) << 23).to(tl.float32, bitcast=True)


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
        root = _power_of_two(tl.floor(tl.log2(ratio) * 0.5 + 0.5))
    program = tl.program_id(0)
    if program < x_programs:
        rows = program * ROWS + tl.arange(0, ROWS)
        offsets, mask = _places(rows, n, x_width, D)
        values = tl.load(x + offsets, mask=mask, other=0.0) * factor * root
        places = rows.to(tl.int64)[:, None] * D + tl.arange(0, D)[None, :]
        tl.store(a + places, values.to(a.dtype.element_ty))
    else:
        rows = (program - x_programs) * ROWS + tl.arange(0, ROWS)
        offsets, mask = _places(rows, m, y_width, D)
        values = tl.load(y + offsets, mask=mask, other=0.0) * (1.0 / root)
        places = rows.to(tl.int64)[:, None] * D + tl.arange(0, D)[None, :]
        tl.store(k + places, values.to(k.dtype.element_ty), mask=(rows < y_rows)[:, None])
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
    room = _power_of_two(TOP - tl.ceil(tl.log2(bound)))
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
