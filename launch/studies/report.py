"""The report of a study: one HTML page that opens from disk, and the table in three formats."""

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launch.studies import figures as draw
from launch.studies.fits import FITS, Law, Power
from launch.studies.points import (
    Curve,
    curves,
    grid,
    natural_x,
    number,
    short,
    worker_curves,
)
from launch.studies.rows import NEGATIVES, Results, is_cost
from launch.studies.table import best, cell, shown, write_tables
from pipeline.page import heading, page, paragraph, table
from shards.manifest import whole_file

TIMES = ("step_s", "train_seconds", "seconds")
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
        """What the study asks to be shown, or what is asked for here in its place.

        Raises:
            StudyError: no trial has such a column.
        """
        measure = results.study.measure
        x, ys = x or measure.x, ys or measure.y
        results.refuse_unknown([x, *ys])
        return cls(results, natural_x(results, x), ys)

    def write(self, out: Path) -> Path:
        """Write report.html, table.md, table.csv and table.parquet; the path of the first.

        Raises:
            ShardError: the disk is full.
        """
        out.mkdir(parents=True, exist_ok=True)
        write_tables(self.results, self.ys, out)
        body = "".join(self._body())
        with whole_file(out / "report.html") as stream:
            stream.write(page(self.results.study.title, body, STYLE).encode())
        return out / "report.html"

    def with_section(self, section: str) -> "Report":
        """The same with a further part."""
        return replace(self, sections=[*self.sections, section])

    @property
    def state(self) -> str:
        """How far the study is, as a sentence."""
        results = self.results
        counts = {s: sum(row.status == s for row in results.rows) for s in ("failed", "stopped")}
        said = f"{len(results.done)} trial{'' if len(results.done) == 1 else 's'} done"
        said += "".join(f", {n} {s}" for s, n in counts.items() if n)
        left = results.planned - len(results.rows)
        under_way = results.under_way
        if left > 0 or under_way:
            said = f"The study is not finished: {said}"
            said += f" of {results.planned}" if left > 0 else ""
            said += f"; without a row yet: {', '.join(under_way)}" if under_way else ""
        return said + "."

    def _body(self) -> Iterator[str]:
        results = self.results
        finished = "not finished" not in self.state
        yield paragraph(self.state) if finished else _note(self.state)
        yield from map(paragraph, results.notes)
        yield self._best()
        if not results.done:
            yield paragraph("No trial is done, so that there is nothing to draw.")
        else:
            yield from self._figures()
        for y in self.ys if results.done else ():
            yield from self._heat_map(y)
        if "workers" in results.varied and results.done:
            yield from self._workers()
        yield from self.sections
        yield heading("Every trial")
        yield table(*shown(results, self.ys))
        yield paragraph("The same with every column: table.csv, table.parquet.")
        yield from self._failures()
        yield heading("The command of each trial")
        lines = [f"{row.trial}: {row.command}" for row in results.rows]
        yield f"<pre>{html.escape(chr(10).join(lines))}</pre>"

    def _best(self) -> str:
        name = self.results.study.measure.score or self.ys[0]
        row = best(self.results, name, self._mode(name))
        if row is None:
            return paragraph(f"No trial that is done has '{name}', so that none is best.")
        varied = ", ".join(f"{short(k)} {cell(row.get(k), k)}" for k in self.results.varied)
        value = cell(row.get(name), name)
        return paragraph(
            f"Best in {short(name)}: trial {row.trial} with {value} ({varied or '–'})."
        )

    def _mode(self, name: str) -> str | None:
        """What the study says is best of a column; None: it says nothing."""
        measure = self.results.study.measure
        return measure.mode if name == measure.score else None

    def _figures(self) -> Iterator[str]:
        x = self.x
        for y in self.ys:
            found = worker_curves(self.results, y) if x == "workers" else []
            found = found or curves(self.results, x, y)
            yield heading(_upper(f"{draw.label(y)} against {draw.label(x)}"))
            if not found:
                yield paragraph(f"No trial that is done has both {short(x)} and {short(y)}.")
                continue
            if len(found) > draw.MOST:
                yield paragraph(
                    f"{len(found)} curves, of which the first {draw.MOST} are drawn; the table "
                    "has all."
                )
            drawn = found[: draw.MOST]
            asked = self.results.study.measure.fits if is_cost(y) else ()
            fits = [[FITS[name](curve.points) for name in asked] for curve in drawn]
            laws = [[one for one in of if not isinstance(one, str)] for of in fits]
            square = x == NEGATIVES and y in TIMES and len(drawn[0].points) > 1
            yield draw.curves(f"{y} against {x}", drawn, laws, square)
            yield self._says(drawn, fits, square)
            if self.results.study.measure.fits and not is_cost(y):
                yield paragraph(f"No law is fitted to {short(y)}, which is no time, size or rate.")
            if grid(self.results, y) is None:  # a heat map has the numbers
                yield _points(found)

    def _says(
        self, drawn: Sequence[Curve], fits: Sequence[Sequence[Law | str]], square: bool
    ) -> str:
        """The fits in sentences."""
        lines = []
        for curve, found in zip(drawn, fits, strict=True):
            for one in found:
                said = one if isinstance(one, str) else f"{short(curve.y)} = {one.says()}."
                lines.append(f"{curve.name}: {said}" if curve.name else said)
                if square and isinstance(one, Power):
                    lines.append(_beside_the_square(one))
        repeated = any(len(point.values) > 1 for curve in drawn for point in curve.points)
        if repeated:
            lines.append("Bars are standard deviations over repeats (n - 1 below).")
        return "".join(map(paragraph, lines))

    def _heat_map(self, y: str) -> Iterator[str]:
        found = grid(self.results, y)
        if found is not None:
            across, down = short(found[0]), short(found[1])
            yield heading(_upper(f"{draw.label(y)} over {across} and {down}"))
            yield draw.heat_map(y, *found, self._mode(y))
            yield paragraph("Means over repeats; the best is framed, a cell without a trial grey.")

    def _workers(self) -> Iterator[str]:
        found = worker_curves(self.results, "samples_per_s")
        yield heading("Workers: speed-up and efficiency")
        if not found:
            yield paragraph(
                "No two numbers of workers have the same batch in all or the same rows a worker, "
                "so that they cannot be compared."
            )
            return
        lines = []
        for curve in found:
            first = curve.points[0]
            for point in curve.points:
                times = point.mean / first.mean
                more = float(point.x) / float(first.x)
                lines.append(
                    [
                        curve.name,
                        f"{point.x:g}",
                        point.text(),
                        f"{times:.3f}",
                        f"{times / more:.3f}",
                    ]
                )
        yield draw.speed_up(found)
        yield table(["fixed", "workers", "samples / s", "speed-up", "efficiency"], lines)
        yield paragraph(
            "Speed-up is samples a second by those of the fewest workers of the curve; efficiency "
            "is speed-up by as many times the workers."
        )

    def _failures(self) -> Iterator[str]:
        failed = [row for row in self.results.rows if row.error]
        if failed:
            yield heading("What failed")
            lines = [f"{row.trial}: {row.error}" for row in failed]
            yield f"<pre>{html.escape(chr(10).join(lines))}</pre>"


