"""Arrays of your own, of any views and labels: an .npz, or .npy files larger than memory."""

import math
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, FilePath, model_validator

from heron.base.errors import ShardError, SourceError, first_few
from heron.shards.index import NPY_ERRORS, read_npz
from heron.sources.labels import LABEL_NAMES
from heron.sources.named_arrays import SPLIT, NamedArrays
from heron.sources.text import WORDS

# The arrays of an .npz may have 1 GiB, or 100 times the bytes of the file if that is more.
MAX_UNPACKED_BYTES, MAX_UNPACKED_RATIO = 2**30, 100
# A word of a split before or after the rest of a name: train_images, x_train, Xtrain.
IN_A_SPLIT = [
    (split, re.compile(f"(?i)({word})[_-]?(?P<stem>.*)|(?P<stem_>.*?)[_-]?({word})"))
    for split, word in WORDS.items()
]
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
    split. Where each array is in parts for train, test and maybe val, as x_train, y_train, x_test
    and y_test, these are splits of x and y. Else all rows are the split `all`. Files of --npy are
    mapped into memory, a block of rows at a time.

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
        """The names of all arrays; those of one array's splits count as one."""
        parts = {name for splits in self._parts.values() for name in splits.values()}
        others = [name for name in self._npz or self._paths if name not in parts]
        return [*self._parts, *others, *([SPLIT] if parts else [])]

    def where(self, name: str) -> str:
        """Returns the name of the file that an array is in."""
        return self._file(self._stored_names(name)[0])

    def _file(self, name: str) -> str:
        return self.npz.name if self.npz else self._paths[name].name

    def array(self, name: str) -> NDArray[Any]:
        """Returns an array of the .npz, or maps an .npy anew, to free the rows read before."""
        if name == SPLIT and self._parts:
            return np.repeat([*next(iter(self._parts.values()))], self._rows_of_splits)
        arrays = [self._stored(stored) for stored in self._stored_names(name)]
        if len({(array.dtype.kind, array.shape[1:]) for array in arrays}) > 1:
            found = " and ".join(f"{array.dtype} {array.shape}" for array in arrays)
            others = [
                n for splits in self._parts.values() for s, n in splits.items() if s != "train"
            ]
            raise SourceError(
                f"{self.where(name)}: the splits of {name!r} must be alike, got {found}; "
                f"{self._ignoring(others)}"
            )
        return arrays[0] if len(arrays) == 1 else cast(NDArray[Any], Joined(arrays))

    def _stored(self, name: str) -> NDArray[Any]:
        return self._npz[name] if self.npz else map_npy(self._paths[name])

    def _stored_names(self, name: str) -> list[str]:
        return [*self._parts[name].values()] if name in self._parts else [name]

    @cached_property
    def _parts(self) -> dict[str, dict[str, str]]:
        """The arrays of each split, by what their names have in common; {} if they have no parts.

        There are none where an option names one of them, or there is an array `split`.
        """
        parts, names = dict[str, dict[str, str]](), list(self._npz or self._paths)
        asked = {*(self.view_names or ()), *self.ignore, self.labels_name}
        for split, pattern in IN_A_SPLIT:
            for name in names:
                match = None if name in self.ignore else pattern.fullmatch(name)
                if match and self._stored(name).ndim:
                    stem = match["stem"] or match["stem_"] or "x"
                    parts.setdefault(stem, {})[split] = name
        found = {name for splits in parts.values() for name in splits.values()}
        parts = {stem: splits for stem, splits in parts.items() if len(splits) > 1}
        if not parts or SPLIT in {*names, *parts} or asked & found or {*parts} & {*names}:
            return {}
        if not LABEL_NAMES & {stem.lower() for stem in parts} and {*names} - {*self.ignore} - found:
            return {}  # such as train_mask beside the labels of all rows
        shared = set.intersection(*map(set, parts.values()))
        odd = [n for splits in parts.values() for s, n in splits.items() if s not in shared]
        if "train" in shared and odd:
            raise SourceError(
                f"{self._file(odd[0])}: {odd[0]!r} is of a split that not all of "
                f"{first_few([*parts])} have; {self._ignoring(odd)}"
            )
        return parts if "train" in shared else {}

    @cached_property
    def _rows_of_splits(self) -> list[int]:
        """The number of rows of each split, on which all arrays must agree."""
        rows = dict[str, tuple[str, int]]()
        for split, name in ((s, n) for splits in self._parts.values() for s, n in splits.items()):
            first, expected = rows.setdefault(split, (name, len(self._stored(name))))
            if len(self._stored(name)) != expected:
                raise SourceError(
                    f"{self._file(name)}: {name!r} has {len(self._stored(name))} rows but "
                    f"{first!r} has {expected}; every array of a split must have the same rows; "
                    f"{self._ignoring([first, name])}"
                )
        return [count for _, count in rows.values()]

    def _describe_conversion(self, name: str) -> str:
        parts = " and ".join(self._parts.get(name, {}).values())
        said = [f"{parts} are the splits of {name!r}"] if parts else []
        return "; ".join([*said, *filter(None, [super()._describe_conversion(name)])])


class Joined:
    """Arrays end to end, [rows, ...], whose rows are read where they are."""

    def __init__(self, arrays: Sequence[NDArray[Any]]) -> None:
        """Takes arrays that differ in the number of rows alone."""
        self._arrays, self.dtype = arrays, np.result_type(*arrays)
        self._starts = np.cumsum([0, *map(len, arrays)])
        self.shape: tuple[int, ...] = (int(self._starts[-1]), *arrays[0].shape[1:])
        self.ndim, self.size = len(self.shape), math.prod(self.shape)

    def __len__(self) -> int:
        """The number of rows."""
        return self.shape[0]

    def __getitem__(self, rows: Any) -> NDArray[Any]:
        """Returns the rows of a slice, or of these numbers."""
        rows = np.arange(len(self))[rows]
        part = np.searchsorted(self._starts, rows, side="right") - 1
        out = np.empty((len(rows), *self.shape[1:]), self.dtype)
        for number in np.unique(part).tolist():
            out[part == number] = self._arrays[number][rows[part == number] - self._starts[number]]
        return out

    def __array__(self, *_: Any, **__: Any) -> NDArray[Any]:
        """Returns all rows."""
        return np.concatenate(self._arrays)


def map_npy(path: Path) -> NDArray[Any]:
    """Memory-maps the array of an .npy, read-only: only the rows in use are read."""
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except NPY_ERRORS as fault:
        pickles = "Python objects" in str(fault)
        reason = PICKLES if pickles else f"{fault}; it is not what numpy.save writes"
        raise SourceError(f"cannot read {path.name}: {reason}") from None
