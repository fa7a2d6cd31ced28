"""Writes the report on negatives: an HTML page, its numbers as JSON, and the pairs as Parquet."""

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image

from heron.base.atomic import atomic_write, new_folder
from heron.base.errors import RetrievalError, ShardError
from heron.base.workers import ALONE, Executor
from heron.evaluation.collapse import collapsed
from heron.evaluation.negatives import RELATIONS
from heron.negatives.estimates import Estimate
from heron.negatives.measure import MIN_EXPECTED, measure_labels
from heron.negatives.neighbours import NearPairs, Question, find_neighbours
from heron.negatives.repulsion import Temperatures, measure_repulsion, near_weights
from heron.report import pages
from heron.report.charts import Chart, heat_map
from heron.report.pages import ADDRESS, PageLinks, plain_json
from heron.retrieval.embeddings import Embeddings, choose_data
from heron.retrieval.pictures import SamplePictures

if TYPE_CHECKING:
    from heron.retrieval.index import Index


MAX_MATRIX_LABELS = 200  # labels up to which the confusion matrices are written to the JSON
MAX_SIDE = 192  # of a picture, in pixels, at most
PAGE = Path(__file__).parent / "page"
MIN_PAIRS = 30  # pairs per point of a curve, at least
MAX_LABELS = 40  # labels on a heat map
BLUE_TO_RED = [[0, "#2166ac"], [0.5, "#f7f7f7"], [1, "#b2182b"]]
BLUE, ORANGE, GREEN, RED, GREY = "#2f80d6", "#d9730d", "#1f9d57", "#d6455d", "#888"


def report(
    embeddings: Embeddings,
    question: Question,
    out: Path,
    index: "Index | None" = None,
    data: str | None = None,
    address: str = ADDRESS,
    overwrite: bool = False,
    executor: Executor = ALONE,
    trust_code: bool = False,
) -> dict[str, Any]:
    """Writes report.html, negatives.json and pairs.parquet; returns what JSON holds.

    Neighbours are taken from `index`, which must be of the same embeddings, if it is given; `data`
    names the shards with the pictures if they are not those that the embeddings name. Pairs and
    confused labels link to the page of `heron serve` at `address`. Raises a RetrievalError if the
    question has no answer, or index or data are of other samples, and a ShardError if `data` is no
    data set, the disk is full, or a picture cannot be read. What `out` holds is refused or, with
    `overwrite`, moved aside. Blocks of anchors are measured by an executor; the files do not
    depend on it. `trust_code` is of the run: see `load_saved`.
    """
    with new_folder(out, overwrite, RetrievalError) as folder:
        links = PageLinks(address)
        pictures, no_pictures = find_pictures(embeddings, data)  # first, so that it fails early
        near = find_neighbours(embeddings, question, index, executor)
        manifest = embeddings.manifest
        temperatures = Temperatures.of_run(manifest.run, trust_code)
        repulsion, notes = measure_repulsion(near, temperatures)
        recall = index.manifest.recall if index else None
        neighbours = "exact"
        if index:
            quality = f"recall@{recall.k} {recall.value:.4f}" if recall else "recall not measured"
            neighbours = f"from the index {index.where} ({index.manifest.kind}), {quality}"
        numbers = {
            "embeddings": embeddings.where,
            "checkpoint": manifest.checkpoint,
            "run": manifest.run,
            "data": manifest.data,
            "views": embeddings.compares or "all",
            "samples": len(embeddings),
            "labelled": int(embeddings.samples.known.sum()),
            "question": question,
            "anchors": len(near.pairs.anchors),
            "others": len(near.pairs.others),
            "neighbours": neighbours,
            "recall": {"k": recall.k, "value": recall.value} if recall else None,
            "labels": {"kind": embeddings.samples.kind, "names": embeddings.samples.names},
            **measure_labels(near),
            **repulsion,
            "left_out": [*near.notes, *notes, *filter(None, [no_pictures])],
        }
        page = render(near, numbers, pictures, links)
        confusion = numbers["confusion"]
        if len(embeddings.samples.names) > MAX_MATRIX_LABELS:
            confusion = confusion | {"swapped": None, "expected": None}
        with atomic_write(folder / "pairs.parquet") as stream:
            pq.write_table(tabulate(near, temperatures), stream)
        with atomic_write(folder / "negatives.json") as stream:
            stream.write(plain_json(numbers | {"confusion": confusion}))
        with atomic_write(folder / "report.html") as stream:
            stream.write(page.encode())
    return numbers


