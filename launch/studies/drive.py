"""The driver of a study: it starts the trials that have no row, and writes their rows."""

import logging
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from heron.launch.studies import lineage
from heron.launch.studies.cluster import at_once, nodes, refuse_unmet
from heron.launch.studies.halving import Halving, scheduler
from heron.launch.studies.ledger import Ledger, known
from heron.launch.studies.population import current, run_pbt
from heron.launch.studies.study import Asha, Pbt, Study
from heron.launch.studies.trials import Trial, check, refuse_missing_data
from heron.launch.studies.worker import ERROR, Task, run_trial
from heron.pipeline.config.experiment import Config
from heron.pipeline.data.streams import build_data
from heron.shards.errors import ShardError, SourceError

Say = Callable[[str], None]
RAY = "ray"  # what Ray writes of a study that is under way, in its folder; nothing reads it again


def drive(study: Study, trials: Sequence[Trial], ledger: Ledger, say: Say) -> bool:
    """Runs the trials that have no row yet, on the cluster that is joined.

    Args:
        study: that they are of.
        trials: all of them.
        ledger: has the rows of those that have ended, and gets the others.
        say: prints a line.

    Returns:
        Whether all trials have ended; False where a signal came first.

    Raises:
        TrainingError: the cluster can never hold one of them.
        ConfigError: the data is not there.
        ShardError: the data cannot be made.
        CheckpointError: of a population, weights that are to be taken over are damaged.
    """
    waiting = [trial for trial in trials if trial.name not in ledger.rows]
    cluster = nodes()
    refuse_unmet(study, waiting, cluster)
    configs = check(study, waiting, ledger.out)
    refuse_missing_data(study, configs)
    fit = partial(_fit, study, ledger, at_once(study, waiting, cluster), say)
    with _interruptible():
        _make_data(study, configs)
        ledger.begin()
        shutil.rmtree(ledger.out / RAY, ignore_errors=True)
        if isinstance(study.search, Pbt):
            run_pbt(study, trials, ledger, lambda some, rung: fit(some, [rung]), say)
        else:
            fit(waiting, study.rungs)
        shutil.rmtree(ledger.out / RAY, ignore_errors=True)
    return all(trial.name in ledger.rows for trial in trials)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ends what is in it at once at Ctrl-C or SIGTERM; what comes after it goes on.

    Tune would wait for its trials to end, and a SIGTERM to the whole process group, which ends
    Ray's own processes too, would have it wait for them a minute. Nothing needs their end:
    checkpoints and rows are whole at any moment.
    """
    os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, signal.default_int_handler) for number in signals}
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _make_data(study: Study, configs: Sequence[Config]) -> None:
    """Makes the data before any trial: several would make it at once, and the first be slow."""
    for data in {config.data.path: config.data for config in configs}.values():
        try:
            build_data(data)
        except (ShardError, SourceError) as error:
            raise type(error)(f"{error}; {study.data}" if study.data else str(error)) from None


def _fit(
    study: Study,
    ledger: Ledger,
    together: int,
    say: Say,
    trials: Sequence[Trial],
    rungs: Sequence[int | None],
) -> None:
    """Lets Tune run trials over some rungs, so many together, until they end."""
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"  # the other prints also where it is told not to
    from ray import tune

    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # a failed trial is a row
    by_name = {trial.name: current(trial, ledger.out) for trial in trials}
    task = Task(study, ledger.out, Path.cwd(), by_name, rungs)
    halved = isinstance(study.search, Asha)
    tuner = tune.Tuner(
        tune.with_resources(tune.with_parameters(run_trial, task=task), {"memory": 1}),
        param_space={"trial": tune.grid_search([*by_name])},
        tune_config=tune.TuneConfig(
            scheduler=scheduler(Halving(study, ledger.out)) if halved else None,
            max_concurrent_trials=together,
            trial_name_creator=_name,
            trial_dirname_creator=_name,
        ),
        run_config=tune.RunConfig(
            name=f"tune-{rungs[-1] or 'all'}",
            storage_path=str((ledger.out / RAY).absolute()),
            callbacks=[callback(study, task, ledger, say)],
            failure_config=tune.FailureConfig(max_failures=study.retries),
            verbose=0,
        ),
    )
    tuner.fit()


def callback(study: Study, task: Task, ledger: Ledger, say: Say) -> Any:
    """Returns a `ray.tune.Callback` that prints how trials go, and writes the rows of their ends.

    Args:
        study: that the trials are of.
        task: what they run.
        ledger: gets the rows.
        say: prints a line.
    """
    from ray import tune

    last = study.rungs[-1]

    class Rows(tune.Callback):  # type: ignore[misc]
        def on_trial_start(self, trial: Any, **_: Any) -> None:
            values = task.trials[str(trial)].values
            shown = ", ".join(f"{key}={value}" for key, value in values.items())
            say(f"{trial} runs: {shown}")

        def on_trial_result(self, trial: Any, result: dict[str, Any], **_: Any) -> None:
            score = study.measure.score
            if last is not None and score in result:
                say(f"{trial} at step {result['step']}: {score} {result[score]:.4f}")

        def on_trial_recover(self, trial: Any, **_: Any) -> None:
            say(f"{trial} is lost, and goes on: {_died(trial)}")

        def on_trial_complete(self, trial: Any, **_: Any) -> None:
            ended = task.trials[str(trial)]
            run = ended.folder(ledger.out)
            if (run / ERROR).exists():
                self._failed(trial, (run / ERROR).read_text())
                return
            step = trial.last_result.get("step")
            if step is None:
                self._failed(trial, f"it ended without a result; see {run}/log-0.txt")
                return
            if isinstance(study.search, Pbt) and step != last:
                return  # the others are waited for
            early = step if last is not None and step < last else None
            status = "done" if early is None else "stopped"
            pbt = isinstance(study.search, Pbt)
            more: dict[str, Any] = {"lineage": lineage.of(run)} if pbt else {}
            row = ledger.append(ended, status, rung=early, **more)
            say(f"{trial} {status}: {summary(study, row)}")

        def on_trial_error(self, trial: Any, **_: Any) -> None:
            self._failed(trial, _died(trial))

        def _failed(self, trial: Any, text: str) -> None:
            ledger.append(task.trials[str(trial)], "failed", text)
            say(f"{trial} failed: {text}")

    return Rows()


def summary(study: Study, row: dict[str, Any]) -> str:
    """Returns what is measured of a trial, in a line."""
    names = dict.fromkeys([*study.measure.y, study.measure.score])
    return ", ".join(f"{name} {shown(known(row).get(name))}" for name in names if name)


def shown(value: Any) -> str:
    """Returns a number as people read it."""
    return f"{value:.4g}" if isinstance(value, float) else "–" if value is None else str(value)


def _name(trial: Any) -> str:
    name: str = trial.config["trial"]
    return name


def _died(trial: Any) -> str:
    """Returns what Ray knows of a trial whose own process is gone."""
    file = Path(trial.error_file or "")
    lines = file.read_text().strip().splitlines() if file.is_file() else []
    return lines[-1].strip() if lines else "it ended without a word"
