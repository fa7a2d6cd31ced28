"""Mulan's multi-label sets: ARFF files, and an XML that says which attributes are labels."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, FilePath

from heron.shards.errors import SourceError
from heron.shards.manifest import Labels
from heron.shards.sources.base import WHOLE, InMemory, Loaded

NAMESPACE = "{http://mulan.sourceforge.net/labels}"
ATTRIBUTE = re.compile(r"@attribute\s+('[^']*'|\"[^\"]*\"|\S+)\s+(.+)", re.IGNORECASE)
NUMERIC = ("numeric", "real", "integer")


class Mulan(InMemory):
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
    def files(self) -> list[Path]:
        """The ARFF files and the XML."""
        return [*self.arff, self.xml]

    def load(self) -> Loaded:
        """Reads the files, and lays them end to end."""
        names = self._label_names()
        tables = [read_arff(path, names, self.xml.name) for path in self.arff]
        for path, table in zip(self.arff, tables, strict=True):
            for found, first in zip_longest(table.attributes, tables[0].attributes):
                if found != first:
                    raise SourceError(
                        f"{path.name}: attribute {found!r} where {self.arff[0].name} has {first!r};"
                        " give the files of one data set"
                    )
        return Loaded(
            views=self._views(np.concatenate([table.features for table in tables])),
            targets=np.concatenate([table.labels for table in tables]),
            labels=Labels(kind="multi_label", names=names),
            splits={WHOLE: range(sum(len(table.labels) for table in tables))},
        )

    def _label_names(self) -> list[str]:
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

    def _views(self, features: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
        """Returns the features once or twice; the noise has the moments of all rows."""
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


class _ArffFile(NamedTuple):
    """An ARFF file: float32 [rows, features] and uint8 [rows, labels]."""

    attributes: list[str]
    features: NDArray[np.float32]
    labels: NDArray[np.uint8]


def read_arff(path: Path, label_names: list[str], xml: str) -> _ArffFile:
    """Reads an ARFF file, dense or sparse, and parts its labels from its features.

    SciPy's reader knows no sparse rows and names no line.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    kinds, data = _read_header(path, lines)
    _check_attributes(path, kinds, label_names, xml)
    names = list(kinds)
    numbers, values = _read_rows(path, lines, data, names)
    columns = [names.index(label) for label in label_names]
    others = np.setdiff1d(np.arange(len(names)), columns)
    with np.errstate(over="ignore"):  # what is too large becomes infinite
        features = values[:, others].astype(np.float32)
    labels = values[:, columns]
    for good, part, expected in (
        (np.isfinite(features), others, "a finite float32"),
        ((labels == 0) | (labels == 1), columns, "a label of 0 or 1"),
    ):
        if len(bad := np.argwhere(~good)):
            row, column = int(bad[0, 0]), int(part[bad[0, 1]])
            raise SourceError(
                f"{path.name}, line {numbers[row]}, column {names[column]!r}: "
                f"found {values[row, column]:g}; expected {expected}"
            )
    return _ArffFile(names, features, labels.astype(np.uint8))


def _read_header(path: Path, lines: list[str]) -> tuple[dict[str, str], int]:
    """Returns the type of each attribute, and the number of the line `@data`, from 1 on."""
    kinds: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if text.lower().startswith("@data"):
            return kinds, number
        if text.lower().startswith("@attribute"):
            parts = ATTRIBUTE.match(text)
            if parts is None:
                raise SourceError(f"{path.name}, line {number}: not an @attribute NAME TYPE")
            kinds[parts[1].strip("'\"")] = parts[2].strip().lower().replace(" ", "")
    return kinds, len(lines)


def _check_attributes(path: Path, kinds: dict[str, str], labels: list[str], xml: str) -> None:
    """Checks that every label is an attribute {0,1}, and every attribute {0,1} a label."""
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
    path: Path, lines: list[str], data: int, names: list[str]
) -> tuple[list[int], NDArray[np.float64]]:
    """Returns the numbers of the lines after `data` that hold rows, and their values."""
    rows = {
        number: line.strip()
        for number, line in enumerate(lines[data:], data + 1)
        if line.strip() and not line.strip().startswith("%")
    }
    if not rows:
        raise SourceError(f"{path.name}: no rows after @data; expected an ARFF file with data")
    values = np.zeros((len(rows), len(names)))
    for row, (number, line) in enumerate(rows.items()):
        cells = line.strip("{}").split(",")
        where = f"{path.name}, line {number}"
        columns: Sequence[int] = range(len(names))
        if line.startswith("{"):  # a sparse row: `{column value, ...}`
            cells = [cell.strip() for cell in cells if cell.strip()]
            columns, cells = _parse_columns(where, cells, len(names))
        elif len(cells) != len(names):
            raise SourceError(
                f"{where}: {len(cells)} columns; expected {len(names)}, one for each @attribute"
            )
        for column, cell in zip(columns, cells, strict=True):
            try:
                values[row, column] = float(cell)
            except ValueError:
                raise SourceError(
                    f"{where}, column {names[column]!r}: found {cell.strip()!r}; "
                    "expected a finite number; fill or drop missing values first"
                ) from None
    return list(rows), values


def _parse_columns(where: str, cells: list[str], width: int) -> tuple[list[int], list[str]]:
    """Returns the column and the text of each cell of a sparse row."""
    columns, texts = [], []
    for cell in cells:
        column, _, text = cell.partition(" ")
        if not column.isdecimal() or int(column) >= width:
            raise SourceError(
                f"{where}: cell {text.strip()!r} names no column; expected COLUMN VALUE, columns "
                f"from 0 to {width - 1}"
            )
        columns.append(int(column))
        texts.append(text)
    return columns, texts
