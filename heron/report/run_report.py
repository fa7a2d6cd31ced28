"""The report of a run: report.html, one file with scores, charts, rows and settings."""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from PIL import Image

from heron.base.atomic import atomic_write
from heron.data.reader import Reader
from heron.evaluation.evaluator import Predictions
from heron.evaluation.metrics import label_auc, label_f1
from heron.evaluation.scikit import KINDS, NAMES
from heron.experiment.config import Config
from heron.report import charts, pages
from heron.report.pages import ADDRESS, PageLinks, png
from heron.shards.show import DRAWABLE_CHANNELS
from heron.training.tracking import START, read_metrics, read_result

MULTI_LABEL_SCORES = {"auc_macro": "AUC, macro", "f1_weighted": "F1, weighted"}
CLASS_SCORES = {"accuracy": "accuracy", **MULTI_LABEL_SCORES}
FEWEST_ROWS = 5  # for a map and neighbours
Seeds = Sequence[Mapping[str, Any]]  # results of the run, then of its repetitions by seed
CONFUSED = 8  # pairs of classes that are listed
ANCHORS, NEIGHBOURS = 6, 5
SIDE = 96  # the longest side of a picture, in pixels


def write_report(
    folder: Path,  # of the run: metrics.jsonl, run.json and the results of other seeds are read
    config: Config,
    result: Mapping[str, Any],  # of result.json; `to_come`: what is still being computed
    predictions: Predictions,  # of all test rows
    embedding: Predictions | None,  # features of some of them; None: no map and no neighbours
    reader: Reader,  # names the labels and reads the pictures
) -> Path:
    """Writes report.html, which opens from disk and fetches nothing."""
    rows, name = read_metrics(folder / "metrics.jsonl"), folder.resolve().name
    seeds = [result, *map(read_result, sorted(folder.glob("seed-*/result.json")))]
    curves, stride = charts.curves(rows)
    multi_label = reader.manifest.labels.kind == "multi_label"
    scores = MULTI_LABEL_SCORES if multi_label else CLASS_SCORES
    setting = config.evaluate.threshold
    how = "F1: each method's threshold is fitted on the validation rows."  # one rule for all
    if setting != "fitted":
        how = f"F1: every method predicts a label above a probability of {setting:g}."
    threshold = float(result.get("threshold", 0.5 if setting == "fitted" else setting))
    labels = _labels(predictions, reader, threshold)
    scatter, near = None, []
    if embedding and embedding.hidden is not None and len(embedding.hidden) >= FEWEST_ROWS:
        near = nearest_rows(embedding, reader)
        keys, names = reader.sample_keys(embedding.rows), reader.manifest.labels.names
        order = [row["number"] for row in labels] or range(len(names))
        scatter = charts.label_map(embedding.hidden, keys, embedding.y, names, order)
    text = pages.render(
        "run.html",
        name=name,
        dir=shlex.quote(str(config.run.dir)),
        others=[path.parent.name for path in sorted(folder.glob("*/report.html"))],
        cards=_cards(seeds, scores, rows),
        comparisons=_comparisons(seeds, scores, name),
        to_come=result.get("to_come", []),
        seeds=len(seeds),
        curves=curves,
        stride=stride,
        monitoring=any(charts.MONITORING in chart.title for chart in curves),
        threshold=how if multi_label else "",
        map=scatter,
        embedded=len(embedding.rows) if embedding else 0,
        near=near,
        labels=labels,
        confusion=confused_classes(predictions, reader, PageLinks()),
        page=ADDRESS,
        facts=_facts(folder, config, result, reader),
        changed=_yaml(config.model_dump(mode="json", exclude_defaults=True)),
        config=_yaml(config.model_dump(mode="json")),
    )
    path = folder / "report.html"
    with atomic_write(path) as stream:
        stream.write(text.encode())
    return path


def _yaml(tree: Any) -> str:
    return str(yaml.safe_dump(tree, sort_keys=False, default_flow_style=None, width=100))


def _values(seeds: Seeds, score: str) -> list[float]:
    return [float(result[score]) for result in seeds if result.get(score) is not None]


