"""The manifest: what a folder of shards holds, and how to check that all of it is there."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, model_validator

from heron.base.artefact import INT64_MAX, MANIFEST, Artefact, Count, FileSum, Record, Sha256
from heron.base.errors import REBUILD, ShardError, format_shape, one_line
from heron.shards.index import ShardIndex
from heron.shards.remote import Missing
from heron.shards.store import Store, open_store

SCHEMA_VERSION: Literal[3] = 3
JOURNAL = "build.json"  # describes an unfinished build; the manifest replaces it
LABELS = "labels.npy"  # member suffix of the labels in a tar sample
PRESENT = "present.npy"  # member suffix of which views each row has, where some may be missing
FOREIGN_SOURCE = "index"  # `built_from.source` of tars that were indexed, not built
MAX_STATISTIC = 1e30  # largest mean or standard deviation that float32 can still compute with


def _check_name(value: str) -> str:
    """Checks a name: a dot would end a WebDataset key, and a slash would leave the folder."""
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,40}", value):
        raise ValueError(
            f"{value!r} cannot name a view or a split; rename it to 1 to 40 letters, digits, '-' "
            "and '_'"
        )
    return value


Name = Annotated[str, AfterValidator(_check_name)]
DOTTED = r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*"
TAR_NAME = r"[A-Za-z0-9_()-]+([. ][A-Za-z0-9_()-]+)*\.tar"
Rows = Annotated[int, Field(gt=0, le=INT64_MAX)]
Extent = Annotated[int, Field(ge=-1, le=2**31)]
KINDS: dict[str, tuple[Literal["uint8", "float32"], int]] = {  # dtype and number of axes
    "image": ("uint8", 3),
    "vector": ("float32", 1),
    "text": ("uint8", 1),
    "graph": ("uint8", 3),
}
# Nodes, edges, node labels:
GRAPH_LIMITS = range(1, 2**20 + 1), range(2**22 + 1), range(1, 2**16 + 1)
Suffix = Annotated[str, Field(pattern=f"^{DOTTED}$")]  # of a member
# None is not written, so that data sets without missing values keep their fingerprint.
AllowMissing = Annotated[Literal["allow"] | None, Field(exclude_if=lambda value: value is None)]


class View(Record):
    """One view of every sample: its name, kind, shape and, for vectors, its statistics.

    `shape` is (width,) for vectors and (height, width, channels) for images, with -1 where it
    varies between samples, and (-1,) for texts: bytes of UTF-8. For graphs it is the maximum
    number of nodes, of edges, and of node labels (see `heron.shards.graph`). `mean` and `std` are
    over the rows of the train split that have the view, or over all such rows where no split has
    that name. `member` is the suffix of the view's files in a tar; a text may be a `field` of a
    member that is a JSON object. With `missing`, rows may lack the view.
    """

    name: Name
    kind: Literal["image", "vector", "text", "graph"]
    shape: tuple[Extent, ...]
    dtype: Literal["uint8", "float32"]
    member: Suffix | None = None  # None: the default of `member_names`
    field: str | None = Field(default=None, max_length=200)  # None: the whole member is the text
    mean: list[float] | None = None
    std: list[float] | None = None
    missing: AllowMissing = None

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        dtype, axes = KINDS[self.kind]
        if (self.dtype, len(self.shape)) != (dtype, axes):
            raise ValueError(
                f"view {self.name!r} is {self.dtype} of shape {self.shape}, but a view of kind "
                f"{self.kind} is {dtype} with {axes} axes"
            )
        for name, values in (("mean", self.mean), ("std", self.std)):
            if values is not None and (self.kind != "vector" or len(values) != self.shape[0]):
                raise ValueError(
                    f"view {self.name!r}: {len(values)} values of {name} do not fit it"
                )
            if any(not abs(value) <= MAX_STATISTIC for value in values or ()):
                raise ValueError(f"view {self.name!r}: {name} is not within ±{MAX_STATISTIC:g}")
        if self.kind == "text" and self.shape != (-1,):
            raise ValueError(f"view {self.name!r}: texts must have shape (-1,), got {self.shape}")
        if self.field is not None and self.kind != "text":
            raise ValueError(f"view {self.name!r}: only texts can be a field of JSON")
        if self.kind == "graph" and not all(map(range.__contains__, GRAPH_LIMITS, self.shape)):
            raise ValueError(
                f"view {self.name!r}: graphs of {self.extent} nodes, edges and labels are beyond "
                "the limits "
                f"{', '.join(f'{limits[0]:,} to {limits[-1]:,}' for limits in GRAPH_LIMITS)}"
            )
        if any(value < 0 for value in self.std or ()):  # 0: a constant column
            raise ValueError(f"view {self.name!r}: a std is below 0")
        return self

    @property
    def extent(self) -> str:
        """The shape in words: `218 × any × 3`."""
        return format_shape("any" if n < 0 else n for n in self.shape)


class Labels(Record):
    """The kind of the labels, and the names that their numbers stand for.

    | kind | an array of labels |
    |---|---|
    | multi_label | uint8 [rows, names], 1 where the name holds |
    | complementary | uint8 [rows, names], 1 where the name is known not to hold |
    | multi_class | int64 [rows], a number of `names` |
    | hierarchical | int64 [rows, levels], a number of `levels[i]` in column i, coarse to fine |
    | none | int64 [rows], all unlabelled |

    A row is unlabelled where all its numbers are `unlabelled_value`. With `unknown`, which only
    multi_label may have, some numbers of a row may be: those labels of the row are not known.
    """

    kind: Literal["multi_label", "multi_class", "hierarchical", "complementary", "none"]
    names: list[str]
    levels: list[list[str]] | None = None
    unknown: AllowMissing = None

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if (self.kind == "hierarchical") != (self.levels is not None):
            raise ValueError(
                "labels have levels only if their kind is hierarchical, and must have them then"
            )
        if (self.kind == "none") != (not self.names):
            raise ValueError("labels have names unless their kind is none, and none then")
        if self.levels is not None and (not self.levels or self.levels[-1] != self.names):
            raise ValueError("names of hierarchical labels are those of their last level")
        if self.unknown and self.kind != "multi_label":
            raise ValueError(
                f"single labels of a row are unknown, but the labels are {self.kind}, not "
                "multi_label: with other kinds a row has a label or has none"
            )
        if len(set(self.names)) != len(self.names):
            (name, _), *_ = Counter(self.names).most_common(1)
            raise ValueError(f"two labels have the name {name!r}; names must be unique")
        return self

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of an array of labels."""
        return np.dtype(np.uint8 if self.kind in ("multi_label", "complementary") else np.int64)

    @property
    def unlabelled_value(self) -> int:
        """The value that stands for an unknown label: 255 of uint8, -1 of int64."""
        return 255 if self.dtype == np.uint8 else -1

    def is_labelled(self, array: NDArray[Any]) -> NDArray[np.bool_]:
        """Returns which rows of an array of labels are labelled, [rows]."""
        is_known = array != self.unlabelled_value
        labelled: NDArray[np.bool_] = is_known.any(axis=tuple(range(1, array.ndim)))
        return labelled

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of one row's label: (names,), (levels,), or () for a class number."""
        if self.kind in ("multi_class", "none"):
            return ()
        return (len(self.names) if self.levels is None else len(self.levels),)

    def fault(self, array: NDArray[Any], rows: int) -> str | None:
        """Returns what is wrong with an array of labels for `rows` rows, or None."""
        shape = (rows, *self.row_shape)
        if array.dtype != self.dtype or array.shape != shape:
            return (
                f"{self.kind} labels must be {self.dtype} {shape}, got {array.dtype} {array.shape}"
            )
        num_values: int | NDArray[Any]  # labels must be below; one per column for levels
        if self.levels is not None:
            num_values = np.array([len(level) for level in self.levels])
        else:
            num_values = 2 if self.dtype == np.uint8 else len(self.names)
        is_known = self.is_labelled(array).reshape(rows, *(1 for _ in self.row_shape))
        if self.unknown:
            is_known = array != self.unlabelled_value
        outside = np.argwhere(((array < 0) | (array >= num_values)) & is_known)
        if len(outside):
            position = tuple(int(i) for i in outside[0])
            limit = num_values if isinstance(num_values, int) else int(num_values[position[1]])
            return f"labels must be 0 to {limit - 1}, got {array[position]} in row {position[0]}"
        return None


