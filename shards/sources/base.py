"""The base classes of sources, which give a publisher's files, or drawings, as rows."""

import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from heron.shards.artefact import in_words, sha256
from heron.shards.errors import CONTROL, SourceError, shown
from heron.shards.manifest import KINDS, InputFile, Labels, View

WHOLE = "all"  # the split of a data set that has none
Kind = Literal["image", "vector", "text", "graph"]  # of a view
Missing = Literal["allow"] | None  # whether rows may lack a view


def _exists(path: Path) -> Path:
    if not path.exists():
        raise ValueError("neither a file nor a folder lies there")
    return path


FileOrFolder = Annotated[Path, AfterValidator(_exists)]


@dataclass(frozen=True, eq=False)
class Rows:
    """Consecutive rows of a split.

    `views` holds, for every view, float32 [rows, width], uint8 [rows, height, width, channels], or
    the bytes of a picture or of a text for each row; `keys` names rows that are a tar sample each,
    as those with pictures and texts are, and is None where rows are packed in blocks.

    Of a view with `missing="allow"` a row that lacks it is NaN throughout, or None for the bytes of
    a picture or a text: see `is_there`. Of labels with `unknown="allow"` one that is not known is
    255: see `with_unknown`.
    """

    views: dict[str, NDArray[Any] | list[Any]]
    labels: NDArray[Any]
    keys: list[str] | None = None


def is_there(values: NDArray[Any] | list[Any]) -> NDArray[np.bool_]:
    """Returns which rows have a view, [rows]: those that are not NaN throughout, or not None."""
    if isinstance(values, np.ndarray):
        if values.dtype.kind != "f" or not values.size:
            return np.ones(len(values), bool)
        lacking: NDArray[np.bool_] = np.isnan(values).all(axis=tuple(range(1, values.ndim)))
        return ~lacking
    return np.array([value is not None for value in values], bool)


def with_unknown(
    values: NDArray[Any], names: Sequence[str], where: str
) -> tuple[NDArray[np.uint8], Labels]:
    """Returns several labels a row as they are stored, single ones of which are not known.

    Args:
        values: 0 or 1 where a label is known; NaN, -1 or 255 where it is not, [rows, labels].
        names: of the labels.
        where: names the array in messages.

    Returns:
        0, 1, or 255 for what is not known, [rows, labels]; and what the labels are.

    Raises:
        SourceError: a value is another.
    """
    if values.shape[1:] != (len(names),):
        raise SourceError(
            f"{where} is {values.dtype} {values.shape}; expected {len(names)} columns, a label each"
        )
    with np.errstate(invalid="ignore"):
        unknown = np.isnan(values) | (values == -1) | (values == 255)
    if len(bad := np.argwhere(~(unknown | (values == 0) | (values == 1)))):
        row, column = bad[0].tolist()
        raise SourceError(
            f"{where}: label {names[column]!r} of row {row} is {values[row, column]}; expected 0 "
            "or 1, or NaN, -1 or 255 where it is not known"
        )
    stored = np.where(unknown, 255, np.where(unknown, 0, values)).astype(np.uint8)
    return stored, Labels(kind="multi_label", names=list(names), unknown="allow")


class Source(BaseModel):
    """A source: its fields are its options, on the command line and in YAML alike.

    A source gives any rows in any order, in any process: what it draws, it draws from (seed, row),
    so that the bytes of a shard do not depend on who wrote it. A pickle holds the options alone.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: ClassVar[str]
    version: ClassVar[int] = 1  # raise it when rows change, or an old folder passes for a new one
    examples: ClassVar[str] = ""  # for --help
    block_rows: ClassVar[int | None] = 256  # None: images, a tar sample each
    left_out: ClassVar[tuple[str, ...]] = ()  # see `options`

    seed: int = Field(0, ge=0, description="seed of everything drawn at random")

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
        """The splits and the number of their rows."""

    @abstractmethod
    def read(self, split: str, start: int, stop: int) -> Rows:
        """Returns rows [start, stop) of a split."""

    @property
    def files(self) -> list[Path]:
        """The publisher's files that are read; none for what is drawn."""
        return []

    def __reduce__(self) -> tuple[Callable[..., "Source"], tuple[str]]:
        """Pickles the options, never the data set that a cached property holds."""
        return type(self).model_validate_json, (self.model_dump_json(),)

    def options(self) -> dict[str, Any]:
        """Returns the options, files by name alone: their bytes matter, and not their folder.

        One of `left_out`, which came later, is named only where it is not its default.
        """
        return {
            key: _plain(getattr(self, key))
            for key, field in type(self).model_fields.items()
            if key not in self.left_out or getattr(self, key) != field.default
        }

    def input_files(self) -> list[InputFile]:
        """Returns the name, size and checksum of every file read."""
        return [file_record(path) for path in self.files]

    def invalid(self, fault: ValidationError) -> SourceError:
        """Says of which files no manifest can be made, and why."""
        where = ", ".join(path.name for path in self.files) or self.name
        return SourceError(f"{where}: {in_words(fault)}")


@dataclass(frozen=True, eq=False)
class Column:
    """All rows of a view, read when they are asked for.

    `shape` is (rows, width) of vectors, (rows, height, width, channels) of pictures with -1 for
    what varies, (rows, -1) of texts; of graphs see `heron.shards.manifest.View`. `read` gives some
    rows as `Rows` has them. `member` is the suffix in a tar, where it is not the usual one.
    """

    shape: tuple[int, ...]
    read: Callable[[NDArray[np.int64]], NDArray[Any] | list[Any]]
    member: str | None = None
    kind: Kind | None = None  # None: the shape says it
    missing: Missing = None  # "allow": rows may lack the view, as in `Rows`

    def __getitem__(self, rows: NDArray[np.int64], /) -> NDArray[Any] | list[Any]:
        """Returns some rows."""
        return self.read(rows)


