"""Base classes of data sources, which give the rows of a data set to `heron shards build`."""

import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, ValidationError

from heron.base.errors import CONTROL, SourceError, short_repr
from heron.shards.manifest import KINDS, Labels, View
from heron.shards.source import Rows, Source, rows_with_view
from heron.sources.leaks import refuse_leaks

ROUNDED = "has whole numbers above 16,777,216, which are rounded to float32"
SINGLE_SPLIT = "all"  # the only split of a data set that is not split
Kind = Literal["image", "vector", "text", "graph"]  # of a view
Missing = Literal["allow"] | None  # whether rows may lack a view


def _check_exists(path: Path) -> Path:
    if not path.exists():
        raise ValueError("it does not exist")
    return path


OnError = Annotated[
    Literal["raise", "skip"],
    Field(description="skip leaves out the rows of damaged files, and lists and counts them"),
]
FileOrFolder = Annotated[Path, AfterValidator(_check_exists)]


@dataclass(frozen=True, eq=False)
class Column:
    """All rows of a view, read on demand.

    Attributes:
        shape: (rows, width) of vectors; (rows, height, width, channels) of pictures, with -1 for
            what varies; (rows, -1) of texts; for graphs see `heron.shards.manifest.View`.
        read: returns the rows of the given numbers, in the form that `Rows` describes.
        member: the suffix of the tar member, if not the usual one.
        kind: of the view; None: inferred from `shape`.
        missing: "allow" if rows may lack the view, as in `Rows`.
    """

    shape: tuple[int, ...]
    read: Callable[[NDArray[np.int64]], NDArray[Any] | list[Any]]
    member: str | None = None
    kind: Kind | None = None
    missing: Missing = None

    def __getitem__(self, rows: NDArray[np.int64], /) -> NDArray[Any] | list[Any]:
        """Returns the rows of these numbers."""
        return self.read(rows)


def read_each(read: Callable[[int], bytes | None]) -> Callable[[NDArray[np.int64]], list[Any]]:
    """Returns a `Column.read` that calls `read` row by row; None stands for a row without bytes."""
    return lambda rows: [read(row) for row in rows.tolist()]


def vectors(
    shape: tuple[int, ...],
    read: Callable[[NDArray[np.int64]], NDArray[Any]],
    where: str,
    remedy: str,
    missing: Missing = None,
) -> Column:
    """Returns a column of vectors that are converted to float32, and checked, as they are read.

    Reading raises SourceError where a value is not finite, or is a whole number that float32 cannot
    hold, in a column of whole numbers: pandas stores ids as float64 where one is missing.

    Args:
        shape: (rows, width).
        read: returns rows as they are stored.
        where: names the array in messages.
        remedy: ends the messages.
        missing: "allow": a row may be NaN throughout, and then lacks the view.
    """

    def read_checked(rows: NDArray[np.int64]) -> NDArray[np.float32]:
        return as_float32(read(rows), rows, where, remedy, missing)

    return Column(shape, read_checked, missing=missing)


def as_float32(
    stored: NDArray[Any],
    rows: NDArray[np.int64],
    where: str,
    remedy: str,
    missing: Missing = None,
) -> NDArray[np.float32]:
    """Converts the rows of these numbers, [rows, width]; raises SourceError as `vectors` says."""
    with np.errstate(over="ignore"):  # what is too large becomes infinite
        values = stored.astype(np.float32, copy=False)
    valid, expected = np.isfinite(values), ", which is not a finite float32"
    if missing:
        valid |= ~rows_with_view(values)[:, None]
    if valid.all() and stored.dtype.itemsize > 2:
        valid = holds(values, stored)
        expected = f", which float32 cannot represent; the limit for integers is {1 << 24:,}"
    if len(bad := np.argwhere(~valid)):
        row, column = bad[0].tolist()
        raise SourceError(
            f"{where}, row {rows[row]}, column {column} is {stored[row, column]}{expected}; "
            f"{remedy}"
        )
    return values


def holds(values: NDArray[np.float32], stored: NDArray[Any]) -> NDArray[np.bool_]:
    """Returns where a float32 has the same value, or is a rounded one that is not whole."""
    with np.errstate(invalid="ignore"):
        if stored.dtype.kind != "f":  # a comparison of int64 with float32 would be one of float64
            return np.asarray(values.astype(stored.dtype) == stored)
        counts = (np.abs(stored) < 1 << 53) & (stored == np.floor(stored)) | np.isnan(stored)
    return np.asarray((values == stored) | np.isnan(stored) | ~counts.all(0))


