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
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from heron.shards.artefact import describe_errors, sha256
from heron.shards.errors import CONTROL, SourceError, short_repr
from heron.shards.manifest import KINDS, InputFile, Labels, View
from heron.shards.sources.leaks import refuse_leaks

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
class Rows:
    """Consecutive rows of a split.

    Attributes:
        views: for each view, float32 [rows, width], uint8 [rows, height, width, channels], or a
            list with each row's bytes (of a picture file, a UTF-8 text, or a packed graph). A
            row that lacks a view with `missing="allow"` is NaN throughout, or None in a list.
        labels: class numbers [rows], or [rows, labels]; -1 or 255 where a row is unlabelled. With
            `unknown="allow"` single labels may be 255 too: see `with_unknown`.
        keys: a name for each row where every row is a tar sample of its own, as rows with pictures
            and texts are; None where rows are packed in blocks.
    """

    views: dict[str, NDArray[Any] | list[Any]]
    labels: NDArray[Any]
    keys: list[str] | None = None


def rows_with_view(values: NDArray[Any] | list[Any]) -> NDArray[np.bool_]:
    """Returns which rows have a view, [rows]: those that are not NaN throughout, or not None."""
    if isinstance(values, np.ndarray):
        if values.dtype.kind != "f" or not values.size:
            return np.ones(len(values), bool)
        absent: NDArray[np.bool_] = np.isnan(values).all(axis=tuple(range(1, values.ndim)))
        return ~absent
    return np.array([value is not None for value in values], bool)


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


class Source(BaseModel):
    """Base class of data sources; the fields are the options, on the command line and in YAML.

    A subclass sets `name` and defines `views`, `labels`, `splits` and `read`; derive from
    `FileSource` to read files. Any process may read any rows in any order, so whatever is random
    must be drawn from (seed, row): the bytes of a shard then do not depend on who wrote it.
    Pickling a source keeps its options alone.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: ClassVar[str]  # in the manifest; no two sources share one
    version: ClassVar[int] = 1  # raise it when rows change, or an old folder passes for a new one
    examples: ClassVar[str] = ""  # for --help
    block_rows: ClassVar[int | None] = 256  # rows packed in a block; None: each is a tar sample
    # Options added after folders were built without them: recorded only if not the default.
    left_out: ClassVar[tuple[str, ...]] = ()

    seed: int = Field(0, ge=0, description="seed of all random numbers")

    @property
    def dataset(self) -> str:
        """The data set's name in its manifest."""
        return self.name

    @property
    @abstractmethod
    def views(self) -> list[View]:
        """The views, without their statistics."""

    @property
    @abstractmethod
    def labels(self) -> Labels:
        """The kind and names of the labels."""

    @property
    @abstractmethod
    def splits(self) -> dict[str, int]:
        """The number of rows in each split."""

    @abstractmethod
    def read(self, split: str, start: int, stop: int) -> Rows:
        """Returns rows [start, stop) of a split."""

    @property
    def files(self) -> list[Path]:
        """The publisher's files that are read; none if rows are drawn."""
        return []

    def __reduce__(self) -> tuple[Callable[..., "Source"], tuple[Any, ...]]:
        """Pickles the options and what was checked, never the data of other cached properties."""
        checked = self.__dict__.get("checked")
        return _restore, (type(self), self.model_dump_json(), checked)

    @property
    def skipped(self) -> Mapping[str, str]:
        """What is left out as it is bad, by name, and what is wrong with it."""
        return {}

    def options(self) -> dict[str, Any]:
        """Returns the options for the manifest; paths are reduced to file names.

        The contents of a file matter, not its folder. Options in `left_out` are left out
        where they have their default.
        """
        return {
            key: _without_folders(getattr(self, key))
            for key, field in type(self).model_fields.items()
            if key not in self.left_out or getattr(self, key) != field.default
        }

    def input_files(self) -> list[InputFile]:
        """Returns the name, size and checksum of every file read."""
        return [file_record(path) for path in self.files]

    def invalid(self, fault: ValidationError) -> SourceError:
        """Returns an error that says why no manifest can be made of these files."""
        where = ", ".join(path.name for path in self.files) or self.name
        return SourceError(f"{where}: {describe_errors(fault)}")


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


def _restore(source: type[Source], options: str, checked: Any) -> Source:
    restored = source.model_validate_json(options)
    if checked is not None:
        restored.__dict__["checked"] = checked
    return restored


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


def file_record(path: Path) -> InputFile:
    """Returns the name, size and checksum of a file."""
    return InputFile(name=path.name, bytes=path.stat().st_size, sha256=sha256(path))


def _without_folders(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_without_folders(item) for item in value]
    return value.name if isinstance(value, Path) else value
