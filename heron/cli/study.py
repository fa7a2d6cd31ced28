"""`heron study | report | reproduce`: many trials of one experiment, or a paper's table."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from heron.base.atomic import locked
from heron.base.dotted import suggest
from heron.base.errors import INTERRUPTED, ConfigError
from heron.base.sections import Natural
from heron.base.shipped import CONFIGS, STUDIES, find_shipped, names_in
from heron.base.terminal import print_markdown, print_table
from heron.cli.arguments import Address, AtOnce, Override, Overwrite
from heron.cli.compare import with_threads
from heron.studies.published import GROUPS, TABLES

TABLE_NAMES = [*TABLES, *GROUPS]


def folder_of(study: Path, small: bool) -> Path:
    """Returns the default folder of a study."""
    return Path("studies") / (study.stem + ("-small" if small else ""))


def study(
    study: Annotated[Path, f"name of a study, or a file: {', '.join(names_in(STUDIES))}"],
    *overrides: Annotated[Override, "key=value for every trial; for a key that varies, its values"],
    out: Annotated[Path | None, "folder of the study (default: studies/NAME)"] = None,
    small: Annotated[bool, "run the small version, for two cores"] = False,
    dry_run: Annotated[bool, "check all trials and print them with their commands"] = False,
    address: Annotated[
        str | None, "of a running Ray cluster: HOST:PORT or auto (default: start one here)"
    ] = None,
    retry_failed: Annotated[bool, "run failed trials again"] = False,
    overwrite: Overwrite = False,
) -> int:
    """Runs a study: many trials of one experiment, on Ray.

    heron study negatives --small seed=0
    heron study workers-fixed-batch --address auto --out studies/workers
    """
    from heron.studies.ledger import Ledger
    from heron.studies.study import load_study
    from heron.studies.trials import plan, refuse_missing_data

    study = find_shipped(str(study), STUDIES, "study")
    spec = load_study(study, small, overrides)
    out = out or folder_of(study, small)
    trials = plan(spec, out)
    configs = [trial.config() for trial in trials]  # all of them before the first starts
    print(f"{spec.title}: {spec.planned} trials by {spec.search.description}, in {out}", flush=True)
    if dry_run:
        for trial in trials:
            print(f"{trial.name}: {trial.description}\n  {trial.command()}")
        if left := spec.planned - len(trials):
            print(f"optuna suggests the other {left} when it knows the scores of these")
        try:
            refuse_missing_data(spec, configs)
        except ConfigError as fault:
            print(f"data is missing: {fault}")
        return 0
    from heron.distributed.cluster import connected
    from heron.studies.drive import drive
    from heron.studies.live import live
    from heron.studies.report import readable_table
    from heron.studies.results import best, read_results
    from heron.studies.text import markdown
    from heron.training.earlier_run import begin_anew

    with locked(out):
        if overwrite:
            begin_anew(out)
        ledger = Ledger(spec, out)
        if retry_failed:
            ledger.forget_failed()
        if ledger.rows:
            print(f"{len(ledger.rows)} of {spec.planned} trials have ended already", flush=True)
        ended = len(ledger.rows) == spec.planned
        if not ended:
            if not (spec.gpus or address):
                os.environ["CUDA_VISIBLE_DEVICES"] = ""  # not requested
            with connected(address), live(trials, ledger):
                ended = drive(trials, ledger)
    if ledger.rows:
        results, score = read_results(out), spec.measure.score
        rows = readable_table(results, [*spec.measure.y, *([score] if score else [])])
        print_table(*rows, piped=markdown(*rows))
        if score and (best_setting := best(results, score)):
            print(f"best by the mean over repeats: {best_setting.describe(score)}")
            print(results.table.loc[best_setting.trials[0], "command"])
    if not ended:
        ended_ones = f"{len(ledger.rows)} of {spec.planned} trials"
        print(f"{ended_ones} have ended; run the same command to continue")
        return INTERRUPTED
    failed = [row["trial"] for row in ledger.rows.values() if row["status"] == "failed"]
    if failed:
        print(f"failed: {', '.join(failed)}; --retry-failed runs them again")
    return 1 if failed else 0


def report(
    study: Annotated[Path, "folder that `heron study` wrote, finished or not"],
    *,
    out: Annotated[Path | None, "folder for the report (default: STUDY/report)"] = None,
    x: Annotated[str | None, "column of the x axis (default: the study's measure.x)"] = None,
    y: Annotated[tuple[str, ...], "columns of the y axes (default: the study's measure.y)"] = (),
) -> None:
    """Makes tables, figures and fits of a study.

    heron report studies/negatives
    """
    from heron.studies.report import Report, readable_table
    from heron.studies.results import read_results

    results = read_results(study)
    page = Report.of(results, x, y)
    out = out or study / "report"
    with locked(out):
        path = page.write(out)
    print_table(*readable_table(results, page.ys), piped=(out / "table.md").read_text() + "\n")
    print(results.progress)
    print(f"report: {path}")


def _check_table_name(name: str) -> str:
    if name not in TABLE_NAMES:
        raise ValueError(f"unknown table {name!r}; {suggest(name, TABLE_NAMES)}")
    return name


def folder_of_table(table: str) -> Path:
    """Returns the default folder of a table's runs."""
    return Path("runs") / f"{table}-table"


