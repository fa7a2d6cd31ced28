"""The part of a report on more processes than there are: the model, its error, the table."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import pandas as pd

from heron.launch.studies import figures
from heron.launch.studies.contrast import time_pair
from heron.launch.studies.results import Results
from heron.launch.studies.step_model import Link, Step, cost, fit, fit_without_each
from heron.launch.studies.text import markdown, number
from heron.launch.studies.workload import Measured, Setting, Workload, measured_points
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


class Forecast:
    """What a model of a step, fitted to some points, says of more processes.

    Attributes:
        model: of the step.
        base: the setting whose share of rows every process keeps.
    """

    def __init__(
        self,
        workload: Workload,
        points: Sequence[Measured],
        assumed: Assumed,
        pair: float | None = None,
    ) -> None:
        """Fits the model.

        Args:
            workload: that was measured.
            points: each setting once.
            assumed: of the table.
            pair: seconds that were measured of a pair of rows; None: it is fitted.

        Raises:
            StudyError: the points do not determine the model.
        """
        self.points, self._assumed, self._pair = points, assumed, pair
        self.model = fit(workload, points, pair)
        self._without_each = fit_without_each(workload, points, pair)
        self.base = max((p.setting for p in points), key=lambda one: (one.world, one.share))

    @cached_property
    def table(self) -> pd.DataFrame:
        """What is predicted, indexed by 8 to 4,096 processes, where each has rows of every stream.

        Columns are `rows`, the parts of a `Step` in seconds, `step` with messages log2 P deep,
        `rings` with messages P - 1 deep, `least` and `most` of `step` by the fits without one of
        the points, `efficiency` beside one process, and `memory` of a process in bytes.
        """
        one, lines = self._setting(1), {}
        alone = one.rows / self.model.step(one).total
        link, overlap = (
            Link.of(self._assumed.gbps, self._assumed.microseconds),
            self._assumed.overlap,
        )
        fits = [model for model in self._without_each if model is not None]
        for setting in map(self._setting, WORLDS):
            if min(n for n in (setting.labelled, setting.unlabelled) if n) < setting.world:
                continue
            step = self.model.step(setting, link, overlap=overlap)
            others = [model.step(setting, link, overlap=overlap).total for model in fits]
            rate = setting.rows / step.total
            lines[setting.world] = {
                "rows": setting.rows,
                **step._asdict(),
                "step": step.total,
                "rings": self.model.step(setting, link, True, overlap).total,
                "least": min(others, default=math.nan),
                "most": max(others, default=math.nan),
                "rate": rate,
                "efficiency": rate / setting.world / alone,
                "sent": cost(self.model.workload.exchanges(setting), setting, ring=False)[1],
                "memory": self.model.memory(setting),
            }
        return pd.DataFrame.from_dict(lines, "index")

    def _setting(self, world: int) -> Setting:
        """Returns the base's share on more processes, or the batch that was asked for."""
        base, rows = self.base, self._assumed.batch
        if rows is None:
            each = base.labelled // base.world, base.unlabelled // base.world
            return Setting(world, each[0] * world, each[1] * world, base.stage)
        labelled = round(rows * base.labelled / base.rows)
        return Setting(world, labelled, rows - labelled, base.stage)

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Returns the heads and the cells of the table, where there is one."""
        table = self.table
        exchange = table[["gathers", "norm", "gradients"]].sum(axis=1)
        least, most = (_digits(table[name], 2) for name in ("least", "most"))
        texts = {
            "processes": [f"{world:,}" for world in table.index],
            "rows": table["rows"].map("{:,}".format),
            "compute s": _digits(table["compute"]),
            "contrast s": _digits(table["contrast"]),
            "exchange s": _digits(exchange),
            "step s": _digits(table["step"]),
            "in rings s": _digits(table["rings"]),
            "left-out fits s": (least + " to " + most).replace("– to –", "–"),
            "samples / s": table["rate"].map("{:,.0f}".format),
            "efficiency": table["efficiency"].map("{:.3f}".format),
            "GB sent": _digits(table["sent"] / 1e9),
            "memory GB": _digits(table["memory"] / 1e9),
        }
        return list(texts), pd.DataFrame(texts).to_numpy().tolist()

    @property
    def why_no_table(self) -> str:
        """Why nothing is said of more processes, in words; empty where there is a table."""
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
        """What the table is, and what it takes for granted."""
        base, assumed = self.base, self._assumed
        rows = (
            f"{assumed.batch:,} rows in all" if assumed.batch else f"{base.share:,} rows a process"
        )
        return (
            f"Extrapolation, {rows}: compute and contrast as measured here; assumed "
            f"{assumed.gbps:g} Gbit/s and {assumed.microseconds:g} µs a message for each process, "
            f"{assumed.overlap:.0%} of the gradients' exchange hidden by backward"
        )

    def markdown(self) -> str:
        """Returns the table in Markdown, headed by what it is; or why there is none."""
        if self.why_no_table:
            return f"{self.why_no_table}\n"
        return f"{self.title}\n\n{markdown(*self.cells())}"

    def html(self) -> Iterator[str]:
        """Yields the section of the report, without its heading."""
        yield paragraph(
            "A step is compute (linear in the rows of a process) + contrast (linear in its rows "
            "times all rows) + exchange (messages and bytes of what is counted of a step), one "
            "after another. Constants by least squares of relative errors, none below 0:"
        )
        yield table(["constant", "value", "from"], self._constants())
        yield from self._errors()
        if math.isnan(self.model.base):
            yield paragraph(
                "No model of memory: what a row takes is told by 3 shares of a process or more."
            )
        if self.why_no_table:
            yield paragraph(self.why_no_table)
            return
        yield paragraph(f"{self.title}.")
        names = {"gathers": "gathered vectors", "norm": "batch norm"}
        yield figures.extrapolated(self.table[list(Step._fields)].rename(columns=names))
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

    def _constants(self) -> list[list[str]]:
        model = self.model
        alone = sum(p.setting.world == 1 for p in self.points)
        several = f"several, {len(self.points) - alone} settings, in rings"
        of_one, memory = f"one process, {alone} settings", "peak memory of the same"
        of_pair = of_one if self._pair is None else "the objective alone, timed on this machine"
        constants = [
            ("fixed, ms a step", 1e3 * model.fixed, of_one),
            ("row, µs", 1e6 * model.row, of_one),
            ("pair of rows, ns", 1e9 * model.pair, of_pair),
        ]
        if (link := model.link) is not None:
            rate = 8e-9 / link.per_byte if link.per_byte else 0.0
            constants.append(("latency, µs a message", 1e6 * link.latency, several))
            constants.append(("bandwidth, Gbit/s", rate, several))
        if not math.isnan(model.base):
            constants.append(("base, MB", model.base / 1e6, memory))
            constants.append(("row in memory, kB", model.row_bytes / 1e3, memory))
        unknown = "0, or not told from the others"
        return [[name, number(v, 3) if v else unknown, source] for name, v, source in constants]

    @cached_property
    def judged(self) -> pd.DataFrame:
        """Seconds of each point: `measured`, `fitted`, and `left_out` by the fit without it."""
        lines = []
        for (setting, seconds, _), other in zip(self.points, self._without_each, strict=True):
            told = other is not None and (setting.world == 1 or other.link is not None)
            left_out = other.step(setting, ring=True).total if told and other else math.nan
            lines.append((seconds, self.model.step(setting, ring=True).total, left_out))
        return pd.DataFrame(lines, columns=["measured", "fitted", "left_out"])

    def _errors(self) -> Iterator[str]:
        """Says how far the model is off, in a sentence and in a table of every point."""
        judged = self.judged
        errors = judged[["fitted", "left_out"]].div(judged["measured"], axis=0) - 1
        fitted, left = errors["fitted"].abs(), errors["left_out"].abs().dropna()
        sentence = (
            f"On the {len(fitted)} settings that were measured the model errs by "
            f"{fitted.median():.1%} (median) and {fitted.max():.1%} (most)"
        )
        if len(left):
            sentence += (
                f"; each left out of the fit in turn, where that can be done ({len(left)}), by "
                f"{left.median():.1%} and {left.max():.1%}"
            )
        else:
            sentence += "; too few to leave one out"
        if self.model.link is None:
            sentence += (
                ". No step of several processes was measured: their exchange is assumed alone"
            )
        yield paragraph(f"{sentence}.")
        settings = [p.setting for p in self.points]
        texts = {
            "processes": [f"{one.world:,}" for one in settings],
            "rows": [f"{one.rows:,}" for one in settings],
            "rows of one": [f"{one.share:,}" for one in settings],
            "ZeRO": [str(one.stage or "–") for one in settings],
            "measured s": judged["measured"].map(number),
            "model s": judged["fitted"].map(number),
            "error": errors["fitted"].map(_percent),
            "left out": errors["left_out"].map(_percent),
        }
        yield table(list(texts), pd.DataFrame(texts).to_numpy().tolist())


def section(
    studies: Sequence[Results], assumed: Assumed, time_contrast: bool = False
) -> tuple[str, str]:
    """Returns the part of a report as HTML, and its table in Markdown; words, if there is no model.

    Args:
        studies: of one experiment; the first is what the report is about.
        assumed: of the table.
        time_contrast: time the objective alone here, instead of fitting what a pair of rows costs.
    """
    head = heading(TITLE)
    try:
        workload, points, left_out = measured_points(studies)
        head += paragraph(f"{left_out}.") if left_out else ""
        largest = max((one.setting for one in points), key=lambda one: one.share)
        pair = time_pair(workload, largest) if time_contrast else None
        forecast = Forecast(workload, points, assumed, pair)
    except StudyError as fault:
        return head + paragraph(f"{fault}."), f"{fault}.\n"
    return head + "".join(forecast.html()), forecast.markdown()


def _digits(column: pd.Series, digits: int = 3) -> pd.Series:
    return column.map(lambda value: number(value, digits))


def _percent(error: float) -> str:
    text = "–" if math.isnan(error) else f"{error:+.1%}"
    return "0.0%" if text in ("+0.0%", "-0.0%") else text
