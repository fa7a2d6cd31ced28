"""Planted faults that `heron audit` finds, beside cleanlab and beside plain confidence.

    python -m benchmarks.audit --shared ../shared/data
    python -m benchmarks.audit --sets digits --draws 100 --rates 0.1

It needs `pip install cleanlab`, whose licence (AGPL) keeps it out of what is installed for tests.

Labels are changed (evenly; of one class into the next; or ones removed), or second views exchanged,
in several draws. For labels: average precision, beside cleanlab's normalised margin and
self-confidence (of several labels, its score of each) on the same out-of-fold probabilities; and in
how many draws the stated interval of recall holds the true one. For pairs: beside the cosine of the
pair alone, in the same canonical variables.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t as student
from sklearn.datasets import load_digits
from sklearn.metrics import average_precision_score

from benchmarks.recipe_sets import SETS
from heron.audit.labels import LabelModel, Near, suspicion
from heron.audit.pairs import score_pairs
from heron.audit.planting import estimate
from heron.evaluation.knn import exact_nearest
from heron.studies.text import markdown

Set = tuple[Any, Any, bool]  # features, labels as 0/1, whether they exclude each other
KINDS = ("even", "next", "removed")


def digits(_: Path) -> Set:
    """The pixels of scikit-learn's 1,797 digits."""
    data = load_digits()
    return data.data.astype(np.float32), np.eye(10, dtype=np.float32)[data.target], True


def scene(shared: Path) -> Set:
    """Mulan's Scene: 2,407 rows of 294 columns, 6 labels."""
    rows = list[list[float]]()
    for part in ("train", "test"):
        text = (shared / "scene" / f"scene-{part}.arff").read_text().split("@data")[1]
        rows += [[float(cell) for cell in line.split(",")] for line in text.split() if line]
    both = np.array(rows, np.float32)
    return both[:, :294], both[:, 294:], False


def texture(shared: Path) -> Set:
    """UCI's texture: 5,500 rows of 40 columns, 11 classes."""
    both = SETS["texture"].arrays(shared)
    classes = both["labels"]
    return both["columns"], np.eye(classes.max() + 1, dtype=np.float32)[classes], True


def embedded(folder: Path) -> Set:
    """What `heron embed` wrote: the layer `hidden`."""
    from heron.retrieval.embeddings import Embeddings

    source = Embeddings.open(folder)
    rows = np.flatnonzero(source.samples.known)
    labels = source.samples.targets[rows].astype(np.float32)
    return source.take("hidden", rows), labels, source.samples.exclusive


READERS: dict[str, Callable[[Path], Set]] = {"digits": digits, "scene": scene, "texture": texture}


def change(y: Any, exclusive: bool, rate: float, kind: str, random: np.random.Generator) -> Any:
    """Returns changed labels and which are, [rows, labels], or [rows, 1] of classes."""
    if exclusive:
        wrong = random.random(len(y)) < rate
        by = random.integers(1, y.shape[1], len(y)) if kind == "even" else 1
        given = np.where(wrong, (y.argmax(1) + by) % y.shape[1], y.argmax(1))
        return np.eye(y.shape[1], dtype=np.float32)[given], wrong[:, None]
    wrong = random.random(y.shape) < rate
    if kind == "removed":
        wrong &= y == 1
    return np.where(wrong, 1 - y, y).astype(np.float32), wrong


def judged(data: Set, near: Near, rate: float, kind: str, draw: int) -> dict[str, float]:
    """Returns the scores of one draw."""
    x, y, exclusive = data
    given, wrong = change(y, exclusive, rate, kind, np.random.default_rng(draw))
    model = LabelModel.of(x, given, exclusive, near, seed=draw)
    probability = model.probabilities(given)
    found = suspicion(probability, given, exclusive)
    stated = estimate(model, given, probability, found, draw)
    listed = np.argsort(-found.reshape(-1), kind="stable")[: stated.errors]
    true = wrong.reshape(-1)[listed].sum() / max(1, wrong.sum())
    alone = model.out_of_fold(given)
    scores = {"heron": found, "confidence": suspicion(alone, given, exclusive)}
    scores |= cleanlab(alone, given, exclusive)
    precision = {k: average_precision_score(wrong.ravel(), v.ravel()) for k, v in scores.items()}
    count = int(wrong.sum())
    recall = {
        f"{k} recall": wrong.ravel()[np.argsort(-v.ravel(), kind="stable")[:count]].mean()
        for k, v in scores.items()
    }
    counts = {"errors": count, "stated": stated.errors, "recall": stated.recall, "true": true}
    return precision | recall | counts | {"held": float(stated.low <= true <= stated.high)}