class Shard(Record):
    """One tar and its index: the number of rows, and sizes and checksums of both files."""

    file: str = Field(pattern=f"^{TAR_NAME}$")
    samples: Rows  # counts rows: a tar sample of vectors holds a block of them
    bytes: Count
    sha256: Sha256
    index_bytes: Count
    index_sha256: Sha256

    @property
    def index_file(self) -> str:
        """The name of the index beside the tar."""
        return index_name(self.file)

    @classmethod
    def of(cls, tar: Path, index: ShardIndex, tar_sum: FileSum | None = None) -> Shard:
        """Returns the record of a tar and of the index beside it; both must exist."""
        tar_sum = tar_sum or FileSum.of(tar)
        index_sum = FileSum.of(tar.with_name(index_name(tar.name)))
        return cls(
            file=tar.name,
            samples=int(index.rows.sum()),
            bytes=tar_sum.bytes,
            sha256=tar_sum.sha256,
            index_bytes=index_sum.bytes,
            index_sha256=index_sum.sha256,
        )

    def fault(self, folder: Path) -> str:
        """Returns how the tar differs from what was written, or "": see `FileSum.fault`."""
        return FileSum(bytes=self.bytes, sha256=self.sha256).fault(folder / self.file)


class InputFile(Record):
    """A publisher's file that went into the shards."""

    name: str
    bytes: Count
    sha256: Sha256