def tabulate(near: NearPairs, temperatures: Temperatures) -> pa.Table:
    """Returns a table with a row for each anchor and neighbour."""
    anchors, k = near.numbers.shape
    g = near_weights(near, temperatures)
    keys = pa.array(near.embeddings.samples.keys.tolist(), pa.binary()).cast(pa.string())
    distance = (near.difference.reshape(-1) / near.pairs.max_difference).astype(np.float32)
    columns: dict[str, Any] = {
        "anchor": keys.take(pa.array(np.repeat(near.pairs.anchors, k))),
        "neighbour": keys.take(pa.array(near.numbers.reshape(-1))),
        "rank": np.tile(np.arange(1, k + 1, dtype=np.int32), anchors),
        "similarity": near.cosine.reshape(-1),
        "label_distance": distance,
        "g": pa.nulls(near.numbers.size, pa.float32()) if g is None else g.reshape(-1),
        "relation": pa.array(RELATIONS).take(pa.array(near.relation.reshape(-1))),
    }
    return pa.table(columns)


def render(
    near: NearPairs, numbers: dict[str, Any], pictures: SamplePictures | None, links: PageLinks
) -> str:
    """Returns the page as HTML: figures and tables, each with its findings in sentences."""
    precision, chance = numbers["confusion"]["precision"], numbers["confusion"]["random"]
    lift = precision.value / np.where(chance > 0, chance, np.nan)
    return pages.render(
        "report.html",
        PAGE,
        {"percent": percent, "number": number},
        name=f"Negatives of {Path(near.embeddings.where).resolve().name}",
        exclusive=near.pairs.exclusive,
        expected=MIN_EXPECTED,
        figures=draw_charts(numbers, near.pairs.exclusive, links),
        sheets={relation: _sheet(near, relation, pictures) for relation in ("hard", "false")},
        common=lambda pairs: Counter(n for p in pairs for n in p["both"]).most_common(1),
        collapsed=collapsed(numbers["collapse"]),
        lift=lift,
        order=[int(a) for a in np.argsort(lift) if np.isfinite(lift[a])],
        g_ends=_ends(numbers["weight"]),
        links=links,
        **numbers,
    )


def _ends(weight: dict[str, Any] | None) -> list[float]:
    """Returns the mean g of the least and of the most similar pairs."""
    if weight is None:
        return []
    points = np.flatnonzero(weight["pairs"] >= min(MIN_PAIRS, weight["pairs"].max()))
    return list(weight["by_label"].value[points[[-1, 0]]].tolist())


def _sheet(near: NearPairs, relation: str, pictures: SamplePictures | None) -> list[dict[str, Any]]:
    """Returns near pairs with the labels that they share and those that only one has."""
    samples, pairs = near.embeddings.samples, []
    for row, column in near.examples(relation):
        numbers = int(near.pairs.anchors[row]), int(near.numbers[row, column])
        left, right = (samples.label_names(number) for number in numbers)
        images = [(samples.key(n), pictures.of(samples, n)) for n in numbers] if pictures else []
        pairs.append(
            {
                "keys": [samples.key(number) for number in numbers],
                "pictures": [(key, _thumbnail(image)) for key, image in images if image],
                "cosine": float(near.cosine[row, column]),
                "distance": float(near.difference[row, column] / near.pairs.max_difference),
                "rank": column + 1,
                "both": [name for name in left if name in right],
                "left": [name for name in left if name not in right],
                "right": [name for name in right if name not in left],
            }
        )
    return pairs


