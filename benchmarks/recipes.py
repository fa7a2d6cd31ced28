"""What `heron init` writes beside a plain network and scikit-learn, on the same rows.

    python -m benchmarks.recipes --out recipes --shared ../shared/data
    python -m benchmarks.recipes --out recipes --quick --sets wine iris

Sets x methods x seeds. `init` is the file as `heron init` writes it (with `--labelled` where the
set says so), `plain` the same network, batches of labelled rows, steps and augmentation with the
classifier's loss alone. Both train for the same steps. scikit-learn's two are tuned by folds of the
labelled rows. A seed draws rows, weights and batches; differences are paired by seed, with the 95 %
interval of t. Scores are kept in OUT, and the same command goes on.
"""

import argparse
import contextlib
import gzip
import io
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from heron.api.job import pretrain
from heron.cli.init import experiment, read_facts
from heron.config.experiment import Config, parse_config
from heron.shards.build import build
from heron.shards.sources import make_source
from heron.studies.repeats import corrected_interval
from heron.studies.text import markdown

Arrays = dict[str, Any]
METHODS = ("init", "plain", "logistic", "forest")
CLASSIFIERS = ("cross_entropy", "bce")
TRAIN, TEST = 10_000, 2_000  # rows of a large set


class DataSet(NamedTuple):
    """A set of the benchmark."""

    arrays: Callable[[Path], Arrays]  # of the folder of shared data
    labelled: int | None = None  # as `heron init --labelled`
    tuned: bool = False  # whether a recipe was chosen on it


def _toy(name: str) -> Callable[[Path], Arrays]:
    def read(_: Path) -> Arrays:
        import sklearn.datasets

        data = getattr(sklearn.datasets, f"load_{name}")()
        return {"columns": data.data.astype(np.float32), "labels": data.target}

    return read


def _digits(halves: bool) -> Callable[[Path], Arrays]:
    def read(_: Path) -> Arrays:
        import sklearn.datasets

        data = sklearn.datasets.load_digits()
        if halves:
            views = {"upper": data.data[:, :32], "lower": data.data[:, 32:]}
            return {key: v.astype(np.float32) for key, v in views.items()} | {"labels": data.target}
        return {"image": (data.images * 15.9).astype(np.uint8), "labels": data.target}

    return read


def _idx(name: str) -> Callable[[Path], Arrays]:
    def read(shared: Path) -> Arrays:
        random, parts = np.random.default_rng(7), list[tuple[Any, Any]]()
        for prefix, count in (("train", TRAIN), ("t10k", TEST)):
            images, labels = (
                _read_idx(next((shared / name).glob(f"{prefix}-{kind}*")))
                for kind in ("images", "labels")
            )
            rows = random.permutation(len(labels))[:count]
            parts.append((images[rows], labels[rows].astype(int)))
        split = np.array(["train"] * len(parts[0][1]) + ["test"] * len(parts[1][1]))
        image, label = (np.concatenate(part) for part in zip(*parts, strict=True))
        return {"image": image, "labels": label, "split": split}

    return read


def _read_idx(path: Path) -> Any:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    shape = np.frombuffer(data, ">u4", data[3], 4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)


SETS = {
    "iris": DataSet(_toy("iris")),
    "wine": DataSet(_toy("wine")),
    "breast_cancer": DataSet(_toy("breast_cancer")),
    "digits": DataSet(_toy("digits"), 100),
    "digits-pictures": DataSet(_digits(False), 100),
    "digits-halves": DataSet(_digits(True), 100),
    "mnist": DataSet(_idx("mnist"), 200, True),
    "kmnist": DataSet(_idx("kmnist"), 200, True),
}


def build_set(name: str, folder: Path, shared: Path) -> str:
    """Builds a set's shards where they are missing, and returns their folder."""
    path = folder / "data" / name
    if not (path / "manifest.json").exists():
        (folder / "data").mkdir(parents=True, exist_ok=True)
        np.savez(file := folder / "data" / f"{name}.npz", **SETS[name].arrays(shared))
        build(make_source("arrays", {"npz": file}), path, progress=False)
    return str(path)


def configs(data: str, labelled: int | None, seed: int, steps: int, out: Path) -> dict[str, Config]:
    """Returns the experiment that `heron init` writes, and its plain network."""
    tree = yaml.safe_load(experiment(data, read_facts(data, labelled), "mine"))
    tree["seed"] = tree["data"]["protocol"]["seed"] = seed
    tree["train"]["steps"] = min(steps, tree["train"]["steps"])
    tree["train"] |= {"cpu_threads": 1, "evaluate_every_steps": None}
    tree["evaluate"] = {"map": "never"}
    plain = json.loads(json.dumps(tree))
    plain["data"]["batch"]["unlabelled"], plain["data"]["epoch"] = 0, "labelled"
    plain["objective"] = {k: v for k, v in tree["objective"].items() if k in CLASSIFIERS}
    tree["evaluate"]["baselines"] = True
    trees = {"init": tree, "plain": plain}
    for name, one in trees.items():
        one["run"] = {"dir": str(out / name), "resume": "never"}
    return {name: parse_config(one) for name, one in trees.items()}


def scores(data: str, labelled: int | None, seed: int, steps: int, out: Path) -> dict[str, float]:
    """Returns the accuracy of the test rows by method."""
    made = configs(data, labelled, seed, steps, out)
    found, log = dict[str, float](), io.StringIO()
    same = made["init"].objective == made["plain"].objective
    with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        result = pretrain(made["init"])
        found["init"] = result["accuracy"]
        found |= {kind: result[f"{kind}_accuracy"] for kind in METHODS[2:]}
        found["plain"] = found["init"] if same else pretrain(made["plain"])["accuracy"]
    return found


def lines(kept: dict[str, dict[str, float]], names: Sequence[str]) -> Iterator[list[str]]:
    """Yields the rows of the table."""
    for name in names:
        seeds = [found for key, found in kept.items() if key.rpartition("-")[0] == name]
        if seeds:
            means = [f"{np.mean([one[method] for one in seeds]):.3f}" for method in METHODS]
            less = [
                corrected_interval([one["init"] - one[other] for one in seeds], 0.0).description
                for other in METHODS[1:]
            ]
            mark = " (tuned on)" if SETS[name].tuned else ""
            yield [f"{name}{mark}", str(SETS[name].labelled or "4 in 5"), *means, *less]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shared", type=Path, default=Path("../shared/data"))
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--steps", type=int, default=1500, help="of a run at most")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one seed, 300 steps")
    args = parser.parse_args()
    seeds, steps = (1, 300) if args.quick else (args.seeds, args.steps)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"scores-{steps}.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    for name in args.sets:
        data = build_set(name, args.out, args.shared)
        for seed in range(seeds):
            if (key := f"{name}-{seed}") in kept:
                continue
            began, folder = time.monotonic(), args.out / "runs" / f"{key}-{steps}"
            folder.mkdir(parents=True, exist_ok=True)
            kept[key] = scores(data, SETS[name].labelled, seed, steps, folder)
            path.write_text(json.dumps(kept, indent=1))
            told = ", ".join(f"{method} {value:.3f}" for method, value in kept[key].items())
            print(f"{key}: {told} ({time.monotonic() - began:.0f} s)", flush=True)
    heads = ["set", "labels", *METHODS, *(f"init less {other}" for other in METHODS[1:])]
    print(markdown(heads, list(lines(kept, args.sets))))


if __name__ == "__main__":
    main()