def run_table(
    table: Annotated[
        str, AfterValidator(_check_table_name), f"published table: {', '.join(TABLE_NAMES)}"
    ],
    *overrides: Annotated[Override, "key=value for every run"],
    runs: Annotated[Natural | None, "folds or seeds to run (default: the table's)"] = None,
    first: Annotated[int, "first fold or seed"] = 0,
    only: Annotated[tuple[str, ...], "methods to run (default: all)"] = (),
    out: Annotated[Path | None, "folder of the runs (default: runs/TABLE-table)"] = None,
    address: Address = None,
    at_once: AtOnce = None,
    overwrite: Overwrite = False,
    dry_run: Annotated[bool, "only list the missing runs"] = False,
) -> None:
    """Runs a published table, and shows its scores beside the published ones.

    heron reproduce scene
    """
    from heron.experiment.config import load_config
    from heron.studies.engine import executor
    from heron.studies.reproduction import missing, reproduce
    from heron.training.earlier_run import begin_anew

    folder = out or folder_of_table(table)
    tables = {
        folder / name if table in GROUPS else folder: replace(
            TABLES[name], runs=runs or TABLES[name].runs, first=first
        )
        for name in GROUPS.get(table, (table,))
    }
    hints = dict[Path, str]()  # how to get a table's data, if it is missing
    for path, published in tables.items():
        own = next(iter(published.methods.values())).overrides
        data = load_config(CONFIGS / published.config, [*overrides, *own]).data
        hints[path] = f"{data.path} has no shards; {published.data}" if data.missing else ""
    if all(hints.values()) and not (dry_run and table in GROUPS):
        raise ConfigError("; ".join(hints.values()))
    if dry_run:
        to_run = [
            config.run.dir
            for path, published in tables.items()
            if not hints[path]
            for config in missing(published, path, overrides, only)
        ]
        print("\n".join([*to_run, f"missing runs: {len(to_run)}"]))
        return
    config = CONFIGS / next(iter(tables.values())).config
    overrides = (*with_threads(config, overrides, address, at_once),)
    threads = load_config(config, overrides).train.cpu_threads
    with locked(folder):
        if overwrite:
            begin_anew(folder)
        for path, published in tables.items():
            if hints[path]:
                text = f"{published.source}: {hints[path]}\n"
            else:
                with executor(address, at_once, threads) as runs_on:
                    text = reproduce(published, path, overrides, only, runs_on)
            print_markdown(text + "\n")
