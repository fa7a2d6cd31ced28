"""The section of a report on more processes than were measured: the model, its error, a table."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count

import pandas as pd

from heron.cli.arguments import UsageError
from heron.config.errors import StudyError
from heron.report.pages import figure
from heron.studies import figures, text
from heron.studies.contrast import time_pair
from heron.studies.results import Results
from heron.studies.step_model import (
    MeasuredStep,
    Setting,
    Step,
    StepModel,
    Workload,
    cost,
    fit,
    fit_without_each,
    measured_points,
)

WORLDS = [2**n for n in range(3, 13)]  # 8 to 4,096
TITLE = "More processes than were measured"


@dataclass(frozen=True)
class Assumptions:
    """The assumptions of the table, as given by options of `heron report`."""

    link_gbps: float = 200.0
    latency_us: float = 5.0
    overlap: float = 0.0
    global_batch: int | None = None

    def with_link(self, model: StepModel) -> StepModel:
        """Returns a model with the assumed link in place of the measured one."""
        return replace(model, latency=1e-6 * self.latency_us, per_byte=8e-9 / self.link_gbps)

    def setting(self, base: Setting, world: int) -> Setting:
        """Returns `base` on `world` processes: as many rows per process, or the global batch.

        Raises a UsageError if a stream that `base` has gets no rows.
        """
        if self.global_batch is None:
            labelled, unlabelled = base.labelled // base.world, base.unlabelled // base.world
            return Setting(world, labelled * world, unlabelled * world, base.stage)
        labelled, unlabelled = _split(self.global_batch, base)
        return Setting(world, labelled, unlabelled, base.stage)


def _split(rows: int, base: Setting) -> tuple[int, int]:
    """Returns the labelled and the unlabelled of some rows, in the proportion of `base`."""

    def streams(rows: int) -> dict[str, int]:
        labelled = round(rows * base.labelled / base.rows)
        return {"labelled": labelled, "unlabelled": rows - labelled}

    needed = [name for name in ("labelled", "unlabelled") if getattr(base, name)]
    for name in needed:
        if not streams(rows)[name]:
            fewest = min(getattr(base, stream) for stream in needed)
            start = max(rows, base.rows // (2 * fewest))  # fewer rows round that stream to nothing
            minimum = next(n for n in count(start) if all(streams(n)[s] for s in needed))
            raise UsageError(
                f"--global-batch {rows} leaves no row of the {name} stream, as the study has "
                f"{base.labelled:,} labelled and {base.unlabelled:,} unlabelled rows; expected "
                f"{minimum:,} or more"
            )
    return streams(rows)["labelled"], streams(rows)["unlabelled"]


@dataclass(eq=False)
class Forecast:
    """Predictions for more processes by a model of a step that is fitted to measured points.

    Raises a StudyError if the points do not determine the model.
    """

    workload: Workload
    points: Sequence[MeasuredStep]
    assumptions: Assumptions
    pair: float | None = None  # seconds of a pair of rows, where they were timed

    def __post_init__(self) -> None:
        """Fits the model; `base` is the setting whose rows per process every prediction keeps."""
        self.model = fit(self.workload, self.points, self.pair)
        self._without_each = fit_without_each(self.workload, self.points, self.pair)
        self.base = max((p.setting for p in self.points), key=lambda s: (s.world, s.local_rows))

    @cached_property
    def table(self) -> pd.DataFrame:
        """The predictions: a row per number of processes, 8 to 4,096, with rows of every stream.

        `step s` has messages log2 P deep, `in rings s` P - 1 deep; `least s` and `most s` bound
        `step s` over the fits without one of the points; efficiency is relative to one process.
        """
        assumptions, lines = self.assumptions, []
        model, overlap = assumptions.with_link(self.model), assumptions.overlap
        fits = [assumptions.with_link(other) for other in self._without_each if other is not None]
        one_process = assumptions.setting(self.base, 1)
        rate_of_one = one_process.rows / model.step(one_process).total
        for world in WORLDS:
            setting = assumptions.setting(self.base, world)
            if min(n for n in (setting.labelled, setting.unlabelled) if n) < world:
                continue
            step = model.step(setting, overlap=overlap)
            totals = [other.step(setting, overlap=overlap).total for other in fits]
            sent = cost(model.workload.exchanges(setting), setting, ring=False)[1]
            line = {
                "processes": world,
                "rows": setting.rows,
                **{f"{part} s": seconds for part, seconds in step._asdict().items()},
                "step s": step.total,
                "in rings s": model.step(setting, ring=True, overlap=overlap).total,
                "least s": min(totals, default=math.nan),
                "most s": max(totals, default=math.nan),
                "samples / s": round(setting.rows / step.total),
                "efficiency": setting.rows / step.total / world / rate_of_one,
                "GB sent": sent / 1e9,
                "memory GB": model.memory(setting) / 1e9,
            }
            lines.append(line)
        return pd.DataFrame(lines)

    @cached_property
    def predictions(self) -> pd.DataFrame:
        """Seconds of each point: `measured`, `fitted`, and `left_out`, by the fit without it."""
        lines = []
        for (setting, seconds, _), other in zip(self.points, self._without_each, strict=True):
            left_out = math.nan
            if other is not None and (setting.world == 1 or not math.isnan(other.latency)):
                left_out = other.step(setting, ring=True).total
            lines.append((seconds, self.model.step(setting, ring=True).total, left_out))
        return pd.DataFrame(lines, columns=["measured", "fitted", "left_out"])

    @property
    def why_no_table(self) -> str:
        """The reason why there is no table of more processes; empty where there is one."""
        if not self.model.pair:
            return (
                "No table of more processes: the steps of one process do not tell what a pair of "
                "rows costs from what a row does, and it is the contrast that grows with the "
                "processes. Larger batches tell it, or --measure-contrast, which times the "
                "objective alone on this machine."
            )
        if self.table.empty:
            return "No table of more processes: there are fewer rows of a stream than processes."
        return ""

    @property
    def title(self) -> str:
        """The title of the table, with its assumptions."""
        link, batch = self.assumptions, self.assumptions.global_batch
        rows = f"{batch:,} rows in all" if batch else f"{self.base.local_rows:,} rows a process"
        return (
            f"Extrapolation, {rows}: compute and contrast as measured here; assumed "
            f"{link.link_gbps:g} Gbit/s and {link.latency_us:g} µs a message for each process, "
            f"{link.overlap:.0%} of the gradients' exchange hidden by backward"
        )

    def markdown(self) -> str:
        """Returns the title and the table in Markdown, or the reason why there is none."""
        if self.why_no_table:
            return f"{self.why_no_table}\n"
        return f"{self.title}\n\n{text.markdown(*text.heads_and_lines(self.table))}"

    def html(self) -> Iterator[str]:
        """Yields the section of the report, without its heading."""
        yield text.paragraph(
            "A step is compute (linear in the rows of a process) + contrast (linear in its rows "
            "times all rows) + exchange (messages and bytes of what is counted of a step), one "
            "after another. Constants by least squares of relative errors, none below 0:"
        )
        yield self._constants()
        yield from self._errors()
        if math.isnan(self.model.base):
            yield text.paragraph(
                "No model of memory: what a row takes is told by 3 shares of a process or more."
            )
        if self.why_no_table:
            yield text.paragraph(self.why_no_table)
            return
        yield text.paragraph(f"{self.title}.")
        parts = self.table.set_index("processes")[[f"{part} s" for part in Step._fields]]
        yield figure(figures.extrapolated(parts))
        yield text.table(*text.heads_and_lines(self.table))
        yield text.paragraph(
            "Every line is an extrapolation. Messages of 'step s' are log2 P deep (recursive "
            "doubling, trees), 'in rings s' P - 1 deep: a library lies between. 'least s' and "
            "'most s' are of the fits without one of the points: how far the measured steps "
            "determine 'step s'. Not in it: slower processes that others wait for, links that are "
            "shared, reading from a common disk."
        )

    def _constants(self) -> str:
        model = self.model
        alone = sum(p.setting.world == 1 for p in self.points)
        from_one, from_memory = f"one process, {alone} settings", "peak memory of the same"
        timed = "the objective alone, timed on this machine"
        from_several = f"several, {len(self.points) - alone} settings, in rings"
        gbps = 8e-9 / model.per_byte if model.per_byte else 0.0
        rates = [
            ("fixed, ms a step", 1e3 * model.fixed, from_one),
            ("row, µs", 1e6 * model.row, from_one),
            ("pair of rows, ns", 1e9 * model.pair, from_one if self.pair is None else timed),
            ("latency, µs a message", 1e6 * model.latency, from_several),
            ("bandwidth, Gbit/s", gbps, from_several),
            ("base, MB", model.base / 1e6, from_memory),
            ("row in memory, kB", model.row_bytes / 1e3, from_memory),
        ]
        undetermined = "0, or not told from the others"
        lines = [
            [name, text.number(value, 3) if value else undetermined, source]
            for name, value, source in rates
            if not math.isnan(value)
        ]
        return text.table(["constant", "value", "from"], lines)

    def _errors(self) -> Iterator[str]:
        """Yields the errors of the model, in a sentence and in a table of every point."""
        predictions, settings = self.predictions, [p.setting for p in self.points]
        errors = predictions[["fitted", "left_out"]].div(predictions["measured"], axis=0) - 1
        fitted, left_out = errors["fitted"].abs(), errors["left_out"].abs().dropna()
        sentence = (
            f"On the {len(fitted)} settings that were measured the model errs by "
            f"{fitted.median():.1%} (median) and {fitted.max():.1%} (most)"
        )
        sentence += (
            f"; each left out of the fit in turn, where that can be done ({len(left_out)}), by "
            f"{left_out.median():.1%} and {left_out.max():.1%}."
            if len(left_out)
            else "; too few to leave one out."
        )
        if math.isnan(self.model.latency):
            sentence += " No step of several processes was measured: their exchange is assumed."
        yield text.paragraph(sentence)
        columns = {
            "processes": [s.world for s in settings],
            "rows": [s.rows for s in settings],
            "rows of one": [s.local_rows for s in settings],
            "ZeRO": [str(s.stage or "–") for s in settings],
            "measured s": predictions["measured"],
            "model s": predictions["fitted"],
            "error %": 100 * errors["fitted"].round(4),
            "left out %": 100 * errors["left_out"].round(4),
        }
        yield text.table(*text.heads_and_lines(pd.DataFrame(columns)))


def section(
    studies: Sequence[Results], assumptions: Assumptions, time_contrast: bool = False
) -> tuple[str, str]:
    """Returns the section as HTML, and its table in Markdown; both say why if there is no model.

    The studies are of one experiment; the report is about the first. With `time_contrast` the cost
    of a pair of rows is timed here, on the objective alone, instead of fitted.
    """
    head = text.heading(TITLE)
    try:
        workload, points, left_out = measured_points(studies)
        head += text.paragraph(f"{left_out}.") if left_out else ""
        largest = max((p.setting for p in points), key=lambda s: s.local_rows)
        pair = time_pair(workload, largest) if time_contrast else None
        forecast = Forecast(workload, points, assumptions, pair)
    except StudyError as fault:
        return head + text.paragraph(f"{fault}."), f"{fault}.\n"
    return head + "".join(forecast.html()), forecast.markdown()
