"""The part of a report on more processes than there are: the model, its error, the table."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import pandas as pd

from heron.launch.studies import figures as draw
from heron.launch.studies.contrast import time_pair
from heron.launch.studies.measured import Points
from heron.launch.studies.rows import Results
from heron.launch.studies.step_model import (
    Link,
    Memory,
    Step,
    StepModel,
    fit,
    fit_memory,
    fit_without_each,
    wire,
)
from heron.launch.studies.text import markdown, number
from heron.launch.studies.workload import Setting
from heron.pipeline.config.errors import StudyError
from heron.pipeline.training.page import heading, paragraph, table

WORLDS = [2**n for n in range(3, 13)]  # 8 to 4,096
TITLE = "More processes than were measured"


@dataclass(frozen=True)
class Assumed:
    """What the table of more processes takes for granted.

    Attributes:
        gbps: of the link of each process, Gbit/s.
        microseconds: latency of a message.
        overlap: share of the exchange of gradients that backward hides, from 0 to 1.
        batch: rows of the global batch; None: every process keeps its share.
    """

    gbps: float = 200.0
    microseconds: float = 5.0
    overlap: float = 0.0
    batch: int | None = None

    def __post_init__(self) -> None:
        """Refuses what is no link.

        Raises:
            StudyError: names the option, what was found and what is expected.
        """
        checks = {
            "--link-gbps": (self.gbps, self.gbps > 0, "above 0"),
            "--latency-us": (self.microseconds, self.microseconds >= 0, "0 or more"),
            "--overlap": (self.overlap, 0 <= self.overlap <= 1, "0 to 1"),
            "--global-batch": (self.batch, self.batch is None or self.batch > 0, "above 0"),
        }
        for name, (value, good, expected) in checks.items():
            if not good:
                raise StudyError(f"{name} is {value}; expected {expected}")


class Extrapolation:
    """A model of a step, fitted to some points, and what it says of more processes.

    Attributes:
        model: of the step's time; or, in words, why there is none.
        memory: of a process; or, in words, why there is none.
    """

    def __init__(self, points: Points, assumed: Assumed, pair: float | None = None) -> None:
        """Fits the model.

        Args:
            points: that were measured.
            assumed: of the table.
            pair: seconds that were measured of a pair of rows; None: it is fitted.
        """
        self.points, self.assumed, self.pair = points, assumed, pair
        self.model = fit(points.workload, points.measured, pair)
        self.memory = fit_memory(points.workload, points.measured)
        self.without_each = fit_without_each(points.workload, points.measured, pair)
        self.base = max(points.measured, key=lambda p: (p.setting.world, p.setting.share)).setting

    @cached_property
    def forecast(self) -> pd.DataFrame:
        """What is predicted: a line for each of 8 to 4,096 processes with rows of every stream.

        Columns are `processes`, `rows`, the parts of a `Step` in seconds, `step` with messages
        log2 P deep, `rings` with messages P - 1 deep, `least` and `most` of `step` by the fits
        without one of the points, and of a process `sent` and `memory` in bytes.
        """
        lines = []
        link, overlap = Link.of(self.assumed.gbps, self.assumed.microseconds), self.assumed.overlap
        for setting in map(self._setting, WORLDS):
            streams = [n for n in (setting.labelled, setting.unlabelled) if n]
            if isinstance(self.model, str) or min(streams) < setting.world:
                continue
            step = self.model.step(setting, link, overlap=overlap)
            fits = [model for model in self.without_each if model is not None]
            others = [model.step(setting, link, overlap=overlap).total for model in fits]
            memory = math.nan
            if isinstance(self.memory, Memory):
                memory = self.memory.bytes(self.points.workload, setting)
            line = {"processes": setting.world, "rows": setting.rows, **step._asdict()}
            line |= {"step": step.total, "least": min(others, default=math.nan)}
            line |= {"most": max(others, default=math.nan), "memory": memory}
            line["rings"] = self.model.step(setting, link, True, overlap).total
            line["sent"] = wire(self.points.workload.exchanges(setting), setting)
            lines.append(line)
        return pd.DataFrame(lines)

    def _setting(self, world: int) -> Setting:
        """Returns the base's share on more processes, or the batch that was asked for."""
        base, rows = self.base, self.assumed.batch
        if rows is None:
            each = base.labelled // base.world, base.unlabelled // base.world
            return Setting(world, each[0] * world, each[1] * world, base.stage)
        labelled = round(rows * base.labelled / base.rows)
        return Setting(world, labelled, rows - labelled, base.stage)

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Returns the heads and the cells of the table, where there is one."""
        assert isinstance(self.model, StepModel)
        table, one = self.forecast, self._setting(1)
        rate, alone = table["rows"] / table["step"], one.rows / self.model.step(one).total
        exchange = table[["gathers", "norm", "gradients"]].sum(axis=1)
        least, most = (_digits(table[name], 2) for name in ("least", "most"))
        texts = {
            "processes": table["processes"].map("{:,}".format),
            "rows": table["rows"].map("{:,}".format),
            "compute s": _digits(table["compute"]),
            "contrast s": _digits(table["contrast"]),
            "exchange s": _digits(exchange),
            "step s": _digits(table["step"]),
            "in rings s": _digits(table["rings"]),
            "left-out fits s": (least + " to " + most).replace("– to –", "–"),
            "samples / s": rate.map("{:,.0f}".format),
            "efficiency": (rate / table["processes"] / alone).map("{:.3f}".format),
            "GB sent": _digits(table["sent"] / 1e9),
            "memory GB": _digits(table["memory"] / 1e9),
        }
        return list(texts), pd.DataFrame(texts).to_numpy().tolist()

    @property
    def why_no_table(self) -> str:
        """Why nothing is said of more processes, in words; empty where there is a table."""
        if isinstance(self.model, str):
            return self.model
        if not self.model.pair:
            return (
                "No table of more processes: the steps of one process do not tell what a pair of "
                "rows costs from what a row does, and it is the contrast that grows with the "
                "processes. Larger batches tell it, or --measure-contrast, which times the "
                "objective alone on this machine."
            )
        if self.forecast.empty:
            return "No table of more processes: there are fewer rows of a stream than processes."
        return ""

    def markdown(self) -> str:
        """Returns the table in Markdown, headed by what it is; or why there is none."""
        if self.why_no_table:
            return f"{self.why_no_table}\n"
        return f"{self._title()}\n\n{markdown(*self.cells())}"

    def html(self) -> str:
        """Returns the section of the report."""
        return "".join(self._body())

    def _title(self) -> str:
        base, batch = self.base, self.assumed.batch
        fixed = f"{base.share:,} rows a process" if batch is None else f"{batch:,} rows in all"
        return (
            f"Extrapolation, {fixed}: compute and contrast as measured here; assumed "
            f"{self.assumed.gbps:g} Gbit/s and {self.assumed.microseconds:g} µs a message for each "
            f"process, {self.assumed.overlap:.0%} of the gradients' exchange hidden by backward"
        )

    def _body(self) -> Iterator[str]:
        yield heading(TITLE)
        if self.points.left_out:
            yield paragraph(f"{self.points.left_out}.")
        if isinstance(self.model, str):
            yield paragraph(self.model)
            return
        yield paragraph(
            "A step is compute (linear in the rows of a process) + contrast (linear in its rows "
            "times all rows) + exchange (messages and bytes of what is counted of a step), one "
            "after another. Constants by least squares of relative errors, none below 0:"
        )
        yield table(["constant", "value", "from"], self._constants(self.model))
        yield from self._errors(self.model)
        if isinstance(self.memory, str):
            yield paragraph(self.memory)
        if self.why_no_table:
            yield paragraph(self.why_no_table)
            return
        yield paragraph(f"{self._title()}.")
        names = {"gathers": "gathered vectors", "norm": "batch norm"}
        yield draw.extrapolated(
            self.forecast["processes"], self.forecast[list(Step._fields)].rename(columns=names)
        )
        yield table(*self.cells())
        yield paragraph(
            "Every line is an extrapolation. 'step s' has messages log2 P deep (recursive "
            "doubling, trees), 'in rings s' P - 1 deep: a library lies between. 'left-out fits s': "
            "the least and the most of 'step s' by the fits without one of the points, which is "
            "how far the measured steps determine it. Efficiency is samples a second of a "
            "process by those of one alone with the same rows; with a fixed "
            "share the negative set grows with the processes, and what falls is mostly that more "
            "is compared. Not in it: slower processes that others wait for, links that are shared, "
            "reading from a common disk."
        )

    def _constants(self, model: StepModel) -> list[list[str]]:
        alone = sum(p.setting.world == 1 for p in self.points.measured)
        several = len(self.points.measured) - alone
        of_one, of_more = f"one process, {alone} settings", f"several, {several} settings, in rings"
        of_pair = of_one if self.pair is None else "the objective alone, timed on this machine"
        constants = [
            ("fixed, ms a step", 1e3 * model.fixed, of_one),
            ("row, µs", 1e6 * model.row, of_one),
            ("pair of rows, ns", 1e9 * model.pair, of_pair),
        ]
        if (link := model.link) is not None:
            rate = 8e-9 / link.per_byte if link.per_byte else 0.0
            constants.append(("latency, µs a message", 1e6 * link.latency, of_more))
            constants.append(("bandwidth, Gbit/s", rate, of_more))
        if isinstance(self.memory, Memory):
            constants.append(("base, MB", self.memory.base / 1e6, "peak memory of the same"))
            constants.append(
                ("row in memory, kB", self.memory.row / 1e3, "peak memory of the same")
            )
        unknown = "0, or not told from the others"
        return [[name, number(v, 3) if v else unknown, source] for name, v, source in constants]

    @cached_property
    def judged(self) -> pd.DataFrame:
        """Seconds of each point: `measured`, `fitted`, and `left_out` by the fit without it."""
        lines = []
        for (setting, seconds, _), other in zip(
            self.points.measured, self.without_each, strict=True
        ):
            line = {"measured": seconds, "left_out": math.nan}
            if isinstance(self.model, StepModel):
                line["fitted"] = self.model.step(setting, ring=True).total
            if other is not None and (setting.world == 1 or other.link is not None):
                line["left_out"] = other.step(setting, ring=True).total
            lines.append(line)
        return pd.DataFrame(lines)

    def _errors(self, model: StepModel) -> Iterator[str]:
        """Says how far the model is off, in a sentence and in a table of every point."""
        judged = self.judged
        errors = judged[["fitted", "left_out"]].div(judged["measured"], axis=0) - 1
        fitted, left = errors["fitted"].abs(), errors["left_out"].abs().dropna()
        sentence = f"On the {len(fitted)} settings that were measured the model errs by "
        sentence += f"{fitted.median():.1%} (median) and {fitted.max():.1%} (most)"
        if len(left):
            sentence += (
                f"; each left out of the fit in turn, where that can be done ({len(left)}), by "
                f"{left.median():.1%} and {left.max():.1%}"
            )
        else:
            sentence += "; too few to leave one out"
        if model.link is None:
            sentence += (
                ". No step of several processes was measured: their exchange is assumed alone"
            )
        yield paragraph(f"{sentence}.")
        heads = ["processes", "rows", "rows of one", "ZeRO", "measured s", "model s", "error"]
        lines = []
        for (setting, seconds, _), time, error in zip(
            self.points.measured, judged["fitted"], errors.itertuples(), strict=True
        ):
            sizes = [f"{n:,}" for n in (setting.world, setting.rows, setting.share)]
            stage = str(setting.stage) if setting.stage else "–"
            times = number(seconds), number(time), _percent(error.fitted)
            lines.append([*sizes, stage, *times, _percent(error.left_out)])
        yield table([*heads, "left out"], lines)


def section(
    studies: Sequence[Results], assumed: Assumed, time_contrast: bool = False
) -> tuple[str, str]:
    """Returns the part of a report as HTML, and its table in Markdown; words, if there is no model.

    Args:
        studies: of one experiment; the first is what the report is about.
        assumed: of the table.
        time_contrast: time the objective alone here, instead of fitting what a pair of rows costs.
    """
    try:
        points = Points.of(studies)
        largest = max((one.setting for one in points.measured), key=lambda one: one.share)
        pair = time_pair(points.workload, largest) if time_contrast else None
        extrapolation = Extrapolation(points, assumed, pair)
    except StudyError as fault:
        return heading(TITLE) + paragraph(f"{fault}."), f"{fault}.\n"
    return extrapolation.html(), extrapolation.markdown()


def _digits(column: pd.Series, digits: int = 3) -> pd.Series:
    return column.map(lambda value: number(value, digits))


def _percent(error: float) -> str:
    text = "–" if math.isnan(error) else f"{error:+.1%}"
    return "0.0%" if text in ("+0.0%", "-0.0%") else text
