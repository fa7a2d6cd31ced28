"""What pushes pairs apart: HeroCon's learnt weight g, and which samples bear the repulsion."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from heron.pipeline.config.errors import ConfigError
from heron.pipeline.config.experiment import load_config
from heron.pipeline.evaluation.collapse import measure as spread
from heron.pipeline.negatives.estimates import (
    Estimate,
    bootstrap,
    own_rank_correlation,
    rank_correlation,
)
from heron.pipeline.negatives.measure import CELLS, Pairs, sums, tiers
from heron.pipeline.retrieval.embeddings import Embeddings, Layer
from heron.pipeline.retrieval.nearest import unit

PARTNERS = 100  # random others of an anchor whose g goes into the rank correlations
CURVE = 41  # points of the curve of g, at most
TERMS = (
    "weighted_unsupervised",
    "nt_xent",
    "cmc",
    "input_weighted_unsupervised",
    "single_view_unsupervised",
)
GAMMA = 0.5  # temperature of Assumption 1 where the run has none: the paper's, Section V-A
HARDENINGS: dict[str, tuple[str, float]] = {  # eta of Assumption 1: none, and those of Figure 4
    "none": ("exp", 0),
    "exp, beta 1": ("exp", 1),
    "exp, beta 2": ("exp", 2),
    "threshold exp(-0.5)": ("threshold", -0.5),
    "threshold exp(-0.1)": ("threshold", -0.1),
}
Arrays = NDArray[np.float32]


@dataclass(frozen=True)
class Temperatures:
    """Of the run that made the embeddings.

    Attributes:
        tau: of f = exp(cos / tau).
        gamma: of H-SCL's g = cos / gamma.
        first: whether only the first view is an anchor.
        cross_view: whether only other views of other samples are negatives.
        source: where tau is from, in words.
    """

    tau: float = 1.0
    gamma: float = GAMMA
    first: bool = False
    cross_view: bool = False
    source: str = "the default"

    @classmethod
    def of_run(cls, run: str | Path) -> "Temperatures":
        """Those in a run's config.yaml; defaults, and why, where it cannot be read."""
        path = Path(run) / "config.yaml"
        try:
            objective = load_config(path).objective
        except (ConfigError, OSError) as error:
            return cls(source=f"the default, since {str(error).splitlines()[0]}")
        gamma = getattr(objective.root.get("hard"), "tau", GAMMA)
        for name in TERMS:
            if (term := objective.root.get(name)) is not None:
                source = f"objective.{name}.tau of {path}"
                if name == "single_view_unsupervised":
                    source += ", which compares inputs with projections; here it is projections"
                return cls(
                    getattr(term, "tau", GAMMA),
                    gamma,
                    getattr(term, "anchors", "all") == "first",
                    name == "cmc" or getattr(term, "negatives", "all_views") == "cross_view",
                    source,
                )
        return cls(gamma=gamma, source=f"the default: {path} has no unsupervised term")

    def pairs(self, views: int) -> list[tuple[int, int]]:
        """Views u of an anchor and j of another sample that the loss pushes apart."""
        anchors = range(1 if self.first else views)
        both = [(u, j) for u in anchors for j in range(views)]
        return [(u, j) for u, j in both if u != j or not self.cross_view or views == 1]


@dataclass(frozen=True)
class Weight:
    """HeroCon's g over pairs of different samples.

    Attributes:
        distance: label distance of the curve's points, [points].
        by_label: mean g at each, [points].
        pairs: how many pairs each is of, [points].
        by_cosine: mean g by cosine of the projections in `CURVE` - 1 bins from -1 to 1.
        counts: how many pairs each of these is of.
        spread: standard deviation of g over drawn pairs.
        label_rank: Spearman's rank correlation of g and label similarity, over drawn pairs.
        anchor_rank: the mean over anchors of the rank correlation among each anchor's own pairs.
        cosine_rank: Spearman's rank correlation of g and cosine.
    """

    distance: NDArray[np.float64]
    by_label: Estimate
    pairs: NDArray[np.int64]
    by_cosine: Estimate
    counts: NDArray[np.int64]
    spread: float
    label_rank: Estimate
    anchor_rank: Estimate
    cosine_rank: Estimate