@dataclass(frozen=True, eq=False)
class Loaded:
    """What `FileSource.load` returns: the rows of all files, and the split each belongs to.

    Attributes:
        views: a column, or an array [rows, ...], for each view.
        targets: the labels of all rows, in the form that `labels` describes.
        labels: the kind and names of the labels.
        splits: the numbers of the rows in each split.
        keys: a name for each row where every row is a tar sample of its own.
        dataset: the data set's name, where only its files tell it.
        warning: is logged.
        columns: the names of the columns of a view, by view.
    """

    views: Mapping[str, Column | NDArray[Any]]
    targets: NDArray[Any]
    labels: Labels
    splits: Mapping[str, Sequence[int] | NDArray[np.int64]]
    keys: Sequence[str] | None = None
    dataset: str = ""
    warning: str = ""
    columns: Mapping[str, Sequence[str]] = field(default_factory=dict)


class FileSource(Source):
    """Base class of sources that read files: a subclass sets `name` and defines `load` alone."""

    leaves_out: ClassVar[str] = ""  # the option that leaves columns out, VIEW:COLUMN
    named_by: ClassVar[str] = ""  # the option whose file or folder names the data set

    @property
    def dataset(self) -> str:
        """The name of the source, or that of the file or folder which `named_by` says."""
        if not self.named_by:
            return self.name
        path: Path = getattr(self, self.named_by)
        return path.resolve().name if path.is_dir() else path.stem

    @property
    def files(self) -> list[Path]:
        """The files and folders that the options name, in the order of the options."""
        values = (getattr(self, option) for option in type(self).model_fields)
        lists = (value if isinstance(value, list) else [value] for value in values)
        return [item for items in lists for item in items if isinstance(item, Path)]

    @abstractmethod
    def load(self) -> Loaded:
        """Opens the files; raises SourceError where something is wrong with them."""

    @cached_property
    def loaded(self) -> Loaded:
        """The result of `load`, which is called once in a process."""
        try:
            loaded = self.load()
        except ValidationError as fault:
            raise self.invalid(fault) from None
        for name in loaded.labels.names:
            if CONTROL.search(name):
                raise SourceError(
                    f"{', '.join(path.name for path in self.files)}: a label has the name "
                    f"{short_repr(name)}, with a control character or byte order mark; rename it"
                )
        return loaded

    @property
    def views(self) -> list[View]:
        """The views, described by their columns."""
        views = []
        for name, data in self.loaded.views.items():
            column = data if isinstance(data, Column) else Column(data.shape, data.__getitem__)
            shape = column.shape[1:]
            inferred: Kind = "image" if len(shape) > 1 else "text" if shape == (-1,) else "vector"
            kind = column.kind or inferred
            extra: dict[str, Any] = {"member": column.member, "missing": column.missing}
            views.append(View(name=name, kind=kind, shape=shape, dtype=KINDS[kind][0], **extra))
        return views

    @property
    def labels(self) -> Labels:
        """The kind and names of the labels."""
        return self.loaded.labels

    @cached_property
    def splits(self) -> dict[str, int]:
        """The number of rows in each split; logs the warning, for workers never ask for splits.

        Raises a SourceError where a column gives a label away, in sources with an option `keep`.
        """
        loaded, keep = self.loaded, getattr(self, "keep", None)
        if loaded.warning:
            logging.getLogger("heron").warning("%s: %s", self.name, loaded.warning)
        if keep is not None:
            known = loaded.views, loaded.targets, loaded.labels, loaded.columns
            refuse_leaks(*known, keep, self.leaves_out)
        return {split: len(rows) for split, rows in loaded.splits.items()}

    def read(self, split: str, start: int, stop: int) -> Rows:
        """Returns rows [start, stop) of a split."""
        span = self.loaded.splits[split][start:stop]
        rows, keys = np.asarray(span), self.loaded.keys
        # A slice keeps the order of axes in memory, which an index records.
        targets = slice(span.start, span.stop) if isinstance(span, range) else rows
        return Rows(
            {name: column[rows] for name, column in self.loaded.views.items()},
            self.loaded.targets[targets],
            None if keys is None else [keys[row] for row in rows.tolist()],
        )


def split_ranges(rows: Mapping[str, int], merge: bool) -> dict[str, range]:
    """Returns the rows of splits that are laid end to end; `merge` makes them one split, `all`."""
    splits, start = {}, 0
    for split, count in rows.items():
        splits[split] = range(start, start + count)
        start += count
    return {SINGLE_SPLIT: range(start)} if merge else splits


class SyntheticSource(Source):
    """Base class of synthetic sources: they read no file, and draw as many rows as requested."""

    train: int
    test: int

    @property
    def splits(self) -> dict[str, int]:
        """`train`, and `test` if it has rows."""
        return {"train": self.train} | ({"test": self.test} if self.test else {})