def _points(found: Sequence[Curve]) -> str:
    """The points of curves as a table."""
    y = found[0].y
    lines = []
    for curve in found:
        for point in curve.points:
            x = number(point.x) if isinstance(point.x, float) else point.x
            text = point.text()
            if y.endswith("_bytes"):
                text = replace(point, values=point.values / 1e6).text()
            lines.append([*([curve.name] if len(found) > 1 else []), x, text])
    heads = [draw.label(found[0].x), draw.label(y)]
    return table(["curve", *heads] if len(found) > 1 else heads, lines)


def _beside_the_square(law: Power) -> str:
    """The measured exponent beside the published one."""
    where = "within" if law.low <= 2 <= law.high else "above" if law.low > 2 else "below"
    return (
        "HeroCon's Figure 4b: time roughly proportional to the square of |N_i| (dashed, through "
        f"the last point). Measured: exponent {law.b:.2f}; 2 is "
        + {
            "within": "inside its interval.",
            "above": "under its interval: time rises faster than the square.",
            "below": "over its interval: the part of a step that is linear in the rows (encoders) "
            "and the part that is constant still count.",
        }[where]
    )


def _upper(text: str) -> str:
    return text[0].upper() + text[1:]


def _note(text: str) -> str:
    return f'<p class="note">{html.escape(text)}</p>'
