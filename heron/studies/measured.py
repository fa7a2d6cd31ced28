"""A table's measured scores beside the published ones, and its methods beside each other."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pandas as pd
from pydantic_core import to_json
from scipy.stats import ttest_ind_from_stats

from heron.studies.repeats import PairedTest, mean_std, mean_std_count, paired_test
from heron.studies.tables import Figure, PublishedTable
from heron.studies.text import markdown as markdown_table
from heron.studies.text import write_files


@dataclass(frozen=True)
class Score:
    """A method's runs by one score.

    `headline_less_this` tests the table's headline method minus this one; None for the headline
    itself, and for fewer than two runs in common.
    """

    runs: Mapping[int, float]  # by fold or seed; NaN if the result lacks the score
    mean: float
    std: float  # n - 1 below; NaN of one
    count: int  # runs that have the score
    published: Figure | None
    p: float  # of Welch's t-test against the published score; NaN if not applicable
    headline_less_this: PairedTest | None

    def cells(self) -> list[str]:
        """Returns the published score, the measured one, and p, as cells of a table."""
        measured = mean_std(self.mean, self.std)
        if self.count < len(self.runs):
            measured += f" (n = {self.count})"
        p = "–" if math.isnan(self.p) else f"{self.p:.2g}"
        return [mean_std(*(self.published or (math.nan, None))), measured, p]


def compare(
    table: PublishedTable, scores: Mapping[str, pd.DataFrame]
) -> dict[str, dict[str, Score]]:
    """Returns each method's scores, given as [folds, scores], with tests by method and score."""
    compared: dict[str, dict[str, Score]] = {}
    for name, runs in scores.items():
        figures = table.methods[name].published or [None] * len(table.scores)
        compared[name] = {}
        for figure, score in zip(figures, table.scores, strict=True):
            values, p, test = runs[score], math.nan, None
            mean, std, count = mean_std_count(values)
            if figure is not None and figure[1] is not None and count > 1:
                published_stats = (*figure, table.published_runs)
                p = ttest_ind_from_stats(mean, std, count, *published_stats, equal_var=False).pvalue
            if name != table.headline and table.headline in scores:
                test = paired_test(scores[table.headline][score], values)
            row = Score(values.to_dict(), mean, std, int(count), figure, float(p), test)
            compared[name][score] = row
    return compared


def markdown(table: PublishedTable, compared: Mapping[str, Mapping[str, Score]]) -> str:
    """Returns the table, and the headline method minus each other, as Markdown."""
    text = f"{table.source}: {table.runs} runs, mean ± std; p of Welch's t-test against published."
    rows = [
        [name, *chain(*(score.cells() for score in scores.values()))]
        for name, scores in compared.items()
    ]
    text += _table(table, ("published", "measured", "p"), rows)
    rows = []
    for name, scores in compared.items():
        tests = [score.headline_less_this for score in scores.values()]
        if any(tests):
            cells = [test.cells() if test else ["–"] * 3 for test in tests]
            rows.append([name, *chain(*cells)])
    if rows:
        text += (
            f"\n{table.headline} less each other method over the same "
            f"{'seeds' if table.seeded else 'folds'} {table.first} to {table.folds[-1]}: mean "
            "difference; t and p of Student's paired test, two-sided."
        )
        text += _table(table, ("difference", "t", "p"), rows)
    return text


def _table(table: PublishedTable, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table with the columns of every score; heads `t` and `p` omit the score's name."""
    heads = [n if len(n) == 1 else f"{score} {n}" for score in table.scores for n in columns]
    return f"\n\n{markdown_table(['method', *heads], rows)}"


def write(table: PublishedTable, scores: Mapping[str, pd.DataFrame], out: Path) -> str:
    """Writes table.md and table.json, and returns the Markdown; ShardError if the disk is full."""
    compared = compare(table, scores)
    tree = {"source": table.source, "headline": table.headline, "methods": compared}
    text = markdown(table, compared)
    data = to_json(tree, indent=1, inf_nan_mode="null") + b"\n"
    write_files(out, {"table.md": text.encode(), "table.json": data})
    return text
