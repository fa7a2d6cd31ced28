"""What `heron init` writes beside a plain network and scikit-learn, on the same rows.

    python -m benchmarks.recipes --out recipes --shared ../shared/data
    python -m benchmarks.recipes --out recipes --quick --sets wine iris
    python -m benchmarks.recipes --out recipes --sets kmnist cifar10 --also simclr herocon

Sets x methods x seeds. `init` is the file as `heron init` writes it (with `--labelled` where the
set says so), `plain` the same network, steps and augmentation, batches of labelled rows, and the
classifier's loss alone; `--also` trains other objectives in the place of `init`'s, to choose one.
All train for the same steps. scikit-learn's three are tuned by folds of the labelled rows. A seed
draws rows, weights and batches; differences are paired by seed, with the 95 % interval of t. Scores
are kept in OUT, and the same command goes on.
"""

import argparse
import contextlib
import io
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.recipe_sets import SETS, build_set
from heron.api.job import pretrain
from heron.cli.init import experiment, read_facts
from heron.experiment.config import Config, parse_config
from heron.studies.repeats import corrected_interval
from heron.studies.text import markdown

METHODS = ("init", "plain", "logistic", "forest", "boosting")
CLASSIFIERS = ("cross_entropy", "bce")
ALSO: dict[str, dict[str, Any]] = {  # objectives to choose from, beside the classifier's loss
    "simclr": {"supcon": {"weight": 0.5, "tau": 0.1}, "nt_xent": {"weight": 0.5, "tau": 0.5}},
    "herocon": {
        "weighted_unsupervised": {"weight": 0.1, "tau": 0.1},
        "weighted_supervised": {"weight": 0.02, "tau": 1.0, "distance": "indicator"},
    },
}


def configs(
    data: str, labelled: int | None, seed: int, steps: int, out: Path, also: Sequence[str] = ()
) -> dict[str, Config]:
    """Returns the experiment that `heron init` writes, its plain network, and others."""
    tree = yaml.safe_load(experiment(data, read_facts(data, labelled), "mine"))
    tree["seed"] = tree["data"]["protocol"]["seed"] = seed
    tree["train"]["total_steps"] = min(steps, tree["train"]["total_steps"])
    tree["train"] |= {"cpu_threads": 1, "evaluate_every_steps": None}
    tree["evaluate"] = {"map": "never"}
    classifier = {k: v for k, v in tree["objective"].items() if k in CLASSIFIERS}
    trees = {name: json.loads(json.dumps(tree)) for name in ("init", "plain", *also)}
    trees["plain"]["data"]["batch"]["unlabelled"] = 0
    trees["plain"]["data"]["epoch"] = "labelled"
    trees["plain"]["objective"] = classifier
    trees["init"]["evaluate"]["baselines"] = "scikit-learn"
    for name, one in trees.items():
        one["run"] = {"dir": str(out / name), "resume": "never"}
        if name in also:
            one["objective"] = classifier | ALSO[name]
    return {name: parse_config(one) for name, one in trees.items()}


def score(config: Config) -> dict[str, float]:
    """Returns the accuracy of the test rows, and of scikit-learn's methods where they are asked."""
    log = io.StringIO()
    with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        result = pretrain(config)
    kinds = METHODS[2:] if config.evaluate.baselines else ()
    return {"init": result["accuracy"]} | {kind: result[f"{kind}_accuracy"] for kind in kinds}


def scores(made: dict[str, Config], kept: dict[str, float]) -> Iterator[tuple[str, float]]:
    """Yields the accuracy by method of those that are not kept."""
    for name, config in made.items():
        if name in kept:
            continue
        if name == "plain" and config.objective == made["init"].objective:
            yield name, kept["init"]
            continue
        found = score(config)
        yield from ((name if key == "init" else key, value) for key, value in found.items())


def lines(
    kept: dict[str, dict[str, float]], names: Sequence[str], also: Sequence[str] = ()
) -> Iterator[list[str]]:
    """Yields the rows of the table."""
    methods = (*METHODS, *also)
    for name in names:
        seeds = [
            found
            for key, found in kept.items()
            if key.rpartition("-")[0] == name and found.keys() >= {*methods}
        ]
        if seeds:
            means = [f"{np.mean([one[method] for one in seeds]):.3f}" for method in methods]
            less = [
                corrected_interval([one["init"] - one[other] for one in seeds], 0.0).description
                for other in methods[1:]
            ]
            mark = " (tuned on)" if SETS[name].tuned else ""
            yield [f"{name}{mark}", str(SETS[name].labelled or "4 in 5"), *means, *less]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shared", type=Path, default=Path("../shared/data"))
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--also", nargs="+", choices=ALSO, default=[])
    parser.add_argument("--steps", type=int, default=1500, help="of a run at most")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one seed, 300 steps")
    args = parser.parse_args()
    seeds, steps = (1, 300) if args.quick else (args.seeds, args.steps)
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.sets:
        data = build_set(name, args.out, args.shared)
        for seed in range(seeds):
            key = f"{name}-{seed}"
            folder = args.out / "runs" / f"{key}-{steps}"
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / "scores.json"
            found = json.loads(path.read_text()) if path.exists() else {}
            made = configs(data, SETS[name].labelled, seed, steps, folder, args.also)
            began = time.monotonic()
            for method, value in scores(made, found):
                found[method] = value
                path.write_text(json.dumps(found, indent=1))
                print(f"{key}: {method} {value:.3f} ({time.monotonic() - began:.0f} s)", flush=True)
    kept = {
        path.parent.name.rpartition("-")[0]: json.loads(path.read_text())
        for path in sorted(args.out.glob(f"runs/*-{steps}/scores.json"))
    }
    heads = ["set", "labels", *METHODS, *args.also]
    heads += [f"init less {other}" for other in heads[3:]]
    print(markdown(heads, list(lines(kept, args.sets, args.also))))


if __name__ == "__main__":
    main()
