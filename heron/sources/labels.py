"""Encodes the labels of an array (whole numbers, names, or 0 and 1) in the form of shards."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from heron.base.errors import SourceError, first_few, short_repr
from heron.shards.manifest import Labels
from heron.sources.text import parse_number

LabelKind = Literal["multi_label", "multi_class", "hierarchical", "complementary", "none"]
MinusOne = Literal["unlabelled", "no"]
# What labels and captions are usually called, in lower case.
LABEL_NAMES = frozenset(
    ("labels", "label", "y", "gnd", "gt", "truth", "target", "targets", "class", "classes")
)
CAPTIONS = frozenset(("caption", "captions", "text"))
MAX_LABELS = 1 << 31  # rows times labels, as 0 and 1
MINUS_ONE = (
    "what -1 means: unlabelled: a row has no label if all of its labels are -1; no: the other of "
    "two classes beside 1, or a label that does not apply (default: unlabelled, but labels that "
    "are only -1 and 1 are an error)"
)


def encode_labels(
    array: NDArray[Any],
    where: str,
    kind: LabelKind | None = None,
    names: list[str] | None = None,
    minus_one: MinusOne | None = None,
) -> tuple[Labels, NDArray[Any]]:
    """Returns the description of labels, and their array as `Labels` stores it.

    `array` has whole numbers or strings, [rows] or [rows, labels]; a single column is the same as
    [rows]. The classes are the sorted distinct values; with `names`, they are the numbers 0, 1, ...
    that it names. A `kind` of None is multi_label for two columns or more, multi_class for one.
    Raises SourceError, which says `where`, if there are no labels, or ambiguous ones.
    """
    if array.ndim not in (1, 2) or array.dtype.kind not in "iubUS" or not array.size:
        raise SourceError(
            f"{where} must be integers or names [rows], or 0/1 [rows, labels], got {array.dtype} "
            f"{array.shape}"
        )
    if array.dtype.kind == "S":
        array = _decode(array, where)
    kind = kind or ("multi_label" if array.ndim == 2 and array.shape[1] > 1 else "multi_class")
    if kind == "multi_class" and array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if kind in ("multi_label", "complementary"):
        return _encode_binary(array.reshape(len(array), -1), where, kind, names, minus_one)
    if (kind == "hierarchical") != (array.ndim == 2):
        raise SourceError(
            f"{where} must be [rows, levels] for hierarchical labels and [rows] for classes, got "
            f"{array.dtype} {array.shape}; see --label-kind"
        )
    columns = list(array.reshape(len(array), -1).T)
    if array.dtype.kind != "U":
        _check_minus_one(array, where, minus_one)
    levels = []
    for i, column in enumerate(columns):
        level_names = names if i == len(columns) - 1 else None
        level, columns[i] = _encode_classes(column, where, level_names, minus_one)
        levels.append(level)
    if kind == "hierarchical":
        targets = np.stack(columns, 1)
        if len(bad := np.flatnonzero((targets == -1).any(1) & (targets >= 0).any(1))):
            raise SourceError(
                f"{where}: label of row {bad[0]} is -1, but must be a class number from 0 on, or "
                "-1 in all of a row that has no label"
            )
        return Labels(kind=kind, names=levels[-1], levels=levels), targets
    return Labels(kind="multi_class", names=levels[0]), columns[0]


def encode_sets(
    rows: list[list[Any]], names: list[str] | None, where: str, minus_one: MinusOne | None
) -> tuple[Labels, NDArray[np.uint8]]:
    """Encodes lists of names, of class numbers, or of 0 and 1, as 0 or 1 for each label."""
    flat = [value for values in rows for value in values]
    types = {type(value) for value in flat}
    if not types or not (types <= {int, bool} or types == {str}):
        raise SourceError(
            f"{where}: lists must have class numbers or names, got {short_repr(rows[0])}"
        )
    lengths = {len(values) for values in rows}
    repeated = any(len(set(values)) < len(values) for values in rows)
    if names is None and repeated and len(lengths) == 1 and set(flat) <= {-1, 0, 1}:
        return encode_labels(np.array(rows, int), where, "multi_label", None, minus_one)
    classes: list[Any] = sorted(set(flat)) if names is None else list(range(len(names)))
    if types == {str} and names is not None:
        classes = names
    positions = {value: position for position, value in enumerate(classes)}
    if unknown := [value for value in flat if value not in positions]:
        raise SourceError(
            f"{where}: {short_repr(unknown[0])} is not one of the {len(classes)} classes; fill "
            "the row, or drop it first"
        )
    if len(rows) * len(classes) > MAX_LABELS:
        raise SourceError(
            f"{where}: {len(classes):,} labels of {len(rows):,} rows, and the limit is "
            f"{MAX_LABELS:,} in all; these are not labels: use another column"
        )
    array = np.zeros((len(rows), len(classes)), np.uint8)
    for row, values in zip(array, rows, strict=True):
        row[[positions[value] for value in values]] = 1
    return Labels(kind="multi_label", names=names or list(map(str, classes))), array


def encode_columns(
    texts: list[list[str]],
    titles: list[str],
    files: str,
    kind: Literal["multi_label", "hierarchical"],
) -> tuple[Labels, NDArray[Any]]:
    """Encodes columns of texts: one of classes, or several of 0 and 1, or of levels."""
    if len(texts) == 1:
        names, classes = classes_of(texts[0], files)
        return Labels(kind="multi_class", names=names), classes
    where = f"{files}: labels"
    if kind == "hierarchical":
        return encode_labels(np.array(texts).T, f"{where} {first_few(titles)}", kind)
    values = [[parse_number(cell) for cell in cells] for cells in texts]
    for title, cells, numbers in zip(titles, texts, values, strict=True):
        if bad := [c for c, n in zip(cells, numbers, strict=True) if n not in (-1, 0, 1)]:
            raise SourceError(
                f"{files}: label {title} is {bad[0]!r} in a row; several label columns must "
                "be 0 or 1; use --label-kind hierarchical if they are levels"
            )
    array = np.array(values, float).astype(int).T
    minus_one: MinusOne | None = "no" if (array == -1).any() else None
    return encode_labels(array, where, kind, titles, minus_one)


def classes_of(texts: list[str], where: str) -> tuple[list[str], NDArray[np.int64]]:
    """Returns the distinct texts, sorted as numbers if all are, and the class of each text.

    Raises SourceError where two of them are one number.
    """
    names = sorted(set(texts))
    values = {name: parse_number(name) for name in names}
    if None not in values.values():
        names.sort(key=lambda name: values[name] or 0.0)
        for a, b in pairwise(names):
            if values[a] == values[b]:
                raise SourceError(
                    f"{where}: classes {a!r} and {b!r} are the same number in two spellings; "
                    "spell each class in one way first"
                )
    numbers = {name: number for number, name in enumerate(names)}
    return names, np.array([numbers[text] for text in texts], np.int64)


def _encode_classes(
    column: NDArray[Any], where: str, names: list[str] | None, minus_one: MinusOne | None
) -> tuple[list[str], NDArray[np.int64]]:
    if column.dtype.kind == "U":
        texts = column.tolist()
        if "" in texts:
            raise SourceError(f"{where}, row {texts.index('')} is empty; fill it, or drop the row")
        if names is None:
            return classes_of(texts, where)
        if unknown := sorted(set(texts) - set(names)):
            raise SourceError(
                f"{where}: {short_repr(unknown[0])} is not one of the names; add it to them"
            )
        return names, np.array([names.index(text) for text in texts], np.int64)
    column = column.astype(np.int64)
    labelled = column != -1 if minus_one != "no" else np.ones(len(column), bool)
    bad = labelled & (column < (-1 if minus_one == "no" else 0))
    if names is not None:
        bad |= labelled & ((column < 0) | (column >= len(names)))
    if bad.any():
        row = int(bad.argmax())
        valid = "from 0 on" if names is None else f"from 0 to {len(names) - 1}"
        raise SourceError(
            f"{where}: label of row {row} must be a class number {valid}, or -1 in all of a row "
            f"that has no label, got {column[row]}; see --label-names and --minus-one"
        )
    if names is not None:
        return names, np.where(labelled, column, -1)
    values = np.unique(column[labelled])
    classes = np.where(labelled, np.searchsorted(values, column), -1)
    return [str(value) for value in values] or ["0"], classes


def _encode_binary(
    array: NDArray[Any],
    where: str,
    kind: Literal["multi_label", "complementary"],
    names: list[str] | None,
    minus_one: MinusOne | None,
) -> tuple[Labels, NDArray[np.uint8]]:
    if array.dtype.kind == "U":
        raise SourceError(
            f"{where}: {kind} labels must be 0/1, got {array.dtype} {array.shape}; see --label-kind"
        )
    unlabelled = (array == -1).all(1) | (array == 255).all(1)
    if minus_one == "no":
        array = np.where(np.isin(array, (-1, 1)), array == 1, 2)
        unlabelled = np.zeros(len(array), bool)
    else:
        _check_minus_one(array, where, minus_one)
    if len(bad := np.argwhere(((array < 0) | (array > 1)) & ~unlabelled[:, None])):
        row, column = bad[0].tolist()
        expected = "0 or 1, or -1 in all of a row that has no label; see --minus-one"
        if minus_one == "no":
            expected = "-1 or 1, because of --minus-one no"
        value = "neither" if minus_one == "no" else array[row, column]
        raise SourceError(f"{where}: label of row {row} must be {expected}, got {value}")
    targets = np.where(unlabelled[:, None], 255, array).astype(np.uint8)
    labels = Labels(kind=kind, names=names or [str(n) for n in range(array.shape[1])])
    if len(labels.names) != array.shape[1]:
        raise SourceError(
            f"{where}: {array.shape[1]} labels but {len(labels.names)} names; see --label-names"
        )
    return labels, targets


def _check_minus_one(array: NDArray[Any], where: str, minus_one: MinusOne | None) -> None:
    """Refuses labels of -1 and 1 alone where no option says what -1 states."""
    if minus_one is None and set(np.unique(array).tolist()) == {-1, 1}:
        raise SourceError(
            f"{where}: labels are only -1 and 1, and -1 may mean two things: use --minus-one no "
            "if it is the other class, or a label that does not apply, and --minus-one "
            "unlabelled if such rows have no label"
        )


def _decode(array: NDArray[np.bytes_], where: str) -> NDArray[np.str_]:
    try:
        return np.char.decode(array, "utf-8")
    except UnicodeDecodeError:
        raise SourceError(f"{where}: names are not UTF-8; write them as strings") from None


def with_unknown(
    values: NDArray[Any], names: Sequence[str], where: str
) -> tuple[NDArray[np.uint8], Labels]:
    """Converts multi-label rows, single labels of which may be unknown, to their stored form.

    `values` [rows, labels] are 0 or 1, or NaN, -1 or 255 where unknown, which is stored as 255.
    Raises SourceError, which says `where`, for other values, or unless each name has a column.
    """
    if values.shape[1:] != (len(names),):
        raise SourceError(
            f"{where} must have {len(names)} columns, one per label, got {values.dtype} "
            f"{values.shape}"
        )
    with np.errstate(invalid="ignore"):
        unknown = np.isnan(values) | (values == -1) | (values == 255)
    if len(bad := np.argwhere(~(unknown | (values == 0) | (values == 1)))):
        row, column = bad[0].tolist()
        raise SourceError(
            f"{where}: label {names[column]!r} of row {row} must be 0 or 1, or NaN, -1 or 255 if "
            f"unknown, got {values[row, column]}"
        )
    stored = np.where(unknown, 255, np.where(unknown, 0, values)).astype(np.uint8)
    return stored, Labels(kind="multi_label", names=list(names), unknown="allow")
