"""A running study on a terminal: how many trials have ended, and the progress of the others."""

import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from heron.base.terminal import console, is_terminal
from heron.studies.ledger import Ledger
from heron.studies.runs import Run, read_run
from heron.studies.text import cell, short
from heron.studies.trials import Trial

if TYPE_CHECKING:
    from rich.table import Table

MIN_PROGRESS = 0.25  # of a trial, before the time that is left is estimated
MAX_RUNNING, MAX_ENDED = 12, 6  # trials shown: of those under way, and of the last that ended
print_line = partial(print, flush=True)  # above the table, where there is one


def live(trials: Sequence[Trial], ledger: Ledger) -> AbstractContextManager[object]:
    """Returns a context in which a terminal shows the table, refreshed every second."""
    if not is_terminal(sys.stdout):
        return nullcontext()
    from rich.live import Live

    before = _trials_done(ledger, _under_way(trials, ledger))
    draw = partial(status, trials, ledger, time.monotonic(), before)
    return Live(get_renderable=draw, refresh_per_second=1, console=console(sys.stdout))


def status(trials: Sequence[Trial], ledger: Ledger, started: float, before: float) -> "Table":
    """Returns the table of all trials of a study that started, or resumed, at `started`.

    The time is of the monotonic clock; `before` trials' worth of steps had been made by then.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    rows, measure, planned = dict(ledger.rows), ledger.study.measure, ledger.study.planned
    score = measure.score or measure.y[0]
    under_way = _under_way(trials, ledger)
    failed = sum(row["status"] == "failed" for row in rows.values())
    title = f"{len(rows)} of {planned} trials have ended"
    title += f", {failed} failed" if failed else ""
    done = _trials_done(ledger, under_way)
    if done - before > MIN_PROGRESS and len(rows) < planned:
        seconds = (time.monotonic() - started) / (done - before) * (planned - done)
        title += f"; {timedelta(seconds=round(seconds))} left"
    table = Table(
        box=SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", expand=True
    )
    for head in ("trial", "state", "step"):
        table.add_column(head, no_wrap=True)
    for head in (short(score), "loss", "memory"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("values", overflow="ellipsis", no_wrap=True, ratio=1)  # the remaining width
    by_name = {trial.name: trial for trial in trials}
    for name in [name for name in rows if name in by_name][-MAX_ENDED:]:
        row, trial = rows[name], by_name[name]
        values = {"loss": read_run(trial.run)["loss"]}
        values |= (row["measured"] or {}) | (row["result"] or {})
        cells = [_cell(values, key) for key in ("steps", score, "loss", "peak_memory_bytes")]
        table.add_row(name, row["status"], *cells, trial.current().description, style="dim")
    running = [
        (trial, run)
        for trial, run in under_way
        if run["state"] == "living" or trial.name in ledger.started
    ]
    for trial, run in running[:MAX_RUNNING]:
        idle = "waits" if run["step"] else "starts"
        state = "runs" if run["state"] == "living" else idle
        step = f"{run['step']:,} of {run['steps']:,.0f}" if run["steps"] else _cell(run, "step")
        cells = [step, _cell(run, score), _cell(run, "loss"), "–"]  # known at its end
        table.add_row(trial.name, state, *cells, trial.current().description)
    return table


def _under_way(trials: Sequence[Trial], ledger: Ledger) -> list[tuple[Trial, Run]]:
    """Returns the trials that have a folder but no row, each with the values of its run.

    Where trials are compared at rungs, `steps` is the last rung.
    """
    started = [trial for trial in trials if trial.name not in ledger.rows and trial.run.is_dir()]
    runs = [(trial, read_run(trial.run)) for trial in started]
    last = ledger.study.search.rungs[-1]
    return [(trial, run | {"steps": last or run["steps"]}) for trial, run in runs]


def _trials_done(ledger: Ledger, under_way: Sequence[tuple[Trial, Run]]) -> float:
    """Returns the number of trials done, with the shares of those under way."""
    shares: list[float] = [
        (run["step"] or 0) / run["steps"] for _, run in under_way if run["steps"]
    ]
    return len(ledger.rows) + sum(min(1.0, share) for share in shares)


def _cell(values: Run, key: str) -> str:
    return cell(values.get(key), key)
