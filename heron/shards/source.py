"""What a data set is built from: a source of rows."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from heron.base.artefact import describe_errors, sha256
from heron.base.errors import SourceError
from heron.shards.manifest import InputFile, Labels, View


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


def _restore(source: type[Source], options: str, checked: Any) -> Source:
    restored = source.model_validate_json(options)
    if checked is not None:
        restored.__dict__["checked"] = checked
    return restored


def file_record(path: Path) -> InputFile:
    """Returns the name, size and checksum of a file."""
    return InputFile(name=path.name, bytes=path.stat().st_size, sha256=sha256(path))


def _without_folders(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_without_folders(item) for item in value]
    return value.name if isinstance(value, Path) else value
