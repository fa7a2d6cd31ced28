"""An HTML page that opens from disk, with its figures inside."""

import base64
import html
from collections.abc import Sequence
from io import BytesIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 110  # pixels of an inch of a figure
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
       color: #1d2433; }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin-top: 2rem }
img { max-width: 100%; height: auto } figure { margin: 0 }
table { border-collapse: collapse } td, th { padding: .15rem .9rem .15rem 0; text-align: left }
td { font-variant-numeric: tabular-nums } pre { background: #f4f5f7; padding: 1rem; overflow: auto }
"""


def plot(x: str, y: str) -> "tuple[Figure, Axes]":
    """Returns a figure of one plot, small, to be read on a phone too; with names for its axes."""
    from matplotlib.figure import Figure  # here: a page without figures needs none of it

    figure = Figure(figsize=(5.5, 3.4))
    axes = figure.add_subplot()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    return figure, axes


def png(figure: "Figure") -> bytes:
    """Returns a figure as a PNG, cut to what is drawn."""
    out = BytesIO()
    figure.savefig(out, dpi=DPI, bbox_inches="tight", format="png")
    return out.getvalue()


def embedded(title: str, picture: bytes) -> str:
    """Returns a PNG as a figure of a page, named by its title."""
    name = html.escape(title)
    data = base64.b64encode(picture).decode()
    return f'<figure><img alt="{name}" src="data:image/png;base64,{data}"></figure>'


def page(title: str, body: str, style: str = "") -> str:
    """Returns a page of a plain title and an HTML body; `style` is added to that of all pages."""
    name = html.escape(title)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}{style}</style>'
        f"<h1>{name}</h1>{body}</html>\n"
    )


def heading(title: str) -> str:
    """Returns a heading."""
    return f"<h2>{html.escape(title)}</h2>"


def paragraph(text: str) -> str:
    """Returns a paragraph of plain text."""
    return f"<p>{html.escape(text)}</p>"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table, which scrolls where it is wider than the page; cells are plain text.

    Without `heads` of the columns, the first column heads the rows.
    """
    top = "".join(f"<th>{html.escape(head)}</th>" for head in heads)
    first = "td" if heads else "th"
    lines = "".join(
        f"<tr><{first}>{html.escape(row[0])}</{first}>"
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    head = f"<tr>{top}</tr>" if heads else ""
    return f'<div style="overflow-x: auto"><table>{head}{lines}</table></div>'
