"""Mulan's multi-label sets: ARFF files, and an XML that says which attributes are labels."""

from __future__ import annotations

import re
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, FilePath

from heron.shards.errors import SourceError
from heron.shards.manifest import Labels, View
from heron.shards.sources.base import WHOLE, Rows, Source

NAMESPACE = "{http://mulan.sourceforge.net/labels}"
ATTRIBUTE = re.compile(r"@attribute\s+('[^']*'|\"[^\"]*\"|\S+)\s+(.+)", re.IGNORECASE)
NUMERIC = ("numeric", "real", "integer")


class Mulan(Source):
    """Mulan's multi-label sets, such as Scene: ARFF files with an XML of label names.

    The files are laid end to end in one split, `all`, for a protocol to draw its folds from.
    """

    name: ClassVar[str] = "mulan"
    examples: ClassVar[str] = (
        "heron shards build mulan --arff scene-train.arff scene-test.arff --xml scene.xml "
        "--out data/scene"
    )

    arff: list[FilePath] = Field(min_length=1, description="ARFF files, in the order of their rows")
    xml: FilePath = Field(description="the XML that names the labels")
    view_kind: Literal["noise", "single"] = Field(
        "noise",
        description="noise: two views, the first with Gaussian noise on even rows, the second on "
        "odd ones; single: one view, the features as they are",
    )
    noise: float = Field(0.01, ge=0, description="factor of the noise")

    @property
    def dataset(self) -> str:
        """The name of the XML: `scene` for scene.xml."""
        return self.xml.stem

    @property
    def views(self) -> list[View]:
        """`view1` and `view2`, or `view1` alone."""
        width = self._table.features.shape[1]
        return [
            View(name=name, kind="vector", shape=(width,), dtype="float32") for name in self._values
        ]

    @property
    def labels(self) -> Labels:
        """The labels the XML names, in its order."""
        return Labels(kind="multi_label", names=self._names)

    @property
    def splits(self) -> dict[str, int]:
        """One split of all rows."""
        return {WHOLE: len(self._table.labels)}

    @property
    def files(self) -> list[Path]:
        """The ARFF files and the XML."""
        return [*self.arff, self.xml]

    def read(self, split: str, start: int, stop: int) -> Rows:
        """Rows of the files laid end to end."""
        views: dict[str, NDArray[Any] | list[bytes]] = {
            name: values[start:stop] for name, values in self._values.items()
        }
        return Rows(views, self._table.labels[start:stop])

    @cached_property
    def _names(self) -> list[str]:
        try:
            root = ElementTree.parse(self.xml).getroot()
        except (ElementTree.ParseError, LookupError, ValueError) as fault:  # of its encoding
            raise SourceError(
                f"{self.xml.name}: not XML ({fault}); expected Mulan's labels"
            ) from None
        names = [label.get("name", "") for label in root.iter(f"{NAMESPACE}label")]
        if not names:
            raise SourceError(
                f"{self.xml.name}: names no label; expected <label name=...> elements in the "
                f"namespace {NAMESPACE.strip('{}')}"
            )
        return names

    @cached_property
    def _table(self) -> _Table:
        tables = [read_arff(path, self._names, self.xml.name) for path in self.arff]
        for path, table in zip(self.arff, tables, strict=True):
            for found, first in zip_longest(table.attributes, tables[0].attributes):
                if found != first:
                    raise SourceError(
                        f"{path.name}: attribute {found!r} where {self.arff[0].name} has {first!r};"
                        " give the files of one data set"
                    )
        return _Table(
            tables[0].attributes,
            np.concatenate([table.features for table in tables]),
            np.concatenate([table.labels for table in tables]),
        )

    @cached_property
    def _values(self) -> dict[str, NDArray[np.float32]]:
        """The features once or twice; drawn whole, since the noise has the moments of all rows."""
        features = self._table.features
        if self.view_kind == "single":
            return {"view1": features}
        random = np.random.default_rng(self.seed)
        views = {}
        for name, first in (("view1", 0), ("view2", 1)):
            values = features.copy()
            rows = values[first::2]
            rows += self.noise * random.normal(rows.mean(), rows.std(), rows.shape).astype("f4")
            views[name] = values
        return views


class _Table(NamedTuple):
    attributes: list[str]
    features: NDArray[np.float32]
    labels: NDArray[np.uint8]