def _thumbnail(picture: Image.Image) -> str:
    """Shrinks a picture in place, and returns it as a PNG in base64."""
    picture.thumbnail((MAX_SIDE, MAX_SIDE), Image.Resampling.LANCZOS)
    return pages.png(picture)


def find_pictures(
    embeddings: Embeddings, data: str | None = None
) -> tuple[SamplePictures | None, str]:
    """Returns the pictures of the samples, or None and why there are none; see `report`."""
    manifest = embeddings.manifest
    try:
        shards = choose_data(data, manifest.data, embeddings.where)
        pictures = SamplePictures.open(shards, manifest.run, trusted=False)
        pictures.of(embeddings.samples, 0)  # raises if the shards are others
        if pictures.views:
            return pictures, ""
        return None, "pictures: the data set has no view of images"
    except (RetrievalError, ShardError, OSError) as fault:
        if data is not None:
            raise
        return None, f"pictures: {fault}; if the data set was moved, pass it with --data"


def percent(share: "float | Estimate") -> str:
    """Formats a share in per cent, to three digits; an estimate with its interval."""
    if isinstance(share, Estimate):
        value, low, high = (percent(float(v)) for v in (share.value, share.low, share.high))
        return value if value == "–" else f"{value} ({low.removesuffix(' %')} to {high})"
    if not math.isfinite(share):
        return "–"
    return f"{np.format_float_positional(100 * share, 3, fractional=False, trim='-')} %"


def number(estimate: Estimate, digits: int = 3) -> str:
    """Formats an estimate with its interval."""
    if not math.isfinite(estimate.value):
        return "–"
    value, low, high = (f"{v:.{digits}f}" for v in (estimate.value, estimate.low, estimate.high))
    return f"{value} ({low} to {high})"


def draw_charts(numbers: Mapping[str, Any], exclusive: bool, links: PageLinks) -> dict[str, Chart]:
    """Returns every chart of the numbers of `negatives.json`, by name."""
    close, question = numbers["thresholds"]["close"] > 0, numbers["question"]
    charts = {
        "rates": _rates(numbers["false_negatives"], ["close", "same"] if close else ["same"]),
        "similarity": _similarity(numbers["similarity"], question.layer, close),
        "confusion": _confusion(numbers["confusion"], numbers["labels"]["names"], exclusive, links),
    }
    if (weight := numbers["weight"]) is not None:
        similarity, bins = "label similarity (1 − label distance)", len(weight["counts"])
        middles = (np.arange(bins) + 0.5) * (2 / bins) - 1
        for name, x, positions, pairs in (
            ("by_label", similarity, 1 - weight["distance"], weight["pairs"]),
            ("by_cosine", "cosine of the projections", middles, weight["counts"]),
        ):
            curve = _curve(
                positions[pairs >= MIN_PAIRS], weight[name][pairs >= MIN_PAIRS], BLUE, "g"
            )
            title = f"Mean g by {x}; points of {MIN_PAIRS} pairs or more"
            charts[f"g_{name}"] = Chart(title, [curve], _axes(x, "mean g"))
    return charts


def _axes(x: str, y: str, **xaxis: Any) -> dict[str, Any]:
    return {"height": 320, "xaxis": {"title": {"text": x}} | xaxis, "yaxis": {"title": {"text": y}}}


def _line(x: Any, y: Any, name: str, color: str, **style: Any) -> dict[str, Any]:
    data = {"x": np.asarray(x).tolist(), "y": np.asarray(y).tolist(), "name": name}
    return {"type": "scatter", "mode": "lines", "line": {"color": color} | style} | data


def _curve(x: Any, estimate: Estimate, color: str, name: str) -> dict[str, Any]:
    bars: dict[str, Any] = {"type": "data", "symmetric": False, "thickness": 1.2, "width": 3}
    bars["array"] = (estimate.high - estimate.value).tolist()
    bars["arrayminus"] = (estimate.value - estimate.low).tolist()
    return _line(x, estimate.value, name, color) | {"mode": "lines+markers", "error_y": bars}


