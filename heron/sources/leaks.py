"""Columns that give the label away, or only tell rows apart: no model should see them unasked."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heron.base.errors import SourceError, first_few
from heron.shards.manifest import Labels

SAMPLE = 2000  # rows that clear most columns
ROWS_PER_VALUE = 5  # fewer agree by chance
KEEP = "columns that are kept although they give a label away or number the rows, as VIEW:COLUMN"
LEAKS = "leaks"  # all of them, for an option that leaves out
MAX_SHOWN = 8  # columns that a message names one by one
# Names of columns that only tell rows apart, the empty one and those of pandas among them.
KEYS = re.compile(
    r"(?i:|unnamed: ?\d+|level_\d+|(.*[\s_.-])?(id|idx|uuid|guid|rowid)|(primary|row|sample|record"
    r"|item|data)?[\s_.-]*(index|key)|row([\s_.-]*(number|num|nr|no|names?))?)|.*[a-z](Id|ID)|__.*__"
)


def names_keys(title: str) -> bool:
    """Returns whether a column is called id, index, key or alike, in any case, or not at all."""
    return KEYS.fullmatch(title.strip()) is not None


def is_kept(view: str, title: str, keep: Sequence[str]) -> bool:
    """Returns whether a column is one of those to keep: VIEW:COLUMN, or a pattern with * of it."""
    name = f"{view}:{title}"
    return any(name == kept or fnmatchcase(name, kept) for kept in keep)


def find_leaks(
    views: Mapping[str, Any],
    targets: NDArray[Any],
    labels: Labels,
    names: Mapping[str, Sequence[str]],
    keep: Sequence[str],
) -> dict[tuple[str, int], str]:
    """Returns what a column gives away, by its view and number: it equals a label, or the class.

    Such a column has few values, each of which stands for one class, or for one state of a label,
    in five rows or more. Continuous numbers and keys never are one, and neither is a feature that
    errs in a single row.

    Args:
        views: arrays, or what returns rows of these numbers; only [rows, width] is looked at.
        targets: the labels, in the form that `labels` describes.
        labels: the kind and names of the labels.
        names: of the columns, by view; without them a column is named by its number.
        keep: columns that are meant, as `VIEW:COLUMN`, in which * stands for anything.
    """
    known, found = np.flatnonzero(labels.is_labelled(targets)), dict[tuple[str, int], str]()
    if labels.kind in ("none", "complementary") or not len(known):
        return found
    states = targets[known].reshape(len(known), -1)
    for view, column, values in _few_valued(views, known, 2 * int(states.max(initial=1)) + 2):
        if is_kept(view, _title(names, view, column), keep):
            continue
        for level, state in enumerate(states.T):
            if label := _given_away(values, state, labels, level):
                found.setdefault((view, column), label)
    return found


def _title(names: Mapping[str, Sequence[str]], view: str, column: int) -> str:
    return names[view][column] if view in names else str(column)


def refuse_leaks(
    views: Mapping[str, Any],
    targets: NDArray[Any],
    labels: Labels,
    names: Mapping[str, Sequence[str]],
    keep: Sequence[str],
    ignore: str = "",
) -> None:
    """Raises a SourceError that names every column that `find_leaks` finds, and what to do.

    `ignore` is the option of the source that leaves columns out, if it has one.
    """
    leaks = find_leaks(views, targets, labels, names, keep)
    if not leaks:
        return
    found = {f"{view}:{_title(names, view, n)}": label for (view, n), label in leaks.items()}
    given = {label: [n for n, of in found.items() if of == label] for label in found.values()}
    told = [f"{first_few(n)} give{'s' * (len(n) == 1)} {of} away" for of, n in given.items()]
    if len(found) == 1:
        (view, column), label = next(iter(leaks.items()))
        told = [f"view {view!r}, column {_title(names, view, column)!r}: it gives {label} away"]
    rows = len(np.flatnonzero(labels.is_labelled(targets)))
    kept, left = shlex.join(found), shlex.join(found)
    if len(found) > MAX_SHOWN:
        kept, left = shlex.join(f"{view}:*" for view in dict.fromkeys(v for v, _ in leaks)), LEAKS
    remove = f"leave out with {ignore} {left}" if ignore else "remove"
    raise SourceError(
        f"{first_few(told)} in all of {rows:,} labelled rows; {remove} what is no feature or, if "
        f"it is meant to be one, use --keep {kept}"
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
