"""Mulan's multi-label sets: ARFF files, and an XML that says which attributes are labels."""

from __future__ import annotations

import re
from itertools import zip_longest
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, FilePath

from heron.shards.errors import SourceError
from heron.shards.manifest import Labels
from heron.shards.sources.base import WHOLE, FileSource, Loaded

NAMESPACE = "{http://mulan.sourceforge.net/labels}"
ATTRIBUTE = re.compile(r"@attribute\s+('[^']*'|\"[^\"]*\"|\S+)\s+(.+)", re.IGNORECASE)
NUMERIC = ("numeric", "real", "integer")


class Mulan(FileSource):
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
        tables = [read_arff(path) for path in self.arff]
        for table in tables:
            for found, first in zip_longest(table.kinds, tables[0].kinds):
                if found != first:
                    raise SourceError(
                        f"{table.file}: attribute {found!r} where {tables[0].file} has {first!r};"
                        " give the files of one data set"
                    )
            _check_attributes(table, names, self.xml.name)
        features, labels = zip(*(_split_columns(table, names) for table in tables), strict=True)
        targets = np.concatenate(labels)
        return Loaded(
            views=self._views(np.concatenate(features)),
            targets=targets,
            labels=Labels(kind="multi_label", names=names),
            splits={WHOLE: range(len(targets))},
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
        views = {"view1": features.copy(), "view2": features.copy()}
        for first, values in enumerate(views.values()):
            rows = values[first::2]
            rows += self.noise * random.normal(rows.mean(), rows.std(), rows.shape).astype("f4")
        return views


class _ArffFile(NamedTuple):
    """An ARFF file: the type of each attribute, and float64 [rows, attributes]."""

    file: str
    kinds: dict[str, str]
    lines: list[int]  # of the rows
    values: NDArray[np.float64]


def read_arff(path: Path) -> _ArffFile:
    """Reads an ARFF file, dense or sparse; SciPy's reader knows no sparse rows and names no line.

    Raises SourceError where a line is no attribute or row, or a cell no number.
    """
    kinds: dict[str, str] = {}
    rows: dict[int, NDArray[np.float64]] | None = None  # by their lines
    for number, line in enumerate(path.read_text("utf-8", errors="replace").splitlines(), 1):
        text, where = line.strip(), f"{path.name}, line {number}"
        if rows is not None:
            if text and not text.startswith("%"):
                rows[number] = _read_row(where, text, list(kinds))
        elif text.lower().startswith("@data"):
            rows = {}
        elif text.lower().startswith("@attribute"):
            if (parts := ATTRIBUTE.match(text)) is None:
                raise SourceError(f"{where}: not an @attribute NAME TYPE")
            kinds[parts[1].strip("'\"")] = parts[2].strip().lower().replace(" ", "")
    if not kinds:
        raise SourceError(f"{path.name}: no @attribute lines; expected an ARFF file")
    if not rows:
        raise SourceError(f"{path.name}: no rows after @data; expected an ARFF file with data")
    return _ArffFile(path.name, kinds, list(rows), np.stack(list(rows.values())))


def _read_row(where: str, text: str, names: list[str]) -> NDArray[np.float64]:
    """Returns the values of a row; a sparse one is `{column value, ...}`."""
    sparse, width = text.startswith("{"), len(names)
    cells = text.strip("{}").split(",") if sparse else text.split(",")
    if not sparse and len(cells) != width:
        raise SourceError(
            f"{where}: {len(cells)} columns; expected {width}, one for each @attribute"
        )
    values = np.zeros(width)
    for number, cell in enumerate(map(str.strip, cells)):
        column, value = str(number), cell
        if sparse:
            column, _, value = cell.partition(" ")
            if not cell:
                continue
        if not column.isdecimal() or int(column) >= width:
            raise SourceError(
                f"{where}: cell {value.strip()!r} names no column; expected COLUMN VALUE, columns "
                f"from 0 to {width - 1}"
            )
        try:
            values[int(column)] = float(value)
        except ValueError:
            raise SourceError(
                f"{where}, column {names[int(column)]!r}: found {value.strip()!r}; expected a "
                "finite number; fill or drop missing values first"
            ) from None
    return values


def _check_attributes(table: _ArffFile, labels: list[str], xml: str) -> None:
    """Checks that every label is an attribute {0,1}, and every attribute {0,1} a label."""
    for label in labels:
        if label not in table.kinds:
            raise SourceError(
                f"{table.file}: no attribute {label!r}, which {xml} names as a label; "
                "give the XML of this data set"
            )
    for name, kind in table.kinds.items():
        if kind in NUMERIC or name in labels:
            continue
        expected = f"; expected {', '.join(NUMERIC)}"
        if kind in ("{0,1}", "{1,0}"):
            expected = (
                f", a label, but {xml} does not name it; add it to the XML, or declare it numeric "
                "if it is a feature"
            )
        raise SourceError(f"{table.file}: attribute {name!r} is {kind}{expected}")


def _split_columns(
    table: _ArffFile, labels: list[str]
) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Returns float32 [rows, features] and uint8 [rows, labels]."""
    names = list(table.kinds)
    columns = [names.index(label) for label in labels]
    others = np.setdiff1d(np.arange(len(names)), columns)
    with np.errstate(over="ignore"):  # what is too large becomes infinite
        features = table.values[:, others].astype(np.float32)
    targets = table.values[:, columns]
    for good, part, expected in (
        (np.isfinite(features), others, "a finite float32"),
        ((targets == 0) | (targets == 1), columns, "a label of 0 or 1"),
    ):
        if len(bad := np.argwhere(~good)):
            row, column = int(bad[0, 0]), int(part[bad[0, 1]])
            raise SourceError(
                f"{table.file}, line {table.lines[row]}, column {names[column]!r}: "
                f"found {table.values[row, column]:g}; expected {expected}"
            )
    return features, targets.astype(np.uint8)
