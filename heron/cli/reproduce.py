"""`heron reproduce TABLE`: runs a paper's table over its folds or seeds, and compares."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator

from heron.cli.arguments import Override, Overwrite
from heron.config.errors import ConfigError
from heron.config.experiment import Config, load_config
from heron.config.overrides import as_typed
from heron.config.sections import Natural
from heron.config.shipped import CONFIGS
from heron.shards.dotted import suggest
from heron.shards.terminal import print_markdown
from heron.tables import GROUPS, TABLES
from heron.tables.table import PublishedTable
from heron.training.tracking import read_result

if TYPE_CHECKING:
    import pandas as pd

TABLE_NAMES = [*TABLES, *GROUPS]


def reproduce(
    table: PublishedTable, out: Path, overrides: Sequence[str] = (), only: Sequence[str] = ()
) -> str:
    """Makes the runs that are missing, of all methods or `only` some, and returns the table.

    Each run is kept in its own folder, `out`/METHOD-FOLD. The table, and table.md and table.json in
    `out`, have the methods whose runs are complete.

    Raises:
        ConfigError: a method, an override or an existing run does not fit, or the data is missing,
            with how to get it; always before the first run.
        Stopped: a signal came; the state of the current run is saved.
    """
    from heron.job import pretrain
    from heron.tables.measured import write

    for config in missing(table, out, overrides, only):
        pretrain(config)
    return write(table, _measured(table, out, overrides), out)


def missing(
    table: PublishedTable, out: Path, overrides: Sequence[str] = (), only: Sequence[str] = ()
) -> list[Config]:
    """Returns the configurations of the runs that are missing; raises as `reproduce` does."""
    for name in only:
        if name not in table.methods:
            hint = "; put key=value before --only" if "=" in name else ""
            methods = ", ".join(table.methods)
            raise ConfigError(f"the table has no method '{name}'; expected one of {methods}{hint}")
    configs = [  # all are checked before the first run, so that an invalid one costs no run
        config
        for name in dict.fromkeys(only or table.methods)
        for config in _configs(table, name, out, overrides)
    ]
    return [config for config in configs if not is_done(config)]


def _measured(
    table: PublishedTable, out: Path, overrides: Sequence[str]
) -> dict[str, "pd.DataFrame"]:
    """Returns the scores, [folds, scores], of the methods whose runs are complete."""
    import pandas as pd

    scores_of = {}
    for name in table.methods:
        try:
            configs = _configs(table, name, out, overrides)
            if not all(map(is_done, configs)):
                continue
        except ConfigError:
            continue  # its runs have other overrides
        score_keys = [*table.scores.values()]
        results = [read_result(Path(c.run.dir) / "result.json", score_keys) for c in configs]
        scores = {label: [run[key] for run in results] for label, key in table.scores.items()}
        scores_of[name] = pd.DataFrame(scores, table.folds, dtype=float)
    return scores_of


def _configs(table: PublishedTable, name: str, out: Path, overrides: Sequence[str]) -> list[Config]:
    method = table.methods[name]
    configs = []
    for fold in table.folds:
        folder = as_typed(f"{out}/{name}-{fold}")
        run_overrides = [*method.overrides, f"data.protocol.fold={fold}", f"run.dir={folder}"]
        run_overrides += ["run.resume=auto", *([f"seed={fold}"] if table.seeded else [])]
        refuse_clashes(
            overrides, [*(override.split("=")[0] for override in run_overrides), *method.schedules]
        )
        path, all_overrides = CONFIGS / table.config, [*overrides, *run_overrides]
        config = load_config(path, all_overrides, method.name)
        if method.schedules:
            all_overrides += method.scheduled(config.train.epochs)
            config = load_config(path, all_overrides, method.name)
        config.data.refuse_missing(table.data)
        configs.append(config)
    return configs


def refuse_clashes(overrides: Sequence[str], own: Sequence[str]) -> None:
    """Raises a ConfigError for an override of a key in `own`, or of a key below it."""
    clashes = [
        override
        for override in overrides
        if any(f"{override.split('=')[0]}.".startswith(f"{key}.") for key in own)
    ]
    if clashes:
        raise ConfigError(
            f"{', '.join(clashes)}: the table sets this itself for each run; leave it out, or "
            "use `heron pretrain`"
        )


def is_done(config: Config) -> bool:
    """Returns whether the run has a result; ConfigError if its folder has another run."""
    folder = Path(config.run.dir)
    if not (folder / "config.yaml").exists():
        return False
    saved = load_config(folder / "config.yaml")
    expected = config.in_precision(saved.train.precision)
    if saved.model_copy(update={"run": config.run}) != expected:
        raise ConfigError(
            f"{folder} holds a run of another configuration; choose another --out, or add "
            "--overwrite, which moves the whole --out aside"
        )
    return (folder / "result.json").exists()


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
