"""`heron reproduce TABLE`: run a paper's table over its folds or seeds, beside the published."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator

from heron.launch.arguments import Override
from heron.launch.tables import GROUPS, TABLES
from heron.launch.tables.table import PublishedTable
from heron.pipeline.config.errors import ConfigError
from heron.pipeline.config.experiment import Config, load_config, load_run_config
from heron.pipeline.config.sections import Natural, as_typed
from heron.pipeline.config.shipped import CONFIGS
from heron.pipeline.training.tracking import read_result
from heron.shards.dotted import suggest
from heron.shards.terminal import say_markdown

if TYPE_CHECKING:
    import pandas as pd

KNOWN = [*TABLES, *GROUPS]


def reproduce(
    table: PublishedTable, out: Path, overrides: Sequence[str] = (), only: Sequence[str] = ()
) -> str:
    """Runs what is not there yet, of the methods `only` if there are some, and makes the table.

    Each run has a folder of its own, `out`/METHOD-FOLD, and is kept. The table, and table.md and
    table.json in `out`, have the methods whose runs are all there.

    Raises:
        ConfigError: a method, an override or a folder's run does not fit, or the data is not
            there, with how to get it; all before the first run.
        Stopped: a signal came, and the state of the run under way is saved.
    """
    from heron.launch.tables.measured import write
    from heron.pipeline.pretrain import pretrain

    for config in missing(table, out, overrides, only):
        pretrain(config)
    return write(table, _measured(table, out, overrides), out)


def missing(
    table: PublishedTable, out: Path, overrides: Sequence[str] = (), only: Sequence[str] = ()
) -> list[Config]:
    """Returns the runs that are not there yet; raises as `reproduce`."""
    for name in only:
        if name not in table.methods:
            hint = "; put key=value before --only" if "=" in name else ""
            known = ", ".join(table.methods)
            raise ConfigError(f"the table has no method '{name}'; expected one of {known}{hint}")
    configs = [  # all of them before the first run, so that one that is refused costs no run
        config
        for name in dict.fromkeys(only or table.methods)
        for config in _configs(table, name, out, overrides)
    ]
    return [one for one in configs if not is_done(one)]


def _measured(
    table: PublishedTable, out: Path, overrides: Sequence[str]
) -> dict[str, "pd.DataFrame"]:
    """Returns the scores, [folds, scores], of the methods whose runs are all there as asked."""
    import pandas as pd

    scored = {}
    for name in table.methods:
        try:
            configs = _configs(table, name, out, overrides)
            if not all(map(is_done, configs)):
                continue
        except ConfigError:
            continue  # what is there was run with other overrides
        asked = [*table.scores.values()]
        results = [read_result(Path(c.run.dir) / "result.json", asked) for c in configs]
        scores = {shown: [run[key] for run in results] for shown, key in table.scores.items()}
        scored[name] = pd.DataFrame(scores, table.folds, dtype=float)
    return scored


def _configs(table: PublishedTable, name: str, out: Path, overrides: Sequence[str]) -> list[Config]:
    """Returns the configuration of each fold of a method."""
    method = table.methods[name]
    configs = []
    for fold in table.folds:
        folder = as_typed(f"{out}/{name}-{fold}")
        own = [*method.overrides, f"data.protocol.fold={fold}", f"run.dir={folder}"]
        own += ["run.resume=auto", *([f"seed={fold}"] if table.seeded else [])]
        refuse_clashes(overrides, [*(one.split("=")[0] for one in own), *method.schedules])
        path, given = CONFIGS / table.config, [*overrides, *own]
        config = load_config(path, given, method.name)
        if method.schedules:
            given += method.scheduled(config.train.epochs)
            config = load_config(path, given, method.name)
        config.data.refuse_missing(table.data)
        configs.append(config)
    return configs


def refuse_clashes(overrides: Sequence[str], own: Sequence[str]) -> None:
    """Raises ConfigError where an override is of a key that the table sets, or of a part of it."""
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
    """Whether the run is there; one of another configuration is not taken for it, nor lost."""
    folder = Path(config.run.dir)
    if not (folder / "config.yaml").exists():
        return False
    kept = load_run_config(folder / "config.yaml")
    asked = config.in_precision(kept.train.precision)
    if kept.model_copy(update={"run": config.run}) != asked:
        raise ConfigError(
            f"{folder} holds a run of another configuration; choose another --out, or remove it"
        )
    return (folder / "result.json").exists()


def _lacking(table: PublishedTable, overrides: Sequence[str]) -> str:
    """Returns what to do where the data of a table is not there, or ""."""
    own = next(iter(table.methods.values())).overrides
    data = load_config(CONFIGS / table.config, [*overrides, *own]).data
    return f"{data.path} holds no shards; {table.data}" if data.missing else ""


def _known(name: str) -> str:
    if name not in KNOWN:
        raise ValueError(f"unknown table {name!r}; {suggest(name, KNOWN)}")
    return name


def folder_of(table: str) -> Path:
    """Returns where a table's runs go if nothing else is said."""
    return Path("runs") / f"{table}-table"


def run_table(
    table: Annotated[str, AfterValidator(_known), f"published table: {', '.join(KNOWN)}"],
    *overrides: Annotated[Override, "key=value on every run"],
    runs: Annotated[Natural | None, "folds or seeds to run (default: the table's)"] = None,
    first: Annotated[int, "first of them"] = 0,
    only: Annotated[tuple[str, ...], "methods to run (default: all)"] = (),
    out: Annotated[Path | None, "folder of the runs (default: runs/TABLE-table)"] = None,
    dry_run: Annotated[bool, "name the runs that are not there yet, and stop"] = False,
) -> None:
    """Runs a published table, and shows what it measures beside what was published.

    heron reproduce scene
    """
    folder = out or folder_of(table)
    asked = {
        folder / name if table in GROUPS else folder: replace(
            TABLES[name], runs=runs or TABLES[name].runs, first=first
        )
        for name in GROUPS.get(table, (table,))
    }
    lacking = {place: _lacking(one, overrides) for place, one in asked.items()}
    if all(lacking.values()) and not (dry_run and table in GROUPS):
        raise ConfigError("; ".join(lacking.values()))
    there = {place: one for place, one in asked.items() if not lacking[place]}
    if dry_run:
        left = [
            config.run.dir
            for place, one in there.items()
            for config in missing(one, place, overrides, only)
        ]
        print("\n".join([*left, f"runs to be made: {len(left)}"]))
        return
    for place, one in asked.items():
        told = lacking[place]
        text = reproduce(one, place, overrides, only) if not told else f"{one.source}: {told}\n"
        say_markdown(text + "\n")
