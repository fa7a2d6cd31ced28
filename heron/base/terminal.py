"""Prints lines, tables and bars: with rich on a terminal, as plain lines in a pipe or a file."""

import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Self, TextIO

if TYPE_CHECKING:
    from rich.console import Console

LOG_INTERVAL_S = 10.0  # between the lines that a bar writes to a log


def is_terminal(stream: TextIO) -> bool:
    """Returns whether it is a terminal, and not the stream that a progress bar has wrapped."""
    return stream.isatty() and not hasattr(stream, "rich_proxied_file")


def console(stream: TextIO) -> "Console":
    """Returns a rich console for a stream; it respects NO_COLOR, COLUMNS and TERM."""
    from rich.console import Console  # here and below: `heron --help` does not need it

    return Console(file=stream, markup=False, emoji=False)


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun: 1 shard, 2 shards."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def print_lines(*lines: str) -> None:
    """Prints lines of text; on a terminal with coloured numbers and paths, wrapped at words."""
    if is_terminal(sys.stdout):
        console(sys.stdout).print(*lines, sep="\n")
    else:
        print(*lines, sep="\n", flush=True)


def print_error(word: str, message: str) -> None:
    """Prints `error: …`, or another word, on stderr; on a terminal the word is red."""
    if not is_terminal(sys.stderr):
        print(f"{word}: {message}", file=sys.stderr, flush=True)
        return
    from rich.text import Text

    console(sys.stderr).print(Text.assemble((f"{word}:", "bold red"), " ", message))


def print_markdown(text: str) -> None:
    """Prints Markdown; on a terminal it is rendered."""
    if not is_terminal(sys.stdout):
        print(text, end="" if text.endswith("\n") else "\n", flush=True)
        return
    from rich.markdown import Markdown

    console(sys.stdout).print(Markdown(text))


def print_table(
    heads: Sequence[str], lines: Sequence[Sequence[str]], headed: bool = True, piped: str = ""
) -> None:
    """Prints a table: ruled and fitted on a terminal, elsewhere one line per row, or `piped`.

    Without `headed`, the cells of plain lines follow their heads instead of being below them.
    Unprintable texts, such as names of folders, are escaped, as they could move the cursor.
    """
    rows = [[t if t.isprintable() else repr(t) for t in line] for line in (heads, *lines)]
    if is_terminal(sys.stdout):
        _print_ruled(rows)
        return
    if piped:
        print(piped, end="", flush=True)
        return
    if not headed:
        rows = [
            [
                f"{head} {text}".lstrip() if text else ""
                for head, text in zip(rows[0], row, strict=True)
            ]
            for row in rows[1:]
        ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (text.ljust(width) for text, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())
    sys.stdout.flush()


def _print_ruled(rows: Sequence[Sequence[str]]) -> None:
    """Prints rows, of which the first are the heads, on a terminal, with the columns that fit."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    terminal = console(sys.stdout)
    columns = list(zip(*rows, strict=True))
    word_widths = [max(len(word) for t in c for word in t.split() or [""]) for c in columns]
    while len(columns) > 2 and sum(word_widths[: len(columns)]) + 2 * len(columns) > terminal.width:
        del columns[-1]
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for head, *cells in columns:
        numbers = all(text[:1] in "0123456789+-−–." for text in cells if text)
        table.add_column(head, justify="right" if numbers else "left", overflow="fold")
    for row in zip(*(cells for _, *cells in columns), strict=True):
        table.add_row(*row)
    terminal.print(table)
    if omitted := rows[0][len(columns) :]:
        terminal.print(f"too wide for this terminal, and left out: {', '.join(omitted)}")


class Bar:
    """Shows progress: a bar on a terminal, a line every ten seconds in a log.

    Lines are printed at once and in ASCII, as schedulers interleave the output of processes.
    """

    def __init__(
        self, total: int, unit: str, *, start: int = 0, name: str = "", hidden: bool = False
    ) -> None:
        """Starts at `start` of `total`, counted in `unit`s; `B` stands for bytes."""
        self._total, self._unit, self._name = total, unit, name
        self._start = self._done = start
        self._shown, self._hidden, self._logged_done = "", hidden, start
        self._started_at = self._logged_at = time.monotonic()
        self._progress = None
        if hidden or not is_terminal(sys.stderr):
            return
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=8)),
            TextColumn("{task.fields[shown]}", "cyan", table_column=Column()),  # it wraps
            console=console(sys.stderr),
            refresh_per_second=4,
            redirect_stdout=sys.stdout.isatty(),
            expand=True,
        )
        self._task = self._progress.add_task(
            self._progress_text(), total=total, completed=start, shown=""
        )
        self._progress.start()

    def update(self, count: int = 1, shown: str = "") -> None:
        """Adds `count`; `shown` is text beside the bar, such as the loss."""
        self._done, self._shown = self._done + count, shown
        now = time.monotonic()
        if self._progress:
            details = ", ".join(filter(None, (shown, self._time_left(now))))
            self._progress.update(
                self._task, completed=self._done, description=self._progress_text(), shown=details
            )
        elif now - self._logged_at >= LOG_INTERVAL_S:
            self._log(self._time_left(now))

    def close(self) -> None:
        """Stops the bar as it is, or logs the final count."""
        elapsed = timedelta(seconds=round(time.monotonic() - self._started_at))
        if self._progress:
            self._progress.stop()
        elif self._done > self._logged_done:
            self._log(f"in {elapsed}")

    def _log(self, timing: str) -> None:
        self._logged_at, self._logged_done = time.monotonic(), self._done
        if not self._hidden:
            line = ", ".join(filter(None, (self._progress_text(), self._shown, timing)))
            print(line, file=sys.stderr, flush=True)

    def _progress_text(self) -> str:
        name = f"{self._name}: " if self._name else ""
        if self._unit == "B":
            from rich.filesize import decimal

            return f"{name}{decimal(self._done)} of {decimal(self._total)}"
        return f"{name}{self._unit} {self._done:,} of {self._total:,}"

    def _time_left(self, now: float) -> str:
        progress = self._done - self._start
        if progress <= 0 or self._done >= self._total:
            return ""
        seconds = (now - self._started_at) / progress * (self._total - self._done)
        return f"{timedelta(seconds=round(seconds))} left"

    def __enter__(self) -> Self:
        """Returns itself; as a context manager it restores the cursor even after an error."""
        return self

    def __exit__(self, *error: object) -> None:
        """Closes the bar."""
        self.close()
