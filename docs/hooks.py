"""What the build of the documentation adds: the tables of the configuration, from the code."""

from itertools import groupby
from typing import Any

from heron.experiment.describe import Key, describe_keys

MARK = "<!-- keys -->"  # in reference/configuration.md, where the tables come


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Puts the tables of the configuration into the page that has the mark."""
    return markdown.replace(MARK, configuration()) if MARK in markdown else markdown


def configuration() -> str:
    """Returns a table for each section of an experiment, as Markdown."""
    every = describe_keys()
    about = {(key.name, key.encoder_kind): key.meaning for key in every if key.type == "section"}
    parts = []
    keys = sorted((key for key in every if key.type != "section"), key=_section)
    for (section, of), group in groupby(keys, _section):
        kind = f" of kind `{of}`" if of else ""
        parts.append(f"## `{section}`{kind}" if section else "## The experiment")
        parts.append(about.get((section, of), ""))
        head = "| key | type | default | meaning |\n|---|---|---|---|\n"
        parts.append(head + "\n".join(map(_row, group)))
    return "\n\n".join(parts)


def _section(key: Key) -> tuple[str, str]:
    """Returns the section that a key is in, and the kind that has it."""
    return key.name.rpartition(".")[0], key.encoder_kind


def _row(key: Key) -> str:
    default = key.default if key.default == "required" else f"`{key.default}`"
    cells = f"`{key.name}`", key.type, default, key.meaning
    return f"| {' | '.join(cell.replace('|', '∣') for cell in cells)} |"