def _comparisons(seeds: Seeds, scores: Mapping[str, str], name: str) -> list[charts.Chart]:
    """Returns charts of the run beside its baselines, seed by seed; none without baselines."""
    prefixes = {name: "", "plain network": "plain_"} | {NAMES[k]: f"{k}_" for k in KINDS}
    comparisons = []
    for score, title in scores.items():
        methods = {method: _values(seeds, prefix + score) for method, prefix in prefixes.items()}
        scored = {method: values for method, values in methods.items() if values}
        if len(scored) > 1:
            comparisons.append(charts.comparison(title, scored))
    return comparisons


def _cards(
    seeds: Seeds, scores: Mapping[str, str], rows: Sequence[Mapping[str, Any]]
) -> list[tuple[str, str, str, str]]:
    """Returns the headline numbers: title, value, spread, and the baselines' values or a note."""
    cards, result = [], seeds[0]
    for score, title in scores.items():
        values = _values(seeds, score)
        spread = f"± {np.std(values, ddof=1):.3f}" if len(values) > 1 else ""
        baselines = [
            f"{method} {np.mean(baseline):.3f}"
            for method, prefix in (("plain network", "plain_"), *((k, f"{k}_") for k in KINDS))
            if (baseline := _values(seeds, prefix + score))
        ]
        if (values or baselines) and not np.isnan(values).any():  # a run that trains has none yet
            mean = f"{np.mean(values):.3f}" if values else "–"
            cards.append((title, mean, spread, ", ".join(baselines)))
    rates = [row["samples_per_s"] for row in rows if row.get("samples_per_s")]
    steps = f"{result['steps']:,} steps, {result['epochs']:g} epochs"
    if (kept := result.get("kept_step")) is not None:
        steps += f"; scored as it was after step {kept:,}, the best by the validation rows"
    cards.append(("training", _duration(result["train_seconds"]), "", steps))
    if rates:
        processes = result["world_size"]
        word = "process" if processes == 1 else "processes"
        cards.append(("samples per second", f"{np.median(rates):,.0f}", "", f"{processes} {word}"))
    if memory := result.get("peak_memory_bytes"):
        cards.append(("peak memory", f"{memory / 1e9:.2f} GB", "", "per process"))
    return cards


def _duration(seconds: float) -> str:
    minutes, remainder = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {remainder} s" if minutes else f"{seconds:.3g} s"


def _labels(predictions: Predictions, reader: Reader, threshold: float) -> list[dict[str, Any]]:
    """Returns name, number, support, F1 and AUC of each label, the best AUC first."""
    if predictions.probability is None or not len(predictions.y):
        return []
    probability, y = predictions.probability, predictions.y
    exclusive = reader.manifest.labels.kind != "multi_label"
    f1, auc = label_f1(probability, y, None if exclusive else threshold), label_auc(probability, y)
    support = (y == 1).sum(0).tolist()
    rows = [
        {"name": name, "number": a, "support": support[a], "f1": f1[a], "auc": auc[a]}
        for a, name in enumerate(reader.manifest.labels.names)
    ]
    return sorted(rows, key=lambda row: -np.nan_to_num(row["auc"], nan=-1.0))


def confused_classes(predictions: Predictions, reader: Reader, links: PageLinks) -> dict[str, Any]:
    """Counts which of the mutually exclusive classes is predicted as which.

    `chart` is the confusion matrix, None if there are no classes or too many; `worst` lists true
    class, predicted class, number of rows and link of the most frequent confusions.
    """
    probability, labels = predictions.probability, reader.manifest.labels
    if probability is None or labels.kind == "multi_label" or not len(predictions.y):
        return {"chart": None, "worst": []}
    names = labels.names
    counts = np.zeros((len(names), len(names)), np.int64)
    np.add.at(counts, (predictions.y.argmax(1), probability.argmax(1)), 1)
    wrong = counts - np.diag(np.diag(counts))
    order = np.argsort(-wrong, axis=None, kind="stable")[:CONFUSED].tolist()
    worst = [
        (names[a], names[b], int(counts[a, b]), links.confused(names[a], names[b]))
        for a, b in (divmod(flat_index, len(names)) for flat_index in order)
        if wrong[a, b]
    ]
    if not 1 < len(names) <= charts.MAX_CLASSES:
        return {"chart": None, "worst": worst}
    cell_links = [
        [links.confused(names[a], names[b]) if counts[a, b] else "" for b in range(len(names))]
        for a in range(len(names))
    ]
    return {"chart": charts.confusion(counts, names, cell_links), "worst": worst}


