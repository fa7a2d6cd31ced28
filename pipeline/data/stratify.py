"""A draw of rows in which every label has its share, also where a row has several."""

import numpy as np
from numpy.typing import NDArray

from heron.pipeline.data.plan import Rows


def stratified(y: NDArray[np.float32], count: int, draw: np.random.Generator) -> Rows:
    """Draws `count` rows in which each label is as frequent as in all, as nearly as can be.

    Of exclusive classes each has its share to within a row, the largest remainders rounded up.
    Several labels: iterative stratification into two parts (Sechidis, Tsoumakas and Vlahavas, "On
    the stratification of multi-label data", ECML PKDD 2011, Algorithm 1). The label with the fewest
    rows left comes first, and each of these goes to the part that still lacks most of the label, or
    most rows in all; rows without a label come last.

    Args:
        y: labels as 0/1, [rows, labels].
        count: how many rows are drawn, 0 to rows.
        draw: orders the rows of a label.

    Returns:
        Places of the drawn rows, ascending.
    """
    rows, has = len(y), y > 0
    if (has.sum(1) <= 1).all():
        return _of_classes(np.where(has.any(1), has.argmax(1) + 1, 0), count, draw)
    parts = np.array([count, rows - count], float)  # drawn, left
    lacking = has.sum(0)[None] * (parts / rows)[:, None]  # [part, label]
    room, drawn = parts.copy(), np.zeros(rows, bool)
    waiting = np.ones(rows, bool)
    left = has.sum(0)
    while waiting.any():
        label = int(np.where(left > 0, left, rows + 1).argmin()) if left.any() else None
        given = np.flatnonzero(waiting & has[:, label] if label is not None else waiting)
        for row in draw.permutation(given):
            wants = np.zeros(2) if label is None else lacking[:, label]
            part = max((0, 1), key=lambda p: (room[p] >= 1, wants[p], room[p]))
            drawn[row] = part == 0
            room[part] -= 1
            lacking[part] -= has[row]
        waiting[given] = False
        left = left - has[given].sum(0)
    return np.flatnonzero(drawn)


def _of_classes(classes: NDArray[np.int64], count: int, draw: np.random.Generator) -> Rows:
    """Draws rows of exclusive classes, [rows]."""
    shares = np.bincount(classes) * count / max(len(classes), 1)
    quotas = np.floor(shares).astype(int)
    quotas[np.argsort(quotas - shares, kind="stable")[: count - quotas.sum()]] += 1
    drawn = [draw.permutation(np.flatnonzero(classes == k))[:n] for k, n in enumerate(quotas)]
    return np.sort(np.concatenate([np.empty(0, np.int64), *drawn]))
