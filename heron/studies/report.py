"""The report of a study: a self-contained HTML page, and the table in three formats."""

import html
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from heron.report.pages import figure, render
from heron.shards.errors import csv_of
from heron.studies import figures, text
from heron.studies.figures import Law, fit
from heron.studies.repeats import paired_test
from heron.studies.results import (
    Results,
    best,
    by_setting,
    curves,
    grid,
    is_cost,
    natural_x,
    points,
    worker_curves,
)

TIMES = ("step_s", "train_seconds", "seconds")
SQUARE = "x² (HeroCon, Figure 4b)"
# Columns of the table besides the requested ones.
EXTRA_COLUMNS = ("step_s", "samples_per_s", "data_wait_s", "peak_memory_bytes")
MAX_COMPARED = 30  # settings compared with the best, so that the page stays readable


@dataclass(frozen=True)
class Report:
    """A report with figures of the columns `ys` over the column `x`."""

    results: Results
    x: str
    ys: Sequence[str]

    @classmethod
    def of(cls, results: Results, x: str | None = None, ys: Sequence[str] = ()) -> "Report":
        """Returns a report of the study's columns, or of these; StudyError for an unknown one."""
        x, ys = x or results.study.measure.x, ys or results.study.measure.y
        results.refuse_unknown([x, *ys])
        return cls(results, natural_x(results, x), ys)

    def write(self, out: Path) -> Path:
        """Writes the page and the tables; returns the page's path.

        Raises a ShardError if the disk is full.
        """
        out.mkdir(parents=True, exist_ok=True)
        full_table = full_table_of(self.results)
        body = render("base.html", name=self.results.study.title, body="".join(self._body()))
        files = {
            "table.md": text.markdown(*readable_table(self.results, self.ys)).encode(),
            "table.csv": csv_of(full_table.to_csv(index=False)).encode(),
            "table.parquet": full_table.to_parquet(),
            "report.html": body.encode(),
        }
        text.write_files(out, files)
        return out / "report.html"

    def _body(self) -> Iterator[str]:
        results, progress = self.results, self.results.progress
        note = f'<p class="note">{html.escape(progress)}</p>'
        yield note if "not finished" in progress else text.paragraph(progress)
        yield from map(text.paragraph, results.notes)
        score = results.study.measure.score or self.ys[0]
        if (setting := best(results, score)) is None:
            yield text.paragraph(f"No trial that is done has '{score}', so that none is best.")
        else:
            yield text.paragraph(f"Best by the mean over repeats, {setting.describe(score)}.")
        if results.done.empty:
            yield text.paragraph("No trial is done, so that there is nothing to draw.")
        else:
            for y in self.ys:
                yield from self._curves(y)
            for y in self.ys:
                yield from self._heat_map(y)
            for y in self.ys:
                yield from self._paired(y)
            if "workers" in results.varied:
                yield from _workers(worker_curves(results, "samples_per_s"))
        yield text.heading("Every trial")
        yield text.table(*readable_table(results, self.ys))
        yield text.paragraph("The same with every column: table.csv, table.parquet.")
        errors = results.table["error"].dropna()
        if len(errors):
            yield text.heading("What failed")
            yield _lines(errors.items())
        yield text.heading("The command of each trial")
        yield _lines(results.table["command"].items())

    def _curves(self, y: str) -> Iterator[str]:
        """Yields the curves of a column, with the study's fits if the column is a cost."""
        x, fit_kinds = self.x, self.results.study.measure.fits
        rows = worker_curves(self.results, y) if x == "workers" else pd.DataFrame()
        rows = rows if len(rows) else curves(self.results, x, y)
        yield text.heading(f"{text.label(y)} against {text.label(x)}")
        if rows.empty:
            yield text.paragraph(
                f"No trial that is done has both {text.short(x)} and {text.short(y)}."
            )
            return
        names = rows["curve"].unique()
        if len(names) > figures.MAX_CURVES:
            yield text.paragraph(
                f"{len(names)} curves, of which the first {figures.MAX_CURVES} are drawn; the "
                "table has all."
            )
        drawn = rows[rows["curve"].isin(names[: figures.MAX_CURVES])]
        lines: dict[str, figures.Lines] = {}
        sentences = []
        square = x == text.NEGATIVES and y in TIMES
        for name, curve in drawn.groupby("curve", sort=False):
            fits = [fit(kind, curve.set_index("x")["y"]) for kind in fit_kinds if is_cost(y)]
            laws = [law for law in fits if isinstance(law, Law)]
            # each of several curves shows its first law only, so that the figure stays readable
            lines[name] = {law.name: law.predict for law in laws[: 1 if len(names) > 1 else None]}
            for law in fits:
                sentence = law if isinstance(law, str) else f"{text.short(y)} = {law.description}."
                sentences.append(f"{name}: {sentence}" if name else sentence)
                if square and isinstance(law, Law) and law.name.startswith("x^"):
                    sentences.append(_beside_the_square(law))
        means = points(drawn)
        if square:
            last = means[means["curve"] == names[0]].iloc[-1]
            lines[names[0]] |= {SQUARE: lambda x: last["mean"] * (x / last["x"]) ** 2}
        yield figure(figures.curves(means, x, y, lines))
        yield from map(text.paragraph, sentences)
        if means["count"].max() > 1:
            yield text.paragraph("Bars are standard deviations over repeats (n - 1 below).")
        if fit_kinds and not is_cost(y):
            yield text.paragraph(
                f"No law is fitted to {text.short(y)}, which is not a time, size or rate."
            )
        if grid(self.results, y) is None:  # otherwise the heat map has the numbers
            yield _points(points(rows), x, y)

    def _heat_map(self, y: str) -> Iterator[str]:
        means = grid(self.results, y)
        if means is not None:
            across, down = text.short(means.columns.name), text.short(means.index.name)
            yield text.heading(f"{text.label(y)} over {across} and {down}")
            yield figure(figures.heat_map(y, means, self.results.lowest_is_best(y)))
            yield text.paragraph(
                "Means over repeats; the best is framed, a cell without a trial empty."
            )

    def _paired(self, y: str) -> Iterator[str]:
        """Yields paired tests of the best setting by a score against every other."""
        scores = by_setting(self.results, y)
        if is_cost(y) or not 2 <= scores.shape[1] <= MAX_COMPARED:
            return
        best_setting = best(self.results, y)
        assert best_setting is not None  # there are scores
        first = best_setting.setting
        tests = {name: paired_test(scores[first], scores[name]) for name in scores if name != first}
        lines = [[name, str(t.n), *t.cells()] for name, t in tests.items() if t is not None]
        if lines:
            yield text.heading(f"{text.label(y)}: {first}, which is best, less each other")
            yield text.table(["other", "repeats", "difference", "t", "p"], lines)
            yield text.paragraph(
                "Means over the repeats that both have, with Student's paired test, two-sided. The "
                "best is chosen by the scores that are tested: of many settings it leads by chance "
                "too, and p is then too small."
            )


