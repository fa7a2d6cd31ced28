"""A published table: its experiment, methods and figures, as a file of configs/tables says it."""

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

import yaml
from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass

Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the first is ten times as fast
Figure = tuple[float, float | None]  # mean and, where it was published, standard deviation
REFUSE = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=REFUSE)
class Method:
    """One row of a table."""

    name: str  # of a method of configs/methods.yaml
    published: tuple[Figure | None, ...] = ()  # for each score of the table
    overrides: tuple[str, ...] = ()  # what else belongs to it on these data, such as its weights
    # Options counted in epochs: a share of the run's each, and the fewest.
    schedules: Mapping[str, tuple[float, int]] = field(default_factory=dict)

    def scheduled(self, epochs: int) -> list[str]:
        """Returns the schedules of a run of so many epochs, as overrides."""
        return [
            f"{key}={max(round(share * epochs), fewest)}"
            for key, (share, fewest) in self.schedules.items()
        ]


@dataclass(frozen=True, config=REFUSE)
class PublishedTable:
    """A published table."""

    config: str  # a file of configs/
    runs: int  # folds or seeds that are run: `data.protocol.fold` = `first`, `first` + 1, ...
    source: str  # paper and table
    data: str  # how to get the data and build the shards
    methods: Mapping[str, Method]  # by the name they have in the paper
    scores: Mapping[str, str] = field(  # their names in the table, and in a result
        default_factory=lambda: {"F1": "f1_weighted", "AUC": "auc_macro"}
    )
    published_runs: int = 5  # that the published figures are the mean of
    seeded: bool = False  # a run has its own seed too, not only its own fold
    headline: str = "HeroCon"  # the method that the others are compared with over the same folds
    first: int = 0

    @property
    def folds(self) -> range:
        """The folds or seeds that are run."""
        return range(self.first, self.first + self.runs)


def read_tables(path: Path) -> dict[str, PublishedTable]:
    """Reads a paper's tables, by the name that `heron reproduce` takes.

    `methods` of the file has what belongs to a method in every table, by its name in the paper;
    each of `tables` names its methods with what they have there alone. `overrides` of a table are
    those of all its methods.
    """
    paper = yaml.load(path.read_text(), Loader)
    tables = {}
    for name, table in paper["tables"].items():
        of_table = table.pop("overrides", [])
        methods = {}
        for shown, here in table["methods"].items():
            always: dict[str, Any] = paper["methods"][shown]
            parts = (of_table, always.get("overrides", []), here.get("overrides", []))
            methods[shown] = always | here | {"overrides": [one for part in parts for one in part]}
        tables[name] = TypeAdapter(PublishedTable).validate_python(table | {"methods": methods})
    return tables
