"""Sums of rows by group, whose rounding repeats on every device."""

from jaxtyping import Float, Int
from torch import Tensor


def group_sums(
    rows: Float[Tensor, "rows width"], group: Int[Tensor, " rows"], groups: int
) -> Float[Tensor, "groups width"]:
    """Returns the sum of the rows of each group, 0 for a group without rows.

    On a GPU `index_add` adds in whatever order its threads come; `index_put_` sorts first, so that
    two calls have equal bits. On a CPU both add in order, and the former is faster.

    Shapes: rows [rows, width], group [rows] from 0 to groups - 1; returns [groups, width].
    """
    zeros = rows.new_zeros(groups, rows.shape[1])
    if rows.is_cuda:
        return zeros.index_put((group,), rows, accumulate=True)
    return zeros.index_add(0, group, rows)
