"""The report of a study: one HTML page that opens from disk, and the table in three formats."""

import html
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from heron.launch.repeats import paired
from heron.launch.studies import figures
from heron.launch.studies.curves import (
    Curves,
    by_setting,
    curves,
    grid,
    is_numeric,
    natural_x,
    points,
    worker_curves,
)
from heron.launch.studies.fits import Law, fit
from heron.launch.studies.results import NEGATIVES, Results, is_cost, plain
from heron.launch.studies.text import cell, label, markdown, mean_std, number, scale, short
from heron.pipeline.training.page import heading, page, paragraph, table
from heron.shards.atomic import atomic_write

TIMES = ("step_s", "train_seconds", "seconds")
SHOWN = ("step_s", "samples_per_s", "data_wait_s", "peak_memory_bytes")  # beside what is asked for
MOST = 30  # settings that are compared with the best, so that the page stays one to read
STYLE = """
body { max-width: 70rem } td, th { white-space: nowrap }
.note { background: #fff6dd; padding: .6rem 1rem }
pre { font-size: .8rem; white-space: pre-wrap; overflow-wrap: anywhere }
"""


@dataclass(frozen=True)
class Report:
    """What the report is about: figures of the columns `ys` over the column `x`."""

    results: Results
    x: str
    ys: Sequence[str]

    @classmethod
    def of(cls, results: Results, x: str | None = None, ys: Sequence[str] = ()) -> "Report":
        """Reports what the study asks for, or this in its place; StudyError: no such column."""
        x, ys = x or results.study.measure.x, ys or results.study.measure.y
        results.refuse_unknown([x, *ys])
        return cls(results, natural_x(results, x), ys)

    def write(self, out: Path, section: str = "") -> Path:
        """Writes the page, with a further section of HTML, and its tables; returns its path.

        Raises a ShardError where the disk is full.
        """
        out.mkdir(parents=True, exist_ok=True)
        every = every_column(self.results)
        body = page(self.results.study.title, "".join(self._body(section)), STYLE)
        files = {
            "table.md": markdown(*shown(self.results, self.ys)).encode(),
            "table.csv": every.to_csv(index=False).encode(),
            "table.parquet": every.to_parquet(),
            "report.html": body.encode(),
        }
        for name, content in files.items():
            with atomic_write(out / name) as stream:
                stream.write(content)
        return out / "report.html"

    def _body(self, section: str) -> Iterator[str]:
        results, progress = self.results, self.results.progress
        note = f'<p class="note">{html.escape(progress)}</p>'
        yield note if "not finished" in progress else paragraph(progress)
        yield from map(paragraph, results.notes)
        yield self._best()
        if results.done.empty:
            yield paragraph("No trial is done, so that there is nothing to draw.")
        else:
            for y in self.ys:
                yield from self._curves(y)
            for y in self.ys:
                yield from self._heat_map(y)
            for y in self.ys:
                yield from self._paired(y)
            if "workers" in results.varied:
                yield from _workers(worker_curves(results, "samples_per_s"))
        yield section
        yield heading("Every trial")
        yield table(*shown(results, self.ys))
        yield paragraph("The same with every column: table.csv, table.parquet.")
        errors = results.table.get("error", pd.Series()).dropna()
        if len(errors):
            yield heading("What failed")
            yield _lines(errors.items())
        yield heading("The command of each trial")
        yield _lines(results.table.get("command", pd.Series()).items())

    def _best(self) -> str:
        results = self.results
        name = results.study.measure.score or self.ys[0]
        trial = results.best(name)
        if trial is None:
            return paragraph(f"No trial that is done has '{name}', so that none is best.")
        row = results.table.loc[trial]
        varied = ", ".join(f"{short(k)} {cell(row[k], k)}" for k in results.varied)
        best = f"Best in {short(name)}: trial {trial} with {cell(row[name], name)}"
        return paragraph(f"{best} ({varied or '–'}).")

    def _curves(self, y: str) -> Iterator[str]:
        """The curves of a column, with the study's fits where it is a cost."""
        x, asked = self.x, self.results.study.measure.fits
        every = worker_curves(self.results, y) if x == "workers" else {}
        every = every or curves(self.results, x, y)
        yield heading(_upper(f"{label(y)} against {label(x)}"))
        if not every:
            yield paragraph(f"No trial that is done has both {short(x)} and {short(y)}.")
            return
        if len(every) > figures.MOST:
            yield paragraph(
                f"{len(every)} curves, of which the first {figures.MOST} are drawn; the table has "
                "all."
            )
        drawn = dict([*every.items()][: figures.MOST])
        fits = [[fit(kind, one) for kind in asked if is_cost(y)] for one in drawn.values()]
        # several curves have the first of their laws each, so that the figure stays one to read
        first = 1 if len(drawn) > 1 else None
        laws = [[law for law in of if isinstance(law, Law)][:first] for of in fits]
        lines = [{law.name: law.at for law in of} for of in laws]
        last = points([*drawn.values()][0])["mean"].tail(1)
        square = x == NEGATIVES and y in TIMES and last.index[0] > 0
        if square:
            (at,), (time,) = last.index, last
            lines[0]["x² (HeroCon, Figure 4b)"] = lambda x: time * (x / at) ** 2
        yield figures.curves(f"{y} against {x}", drawn, lines)
        for name, of in zip(drawn, fits, strict=True):
            for law in of:
                sentence = law if isinstance(law, str) else f"{short(y)} = {law.says}."
                yield paragraph(f"{name}: {sentence}" if name else sentence)
                if square and isinstance(law, Law) and law.name.startswith("x^"):
                    yield paragraph(_beside_the_square(law))
        if any(points(curve)["count"].max() > 1 for curve in drawn.values()):
            yield paragraph("Bars are standard deviations over repeats (n - 1 below).")
        if asked and not is_cost(y):
            yield paragraph(f"No law is fitted to {short(y)}, which is no time, size or rate.")
        if grid(self.results, y) is None:  # a heat map has the numbers
            yield _points(every, x, y)

    def _heat_map(self, y: str) -> Iterator[str]:
        means = grid(self.results, y)
        if means is not None:
            across, down = short(means.columns.name), short(means.index.name)
            yield heading(_upper(f"{label(y)} over {across} and {down}"))
            yield figures.heat_map(y, means, self.results.least(y))
            yield paragraph("Means over repeats; the best is framed, a cell without a trial grey.")

    def _paired(self, y: str) -> Iterator[str]:
        """The best setting of a score less every other, over the repeats of both."""
        scores = by_setting(self.results, y)
        if is_cost(y) or not 2 <= scores.shape[1] <= MOST:
            return
        means = scores.mean()
        first = means.idxmin() if self.results.least(y) else means.idxmax()
        tests = {name: paired(scores[first], scores[name]) for name in scores if name != first}
        lines = [[name, str(t.n), *t.cells()] for name, t in tests.items() if t is not None]
        if lines:
            yield heading(f"{_upper(label(y))}: {first}, which is best, less each other")
            yield table(["other", "repeats", "difference", "t", "p"], lines)
            yield paragraph(
                "Means over the repeats that both have, with Student's paired test, two-sided. The "
                "best is chosen by the scores that are tested: of many settings it leads by chance "
                "too, and p is then too small."
            )


