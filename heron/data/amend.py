"""Copies a data set with what was decided on it: labels changed or removed, samples left out."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from heron.base.decisions import DROP, UNKNOWN, Decision, read_decisions
from heron.base.errors import SourceError
from heron.data.label_files import rows_by_key
from heron.data.reader import Reader
from heron.data.rows import Rows as RowNumbers
from heron.shards.manifest import LABELS, PRESENT, Labels, View, member_names
from heron.shards.source import Rows, Source

Undecided = Literal["skip", "wrong", "unknown", "drop"]
FILE = "--decisions"
NAME_BYTES = 100  # of a member of a tar: a key, a dot and a suffix


@dataclass(frozen=True)
class Amendment:
    """What decisions make of a data set.

    `labels` are those of all its rows, in the stored format; `kept` says which rows stay.
    """

    labels: NDArray[Any]
    kept: NDArray[np.bool_]
    counts: dict[str, int]  # of labels changed and removed, and of samples left out


class Amended(Source):
    """The samples of a data set, without those left out, and with the labels decided on."""

    name: ClassVar[str] = "amended"

    data: str
    decisions: Path
    undecided: Undecided = "skip"
    first: int | None = None

    @cached_property
    def reader(self) -> Reader:
        """The data set that is copied."""
        return Reader(self.data)

    @cached_property
    def amendment(self) -> Amendment:
        """Its labels and rows; a SourceError if the decisions do not fit it."""
        lines = read_decisions(self.decisions, FILE, SourceError, self.undecided, self.first)
        acting = [line for line in lines if line.acts]
        if not acting:
            raise SourceError(
                f"{FILE} {self.decisions} decides on nothing: no line of its column 'decision' is "
                "wrong, unknown or drop; fill it in (heron serve does), or pass --undecided "
                "wrong --first N"
            )
        return amend(self.reader, acting, str(self.decisions))

    @property
    def dataset(self) -> str:
        """The name of the data set that is copied."""
        return self.reader.manifest.dataset

    @property
    def block_rows(self) -> int | None:  # type: ignore[override]
        """That of the data set that is copied."""
        return self.reader.manifest.block_rows

    @property
    def views(self) -> list[View]:
        """Its views; their statistics are measured again."""
        measured = {"mean": None, "std": None}
        return [view.model_copy(update=measured) for view in self.reader.manifest.views]

    @property
    def labels(self) -> Labels:
        """Its labels, some of which may be unknown now."""
        labels, array = self.reader.manifest.labels, self.amendment.labels
        if labels.kind == "multi_label":
            unknown = array == labels.unlabelled_value
            if (unknown.any(1) & ~unknown.all(1)).any():
                return labels.model_copy(update={"unknown": "allow"})
        return labels

    @cached_property
    def _rows(self) -> dict[str, RowNumbers]:
        rows = {split: self.reader.split_rows(split) for split in self.reader.splits}
        kept = {split: numbers[self.amendment.kept[numbers]] for split, numbers in rows.items()}
        if empty := [split for split, numbers in kept.items() if not len(numbers)]:
            raise SourceError(
                f"{FILE} {self.decisions} leaves out every sample of split '{empty[0]}'; a split "
                "must keep one or more"
            )
        return kept

    @property
    def splits(self) -> dict[str, int]:
        """The number of rows that each split keeps."""
        return {split: len(rows) for split, rows in self._rows.items()}

    @property
    def files(self) -> list[Path]:
        """The decisions."""
        return [self.decisions]

    def options(self) -> dict[str, Any]:
        """Returns the options, and where the data set came from."""
        manifest = self.reader.manifest
        skipped = manifest.skipped and manifest.skipped.model_dump(mode="json")
        history = {
            "fingerprint": manifest.fingerprint,
            "built_from": manifest.built_from.model_dump(mode="json"),
            "skipped": skipped,
        }
        own = {"undecided": self.undecided, "first": self.first, "seed": self.seed}
        return own | self.amendment.counts | {"of": history}

    def read(self, split: str, start: int, stop: int) -> Rows:
        """Returns rows [start, stop) of those that a split keeps."""
        reader, rows = self.reader, self._rows[split][start:stop]
        whole = reader.manifest.block_rows is None
        views: dict[str, NDArray[Any] | list[Any]] = {}
        for view in reader.manifest.views:
            if whole and view.kind != "vector":
                views[view.name] = reader.payloads(view.name, rows)
                continue
            values = reader.read(view.name, rows)
            if view.missing and not (present := reader.present(rows, [view.name])[:, 0]).all():
                if values.dtype.kind != "f":
                    raise SourceError(
                        f"view '{view.name}' is of pictures in blocks, and rows lack it: such data "
                        "cannot be written again; use data.protocol.leave_out"
                    )
                values[~present] = np.nan
            views[view.name] = values
        keys = reader.sample_keys(rows) if whole else None
        suffixes = *member_names(self.views, self.block_rows), LABELS, PRESENT
        most = NAME_BYTES - 1 - max(map(len, suffixes))
        if long := [key for key in keys or [] if len(key.encode()) > most]:
            raise SourceError(
                f"the key '{long[0]}' has more than the {most} bytes that fit a shard; rename the "
                "samples, or use data.protocol.leave_out"
            )
        return Rows(views, self.amendment.labels[rows], keys)


def amend(reader: Reader, decisions: Iterable[Decision], where: str) -> Amendment:
    """Applies decisions to the labels of a data set.

    Raises SourceError if one names no sample, label or class, or was made of another label.
    """
    everyone = np.arange(int(reader.starts[-1]))
    row_of = rows_by_key(reader)
    labels, kept = reader.labels(everyone).copy(), np.ones(len(everyone), bool)
    counts = {"changed": 0, "removed": 0, "left_out": 0}
    change = _Change(reader.manifest.labels, labels)
    for line in decisions:
        if (row := row_of.get(line.key)) is None:
            raise SourceError(
                f"{FILE} {where}: {reader.store} has no sample '{line.key}'; pass decisions on "
                "its own samples"
            )
        if line.decision == DROP:
            kept[row] = False
            continue
        try:
            change(row, line)
        except ValueError as fault:
            raise SourceError(f"{FILE} {where}, sample '{line.key}': {fault}") from None
        counts["removed" if line.decision == UNKNOWN else "changed"] += 1
    counts["left_out"] = int((~kept).sum())
    return Amendment(labels, kept, counts)


class _Change:
    """Changes labels in place, in the stored format of a kind."""

    def __init__(self, labels: Labels, array: NDArray[Any]) -> None:
        self.kind, self.array, self.unlabelled = labels.kind, array, labels.unlabelled_value
        self.names = {name: number for number, name in enumerate(labels.names)}
        self.titles = labels.names
        self.paths: Mapping[int, Sequence[int]] = {}
        if labels.kind == "hierarchical":  # a class of the last level has one path
            self.paths = {path[-1]: path for path in np.unique(array, axis=0).tolist()}

    def __call__(self, row: int, line: Decision) -> None:
        """Changes one label; ValueError if the line does not fit the stored one."""
        if self.kind in ("none", "complementary"):
            raise ValueError(f"{self.kind} labels cannot be changed; drop the sample")
        if self.kind == "multi_label":
            self._change_one(row, line)
            return
        number = int(self.array[row, -1] if self.kind == "hierarchical" else self.array[row])
        now = "no class" if number == self.unlabelled else self.titles[number]
        if now != line.given:
            raise ValueError(_other(now, line.given))
        if line.decision == UNKNOWN:
            self.array[row] = self.unlabelled
            return
        likely = self._number(line.likely, "class")
        if likely == number:
            raise ValueError(f"'{now}' is what it has already; say what it is instead")
        if self.kind == "hierarchical" and likely not in self.paths:
            raise ValueError(f"no sample is of class '{line.likely}', so its parents are not known")
        self.array[row] = self.paths.get(likely, likely)

    def _change_one(self, row: int, line: Decision) -> None:
        if not line.label:
            raise ValueError("the line is of no label, so that only drop can be decided")
        column = self._number(line.label, "label")
        given, likely = (text.removesuffix(".0") for text in (line.given, line.likely))
        now = int(self.array[row, column])
        shown = "unknown" if now == self.unlabelled else str(now)
        if shown != given:
            raise ValueError(_other(f"'{line.label}' {shown}", line.given))
        if line.decision == UNKNOWN:
            self.array[row, column] = self.unlabelled
        elif likely in ("0", "1") and likely != given:
            self.array[row, column] = int(likely)
        else:
            raise ValueError(f"what is likely must be 0 or 1, and not what it is, got '{likely}'")

    def _number(self, name: str, what: str) -> int:
        if name not in self.names:
            raise ValueError(f"there is no {what} '{name}' among {', '.join(self.titles[:20])}")
        return self.names[name]


def _other(now: str, given: str) -> str:
    return (
        f"the data set has {now}, but the decision was made on '{given}'; audit this data set, or "
        "amend the one that was audited"
    )
