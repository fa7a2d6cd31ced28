"""Lines, tables and bars for people: by rich on a terminal, plain lines in a pipe or a file."""

import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Self, TextIO

if TYPE_CHECKING:
    from rich.console import Console

EVERY_S = 10.0  # between two lines of a bar in a log


def is_terminal(stream: TextIO) -> bool:
    """Whether rich writes to it: a terminal that no bar has, whose own redirection wraps lines."""
    return stream.isatty() and not hasattr(stream, "rich_proxied_file")


def console(stream: TextIO) -> "Console":
    """Returns rich's console for a stream; it heeds NO_COLOR, COLUMNS and TERM."""
    from rich.console import Console  # here and below: `heron --help` needs none of it

    return Console(file=stream, markup=False, emoji=False)


def say(*lines: str, stream: TextIO | None = None) -> None:
    """Prints lines of text; on a terminal numbers and paths have colour, and words stay whole."""
    stream = stream or sys.stdout
    if is_terminal(stream):
        console(stream).print(*lines, sep="\n")
    else:
        print(*lines, sep="\n", file=stream, flush=True)


def say_fault(word: str, message: str) -> None:
    """Prints `error: …`, or another such word, on stderr; on a terminal the word is red."""
    if not is_terminal(sys.stderr):
        print(f"{word}: {message}", file=sys.stderr, flush=True)
        return
    from rich.text import Text

    console(sys.stderr).print(Text.assemble((f"{word}:", "bold red"), " ", message))


def say_markdown(text: str) -> None:
    """Prints Markdown; on a terminal its tables are ruled."""
    if not is_terminal(sys.stdout):
        print(text, end="" if text.endswith("\n") else "\n", flush=True)
        return
    from rich.markdown import Markdown

    console(sys.stdout).print(Markdown(text))


def say_table(
    heads: Sequence[str], lines: Sequence[Sequence[str]], headed: bool = True, piped: str = ""
) -> None:
    """Prints a table: on a terminal ruled and as wide as it, elsewhere a line a row, or `piped`.

    Where it is not `headed`, a cell of such a line stands behind its head instead of below it.
    What is not printable, as in the name of a folder, could move the cursor: it is escaped.
    """
    rows = [[t if t.isprintable() else repr(t) for t in line] for line in (heads, *lines)]
    if is_terminal(sys.stdout):
        _rule(rows)
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


def _rule(rows: Sequence[Sequence[str]]) -> None:
    """Prints rows, the first of them heads, on a terminal; the columns that have room there."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    terminal = console(sys.stdout)
    columns = list(zip(*rows, strict=True))
    words = [max(len(word) for text in c for word in text.split() or [""]) for c in columns]
    while len(columns) > 2 and sum(words[: len(columns)]) + 2 * len(columns) > terminal.width:
        del columns[-1]
    made = Table(box=SIMPLE_HEAD, pad_edge=False)
    for head, *cells in columns:
        numbers = all(text[:1] in "0123456789+-−–." for text in cells if text)
        made.add_column(head, justify="right" if numbers else "left", overflow="fold")
    for row in zip(*(cells for _, *cells in columns), strict=True):
        made.add_row(*row)
    terminal.print(made)
    if left := rows[0][len(columns) :]:
        terminal.print(f"too wide for this terminal, and left out: {', '.join(left)}")


class Bar:
    """How far something is: a bar on a terminal, in a log a line every ten seconds.

    Schedulers cut what the processes of a job print into pieces and interleave them, so that a
    line in a log is whole and in ASCII.
    """

    def __init__(
        self, total: int, unit: str, *, start: int = 0, name: str = "", hidden: bool = False
    ) -> None:
        """Begins at `start` of `total`, counted in `unit`s; `B` are bytes."""
        self._total, self._unit, self._name = total, unit, name
        self._start = self._done = start
        self._shown, self._hidden, self._said_at = "", hidden, start
        self._began = self._said = time.monotonic()
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
            self._counted(), total=total, completed=start, shown=""
        )
        self._progress.start()

    def update(self, count: int = 1, shown: str = "") -> None:
        """Counts `count` more; `shown` stands beside the bar, such as the loss."""
        self._done, self._shown = self._done + count, shown
        now = time.monotonic()
        if self._progress:
            beside = ", ".join(filter(None, (shown, self._left(now))))
            self._progress.update(
                self._task, completed=self._done, description=self._counted(), shown=beside
            )
        elif now - self._said >= EVERY_S:
            self._say(self._left(now))

    def close(self) -> None:
        """Leaves the bar as it is, or says in a log how far it came."""
        took = timedelta(seconds=round(time.monotonic() - self._began))
        if self._progress:
            self._progress.stop()
        elif self._done > self._said_at:
            self._say(f"in {took}")

    def _say(self, when: str) -> None:
        self._said, self._said_at = time.monotonic(), self._done
        if not self._hidden:
            parts = ", ".join(filter(None, (self._counted(), self._shown, when)))
            print(parts, file=sys.stderr, flush=True)

    def _counted(self) -> str:
        name = f"{self._name}: " if self._name else ""
        if self._unit == "B":
            from rich.filesize import decimal

            return f"{name}{decimal(self._done)} of {decimal(self._total)}"
        return f"{name}{self._unit} {self._done:,} of {self._total:,}"

    def _left(self, now: float) -> str:
        """Returns the time that is left, by the speed so far."""
        made = self._done - self._start
        if made <= 0 or self._done >= self._total:
            return ""
        seconds = (now - self._began) / made * (self._total - self._done)
        return f"{timedelta(seconds=round(seconds))} left"

    def __enter__(self) -> Self:
        """Used as a context, so that a terminal has its cursor again after an error."""
        return self

    def __exit__(self, *error: object) -> None:
        """Closes it."""
        self.close()
