"""The manifest: what a folder of shards holds, and how to know that it is all there."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, model_validator

from heron.shards.artefact import LARGEST, MANIFEST, Artefact, Count, FileSum, Record, Sha256
from heron.shards.errors import REBUILD, ShardError, times
from heron.shards.index import ShardIndex
from heron.shards.remote import Missing
from heron.shards.store import Store, open_store

SCHEMA_VERSION: Literal[3] = 3
LABELS = "labels.npy"  # the suffix of labels in a tar sample
PRESENT = "present.npy"  # of which views each row has, where some may be missing
FOREIGN = "index"  # the source of tars that were indexed, not built
GREATEST = 1e30  # of a mean or a standard deviation: float32 can still compute with it


def _name(value: str) -> str:
    """Checks a name: a dot would end a WebDataset key, a slash would leave the folder."""
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,40}", value):
        raise ValueError(
            f"{value!r} cannot name a view or a split; expected 1 to 40 letters, digits, "
            "'-' and '_'; rename it"
        )
    return value


Name = Annotated[str, AfterValidator(_name)]
DOTTED = r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*"
TAR_NAME = rf"{DOTTED}\.tar"
Rows = Annotated[int, Field(gt=0, le=LARGEST)]
Extent = Annotated[int, Field(ge=-1, le=2**31)]
KINDS: dict[str, tuple[Literal["uint8", "float32"], int]] = {  # dtype, and axes of a shape
    "image": ("uint8", 3),
    "vector": ("float32", 1),
    "text": ("uint8", 1),
    "graph": ("uint8", 3),
}
GRAPHS = range(1, 2**20 + 1), range(2**22 + 1), range(1, 2**16 + 1)  # nodes, edges, labels of nodes
Suffix = Annotated[str, Field(pattern=f"^{DOTTED}$")]  # of a member
# It is not written while it is None, so that whole data keeps its fingerprint.
Allowed = Annotated[Literal["allow"] | None, Field(exclude_if=lambda value: value is None)]


class View(Record):
    """One view of every sample: its name, kind, shape and, for vectors, its statistics.

    `shape` is (width,) for vectors and (height, width, channels) for images, with -1 where it
    varies between samples, and (-1,) for texts: bytes of UTF-8. For graphs it is the most nodes and
    edges that one has, and how many labels nodes have: see `heron.shards.graph`. `mean` and `std`
    are over the train split, or over all rows where there is no split of that name, of those that
    have the view. `member` is the suffix of its files in a tar; a text may be a `field` of a member
    that is a JSON object. With `missing` rows may lack the view.
    """

    name: Name
    kind: Literal["image", "vector", "text", "graph"]
    shape: tuple[Extent, ...]
    dtype: Literal["uint8", "float32"]
    member: Suffix | None = None  # None: see `member_names`
    field: str | None = Field(default=None, max_length=200)  # None: the member is the text
    mean: list[float] | None = None
    std: list[float] | None = None
    missing: Allowed = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        dtype, axes = KINDS[self.kind]
        if (self.dtype, len(self.shape)) != (dtype, axes):
            raise ValueError(
                f"view {self.name!r} is {self.dtype} of shape {self.shape}; "
                f"a view of kind {self.kind} is {dtype} with {axes} axes"
            )
        for name, values in (("mean", self.mean), ("std", self.std)):
            if values is not None and (self.kind != "vector" or len(values) != self.shape[0]):
                raise ValueError(f"view {self.name!r}: {len(values)} values of {name}, not its own")
            if any(not abs(value) <= GREATEST for value in values or ()):
                raise ValueError(f"view {self.name!r}: {name} is not within ±{GREATEST:g}")
        if self.kind == "text" and self.shape != (-1,):
            raise ValueError(f"view {self.name!r}: texts of shape {self.shape}; expected (-1,)")
        if self.field is not None and self.kind != "text":
            raise ValueError(f"view {self.name!r}: a field of JSON; expected texts")
        if self.kind == "graph" and not all(map(range.__contains__, GRAPHS, self.shape)):
            raise ValueError(
                f"view {self.name!r}: graphs of {self.extent} nodes, edges and labels; expected "
                f"{', '.join(f'{one[0]:,} to {one[-1]:,}' for one in GRAPHS)}"
            )
        if any(value < 0 for value in self.std or ()):  # 0: a column with one value
            raise ValueError(f"view {self.name!r}: a std is below 0")
        return self

    @property
    def extent(self) -> str:
        """The shape in words: `218 × any × 3`."""
        return times("any" if n < 0 else n for n in self.shape)


class Labels(Record):
    """What a label is: its kind, and the names its numbers stand for.

    | kind | an array of labels |
    |---|---|
    | multi_label | uint8 [rows, names], 1 where the name holds |
    | complementary | uint8 [rows, names], 1 where the name is known not to hold |
    | multi_class | int64 [rows], a number of `names` |
    | hierarchical | int64 [rows, levels], a number of `levels[i]` in column i, coarse to fine |
    | none | int64 [rows], all unlabelled |

    A row is unlabelled where all its numbers are `unlabelled`. With `unknown`, which multi_label
    alone may have, single ones may be: of such a row these labels are not known.
    """

    kind: Literal["multi_label", "multi_class", "hierarchical", "complementary", "none"]
    names: list[str]
    levels: list[list[str]] | None = None
    unknown: Allowed = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.kind == "hierarchical") != (self.levels is not None):
            raise ValueError("labels have levels if, and only if, their kind is hierarchical")
        if (self.kind == "none") != (not self.names):
            raise ValueError("labels have names unless, and only unless, their kind is none")
        if self.levels is not None and (not self.levels or self.levels[-1] != self.names):
            raise ValueError("names of hierarchical labels are those of their last level")
        if self.unknown and self.kind != "multi_label":
            raise ValueError(
                f"single labels of a row are unknown, and the labels are {self.kind}; expected "
                "multi_label: of other kinds a row has a label or has none"
            )
        if len(set(self.names)) != len(self.names):
            (name, _), *_ = Counter(self.names).most_common(1)
            raise ValueError(f"two labels have the name {name!r}; expected a name for each")
        return self

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of an array of labels."""
        return np.dtype(np.uint8 if self.kind in ("multi_label", "complementary") else np.int64)

    @property
    def unlabelled(self) -> int:
        """What stands for "not known" in a row without a label: 255 of uint8, -1 of int64."""
        return 255 if self.dtype == np.uint8 else -1

    def known(self, array: NDArray[Any]) -> NDArray[np.bool_]:
        """Returns which rows of an array of labels are labelled, [rows]."""
        stated = array != self.unlabelled
        known: NDArray[np.bool_] = stated.any(axis=tuple(range(1, array.ndim)))
        return known

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of one row's label: (names,), (levels,), or () for a class number."""
        if self.kind in ("multi_class", "none"):
            return ()
        return (len(self.names) if self.levels is None else len(self.levels),)

    def fault(self, array: NDArray[Any], rows: int) -> str | None:
        """Says what is wrong with an array of labels for so many rows, or returns None."""
        shape = (rows, *self.row_shape)
        if array.dtype != self.dtype or array.shape != shape:
            return (
                f"labels are {array.dtype} {array.shape}; expected {self.dtype} {shape} "
                f"for {self.kind} labels"
            )
        sizes: int | NDArray[Any]  # labels must stay below, per column where there are levels
        if self.levels is not None:
            sizes = np.array([len(level) for level in self.levels])
        else:
            sizes = 2 if self.dtype == np.uint8 else len(self.names)
        stated = self.known(array).reshape(rows, *(1 for _ in self.row_shape))
        if self.unknown:
            stated = array != self.unlabelled
        outside = np.argwhere(((array < 0) | (array >= sizes)) & stated)
        if len(outside):
            at = tuple(int(i) for i in outside[0])
            limit = sizes if isinstance(sizes, int) else int(sizes[at[1]])
            return f"label of row {at[0]} is {array[at]}; expected 0 to {limit - 1}"
        return None


