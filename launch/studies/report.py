"""The report of a study: one HTML page that opens from disk, and the table in three formats."""

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from heron.launch.repeats import paired
from heron.launch.studies import figures as draw
from heron.launch.studies.curves import Curve, by_setting, curves, grid, natural_x, worker_curves
from heron.launch.studies.fits import FITS, Law
from heron.launch.studies.rows import NEGATIVES, Results, is_cost, less_is_better
from heron.launch.studies.table import best, shown, write_tables
from heron.launch.studies.text import cell, label, mean_std, number, scale, short
from heron.pipeline.training.page import heading, page, paragraph, table
from heron.shards.atomic import atomic_write

TIMES = ("step_s", "train_seconds", "seconds")
MOST = 30  # settings that are compared with the best, so that the page stays one to read
STYLE = """
body { max-width: 70rem } td, th { white-space: nowrap }
.note { background: #fff6dd; padding: .6rem 1rem }
pre { font-size: .8rem; white-space: pre-wrap; overflow-wrap: anywhere }
"""


@dataclass(frozen=True)
class Report:
    """What the report is about.

    Attributes:
        results: with its rows.
        x: the column that figures go over.
        ys: the columns that they show.
        sections: HTML of further parts, after the figures.
    """

    results: Results
    x: str
    ys: Sequence[str]
    sections: Sequence[str] = ()

    @classmethod
    def of(cls, results: Results, x: str | None = None, ys: Sequence[str] = ()) -> "Report":
        """Reports what the study asks to be shown, or what is asked for here in its place.

        Raises:
            StudyError: no trial has such a column.
        """
        x, ys = x or results.study.measure.x, ys or results.study.measure.y
        results.refuse_unknown([x, *ys])
        return cls(results, natural_x(results, x), ys)

    def write(self, out: Path) -> Path:
        """Writes report.html, table.md, table.csv and table.parquet; returns the first's path.

        Raises:
            ShardError: the disk is full.
        """
        out.mkdir(parents=True, exist_ok=True)
        write_tables(self.results, self.ys, out)
        body = "".join(self._body())
        with atomic_write(out / "report.html") as stream:
            stream.write(page(self.results.study.title, body, STYLE).encode())
        return out / "report.html"

    def with_section(self, section: str) -> "Report":
        """Returns the same with a further part."""
        return replace(self, sections=[*self.sections, section])

    @property
    def state(self) -> str:
        """How far the study is, as a sentence."""
        results, done = self.results, len(self.results.done)
        counts = {s: sum(row.status == s for row in results.rows) for s in ("failed", "stopped")}
        state = f"{done} trial{'' if done == 1 else 's'} done"
        state += "".join(f", {n} {s}" for s, n in counts.items() if n)
        unfinished, under_way = results.planned > len(results.rows), results.under_way
        if unfinished or under_way:
            state = f"The study is not finished: {state}"
            state += f" of {results.planned}" if unfinished else ""
            state += f"; without a row yet: {', '.join(under_way)}" if under_way else ""
        return state + "."

    def _body(self) -> Iterator[str]:
        results, state = self.results, self.state
        note = f'<p class="note">{html.escape(state)}</p>'
        yield note if "not finished" in state else paragraph(state)
        yield from map(paragraph, results.notes)
        yield self._best()
        if not results.done:
            yield paragraph("No trial is done, so that there is nothing to draw.")
        else:
            for y in self.ys:
                yield from self._figure(y)
            for y in self.ys:
                yield from self._heat_map(y)
            yield from self._paired()
            if "workers" in results.varied:
                yield from self._workers()
        yield from self.sections
        yield heading("Every trial")
        yield table(*shown(results, self.ys))
        yield paragraph("The same with every column: table.csv, table.parquet.")
        if any(row.error for row in results.rows):
            yield heading("What failed")
            yield _lines(f"{row.trial}: {row.error}" for row in results.rows if row.error)
        yield heading("The command of each trial")
        yield _lines(f"{row.trial}: {row.command}" for row in results.rows)

    def _best(self) -> str:
        name = self.results.study.measure.score or self.ys[0]
        trial = best(self.results, name, self._least(name))
        if trial is None:
            return paragraph(f"No trial that is done has '{name}', so that none is best.")
        row = self.results.table.loc[trial]
        varied = ", ".join(f"{short(k)} {cell(row[k], k)}" for k in self.results.varied)
        best_trial = f"Best in {short(name)}: trial {trial} with {cell(row[name], name)}"
        return paragraph(f"{best_trial} ({varied or '–'}).")

    def _least(self, name: str) -> bool:
        """Whether the least of a column is best, by the study or else by the column's name."""
        measure = self.results.study.measure
        return measure.mode == "min" if name == measure.score else less_is_better(name)

    def _figure(self, y: str) -> Iterator[str]:
        """The curves of a column, with the study's fits where it is a cost."""
        x, asked = self.x, self.results.study.measure.fits
        every = worker_curves(self.results, y) if x == "workers" else []
        every = every or curves(self.results, x, y)
        yield heading(_upper(f"{label(y)} against {label(x)}"))
        if not every:
            yield paragraph(f"No trial that is done has both {short(x)} and {short(y)}.")
            return
        if len(every) > draw.MOST:
            yield paragraph(
                f"{len(every)} curves, of which the first {draw.MOST} are drawn; the table has all."
            )
        drawn = every[: draw.MOST]
        fits = [[FITS[name](curve.values) for name in asked if is_cost(y)] for curve in drawn]
        laws = [[law for law in of if isinstance(law, Law)] for of in fits]
        square = x == NEGATIVES and y in TIMES and len(drawn[0].points) > 1
        yield draw.curves(f"{y} against {x}", drawn, laws, square)
        for curve, of in zip(drawn, fits, strict=True):
            for law in of:
                sentence = law if isinstance(law, str) else f"{short(y)} = {law.says}."
                yield paragraph(f"{curve.name}: {sentence}" if curve.name else sentence)
                if square and isinstance(law, Law) and law.name.startswith("x^"):
                    yield paragraph(_beside_the_square(law))
        if any(curve.points["count"].max() > 1 for curve in drawn):
            yield paragraph("Bars are standard deviations over repeats (n - 1 below).")
        if asked and not is_cost(y):
            yield paragraph(f"No law is fitted to {short(y)}, which is no time, size or rate.")
        if grid(self.results, y) is None:  # a heat map has the numbers
            yield _points(every)

    def _heat_map(self, y: str) -> Iterator[str]:
        means = grid(self.results, y)
        if means is not None:
            across, down = short(means.columns.name), short(means.index.name)
            yield heading(_upper(f"{label(y)} over {across} and {down}"))
            yield draw.heat_map(y, means, self._least(y))
            yield paragraph("Means over repeats; the best is framed, a cell without a trial grey.")

    def _paired(self) -> Iterator[str]:
        """The best setting of each score less every other, over the repeats of both."""
        for y in self.ys:
            scores = by_setting(self.results, y)
            if is_cost(y) or not 2 <= scores.shape[1] <= MOST:
                continue
            means = scores.mean()
            first = means.idxmin() if self._least(y) else means.idxmax()
            tests = {name: paired(scores[first], scores[name]) for name in scores if name != first}
            lines = [[name, str(t.n), *t.cells()] for name, t in tests.items() if t is not None]
            if lines:
                yield heading(f"{_upper(label(y))}: {first}, which is best, less each other")
                yield table(["other", "repeats", "difference", "t", "p"], lines)
                yield paragraph(
                    "Means over the repeats that both have, with Student's paired test, two-sided. "
                    "The best is chosen by the scores that are tested: of many settings it leads "
                    "by chance too, and p is then too small."
                )

    def _workers(self) -> Iterator[str]:
        scaled = worker_curves(self.results, "samples_per_s")
        yield heading("Workers: speed-up and efficiency")
        if not scaled:
            yield paragraph(
                "No two numbers of workers have the same batch in all or the same rows a worker, "
                "so that they cannot be compared."
            )
            return
        lines = []
        for curve in scaled:
            points = curve.points
            times = points["mean"] / points["mean"].iloc[0]
            efficiency = times / (points.index / points.index[0])
            lines += [
                [curve.name, f"{at:g}", mean_std(*point), f"{times[at]:.3f}", f"{share:.3f}"]
                for (at, point), share in zip(points.iterrows(), efficiency, strict=True)
            ]
        yield draw.speed_up(scaled)
        yield table(["fixed", "workers", "samples / s", "speed-up", "efficiency"], lines)
        yield paragraph(
            "Speed-up is samples a second by those of the fewest workers of the curve; efficiency "
            "is speed-up by as many times the workers."
        )


