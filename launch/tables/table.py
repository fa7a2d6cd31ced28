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
    """One row of a table.

    Attributes:
        name: of a method of configs/methods.yaml.
        published: a figure for each score of the table; None where none was published.
        overrides: what else belongs to the method on these data, such as its weights.
        schedules: options counted in epochs: a share of the run's each, and the fewest.
    """

    name: str
    published: tuple[Figure | None, ...] = ()
    overrides: tuple[str, ...] = ()
    schedules: Mapping[str, tuple[float, int]] = field(default_factory=dict)

    def scheduled(self, epochs: int) -> list[str]:
        """Returns the schedules of a run of so many epochs, as overrides."""
        return [
            f"{key}={max(round(share * epochs), fewest)}"
            for key, (share, fewest) in self.schedules.items()
        ]


@dataclass(frozen=True, config=REFUSE)
class PublishedTable:
    """A published table.

    Attributes:
        config: a file of configs/.
        runs: how many folds or seeds are run, `data.protocol.fold` = `first`, `first` + 1, ...
        source: paper and table.
        data: how to get the data and build the shards.
        methods: by the name they have in the paper.
        scores: their names in the table, and in a result.
        published_runs: how many runs the published figures are the mean of.
        seeded: a run has its own seed too, not only its own fold.
        headline: the method that the others are compared with over the same folds.
        first: the first fold or seed.
    """

    config: str
    runs: int
    source: str
    data: str
    methods: Mapping[str, Method]
    scores: Mapping[str, str] = field(
        default_factory=lambda: {"F1": "f1_weighted", "AUC": "auc_macro"}
    )
    published_runs: int = 5
    seeded: bool = False
    headline: str = "HeroCon"
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