class Skipped(Record):
    """What was left out as it is bad: how much, and what the first are and lack."""

    count: Count
    first: list[str]

    @classmethod
    def of(cls, faults: Mapping[str, str]) -> Self | None:
        """Returns the record of faults by name, or None where there are none."""
        first = [one_line(f"{name} {fault}") for name, fault in [*faults.items()][:100]]
        return cls(count=len(faults), first=first) if faults else None

    def __str__(self) -> str:
        """Returns what `heron shards` prints of it."""
        return "\n".join([f"skipped {self.count:,}:", *self.first[:10]])


class BuiltFrom(Record):
    """Everything that decides the bytes of the shards; `version` is that of the source's code."""

    source: str
    version: int = 1
    options: dict[str, Any]
    files: list[InputFile]
    shard_rows: int


class Manifest(Artefact):
    """Everything that is known about a data set before its first shard is opened."""

    description: ClassVar[str] = "the manifest"
    remedy: ClassVar[str] = REBUILD
    version_key: ClassVar[str] = "schema_version"
    versions: ClassVar[tuple[int, ...]] = (SCHEMA_VERSION,)

    dataset: str
    schema_version: Literal[3]
    views: list[View] = Field(min_length=1)
    labels: Labels
    block_rows: Rows | None = None  # None: a row is a tar sample
    splits: dict[Name, list[Shard]]
    built_from: BuiltFrom
    seed: int | None = None
    skipped: Annotated[Skipped | None, Field(exclude_if=lambda value: value is None)] = None

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if len(set(self.members)) != len(self.members):
            raise ValueError(f"two members of a sample share a name: {self.members}")
        if self.block_rows is not None and any(
            -1 in view.shape or view.kind == "graph" for view in self.views
        ):
            raise ValueError(
                "texts, graphs and pictures of several sizes must be one tar sample each, not "
                "rows of a block"
            )
        if self.partial and self.foreign:
            raise ValueError("rows of tars indexed in place lack views; they must be whole")
        files = [shard.file for shards in self.splits.values() for shard in shards]
        if len(set(files)) != len(files):
            raise ValueError("a shard is listed twice")
        return self

    @property
    def members(self) -> list[str]:
        """A tar sample's members in order: views, labels, and `present` if views may be missing."""
        ours = [LABELS, PRESENT] if self.partial else [LABELS]
        return member_names(self.views, self.block_rows) + ([] if self.foreign else ours)

    @property
    def partial(self) -> bool:
        """Whether rows may lack some of their views."""
        return any(view.missing for view in self.views)

    @property
    def foreign(self) -> bool:
        """Whether others wrote the tars: they may hold more, and only the index has labels."""
        return self.built_from.source == FOREIGN_SOURCE

    def index_fault(self, shard: Shard, index: ShardIndex) -> str | None:
        """Returns how an index does not fit the manifest, or None."""
        rows, block_rows = index.rows, self.block_rows or 1
        if index.members.tolist() != self.members:
            return f"members must be {self.members}, got {index.members.tolist()}"
        if int(rows.sum()) != shard.samples:
            return f"{int(rows.sum())} rows instead of {shard.samples}"
        if (rows[:-1] != block_rows).any() or not 1 <= rows[-1] <= block_rows:
            return (
                f"samples must have {block_rows} rows, got {int(rows.min())} to {int(rows.max())}"
            )
        if min(index.offsets.min(), index.lengths.min()) < 0:  # `array_at` checks the end
            return "a member begins before the tar does"
        if (fault := self._present_fault(index)) is not None:
            return fault
        return self.labels.fault(index.labels, shard.samples)

    def _present_fault(self, index: ShardIndex) -> str | None:
        present = index.present
        if not self.partial:
            fault = "it says which views rows have, but all rows must have all"
            return None if present is None else fault
        shape = int(index.rows.sum()), len(self.views)
        if present is None or (present.dtype, present.shape) != (np.dtype(np.uint8), shape):
            actual = None if present is None else f"{present.dtype} {present.shape}"
            return f"which views each row has must be uint8 {shape}, got {actual}"
        required = [column for column, view in enumerate(self.views) if not view.missing]
        has_member = index.lengths[:, : len(self.views)] > 0
        if (
            (present > 1).any()
            or not (present.any(1).all() and present[:, required].all())
            or (self.block_rows is None and (has_member != present).any())
        ):
            return "a row lacks a view that it must have, or has one and no member for it"
        return None

    def rows(self, split: str) -> int:
        """Returns the number of rows in a split."""
        if split not in self.splits:
            raise ShardError(
                f"{self.dataset} has no split {split!r}; it has {', '.join(self.splits)}"
            )
        return sum(shard.samples for shard in self.splits[split])


