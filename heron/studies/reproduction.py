"""Reproduces published tables: the runs of their methods, and what these measured."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json

from heron.base.dotted import without_case
from heron.base.errors import ConfigError
from heron.base.shipped import CONFIGS
from heron.base.workers import ALONE, Executor
from heron.experiment.config import Config, load_config
from heron.experiment.overrides import as_typed
from heron.studies.engine import Batch, Job, is_done, refuse_clashes, run_jobs, train
from heron.studies.published import Figure, PublishedTable
from heron.training.tracking import read_result

if TYPE_CHECKING:
    import pandas as pd

    from heron.studies.repeats import PairedTest


def reproduce(
    table: PublishedTable,
    out: Path,
    overrides: Sequence[str] = (),
    only: Sequence[str] = (),
    executor: Executor = ALONE,
) -> str:
    """Makes the runs that are missing, of all methods or `only` some, and returns the table.

    Each run is kept in its own folder, `out`/METHOD-FOLD; elsewhere than in this process, its
    output goes to log.txt there. The table, and table.md and table.json in `out`, have the methods
    whose runs are complete.

    Raises:
        ConfigError: a method, an override or an existing run does not fit, or the data is missing,
            with how to get it; always before the first run.
        Stopped: a signal came; the state of the current run is saved.
    """
    started, configs = time.monotonic(), missing(table, out, overrides, only)
    arrived = list[str]()

    def tell(name: str, _: Any) -> None:
        arrived.append(name)
        if len(arrived) == 1 and (left := len(configs) - 1):
            minutes = (time.monotonic() - started) * left / 60
            print(f"the other {left} runs take about {minutes:.0f} minutes", flush=True)
        if executor is not ALONE:
            print(f"{name} is done, {len(arrived)} of {len(configs)}", flush=True)

    def job() -> Job[None]:
        folders = {config.run.dir: config for config in configs}
        logs = {name: None if executor is ALONE else Path(name) / "log.txt" for name in folders}
        yield Batch({name: partial(train, c, logs[name]) for name, c in folders.items()}, tell)

    run_jobs([job()], executor)
    return write(table, _measured(table, out, overrides), out)


def missing(
    table: PublishedTable, out: Path, overrides: Sequence[str] = (), only: Sequence[str] = ()
) -> list[Config]:
    """Returns the configurations of the runs that are missing; raises as `reproduce` does."""
    only = [without_case(name, table.methods) for name in only]
    for name in only:
        if name not in table.methods:
            methods = ", ".join(table.methods)
            raise ConfigError(f"the table has no method '{name}'; choose one of {methods}")
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


@dataclass(frozen=True)
class Score:
    """A method's runs by one score.

    `headline_less_this` tests the table's headline method minus this one; None for the headline
    itself, and for fewer than two runs in common.
    """

    runs: Mapping[int, float]  # by fold or seed; NaN if the result lacks the score
    mean: float
    std: float  # n - 1 below; NaN of one
    count: int  # runs that have the score
    published: Figure | None
    p: float  # of Welch's t-test against the published score; NaN if not applicable
    headline_less_this: "PairedTest | None"

    def cells(self) -> list[str]:
        """Returns the published score, the measured one, and p, as cells of a table."""
        from heron.studies.repeats import mean_std

        measured = mean_std(self.mean, self.std)
        if self.count < len(self.runs):
            measured += f" (n = {self.count})"
        p = "–" if math.isnan(self.p) else f"{self.p:.2g}"
        return [mean_std(*(self.published or (math.nan, None))), measured, p]


def compare(
    table: PublishedTable, scores: "Mapping[str, pd.DataFrame]"
) -> dict[str, dict[str, Score]]:
    """Returns each method's scores, given as [folds, scores], with tests by method and score."""
    from scipy.stats import ttest_ind_from_stats

    from heron.studies.repeats import mean_std_count, paired_test

    compared: dict[str, dict[str, Score]] = {}
    for name, runs in scores.items():
        figures = table.methods[name].published or [None] * len(table.scores)
        compared[name] = {}
        for figure, score in zip(figures, table.scores, strict=True):
            values, p, test = runs[score], math.nan, None
            mean, std, count = mean_std_count(values)
            if figure is not None and figure[1] is not None and count > 1:
                published_stats = (*figure, table.published_runs)
                p = ttest_ind_from_stats(mean, std, count, *published_stats, equal_var=False).pvalue
            if name != table.headline and table.headline in scores:
                test = paired_test(scores[table.headline][score], values)
            row = Score(values.to_dict(), mean, std, int(count), figure, float(p), test)
            compared[name][score] = row
    return compared


def page(table: PublishedTable, compared: Mapping[str, Mapping[str, Score]]) -> str:
    """Returns the table, and the headline method minus each other, as Markdown."""
    text = f"{table.source}: {table.runs} runs, mean ± std; p of Welch's t-test against published."
    rows = [
        [name, *chain(*(score.cells() for score in scores.values()))]
        for name, scores in compared.items()
    ]
    text += _table(table, ("published", "measured", "p"), rows)
    rows = []
    for name, scores in compared.items():
        tests = [score.headline_less_this for score in scores.values()]
        if any(tests):
            cells = [test.cells() if test else ["–"] * 3 for test in tests]
            rows.append([name, *chain(*cells)])
    if rows:
        text += (
            f"\n{table.headline} less each other method over the same "
            f"{'seeds' if table.seeded else 'folds'} {table.first} to {table.folds[-1]}: mean "
            "difference; t and p of Student's paired test, two-sided."
        )
        text += _table(table, ("difference", "t", "p"), rows)
    return text


def _table(table: PublishedTable, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table with the columns of every score; heads `t` and `p` omit the score's name."""
    from heron.studies.text import markdown

    heads = [n if len(n) == 1 else f"{score} {n}" for score in table.scores for n in columns]
    return f"\n\n{markdown(['method', *heads], rows)}"


def write(table: PublishedTable, scores: "Mapping[str, pd.DataFrame]", out: Path) -> str:
    """Writes table.md and table.json, and returns the Markdown; ShardError if the disk is full."""
    from heron.studies.text import write_files

    compared = compare(table, scores)
    tree = {"source": table.source, "headline": table.headline, "methods": compared}
    text = page(table, compared)
    data = to_json(tree, indent=1, inf_nan_mode="null") + b"\n"
    write_files(out, {"table.md": text.encode(), "table.json": data})
    return text