def _rates(rates: Mapping[str, Any], kinds: list[str]) -> Chart:
    """Draws the rate of false negatives among the k nearest, by k, and that of random pairs."""
    traces, ks = [], rates["k"]
    for kind, color in zip(kinds, (BLUE, ORANGE), strict=False):
        near, chance = rates[kind]["near"], 100 * float(rates[kind]["random"].value)
        percent = Estimate(100 * near.value, 100 * near.low, 100 * near.high)
        traces.append(_curve(ks, percent, color, f"{kind} labels"))
        name = f"{kind} labels, random pairs"
        traces.append(_line(ks, [chance] * len(ks), name, color, dash="dot"))
    ticks = {"type": "log", "tickvals": ks, "ticktext": [str(k) for k in ks]}
    layout = _axes("k nearest neighbours", "false negatives, %", **ticks)
    layout["yaxis"]["rangemode"] = "tozero"
    return Chart("False negatives among the nearest, by k; dotted: random pairs", traces, layout)


def _similarity(similarity: Mapping[str, Any], layer: str, close: bool) -> Chart:
    """Draws shares of pairs by their cosine: of positives, negatives and hard negatives."""
    traces, ends = [], []
    for name, label, color in (
        ("close", "close labels" if close else "same labels", GREEN),
        ("others", "other labels", GREY),
        ("hard", "hard negatives", RED),
    ):
        counts = similarity[name]["histogram"]
        if counts.any():
            edges, share = np.linspace(-1, 1, len(counts) + 1), 100 * counts / counts.sum()
            steps = _line(edges, [*share, share[-1]], label, color, shape="hv", width=1.5)
            traces.append(steps | {"fill": "tozeroy"})
            visible = np.flatnonzero(share > 0.05)
            ends += [float(edges[visible[0]]), float(edges[visible[-1] + 1])]
    layout = _axes(f"cosine in '{layer}'", "share of pairs, %", range=[min(ends), max(ends)])
    return Chart("Cosine similarity of pairs by their labels", traces, layout)


def _confusion(
    confusion: Mapping[str, Any], names: list[str], exclusive: bool, links: PageLinks
) -> Chart:
    """Draws how often labels replace others, relative to chance; for classes, the share."""
    counts, chance = confusion["swapped"], confusion["expected"]
    shown = np.arange(len(counts))
    if len(counts) > MAX_LABELS:  # those that are confused most
        wrong = counts - np.diag(np.diag(counts))
        shown = np.sort(np.argsort(-(wrong.sum(0) + wrong.sum(1)), kind="stable")[:MAX_LABELS])
    block, values = np.ix_(shown, shown), np.full((len(shown), len(shown)), np.nan)
    base: NDArray[np.float64] = chance[block]
    comparable, colors = base >= MIN_EXPECTED, {"colorscale": BLUE_TO_RED, "zmin": 0, "zmax": 2}
    x, y = "the neighbour has, the anchor has not", "the anchor has, the neighbour has not"
    unit = "times as often as random pairs (grey: too few)"
    if exclusive:
        base = np.broadcast_to(counts.sum(1)[shown][:, None] / 100, values.shape)
        comparable, colors = base > 0, {"colorscale": "Viridis", "zmin": 0, "zmax": 100}
        x, y, unit = "the neighbour's class", "the anchor's class", "% of the anchor's neighbours"
    np.divide(counts[block], base, out=values, where=comparable)
    labels = [names[i] for i in shown]
    addresses = [
        [links.confused(a, b) if comparable[row, column] else "" for column, b in enumerate(labels)]
        for row, a in enumerate(labels)
    ]
    hover = "%{y}, %{x}: %{customdata} pairs, %{z:.3g} " + unit.partition(" (")[0]
    return heat_map(
        f"Which labels are confused: {unit}",
        labels,
        values,
        counts[block],
        (x, y),
        addresses,
        hovertemplate=f"{hover}<extra></extra>",
        showscale=True,
        **colors,
    )
