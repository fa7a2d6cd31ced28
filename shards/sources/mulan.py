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

from heron.shards.errors import CONTROL, DOWNLOAD, SourceError, shown
from heron.shards.manifest import Labels
from heron.shards.sources.base import WHOLE, FileSource, Loaded
from heron.shards.sources.text import parse_number, split_lines

NAMESPACE = "{http://mulan.sourceforge.net/labels}"
ATTRIBUTE = re.compile(r"@attribute\s+('[^']*'|\"[^\"]*\"|\S+)\s+(.+)", re.I | re.A)
NUMERIC = ("numeric", "real", "integer")
MOST_VALUES = 1 << 29  # of a file, in float64: a sparse row of two bytes has as many as any other


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
    r"""Reads an ARFF file, dense or sparse; SciPy's reader knows no sparse rows and names no line.

    Raises SourceError where a line is no attribute or row, a cell no number, or where a value could
    be meant in two ways; \n and \r\n alone end a line.
    """
    kinds: dict[str, str] = {}
    rows: dict[int, NDArray[np.float64]] | None = None  # by their lines
    lines = split_lines(path.read_bytes().decode(errors="surrogateescape"))
    for number, line in enumerate(lines, 1):
        text, where = line.replace("\t", " ").strip(" "), f"{path.name}, line {number}"
        if not text or text.startswith("%"):
            continue
        if found := CONTROL.search(text):
            raise SourceError(
                f"{where}: found {found[0]!r} in {text[max(0, found.start() - 20) :][:40]!r}; "
                f"expected text in UTF-8, its lines ended by \\n or \\r\\n; save it again so"
            )
        keyword = text.partition(" ")[0].lower()
        if rows is not None:
            if (len(rows) + 1) * len(kinds) > MOST_VALUES:
                raise SourceError(
                    f"{where}: {len(kinds):,} columns of more than {len(rows):,} rows; expected "
                    f"{MOST_VALUES:,} values at most; part the file"
                )
            rows[number] = _read_row(where, text, kinds)
        elif keyword == "@data":
            rows = {}
        elif keyword == "@attribute":
            if (parts := ATTRIBUTE.fullmatch(text)) is None:
                raise SourceError(f"{where}: not an @attribute NAME TYPE")
            if (name := parts[1].strip("'\"")) in kinds:
                raise SourceError(
                    f"{where}: a second attribute {name!r}; expected each name once; rename one"
                )
            kinds[name] = parts[2].lower().replace(" ", "")
        elif keyword != "@relation":
            raise SourceError(
                f"{where}: found {shown(text)}; expected @relation, @attribute, @data or a "
                "comment; mend the line"
            )
    if not kinds:
        raise SourceError(f"{path.name}: no @attribute lines; expected an ARFF file")
    if not rows:
        raise SourceError(f"{path.name}: no rows after @data; expected an ARFF file with data")
    return _ArffFile(path.name, kinds, list(rows), np.stack(list(rows.values())))


def _read_row(where: str, text: str, kinds: dict[str, str]) -> NDArray[np.float64]:
    """Returns the values of a row; a sparse one is `{column value, ...}`."""
    names, cells = list(kinds), text.split(",")
    if text.startswith("{"):
        given = _sparse_cells(where, text, kinds)
    elif len(cells) == len(names):
        given = dict(enumerate(cells))
    else:
        raise SourceError(
            f"{where}: {len(cells)} columns; expected {len(names)}, one for each @attribute"
        )
    values = np.zeros(len(names))
    for column, cell in given.items():
        if (value := parse_number(cell.strip(" "))) is None:
            raise SourceError(
                f"{where}, column {names[column]!r}: found {shown(cell.strip(' '))}; expected a "
                "finite number; fill or drop missing values first"
            )
        values[column] = value
    return values


def _sparse_cells(where: str, text: str, kinds: dict[str, str]) -> dict[int, str]:
    """Returns what a sparse row gives, by the numbers of the columns; what it leaves out is 0."""
    if not text.endswith("}"):
        raise SourceError(
            f"{where}: found a sparse row that ends with {text[-20:]!r}; expected '}}' at its end; "
            f"{DOWNLOAD}, or mend the line"
        )
    names, given = list(kinds), dict[int, str]()
    for cell in text[1:-1].split(",") if text[1:-1].strip(" ") else ():
        number, _, value = cell.strip(" ").partition(" ")
        column = int(number) if re.fullmatch("[0-9]{1,9}", number) else len(names)
        if column >= len(names):
            raise SourceError(
                f"{where}: cell {shown(value.strip(' '))} names no column; expected COLUMN VALUE, "
                f"columns from 0 to {len(names) - 1}"
            )
        if column in given:
            raise SourceError(
                f"{where}: column {names[column]!r} is there twice, as {shown(given[column])} and "
                f"as {shown(value)}; expected it once; remove one of them"
            )
        given[column] = value
    for column, (name, kind) in enumerate(kinds.items()):
        # What is left out is 0 of a number, and else the first value that the type names.
        first = kind.removeprefix("{").partition(",")[0].strip("'\"}")
        if column not in given and kind not in NUMERIC and parse_number(first) != 0:
            raise SourceError(
                f"{where}: column {name!r} of type {shown(kind)} is left out, and stands for its "
                "first value, which is not 0; expected it in every sparse row; write it out"
            )
    return given


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
