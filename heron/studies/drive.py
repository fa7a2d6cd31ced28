"""The driver of a study: starts the trials that have no row, and writes their rows.

Where trials are compared it decides which go on; each decision is written at once.
"""

import logging
import math
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import TypedDict

from heron.base.artefact import Count
from heron.base.errors import ShardError, SourceError, StudyError
from heron.base.extras import require
from heron.data.dataset import build_data
from heron.distributed.cluster import nodes
from heron.studies.ledger import Ledger, write_rows
from heron.studies.live import print_line
from heron.studies.population import run_pbt
from heron.studies.study import FACTOR, Study
from heron.studies.text import cell
from heron.studies.trials import Trial, journal, refuse_missing_data, suggest, trials_at_once
from heron.studies.worker import ERROR, RAY, run_trial
from heron.training.tracking import read_lines

HALVING = "halving.jsonl"  # in a study's folder: a line per trial and rung that it reached

Rule = Callable[[str, int, float], bool]  # whether a trial goes on: its name, step and worth


class Known(NamedTuple):
    """A trial, as far as a scheduler of Ray's looks at it."""

    trial_id: str


class HalvingDecision(TypedDict):
    """A line of `HALVING`; a score that is not finite is null."""

    step: Count
    trial: str
    score: float | None
    goes_on: bool