class Shard(Record):
    """One tar and its index: rows, bytes, and checksums of both."""

    file: str = Field(pattern=f"^{TAR_NAME}$")
    samples: Rows  # a tar sample of vectors is a block of them
    bytes: Count
    sha256: Sha256
    index_bytes: Count | None = None  # None: the manifest is of schema 2
    index_sha256: Sha256

    @property
    def index_file(self) -> str:
        """The name of the index beside the tar."""
        return index_name(self.file)

    @classmethod
    def of(cls, tar: Path, index: ShardIndex, written: FileSum | None = None) -> Shard:
        """Returns the record of a tar and of the index beside it, which are both there."""
        written, beside = (
            written or FileSum.of(tar),
            FileSum.of(tar.with_name(index_name(tar.name))),
        )
        return cls(
            file=tar.name,
            samples=int(index.rows.sum()),
            bytes=written.bytes,
            sha256=written.sha256,
            index_bytes=beside.bytes,
            index_sha256=beside.sha256,
        )

    def fault(self, folder: Path) -> str:
        """Returns what of the tar is not as it was written, or ""; see `FileSum.fault`."""
        return FileSum(bytes=self.bytes, sha256=self.sha256).fault(folder / self.file)


class InputFile(Record):
    """A publisher's file that went into the shards."""

    name: str
    bytes: Count
    sha256: Sha256


class BuiltFrom(Record):
    """Everything that decides the bytes of the shards: the source's version is for its code."""

    source: str
    version: int = 1
    options: dict[str, Any]
    files: list[InputFile]
    shard_rows: int


