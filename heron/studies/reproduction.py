"""The runs of a published table: which are missing, and what the complete ones measured."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from heron.config.errors import ConfigError
from heron.config.experiment import Config, load_config
from heron.config.overrides import as_typed
from heron.config.shipped import CONFIGS
from heron.shards.dotted import without_case
from heron.studies.tables import PublishedTable
from heron.training.tracking import read_result

if TYPE_CHECKING:
    import pandas as pd


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
    from heron.api.job import pretrain
    from heron.studies.measured import write

    started, configs = time.monotonic(), missing(table, out, overrides, only)
    for number, config in enumerate(configs, 1):
        pretrain(config)
        if number == 1 and (left := len(configs) - 1):
            minutes = (time.monotonic() - started) * left / 60
            print(f"the other {left} runs take about {minutes:.0f} minutes", flush=True)
    return write(table, _measured(table, out, overrides), out)


def missing(
    table: PublishedTable, out: Path, overrides: Sequence[str] = (), only: Sequence[str] = ()
) -> list[Config]:
    """Returns the configurations of the runs that are missing; raises as `reproduce` does."""
    only = [without_case(name, table.methods) for name in only]
    for name in only:
        if name not in table.methods:
            methods = ", ".join(table.methods)
            raise ConfigError(f"the table has no method '{name}'; expected one of {methods}")
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