def shown(results: Results, ys: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Returns heads and lines of the table that people read, without commands and errors."""
    table = results.table
    asked = dict.fromkeys([*(results.several or results.keys), NEGATIVES, *ys, *SHOWN])
    names = [name for name in asked if name in table and table[name].notna().any()]
    brief = [short(name) for name in names]
    heads = [one if brief.count(one) == 1 else n for one, n in zip(brief, names, strict=True)]
    heads = ["|N_i|" if head == NEGATIVES else head for head in heads]
    lines = [
        [str(trial), row["status"], *(cell(row[name], name) for name in names)]
        for trial, row in table.iterrows()
    ]
    return ["trial", "status", *heads], lines


def every_column(results: Results) -> pd.DataFrame:
    """Returns every column of every row, each of one type: numbers, truths, or else text.

    Nested values of results are left to the runs; nested values that are varied are JSON.
    """
    columns = {
        name: _of_one_type(column)
        for name, column in results.table.items()
        if name in results.keys or not column.map(lambda v: isinstance(v, dict)).any()
    }
    return pd.DataFrame({"trial": pd.array(list(results.table.index), "string"), **columns})


def _of_one_type(column: pd.Series) -> pd.api.extensions.ExtensionArray:
    array = pd.array(list(column))
    if not isinstance(array, pd.arrays.NumpyExtensionArray):
        return array
    return pd.array([None if v is None else plain(v) for v in column], "string")


def _workers(scaled: Curves) -> Iterator[str]:
    """Samples a second against workers, beside what it would be if none were lost."""
    yield heading("Workers: speed-up and efficiency")
    if not scaled:
        yield paragraph(
            "No two numbers of workers have the same batch in all or the same rows a worker, so "
            "that they cannot be compared."
        )
        return
    cells, ideal = [], []
    for name, curve in scaled.items():
        means = points(curve)
        fewest, rate = means.index[0], means["mean"].iloc[0]
        ideal.append({"_ideal": lambda x, slope=rate / fewest: slope * x})
        for workers, *point in means.itertuples():
            times = point[0] / rate
            efficiency = times * fewest / workers
            rates = [f"{workers:g}", mean_std(*point), f"{times:.3f}", f"{efficiency:.3f}"]
            cells.append([name, *rates])
    title = "Samples a second by workers; broken lines: nothing lost"
    yield figures.curves(title, scaled, ideal)
    yield table(["fixed", "workers", "samples / s", "speed-up", "efficiency"], cells)
    yield paragraph(
        "Speed-up is samples a second by those of the fewest workers of the curve; efficiency is "
        "speed-up by as many times the workers."
    )


def _points(drawn: Curves, x: str, y: str) -> str:
    """Returns the points of curves as a table."""
    unit, alone = scale(y), len(drawn) == 1
    lines = [
        [
            name,
            number(at) if is_numeric(curve) else str(at),
            mean_std(unit * mean, unit * std, count),
        ]
        for name, curve in drawn.items()
        for at, mean, std, count in points(curve).itertuples()
    ]
    heads = ["curve", label(x), label(y)]
    return table(heads[alone:], [line[alone:] for line in lines])


def _beside_the_square(law: Law) -> str:
    """Returns the measured exponent beside the published one."""
    exponent, reach = law.coefficients[1], law.reach[1]
    where = "inside" if abs(exponent - 2) <= reach else "under" if exponent > 2 else "over"
    return (
        "HeroCon's Figure 4b: time roughly proportional to the square of |N_i| (broken line, "
        f"through the last point). Measured: exponent {exponent:.2f}; 2 is {where} its interval. "
        "What is linear in the rows (encoders), and what is constant, makes it smaller."
    )


def _lines(named: Iterable[tuple[object, str]]) -> str:
    text = "\n".join(f"{name}: {line}" for name, line in named)
    return f"<pre>{html.escape(text)}</pre>"


def _upper(text: str) -> str:
    return text[0].upper() + text[1:]
