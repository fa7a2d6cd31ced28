"""A search or a comparison of about five minutes: as many rows and steps as the time allows."""

import json
import math
import re
import time
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from heron.base.atomic import save_json
from heron.training.tracking import read_result

if TYPE_CHECKING:  # with torch, which takes a second
    from heron.data.reader import Reader
    from heron.studies.comparison import Kind
    from heron.studies.search import SearchSettings

SECONDS = 300
ROWS = 2000  # labelled ones at most: a forest of more would take the time of the networks
LEAST = 0.2  # share of the time for the networks, whatever scikit-learn takes
PROBE_STEPS, MIN_STEPS = 10, 20  # of a run that measures the time of a step, and of any other


def as_file(method: str) -> str:
    """Returns the name of a method's files; overrides that it has may hold paths."""
    name = re.sub(r"[^\w.+=-]+", "-", method)[:80]
    return name if name == method else f"{name}-{zlib.crc32(method.encode()):08x}"


def announce(what: str) -> None:
    """Says how long it takes, before anything that is slow."""
    rows = f"at most {ROWS:,} labelled rows"
    print(f"quick: about {SECONDS // 60} minutes for {what}, {rows}", flush=True)


def shortened(
    settings: "SearchSettings",
    reader: "Reader",
    methods: Sequence[str],
    baselines: "Sequence[Kind]",
    folds: Sequence[int | None],
) -> "SearchSettings":
    """Returns the settings with as many rows and steps as the time of a quick search allows.

    Steps follow from the time of scikit-learn's first fold and of a short run of each method; they
    are kept in quick.json, so that the same command goes on.
    """
    from heron.studies.comparison import measure_raw
    from heron.studies.engine import train
    from heron.studies.search import LOG

    own = settings.experiment(methods[0], folds[0])
    protocol, rows = own.data.protocol, reader.split_rows(own.data.split)
    labelled = int(reader.is_labelled(rows).sum()) if protocol.labelled == "all" else 0
    asked = labelled if protocol.labelled == "all" else protocol.labelled
    words = [*settings.overrides]
    if protocol.folds is None and asked > ROWS:
        words += ["data.protocol.stratified=true", f"data.protocol.labelled={ROWS}"]
    if (kept := settings.out / "quick.json").exists():
        return replace(settings, overrides=[*words, *_whole_run(read_result(kept)["steps"])])
    short = replace(settings, overrides=[*words, *_whole_run(PROBE_STEPS)])
    settings = replace(settings, overrides=words)
    most = math.inf  # the experiment's own length
    step = fixed = 0.0  # seconds of a step, and of all but the steps, of a run of each method
    for name in methods:
        trial = short.trial(
            short.experiment(name, folds[0]), 0, settings.out / "probe" / as_file(name)
        )
        began = time.monotonic()
        result = train(trial.config, settings.out / LOG)
        most = min(most, own.train.length(round(result["steps"] / result["epochs"]))[0])
        metrics = (Path(trial.config.run.dir) / "metrics.jsonl").read_text().splitlines()
        seconds = [r["seconds"] for r in map(json.loads, metrics) if "seconds" in r]
        step += sorted(seconds)[len(seconds) // 2]
        fixed += time.monotonic() - began - sum(seconds)
    began = time.monotonic()
    for kind in baselines:
        measure_raw(settings.score, settings.experiment(methods[0], folds[0]), kind)
    spent = (time.monotonic() - began) * (len(folds) + 1)
    runs = settings.trials * len(folds)
    left = max(SECONDS - spent, SECONDS * LEAST) - fixed * (runs + 1)
    steps = int(min(most, max(MIN_STEPS, left / step / runs)))
    sklearn = f", scikit-learn a fold {spent / (len(folds) + 1):.0f} s" if baselines else ""
    print(
        f"a step of {' and '.join(methods)} takes {step * 1000:.0f} ms{sklearn}: runs of "
        f"{steps} steps",
        flush=True,
    )
    save_json(kept, {"steps": steps})
    return replace(settings, overrides=[*words, *_whole_run(steps)])


def _whole_run(steps: int) -> list[str]:
    """Returns overrides for a run of this many steps, with the learning rate's schedule to match.

    One that `train.steps` stops would be compared with a learning rate that has hardly fallen, and
    a warm-up of an epoch may be longer than the run.
    """
    length = ["train.epochs=null", f"train.total_steps={steps}", "train.steps=null"]
    return [*length, "optim.warmup_epochs=0"]
