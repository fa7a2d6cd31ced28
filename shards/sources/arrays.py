"""Arrays of your own: an .npz with any number of views, and labels."""

from __future__ import annotations

import zipfile
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, FilePath

from shards.errors import SourceError
from shards.manifest import Labels, View
from shards.sources.base import Rows, Source


class Arrays(Source):
    """Arrays of your own: an .npz of float arrays [rows, width], one a view, and of labels.

    An array `split` of strings, one a row, parts the rows; without one they are the split `all`.
    """

    name: ClassVar[str] = "arrays"
    examples: ClassVar[str] = (
        "heron shards build arrays --npz mine.npz --view-names audio video --out data/mine"
    )

    npz: FilePath = Field(description="the .npz file, as numpy.savez writes it")
    view_names: list[str] | None = Field(
        None, description="the arrays that are views (default: every 2-D float array)"
    )
    labels_name: str = Field("labels", description="the array of labels")
    label_kind: Literal["multi_label", "multi_class", "hierarchical", "complementary"] | None = (
        Field(
            None,
            description="what a label is (default: multi_label for 0/1 in two dimensions, "
            "multi_class for whole numbers in one)",
        )
    )
    label_names: list[str] | None = Field(
        None, description="names of the labels or classes (default: their numbers)"
    )

    @property
    def dataset(self) -> str:
        """The name of the file."""
        return self.npz.stem

    @property
    def views(self) -> list[View]:
        """The arrays that are views."""
        return [
            View(name=name, kind="vector", shape=array.shape[1:], dtype="float32")
            for name, array in self._views.items()
        ]

    @cached_property
    def labels(self) -> Labels:
        """The kind and names of the labels, inferred where no option gives them."""
        array = self._labels
        kind = self.label_kind or ("multi_class" if array.ndim == 1 else "multi_label")
        levels = None
        if kind == "hierarchical":
            levels = [[str(n) for n in range(int(column.max()) + 1)] for column in array.T]
        count = int(array.max()) + 1 if array.ndim == 1 else array.shape[1]
        default = levels[-1] if levels else [str(n) for n in range(max(1, count))]
        names = self.label_names or default
        if levels:
            levels[-1] = names
        labels = Labels(kind=kind, names=names, levels=levels)
        if (fault := labels.fault(array.astype(labels.dtype), len(array))) is not None:
            raise SourceError(f"{self.npz.name}: {fault}; see --label-kind and --label-names")
        return labels

    @property
    def splits(self) -> dict[str, int]:
        """The splits, in the order in which they first appear."""
        return {split: len(rows) for split, rows in self._rows.items()}

    @property
    def files(self) -> list[Path]:
        """The file of arrays."""
        return [self.npz]

    def read(self, split: str, start: int, stop: int) -> Rows:
        """Rows of a split, in the order of the file."""
        rows = self._rows[split][start:stop]
        views: dict[str, NDArray[Any] | list[bytes]] = {
            name: array[rows] for name, array in self._views.items()
        }
        return Rows(views, self._labels[rows].astype(self.labels.dtype))

    @cached_property
    def _arrays(self) -> dict[str, NDArray[Any]]:
        try:
            with np.load(self.npz, allow_pickle=False) as stored:
                return dict(stored)
        except (ValueError, TypeError, EOFError, zipfile.BadZipFile) as fault:
            reason = (
                "arrays of Python objects are pickles, never decoded"
                if ("allow_pickle" in str(fault) and zipfile.is_zipfile(self.npz))
                else "expected what numpy.savez writes"
            )
            raise SourceError(f"{self.npz.name}: cannot be read: {reason}") from None

    def _array(self, name: str) -> NDArray[Any]:
        if name not in self._arrays:
            raise SourceError(
                f"{self.npz.name}: no array {name!r}; it has {', '.join(self._arrays)}"
            )
        return self._arrays[name]

    @cached_property
    def _views(self) -> dict[str, NDArray[np.float32]]:
        names = self.view_names or [
            name
            for name, array in self._arrays.items()
            if array.ndim == 2 and array.dtype.kind == "f" and name != self.labels_name
        ]
        if not names:
            raise SourceError(f"{self.npz.name}: no 2-D float array; expected one for each view")
        views = {}
        for name in names:
            array = self._array(name)
            if array.ndim != 2 or array.dtype.kind not in "fiub":
                raise SourceError(
                    f"{self.npz.name}: view {name!r} is {array.dtype} {array.shape}; "
                    "expected numbers [rows, width]"
                )
            self._check_length(name, array)
            with np.errstate(over="ignore"):  # what is too large becomes infinite
                views[name] = array.astype(np.float32, copy=False)
            if len(bad := np.argwhere(~np.isfinite(views[name]))):
                row, column = (int(i) for i in bad[0])
                raise SourceError(
                    f"{self.npz.name}: view {name!r}, row {row}, column {column} is "
                    f"{array[row, column]}; expected a finite float32; fill, scale or drop it first"
                )
        return views

    @cached_property
    def _labels(self) -> NDArray[Any]:
        array = self._array(self.labels_name)
        if array.ndim not in (1, 2) or array.dtype.kind not in "iub" or not len(array):
            raise SourceError(
                f"{self.npz.name}: {self.labels_name!r} is {array.dtype} {array.shape}; expected "
                "whole numbers [rows], or 0/1 [rows, labels]"
            )
        multi = array.ndim == 2 and self.label_kind != "hierarchical"
        if len(bad := np.argwhere((array < 0) | (array > 1) if multi else array < 0)):
            at = tuple(int(i) for i in bad[0])
            raise SourceError(
                f"{self.npz.name}: label of row {at[0]} is {array[at]}; expected "
                f"{'0 or 1' if multi else 'a class number from 0 on'}"
            )
        return array

    @cached_property
    def _rows(self) -> dict[str, NDArray[np.int64]]:
        if "split" not in self._arrays:
            return {"all": np.arange(len(self._labels))}
        split = self._arrays["split"]
        if split.dtype.kind != "U" or split.ndim != 1:
            raise SourceError(
                f"{self.npz.name}: 'split' is {split.dtype} {split.shape}; expected strings [rows]"
            )
        self._check_length("split", split)
        return {name: np.flatnonzero(split == name) for name in dict.fromkeys(split.tolist())}

    def _check_length(self, name: str, array: NDArray[Any]) -> None:
        if len(array) != len(self._labels):
            raise SourceError(
                f"{self.npz.name}: {name!r} has {len(array)} rows and {self.labels_name!r} "
                f"{len(self._labels)}; expected the same rows in every array"
            )