def cleanlab(probability: Any, y: Any, exclusive: bool) -> dict[str, Any]:
    """Returns 1 - cleanlab's quality of each label, by the same probabilities."""
    if exclusive:
        quality = import_module("cleanlab.rank").get_label_quality_scores(
            y.argmax(1), probability.astype(np.float64), method="normalized_margin"
        )
        return {"cleanlab": 1 - quality[:, None]}
    scorers = import_module("cleanlab.internal.multilabel_scorer").ClassLabelScorer
    columns = []
    for label in range(y.shape[1]):
        both = np.stack([1 - probability[:, label], probability[:, label]], 1).astype(np.float64)
        columns.append(1 - scorers.NORMALIZED_MARGIN(y[:, label].astype(int), both))
    return {"cleanlab": np.stack(columns, 1)}


def label_lines(args: argparse.Namespace, name: str, data: Set) -> Iterator[list[str]]:
    """Yields a row of the table for each kind and rate of faults."""
    unit = data[0] / np.linalg.norm(data[0], axis=1, keepdims=True)
    own = np.arange(len(unit))
    near = Near(*exact_nearest([(own, unit)], unit, own, 10))
    for kind in args.kinds:
        if (kind == "next") > data[2] or (kind == "removed" and data[2]):
            continue
        for rate in args.rates:
            draws = [judged(data, near, rate, kind, draw) for draw in range(args.draws)]
            mean = {key: float(np.mean([one[key] for one in draws])) for key in draws[0]}
            less = paired([one["heron"] - one["cleanlab"] for one in draws])
            yield [
                name, kind, f"{rate:g}", f"{mean['errors']:.0f}",
                *(f"{mean[key]:.3f}" for key in ("heron", "cleanlab", "confidence")), less,
                *(f"{mean[f'{key} recall']:.3f}" for key in ("heron", "cleanlab")),
                f"{mean['stated']:.0f}", f"{mean['recall']:.3f}", f"{mean['true']:.3f}",
                f"{sum(one['held'] for one in draws):.0f} of {args.draws}",
            ]  # fmt: skip
            print(f"{name} {kind} {rate:g}: {mean['heron']:.3f} {less}", flush=True)


def paired(differences: Sequence[float]) -> str:
    """Returns the mean difference with its 95 % interval of t."""
    mean = float(np.mean(differences))
    if len(differences) < 2:
        return f"{mean:+.4f}"
    error = np.std(differences, ddof=1) / np.sqrt(len(differences))
    return f"{mean:+.4f} ± {student.ppf(0.975, len(differences) - 1) * error:.4f}"


def pair_lines(args: argparse.Namespace, name: str, x: Any) -> Iterator[list[str]]:
    """Yields a row for each share of exchanged second views: halves of the columns are views."""
    half = x.shape[1] // 2
    for share in (0.005, 0.02, 0.1):
        ours, alone, counts, stated = [], [], [], []
        for draw in range(args.draws):
            random = np.random.default_rng(draw)
            rows = random.permutation(len(x))[: int(share * len(x)) // 2 * 2]
            second, wrong = x[:, half:].copy(), np.zeros(len(x), bool)
            second[rows], wrong[rows] = x[np.roll(rows, len(rows) // 2), half:], True
            found = score_pairs(x[:, :half], second, draw)
            ours.append(average_precision_score(wrong, found.suspicion))
            alone.append(average_precision_score(wrong, -found.cosine))
            counts.append(int(wrong.sum()))
            stated.append(found.estimate.errors)
        less = paired([a - b for a, b in zip(ours, alone, strict=True)])
        row = f"{np.mean(counts):.0f}", f"{np.mean(ours):.3f}", f"{np.mean(alone):.3f}", less
        yield [name, f"{share:g}", *row, f"{np.mean(stated):.0f}"]


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--shared", type=Path, default=Path("../shared/data"))
    parser.add_argument("--sets", nargs="*", choices=READERS, default=list(READERS))
    parser.add_argument("--embeddings", nargs="*", type=Path, default=[])
    parser.add_argument("--rates", nargs="+", type=float, default=[0.01, 0.05, 0.1, 0.2])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--draws", type=int, default=5)
    args = parser.parse_args()
    sets = {name: READERS[name](args.shared) for name in args.sets}
    sets |= {folder.name: embedded(folder) for folder in args.embeddings}
    rows = [line for name, data in sets.items() for line in label_lines(args, name, data)]
    heads = ["set", "faults", "rate", "count", "AP", "cleanlab", "confidence", "AP less cleanlab"]
    heads += ["recall at the count", "cleanlab", "stated count", "stated recall", "true", "held"]
    print(markdown(heads, rows))
    pairs = [line for name, data in sets.items() for line in pair_lines(args, name, data[0])]
    heads = ["set", "exchanged", "count", "AP", "cosine alone", "difference", "stated count"]
    print(markdown(heads, pairs))


if __name__ == "__main__":
    main()
