"""Measures what pushes pairs apart: HeroCon's learnt weight g, and who bears the repulsion."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from heron.base.errors import ConfigError
from heron.evaluation import collapse
from heron.evaluation.knn import Vectors
from heron.evaluation.negatives import BLOCK_PAIRS, LabelPairs, Numbers, relation, row_sums
from heron.experiment.config import load_saved
from heron.losses.objective import build_losses
from heron.negatives.estimates import Estimate, bootstrap, own_rank_correlation, rank_correlation
from heron.negatives.neighbours import NearPairs, measure_blocks
from heron.retrieval.embeddings import Layer
from heron.retrieval.exact import unit_vectors

PARTNERS = 100  # random others per anchor that enter the rank correlations of g
COSINES = 40  # bins of the curve of g by cosine
GAMMA = 0.5  # temperature of Assumption 1 if the run has none: the paper's, Section V-A
HARDENINGS: dict[str, tuple[str, float]] = {  # eta of Assumption 1: none, and those of Figure 4
    "none": ("exp", 0),
    "exp, beta 1": ("exp", 1),
    "exp, beta 2": ("exp", 2),
    "threshold exp(-0.5)": ("threshold", -0.5),
    "threshold exp(-0.1)": ("threshold", -0.1),
}
FALSE = {"same": 0, "close": 1}  # the last of `RELATIONS` that counts as a false negative
Sums = NDArray[np.float64]


@dataclass(frozen=True)
class Temperatures:
    """Which pairs the loss of the embeddings' run pushes apart, and how strongly."""

    tau: float = 1.0  # of f = exp(cos / tau)
    gamma: float = GAMMA  # of H-SCL's g = cos / gamma
    first: bool = False  # only the first view is an anchor
    cross_view: bool = False  # only other views of other samples are negatives
    source: str = "the default"  # where tau is from, in words

    @classmethod
    def of_run(cls, run: str | Path, trust_code: bool = False) -> "Temperatures":
        """Reads a run's config.yaml; if it cannot be read, returns defaults and says why."""
        path = Path(run) / "config.yaml"
        try:
            objective = load_saved(Path(run), ["model={}"], trust_code).objective
        except (ConfigError, OSError) as error:
            return cls(source=f"the default, because {str(error).splitlines()[0]}")
        gamma = getattr(objective.root.get("hard"), "tau", GAMMA)
        losses, sections = build_losses(objective), objective.terms()
        repelling = {name: loss for name, loss in losses.items() if loss.repels_all}
        if not repelling:
            return cls(gamma=gamma, source=f"the default: {path} has no unsupervised term")
        name, term = max(repelling.items(), key=lambda item: sections[item[0]].weight)
        source = f"objective.{name}.tau of {path}"
        if "input_projections" in term.needs.features:
            source += ", which compares inputs with projections; here, projections are compared"
        first = getattr(term, "anchors", "all") == "first"
        cross_view = getattr(term, "negatives", "all_views") == "cross_view"
        return cls(getattr(term, "tau", GAMMA), gamma, first, cross_view, source)

    def pairs(self, views: int) -> list[tuple[int, int]]:
        """Returns (u, j) if the loss pushes an anchor's view u apart from view j of others."""
        pairs = product(range(1 if self.first else views), range(views))
        return [(u, j) for u, j in pairs if u != j or not self.cross_view or views == 1]


def measure_repulsion(
    near: NearPairs, temperatures: Temperatures
) -> tuple[dict[str, Any], list[str]]:
    r"""Weighs all pairs of anchors and others as the losses do, a block of anchors at a time.

    HeroCon (KDD 2022, Eq. 4 and 5) weighs a negative by

    .. math:: g = \tfrac12 [e^{1 - cos(z_{iu}, H(z_{kj}))} + e^{1 - cos(z_{kj}, H(z_{iu}))}]

    which should be small if i and k are alike. The repulsion of a pair is its share of the gradient
    with respect to its cosine: f for InfoNCE, g f for HeroCon, over their sum over the anchor's
    negatives, with f = exp(cos / tau). Samples are compared without augmentation.

    H-SCL's Assumption 1 (Jiang et al., Section IV) says of an anchor x that E_{q_Hcol}[e^g] >=
    E_{q_H-SCL}[e^g], with g = cos / gamma (unrelated to HeroCon's g): weighted by a hardening
    eta(g), negatives with its label are nearer on average than those with another label. Then the
    H-SCL loss is below the H-UCL loss (Lemma 1).

    Returns the measures, with the keys of `negatives.json`; and what was left out, and why. Raises
    a RetrievalError if vectors have no direction.
    """
    pairs, seed, layers = near.pairs, near.question.seed, near.embeddings.layers
    layer: Layer = "projection" if "projection" in layers else "hidden"
    views = layers[layer].views if layer == "projection" else 1
    layers_read, notes = [layer], []
    if layer == "hidden":
        notes.append("there is no layer 'projection', so 'hidden' is measured, and without g")
    elif "weight" in layers:
        layers_read.append("weight")
    else:
        notes.append(
            "there is no layer 'weight', which HeroCon's models have, so g is not measured"
        )
    function = partial(_block_sums, near.close, temperatures, _draw_others(pairs, seed))
    blocks = measure_blocks(near.executor, near.embeddings, pairs, function, layers_read, views)
    anchors = unit_vectors(near.embeddings, layer, pairs.anchors, views)
    sums = {name: np.concatenate([block_sums[name] for block_sums in blocks]) for name in blocks[0]}
    return {
        "weight": _describe_weight(pairs, sums, seed) if "gf" in sums else None,
        "temperatures": temperatures,
        "repulsion": {name: _share(sums, last, seed) for name, last in FALSE.items()},
        "assumption_1": {name: _assumption(sums, last, seed) for name, last in FALSE.items()},
        "compared_layer": layer,
        "collapse": collapse.measure([torch.from_numpy(view) for view in anchors]),
    }, notes


