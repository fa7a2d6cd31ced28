"""Values that optuna's TPE suggests, in a journal: what was suggested once is never asked again."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import TypedDict

from heron.base.artefact import Count, Fingerprint, fingerprint
from heron.base.atomic import atomic_write
from heron.base.errors import StudyError
from heron.base.extras import require
from heron.base.sections import Plain
from heron.studies.study import Range, Values
from heron.training.tracking import read_lines

JOURNAL = "suggestions.jsonl"  # a line per trial, written before the trial starts
STARTUP = 10  # random trials before the first suggestion, where the search states no number


class Suggestion(TypedDict):
    """A line of `JOURNAL`."""

    trial: Count
    values: Plain
    search: Fingerprint  # of what was searched, and how


class Told(NamedTuple):
    """What optuna is told of a trial."""

    values: Mapping[str, Any]
    score: float | None = None  # higher is better; None or no finite number: it failed
    steps: int | None = None  # at which it was stopped early
    running: bool = False


@dataclass(frozen=True)
class Tpe:
    """The tree-structured Parzen estimator of optuna (Bergstra et al. 2011), by ask and tell.

    A suggestion depends on (`seed`, trial) and on what has been told, not on the process that asks,
    so that nothing of optuna's own state is saved.
    """

    folder: Path  # of the journal
    ranges: Mapping[str, Values]
    seed: int

    def journal(self) -> dict[int, dict[str, Any]]:
        """Returns the values of each trial so far; a StudyError if another search wrote them."""
        lines = read_lines(self.folder / JOURNAL, Suggestion)
        if any(line["search"] != self._fingerprint() for line in lines):
            raise StudyError(
                f"{self.folder / JOURNAL} belongs to another search (other ranges or another "
                "seed); choose another --out, or add --overwrite"
            )
        return {line["trial"]: line["values"] for line in lines}

    def write(self, number: int, values: Mapping[str, Any]) -> None:
        """Adds a trial to the journal, unless it is there."""
        known = self.journal()
        self.folder.mkdir(parents=True, exist_ok=True)
        lines = [
            {"trial": trial, "values": own, "search": self._fingerprint()}
            for trial, own in (known if number in known else known | {number: values}).items()
        ]
        with atomic_write(self.folder / JOURNAL) as stream:
            stream.writelines((json.dumps(line) + "\n").encode() for line in lines)

    def suggest(self, number: int, told: Sequence[Told]) -> dict[str, Any]:
        """Asks for the values of a trial, telling of the others; MissingPackage without optuna."""
        optuna: Any = require("optuna", "the sampler optuna")
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        kinds = {key: _distribution(optuna, values) for key, values in self.ranges.items()}
        seed = int(np.random.SeedSequence([self.seed, number]).generate_state(1)[0])
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=1)
        study = optuna.create_study(sampler=sampler, direction="maximize")
        for trial in told:
            if (params := self._params(trial.values)) is not None:
                outcome = _outcome(optuna.trial.TrialState, trial)
                one = optuna.trial.create_trial(params=params, distributions=kinds, **outcome)
                study.add_trial(one)
        params = study.ask(kinds).params
        return {
            key: values.clip(params[key]) if isinstance(values, Range) else values[params[key]]
            for key, values in self.ranges.items()
        }

    def _params(self, values: Mapping[str, Any]) -> dict[str, Any] | None:
        """Returns the values as optuna has them: a number, or the place in a list; or None."""
        params: dict[str, Any] = {}
        for key, choices in self.ranges.items():
            if isinstance(choices, Range):
                if not choices.low <= values.get(key, math.nan) <= choices.high:
                    return None
                params[key] = float(values[key])
            elif values.get(key) not in choices:
                return None
            else:
                params[key] = choices.index(values[key])
        return params

    def _fingerprint(self) -> str:
        ranges = {
            key: values.model_dump() if isinstance(values, Range) else values
            for key, values in self.ranges.items()
        }
        return fingerprint({"ranges": ranges, "seed": self.seed})


def _distribution(optuna: Any, values: Values) -> Any:
    if isinstance(values, Range):
        kind = optuna.distributions.FloatDistribution
        return kind(values.low, values.high, log=values.log)
    return optuna.distributions.CategoricalDistribution(range(len(values)))


def _outcome(state: Any, trial: Told) -> dict[str, Any]:
    if trial.running:
        return {"state": state.RUNNING}
    if trial.score is None or not math.isfinite(trial.score):
        return {"state": state.FAIL}
    if trial.steps is not None:
        return {"state": state.PRUNED, "intermediate_values": {trial.steps: trial.score}}
    return {"value": trial.score}
