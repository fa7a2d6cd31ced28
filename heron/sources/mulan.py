"""Mulan's multi-label data sets: ARFF files, and an XML file that names the labels."""

from collections import Counter
from itertools import zip_longest
from typing import Any, ClassVar, Literal, Self
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, FilePath, field_validator, model_validator

from heron.base.errors import SourceError, first_few
from heron.shards.manifest import Labels, Name
from heron.sources.arff import BINARY, ArffFile, is_numeric, read_arff, type_of
from heron.sources.base import ROUNDED, SINGLE_SPLIT, FileSource, Loaded, holds, split_ranges
from heron.sources.leaks import KEEP, refuse_leaks

NAMESPACE = "{http://mulan.sourceforge.net/labels}"


class Mulan(FileSource):
    """Mulan's multi-label sets, such as Scene: ARFF files with an XML of label names.

    The files are concatenated in one split, `all`, from which a protocol draws its folds, or each
    is a split of its own: `--split-names train test`. A nominal attribute is a feature of 0 and 1
    for each of its values; where a sparse row leaves it out, it has the first.
    """

    name: ClassVar[str] = "mulan"
    left_out: ClassVar[tuple[str, ...]] = ("keep",)
    named_by: ClassVar[str] = "xml"  # `scene` for scene.xml
    examples: ClassVar[str] = (
        "heron shards build mulan --arff flags-train.arff flags-test.arff --xml flags.xml "
        "--split-names train test --out data/flags\n"
        "  heron shards build mulan --arff scene-train.arff scene-test.arff --xml scene.xml "
        "--view-kind scene --noise 0.01 --out data/scene"
    )

    arff: list[FilePath] = Field(min_length=1, description="ARFF files, in the order of their rows")
    xml: FilePath = Field(description="the XML that names the labels")
    split_names: list[Name] | None = Field(
        None, min_length=1, description="a split for each file (default: one for all, `all`)"
    )
    binary_features: bool = Field(
        False,
        description="true: attributes {0,1} that the XML does not name are features, and not "
        "reported; false: they are reported, since one may be a label that the XML lacks",
    )
    keep: list[str] = Field([], description=KEEP)
    view_kind: Literal["single", "columns", "scene"] | None = Field(
        None,
        description="single: one view, the features as they are; columns, scene: two, the first "
        "with Gaussian noise on even rows, the second on odd ones, of the spread of each column, "
        "or as HeroCon adds it to Scene, of the mean and the spread of all values together "
        "(default: columns with a noise, else single)",
    )
    noise: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="size of the noise, as a share of the spread"
    )

    @field_validator("view_kind", mode="before")
    @classmethod
    def _earlier_name(cls, value: Any) -> Any:
        return "scene" if value == "noise" else value

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        if self.split_names and len(self.split_names) != len(self.arff):
            raise ValueError(f"{len(self.split_names)} split_names for {len(self.arff)} files")
        if (self._kind == "single") == bool(self.noise):
            raise ValueError(
                f"view_kind is {self._kind}, and noise {self.noise:g}; use a noise, such as 0.01 "
                "for HeroCon's Scene, with columns and scene, and none with single"
            )
        return self

    @property
    def _kind(self) -> str:
        return self.view_kind or ("columns" if self.noise else "single")

    def options(self) -> dict[str, Any]:
        """Returns the options, as earlier folders have them."""
        recorded = {"view_kind": self._kind.replace("scene", "noise"), "noise": self.noise or 0.01}
        return super().options() | recorded

    def load(self) -> Loaded:
        """Reads the files, and concatenates their rows."""
        names = self._label_names()
        tables = [read_arff(path) for path in self.arff]
        first = [*map(_declaration, tables[0].kinds.items())]
        for table in tables:
            for actual, expected in zip_longest(map(_declaration, table.kinds.items()), first):
                if actual != expected:
                    raise SourceError(
                        f"{table.file}: attribute {actual} where {tables[0].file} has {expected}; "
                        "pass the files of one data set"
                    )
            self._check_attributes(table, names)
        features, labels = zip(*(_split_columns(table, names) for table in tables), strict=True)
        counts = Counter[str]()
        split_names = self.split_names or [SINGLE_SPLIT] * len(labels)
        for name, file_labels in zip(split_names, labels, strict=True):
            counts[name] += len(file_labels)
        described = Labels(kind="multi_label", names=names)
        clean, targets = np.concatenate(features), np.concatenate(labels)
        binary = [n for n, k in tables[0].kinds.items() if sorted(k) == BINARY and n not in names]
        said = (
            f"{first_few(binary)}: {{0,1}} and not in {self.xml.name}, and so features, not labels"
        )
        columns = dict.fromkeys(("view1", "view2"), _feature_names(tables[0], names))
        refuse_leaks({"view1": clean}, targets, described, columns, self.keep)  # without noise
        return Loaded(
            views=self._views(clean),
            columns=columns,
            targets=targets,
            labels=described,
            splits=split_ranges(counts, merge=False),
            warning="; ".join(
                [said] * bool(binary and not self.binary_features) + _rounded(tables)
            ),
        )

    def _label_names(self) -> list[str]:
        try:
            root = ElementTree.parse(self.xml).getroot()
        except (ElementTree.ParseError, LookupError, ValueError) as fault:  # of its encoding
            raise SourceError(f"{self.xml.name} is not Mulan's XML ({fault})") from None
        names = [label.get("name", "") for label in root.iter(f"{NAMESPACE}label")]
        if not names:
            raise SourceError(
                f"{self.xml.name} names no label; it needs <label name=...> elements in the "
                f"namespace {NAMESPACE.strip('{}')}"
            )
        return names

    def _views(self, features: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
        """Returns one view, or two with noise."""
        if self._kind == "single":
            return {"view1": features}
        random, spread = np.random.default_rng(self.seed), features.std(0, dtype=np.float64)
        views = {"view1": features.copy(), "view2": features.copy()}
        for first, values in enumerate(views.values()):
            rows = values[first::2]
            mean, std = (rows.mean(), rows.std()) if self._kind == "scene" else (0, spread)
            rows += self.noise * random.normal(mean, std, rows.shape).astype("f4")
        return views

    def _check_attributes(self, table: ArffFile, labels: list[str]) -> None:
        """Refuses labels that are not attributes {0,1}."""
        for label in labels:
            if label not in table.kinds:
                raise SourceError(
                    f"{table.file}: no attribute {label!r}, which {self.xml.name} names as a "
                    "label; pass the XML of this data set"
                )
            if sorted(kind := table.kinds[label]) != BINARY and kind:
                raise SourceError(
                    f"{table.file}: attribute {label!r}, a label, must be {{0,1}}, got "
                    f"{type_of(kind)}; pass the XML of this data set"
                )


def _declaration(attribute: tuple[str, tuple[str, ...]]) -> str:
    """Returns an attribute's name, and its values in their order where each is a feature."""
    name, kind = attribute
    return repr(name) if is_numeric(kind) else f"{name!r} {type_of(kind)}"


def _rounded(tables: list[ArffFile]) -> list[str]:
    """Says which attribute has numbers that float32 cannot hold."""
    with np.errstate(over="ignore"):
        found = [
            name
            for table in tables
            for name, values in zip(table.kinds, table.values.T, strict=True)
            if not holds(values.astype(np.float32), values).all()
        ]
    return [f"{first_few([*dict.fromkeys(found)])} {ROUNDED}"] if found else []


def _feature_names(table: ArffFile, labels: list[str]) -> list[str]:
    """Returns the names of the columns of the features, `name=value` for nominal ones."""
    return [
        name if is_numeric(kind) else f"{name}={value}"
        for name, kind in table.kinds.items()
        for value in (kind[:1] if is_numeric(kind) else kind) or ("",)
        if name not in labels
    ]


def _split_columns(
    table: ArffFile, labels: list[str]
) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Returns float32 [rows, features] and uint8 [rows, labels]."""
    names = list(table.kinds)
    label_columns = [names.index(label) for label in labels]
    feature_columns = [column for column in range(len(names)) if column not in set(label_columns)]
    if not feature_columns:
        raise SourceError(
            f"{table.file}: every attribute is a label, none a feature; pass the XML of this data "
            "set"
        )
    with np.errstate(over="ignore"):  # what is too large becomes infinite
        single = table.values.astype(np.float32)
    targets = table.values[:, label_columns]
    for valid, columns, expected in (
        (np.isfinite(single[:, feature_columns]), feature_columns, "a finite float32"),
        ((targets == 0) | (targets == 1), label_columns, "a label of 0 or 1"),
    ):
        if len(bad := np.argwhere(~valid)):
            row, column = int(bad[0, 0]), columns[bad[0, 1]]
            raise SourceError(
                f"{table.file}, line {table.lines[row]}, column {names[column]!r} must be "
                f"{expected}, got {table.values[row, column]:g}"
            )
    features = [
        single[:, [column]]
        if is_numeric(table.kinds[names[column]])
        else single[:, [column]] == np.arange(len(table.kinds[names[column]]))
        for column in feature_columns
    ]
    return np.hstack(features).astype(np.float32), targets.astype(np.uint8)