def near_weights(near: NearPairs, temperatures: Temperatures) -> Vectors | None:
    """Returns the mean g of anchors and their neighbours, [anchors, k]; None without H(z)."""
    layers = near.embeddings.layers
    if not {"projection", "weight"} <= set(layers):
        return None
    views, numbers = layers["projection"].views, near.numbers
    weights = np.empty(numbers.shape, np.float32)
    size = max(1, BLOCK_PAIRS // (numbers.shape[1] * layers["projection"].dim))
    for start in range(0, len(numbers), size):
        block = slice(start, start + size)
        anchors, others = (
            [unit_vectors(near.embeddings, name, n, views) for name in ("projection", "weight")]
            for n in (near.pairs.anchors[block, None], numbers[block])
        )
        g = [_g(anchors, others, u, j) for u, j in temperatures.pairs(views)]
        weights[block] = np.mean(g, axis=0)[:, 0]
    return weights


def _g(anchors: list[Vectors], others: list[Vectors], u: int, j: int) -> Vectors:
    """Returns g of anchors in view u and others in view j, from z and H(z) [views, ..., dim]."""
    (z, h), (z_other, h_other) = anchors, others
    cosines = z[u] @ h_other[j].swapaxes(-1, -2), h[u] @ z_other[j].swapaxes(-1, -2)
    return np.asarray(0.5 * (np.exp(1 - cosines[0]) + np.exp(1 - cosines[1])))


def _draw_others(pairs: LabelPairs, seed: int) -> Numbers:
    """Draws positions in `pairs.others` for each anchor, never its own, [anchors, PARTNERS]."""
    shape = len(pairs.anchors), PARTNERS
    own_position = np.searchsorted(pairs.others, pairs.anchors)
    drawn = np.random.default_rng(seed).integers(len(pairs.others) - 1, size=shape)
    return np.asarray(drawn + (drawn >= own_position[:, None]), np.int32)  # tasks get all of them


def _block_sums(
    close: int,
    temperatures: Temperatures,
    partners: Numbers,
    pairs: LabelPairs,
    block: slice,
    anchors: list[Vectors],
    others: list[Vectors],
) -> dict[str, Sums]:
    """Returns sums over the others of each anchor of a block, by name, [anchors, ...].

    `counts`, `f`, `gf`, and `eta` and `eta e` of each hardening are summed by the relation of the
    labels, [anchors, anchor views, 3]. With g, `by_label` and `by_cosine` are its `_curve` by label
    difference and by cosine, and `drawn` holds g, difference and cosine of randomly drawn pairs,
    [anchors, 3, PARTNERS].
    """
    views, repelled = len(others[0]), temperatures.pairs(len(others[0]))
    difference, anchor_itself = pairs.differences(block), pairs.max_difference + 1
    sum_by_relation = _summer(relation(difference, close, anchor_itself))
    sums = defaultdict[str, Sums](lambda: np.zeros((len(difference), views, 3)))
    mean_g, mean_cosine = np.zeros((2, *difference.shape), np.float32)
    for u, j in product(range(views), repeat=2):
        cosine = anchors[0][u] @ others[0][j].T
        values = dict(_hardenings(cosine, temperatures.gamma))
        if (u, j) in repelled:
            values["counts"] = np.ones_like(cosine)
            values["f"] = np.exp((cosine - 1) / temperatures.tau)  # the shift cancels in a share
            if len(others) == 2:
                g = _g(anchors, others, u, j)
                values["gf"] = g * values["f"]
                mean_g += g / len(repelled)
                mean_cosine += cosine / len(repelled)
        for name, value in values.items():
            sums[name][:, u] += sum_by_relation(value)
    for name in {"counts", "f", "gf"} & set(sums):
        sums[name] = sums[name][:, : 1 if temperatures.first else views]
    if "gf" in sums:
        values_drawn = mean_g, difference, mean_cosine
        drawn = [np.take_along_axis(value, partners[block], 1) for value in values_drawn]
        bins = ((mean_cosine + 1) * (COSINES / 2)).astype(np.int64).clip(0, COSINES - 1)
        bins[difference == anchor_itself] = COSINES
        sums["by_label"] = _curve(difference, anchor_itself, mean_g)
        sums["by_cosine"] = _curve(bins, COSINES, mean_g)
        sums["drawn"] = np.stack(drawn, 1)
    return dict(sums)


def _summer(groups: Numbers) -> Callable[[Vectors], Sums]:
    """Returns a function that sums values [anchors, others] by group 0 to 2; it modifies them.

    Group 2 holds most values, so it is summed directly, after the others are set to 0. Group 3, the
    anchor itself, is left out.
    """
    minority = np.flatnonzero(groups != 2)
    cells = groups.flat[minority] + 4 * (minority // groups.shape[1])

    def total(values: Vectors) -> Sums:
        sums = np.bincount(cells, values.flat[minority], 4 * len(values)).reshape(-1, 4)
        values.flat[minority] = 0
        sums[:, 2] = values.sum(1, dtype=np.float64)
        return np.asarray(sums[:, :3])

    return total


def _curve(cells: Numbers, count: int, g: Vectors) -> Sums:
    """Returns sums and counts of g by cell, [anchors, 2, count]; the cell `count` is left out."""
    sums, counts = row_sums(cells, count + 1, g), row_sums(cells, count + 1)
    return np.stack([sums, counts], 1)[..., :-1]


def _hardenings(cosine: Vectors, gamma: float) -> Iterator[tuple[str, Vectors]]:
    e = np.exp((cosine - 1) / gamma)  # the shift cancels in the ratio of the sums
    for name, (kind, value) in HARDENINGS.items():
        eta = e**value if kind == "exp" else (cosine / gamma >= value).astype(np.float32)
        yield f"eta {name}", eta
        yield f"eta e {name}", eta * e


def _describe_weight(pairs: LabelPairs, sums: dict[str, Sums], seed: int) -> dict[str, Any]:
    """Returns g by label distance and by cosine, and its Spearman correlations over drawn pairs."""
    g, difference, cosine = sums["drawn"].swapaxes(0, 1)
    by_label, by_cosine = (sums[name].swapaxes(0, 1) for name in ("by_label", "by_cosine"))
    return {
        "distance": np.arange(pairs.max_difference + 1) / pairs.max_difference,
        "by_label": bootstrap(by_label[0], by_label[1], seed),
        "pairs": by_label[1].sum(0).astype(np.int64),
        "by_cosine": bootstrap(by_cosine[0], by_cosine[1], seed),
        "counts": by_cosine[1].sum(0).astype(np.int64),
        "spread": float(g.std()),
        "label_rank": rank_correlation(g, -difference, seed),
        "anchor_rank": own_rank_correlation(g, -difference, seed),
        "cosine_rank": rank_correlation(g, cosine, seed),
    }


def _share(sums: dict[str, Sums], last: int, seed: int) -> dict[str, Estimate | None]:
    """Returns the share of an anchor's repulsion that falls on false negatives, its views' mean.

    `count` is their share of the negatives, `without` of the sum of f over negatives, `weighted` of
    the sum of g f; `ratio` is weighted over without: below 1, g spares false negatives.
    """
    ones = np.ones(len(sums["f"]))
    shares = {
        name: (sums[name][..., : last + 1].sum(-1) / sums[name].sum(-1)).mean(1)
        for name in {"counts", "f", "gf"} & set(sums)
    }
    g = shares.get("gf")
    return {
        "count": bootstrap(shares["counts"], ones, seed),
        "without": bootstrap(shares["f"], ones, seed),
        "weighted": None if g is None else bootstrap(g, ones, seed),
        "ratio": None if g is None else bootstrap(g, shares["f"], seed),
    }


def _assumption(sums: dict[str, Sums], last: int, seed: int) -> dict[str, dict[str, Any]]:
    """Returns the share of anchors for which Assumption 1 `holds`, by hardening.

    Others up to the relation `last` count as having the anchor's label. The assumption is
    `undefined` if the hardening admits no negative, or none with the anchor's label.
    """
    shares = {}
    for name in HARDENINGS:
        eta, eta_e = sums[f"eta {name}"], sums[f"eta e {name}"]
        near, near_e = (v[..., : last + 1].sum(-1) for v in (eta, eta_e))
        far, far_e = (v[..., last + 1 :].sum(-1) for v in (eta, eta_e))
        defined = (near > 0) & (far > 0)
        holds = defined & (near_e * far >= far_e * near)
        estimate = bootstrap(holds.sum(1), defined.sum(1), seed)
        shares[name] = {"holds": estimate, "undefined": float(1 - defined.mean())}
    return shares