def read_arff(path: Path, label_names: list[str], xml: str) -> _Table:
    """Read an ARFF file, dense or sparse, and part its labels from its features."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    kinds: dict[str, str] = {}
    data = len(lines)
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if text.lower().startswith("@data"):
            data = number
            break
        if text.lower().startswith("@attribute"):
            parts = ATTRIBUTE.match(text)
            if parts is None:
                raise SourceError(f"{path.name}, line {number}: not an @attribute NAME TYPE")
            kinds[parts[1].strip("'\"")] = parts[2].strip().lower().replace(" ", "")
    _check_attributes(path, kinds, label_names, xml)
    numbered = [
        (number, text)
        for number, text in enumerate(map(str.strip, lines[data:]), data + 1)
        if text and not text.startswith("%")
    ]
    if not numbered:
        raise SourceError(f"{path.name}: no rows after @data; expected an ARFF file with data")
    names = list(kinds)
    values = _read_rows(path, numbered, names)
    columns = [names.index(label) for label in label_names]
    is_feature = np.ones(len(names), bool)
    is_feature[columns] = False
    with np.errstate(over="ignore"):  # what is too large becomes infinite
        features = values[:, is_feature].astype(np.float32)
    of_features = [name for name, is_one in zip(names, is_feature, strict=True) if is_one]
    finite = np.isfinite(features)
    _check(path, numbered, of_features, finite, values[:, is_feature], "a finite float32")
    labels = values[:, columns]
    _check(path, numbered, label_names, (labels == 0) | (labels == 1), labels, "a label of 0 or 1")
    return _Table(names, features, labels.astype(np.uint8))


def _check_attributes(path: Path, kinds: dict[str, str], labels: list[str], xml: str) -> None:
    """Every label is an attribute {0,1}, and every attribute {0,1} a label."""
    if not kinds:
        raise SourceError(f"{path.name}: no @attribute lines; expected an ARFF file")
    for label in labels:
        if label not in kinds:
            raise SourceError(
                f"{path.name}: no attribute {label!r}, which {xml} names as a label; "
                "give the XML of this data set"
            )
    for name, kind in kinds.items():
        if kind in ("{0,1}", "{1,0}") and name not in labels:
            raise SourceError(
                f"{path.name}: attribute {name!r} is {kind}, a label, but {xml} does not name it; "
                "add it to the XML, or declare it numeric if it is a feature"
            )
        if kind not in NUMERIC and name not in labels:
            raise SourceError(
                f"{path.name}: attribute {name!r} is {kind}; expected {', '.join(NUMERIC)}"
            )


def _read_rows(
    path: Path, numbered: list[tuple[int, str]], names: list[str]
) -> NDArray[np.float64]:
    for number, line in numbered:
        if not line.startswith("{") and (found := line.count(",") + 1) != len(names):
            raise SourceError(
                f"{path.name}, line {number}: {found} columns; expected {len(names)}, "
                "one for each @attribute"
            )
    if not any(line.startswith("{") for _, line in numbered):
        try:
            return np.loadtxt([line for _, line in numbered], delimiter=",", ndmin=2, comments=None)
        except ValueError:
            pass  # some value is no number: read slowly, to say which
    values = np.zeros((len(numbered), len(names)))
    for row, (number, line) in enumerate(numbered):
        for column, text in _cells(line):
            if not 0 <= column < len(names):
                raise SourceError(
                    f"{path.name}, line {number}: cell {text!r} names no column; "
                    f"expected COLUMN VALUE, columns from 0 to {len(names) - 1}"
                )
            try:
                values[row, column] = float(text)
            except ValueError:
                raise SourceError(
                    f"{path.name}, line {number}, column {names[column]!r}: found {text!r}; "
                    "expected a finite number; fill or drop missing values first"
                ) from None
    return values


def _cells(line: str) -> list[tuple[int, str]]:
    """Columns and texts of a row: all of a dense one, those named of a sparse `{i v, ...}`."""
    if not line.startswith("{"):
        return [(column, text.strip()) for column, text in enumerate(line.split(","))]
    cells = []
    for cell in filter(None, map(str.strip, line.strip("{}").split(","))):
        column, _, text = cell.partition(" ")
        cells.append((int(column) if column.isdigit() else -1, text.strip()))
    return cells


def _check(
    path: Path,
    numbered: list[tuple[int, str]],
    names: list[str],
    good: NDArray[np.bool_],
    values: NDArray[np.float64],
    expected: str,
) -> None:
    if good.all():
        return
    row, column = (int(i) for i in np.argwhere(~good)[0])
    raise SourceError(
        f"{path.name}, line {numbered[row][0]}, column {names[column]!r}: "
        f"found {values[row, column]:g}; expected {expected}"
    )
