"""Arrays of your own, of any views and labels: an .npz, or .npy files larger than memory."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, FilePath, model_validator

from heron.shards.errors import ShardError, SourceError
from heron.shards.index import NPY_ERRORS, read_npz
from heron.shards.sources.named_arrays import NamedArrays

# The arrays of an .npz may have 1 GiB, or 100 times the bytes of the file if that is more.
MAX_UNPACKED_BYTES, MAX_UNPACKED_RATIO = 2**30, 100
PICKLES = "arrays of Python objects are pickles, never decoded"


def _check_named_file(value: str) -> str:
    name, _, file = value.partition("=")
    if not name or not file:
        raise ValueError("expected NAME=FILE.npy")
    if not Path(file).is_file():
        raise ValueError(f"no file {file}")
    return value


class Arrays(NamedArrays):
    """Arrays of your own: views and labels in an .npz, or in .npy files larger than memory.

    A view is numbers [rows, width], or raw pictures: uint8 [rows, height, width, channels], or
    without the last axis where there is one channel. Labels are class numbers or names [rows], or
    0 and 1 [rows, labels]; a row without a label has -1 for its class, for all of its classes, or
    for all of its labels (255 where those are uint8). An array `split` of strings has each row's
    split; without it all rows are the split `all`. Files of --npy are mapped into memory, a block
    of rows at a time.

    With `--missing allow` a row that is NaN throughout a view lacks it; pictures are always there.
    With `--unknown allow` single labels of a row may be unknown: NaN, -1 or 255 among 0 and 1.
    """

    name: ClassVar[str] = "arrays"
    version: ClassVar[int] = 2  # 1: classes were 0 to the largest number
    examples: ClassVar[str] = (
        "heron shards build arrays --npz mine.npz --view-names audio video --out data/mine\n"
        "  heron shards build arrays --npy audio=audio.npy labels=labels.npy --out data/mine"
    )

    npz: FilePath | None = Field(None, description="the .npz file, as numpy.savez writes it")
    npy: list[Annotated[str, AfterValidator(_check_named_file)]] | None = Field(
        None,
        min_length=1,
        description="instead, NAME=FILE.npy for each array, as numpy.save writes it",
    )

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.npz is None) == (self.npy is None):
            raise ValueError("set either npz or npy, not both or neither")
        names = [value.partition("=")[0] for value in self.npy or []]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"npy: two files are named {repeated[0]!r}; names must be unique")
        return self

    @property
    def dataset(self) -> str:
        """The name of the .npz, or of the folder of the first .npy."""
        return self.npz.stem if self.npz else self.files[0].resolve().parent.name

    @property
    def files(self) -> list[Path]:
        """The .npz, or the .npy files."""
        return [self.npz] if self.npz else list(self._paths.values())

    def options(self) -> dict[str, Any]:
        """Returns the options, files by name alone."""
        entries = [f"{name}={path.name}" for name, path in self._paths.items()]
        return super().options() | ({"npy": entries} if self.npy else {})

    @cached_property
    def _paths(self) -> dict[str, Path]:
        entries = [value.partition("=") for value in self.npy or []]
        return {name: Path(file) for name, _, file in entries}

    @cached_property
    def _npz(self) -> dict[str, NDArray[Any]]:
        """The arrays of the .npz by name; none for .npy files."""
        if self.npz is None:
            return {}
        try:
            with self.npz.open("rb") as stream:
                limit = max(MAX_UNPACKED_BYTES, MAX_UNPACKED_RATIO * self.npz.stat().st_size)
                return read_npz(stream, limit)
        except (*NPY_ERRORS, ShardError) as fault:
            expected = f"it is not what numpy.savez writes ({fault})"
            reason = PICKLES if "pickle" in str(fault) else expected
            raise SourceError(f"cannot read {self.npz.name}: {reason}") from None

    @property
    def names(self) -> Sequence[str]:
        """The names of all arrays."""
        return list(self._npz or self._paths)

    def where(self, name: str) -> str:
        """Returns the name of the file that an array is in."""
        return self.npz.name if self.npz else self._paths[name].name

    def array(self, name: str) -> NDArray[Any]:
        """Returns an array of the .npz, or maps an .npy anew, to free the rows read before."""
        return self._npz[name] if self.npz else map_npy(self._paths[name])


def map_npy(path: Path) -> NDArray[Any]:
    """Memory-maps the array of an .npy, read-only: only the rows in use are read."""
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except NPY_ERRORS as fault:
        pickles = "Python objects" in str(fault)
        reason = PICKLES if pickles else f"{fault}; it is not what numpy.save writes"
        raise SourceError(f"cannot read {path.name}: {reason}") from None