def _facts(
    folder: Path, config: Config, result: Mapping[str, Any], reader: Reader
) -> dict[str, str]:
    """Returns the run's provenance: command, code, machine and data."""
    start = json.loads((folder / START).read_text())
    manifest = reader.manifest
    return {
        "command": str(start.get("command", "")),
        "started": f"{start['started']} on {start['host']}",
        "code": f"heron {result['version']}{', commit ' * bool(start.get('commit'))}"
        f"{start.get('commit') or ''}, torch {start.get('torch', '')}",
        "data": f"{manifest.dataset} in {config.data.path}, {int(reader.starts[-1]):,} rows, "
        f"fingerprint {manifest.fingerprint[:12]}",
        "run": f"fingerprint {str(result['fingerprint'])[:12]}, seed {config.seed}",
        "computed by": f"{result['strategy']}, {result['precision']}; contrast by "
        f"{result['contrast']}",
        "skipped rows": str(result["skipped_rows"]),
    }


def nearest_rows(embedding: Predictions, reader: Reader) -> list[list[dict[str, Any]]]:
    """Returns a few evenly spaced rows, each followed by its nearest neighbours by cosine.

    Each row has its `key`, `picture` (base64 of a PNG, "" without one), `labels` and `cosine` with
    the first, 1 for that itself; `more` are labels that the first lacks, `fewer` those that it has
    instead. Pictures come from the first stored view of images with 1 or 3 channels.
    """
    hidden, names = embedding.hidden, reader.manifest.labels.names
    assert hidden is not None
    length = np.linalg.norm(hidden, axis=1, keepdims=True)
    vectors = hidden / np.where(length > 0, length, 1)
    count = min(ANCHORS, len(vectors))
    anchors = np.unique(np.linspace(0, len(vectors) - 1, count + 2).astype(int)[1:-1])
    groups = []
    for anchor in anchors.tolist():
        cosine = vectors @ vectors[anchor]
        cosine[anchor] = np.inf
        near = np.argsort(-cosine)[: NEIGHBOURS + 1]
        cosine[anchor] = 1
        rows, has_label = embedding.rows[near], embedding.y[near] == 1
        labels = [[names[a] for a in np.flatnonzero(has).tolist()] for has in has_label]
        columns = reader.sample_keys(rows), _pictures(reader, rows), labels, cosine[near].tolist()
        groups.append(
            [
                {
                    "key": key,
                    "picture": picture,
                    "labels": own,
                    "cosine": score,
                    "more": [name for name in own if name not in labels[0]],
                    "fewer": [name for name in labels[0] if name not in own],
                }
                for key, picture, own, score in zip(*columns, strict=True)
            ]
        )
    return groups


def _pictures(reader: Reader, rows: NDArray[np.int64]) -> list[str]:
    images = (view for view in reader.manifest.views if view.kind == "image")
    drawable = (view.name for view in images if view.shape[2] in DRAWABLE_CHANNELS)
    if (stored := next(drawable, None)) is None:
        return [""] * len(rows)
    present = reader.present(rows, [stored])[:, 0].tolist()
    pixels = reader.read(stored, rows)
    return [_png(p) if is_present else "" for p, is_present in zip(pixels, present, strict=True)]


def _png(pixels: NDArray[np.uint8]) -> str:
    image = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    scale = SIDE / max(image.size)
    # Small pictures are enlarged without smoothing, so that the report shows what the encoder saw.
    method = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS
    return png(image.resize([max(1, round(side * scale)) for side in image.size], method))
