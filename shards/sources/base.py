"""What a source is: a publisher's files, or a generator, as rows of views and labels."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from heron.shards.manifest import InputFile, Labels, View

WHOLE = "all"  # the split of a data set that has none


def _exists(path: Path) -> Path:
    if not path.exists():
        raise ValueError("neither a file nor a folder lies there")
    return path


FileOrFolder = Annotated[Path, AfterValidator(_exists)]


@dataclass(frozen=True, eq=False)
class Rows:
    """Consecutive rows of a split.

    `views` holds, for every view, float32 [rows, width], uint8 [rows, height, width, channels], or
    the bytes of a picture for each row; `keys` names the rows of pictures that are a tar sample
    each and is None where rows are packed in blocks.
    """

    views: dict[str, NDArray[Any] | list[bytes]]
    labels: NDArray[Any]
    keys: list[str] | None = None


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

    seed: int = Field(0, ge=0, description="seed of everything drawn at random")

    @property
    def dataset(self) -> str:
        """What the data set is called in its manifest."""
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
        """The splits and their rows."""

    @abstractmethod
    def read(self, split: str, start: int, stop: int) -> Rows:
        """Rows [start, stop) of a split."""

    @property
    def files(self) -> list[Path]:
        """The publisher's files this reads; none for what is drawn."""
        return []

    def __reduce__(self) -> tuple[Callable[..., Source], tuple[type[Source], str]]:
        """Pickle the options, never the data set that a cached property holds."""
        return _unpickled, (type(self), self.model_dump_json())

    def options(self) -> dict[str, Any]:
        """The options, files by name alone: where they lay does not matter, their bytes do."""
        return {key: _plain(getattr(self, key)) for key in type(self).model_fields}

    def input_files(self) -> list[InputFile]:
        """Name, size and checksum of every file read."""
        return [file_record(path) for path in self.files]


class Drawn(Source):
    """A source that is drawn: it reads no file, and has as many rows as are asked for."""

    train: int
    test: int

    @property
    def splits(self) -> dict[str, int]:
        """`train` and `test`."""
        return {"train": self.train} | ({"test": self.test} if self.test else {})


def _unpickled(source: type[Source], options: str) -> Source:
    return source.model_validate_json(options)


def file_record(path: Path) -> InputFile:
    """Name, size and checksum of a file."""
    return InputFile(name=path.name, bytes=path.stat().st_size, sha256=sha256(path))


def sha256(path: Path) -> str:
    """The checksum of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.name if isinstance(value, Path) else value