def _points(drawn: Sequence[Curve]) -> str:
    """Returns the points of curves as a table."""
    unit, several = scale(drawn[0].y), len(drawn) > 1
    lines = [
        [
            *([curve.name] if several else []),
            number(x) if curve.numeric else str(x),
            mean_std(unit * mean, unit * std, count),
        ]
        for curve in drawn
        for x, mean, std, count in curve.points.itertuples()
    ]
    heads = [label(drawn[0].x), label(drawn[0].y)]
    return table(["curve", *heads] if several else heads, lines)


def _beside_the_square(law: Law) -> str:
    """Returns the measured exponent beside the published one."""
    exponent, reach = law.coefficients[1], law.reach[1]
    where = (
        "inside its interval."
        if abs(exponent - 2) <= reach
        else "under its interval: time rises faster than the square."
        if exponent > 2
        else "over its interval: the part of a step that is linear in the rows (encoders) and the "
        "part that is constant still count."
    )
    return (
        "HeroCon's Figure 4b: time roughly proportional to the square of |N_i| (dashed, through "
        f"the last point). Measured: exponent {exponent:.2f}; 2 is {where}"
    )


def _lines(lines: Iterator[str]) -> str:
    return f"<pre>{html.escape(chr(10).join(lines))}</pre>"


def _upper(text: str) -> str:
    return text[0].upper() + text[1:]