@dataclass(frozen=True)
class Share:
    """How much of an anchor's repulsion falls on false negatives.

    Attributes:
        count: their share among the negatives.
        without: their share of the sum of f over negatives, as InfoNCE weighs them.
        weighted: their share of the sum of g f, as HeroCon does; None without g.
        ratio: `weighted` over `without`: below 1, g spares false negatives.
    """

    count: Estimate
    without: Estimate
    weighted: Estimate | None
    ratio: Estimate | None


@dataclass(frozen=True)
class Assumption:
    """H-SCL's Assumption 1: the share of anchors for which it holds.

    Attributes:
        holds: the share among anchors for which it says something.
        undefined: the share for which it does not: no negative, or none of the anchor's labels, is
            admitted.
    """

    holds: Estimate
    undefined: float


@dataclass(frozen=True)
class Repulsion:
    """What `measure` found.

    Attributes:
        layer: whose vectors were compared: `projection`, or `hidden` where there is none.
        temperatures: of f and of Assumption 1.
        weight: g; None where the embeddings have no layer of that name.
        shares: on false negatives, by what counts as one: `same` labels, `close` ones.
        assumption: of `same` and `close`, by hardening.
        collapse: of the anchors' vectors: see `pipeline.evaluation.collapse.measure`.
        notes: what was left out, and why.
    """

    layer: Layer
    temperatures: Temperatures
    weight: Weight | None
    shares: dict[str, Share]
    assumption: dict[str, dict[str, Assumption]]
    collapse: dict[str, float]
    notes: list[str]


def measure(
    embeddings: Embeddings, pairs: Pairs, close: int, temperatures: Temperatures, seed: int
) -> Repulsion:
    r"""Weigh all pairs of anchors and others as the losses do, some anchors at a time.

    HeroCon (KDD 2022, Eq. 4 and 5) weighs a negative by

    .. math:: g = \tfrac12 [e^{1 - cos(z_{iu}, H(z_{kj}))} + e^{1 - cos(z_{kj}, H(z_{iu}))}]

    which is to be small where i and k are alike. The repulsion of a pair is its part of the
    gradient by its cosine: f of InfoNCE, g f of HeroCon, over their sum over the negatives of the
    anchor, with f = exp(cos / tau). Samples are compared as they are, without augmentation.

    H-SCL's Assumption 1 (Jiang et al., Section IV) says of an anchor x that
    E_{q_Hcol}[e^g] >= E_{q_H-SCL}[e^g], with g = cos / gamma (no relation of HeroCon's): negatives
    with its label, weighted by a hardening eta(g), are nearer in the mean than those with another
    label. Then the H-SCL loss is below the H-UCL loss (Lemma 1).

    Args:
        embeddings: with the layers `projection` and `weight`, or less.
        pairs: anchors and others.
        close: level up to which labels are close.
        temperatures: of the run.
        seed: of every draw.

    Raises:
        RetrievalError: vectors have no direction.
    """
    notes = []
    layers = embeddings.manifest.layers
    layer: Layer = "projection" if "projection" in layers else "hidden"
    views = layers[layer].views if layer == "projection" else 1
    z = _views(embeddings, layer, pairs, views)
    h = None
    if layer == "hidden":
        notes.append("without the layer 'projection' all is measured on 'hidden', and without g")
    elif "weight" not in layers:
        notes.append(
            "without the layer 'weight', which HeroCon's models have, nothing is said of g"
        )
    else:
        h = _views(embeddings, "weight", pairs, views)
    total = _Sums(pairs, close, temperatures, views, seed)
    for part in pairs.blocks():
        total.add(part, z, h)
    return Repulsion(
        layer,
        temperatures,
        None if h is None else total.weight(),
        {name: total.share(tier, h is not None) for name, tier in (("same", 0), ("close", 1))},
        {name: total.assumption(tier) for name, tier in (("same", 0), ("close", 1))},
        spread([torch.from_numpy(view) for view in z[0]]),
        notes,
    )


