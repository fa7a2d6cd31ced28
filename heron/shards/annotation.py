"""Labels that lie in the members of a tar: numbers, names, fields of JSON, arrays."""

import json
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from heron.base.errors import CONTROL, ShardError, SourceError, short_repr
from heron.shards.index import array_at
from heron.shards.manifest import Labels

NUMBERS = ("cls", "cls2", "class", "index", "inx", "id")  # WebDataset's suffixes for integers
TEXTS = ("txt", "text")
JSONS = ("json", "jsn")
EXPECTED = (
    f"{', '.join(NUMBERS)} (class numbers), {', '.join(TEXTS)} (class names), json:FIELD or npy, "
    "or one of them with a name before it, such as label.txt"
)
FEW_NAMES = 20  # class names that may all differ; more that do look like captions
MAX_CLASSES = 100_000  # more are captions, or numbers of something else


class Unlabelled(ValueError):
    """A member states that its sample has no label; the text says how."""


class Label(NamedTuple):
    """The label of one sample, as its member states it."""

    kind: Literal["class number", "class name", "vector of 0 and 1", "list of names"]
    values: Sequence[int | str]


class Annotation:
    """Where the label of a sample is, as given by `--label`: SUFFIX, or SUFFIX:FIELD of JSON."""

    def __init__(self, text: str, minus_one: Literal["unlabelled", "no"] = "unlabelled") -> None:
        """Parses the option; SourceError where labels cannot be read from such a member.

        With `minus_one` "no", -1 is a class beside 1; in a vector it is a label that does not hold.
        """
        self._signed = minus_one == "no"
        suffix, colon, self.field = text.partition(":")
        self.suffix = suffix.lower()
        self._format = self.suffix.rpartition(".")[2]
        if self._format not in (*NUMBERS, *TEXTS, *JSONS, "npy"):
            raise SourceError(f"label: no label can be read from {text!r}; use {EXPECTED}")
        if (self._format in JSONS) != bool(self.field) or (colon and not self.field):
            raise SourceError(
                f"label: {text!r} must have a field with json, and only with json: {EXPECTED}"
            )

    def read(self, payload: bytes) -> Label:
        """Returns the label in the bytes of a member.

        Raises Unlabelled where it is -1, an array of 255, or a field that is null or missing, and
        ValueError, which states what was found and what is expected, where it is no label.
        """
        if self._format == "npy":
            return _of_array(payload, self._signed)
        if self._format in JSONS:
            return self._of_json(payload)
        try:
            text = payload.decode("utf-8-sig").strip()
        except UnicodeDecodeError:
            raise ValueError(f"must be UTF-8, got {short_repr(payload)}") from None
        if self._format in TEXTS and not text:
            raise ValueError("is empty, but must be a class name")
        if self._format in TEXTS:
            return Label("class name", [text])
        if not (text.isascii() and text.removeprefix("-").isdecimal()):
            raise ValueError(f"must be a class number, got {short_repr(payload)}")
        return _number(int(text), self._signed)

    def _of_json(self, payload: bytes) -> Label:
        try:
            fields = json.loads(payload)
        except (ValueError, RecursionError):
            raise ValueError(f"must be JSON, got {short_repr(payload)}") from None
        if not isinstance(fields, dict):
            raise ValueError(f"must be fields, got {short_repr(fields)}")
        match fields.get(self.field):
            case None:
                names = ", ".join(fields) or "none"
                raise Unlabelled(f"has no field {self.field!r}, only {names}")
            case int(value) if not isinstance(value, bool):
                return _number(value, self._signed)
            case str(value) if value.strip():
                return Label("class name", [value.strip()])
            case [_, *_] as values if all(
                type(item) is int and item in ((-1, 1) if self._signed else (0, 1))
                for item in values
            ):
                return Label("vector of 0 and 1", [max(item, 0) for item in values])
            case [*values] if all(isinstance(item, str) and item for item in values):
                return Label("list of names", values)
            case value:
                raise ValueError(
                    f"has {self.field!r} = {short_repr(value)}, which must be a class number, a "
                    "class name, a list of 0 and 1, or a list of names"
                )


def _number(value: int, signed: bool = False) -> Label:
    """Returns a class number, or with `signed` a class name; else -1 raises Unlabelled."""
    if signed:
        if value not in (-1, 1):
            raise ValueError(f"must be -1 or 1, because of --minus-one no, got {value}")
        return Label("class name", [str(value)])
    if value == -1:
        raise Unlabelled("is -1, not a class number; or use --minus-one no beside labels of 1")
    if value < 0:
        raise ValueError(f"must be a class number, got {value}")
    return Label("class number", [value])


