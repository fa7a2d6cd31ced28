"""The parts of a study that Ray runs: a trial, and in it the workers that train together."""

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

from heron.base.errors import Held, TrainingError
from heron.experiment.config import Config
from heron.studies.ledger import write_rows
from heron.studies.study import Study
from heron.studies.trials import FSDP, RUNGS, Trial, resources_per_worker
from heron.training.tracking import read_result

ERROR = "error.txt"  # in a run's folder: why it failed
RAY = "ray"  # in a study's folder: Ray's files while it runs; nothing reads them again
DAY_S = 24 * 60 * 60


def run_trial(
    params: dict[str, Any], study: Study, out: Path, rungs: Sequence[int | None], root: Path
) -> None:
    """Runs the trial that `params` has from rung to rung, and reports its scores at each.

    A trial that fails writes error.txt instead of raising: the failures that Tune sees are then
    lost processes or nodes, for which it restarts the trial. `root`, where relative paths start, is
    on a disk that all nodes share.
    """
    from ray import tune

    os.chdir(root)
    trial = Trial(study, out, params["trial"], params["values"])
    error_file = trial.run / ERROR
    trial.run.mkdir(parents=True, exist_ok=True)
    error_file.unlink(missing_ok=True)
    try:
        reported = trial.scores()
        for rung in rungs:
            if rung not in reported:
                _train_together(trial, rung, root)
                reported[rung] = scores_of(trial.run)
                if rung is not None:
                    refuse_incomparable(trial.study, rung, reported[rung])
                    write_rows(trial.run / RUNGS, reported.values())
            tune.report(reported[rung])  # again after a restart: the driver may have missed it
    except Exception as error:
        if not error_file.exists():
            error_file.write_text(f"{type(error).__name__}: {error}")


def refuse_incomparable(study: Study, rung: int, scores: Mapping[str, Any]) -> None:
    """Raises a TrainingError for a run without `measure.score`, or that ended before its rung."""
    if study.measure.score not in scores:
        raise TrainingError(
            f"measure.score is {study.measure.score}, but result.json has no such number; set it "
            f"to one of {', '.join(scores)}"
        )
    if scores["step"] != rung:
        raise TrainingError(
            f"the run ended at step {scores['step']}, but trials are compared after {rung}; lower "
            "search.steps, or raise the length of the run, train.epochs or train.total_steps"
        )


def _train_together(trial: Trial, rung: int | None, root: Path) -> None:
    """Trains on the trial's workers, restarting those that die; TrainingError if it fails."""
    if trial.workers == 1 and trial.launch_strategy == "ddp":
        _train_alone(trial, rung, root)
        return
    from ray import train
    from ray.train.torch import TorchConfig, TorchTrainer

    # Trials wait while others run; `trials_at_once` has checked that they fit.
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(DAY_S)
    # A lost node is handled as a worker that dies.
    os.environ["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"
    gpus = trial.study.gpus
    trainer = TorchTrainer(
        partial(run_worker, trial, trial.config(rung), root),
        # The watchdog ends a run that hangs; a collective may wait long for one busy process.
        torch_config=TorchConfig(backend="nccl" if gpus else "gloo", timeout_s=DAY_S),
        scaling_config=train.ScalingConfig(
            num_workers=trial.workers,
            use_gpu=gpus,
            resources_per_worker=resources_per_worker(trial.study),
        ),
        run_config=train.RunConfig(
            name=f"train-{trial.name}-{rung or 'all'}",
            storage_path=str(root / trial.out / RAY),
            failure_config=train.FailureConfig(max_failures=trial.study.retries),
        ),
    )
    try:
        trainer.fit()
    except train.TrainingFailedError as error:
        raise TrainingError(_failure_reason(trial.run, error)) from None


def _train_alone(trial: Trial, rung: int | None, root: Path) -> None:
    """Trains in one process: a task, which begins in half the time of a group of one worker."""
    import ray

    needs = resources_per_worker(trial.study)
    task = ray.remote(
        num_cpus=needs["CPU"],
        num_gpus=needs.get("GPU", 0),
        scheduling_strategy="DEFAULT",  # outside the resources of the trial, which has none
        max_retries=trial.study.retries,  # of a process or a node that is lost
        max_calls=1,  # the next run has a process of its own
    )(run_worker)
    try:
        ray.get(task.remote(trial, trial.config(rung), root))
    except ray.exceptions.RayError as error:
        raise TrainingError(_failure_reason(trial.run, error)) from None


def run_worker(trial: Trial, config: Config, root: Path) -> None:
    """Runs one process of a run, in the environment that `accelerate launch` would set.

    Ray has set the rank and connected the processes, if there are several. Output goes to a log in
    the run's folder.
    """
    os.chdir(root)
    os.environ.update(environment(trial.launch_strategy, trial.study.gpus))
    from heron.api.job import EXPECTED, pretrain

    run, rank = trial.run, os.environ.get("RANK", "0")
    if (run / ERROR).exists():  # another attempt would fail the same way
        raise TrainingError((run / ERROR).read_text())
    log = (run / f"log-{rank}.txt").open("a", buffering=1)
    with log, redirect_stdout(log), redirect_stderr(log):
        try:
            pretrain(config)
        except Held:
            raise  # the folder may be free at the next attempt
        except EXPECTED as error:
            (run / ERROR).write_text(f"rank {rank}: {type(error).__name__}: {error}")
            raise


def environment(strategy: str, gpus: bool) -> dict[str, str]:
    """Returns the variables that `accelerate launch` sets, by the files of launch/accelerate."""
    common = {"ACCELERATE_MIXED_PRECISION": "no"}
    if not strategy.startswith("zero"):
        common |= FSDP if strategy == "fsdp" else {}
        return common if gpus else common | {"ACCELERATE_USE_CPU": "true"}
    return common | {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": strategy.removeprefix("zero"),
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none",
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
        "ACCELERATE_GRADIENT_CLIPPING": "0.0",
    }


def scores_of(run: Path) -> dict[str, Any]:
    """Returns the numbers of a run's result.json, NaN in place of null, and `step`."""
    result = read_result(run / "result.json", ["steps"])
    values = {k: math.nan if v is None else v for k, v in result.items()}
    numbers = {k: v for k, v in values.items() if type(v) in (int, float)}
    return numbers | {"step": result["steps"]}


def _failure_reason(run: Path, error: Exception) -> str:
    """Returns why workers failed: in a worker's words, or else what Ray knows of lost ones."""
    if (run / ERROR).exists():
        return (run / ERROR).read_text()
    failures: Mapping[int, Exception] = getattr(error, "worker_failures", {})
    if not failures:
        return str(error)
    rank, first = min(failures.items())
    lines = [line for line in str(first).splitlines() if line.strip()] or [type(first).__name__]
    reason = lines[0] if "died" in lines[0] else lines[-1]
    return f"rank {rank}: {reason.strip()}; see {run}/log-{rank}.txt"