def near_weights(
    embeddings: Embeddings, pairs: Pairs, numbers: NDArray[np.int64], temperatures: Temperatures
) -> Arrays | None:
    """Mean g of anchors and their neighbours, [anchors, neighbours]; None where there is none."""
    layers = embeddings.manifest.layers
    if not {"projection", "weight"} <= set(layers):
        return None
    views = layers["projection"].views
    out = np.empty(numbers.shape, np.float32)
    size = max(1, CELLS // (numbers.shape[1] * layers["projection"].dim))
    for start in range(0, len(numbers), size):
        part = slice(start, start + size)
        near = Pairs(pairs.samples, pairs.anchors[part], np.unique(numbers[part]))
        place = np.searchsorted(near.others, numbers[part])
        z = _views(embeddings, "projection", near, views)
        h = _views(embeddings, "weight", near, views)
        total = np.zeros(place.shape, np.float32)
        for u, j in temperatures.pairs(views):
            a = np.einsum("nd,nkd->nk", z[0][u], h[1][j][place])
            b = np.einsum("nd,nkd->nk", h[0][u], z[1][j][place])
            total += 0.5 * (np.exp(1 - a) + np.exp(1 - b))
        out[part] = total / len(temperatures.pairs(views))
    return out


def _g(z: Arrays, h: Arrays, z_other: Arrays, h_other: Arrays) -> Arrays:
    return np.asarray(0.5 * (np.exp(1 - z @ h_other.T) + np.exp(1 - h @ z_other.T)))


def _views(embeddings: Embeddings, layer: Layer, pairs: Pairs, views: int) -> list[Arrays]:
    """Unit vectors of the anchors and of the others, view by view: each [views, samples, dim]."""
    found = []
    for numbers in (pairs.anchors, pairs.others):
        vectors = embeddings.take(layer, numbers).reshape(len(numbers), views, -1)
        found.append(np.ascontiguousarray(unit(vectors, pairs.samples, numbers).swapaxes(0, 1)))
    return found


class _ByTier:
    """Sums over others by tier; few are near, so that all else is summed without being sorted."""

    def __init__(self, tier: NDArray[np.int64]) -> None:
        """Find the near ones of tiers [anchors, others]."""
        self.near = np.flatnonzero(tier != 2)
        self.cells = tier.reshape(-1)[self.near] + 4 * (self.near // tier.shape[1])

    def __call__(self, values: Arrays) -> NDArray[np.float64]:
        """Sum values [anchors, others] to [anchors, 3]; those of the near ones are set to 0."""
        flat = values.reshape(-1)
        found = np.zeros((len(values), 3))
        counted = np.bincount(self.cells, flat[self.near], 4 * len(values))
        found[:, :2] = counted.reshape(-1, 4)[:, :2]
        flat[self.near] = 0
        found[:, 2] = values.sum(1, dtype=np.float64)
        return found


class _Sums:
    """Sums over the negatives of every anchor, by how its labels and theirs differ."""

    def __init__(
        self, pairs: Pairs, close: int, temperatures: Temperatures, views: int, seed: int
    ) -> None:
        self.pairs, self.temperatures, self.seed = pairs, temperatures, seed
        self.tier = tiers(pairs, close)
        self.views = temperatures.pairs(views)
        self.all_views = [(u, j) for u in range(views) for j in range(views)]
        count = len(pairs.anchors)
        self.counts = np.zeros((count, 3))
        self.f = np.zeros((count, views, 3))
        self.gf = np.zeros((count, views, 3))
        self.eta = np.zeros((len(HARDENINGS), count, views, 3))
        self.eta_e = np.zeros((len(HARDENINGS), count, views, 3))
        step = -(-(pairs.scale + 1) // CURVE)  # levels that share a point of the curve
        self.point = np.append(np.arange(pairs.scale + 1) // step, -1)
        self.point[-1] = self.points = int(self.point.max()) + 1
        self.by_label = np.zeros((2, count, self.points))
        self.by_cosine = np.zeros((2, count, CURVE - 1))
        self.partners = pairs.draw(PARTNERS, seed)
        self.drawn = np.empty((3, count, PARTNERS), np.float32)  # g, label similarity, cosine

    def add(self, part: slice, z: list[Arrays], h: list[Arrays] | None) -> None:
        """Add the pairs of some anchors with all others."""
        tau, gamma = self.temperatures.tau, self.temperatures.gamma
        level = self.pairs.levels(part)
        by_tier = _ByTier(self.tier[level])
        self.counts[part] = by_tier(np.ones(level.shape, np.float32))
        mean_g = np.zeros(level.shape, np.float32)
        mean_cos = np.zeros(level.shape, np.float32)
        for u, j in self.all_views:
            cos = z[0][u, part] @ z[1][j].T
            for number, (kind, value) in enumerate(HARDENINGS.values()):
                shifted = np.exp((cos - 1) / gamma)  # the shift cancels in the ratio of the sums
                eta = shifted**value if kind == "exp" else (cos / gamma >= value).astype(np.float32)
                self.eta_e[number, part, u] += by_tier(eta * shifted)
                self.eta[number, part, u] += by_tier(eta)
            if (u, j) not in self.views:
                continue
            f = np.exp((cos - 1) / tau)  # here it cancels in every share
            if h is not None:
                g = _g(z[0][u, part], h[0][u, part], z[1][j], h[1][j])
                self.gf[part, u] += by_tier(g * f)
                mean_g += g / len(self.views)
                mean_cos += cos / len(self.views)
            self.f[part, u] += by_tier(f)
        if h is not None:
            self._curves(part, level, mean_g, mean_cos)

    def _curves(self, part: slice, level: NDArray[np.int64], g: Arrays, cos: Arrays) -> None:
        """Add to the curves of g, and keep it of the pairs that were drawn."""
        point = self.point[level]
        self.by_label[0, part] = sums(point, self.points + 1, g)[:, :-1]
        self.by_label[1, part] = sums(point, self.points + 1)[:, :-1]
        place = np.clip(((cos + 1) * ((CURVE - 1) / 2)).astype(np.int64), 0, CURVE - 2)
        place[level == self.pairs.own] = CURVE - 1
        self.by_cosine[0, part] = sums(place, CURVE, g)[:, :-1]
        self.by_cosine[1, part] = sums(place, CURVE)[:, :-1]
        for number, values in enumerate((g, -level.astype(np.float32), cos)):
            self.drawn[number, part] = np.take_along_axis(values, self.partners[part], 1)

    def weight(self) -> Weight:
        """The curves of g, and its rank correlations."""
        g, alike, cosine = self.drawn
        top, bottom = self.by_label
        level = np.arange(self.pairs.scale + 1)
        steps = np.bincount(self.point[:-1])
        ranks = (rank_correlation(g, alike, self.seed), own_rank_correlation(g, alike, self.seed))
        return Weight(
            np.bincount(self.point[:-1], level) / steps / self.pairs.scale,
            bootstrap(top, bottom, self.seed),
            bottom.sum(0).astype(np.int64),
            bootstrap(self.by_cosine[0], self.by_cosine[1], self.seed),
            self.by_cosine[1].sum(0).astype(np.int64),
            float(g.std(dtype=np.float64)),
            *ranks,
            rank_correlation(g, cosine, self.seed),
        )

    def share(self, tier: int, weighted: bool) -> Share:
        """The repulsion on negatives up to a tier, the mean over the views of each anchor."""
        anchors = sorted({u for u, _ in self.views})

        def part(total: NDArray[np.float64]) -> NDArray[np.float64]:
            found: NDArray[np.float64] = total[..., : tier + 1].sum(-1) / total.sum(-1)
            return found if found.ndim == 1 else found[:, anchors].mean(1)

        with np.errstate(invalid="ignore"):  # views that are no anchors
            count, without = part(self.counts), part(self.f)
            given = part(self.gf) if weighted else None
        ones = np.ones(len(count))
        plain = bootstrap(count, ones, self.seed), bootstrap(without, ones, self.seed)
        if given is None:
            return Share(*plain, None, None)
        ratio = bootstrap(given, without, self.seed)
        return Share(*plain, bootstrap(given, ones, self.seed), ratio)

    def assumption(self, tier: int) -> dict[str, Assumption]:
        """How often Assumption 1 holds where samples up to a tier collide with the anchor."""
        found = {}
        for name, eta, eta_e in zip(HARDENINGS, self.eta, self.eta_e, strict=True):
            near, near_e = (v[..., : tier + 1].sum(-1) for v in (eta, eta_e))
            far, far_e = (v[..., tier + 1 :].sum(-1) for v in (eta, eta_e))
            said = (near > 0) & (far > 0)
            holds = said & (near_e * far >= far_e * near)
            estimate = bootstrap(holds.sum(1), said.sum(1), self.seed)
            found[name] = Assumption(estimate, float(1 - said.mean()))
        return found
