"""Labels that lie in the members of a tar: numbers, names, fields of JSON, arrays."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shards.errors import ShardError, SourceError
from shards.index import array_at
from shards.manifest import Labels

NUMBERS = ("cls", "cls2", "class", "index", "inx", "id")  # WebDataset's suffixes of numbers
TEXTS = ("txt", "text")
JSONS = ("json", "jsn")
EXPECTED = (
    f"{', '.join(NUMBERS)} (class numbers), {', '.join(TEXTS)} (class names), json:FIELD or npy, "
    "or one of them with a name before it, such as label.txt"
)
MANY = 100_000  # classes; more are captions, or numbers of something else


class Unlabelled(ValueError):
    """A member says, in its way, that its sample has no label; the text says how."""


class Label(NamedTuple):
    """The label of one sample as it is stated: in numbers, or in names."""

    kind: Literal["class number", "class name", "vector of 0 and 1", "list of names"]
    numbers: tuple[int, ...] = ()
    names: tuple[str, ...] = ()


class Annotation:
    """Where the label of a sample lies, as `--label` says: SUFFIX, or SUFFIX:FIELD of JSON."""

    def __init__(self, text: str) -> None:
        """Take the text of the option; SourceError where no label is read from such a member."""
        suffix, colon, self.field = text.partition(":")
        self.suffix = suffix.lower()
        self._format = self.suffix.rpartition(".")[2]
        if self._format not in (*NUMBERS, *TEXTS, *JSONS, "npy"):
            raise SourceError(f"label: no label can be read from {text!r}; expected {EXPECTED}")
        if (self._format in JSONS) != bool(self.field) or (colon and not self.field):
            raise SourceError(
                f"label: {text!r}; expected a field with json, and with nothing else: {EXPECTED}"
            )

    def read(self, payload: bytes) -> Label:
        """The label in the bytes of a member.

        Raises:
            Unlabelled: it is -1, an array of 255, a field that is null or not there.
            ValueError: it is no label; the text says what was found and expected.
        """
        if self._format == "npy":
            return _of_array(payload)
        if self._format in JSONS:
            return self._of_json(payload)
        try:
            text = payload.decode("utf-8").strip()
        except UnicodeDecodeError:
            raise ValueError(f"is {_short(payload)}; expected UTF-8") from None
        if self._format in NUMBERS:
            if not (text.isascii() and text.removeprefix("-").isdecimal()):
                raise ValueError(f"is {_short(payload)}; expected a class number")
            return _number(int(text))
        if not text:
            raise ValueError("is empty; expected a class name")
        return Label("class name", names=(text,))

    def _of_json(self, payload: bytes) -> Label:
        try:
            fields = json.loads(payload)
        except (ValueError, RecursionError):
            raise ValueError(f"is {_short(payload)}; expected JSON") from None
        if not isinstance(fields, dict):
            raise ValueError(f"is {_short(fields)}; expected fields")
        value = fields.get(self.field)
        if value is None:
            raise Unlabelled(f"has no field {self.field!r}; found {', '.join(fields) or 'none'}")
        if type(value) is int:
            return _number(value)
        if isinstance(value, str) and value.strip():
            return Label("class name", names=(value.strip(),))
        if isinstance(value, list):
            if value and all(type(item) is int and item in (0, 1) for item in value):
                return Label("vector of 0 and 1", numbers=tuple(value))
            if all(isinstance(item, str) and item for item in value):
                return Label("list of names", names=tuple(value))
        raise ValueError(
            f"has {self.field!r} = {_short(value)}; expected a class number, a class name, a list "
            "of 0 and 1, or a list of names"
        )


def _number(value: int) -> Label:
    """A class number; -1 is what test sets without labels state."""
    if value < 0:
        raise (Unlabelled if value == -1 else ValueError)(f"is {value}; expected a class number")
    return Label("class number", numbers=(value,))


def _of_array(payload: bytes) -> Label:
    """One integer is a class number; several values are a vector of 0 and 1, one a class."""
    try:
        array = array_at(np.frombuffer(payload, np.uint8), 0, len(payload), "npy")
    except ShardError as fault:
        raise ValueError(f"is no array of numbers ({fault})") from None
    if array.ndim == 2 and len(array) == 1:  # a block of one row, as ours are
        array = array[0]
    if array.size == 1 and array.ndim < 2 and array.dtype.kind in "iu":
        return _number(int(array.reshape(())))
    if array.ndim == 1 and array.size and array.dtype.kind in "biuf":
        if (array == 255).all():
            raise Unlabelled("is 255 throughout")
        if np.isin(array, (0, 1)).all():
            return Label("vector of 0 and 1", numbers=tuple(array.astype(int).tolist()))
    raise ValueError(
        f"is {array.dtype} {array.shape}: {_short(array.ravel()[:8].tolist())}; expected a class "
        "number, or a vector of 0 and 1"
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def encode(
    keys: Sequence[Sequence[str]],
    shards: Sequence[Sequence[Label | None]],
    given: list[str] | None,
) -> tuple[Labels, list[NDArray[Any]]]:
    """The labels of a set, and their arrays, a shard each.

    Names that labels state are sorted, numbers name themselves; `given` are other names, in the
    order of the numbers.

    Raises:
        SourceError: labels are of two kinds, do not fit the names, or are no classes; names a
            sample.
    """
    stated = {
        key: label
        for names, labels in zip(keys, shards, strict=True)
        for key, label in zip(names, labels, strict=True)
        if label is not None
    }
    if not stated:
        return Labels(kind="none", names=[]), [np.full(len(shard), -1) for shard in shards]
    first, label = next(iter(stated.items()))
    for key, other in stated.items():
        if other.kind != label.kind:
            raise SourceError(
                f"label: sample {first} has a {label.kind}, sample {key} a {other.kind}; expected "
                "one kind for all"
            )
    named = label.kind in ("class name", "list of names")
    names = _named(stated, given) if named else _numbered(stated, given)
    if len(names) > MANY:
        raise SourceError(
            f"label: {len(names):,} names in {len(stated):,} labels; expected at most {MANY:,}; "
            "these are no classes: give another --label"
        )
    column = {name: number for number, name in enumerate(names)}
    if label.kind in ("class number", "class name"):
        found = Labels(kind="multi_class", names=names)
        return found, [np.array([_class(one, column) for one in s], np.int64) for s in shards]
    return Labels(kind="multi_label", names=names), [_vectors(s, column) for s in shards]


def _named(stated: dict[str, Label], given: list[str] | None) -> list[str]:
    """The names of labels that state names."""
    if given is None:
        given = sorted({name for label in stated.values() for name in label.names})
        if not given:
            raise SourceError("label: every list is empty; expected names; leave --label out")
        return given
    known = set(given)
    for key, label in stated.items():
        if missing := [name for name in label.names if name not in known]:
            raise SourceError(
                f"label_names: no line for {missing[0]!r} of sample {key}; expected all names "
                "that labels state; add it"
            )
    return given


def _numbered(stated: dict[str, Label], given: list[str] | None) -> list[str]:
    """The names of labels that state numbers."""
    first, vector = next(iter(stated.items()))
    if vector.kind == "vector of 0 and 1":
        count = len(vector.numbers)
        for key, label in stated.items():
            if len(label.numbers) != count:
                raise SourceError(
                    f"label: sample {first} has {count} values of 0 and 1, sample {key} "
                    f"{len(label.numbers)}; expected as many for all"
                )
        fits = given is None or len(given) == count
    else:
        first = max(stated, key=lambda key: stated[key].numbers)
        count = 1 + stated[first].numbers[0]
        fits = count <= (MANY if given is None else len(given))
    if not fits:
        found = "no names" if given is None else f"{len(given)} names"
        raise SourceError(
            f"label_names: {found}, but the label of sample {first} is one of {count:,} classes; "
            "expected a name for each"
        )
    return [str(number) for number in range(count)] if given is None else given


def _class(label: Label | None, column: dict[str, int]) -> int:
    if label is None:
        return -1
    return column[label.names[0]] if label.names else label.numbers[0]


def _vectors(labels: Sequence[Label | None], column: dict[str, int]) -> NDArray[np.uint8]:
    """One row of 0 and 1 a sample, of 255 where it is unlabelled."""
    rows = np.zeros((len(labels), len(column)), np.uint8)
    for row, label in zip(rows, labels, strict=True):
        if label is None:
            row[:] = 255
        elif label.kind == "vector of 0 and 1":
            row[:] = label.numbers
        else:
            row[[column[name] for name in label.names]] = 1
    return rows