def goes_on(
    study: Study, out: Path, trial: str, result: dict[str, Any], rule: Rule | None = None
) -> bool:
    """Returns whether a trial goes on from a rung, and records the decision.

    By default (ASHA: Li et al. 2020) it does if it is among the best `1 / factor` of those that
    have reached the rung so far, or the best of fewer than `factor`; of equal trials those that
    went on rank first. Decisions are final: a study that is resumed keeps them, whatever trials
    came later. `result` has the rung's `step`, and the trial's scores. `rule` decides in its place.
    """
    decided = read_lines(out / HALVING, HalvingDecision)
    step, score = result["step"], float(result[str(study.measure.score)])
    at_rung = [line for line in decided if line["step"] == step]
    for line in at_rung:
        if line["trial"] == trial:  # reported again, by a study that was resumed
            return bool(line["goes_on"])
    worth = study.measure.worth(score)
    if rule is not None:
        promoted = rule(trial, step, worth)
    else:
        worths = [(study.measure.worth(line["score"]), line["goes_on"]) for line in at_rung]
        rank = sum(other > worth or (other == worth and continued) for other, continued in worths)
        promoted = bool(rank < max(1, (len(at_rung) + 1) // (study.search.factor or FACTOR)))
    line = {"step": step, "trial": trial, "score": score, "goes_on": promoted}
    write_rows(out / HALVING, [*decided, line])
    return promoted


def ray_rule(study: Study, out: Path) -> Rule | None:
    """Returns the rule of Ray's own scheduler, or None where the study has another.

    It is told all decided rungs in their order, which brings it to where it was: nothing of its
    own is saved. Raises a StudyError if it would now decide one of them differently.
    """
    search = study.search
    common = {"time_attr": "step", "metric": "worth", "mode": "max"}
    if search.scheduler == "median":
        from ray.tune.schedulers import MedianStoppingRule

        least = search.grace_steps or search.every_steps
        # Where too few trials can be compared it would pause this one, to no end here.
        chosen = MedianStoppingRule(**common, grace_period=least, min_time_slice=math.inf)
    elif search.scheduler == "async_hyperband":
        from ray.tune.schedulers import AsyncHyperBandScheduler

        chosen = AsyncHyperBandScheduler(
            **common,
            max_t=search.steps,
            grace_period=search.grace_steps,
            reduction_factor=search.factor or FACTOR,
            brackets=search.brackets or 1,
        )
    else:
        return None
    known: dict[str, Any] = {}

    def rule(trial: str, step: int, worth: float) -> bool:
        if trial not in known:
            known[trial] = Known(trial)
            before = np.random.get_state()
            np.random.seed([search.seed or 0, int(trial)])  # Ray draws the bracket from it
            chosen.on_trial_add(None, known[trial])
            np.random.set_state(before)
        told = {"step": step, "worth": worth}
        return str(chosen.on_trial_result(None, known[trial], told)) != "STOP"

    for line in read_lines(out / HALVING, HalvingDecision):
        worth = study.measure.worth(line["score"])
        if rule(line["trial"], line["step"], worth) != line["goes_on"]:
            raise StudyError(
                f"{out / HALVING}: Ray's scheduler now decides otherwise for trial "
                f"{line['trial']} at step {line['step']}; install the version of Ray that the "
                "study began with, or begin it again with --overwrite"
            )
    return rule


def in_order(upcoming: Iterator[Trial], trials: dict[str, Trial]) -> Any:
    """Returns a searcher for Tune: the trials of an iterator, each taken when there is room for it.

    Those that it has taken are added to `trials`.
    """
    from ray.tune.search import Searcher

    class InOrder(Searcher):  # type: ignore[misc]
        def suggest(self, trial_id: str) -> Any:
            trial = next(upcoming, None)
            if trial is None:
                return Searcher.FINISHED
            trials[trial.name] = trial
            return {"trial": trial.name, "values": trial.values}

        def on_trial_complete(self, *_: Any, **__: Any) -> None:
            pass  # the ledger has its row

        def save(self, checkpoint_path: str) -> None:
            pass

        def __reduce__(self) -> Any:
            return object, ()  # Tune writes a copy, which nothing reads

    return InOrder()


def drive(trials: list[Trial], ledger: Ledger) -> bool:
    """Runs a study's trials that have no row yet, on the connected cluster; False after a signal.

    Raises a TrainingError if a trial is too large for the cluster; a ConfigError or ShardError if
    the data is missing or cannot be built; and a CheckpointError if weights that a trial of a
    population is to take over are damaged.
    """
    study = ledger.study
    waiting = [trial for trial in trials if trial.name not in ledger.rows]
    at_once = trials_at_once(study, waiting or trials, nodes())
    configs = [trial.config() for trial in waiting]
    refuse_missing_data(study, configs)
    if study.search.sampler == "optuna":
        require("optuna", "the sampler optuna")
    with _interruptible():
        # Before the first trial, so that no trials build the data at once or are slowed.
        for data in {tuple(config.data.paths): config.data for config in configs}.values():
            try:
                build_data(data)
            except (ShardError, SourceError) as error:
                hint = f"; {study.data}" if study.data else ""
                raise type(error)(f"{error}{hint}") from None
        ledger.begin()
        shutil.rmtree(ledger.out / RAY, ignore_errors=True)
        if study.search.scheduler == "pbt":
            run_pbt(
                trials, ledger, lambda members, rung: _fit(iter(members), [rung], ledger, at_once)
            )
        else:
            _fit(_upcoming(trials, ledger), study.search.rungs, ledger, at_once)
        shutil.rmtree(ledger.out / RAY, ignore_errors=True)
    return len(ledger.rows) == study.planned


def _upcoming(trials: list[Trial], ledger: Ledger) -> Iterator[Trial]:
    """Yields the trials without a row, and then those that optuna suggests, which join the list."""
    optuna = ledger.study.search.sampler == "optuna"
    for trial in [*trials]:
        if trial.name not in ledger.rows:
            if optuna:
                journal(trial)
            yield trial
    while len(trials) < ledger.study.planned:
        trials.append(suggest(trials, ledger.rows))
        journal(trials[-1])
        yield trials[-1]


@contextmanager
def _interruptible() -> Iterator[None]:
    """Leaves the block at once at Ctrl-C or SIGTERM, without an exception.

    Tune would wait for its trials to end, or for a minute if the signal also ended Ray's processes;
    there is no need to, as checkpoints and rows are complete at any moment.
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


def _fit(
    upcoming: Iterator[Trial], rungs: Sequence[int | None], ledger: Ledger, at_once: int
) -> None:
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"  # the new one ignores verbose=0
    os.environ["TUNE_MAX_PENDING_TRIALS_PG"] = str(at_once)
    from ray import tune

    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # a failed trial is a row
    study, by_name = ledger.study, dict[str, Trial]()
    run = tune.with_parameters(run_trial, study=study, out=ledger.out, rungs=rungs, root=Path.cwd())
    compares = study.search.steps and study.search.scheduler != "pbt"
    rule = ray_rule(study, ledger.out)

    def stops(_: str, result: dict[str, Any]) -> bool:
        """Returns whether a trial ends here; Tune also asks of those that ended or failed."""
        trial = result["config"]["trial"]
        return not (result["done"] or goes_on(study, ledger.out, trial, result, rule))

    tune.Tuner(
        tune.with_resources(run, {"memory": 1}),
        tune_config=tune.TuneConfig(
            search_alg=in_order((trial.current() for trial in upcoming), by_name),
            num_samples=study.planned,
            max_concurrent_trials=at_once,
            trial_name_creator=lambda trial: trial.config["trial"],
            trial_dirname_creator=lambda trial: trial.config["trial"],
        ),
        run_config=tune.RunConfig(
            name=f"tune-{rungs[-1] or 'all'}",
            storage_path=str((ledger.out / RAY).absolute()),
            callbacks=[callback(by_name, ledger)],
            failure_config=tune.FailureConfig(max_failures=study.retries),
            stop=stops if compares else None,
            verbose=0,
        ),
    ).fit()


def callback(trials: Mapping[str, Trial], ledger: Ledger) -> Any:
    """Returns a `ray.tune.Callback` that reports on trials, and writes the rows of those that end.

    It replaces Tune's own, which prints a line for a trial without a result at any verbosity.
    """
    from ray.tune.progress_reporter import TrialProgressCallback

    study = ledger.study
    measure, pbt, last = study.measure, study.search.scheduler == "pbt", study.search.rungs[-1]

    class LedgerCallback(TrialProgressCallback):  # type: ignore[misc]
        def on_trial_start(self, trial: Any, **_: Any) -> None:
            ledger.started.add(str(trial))
            print_line(f"{trial} runs: {trials[str(trial)].description}")

        def on_trial_result(self, trial: Any, result: dict[str, Any], **_: Any) -> None:
            if last is not None and measure.score in result:
                score = result[measure.score]
                print_line(f"{trial} at step {result['step']}: {measure.score} {score:.4f}")

        def on_trial_recover(self, trial: Any, **_: Any) -> None:
            print_line(f"{trial} was lost and is restarted: {_cause_of_loss(trial)}")

        def on_trial_complete(self, trial: Any, **_: Any) -> None:
            ended, step = trials[str(trial)], trial.last_result.get("step")
            if (ended.run / ERROR).exists():
                self._failed(trial, (ended.run / ERROR).read_text())
            elif step is None:
                self._failed(trial, f"it ended without a result; see {ended.run}/log-0.txt")
            elif not pbt or step == last:  # otherwise it waits for the others
                early = step if last is not None and step < last else None
                status = "done" if early is None else "stopped"
                row = ledger.append(ended, status, rung=early)
                values = (row["result"] or {}) | (row["measured"] or {})
                names = [n for n in dict.fromkeys([*measure.y, measure.score]) if n]
                scores = ", ".join(f"{name} {cell(values.get(name), name)}" for name in names)
                print_line(f"{trial} {status}: {scores}")

        def on_trial_error(self, trial: Any, **_: Any) -> None:
            self._failed(trial, _cause_of_loss(trial))

        def _failed(self, trial: Any, text: str) -> None:
            ledger.append(trials[str(trial)], "failed", text)
            print_line(f"{trial} failed: {text}")

    return LedgerCallback()


def _cause_of_loss(trial: Any) -> str:
    file = Path(trial.error_file or "")
    lines = file.read_text().strip().splitlines() if file.is_file() else []
    return lines[-1].strip() if lines else "it ended without a message"
