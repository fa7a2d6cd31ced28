"""Population based training: at each rung the worst trials take over weights of the best."""

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import TypedDict

from heron.base.artefact import Count
from heron.base.errors import CheckpointError
from heron.base.sections import Plain
from heron.data.streams import MINED
from heron.distributed.watchdog import Watchdog
from heron.experiment.config import Config, dump_config, load_saved
from heron.studies.ledger import Ledger, write_rows
from heron.studies.live import print_line
from heron.studies.study import Range, Study, draw
from heron.studies.trials import LINEAGE, Takeover, Trial
from heron.training import checkpoint
from heron.training.run_lock import RunLock
from heron.training.tracking import read_lines

POPULATION = "population.jsonl"  # in a study's folder: a line per decided rung
QUANTILE = 0.25  # of the trials that take over weights, and of those that donate them
RESAMPLE = 0.25  # probability that a value is drawn anew instead of perturbed
FACTORS = (0.8, 1.2)  # of a perturbed value

Run = Callable[[Sequence[Trial], int], None]

Take = TypedDict("Take", {"from": str, "values": Plain})


class PopulationDecision(TypedDict):
    """A line of `POPULATION`; a score that is not finite is null."""

    step: Count
    scores: dict[str, float | None]
    takes: dict[str, Take]


def run_pbt(trials: Sequence[Trial], ledger: Ledger, run: Run) -> None:
    """Runs a population (Jaderberg et al. 2017); all trials reach a rung before any goes on.

    Decisions at a rung are final, and written before any trial acts on them: an interrupted
    population takes the same path as one that was not. A trial that fails drops out; if it is run
    again, it catches up, and is compared with the others at rungs that are not decided yet.

    `run` trains trials, with their current values, to a rung, where each leaves its scores in
    rungs.jsonl; a trial that fails, or reaches the last rung, gets its row. Raises what `exploit`
    does.
    """
    study, path = ledger.study, ledger.out / POPULATION
    for rung in study.search.rungs:
        assert rung is not None  # only searches without rungs have None
        last = rung == study.search.rungs[-1]
        active = [trial for trial in trials if trial.name not in ledger.rows]
        if waiting := [trial for trial in active if last or rung not in trial.scores()]:
            run(waiting, rung)
        present = [trial for trial in active if trial.name not in ledger.rows]
        if last or not present or any(rung not in trial.scores() for trial in present):
            return  # the end, or Tune was stopped from outside
        decided = {line["step"]: line for line in read_lines(path, PopulationDecision)}
        if rung not in decided:
            score = str(study.measure.score)
            scores = {trial.name: float(trial.scores()[rung][score]) for trial in present}
            values = {trial.name: trial.current().values for trial in present}
            takes = choose_donors(study, rung, scores, values)
            decided[rung] = {"step": rung, "scores": scores, "takes": takes}
            write_rows(path, decided.values())
        by_name = {trial.name: trial for trial in trials}
        for name, take in decided[rung]["takes"].items():
            if rung not in {line["step"] for line in by_name[name].lineage()}:
                trial = replace(by_name[name], values=take["values"])
                source = by_name[take["from"]].run / "checkpoints" / "latest"
                exploit(source, trial.config(rung), trial.values)
                donor = f"continues from the weights of {take['from']}"
                print_line(f"{name} at step {rung} {donor}: {trial.description}")


def choose_donors(
    study: Study,
    step: int,
    scores: Mapping[str, float],
    values: Mapping[str, Mapping[str, Any]],
) -> dict[str, dict[str, Any]]:
    """Returns which trials take over weights, by name: the worst quarter, from the best quarter.

    Each takes over the weights of the trial `from`, and continues with `values`. Donors and
    perturbations are drawn with (`seed`, trial, step) alone. NaN is the worst score.
    """
    by_score = sorted(scores, key=lambda name: (study.measure.worth(scores[name]), name))
    count = min(math.ceil(QUANTILE * len(by_score)), len(by_score) // 2)
    best = by_score[len(by_score) - count :]
    takes = {}
    for name in by_score[:count]:
        random = np.random.default_rng([study.search.seed or 0, int(name), step])
        donor = best[int(random.integers(count))]
        takes[name] = {"from": donor, "values": perturb(study, values[donor], random)}
    return takes


def perturb(study: Study, values: Mapping[str, Any], random: np.random.Generator) -> dict[str, Any]:
    """Returns values near others: each times 0.8 or 1.2, or next in its list, or drawn anew."""
    perturbed = dict(values)
    for key, choices in study.vary.items():
        resample, up = random.random() < RESAMPLE, bool(random.integers(2))
        if resample:
            perturbed[key] = draw(choices, random)
        elif isinstance(choices, Range):
            perturbed[key] = choices.clip(perturbed[key] * FACTORS[up])
        else:
            index = choices.index(perturbed[key]) + (1 if up else -1)
            perturbed[key] = choices[min(max(index, 0), len(choices) - 1)]
    return perturbed


def exploit(source: Path, config: Config, values: Mapping[str, Any]) -> None:
    """Has a run continue from a copy of another run's checkpoint, with its own configuration.

    The optimiser's state and mined negatives are copied too. The checkpoint records the new values,
    so that `run.resume=auto` continues from it. The line in lineage.jsonl, the history of the run's
    weights, is written last: after an interruption everything is done again. `source` is a
    checkpoint's folder, at a step that the run of `config` has not passed.

    Raises a CheckpointError if it cannot be read, and Held if a worker still has the run's folder.
    """
    if fault := checkpoint.find_damage(source):
        raise CheckpointError(
            f"{source} is damaged ({fault}), but {config.run.dir} needs it to continue; restore "
            "it, or start the study again in another folder"
        )
    donor, run = load_saved(source, trust_code=None), Path(config.run.dir)
    snapshot, mined = checkpoint.load(source), Path(donor.run.dir) / MINED
    own = dump_config(config.in_precision(donor.train.precision))
    texts = {"config.yaml": own, "model.json": (source / "model.json").read_text()}
    name = Path(donor.run.dir).name
    line = {"step": snapshot.position.step, "from": name, "values": dict(values)}
    with RunLock(run) as run_lock:
        run_lock.acquire(Watchdog(math.inf))
        shutil.rmtree(run / MINED, ignore_errors=True)
        if mined.is_dir():
            shutil.copytree(mined, run / MINED)
        checkpoint.save(run / "checkpoints", snapshot, texts, newest=1)  # its own are obsolete
        write_rows(run / LINEAGE, [*read_lines(run / LINEAGE, Takeover), line])
