"""Columns of views that give the label away, which no model should be shown unasked."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heron.shards.errors import SourceError
from heron.shards.manifest import Labels

SAMPLE = 2000  # rows that clear most columns
ROWS_PER_VALUE = 5  # fewer agree by chance
KEEP = "columns that are kept although they give a label away, as VIEW:COLUMN"


def refuse_leaks(
    views: Mapping[str, Any],
    targets: NDArray[Any],
    labels: Labels,
    names: Mapping[str, Sequence[str]],
    keep: Sequence[str],
) -> None:
    """Raises a SourceError for a column of a view that equals a label, or determines the class.

    Such a column has few values, each of which stands for one class, or for one state of a label,
    in five rows or more. Continuous numbers and keys never are one, and neither is a feature that
    errs in a single row.

    Args:
        views: arrays, or what returns rows of these numbers; only [rows, width] is looked at.
        targets: the labels, in the form that `labels` describes.
        labels: the kind and names of the labels.
        names: of the columns, by view; without them a column is named by its number.
        keep: columns that are meant, as `VIEW:COLUMN`.
    """
    known = np.flatnonzero(labels.is_labelled(targets))
    if labels.kind in ("none", "complementary") or not len(known):
        return
    states = targets[known].reshape(len(known), -1)
    for view, column, values in _few_valued(views, known, 2 * int(states.max(initial=1)) + 2):
        title = names[view][column] if view in names else str(column)
        if f"{view}:{title}" in keep:
            continue
        for level, state in enumerate(states.T):
            if label := _given_away(values, state, labels, level):
                raise SourceError(
                    f"view {view!r}, column {title!r}: it gives {label} away in all of "
                    f"{len(known):,} labelled rows; remove the column or, if it is meant to be a "
                    f"feature, use --keep {view}:{title}"
                )


def _few_valued(
    views: Mapping[str, Any], known: NDArray[np.int64], most: int
) -> Iterator[tuple[str, int, NDArray[Any]]]:
    """Yields the columns with at most `most` values, in each labelled row."""
    sample = known[:: max(1, len(known) // SAMPLE)]
    for view, data in views.items():
        if len(data.shape) != 2 or data.shape[1] < 1:  # pictures, or texts
            continue
        rows = np.asarray(data[sample])
        if rows.dtype.kind not in "fiub":
            continue
        few = [n for n, column in enumerate(rows.T) if len(np.unique(column)) <= most]
        if few:
            whole = np.asarray(data[known])[:, few] if len(sample) < len(known) else rows[:, few]
            yield from ((view, n, values) for n, values in zip(few, whole.T, strict=True))


def _given_away(values: NDArray[Any], state: NDArray[Any], labels: Labels, level: int) -> str:
    """Says what a column gives away of the classes, or of one label, in a column; "" if nothing."""
    distinct, code, counts = np.unique(values, return_inverse=True, return_counts=True)
    if len(distinct) < 2 or len(np.unique(state)) < 2 or counts.min() < ROWS_PER_VALUE:
        return ""
    if labels.kind == "multi_label":
        return f"the label {labels.names[level]!r}" if _determines(code, state) else ""
    names = labels.names if labels.levels is None else labels.levels[level]
    if _determines(code, state) and len(distinct) <= 2 * len(names):
        return "the class"
    for number, name in enumerate(names):  # one of a class's indicators
        is_class = state == number
        enough = min(is_class.sum(), (~is_class).sum()) >= ROWS_PER_VALUE
        if len(distinct) == 2 and enough and _determines(code, is_class):
            return f"the class {name!r}"
    return ""


def _determines(code: NDArray[np.int64], state: NDArray[Any]) -> bool:
    """Returns whether rows with the same code have the same state."""
    first = np.zeros(code.max() + 1, state.dtype)
    first[code] = state
    return bool((first[code] == state).all())
