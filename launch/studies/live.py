"""A study on a terminal while it runs: how many trials have ended, and how far the others are."""

import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heron.launch.run_folders import read_run
from heron.launch.studies.ledger import Ledger
from heron.launch.studies.text import cell, short
from heron.launch.studies.trials import Trial
from heron.pipeline.training.run_lock import holder
from heron.shards.terminal import console, is_terminal

if TYPE_CHECKING:
    from rich.table import Table

LIVING, ENDED = 12, 6  # trials that are shown of those under way, and of those that ended last
OWNER = re.compile(r"process (\d+) on (\S+)")
PEAK = re.compile(r"^VmHWM:\s+(\d+) kB$", re.MULTILINE)


@contextmanager
def live(trials: Sequence[Trial], ledger: Ledger) -> Iterator[Callable[[str], None]]:
    """Yields what says a line; on a terminal a table stands below the lines, new every second."""
    say = partial(print, flush=True)
    if not is_terminal(sys.stdout):
        yield say
        return
    from rich.live import Live

    draw = partial(status, trials, ledger, time.monotonic(), len(ledger.rows))
    with Live(get_renderable=draw, refresh_per_second=1, console=console(sys.stdout)):
        yield say


def status(trials: Sequence[Trial], ledger: Ledger, began: float, before: int) -> "Table":
    """Returns the table.

    Args:
        trials: all of the study.
        ledger: with the rows of those that have ended.
        began: when this start began, by the monotonic clock.
        before: how many had ended then.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    rows, measure = dict(ledger.rows), ledger.study.measure
    score = measure.score or measure.y[0]
    failed = sum(row["status"] == "failed" for row in rows.values())
    title = f"{len(rows)} of {len(trials)} trials have ended"
    title += f", {failed} failed" if failed else ""
    if made := len(rows) - before:
        seconds = (time.monotonic() - began) / made * (len(trials) - len(rows))
        title += f"; {timedelta(seconds=round(seconds))} left"
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
    for head in ("trial", "state", "step"):
        table.add_column(head, no_wrap=True)
    for head in (short(score), "loss", "memory"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("values", overflow="ellipsis", no_wrap=True)
    by_name = {trial.name: trial for trial in trials}
    for name in [name for name in rows if name in by_name][-ENDED:]:
        row = rows[name]
        found = {**(row["measured"] or {}), **(row["result"] or {})}
        cells = [_cell(found, key) for key in ("steps", score, "loss", "peak_memory_bytes")]
        table.add_row(name, row["status"], *cells, by_name[name].shown, style="dim")
    waiting = (trial for trial in trials if trial.name not in rows and trial.run.is_dir())
    shown = 0
    for trial in waiting:
        run = read_run(trial.run, trial.name)
        if run["state"] == "living" and shown < LIVING:
            shown += 1
            step = f"{run['step']:,} of {run['steps']:,.0f}" if run["steps"] else f"{run['step']:,}"
            cells = [step, _cell(run, score), _cell(run, "loss"), _memory(trial.run)]
            table.add_row(trial.name, "runs", *cells, trial.shown)
    return table


def _cell(values: dict[str, Any], key: str) -> str:
    return cell(values.get(key), key)


def _memory(run: Path) -> str:
    """Returns the most memory that the main process of a run has held, if it runs on this host."""
    found = OWNER.fullmatch(holder(run) or "")
    if not found or found[2] != socket.gethostname():
        return "–"
    try:
        peak = PEAK.search(Path(f"/proc/{found[1]}/status").read_text())
    except OSError:  # it has ended since
        return "–"
    return cell(1024 * int(peak[1]), "peak_memory_bytes") if peak else "–"
