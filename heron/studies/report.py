"""The report of a study: a self-contained HTML page, and the table in three formats."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from heron.base.errors import csv_of
from heron.report.pages import render
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

PAGE = Path(__file__).parent / "page"
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
        files = {
            "table.md": text.markdown(*readable_table(self.results, self.ys)).encode(),
            "table.csv": csv_of(full_table.to_csv(index=False)).encode(),
            "table.parquet": full_table.to_parquet(),
            "report.html": self._page().encode(),
        }
        text.write_files(out, files)
        return out / "report.html"

    def _page(self) -> str:
        results = self.results
        score = results.study.measure.score or self.ys[0]
        setting = best(results, score)
        drawn = [] if results.done.empty else self.ys
        return render(
            "report.html",
            PAGE,
            {"label": text.label, "short": text.short},
            name=results.study.title,
            results=results,
            score=score,
            best=setting and setting.describe(score),
            curves=[self._curves(y) for y in drawn],
            heat_maps=[found for y in drawn if (found := self._heat_map(y))],
            paired=[found for y in drawn if (found := self._paired(y))],
            speed=_speed(results) if drawn and "workers" in results.varied else {},
            every_trial=readable_table(results, self.ys),
        )

    def _curves(self, y: str) -> dict[str, Any]:
        """Returns the curves of a column, with the study's fits if the column is a cost."""
        x, fit_kinds = self.x, self.results.study.measure.fits
        rows = worker_curves(self.results, y) if x == "workers" else pd.DataFrame()
        rows = rows if len(rows) else curves(self.results, x, y)
        names = rows["curve"].unique()
        if rows.empty:
            return {"x": x, "y": y, "count": 0}
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
        has_heat_map = grid(self.results, y) is not None  # with the numbers
        return {
            "x": x,
            "y": y,
            "count": len(names),
            "drawn": figures.MAX_CURVES,
            "chart": figures.curves(means, x, y, lines),
            "sentences": sentences,
            "has_bars": means["count"].max() > 1,
            "has_no_law": fit_kinds and not is_cost(y),
            "points": None if has_heat_map else _points(points(rows), x, y),
        }

    def _heat_map(self, y: str) -> dict[str, Any]:
        if (means := grid(self.results, y)) is None:
            return {}
        chart = figures.heat_map(y, means, self.results.lowest_is_best(y))
        return {"y": y, "across": means.columns.name, "down": means.index.name, "chart": chart}

    def _paired(self, y: str) -> dict[str, Any]:
        """Returns paired tests of the best setting by a score against every other."""
        scores = by_setting(self.results, y)
        if is_cost(y) or not 2 <= scores.shape[1] <= MAX_COMPARED:
            return {}
        best_setting = best(self.results, y)
        assert best_setting is not None  # there are scores
        first = best_setting.setting
        tests = {name: paired_test(scores[first], scores[name]) for name in scores if name != first}
        lines = [[name, str(t.n), *t.cells()] for name, t in tests.items() if t is not None]
        return {"y": y, "best": first, "lines": lines} if lines else {}


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


def _speed(results: Results) -> dict[str, Any]:
    """Returns samples per second over workers, beside ideal scaling; no chart of one number."""
    scaled = worker_curves(results, "samples_per_s")
    if scaled.empty:
        return {"chart": None}
    means = points(scaled)
    first = means.groupby("curve", sort=False)[["x", "mean"]].transform("first")
    speed_ups = means["mean"] / first["mean"]
    slopes = (first["mean"] / first["x"]).groupby(means["curve"]).first()
    ideal: dict[str, figures.Lines] = {
        str(name): {"_ideal": partial(np.multiply, slope)} for name, slope in slopes.items()
    }
    columns = {
        "fixed": means["curve"],
        "workers": means["x"],
        "samples / s": _mean_std(means),
        "speed-up": speed_ups.map("{:.3f}".format),
        "efficiency": (speed_ups * first["x"] / means["x"]).map("{:.3f}".format),
    }
    chart = figures.curves(means, "workers", "samples_per_s", ideal)
    return {"chart": chart, "table": text.heads_and_lines(pd.DataFrame(columns))}


def _points(means: pd.DataFrame, x: str, y: str) -> tuple[list[str], list[list[str]]]:
    columns = {
        "curve": means["curve"],
        text.label(x): [text.number(v) if text.is_number(v) else v for v in means["x"]],
        text.label(y): _mean_std(means, text.scale(y)),
    }
    frame = pd.DataFrame(columns)
    return text.heads_and_lines(frame if means["curve"].nunique() > 1 else frame.iloc[:, 1:])


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
