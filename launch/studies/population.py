"""Population based training: at each rung the worst trials take over weights of the best."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from heron.launch.studies import lineage
from heron.launch.studies.ledger import RUNGS, Ledger, write_rows
from heron.launch.studies.study import Pbt, Range, Study
from heron.launch.studies.trials import Trial, configure
from heron.pipeline.training.tracking import read_metrics

POPULATION = "population.jsonl"  # in a study's folder: a line for each rung that was decided
QUANTILE = 0.25  # of the trials that takes over, and of those that are taken from
ANEW = 0.25  # how often a value is drawn anew instead of perturbed
FACTORS = (0.8, 1.2)

Run = Callable[[Sequence[Trial], int], None]
Say = Callable[[str], None]


def run_pbt(study: Study, trials: Sequence[Trial], ledger: Ledger, run: Run, say: Say) -> None:
    """Runs a population to its end, all trials at a rung before any goes on.

    Source: Jaderberg et al. 2017. What has been decided at a rung stays decided, and is written
    down before any trial follows it: a population that was interrupted anywhere takes the path of
    one that was not. A trial that fails takes part no more; one that is run again follows the
    others, and is compared with them at rungs where they have not been compared yet.

    Args:
        study: by `pbt`.
        trials: all of its trials.
        ledger: has a row for each of those that have ended.
        run: trains trials, with the values that they came to, to a rung, where each leaves its
            scores in rungs.jsonl; a trial that fails, or is at the last rung, gets its row.
        say: prints a line.
    """
    for rung in study.rungs:
        assert rung is not None  # `Study.rungs` has None for searches without rungs alone
        last = rung == study.rungs[-1]
        going = [trial for trial in trials if trial.name not in ledger.rows]
        if waiting := [t for t in going if last or rung not in _scores(t, ledger.out)]:
            run(waiting, rung)
        there = [trial for trial in going if trial.name not in ledger.rows]
        if last or not there or any(rung not in _scores(t, ledger.out) for t in there):
            return  # the end, or Tune was stopped from outside
        if rung not in _decisions(ledger.out):
            _decide(study, there, ledger.out, rung)
        _exploit(study, trials, ledger.out, rung, say)


def choose_donors(
    study: Study,
    step: int,
    scores: Mapping[str, float],
    values: Mapping[str, Mapping[str, Any]],
) -> dict[str, dict[str, Any]]:
    """Returns which trials take over weights: the worst quarter, from one of the best each.

    Donors and perturbations are drawn with (`seed`, trial, step), whatever has been drawn before.

    Args:
        study: by `pbt`.
        step: of the rung.
        scores: of the trials there, by name; one that is not a number is the worst.
        values: that they have.

    Returns:
        By name of the trial, `from`, whose weights it takes, and `values`, its own from there on.
    """
    search, sign = study.search, 1 if study.measure.mode == "max" else -1
    assert isinstance(search, Pbt)
    by_score = sorted(
        scores, key=lambda n: (-math.inf if math.isnan(scores[n]) else sign * scores[n], n)
    )
    count = min(math.ceil(QUANTILE * len(by_score)), len(by_score) // 2)
    best = by_score[len(by_score) - count :]
    takes = {}
    for name in by_score[:count]:
        random = np.random.default_rng([search.seed, int(name), step])
        donor = best[int(random.integers(count))]
        takes[name] = {"from": donor, "values": perturb(study, values[donor], random)}
    return takes


def perturb(study: Study, values: Mapping[str, Any], random: np.random.Generator) -> dict[str, Any]:
    """Returns values near others: each times 0.8 or 1.2, or next in its list, or drawn anew."""
    near = dict(values)
    for key, among in study.vary.items():
        anew, up = random.random() < ANEW, bool(random.integers(2))
        if isinstance(among, Range):
            near[key] = among.draw(random) if anew else among.clip(near[key] * FACTORS[up])
        else:
            index = among.index(near[key]) + (1 if up else -1)
            index = int(random.integers(len(among))) if anew else index
            near[key] = among[min(max(index, 0), len(among) - 1)]
    return near


def current(trial: Trial, out: Path) -> Trial:
    """Returns a trial with the values that it came to, where it has taken over another's."""
    past = lineage.of(trial.folder(out))
    return replace(trial, values=dict(past[-1]["values"])) if past else trial


def _decide(study: Study, there: Sequence[Trial], out: Path, rung: int) -> None:
    """Writes down what the trials at a rung have scored, and who takes over what."""
    score = str(study.measure.score)
    scores = {trial.name: float(_scores(trial, out)[rung][score]) for trial in there}
    values = {trial.name: current(trial, out).values for trial in there}
    takes = choose_donors(study, rung, scores, values)
    line = {"step": rung, "scores": scores, "takes": takes}
    write_rows(out / POPULATION, [*read_metrics(out / POPULATION), line])


def _exploit(study: Study, trials: Sequence[Trial], out: Path, rung: int, say: Say) -> None:
    """Lets trials take over the weights that were decided, those that have not yet."""
    by_name = {trial.name: trial for trial in trials}
    for name, take in _decisions(out)[rung]["takes"].items():
        trial = replace(by_name[name], values=take["values"])
        if rung in {line["step"] for line in lineage.of(trial.folder(out))}:
            continue
        source = by_name[take["from"]].folder(out) / "checkpoints" / "latest"
        lineage.exploit(source, configure(study, trial, out, rung), trial.values)
        shown = ", ".join(f"{key}={json.dumps(value)}" for key, value in trial.values.items())
        say(f"{name} at step {rung} goes on from {take['from']}'s weights: {shown}")


def _decisions(out: Path) -> dict[int, dict[str, Any]]:
    return {line["step"]: line for line in read_metrics(out / POPULATION)}


def _scores(trial: Trial, out: Path) -> dict[int, dict[str, Any]]:
    return {line["step"]: line for line in read_metrics(trial.folder(out) / RUNGS)}