def each(read: Callable[[int], bytes | None]) -> Callable[[NDArray[np.int64]], list[Any]]:
    """Returns what reads rows one after the other: the bytes of each, None where it lacks them."""
    return lambda rows: [read(row) for row in rows.tolist()]


def numbers(
    shape: tuple[int, ...],
    read: Callable[[NDArray[np.int64]], NDArray[Any]],
    where: str,
    remedy: str,
    missing: Missing = None,
) -> Column:
    """Returns a column of numbers that become finite float32 when they are read.

    `read` gives some rows as they are stored; `where` names the array in messages. With `missing`
    a row may be NaN throughout, which lacks the view. SourceError, as they are read, where a value
    is not finite, or is a whole number that float32 cannot hold.
    """

    def checked(rows: NDArray[np.int64]) -> NDArray[np.float32]:
        stored = read(rows)
        with np.errstate(over="ignore"):  # what is too large becomes infinite
            values = stored.astype(np.float32, copy=False)
        sound, expected = np.isfinite(values), "; expected a finite float32"
        if missing:
            sound |= ~is_there(values)[:, None]
        if sound.all() and stored.dtype.kind in "iu":
            sound = values == stored
            expected = f", which float32 cannot hold; expected whole numbers up to {1 << 24:,}"
        if len(bad := np.argwhere(~sound)):
            row, column = bad[0].tolist()
            raise SourceError(
                f"{where}, row {rows[row]}, column {column} is {stored[row, column]}{expected}; "
                f"{remedy}"
            )
        return values

    return Column(shape, checked, missing=missing)


@dataclass(frozen=True, eq=False)
class Loaded:
    """What a source found in its files: all rows, and those of each split, by their numbers.

    `targets` are the labels of the rows, as `labels` describes them; `keys` name rows of pictures
    in files; `warning` is for the log.
    """

    views: Mapping[str, Column | NDArray[Any]]
    targets: NDArray[Any]
    labels: Labels
    splits: Mapping[str, Sequence[int] | NDArray[np.int64]]
    keys: Sequence[str] | None = None
    dataset: str = ""  # its name, where the files alone say it
    warning: str = ""


class FileSource(Source):
    """A source that reads files: a subclass says how to `load` them, and no more."""

    @property
    def files(self) -> list[Path]:
        """The files and folders that the options name, in their order."""
        given = (getattr(self, option) for option in type(self).model_fields)
        named = (one if isinstance(one, list) else [one] for one in given)
        return [path for several in named for path in several if isinstance(path, Path)]

    @abstractmethod
    def load(self) -> Loaded:
        """Opens the files; SourceError says what is wrong with them."""

    @cached_property
    def loaded(self) -> Loaded:
        """What `load` gave, once in a process."""
        try:
            loaded = self.load()
        except ValidationError as fault:
            raise self.invalid(fault) from None
        for name in loaded.labels.names:
            if CONTROL.search(name):
                raise SourceError(
                    f"{', '.join(path.name for path in self.files)}: a label has the name "
                    f"{shown(name)}; expected no control characters and no byte order mark in it; "
                    "rename it"
                )
        return loaded

    @property
    def views(self) -> list[View]:
        """The views, by the shapes of their columns."""
        views = []
        for name, found in self.loaded.views.items():
            column = found if isinstance(found, Column) else Column(found.shape, found.__getitem__)
            shape = column.shape[1:]
            by_shape: Kind = "image" if len(shape) > 1 else "text" if shape == (-1,) else "vector"
            kind = column.kind or by_shape
            about: dict[str, Any] = {"member": column.member, "missing": column.missing}
            views.append(View(name=name, kind=kind, shape=shape, dtype=KINDS[kind][0], **about))
        return views

    @property
    def labels(self) -> Labels:
        """The kind and names of the labels."""
        return self.loaded.labels

    @cached_property
    def splits(self) -> dict[str, int]:
        """The splits and the number of their rows; workers, which never ask, do not warn."""
        if self.loaded.warning:
            logging.getLogger("heron").warning("%s: %s", self.name, self.loaded.warning)
        return {split: len(rows) for split, rows in self.loaded.splits.items()}

    def read(self, split: str, start: int, stop: int) -> Rows:
        """Returns rows [start, stop) of a split."""
        part = self.loaded.splits[split][start:stop]
        rows, keys = np.asarray(part), self.loaded.keys
        # A slice keeps the order of axes in memory, which an index records.
        targets = slice(part.start, part.stop) if isinstance(part, range) else rows
        return Rows(
            {name: column[rows] for name, column in self.loaded.views.items()},
            self.loaded.targets[targets],
            None if keys is None else [keys[row] for row in rows.tolist()],
        )


def split_ranges(rows: Mapping[str, int], merge: bool) -> dict[str, range]:
    """Returns where each split lies if they are laid end to end; `merge` makes one of them."""
    splits, start = {}, 0
    for split, count in rows.items():
        splits[split] = range(start, start + count)
        start += count
    return {WHOLE: range(start)} if merge else splits


class Drawn(Source):
    """A source that is drawn: it reads no file, and has as many rows as are asked for."""

    train: int
    test: int

    @property
    def splits(self) -> dict[str, int]:
        """`train` and `test`."""
        return {"train": self.train} | ({"test": self.test} if self.test else {})


def file_record(path: Path) -> InputFile:
    """Returns the name, size and checksum of a file."""
    return InputFile(name=path.name, bytes=path.stat().st_size, sha256=sha256(path))


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.name if isinstance(value, Path) else value
