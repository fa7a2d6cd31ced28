"""Parquet files, and data sets of Hugging Face: saved by `datasets`, or on the Hub."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from heron.base.dotted import suggest, without_case
from heron.base.errors import FILL, SourceError, first_few, list_faults, short_repr
from heron.shards.manifest import Labels
from heron.shards.picture import MAGIC
from heron.sources.base import (
    SINGLE_SPLIT,
    Column,
    FileOrFolder,
    Loaded,
    as_float32,
    split_ranges,
    vectors,
)
from heron.sources.folder import PictureSource
from heron.sources.labels import (
    CAPTIONS,
    LABEL_NAMES,
    MINUS_ONE,
    MinusOne,
    encode_labels,
    encode_sets,
)
from heron.sources.leaks import KEEP, names_keys
from heron.sources.parquet_files import Part, fetch, find_files, group_by_split

if TYPE_CHECKING:
    from heron.sources.arrow import ArrowRows

SAMPLE = 1000  # rows that tell texts from classes
BATCH = 1024  # pictures checked together


class Parquet(PictureSource):
    """Parquet files, or a data set of Hugging Face: saved in a folder, or a name on the Hub.

    Views are columns, by their kind: pictures (files, as bytes in the column), texts, and vectors
    (numbers, or lists of as many in every row). Labels are one column of class numbers,
    names, or lists of either, or several columns of 0 and 1. Splits are those of the data set, or
    by the words train, val and test in the names of the files or their folders. No script of a data
    set is run, and nothing is unpickled. Where no view is asked for, what the types, the names and
    the values of the columns tell is taken and said, if there is one reading of them.
    """

    name: ClassVar[str] = "parquet"
    left_out: ClassVar[tuple[str, ...]] = ("keep", "on_error")
    remedy: ClassVar[str] = "fill the row, drop it first"
    examples: ClassVar[str] = (
        "heron shards build parquet --data saved/birds --image image --text caption --label kind "
        "--out data/birds\n  heron shards build parquet --hub cifar10@COMMIT --image img --label "
        "label --out data/cifar10"
    )

    data: list[FileOrFolder] | None = Field(
        None,
        min_length=1,
        description="Parquet files, folders of them, or a folder of Dataset.save_to_disk",
    )
    hub: str | None = Field(
        None, description="instead, NAME@COMMIT of a data set on the Hub that has Parquet files"
    )
    subset: str | None = Field(
        None, description="the folder of a data set's files that is read (default: all)"
    )
    image: list[str] | None = Field(
        None, description="columns of pictures, VIEW=COLUMN for a view of another name"
    )
    text: list[str] | None = Field(None, description="columns of texts, or VIEW=COLUMN")
    vector: list[str] | None = Field(
        None, description="columns of numbers, or VIEW=COLUMN,COLUMN,... for one view of several"
    )
    label: list[str] | None = Field(None, description="the columns of the labels (default: none)")
    minus_one: MinusOne | None = Field(None, description=MINUS_ONE)
    keep: list[str] = Field([], description=KEEP)
    missing_label: Literal["error", "unlabelled"] = Field(
        "error", description="what a row is whose label is null"
    )

    @model_validator(mode="after")
    def _check_data_or_hub(self) -> Self:
        if (self.data is None) == (self.hub is None):
            raise ValueError("set either data or hub, not both or neither")
        return self

    @property
    def dataset(self) -> str:
        """The name of the data set on the Hub, or of the first file or folder."""
        if self.hub:
            return self.hub.partition("@")[0].rpartition("/")[2]
        return (self.data or [Path()])[0].resolve().stem

    @property
    def files(self) -> list[Path]:
        """The files of all splits, in the order of the splits."""
        return [path for part in self._parts for path in (*part.files, *part.indices)]

    @property
    def block_rows(self) -> int | None:  # type: ignore[override]
        """None where rows have pictures or texts: each is a tar sample."""
        return None if self._chosen["image"] or self._chosen["text"] else 256

    def options(self) -> dict[str, Any]:
        """Returns the options, with the columns that were found."""
        return super().options() | {k: v for k, v in self._chosen.items() if v}

    def load(self) -> Loaded:
        """Opens the files, and checks the header of every picture and every label."""
        if not sum(self._rows.rows):
            raise SourceError(f"{self.files[0].name} has no rows; pass other files")
        views = self._views()
        labels, targets = self._labels()
        counts = iter(self._rows.rows)
        sizes = {split: sum(islice(counts, len(parts))) for split, parts in self._splits.items()}
        splits = split_ranges(sizes, merge=False)
        bad = [int(name.rpartition(" ")[2]) for name in self.skipped]
        left = {name: np.setdiff1d(rows, bad) if bad else rows for name, rows in splits.items()}
        kept = {name: rows for name, rows in left.items() if len(rows)}
        if not kept:
            raise SourceError(f"{self.dataset}: {list_faults(self.skipped, 1)}: no row is left")
        keys = [f"{name}-{n:08d}" for name, rows in splits.items() for n in range(len(rows))]
        used = {column for _, columns in self._view_columns.values() for column in columns}
        used |= set(self._chosen["label"])
        unused = [name for name in self._rows.schema.names if name not in used]
        return Loaded(
            views=views,
            targets=targets,
            labels=labels,
            splits=kept,
            keys=keys if self.block_rows is None else None,
            columns={
                view: columns
                for view, (kind, columns) in self._view_columns.items()
                if kind == "vector" and len(columns) == views[view].shape[1]
            },
            warning="; ".join(
                [f"read as {_words(self._chosen)}"] * (not self._is_asked)
                + [f"not read: columns {first_few(unused)} (see --vector)"] * bool(unused)
            ),
        )

    @cached_property
    def _rows(self) -> ArrowRows:
        from heron.sources.arrow import ArrowRows  # imported late: it loads pyarrow

        return ArrowRows(self._parts)

    @property
    def _parts(self) -> list[Part]:
        return [part for parts in self._splits.values() for part in parts]

    @cached_property
    def _splits(self) -> dict[str, list[Part]]:
        splits: dict[str, list[Part]] = {}
        if self.hub:
            splits = group_by_split(fetch(self.hub, self.subset))
        for path in self.data or []:
            folder = path / (self.subset or "") if path.is_dir() else path
            for split, parts in find_files(folder).items():
                splits.setdefault(split, []).extend(parts)
        if SINGLE_SPLIT in splits and len(splits) > 1:
            first = {split: parts[0].files[0].name for split, parts in splits.items()}
            other = next(name for split, name in first.items() if split != SINGLE_SPLIT)
            raise SourceError(
                f"{first[SINGLE_SPLIT]} is in no split, but {other} is in one; rename it "
                "with the word train, val or test in its name, or its folder's"
            )
        return splits

    @property
    def _is_asked(self) -> bool:
        return bool(self.image or self.text or self.vector)

    @cached_property
    def _chosen(self) -> dict[str, list[str]]:
        """The columns of each kind, as options: those that are asked for, or what they tell."""
        names = self._rows.schema.names

        def typed(argument: str) -> str:  # as the files write it
            view, equals, columns = argument.rpartition("=")
            return view + equals + ",".join(without_case(c, names) for c in columns.split(","))

        kinds = ("image", "text", "vector", "label")
        asked = {kind: [*map(typed, getattr(self, kind) or ())] for kind in kinds}
        if self._is_asked:
            return asked
        found = guess_columns(self._rows)
        if asked["label"]:
            found = {k: [c for c in cs if c not in asked["label"]] for k, cs in found.items()}
            found["label"] = asked["label"]
        elif len(found["label"]) > 1:
            words = _words(found | {"label": found["label"][:1]})
            raise SourceError(
                f"{self.files[0].name}: no view was chosen, and the columns "
                f"{' and '.join(found['label'][:8])} may be the label; choose one with --label, "
                f"as in {words}"
            )
        return found

    @cached_property
    def _view_columns(self) -> dict[str, tuple[str, list[str]]]:
        """The kind and the columns of each view."""
        views: dict[str, tuple[str, list[str]]] = {}
        for kind in ("image", "text", "vector"):
            for argument in self._chosen[kind]:
                view, equals, columns = argument.rpartition("=")
                view = view if equals else columns
                if view in views:
                    raise SourceError(f"{self.name}: a second view {view!r}; use VIEW=COLUMN")
                views[view] = kind, columns.split(",")
        view_columns = [column for _, columns in views.values() for column in columns]
        for column in [*view_columns, *self._chosen["label"]]:
            if column not in self._rows.schema.names:
                raise SourceError(
                    f"{self.files[0].name}: no column {column!r}, only "
                    f"{', '.join(self._rows.schema.names)}; "
                    f"{suggest(column, self._rows.schema.names)}"
                )
        return views

    def _views(self) -> dict[str, Column]:
        if not self._view_columns:
            columns = [f"{field.name} ({field.type})" for field in self._rows.schema]
            raise SourceError(
                f"{self.files[0].name}: no view was chosen; it has the columns "
                f"{', '.join(columns)}; choose some with --image, --text or --vector, and --label"
            )
        views: dict[str, Column] = {}
        for view, (kind, columns) in self._view_columns.items():
            where = f"{self.dataset}: column {', '.join(columns)}"
            if kind != "vector":
                read_bytes = partial(self._rows.files_of, columns[0], kind, where)
                extent: tuple[int, ...] = (-1,)
                member = None
                if kind == "image":
                    extent, member, _ = self.checked[0][view]
                views[view] = Column((sum(self._rows.rows), *extent), read_bytes, member)
                continue
            read = partial(self._numbers, columns, where)
            shape = sum(self._rows.rows), read(np.zeros(1, np.int64)).shape[1]
            views[view] = vectors(shape, read, f"{where}: view {view!r}", FILL)
        return views

    def _numbers(self, columns: list[str], where: str, indices: NDArray[np.int64]) -> NDArray[Any]:
        """Reads columns side by side; as float32 where their common dtype could round them."""
        arrays = [self._rows.numbers_of(column, where, indices) for column in columns]
        if len({array.dtype for array in arrays}) == 1:
            return np.hstack(arrays)
        return np.hstack([as_float32(array, indices, where, FILL) for array in arrays])

    @property
    def picture_views(self) -> list[str]:
        """The views of pictures."""
        return [view for view, (kind, _) in self._view_columns.items() if kind == "image"]

    def payloads(self, view: str) -> Iterator[tuple[str, Any]]:
        """Reads every picture of a view, a few together."""
        column, total = self._view_columns[view][1][0], sum(self._rows.rows)
        for start in range(0, total, BATCH):
            rows = np.arange(start, min(start + BATCH, total))
            for row, value in zip(rows, self._rows.take(column, rows).to_pylist(), strict=True):
                data = value.get("bytes") if isinstance(value, dict) else value
                yield f"column {column}, row {row}", data

    def _labels(self) -> tuple[Labels, NDArray[Any]]:
        total = sum(self._rows.rows)
        if not (label := self._chosen["label"]):
            return Labels(kind="none", names=[]), np.full(total, -1)
        where = f"{self.dataset}: label {', '.join(label)}"
        columns = [self._rows.take(name, np.arange(total)).to_pylist() for name in label]
        if len(columns) > 1:
            for name, values in zip(label, columns, strict=True):
                if bad := [v for v in values if not isinstance(v, int) or v not in (-1, 0, 1)]:
                    raise SourceError(
                        f"{self.dataset}: label {name} is {short_repr(bad[0])} in a row; several "
                        f"label columns must be 0 or 1: unknown labels are not read; {FILL}"
                    )
            array = np.array(columns, int).T
            return encode_labels(array, where, "multi_label", label, self.minus_one)
        names = self._rows.class_names(label[0])
        values, labelled = columns[0], np.array([value is not None for value in columns[0]])
        if not labelled.all() and self.missing_label == "error":
            raise SourceError(
                f"{where} is null in row {int(labelled.argmin())}, but each row needs a label; "
                "treat such rows as unlabelled with --missing-label unlabelled"
            )
        present = [value for value in values if value is not None]
        if not present:
            raise SourceError(f"{where}: no row has a label; remove --label")
        if isinstance(present[0], list):
            labels, encoded = encode_sets(present, names, where, self.minus_one)
        else:
            if not isinstance(present[0], int | str):
                raise SourceError(
                    f"{where} must be a class in each row, got {short_repr(present[0])}"
                )
            array = np.array(present) * 1 if isinstance(present[0], int) else np.array(present)
            labels, encoded = encode_labels(array, where, None, names, self.minus_one)
        targets = np.full((total, *labels.row_shape), labels.unlabelled_value, labels.dtype)
        targets[labelled] = encoded
        return labels, targets


def guess_columns(rows: ArrowRows) -> dict[str, list[str]]:
    """Returns the options that the columns tell; several labels where each may be the one.

    Pictures, lists of floats, and texts called `caption` or alike are views. Another text is one if
    it differs in most rows and there is no picture; so are all numbers of a table of numbers alone.
    """
    found: dict[str, list[str]] = {"image": [], "text": [], "vector": [], "label": []}
    numbers, texts, classes, named = list[str](), list[str](), list[str](), list[str]()
    sample = np.arange(min(sum(rows.rows), SAMPLE))
    for field in rows.schema:
        name = field.name
        if set(name) & {"=", ","} or _is_key(rows, name):  # no option, or no feature
            continue
        values = rows.take(name, sample[:8]).drop_null()
        first = next((value for value in values.to_pylist() if value is not None), None)
        if isinstance(first, dict | bytes):
            data = first.get("bytes") if isinstance(first, dict) else first
            if any(magic.match(data or b"") for magic in MAGIC.values()):
                found["image"].append(name)
        elif rows.class_names(name) or name.lower() in LABEL_NAMES:
            named.append(name)
        elif isinstance(first, list) and first and isinstance(first[0], float | list):
            found["vector"].append(name)
        elif isinstance(first, int | float):
            numbers.append(name)
        elif isinstance(first, str):
            cells = rows.take(name, sample).to_pylist()
            differ = 2 * len(set(cells)) > len(cells)
            (texts if differ or name.lower() in CAPTIONS else classes).append(name)
        elif isinstance(first, list):
            classes.append(name)
    found["text"] = [name for name in texts if name.lower() in CAPTIONS]
    if not any(found.values()):
        found["text"] = texts if len(texts) == 1 else []
        if numbers and not texts and (named or not classes):
            found["vector"] = [f"features={','.join(numbers)}"] if len(numbers) > 1 else numbers
    found["label"] = named or ([] if found["text"] else classes)
    return found


def _is_key(rows: ArrowRows, name: str) -> bool:
    """Returns whether a column is an index of pandas, or called a key and unlike in each row."""
    if name in ((rows.schema.pandas_metadata or {}).get("index_columns") or ()):
        return True
    dtype = rows.schema.field(name).type
    if not names_keys(name) or not ("int" in str(dtype) or "string" in str(dtype)):
        return False
    values = rows.take(name, np.arange(sum(rows.rows)))
    return 1 < len(values.unique()) == len(values) and not values.null_count


def _words(options: Mapping[str, list[str]]) -> str:
    """Returns the options as they are typed."""
    given = {option: columns for option, columns in options.items() if columns}
    return " ".join(f"--{o} {' '.join(map(shlex.quote, columns))}" for o, columns in given.items())