def _of_array(payload: bytes, signed: bool) -> Label:
    """Returns a class number for a single integer, and a vector of 0 and 1 for several values."""
    try:
        array = array_at(np.frombuffer(payload, np.uint8), 0, len(payload), "npy")
    except ShardError as fault:
        raise ValueError(f"is not an array of numbers ({fault})") from None
    if array.ndim == 2 and len(array) == 1:  # a block of one row, as ours are
        array = array[0]
    if array.size == 1 and array.ndim < 2 and array.dtype.kind in "iu":
        return _number(int(array.reshape(())), signed)
    if array.ndim == 1 and array.size and array.dtype.kind in "biuf":
        if (array == 255).all():
            raise Unlabelled("is 255 throughout")
        if np.isin(array, (-1, 1) if signed else (0, 1)).all():
            return Label("vector of 0 and 1", np.maximum(array, 0).astype(int).tolist())
    raise ValueError(
        "must be a class number, or a vector of 0 and 1, or of -1 and 1 with --minus-one no, got "
        f"{array.dtype} {array.shape}: {short_repr(array.ravel()[:8].tolist())}"
    )


def encode_labels(
    keys: Sequence[str], labels: Sequence[Label | None], given_names: list[str] | None
) -> tuple[Labels, NDArray[Any]]:
    """Returns the description of the labels, and their array; a label of None is unlabelled.

    `given_names` are the names of the classes in the order of their numbers; by default, names
    that occur in labels are sorted, and numbers name themselves. Raises SourceError where labels
    are of two kinds, do not fit the names, or are not classes.
    """
    stated = {key: label for key, label in zip(keys, labels, strict=True) if label is not None}
    if not stated:
        return Labels(kind="none", names=[]), np.full(len(labels), -1)
    first, (kind, _) = next(iter(stated.items()))
    for key, label in stated.items():
        if label.kind != kind:
            raise SourceError(
                f"label: sample {first} has a {kind}, but sample {key} a {label.kind}; all labels "
                "must be of one kind"
            )
    has_names = kind in ("class name", "list of names")
    names = (_names_of_texts if has_names else _names_of_numbers)(stated, given_names)
    if (
        kind == "class name"
        and given_names is None
        and len(names) > max(FEW_NAMES, len(stated) // 2)
    ):
        raise SourceError(
            f"label: {len(names):,} names in {len(stated):,} labels, such as "
            f"{short_repr(names[len(names) // 2])}; this looks like text: index it with --text, "
            "with the same value as --label; or name the classes with --label-names"
        )
    if len(names) > MAX_CLASSES:
        raise SourceError(
            f"label: {len(names):,} names in {len(stated):,} labels, and the limit is "
            f"{MAX_CLASSES:,}; these are not classes: use another --label"
        )
    # A class number stands for itself: it is an int, so it is not among the names, which are texts.
    numbers: dict[Any, int] = {name: number for number, name in enumerate(names)}
    if kind.startswith("class"):
        classes = [-1 if x is None else numbers.get(x.values[0], x.values[0]) for x in labels]
        return Labels(kind="multi_class", names=names), np.array(classes, np.int64)
    array = np.full((len(labels), len(names)), 255, np.uint8)
    for row, x in zip(array, labels, strict=True):
        if x is not None and has_names:
            row[:] = 0
            row[[numbers[name] for name in x.values]] = 1
        elif x is not None:
            row[:] = x.values
    return Labels(kind="multi_label", names=names), array


def _names_of_texts(stated: dict[str, Label], given_names: list[str] | None) -> list[str]:
    samples = {str(name): key for key, label in stated.items() for name in label.values}
    if invalid := [name for name in samples if CONTROL.search(name)]:
        raise SourceError(
            f"label: sample {samples[invalid[0]]} has the name {short_repr(invalid[0])}, which "
            "has control characters or byte order marks; rename it"
        )
    if given_names is None and not samples:
        raise SourceError("label: every list is empty; remove --label")
    names = sorted(samples) if given_names is None else given_names
    if unknown := sorted(samples.keys() - set(names)):
        raise SourceError(
            f"label_names: no line for {unknown[0]!r} of sample {samples[unknown[0]]}; add every "
            "name that labels use"
        )
    return names


def _names_of_numbers(stated: dict[str, Label], given_names: list[str] | None) -> list[str]:
    vectors = next(iter(stated.values())).kind == "vector of 0 and 1"
    counts = {key: len(x.values) if vectors else 1 + int(x.values[0]) for key, x in stated.items()}
    least, most = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
    count = counts[most]
    if vectors and counts[least] < count:
        raise SourceError(
            f"label: sample {least} has {counts[least]} values of 0 and 1, but sample {most} has "
            f"{count}; all must have the same number"
        )
    limit = MAX_CLASSES if given_names is None else len(given_names)
    if count > limit or (vectors and given_names is not None and count < limit):
        names = "no names" if given_names is None else f"{limit} names"
        raise SourceError(
            f"label_names: {names}, but the label of sample {most} is one of {count:,} classes; "
            "each needs a name"
        )
    return [str(number) for number in range(count)] if given_names is None else given_names
