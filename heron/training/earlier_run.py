"""The run that a folder holds already: a finished one is refused, or moved aside whole."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from heron.base.atomic import aside_name, make_room, set_aside
from heron.base.errors import ConfigError, TrainingError
from heron.distributed.collectives import on_main
from heron.experiment.config import Config, load_config
from heron.training.baselines import SUMMARISED
from heron.training.checkpoint import complete_checkpoints
from heron.training.run_lock import LOCK, RunLock, holder
from heron.training.tracking import read_metrics, read_result


def refuse_finished(folder: Path, resume: str) -> None:
    """Raises a TrainingError if a folder's run has ended."""
    path, aside = folder / "result.json", aside_name(folder)
    if not path.exists():
        return
    try:
        result = read_result(path)
        found = f"a finished run ({_describe(result)})"
        go_on = (
            "To train it further, where its learning rate has not ended: run.resume=auto and more "
            "train.epochs or train.total_steps (train.steps=null to its end). "
        )
    except TrainingError:
        found, go_on = "a run whose result.json is damaged", ""
    anew = "--overwrite"
    if resume != "never":  # it was given
        found, go_on = f"{found} and no checkpoint to continue from", ""
        anew = "run.resume=never and --overwrite"
    raise TrainingError(
        f"{folder} has {found}, which a new run would replace. To keep both: run.dir={aside}. "
        f"{go_on}To start over: {anew}, which moves everything in it to {aside}"
    )


def make_way(folder: Path, resume: str, overwrite: bool, lock: RunLock) -> str:
    """Refuses a finished run in a folder or, with `overwrite`, moves it aside, whole.

    So it does with one that was stopped. The folder is locked, and every process calls this.
    Returns a line that says what was moved where, or "".
    """

    def work() -> str:
        if not overwrite:
            refuse_finished(folder, resume)
        return lock.move(lambda: _move_earlier(folder, resume))

    return on_main(work)


def _move_earlier(folder: Path, resume: str) -> str:
    """Moves an earlier run aside, unless it has taken no step.

    One that resumes from its beginning, since it was killed before its first checkpoint, stays.
    """
    finished, steps = (folder / "result.json").exists(), _steps_taken(folder)
    if resume != "never" and not finished:
        return ""
    if not (finished or steps or complete_checkpoints(folder / "checkpoints")):
        return ""
    end = "that has ended" if finished else f"that was stopped after {steps:,} steps"
    hint = "" if finished else "; run.resume=auto would have continued it"
    return f"an earlier run {end} is now in {set_aside(folder)}{hint}"


def result_of_ended(
    folder: Path, config: Config, took_all: bool, told: Sequence[str]
) -> tuple[dict[str, Any], bool]:
    """Returns the result of a run that took all its steps before this start, {} without one.

    And whether nothing is left to do, which is printed after what is `told`: it has its report, and
    the evaluation that is asked for now is that of then. Every process calls it.
    """

    def read() -> tuple[dict[str, Any], bool]:
        files = [folder / name for name in ("result.json", "report.html", "config.yaml")]
        if not took_all or not all(path.exists() for path in files):
            return {}, False
        try:
            result, saved = read_result(files[0], ["steps"]), load_config(files[-1])
        except (TrainingError, ConfigError):  # what is damaged is written again
            return {}, False
        done = saved.evaluate == config.evaluate and config.run.resume == "auto"
        if done:
            print(*told, f"{folder} has ended at step {result['steps']}; nothing to do", sep="\n")
        return result, done

    return on_main(read)


def facts_of_steps(earlier: Mapping[str, Any], took_steps: bool) -> dict[str, Any]:
    """Returns the facts of a result that only steps can find, of a start that took none."""
    names = () if took_steps else ("peak_memory_bytes", "contrast")
    return {name: earlier.get(name) for name in names}


def begin_anew(out: Path) -> None:
    """Moves a folder of runs aside, whole, and says so; TrainingError while one is trained."""
    for lock in sorted(out.rglob(LOCK)):
        if (who := holder(lock.parent)) is not None:
            raise TrainingError(
                f"{lock.parent} is in use by {who or 'a run'}, and --overwrite would move {out} "
                "away; wait until it ends, stop it, or choose another --out"
            )
    make_room(out, True, TrainingError)


def _steps_taken(folder: Path) -> int:
    try:
        return max((row["step"] + 1 for row in read_metrics(folder / "metrics.jsonl")), default=0)
    except TrainingError:  # a damaged line: it is moved like the others
        return 1


def _describe(result: dict[str, Any]) -> str:
    scores = [f"{name} {result[name]:.4f}" for name in SUMMARISED if result.get(name) is not None]
    return ", ".join([*scores[:2], f"{result.get('steps', 0):,} steps"])