def member_names(views: list[View], block_rows: int | None) -> list[str]:
    """Returns the member suffix of each view in a tar sample.

    Unless the view names its own, it is `jpg` for a single image and `VIEW.jpg` for one of several,
    `txt` or `VIEW.txt` for texts, and `VIEW.npy` for vectors, graphs and anything in blocks.
    """
    kind_counts = Counter(view.kind for view in views)

    def suffix(view: View) -> str:
        if view.kind in ("vector", "graph") or block_rows is not None:
            return f"{view.name}.npy"
        ending = {"image": "jpg", "text": "txt"}[view.kind]
        return ending if kind_counts[view.kind] == 1 else f"{view.name}.{ending}"

    return [view.member or suffix(view) for view in views]


def index_name(tar: str) -> str:
    """Returns the name of a tar's index: `train-000000.index.npz` for `train-000000.tar`."""
    return tar.removesuffix(".tar") + ".index.npz"


def load_manifest(folder: Path | str | Store) -> Manifest:
    """Reads the manifest of a folder or URL of shards; ShardError where it is missing or bad."""
    store = folder if isinstance(folder, Store) else open_store(folder)
    where = store.where(MANIFEST)
    try:
        return Manifest.parse(store.read_bytes(MANIFEST), where)
    except Missing as fault:
        problem = fault.reason
        remedy = "pass a folder that `heron shards build` or `heron shards index` made"
        if store.exists(JOURNAL):
            problem = "an unfinished build"
            remedy = "run the same `heron shards build` again to finish it"
        raise ShardError(f"cannot read the manifest {where}: {problem}; {remedy}") from None
