"""`heron reproduce TABLE`: runs a paper's table over its folds or seeds, and compares."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from heron.cli.arguments import Override, Overwrite
from heron.config.errors import ConfigError
from heron.config.experiment import load_config
from heron.config.sections import Natural
from heron.config.shipped import CONFIGS
from heron.shards.dotted import suggest
from heron.shards.terminal import print_markdown
from heron.studies.reproduction import missing, reproduce
from heron.studies.tables import GROUPS, TABLES, PublishedTable

TABLE_NAMES = [*TABLES, *GROUPS]


def _missing_data(table: PublishedTable, overrides: Sequence[str]) -> str:
    """Returns how to get a table's data if it is missing, else ""."""
    own = next(iter(table.methods.values())).overrides
    data = load_config(CONFIGS / table.config, [*overrides, *own]).data
    return f"{data.path} holds no shards; {table.data}" if data.missing else ""


def _check_table_name(name: str) -> str:
    if name not in TABLE_NAMES:
        raise ValueError(f"unknown table {name!r}; {suggest(name, TABLE_NAMES)}")
    return name


def folder_of(table: str) -> Path:
    """Returns the default folder of a table's runs."""
    return Path("runs") / f"{table}-table"


def run_table(
    table: Annotated[
        str, AfterValidator(_check_table_name), f"published table: {', '.join(TABLE_NAMES)}"
    ],
    *overrides: Annotated[Override, "key=value on every run"],
    runs: Annotated[Natural | None, "folds or seeds to run (default: the table's)"] = None,
    first: Annotated[int, "first of them"] = 0,
    only: Annotated[tuple[str, ...], "methods to run (default: all)"] = (),
    out: Annotated[Path | None, "folder of the runs (default: runs/TABLE-table)"] = None,
    overwrite: Overwrite = False,
    dry_run: Annotated[bool, "list the runs that are missing, and stop"] = False,
) -> None:
    """Runs a published table, and shows its scores beside the published ones.

    heron reproduce scene
    """
    from heron.training.earlier_run import begin_anew

    folder = out or folder_of(table)
    tables = {
        folder / name if table in GROUPS else folder: replace(
            TABLES[name], runs=runs or TABLES[name].runs, first=first
        )
        for name in GROUPS.get(table, (table,))
    }
    hints = {path: _missing_data(published, overrides) for path, published in tables.items()}
    if all(hints.values()) and not (dry_run and table in GROUPS):
        raise ConfigError("; ".join(hints.values()))
    if dry_run:
        to_run = [
            config.run.dir
            for path, published in tables.items()
            if not hints[path]
            for config in missing(published, path, overrides, only)
        ]
        print("\n".join([*to_run, f"runs to be made: {len(to_run)}"]))
        return
    if overwrite:
        begin_anew(folder)
    for path, published in tables.items():
        if hints[path]:
            text = f"{published.source}: {hints[path]}\n"
        else:
            text = reproduce(published, path, overrides, only)
        print_markdown(text + "\n")
