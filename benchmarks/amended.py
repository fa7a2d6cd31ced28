"""What wrong labels cost a network, and what `heron audit` wins back.

    python -m benchmarks.amended --out amended --shared ../shared/data

Of each set, half of the rows train and half test; 10 % of the training labels are changed evenly
(test labels never). The audit sees the training rows with the changed labels and their raw columns.
Its first `errors` labels, those that it says are wrong, are then taken as wrong without a look:
changed to the likely value (`amended`), removed (`unknown`), or their samples are left out
(`left out`); or every label counts 1 - its suspicion (`weighed`). The same network, objective and
length in every case; differences are paired by seed, of the draw of the halves, the changes and the
weights. `won back` is the share of what the noise cost.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.audit import READERS, Set, change, paired
from heron.api.job import pretrain
from heron.audit.labels import LabelModel, Near, suspicion
from heron.audit.planting import estimate
from heron.base.decisions import Decision, write_decisions
from heron.data.amend import Amended
from heron.data.reader import Reader
from heron.evaluation.knn import exact_nearest
from heron.experiment.config import parse_config
from heron.shards.build import build
from heron.sources import make_source
from heron.studies.text import markdown

CASES = "noisy", "amended", "unknown", "left out", "weighed"
TREE: dict[str, Any] = {
    "data": {
        "protocol": {"test": "test"},
        "batch": {"labelled": 200},
        "epoch": "labelled",
        "views": [
            {"stored": "columns", "augment": [{"noise": {"std": 0.3}}]},
            {"stored": "columns", "augment": [{"noise": {"std": 0.3}}]},
        ],
        "standardise": True,
    },
    "model": {"encoder": {"kind": "mlp", "widths": [256, 128]}, "projection_width": 64},
    "optim": {"kind": "adamw", "lr": 0.001},
    "tracking": [],
}


def shards(folder: Path, data: Set, labels: Any, split: Any) -> Path:
    """Writes a set as shards; returns their folder."""
    given = labels.argmax(1) if data[2] else labels.astype(np.uint8)
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "set.npz", columns=data[0].astype(np.float32), labels=given, split=split)
    source = make_source("arrays", {"npz": folder / "set.npz"})
    build(source, folder / "data", progress=False)
    return folder / "data"


def judge(folder: Path, data: Path, exclusive: bool, seed: int) -> int:
    """Writes what an audit of the training rows says beside their shards; how many are wrong."""
    reader = Reader(data)
    rows = reader.split_rows("train")
    x, y = reader.read("columns", rows), reader.ground_truth(rows)
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    own, names = np.arange(len(rows)), reader.manifest.labels.names
    near = Near(*exact_nearest([(own, unit)], unit, own, 10))
    model = LabelModel.of(x, y, exclusive, near, seed=seed)
    probability = model.probabilities(y)
    found = suspicion(probability, y, exclusive)
    errors = estimate(model, y, probability, found, seed).errors
    keys, lines, weights = reader.sample_keys(rows), list[Decision](), list[dict[str, Any]]()
    for place in np.argsort(-found.reshape(-1), kind="stable").tolist():
        row, label = (place, -1) if exclusive else divmod(place, len(names))
        key, name = keys[row], "" if exclusive else names[label]
        if len(lines) < errors:
            likely = int(np.where(y[row] == 1, -1, probability[row]).argmax())
            given = names[int(y[row].argmax())] if exclusive else str(int(y[row, label]))
            other = names[likely] if exclusive else str(1 - int(y[row, label]))
            lines.append(Decision(key, name, given, other))
        weights.append({"key": key, "label": name, "suspicion": float(found.reshape(-1)[place])})
    write_decisions(folder / "labels.csv", lines)
    keys_only = "".join(f"{key}\n" for key in dict.fromkeys(line.key for line in lines))
    (folder / "left-out.csv").write_text(f"key\n{keys_only}")
    pd.DataFrame(weights).to_parquet(folder / "labels.parquet", index=False)
    return errors


def score(run: Path, data: Path, exclusive: bool, seed: int, steps: int, **protocol: str) -> float:
    """Trains, and returns the weighted F1 of the test rows."""
    terms: dict[str, Any] = {"cross_entropy" if exclusive else "bce": {}}
    terms |= {"weighted_supervised": {"weight": 0.3, "tau": 0.3}}
    tree = TREE | {"seed": seed, "run": {"dir": str(run)}, "objective": terms}
    tree["data"] = TREE["data"] | {"path": str(data)}
    tree["data"]["protocol"] = TREE["data"]["protocol"] | protocol
    tree["train"] = {"epochs": steps, "steps": steps, "cpu_threads": 1}
    return float(pretrain(parse_config(tree))["f1_weighted"])


def cases(folder: Path, data: Path, exclusive: bool, seed: int, steps: int) -> dict[str, float]:
    """Returns the score of each case of one data set; `errors` is what the audit says."""
    errors = judge(folder, data, exclusive, seed)
    found: dict[str, float] = {"errors": errors}
    found["noisy"] = score(folder / "noisy", data, exclusive, seed, steps)
    for name, choice in (("amended", "wrong"), ("unknown", "unknown")):
        target = data
        if errors:
            target = folder / f"data-{name}"
            given = {"data": str(data), "decisions": folder / "labels.csv", "undecided": choice}
            build(Amended.model_validate(given), target, progress=False)
        found[name] = score(folder / name, target, exclusive, seed, steps)
    left = {"leave_out": str(folder / "left-out.csv")} if errors else {}
    found["left out"] = score(folder / "left-out", data, exclusive, seed, steps, **left)
    weights = {"label_weights": str(folder / "labels.parquet")}
    return found | {"weighed": score(folder / "weighed", data, exclusive, seed, steps, **weights)}


def lines(args: argparse.Namespace, name: str, data: Set) -> Iterator[list[str]]:
    """Yields a row for each case, of all seeds."""
    noisy, clean = list[dict[str, float]](), list[dict[str, float]]()
    for seed in range(args.seeds):
        random = np.random.default_rng(seed)
        split = np.where(random.random(len(data[1])) < 0.5, "train", "test")
        given, _ = change(data[1], data[2], args.rate, "even", random)
        given = np.where((split == "train")[:, None], given, data[1])
        for found, labels, kind in ((noisy, given, "noisy"), (clean, data[1], "clean")):
            folder = args.out / f"{name}-{seed}-{kind}"
            where = shards(folder, data, labels, split)
            found.append(cases(folder, where, data[2], seed, args.steps))
            print(name, seed, kind, found[-1], flush=True)
    cost = np.mean([c["noisy"] - n["noisy"] for c, n in zip(clean, noisy, strict=True)])
    for case in CASES:
        gain = [one[case] - one["noisy"] for one in noisy]
        row = [name, case, f"{np.mean([one[case] for one in noisy]):.3f}", paired(gain)]
        row.append(f"{np.mean(gain) / cost:.2f}" if case != "noisy" else f"cost {cost:.3f}")
        row.append(f"{np.mean([one[case] for one in clean]):.3f}")
        yield [*row, paired([one[case] - one["noisy"] for one in clean])]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shared", type=Path, default=Path("../shared/data"))
    parser.add_argument("--sets", nargs="*", choices=READERS, default=["digits", "scene"])
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    heads = [
        "set",
        "labels",
        "F1, 10 % wrong",
        "less noisy",
        "won back",
        "F1, none planted",
        "less",
    ]
    sets = {name: READERS[name](args.shared) for name in args.sets}
    print(markdown(heads, [row for name, x in sets.items() for row in lines(args, name, x)]))


if __name__ == "__main__":
    main()
