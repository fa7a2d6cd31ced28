"""Asynchronous successive halving: which trials go on, written down as it is decided."""

import math
from pathlib import Path
from typing import Any

from heron.launch.studies.ledger import write_rows
from heron.launch.studies.study import Asha, Study
from heron.pipeline.training.tracking import read_metrics

HALVING = "halving.jsonl"  # in a study's folder: a line for each trial that came to a rung


class Halving:
    """What trials have scored at the rungs so far, and which of them went on (Li et al. 2020).

    A trial goes on where it is among the best `1 / factor` of those that came to the rung so
    far, or is the best of fewer; one that went on counts before its equals. Whatever was
    decided stays decided: a study that was interrupted goes on with the trials that went on,
    however many came since.
    """

    def __init__(self, study: Study, out: Path) -> None:
        """Reads what has been decided in a study's folder.

        Args:
            study: by `asha`.
            out: its folder.
        """
        assert isinstance(study.search, Asha)
        self._search, self._measure = study.search, study.measure
        self._path = out / HALVING
        self._decided = read_metrics(self._path)

    def goes_on(self, trial: str, result: dict[str, Any]) -> bool:
        """Returns whether a trial goes on from a rung, and writes the decision down.

        Args:
            trial: its name.
            result: its `step`, the rung's, and its scores.
        """
        step, score = result["step"], float(result[str(self._measure.score)])
        there = [line for line in self._decided if line["step"] == step]
        for line in there:
            if line["trial"] == trial:  # reported once more, by a study that goes on
                return bool(line["goes_on"])
        worth = self._worth(score)
        worths = [(self._worth(line["score"]), line["goes_on"]) for line in there]
        before = sum(w > worth or (w == worth and went) for w, went in worths)
        on = bool(before < max(1, (len(there) + 1) // self._search.factor))
        self._decided.append({"step": step, "trial": trial, "score": score, "goes_on": on})
        write_rows(self._path, self._decided)
        return on

    def _worth(self, score: float) -> float:
        """Returns a score of which more is better; NaN is worth least."""
        if math.isnan(score):
            return -math.inf
        return score if self._measure.mode == "max" else -score


def scheduler(halving: Halving) -> Any:
    """Returns Tune's scheduler that stops the trials that do not go on."""
    from ray.tune.schedulers import FIFOScheduler

    class Scheduler(FIFOScheduler):  # type: ignore[misc]
        def on_trial_result(self, controller: Any, trial: Any, result: dict[str, Any]) -> str:
            on = halving.goes_on(str(trial), result)
            return str(FIFOScheduler.CONTINUE if on else FIFOScheduler.STOP)

    return Scheduler()