def readable_table(results: Results, ys: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Returns heads and lines of the table for people, without commands and errors."""
    table = results.table
    columns = dict.fromkeys(
        [*(results.keys_that_vary or results.keys), text.NEGATIVES, *ys, *EXTRA_COLUMNS]
    )
    names = [name for name in columns if name in table and table[name].notna().any()]
    brief = [text.short(name) for name in names]
    heads = [s if brief.count(s) == 1 else name for s, name in zip(brief, names, strict=True)]
    heads = ["|N_i|" if head == text.NEGATIVES else head for head in heads]
    lines = [
        [str(trial), row["status"], *(text.cell(row[name], name) for name in names)]
        for trial, row in table.iterrows()
    ]
    return ["trial", "status", *heads], lines


def full_table_of(results: Results) -> pd.DataFrame:
    """Returns every column of every row, each of one type: numbers, booleans, or else text.

    Nested values of results are left out; nested values of keys that vary become JSON.
    """
    columns = {
        name: _of_one_type(column)
        for name, column in results.table.items()
        if name in results.keys or not column.map(lambda v: isinstance(v, dict)).any()
    }
    return pd.DataFrame({"trial": pd.array(list(results.table.index), "string"), **columns})


def _of_one_type(column: pd.Series) -> pd.api.extensions.ExtensionArray:
    flat = [text.plain(v) if isinstance(v, list | dict) else v for v in column]
    array = pd.array(flat)
    if not isinstance(array, pd.arrays.NumpyExtensionArray):
        return array
    return pd.array([None if v is None else text.plain(v) for v in flat], "string")


def _workers(scaled: pd.DataFrame) -> Iterator[str]:
    """Yields samples per second over workers, beside ideal scaling."""
    yield text.heading("Workers: speed-up and efficiency")
    if scaled.empty:
        yield text.paragraph(
            "No two numbers of workers have the same batch in all or the same rows a worker, so "
            "that they cannot be compared."
        )
        return
    means = points(scaled)
    first = means.groupby("curve", sort=False)[["x", "mean"]].transform("first")
    speed_ups = means["mean"] / first["mean"]
    slopes = (first["mean"] / first["x"]).groupby(means["curve"]).first()
    ideal: dict[str, figures.Lines] = {
        str(name): {"_ideal": partial(np.multiply, slope)} for name, slope in slopes.items()
    }
    yield figure(figures.curves(means, "workers", "samples_per_s", ideal))
    columns = {
        "fixed": means["curve"],
        "workers": means["x"],
        "samples / s": _mean_std(means),
        "speed-up": speed_ups.map("{:.3f}".format),
        "efficiency": (speed_ups * first["x"] / means["x"]).map("{:.3f}".format),
    }
    yield text.table(*text.heads_and_lines(pd.DataFrame(columns)))
    yield text.paragraph(
        "Speed-up is samples a second by those of the fewest workers of the curve (the broken line "
        "is what it would be if nothing were lost); efficiency is speed-up by as many times the "
        "workers."
    )


def _points(means: pd.DataFrame, x: str, y: str) -> str:
    columns = {
        "curve": means["curve"],
        text.label(x): [text.number(v) if text.is_number(v) else v for v in means["x"]],
        text.label(y): _mean_std(means, text.scale(y)),
    }
    frame = pd.DataFrame(columns)
    return text.table(
        *text.heads_and_lines(frame if means["curve"].nunique() > 1 else frame.iloc[:, 1:])
    )


def _mean_std(means: pd.DataFrame, unit: float = 1.0) -> list[str]:
    repeats = zip(unit * means["mean"], unit * means["std"], means["count"], strict=True)
    return [text.mean_std(*stats) for stats in repeats]


def _beside_the_square(law: Law) -> str:
    """Returns the measured exponent beside the published one."""
    exponent, half_width = law.coefficients[1], law.half_widths[1]
    where = "inside" if abs(exponent - 2) <= half_width else "under" if exponent > 2 else "over"
    return (
        "HeroCon's Figure 4b: time roughly proportional to the square of |N_i| (broken line, "
        f"through the last point). Measured: exponent {exponent:.2f}; 2 is {where} its interval. "
        "What is linear in the rows (encoders), and what is constant, makes it smaller."
    )


def _lines(named: Iterable[tuple[object, str]]) -> str:
    lines = "\n".join(f"{name}: {line}" for name, line in named)
    return f'<pre class="command">{html.escape(lines)}</pre>'