class Manifest(Artefact):
    """All there is to know of a data set before its first shard is opened.

    One of schema 2 has no fingerprint; it is read, and given one.
    """

    what: ClassVar[str] = f"a manifest of schema {SCHEMA_VERSION}"
    again: ClassVar[str] = REBUILD
    version_key: ClassVar[str] = "schema_version"
    versions: ClassVar[tuple[int, ...]] = (2, SCHEMA_VERSION)
    unsealed: ClassVar[tuple[int, ...]] = (2,)

    dataset: str
    schema_version: Literal[2, 3]
    views: list[View] = Field(min_length=1)
    labels: Labels
    block_rows: Rows | None = None  # None: a row is a tar sample
    splits: dict[Name, list[Shard]]
    built_from: BuiltFrom
    seed: int | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(set(self.members)) != len(self.members):
            raise ValueError(f"two members of a sample share a name: {self.members}")
        if self.block_rows is not None and any(
            -1 in view.shape or view.kind == "graph" for view in self.views
        ):
            raise ValueError(
                "texts, graphs and pictures of several sizes are a tar sample each, not rows of a "
                "block"
            )
        if self.partial and self.foreign:
            raise ValueError("rows of tars of others lack views; expected whole rows")
        files = [shard.file for shards in self.splits.values() for shard in shards]
        if len(set(files)) != len(files):
            raise ValueError("a shard is listed twice")
        return self

    @property
    def members(self) -> list[str]:
        """The members of every tar sample, in their order: a view each, then what is ours.

        Ours are the labels and, where views may be missing, which of them each row has.
        """
        ours = [LABELS, PRESENT] if self.partial else [LABELS]
        return member_names(self.views, self.block_rows) + ([] if self.foreign else ours)

    @property
    def partial(self) -> bool:
        """Whether rows may lack some of their views."""
        return any(view.missing for view in self.views)

    @property
    def foreign(self) -> bool:
        """Whether others wrote the tars: they may hold more, and the index alone has labels."""
        return self.built_from.source == FOREIGN

    def index_fault(self, shard: Shard, index: ShardIndex) -> str | None:
        """Says what of an index does not fit the manifest, or returns None."""
        rows, most = index.rows, self.block_rows or 1
        if index.members.tolist() != self.members:
            return f"members {index.members.tolist()}; expected {self.members}"
        if int(rows.sum()) != shard.samples:
            return f"{int(rows.sum())} rows; expected {shard.samples}"
        if (rows[:-1] != most).any() or not 1 <= rows[-1] <= most:
            return f"samples of {int(rows.min())} to {int(rows.max())} rows; expected {most}"
        if min(index.offsets.min(), index.lengths.min()) < 0:  # behind the end: see `array_at`
            return "a member lies before the beginning of the tar"
        if (fault := self._present_fault(index)) is not None:
            return fault
        return self.labels.fault(index.labels, shard.samples)

    def _present_fault(self, index: ShardIndex) -> str | None:
        """Says what is wrong with the views that an index says rows have, or returns None."""
        present = index.present
        if not self.partial:
            return None if present is None else "it says which views rows have; expected all"
        shape = int(index.rows.sum()), len(self.views)
        if present is None or (present.dtype, present.shape) != (np.dtype(np.uint8), shape):
            found = None if present is None else f"{present.dtype} {present.shape}"
            return f"which views each row has is {found}; expected uint8 {shape}"
        if (present > 1).any() or not present.any(1).all():
            return "a row has none of its views, or a view neither 0 nor 1 times"
        always = [number for number, view in enumerate(self.views) if not view.missing]
        if not present[:, always].all():
            return "a row lacks a view that none may lack"
        lengths = index.lengths[:, : len(self.views)]
        if self.block_rows is None and ((lengths > 0) != (present > 0)).any():
            return "a row has a view and no member for it, or the other way round"
        return None

    def rows(self, split: str) -> int:
        """Returns the number of rows in a split."""
        if split not in self.splits:
            raise ShardError(
                f"{self.dataset} has no split {split!r}; it has {', '.join(self.splits)}"
            )
        return sum(shard.samples for shard in self.splits[split])


def member_names(views: list[View], block_rows: int | None) -> list[str]:
    """Returns the suffix of each view in a tar sample.

    It is `jpg` for a lone image, `VIEW.jpg` for one of several, `txt` or `VIEW.txt` likewise for
    texts, `VIEW.npy` for vectors, graphs and anything in blocks, unless the view names its own.
    """
    count = Counter(view.kind for view in views)

    def suffix(view: View) -> str:
        if view.kind in ("vector", "graph") or block_rows is not None:
            return f"{view.name}.npy"
        ending = {"image": "jpg", "text": "txt"}[view.kind]
        return ending if count[view.kind] == 1 else f"{view.name}.{ending}"

    return [view.member or suffix(view) for view in views]


def index_name(tar: str) -> str:
    """Returns the name of a tar's index: `train-000000.index.npz` of `train-000000.tar`."""
    return tar.removesuffix(".tar") + ".index.npz"


def load_manifest(folder: Path | str | Store) -> Manifest:
    """Reads the manifest of a folder or URL of shards; ShardError says what is wrong with it."""
    store = folder if isinstance(folder, Store) else open_store(folder)
    where = store.where(MANIFEST)
    try:
        return Manifest.parse(store.read_bytes(MANIFEST), where)
    except Missing as fault:
        unfinished = store.exists("build.json")
        found = "an unfinished build" if unfinished else fault.found
        remedy = (
            "run the same `heron shards build` again to finish it"
            if unfinished
            else "give a folder that `heron shards build` or `heron shards index` made"
        )
        raise ShardError(f"{where}: {found}; expected a manifest; {remedy}") from None
