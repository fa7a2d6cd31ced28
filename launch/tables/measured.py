"""A table's measured scores beside the published figures, and its methods beside each other."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from scipy.stats import ttest_ind_from_stats

from heron.launch.repeats import Paired, describe, paired
from heron.launch.tables.table import Figure, Table
from heron.shards.atomic import atomic_write


@dataclass(frozen=True)
class Score:
    """A method's runs by one score.

    Attributes:
        runs: what each fold or seed has; NaN: its result has none.
        mean: over them; `std` with n - 1 below, NaN of one.
        std: see `mean`.
        count: how many runs have the score.
        published: mean and, where it is known, standard deviation; None: there is no figure.
        p: of Welch's t-test against the published; NaN where it cannot be made.
        headline_less_this: the table's headline method less this one; None: it is itself the
            headline, or they have fewer than two runs in common.
    """

    runs: Mapping[int, float]
    mean: float
    std: float
    count: int
    published: Figure | None
    p: float
    headline_less_this: Paired | None

    def cells(self) -> list[str]:
        """Returns the published figure, what was measured, and p, as cells of a table."""
        published = "–" if self.published is None else _mean_std(*self.published)
        measured = _mean_std(self.mean, self.std)
        if self.count < len(self.runs):
            measured += f" (n = {self.count})"
        return [published, measured, "–" if math.isnan(self.p) else f"{self.p:.2g}"]


def compare(table: Table, scores: Mapping[str, pd.DataFrame]) -> dict[str, dict[str, Score]]:
    """Returns each method's scores beside the published figures and the headline method.

    Args:
        table: with the published figures.
        scores: of each method, [folds, scores].
    """
    compared: dict[str, dict[str, Score]] = {}
    for name, runs in scores.items():
        figures = table.methods[name].published or [None] * len(table.scores)
        compared[name] = {}
        for figure, score in zip(figures, table.scores, strict=True):
            values, p, test = runs[score], math.nan, None
            mean, std, count = describe(values)
            if figure is not None and figure[1] is not None and count > 1:
                others = (*figure, table.published_runs)
                p = ttest_ind_from_stats(mean, std, count, *others, equal_var=False).pvalue
            if name != table.headline and table.headline in scores:
                test = paired(scores[table.headline][score], values)
            row = Score(values.to_dict(), mean, std, int(count), figure, float(p), test)
            compared[name][score] = row
    return compared


def markdown(table: Table, compared: Mapping[str, Mapping[str, Score]]) -> str:
    """Returns the table, and the headline method less each other, as Markdown."""
    rule = "|---|" + "---|---|---|" * len(table.scores)
    heads = " | ".join(f"{s} published | {s} measured | p" for s in table.scores)
    lines = [
        f"{table.source}: {table.runs} runs, mean ± std; p of Welch's t-test against published.",
        "",
        f"| method | {heads} |",
        rule,
    ]
    for name, scores in compared.items():
        cells = [cell for score in scores.values() for cell in score.cells()]
        lines.append(f"| {' | '.join([name, *cells])} |")
    pairs = {
        name: [s.headline_less_this for s in scores.values()] for name, scores in compared.items()
    }
    if any(test for tests in pairs.values() for test in tests):
        heads = " | ".join(f"{s} difference | t | p" for s in table.scores)
        lines += [
            "",
            f"{table.headline} less each other method over the same "
            f"{'seeds' if table.seeded else 'folds'} {table.first} to {table.folds[-1]}: mean "
            "difference; t and p of Student's paired test, two-sided.",
            "",
            f"| method | {heads} |",
            rule,
        ]
    for name, tests in pairs.items():
        if any(tests):
            cells = [cell for test in tests for cell in (test.cells() if test else ["–"] * 3)]
            lines.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(lines) + "\n"


def write(table: Table, scores: Mapping[str, pd.DataFrame], out: Path) -> str:
    """Writes table.md and table.json, and returns the Markdown.

    Raises:
        ShardError: the disk is full.
    """
    compared = compare(table, scores)
    methods = {
        name: {score: asdict(of) for score, of in of_method.items()}
        for name, of_method in compared.items()
    }
    tree = {"source": table.source, "headline": table.headline, "methods": methods}
    text = markdown(table, compared)
    saved = {"table.md": text, "table.json": json.dumps(_without_nan(tree), indent=1) + "\n"}
    for name, content in saved.items():
        with atomic_write(out / name) as stream:
            stream.write(content.encode())
    return text


def _mean_std(mean: float, std: float | None) -> str:
    if math.isnan(mean):
        return "–"
    return f"{mean:.4f}" + ("" if std is None or math.isnan(std) else f" ± {std:.4f}")


def _without_nan(value: Any) -> Any:
    """Returns plain values with null in place of NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _without_nan(part) for key, part in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value
