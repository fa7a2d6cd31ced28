"""Named arrays: the base class that decides which are views, labels and splits, and checks them."""

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from heron.base.dotted import suggest, without_case
from heron.base.errors import SourceError
from heron.shards.manifest import Labels
from heron.sources.base import SINGLE_SPLIT, Column, FileSource, Loaded, vectors
from heron.sources.labels import (
    LABEL_NAMES,
    MINUS_ONE,
    LabelKind,
    MinusOne,
    encode_labels,
    with_unknown,
)
from heron.sources.leaks import KEEP

LABELS = "labels"
SPLIT = "split"  # the array that names the split of each row
CHANNEL_COUNTS = 1, 3  # numbers of channels that are not taken for a height or a width
NUMBERS = "fiub"  # kinds of dtypes
WHOLE_NUMBERS = "iub"
PICTURE_AXES = 3, 4  # of uint8
VIEWS = "save numbers as [rows, width], or pictures as uint8, which views are"
WHOLE_LABELS = (
    "labels must be integers; if single labels of a row are unknown: --unknown allow; a class "
    "that is unknown is -1"
)


class NamedArrays(FileSource):
    """Base class of sources of named arrays: each is used, or named by `ignore`.

    A subclass defines `names`, `array` and `where`.
    """

    left_out: ClassVar[tuple[str, ...]] = ("missing", "unknown", "keep")

    view_names: list[str] | None = Field(
        None, description="the arrays that are views (default: all that can be)"
    )
    labels_name: str = Field(
        LABELS,
        description="the array of labels (default: labels, or the only one called y, gnd, truth or "
        "alike); without it no row has a label",
    )
    label_kind: LabelKind | None = Field(
        None,
        description="what a label is (default: multi_label of several columns, multi_class of one)",
    )
    label_names: list[str] | None = Field(
        None,
        description="names of the labels, or of the classes 0, 1, ... (default: the values)",
    )
    minus_one: MinusOne | None = Field(None, description=MINUS_ONE)
    channels: Literal["first", "last"] | None = Field(
        None,
        description="where uint8 arrays in four dimensions have the channels (default: on the one "
        "axis that has 1 or 3, the second or the last)",
    )
    ignore: list[str] = Field([], description="arrays that are neither views nor labels nor split")
    missing: Literal["refuse", "allow"] = Field(
        "refuse", description="whether rows may lack a view: NaN in all of its columns"
    )
    unknown: Literal["refuse", "allow"] = Field(
        "refuse", description="whether single labels may be unknown: NaN, -1 or 255"
    )

    keep: list[str] = Field([], description=KEEP)

    @property
    @abstractmethod
    def names(self) -> Sequence[str]:
        """The names of all arrays."""

    @abstractmethod
    def array(self, name: str) -> NDArray[Any]:
        """Returns the array of this name, [rows, ...]."""

    @abstractmethod
    def where(self, name: str) -> str:
        """Returns the name of the file that an array is in."""

    @cached_property
    def label_array(self) -> str:
        """The name of the array of labels, which may be of no array.

        Where nothing is asked for, it is the one array with a usual name, in upper or lower case.
        """
        default = type(self).model_fields["labels_name"].default
        if self.labels_name != default or default in self.names or self.label_kind == "none":
            return without_case(self.labels_name, self.names)
        views = {*(self.view_names or ()), *self.ignore}
        found = [n for n in self.names if n.lower() in LABEL_NAMES and n not in views]
        if len(found) > 1:  # a list of class names is not as long as the views
            ends = {end for n in self.names if n not in found for end in self.shape(n)}
            found = [n for n in found if not ends or ends & {*self.shape(n)}] or found
        if len(found) > 1:
            raise SourceError(
                f"{', '.join(path.name for path in self.files)}: {' and '.join(found)} may both "
                f"be the labels; choose with --labels-name {found[0]}, and drop the other with "
                f"--ignore {found[1]}"
            )
        return found[0] if found else self.labels_name

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of an array as it is stored."""
        return self.array(name).shape

    @cached_property
    def names_array(self) -> str | None:
        """The one array of texts that are fewer than the labels: it names their classes."""
        label = self.label_array
        if self.label_names or self.label_kind == "none" or label not in self.names:
            return None
        others = {label, SPLIT, *self.ignore, *(self.view_names or ())}
        found = [name for name in self.names if name not in others and self._is_names(name)]
        return found[0] if len(found) == 1 else None

    def _is_names(self, name: str) -> bool:
        array, labels = self.array(name), self.array(self.label_array)
        if array.dtype.kind != "U" or array.ndim != 1 or labels.dtype.kind not in NUMBERS:
            return False
        if labels.ndim == 2 and labels.shape[1] > 1:
            return bool(len(array) == labels.shape[1])
        labels = np.asarray(labels)
        least, most = labels.min(initial=0), labels.max(initial=0)
        counted_from = 0 if 0 in labels else 1  # where none has the first class, some have the last
        return len(array) < len(labels) and least >= 0 and len(array) == most + 1 - counted_from

    def load(self) -> Loaded:
        """Checks the shapes of the views, and reads the labels and the splits."""
        titles = ", ".join(path.name for path in self.files)
        requested = [*(self.view_names or ()), *self.ignore]
        default = type(self).model_fields["labels_name"].default
        if self.label_kind != "none" and (self.label_array, self.label_kind) != (default, None):
            requested.append(self.label_array)
        if unknown := [name for name in requested if name not in self.names]:
            raise SourceError(
                f"{titles}: no array {unknown[0]!r}, only {', '.join(self.names)}; "
                f"{suggest(unknown[0], list(self.names))}"
            )
        not_views = {self.label_array, SPLIT, *self.ignore, *filter(None, [self.names_array])}
        names = self.view_names or [
            name for name in self.names if name not in not_views and self._can_be_view(name)
        ]
        self._check_used(titles, names, not_views)
        labels, targets = self._labels()
        split = self._split()
        views = {name: self._column(name) for name in names}
        conversions = [line for line in map(self._describe_conversion, names) if line]
        if self.label_array != self.labels_name:
            conversions.insert(0, f"{self.label_array!r} has the labels")
        if self.names_array:
            conversions.insert(0, f"{self.names_array!r} names the classes")
        lengths = {name: column.shape[0] for name, column in views.items()}
        lengths |= {} if targets is None else {self.label_array: len(targets)}
        lengths |= {} if split is None else {SPLIT: len(split)}
        first = names[0] if targets is None else self.label_array
        rows = lengths[first]
        other = [name for name, length in lengths.items() if length != rows]
        for name, length in lengths.items():
            if length != rows:
                raise SourceError(
                    f"{self.where(name)}: {name!r} has {length} rows but {first!r} has {rows}; "
                    f"every array must have the same rows; {self._ignoring(other)}"
                )
        split_names = [] if split is None else dict.fromkeys(split.tolist())
        return Loaded(
            views=views,
            targets=np.full(rows, -1) if targets is None else targets,
            labels=labels,
            splits={s: np.flatnonzero(split == s) for s in split_names}
            or {SINGLE_SPLIT: range(rows)},
            warning="; ".join(conversions),
        )

    def _check_used(self, titles: str, views: list[str], not_views: set[str]) -> None:
        """Refuses unused arrays, and arrays that may be labels where no labels are named."""
        unused = [name for name in self.names if name not in {*views, *not_views}]
        maybe_labels = unused if self.view_names else [*unused, *filter(self._is_integral, views)]
        if maybe_labels and self.label_array not in self.names and self.label_kind is None:
            first = min(maybe_labels, key=lambda name: self.array(name)[:1].size)  # the narrowest
            raise SourceError(
                f"{titles}: no array {self.labels_name!r}, but {first!r}, which may be the labels; "
                f"use --labels-name {first} if it is, and --label-kind none if there are none"
            )
        if unused:
            array = self.array(unused[0])
            remedy = self._ignoring(unused) if views else VIEWS
            if self._can_be_view(unused[0]):
                remedy = f"add it to --view-names, or {remedy}"
            raise SourceError(
                f"{titles}: {unused[0]!r} is {array.dtype} {array.shape}, and neither a view nor "
                f"labels nor split; {remedy}"
            )
        if not views:
            raise SourceError(f"{titles}: no array is left for a view; {VIEWS}")

    def _ignoring(self, names: Sequence[str]) -> str:
        """Says how not to use some arrays."""
        return f"drop what is not used with --ignore {' '.join([*self.ignore, *names])}"

    def _is_integral(self, name: str) -> bool:
        """Returns whether an array has whole numbers, and does not hold pictures."""
        return self.array(name).dtype.kind in WHOLE_NUMBERS and not self._is_pictures(name)

    def _is_pictures(self, name: str) -> bool:
        array = self.array(name)
        return array.dtype == np.uint8 and array.ndim in PICTURE_AXES

    def _can_be_view(self, name: str) -> bool:
        array = self.array(name)
        return self._is_pictures(name) or (array.ndim == 2 and array.dtype.kind in NUMBERS)

    def _describe_conversion(self, name: str) -> str:
        """Returns how a view is converted before it is stored; "" if it is not."""
        array = self.array(name)
        if self._is_pictures(name):
            moved = self._channels_first(name)
            return f"view {name!r} has its channels moved last" if moved else ""
        if self._is_integral(name):
            return f"view {name!r} is {array.dtype}, and stored as vectors of float32"
        return ""

    def _column(self, name: str) -> Column:
        array, pictures = self.array(name), self._is_pictures(name)
        if not self._can_be_view(name) or 0 in array.shape:
            raise SourceError(
                f"{self.where(name)}: view {name!r} must be numbers [rows, width], or uint8 "
                f"[rows, height, width, channels], got {array.dtype} {array.shape}"
            )
        if not pictures:
            where = f"{self.where(name)}: view {name!r}"
            allowed: Literal["allow"] | None = "allow" if self.missing == "allow" else None
            remedy = "fill, scale or drop it first"
            if not allowed and not self._is_integral(name):
                remedy += ", or `--missing allow` rows that are NaN throughout"
            return vectors(array.shape, lambda rows: self.array(name)[rows], where, remedy, allowed)
        channels_first = self._channels_first(name)

        def pixels(rows: NDArray[np.int64] | slice) -> NDArray[np.uint8]:
            stored = self.array(name)[rows]
            stored = np.moveaxis(stored, 1, 3) if channels_first else stored
            return stored if stored.ndim == 4 else stored[..., None]

        shape = (len(array), *pixels(slice(1)).shape[1:])
        return Column(shape, lambda rows: np.ascontiguousarray(pixels(rows)))

    def _channels_first(self, name: str) -> bool:
        """Returns whether the axis of channels comes before height and width."""
        array = self.array(name)
        if array.ndim == 3:
            return False
        first, last = array.shape[1] in CHANNEL_COUNTS, array.shape[3] in CHANNEL_COUNTS
        if self.channels is None and first == last:
            raise SourceError(
                f"{self.where(name)}: view {name!r} is {array.dtype} {array.shape}, without 1 or "
                "3 channels on either the second axis or the last; use --channels last if it is "
                "[rows, height, width, channels], and --channels first if it is [rows, channels, "
                "height, width]"
            )
        return self.channels == "first" if self.channels else first

    def _split(self) -> NDArray[np.str_] | None:
        if SPLIT not in self.names or SPLIT in self.ignore:
            return None
        split = np.array(self.array(SPLIT))
        if split.dtype.kind != "U" or split.ndim != 1:
            raise SourceError(
                f"{self.where(SPLIT)}: {SPLIT!r} must be strings [rows], got {split.dtype} "
                f"{split.shape}; {self._ignoring([SPLIT])}"
            )
        return split

    def _labels(self) -> tuple[Labels, NDArray[Any] | None]:
        name = self.label_array
        if self.label_kind == "none" or name not in self.names:
            return Labels(kind="none", names=self.label_names or []), None
        array = np.array(self.array(name))
        where, names = f"{self.where(name)}: {name!r}", self.label_names
        if self.names_array:
            names = [text.strip() for text in self.array(self.names_array).tolist()]
            if array.size == len(array) and 0 not in array:
                array = array - 1  # classes are numbered from 1
        if self.unknown == "allow":
            multi_label = array.ndim == 2 and self.label_kind in (None, "multi_label")
            if not multi_label or array.dtype.kind not in NUMBERS or not array.size:
                raise SourceError(
                    f"{where} must be numbers [rows, labels], because single labels may be "
                    f"unknown, got {array.dtype} {array.shape}; a class that is unknown is -1, "
                    "without --unknown"
                )
            names = names or [str(number) for number in range(array.shape[1])]
            targets, labels = with_unknown(array, names, where)
            return labels, targets
        if array.dtype.kind == "f" and len(bad := np.argwhere(np.isnan(array))):
            raise SourceError(f"{where}: label of row {bad[0][0]} is nan; {WHOLE_LABELS}")
        return encode_labels(array, where, self.label_kind, names, self.minus_one)
