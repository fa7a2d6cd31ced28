"""Asynchronous successive halving: which trials go on; each decision is written at once."""

from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from heron.shards.artefact import Count
from heron.studies.ledger import write_rows
from heron.studies.study import Asha, Study
from heron.training.tracking import read_lines

HALVING = "halving.jsonl"  # in a study's folder: a line per trial and rung that it reached


class HalvingDecision(TypedDict):
    """A line of `HALVING`; a score that is not finite is null."""

    step: Count
    trial: str
    score: float | None
    goes_on: bool


def goes_on(study: Study, out: Path, trial: str, result: dict[str, Any]) -> bool:
    """Returns whether a trial goes on from a rung, and records the decision (Li et al. 2020).

    A trial goes on if it is among the best `1 / factor` of those that have reached the rung so far,
    or the best of fewer than `factor`; of equal trials those that went on rank first. Decisions are
    final: a study that is resumed keeps them, whatever trials came later. `result` has the rung's
    `step`, and the trial's scores.
    """
    assert isinstance(study.search, Asha)
    decided = read_lines(out / HALVING, HalvingDecision)
    step, score = result["step"], float(result[str(study.measure.score)])
    at_rung = [line for line in decided if line["step"] == step]
    for line in at_rung:
        if line["trial"] == trial:  # reported again, by a study that was resumed
            return bool(line["goes_on"])
    worth = study.measure.worth(score)
    worths = [(study.measure.worth(line["score"]), line["goes_on"]) for line in at_rung]
    rank = sum(other > worth or (other == worth and continued) for other, continued in worths)
    promoted = bool(rank < max(1, (len(at_rung) + 1) // study.search.factor))
    line = {"step": step, "trial": trial, "score": score, "goes_on": promoted}
    write_rows(out / HALVING, [*decided, line])
    return promoted


def scheduler(study: Study, out: Path) -> Any:
    """Returns a scheduler for Tune that stops trials by `goes_on`."""
    from ray.tune.schedulers import FIFOScheduler

    class Scheduler(FIFOScheduler):  # type: ignore[misc]
        def on_trial_result(self, controller: Any, trial: Any, result: dict[str, Any]) -> str:
            promoted = goes_on(study, out, str(trial), result)
            return str(FIFOScheduler.CONTINUE if promoted else FIFOScheduler.STOP)

    return Scheduler()
