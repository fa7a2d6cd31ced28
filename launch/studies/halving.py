"""Asynchronous successive halving: which trials go on, written down as it is decided."""

from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from heron.launch.studies.ledger import write_rows
from heron.launch.studies.study import Asha, Study
from heron.pipeline.training.tracking import read_lines
from heron.shards.artefact import Count

HALVING = "halving.jsonl"  # in a study's folder: a line for each trial that came to a rung


class Decided(TypedDict):
    """A line of `HALVING`; a score that is not finite is null."""

    step: Count
    trial: str
    score: float | None
    goes_on: bool


def goes_on(study: Study, out: Path, trial: str, result: dict[str, Any]) -> bool:
    """Returns whether a trial goes on from a rung, and writes the decision down (Li et al. 2020).

    A trial goes on where it is among the best `1 / factor` of those that came to the rung so
    far, or is the best of fewer; one that went on counts before its equals. What was decided
    stays decided: a study that was interrupted goes on with the trials that went on, however
    many came since. `result` has the rung's `step`, and the trial's scores.
    """
    assert isinstance(study.search, Asha)
    decided = read_lines(out / HALVING, Decided)
    step, score = result["step"], float(result[str(study.measure.score)])
    there = [line for line in decided if line["step"] == step]
    for line in there:
        if line["trial"] == trial:  # reported once more, by a study that goes on
            return bool(line["goes_on"])
    worth = study.measure.worth(score)
    worths = [(study.measure.worth(line["score"]), line["goes_on"]) for line in there]
    before = sum(w > worth or (w == worth and went) for w, went in worths)
    on = bool(before < max(1, (len(there) + 1) // study.search.factor))
    line = {"step": step, "trial": trial, "score": score, "goes_on": on}
    write_rows(out / HALVING, [*decided, line])
    return on


def scheduler(study: Study, out: Path) -> Any:
    """Returns Tune's scheduler that stops the trials that do not go on."""
    from ray.tune.schedulers import FIFOScheduler

    class Scheduler(FIFOScheduler):  # type: ignore[misc]
        def on_trial_result(self, controller: Any, trial: Any, result: dict[str, Any]) -> str:
            on = goes_on(study, out, str(trial), result)
            return str(FIFOScheduler.CONTINUE if on else FIFOScheduler.STOP)

    return Scheduler()
