"""Published tables: their experiments and methods, and what their papers measured."""

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

import yaml
from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass

from heron.base.errors import ConfigError
from heron.base.shipped import CONFIGS

Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C loader is ten times as fast
Figure = tuple[float, float | None]  # mean, and standard deviation if published
REFUSE = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=REFUSE)
class Method:
    """One row of a table."""

    name: str  # of a method of configs/methods.yaml
    published: tuple[Figure | None, ...] = ()  # by score of the table
    overrides: tuple[str, ...] = ()  # of this method on these data, such as its weights
    # Options counted in epochs: each a share of the run's epochs, and a minimum.
    schedules: Mapping[str, tuple[float, int]] = field(default_factory=dict)

    def scheduled(self, epochs: int | None) -> list[str]:
        """Returns the schedules of a run of `epochs` epochs, as overrides; ConfigError for None."""
        if epochs is None:
            raise ConfigError(
                "train.epochs must be a number, because the table's schedules are shares of it; "
                "remove train.epochs=null"
            )
        return [
            f"{key}={max(round(share * epochs), minimum)}"
            for key, (share, minimum) in self.schedules.items()
        ]


@dataclass(frozen=True, config=REFUSE)
class PublishedTable:
    """A published table."""

    config: str  # a file of configs/
    runs: int  # number of folds or seeds: `data.protocol.fold` = `first`, `first` + 1, ...
    source: str  # paper and table
    data: str  # how to get the data and build the shards
    methods: Mapping[str, Method]  # by their names in the paper
    scores: Mapping[str, str] = field(  # names in a result, by those in the table
        default_factory=lambda: {"F1": "f1_weighted", "AUC": "auc_macro"}
    )
    published_runs: int = 5  # over which the published scores are means
    seeded: bool = False  # whether each run has its own seed as well as its own fold
    headline: str = "HeroCon"  # method that the others are compared with over the same folds
    first: int = 0

    @property
    def folds(self) -> range:
        """The folds or seeds that are run."""
        return range(self.first, self.first + self.runs)


def read_tables(path: Path) -> dict[str, PublishedTable]:
    """Reads a paper's tables, by the name that `heron reproduce` takes.

    The file's `methods` has the settings of a method in every table, by its name in the paper; each
    of its `tables` adds those of its methods, with `overrides` that apply to all.
    """
    paper = yaml.load(path.read_text(), Loader)
    tables = {}
    for name, table in paper["tables"].items():
        of_table = table.pop("overrides", [])
        methods = {}
        for label, in_table in table["methods"].items():
            common: dict[str, Any] = paper["methods"][label]
            overrides = [*of_table, *common.get("overrides", []), *in_table.get("overrides", [])]
            methods[label] = common | in_table | {"overrides": overrides}
        tables[name] = TypeAdapter(PublishedTable).validate_python(table | {"methods": methods})
    return tables


TABLES: dict[str, PublishedTable] = {
    name: table
    for paper in ("herocon", "mulco", "hscl", "graphs")
    for name, table in read_tables(CONFIGS / "tables" / f"{paper}.yaml").items()
}
GROUPS = {"graphs": ("mutag", "ptc", "enzymes", "imdb-b", "imdb-m")}
