"""Arrays of your own: an .npz, or .npy files larger than memory, of any views and labels."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, FilePath, model_validator

from heron.shards.errors import ShardError, SourceError
from heron.shards.index import UNREADABLE, read_npz
from heron.shards.sources.named_arrays import NamedArrays

# Bytes of all arrays of an .npz, or so many times the file's, if that is more.
MOST_UNPACKED, MOST_FOLD = 2**30, 100
PICKLES = "arrays of Python objects are pickles, never decoded"


def _named_file(value: str) -> str:
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
    for all of its labels (255 where those are uint8). An array `split` of strings, one a row, parts
    the rows; without one they are the split `all`. Files of --npy are mapped into memory, a block
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
    npy: list[Annotated[str, AfterValidator(_named_file)]] | None = Field(
        None,
        min_length=1,
        description="instead of it, NAME=FILE.npy for each array, as numpy.save writes it",
    )

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.npz is None) == (self.npy is None):
            raise ValueError("expected either npz or npy; give one of them")
        names = [value.partition("=")[0] for value in self.npy or []]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"npy: two files are called {twice[0]!r}; give each a name of its own")
        return self

    @property
    def dataset(self) -> str:
        """The name of the .npz, or of the folder of the first .npy."""
        return self.npz.stem if self.npz else self.files[0].resolve().parent.name

    @property
    def files(self) -> list[Path]:
        """The files of arrays."""
        return [self.npz] if self.npz else list(self._paths.values())

    def options(self) -> dict[str, Any]:
        """Returns the options, files by name alone."""
        named = [f"{name}={path.name}" for name, path in self._paths.items()]
        return super().options() | ({"npy": named} if self.npy else {})

    @cached_property
    def _paths(self) -> dict[str, Path]:
        """The .npy file of each array."""
        parts = [value.partition("=") for value in self.npy or []]
        return {name: Path(file) for name, _, file in parts}

    @cached_property
    def _npz(self) -> dict[str, NDArray[Any]]:
        """The arrays of the .npz by their names; none where there is no .npz."""
        if self.npz is None:
            return {}
        try:
            with self.npz.open("rb") as stream:
                most = max(MOST_UNPACKED, MOST_FOLD * self.npz.stat().st_size)
                return read_npz(stream, most)
        except (*UNREADABLE, ShardError) as fault:
            what = f"expected what numpy.savez writes ({fault})"
            reason = PICKLES if "pickle" in str(fault) else what
            raise SourceError(f"{self.npz.name}: cannot be read: {reason}") from None

    @property
    def names(self) -> Sequence[str]:
        """The arrays there are."""
        return list(self._npz or self._paths)

    def where(self, name: str) -> str:
        """Returns the name of the file that an array is in."""
        return self.npz.name if self.npz else self._paths[name].name

    def array(self, name: str) -> NDArray[Any]:
        """Returns an array of the .npz, or an .npy mapped anew: what was read leaves memory."""
        return self._npz[name] if self.npz else map_npy(self._paths[name])


def map_npy(path: Path) -> NDArray[Any]:
    """Maps the array of an .npy, read-only, of which only what is used is read."""
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except UNREADABLE as fault:
        pickles = "Python objects" in str(fault)
        reason = PICKLES if pickles else f"{fault}; expected what numpy.save writes"
        raise SourceError(f"{path.name}: cannot be read: {reason}") from None
