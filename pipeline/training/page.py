"""Parts of an HTML page: headings, paragraphs and tables of plain text."""

import html
from collections.abc import Sequence


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
