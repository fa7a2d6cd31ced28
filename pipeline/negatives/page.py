"""The page of the report on negatives: each figure and table with what it says, in sentences."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from heron.pipeline.evaluation.collapse import collapsed
from heron.pipeline.negatives import figures as draw
from heron.pipeline.negatives.estimates import Estimate
from heron.pipeline.negatives.histograms import more_similar, quantiles
from heron.pipeline.negatives.measure import EXPECTED, Negatives, worst
from heron.pipeline.negatives.repulsion import Repulsion
from heron.pipeline.negatives.sheet import sheet
from heron.pipeline.retrieval.embeddings import EmbeddingsManifest
from heron.pipeline.retrieval.pictures import Pictures
from heron.pipeline.training.page import heading, page, paragraph, table

SHARES = np.array([0.05, 0.25, 0.5, 0.75, 0.95])
WORST = 12  # rows of a table of labels
ROUNDING = 1e-5  # of a ratio of sums in float32: no difference
GROUPS = {
    "same": "same labels",
    "close": "close labels",
    "others": "other labels",
    "hard": "hard negatives",
}
STYLE = """
.wide { overflow-x: auto } .wide img { max-width: none } .lead { font-size: 1.05rem }
.pairs { display: grid; grid-template-columns: repeat(auto-fill, minmax(17rem, 1fr)); gap: 1rem }
.pair { border: 1px solid #d8dbe2; border-radius: .4rem; padding: .6rem; font-size: .85rem;
        overflow-wrap: anywhere }
.pair img { width: 48%; image-rendering: auto; border-radius: .2rem } .pair p { margin: .3rem 0 }
.only { color: #a3262a }
"""


@dataclass(frozen=True)
class Page:
    """What the page shows.

    Attributes:
        manifest: of the embeddings.
        found: near pairs and their labels.
        repulsion: what pushes pairs apart.
        neighbours: how they were found, in words.
        pictures: of the samples; None: pairs are shown by their labels.
        notes: what was left out, and why.
    """

    manifest: EmbeddingsManifest
    found: Negatives
    repulsion: Repulsion
    neighbours: str
    pictures: Pictures | None
    notes: list[str]

    def html(self, title: str) -> str:
        """The whole page."""
        return page(title, "".join(self._body()), STYLE)

    def _body(self) -> Iterator[str]:
        found, repulsion = self.found, self.repulsion
        yield self._facts()
        if why := collapsed(repulsion.collapse):
            yield paragraph(f"Read this with care: the embeddings have collapsed ({why}).")
        yield heading("False negatives among the nearest")
        yield paragraph(self._of_rates())
        yield draw.rates(found)
        yield self._rate_table()
        yield heading("Similarity of positives, negatives and hard negatives")
        yield paragraph(self._of_similarity())
        yield draw.similarity(found)
        yield table(
            ["cosine", "pairs", *(f"{100 * s:.0f} %" for s in SHARES)],
            [
                [GROUPS[name], f"{int(n.sum()):,}", *(f"{v:.3f}" for v in quantiles(n, SHARES))]
                for name, n in found.histograms.items()
                if name != "close" or found.close
            ],
        )
        yield from self._labels()
        yield from self._weight()
        yield from self._repulsion()
        yield from self._assumption()
        yield heading("The hardest negatives")
        yield sheet(self.found, "hard", self.pictures)
        yield heading("The most similar false negatives")
        yield sheet(self.found, "false", self.pictures)
        yield heading("Left out")
        yield "".join(map(paragraph, self.notes or ["Nothing."]))

    def _facts(self) -> str:
        found, known = self.found, self.manifest
        scale, k = found.pairs.scale, found.question.k
        close, far = "", "of another class"
        if found.close:
            close = f"; close labels: a distance of at most {found.close / scale:.3g}, "
            close += "within which are 1 % of random pairs, or fewer"
        if scale > 1:
            far = f"at a distance of {found.far / scale:.3g} or more, the median of random pairs: "
            far += "as little in common as with a sample picked blindly"
        rows = [
            ("embeddings", f"{len(found.pairs.samples):,} of {known.data}, by {known.run}"),
            ("checkpoint", known.checkpoint[:12]),
            ("anchors", f"{len(found.pairs.anchors):,} with labels, seed {found.question.seed}"),
            ("neighbours", f"{k} nearest by cosine in '{found.question.layer}', {self.neighbours}"),
            ("false negative", f"a neighbour with the anchor's labels{close}"),
            ("hard negative", f"a neighbour with labels {far}"),
            ("label distance", "the share of labels in which two samples differ"),
            ("in brackets", "intervals of 95 %, of anchors drawn again"),
        ]
        return table([], rows[:6] + rows[6 + (scale == 1) :])

    def _of_rates(self) -> str:
        found = self.found
        name = "close" if found.close else "same"
        near, chance = found.rates[name]
        at = found.ks.index(found.question.k)
        distance, random = found.rates["distance"]
        what = (
            f"labels within {found.close / found.pairs.scale:.3g} of" if found.close else "exactly"
        )
        same, blind = found.rates["same"]
        times = _times(float(near.value[at]), float(chance.value))
        said = (
            f"Of the {found.question.k} nearest neighbours {_share(near, at)} have {what} the "
            f"anchor's labels, {times} the {percent(float(chance.value))} of random pairs: an "
            "unsupervised loss pushes these apart wrongly."
        )
        if found.close:
            said += (
                f" {_share(same, at)} agree in every label (random pairs: "
                f"{percent(float(blind.value))}). The mean label distance is "
                f"{float(distance.value[at]):.4f}, of random pairs {float(random.value):.4f}."
            )
        first, last = float(near.value[0]), float(near.value[-1])
        trend = "falls" if last < first else "rises" if last > first else "stays"
        return said + (
            f" From k = {found.ks[0]} to {found.ks[-1]} the rate {trend} from {percent(first)} to "
            f"{percent(last)}; bands are intervals, dotted lines random pairs."
        )

    def _rate_table(self) -> str:
        found = self.found
        columns = ["same", "close", "distance"] if found.close else ["same"]
        heads = {"same": "same labels", "close": "close labels", "distance": "mean distance"}
        rows = []
        for at, k in enumerate((*found.ks, None)):
            cells = []
            for name in columns:
                near, chance = found.rates[name]
                shown = _share if name != "distance" else _number
                cells.append(shown(chance, None) if k is None else shown(near, at))
            rows.append(["random pairs" if k is None else str(k), *cells])
        return table(["k", *(heads[name] for name in columns)], rows)

    def _of_similarity(self) -> str:
        found = self.found
        medians = {n: float(quantiles(h, np.array([0.5]))[0]) for n, h in found.histograms.items()}
        nearer = more_similar(found.histograms["close"], found.histograms["others"])
        what = "close" if found.close else "the same"
        said = (
            f"A pair with {what} labels has a median cosine of {medians['close']:.3f}, a pair of "
            f"others {medians['others']:.3f}; the first is the nearer one in "
            f"{percent(nearer)} of cases (50 %: labels do not show)."
        )
        if math.isnan(medians["hard"]):
            return said + " There is no hard negative among the nearest."
        below = found.histograms["close"]
        share = below[: int((medians["hard"] + 1) * len(below) / 2)].sum() / max(below.sum(), 1)
        return said + (
            f" {percent(found.hard_share)} of the nearest are hard negatives, of median "
            f"cosine {medians['hard']:.3f}: nearer than {percent(float(share))} of the positives. "
            "Curves that lie upon each other cannot be told apart by distance."
        )

    def _labels(self) -> Iterator[str]:
        found = self.found
        names, confusion = found.pairs.samples.names, found.confusion
        lift = confusion.precision.value / np.where(confusion.base > 0, confusion.base, np.nan)
        order = [int(a) for a in np.argsort(lift) if np.isfinite(lift[a])]
        yield heading("Which labels are confused")
        if not order:
            yield paragraph("No label is there in both an anchor and another sample.")
            return
        low, high = order[0], order[-1]
        yield paragraph(
            f"A neighbour of an anchor with '{names[low]}' has it too in "
            f"{_share(confusion.precision, low)} of cases, {lift[low]:.2f} times as often as a "
            f"random sample: the label that nearness says least about. '{names[high]}' it tells "
            f"best, {lift[high]:.2f} times. Below 1 neighbours lack what the anchor has more often "
            "than by chance."
        )
        yield table(
            ["label", "among neighbours", "random", "times"],
            [
                [
                    names[a],
                    _share(confusion.precision, a),
                    percent(confusion.base[a]),
                    f"{lift[a]:.2f}",
                ]
                for a in order[:WORST]
            ],
        )
        bad = worst(found)
        if not bad:
            yield paragraph(
                f"No two labels are swapped in {EXPECTED} random pairs or more: too few to compare."
            )
            return
        a, b, count, expected = bad[0]
        yield paragraph(
            f"Most confused: the anchor has '{names[a]}' and not '{names[b]}', its neighbour the "
            f"reverse, in {count:,} pairs, {count / expected:.2f} times as often as random pairs. "
            + (
                "At 1 nearness does not tell the two apart; above it, it takes one for the other."
                if not found.pairs.samples.exclusive
                else "Rows are the anchor's class, columns the neighbour's."
            )
        )
        yield f'<div class="wide">{draw.confusion(found, EXPECTED)}</div>'
        yield table(
            ["anchor has", "neighbour has", "pairs", "random", "times"],
            [[names[a], names[b], f"{n:,}", f"{e:,.0f}", f"{n / e:.2f}"] for a, b, n, e in bad],
        )

    def _weight(self) -> Iterator[str]:
        weight = self.repulsion.weight
        if weight is None:
            return
        yield heading("Does HeroCon's weight g fall with label similarity?")
        rank, own, cosine = weight.label_rank, weight.anchor_rank, weight.cosine_rank
        if not math.isfinite(float(rank.value)):
            yield paragraph("g is the same for all pairs, so that it has no correlation.")
            return
        low, high = float(rank.low), float(rank.high)
        answer = "Yes" if high < 0 else "No: it rises" if low > 0 else "It cannot be told"
        strength = abs(float(rank.value))
        if (high < 0 or low > 0) and strength < 0.3:
            answer += ", but barely" if strength < 0.1 else ", but weakly"
        ends = _ends(weight.by_label, weight.pairs)
        yield paragraph(
            f"{answer}. Spearman's rank correlation of g and label "
            f"similarity is {_number(rank)}, among the pairs of one anchor {_number(own)} "
            "(-1: the claim holds for every pair; 0: no relation). From the least alike to the "
            f"most alike pairs the mean of g goes from {ends[0]:.4f} to {ends[1]:.4f}; its "
            f"standard deviation is {weight.spread:.4f}."
        )
        yield draw.weight_by_label(weight)
        yield paragraph(
            f"With the cosine of the projections the rank correlation of g is {_number(cosine)}: "
            + (
                "near pairs weigh less, whether or not their labels agree."
                if float(cosine.high) < 0
                else "near pairs do not weigh less, which g was made for."
            )
        )
        yield draw.weight_by_cosine(weight)

    def _repulsion(self) -> Iterator[str]:
        repulsion, found = self.repulsion, self.found
        yield heading("How much repulsion falls on false negatives")
        tau = repulsion.temperatures
        share = repulsion.shares["close"]
        said = (
            f"With f = exp(cos / {tau.tau:g}) (tau: {tau.source}), {_share(share.without)} of the "
            f"repulsion falls on false negatives{' (close labels)' if found.close else ''}, which "
            f"are {percent(float(share.count.value))} of the negatives."
        )
        if share.ratio is not None and share.weighted is not None:
            ratio = share.ratio
            change = percent(abs(1 - float(ratio.value)))
            verdict = (
                f"HeroCon pushes them apart {change} less than InfoNCE with the same vectors"
                if float(ratio.high) < 1 - ROUNDING
                else f"HeroCon pushes them apart {change} more than InfoNCE with the same vectors"
                if float(ratio.low) > 1 + ROUNDING
                else "no difference that can be told"
            )
            said += (
                f" Weighted by g it is {_share(share.weighted)}, {_number(ratio, digits=4)} times "
                f"that: {verdict}."
            )
        yield paragraph(said)
        rows = []
        for name, one in repulsion.shares.items():
            if name == "close" and not found.close:
                continue
            cells = [one.count, one.without, one.weighted]
            row = [GROUPS[name], *("" if e is None else _share(e) for e in cells)]
            rows.append([*row, "" if one.ratio is None else _number(one.ratio, digits=4)])
        heads = ["false negatives", "of the negatives", "of f", "of g f", "g f over f"]
        yield table(heads, rows)

    def _assumption(self) -> Iterator[str]:
        repulsion = self.repulsion
        names = ["same", "close"] if self.found.close else ["same"]
        last = repulsion.assumption[names[-1]]
        shares = [float(one.holds.value) for one in last.values()]
        yield heading("H-SCL's Assumption 1")
        alike = ", close labels taken as the same" if len(names) > 1 else ""
        defined = [share for share in shares if math.isfinite(share)]
        span = (
            f"It holds for {percent(min(defined))} to {percent(max(defined))} of the anchors, "
            "by the hardening"
            if defined
            else "No anchor has both kinds of negatives"
        )
        yield paragraph(
            "The assumption: weighted by the hardening, negatives with the anchor's labels are "
            "nearer in the mean than those with others; where it holds, the loss without labels "
            f"bounds the one with them. {span}{alike} (layer '{repulsion.layer}', gamma "
            f"{repulsion.temperatures.gamma:g}; the paper finds more than 95 % on CIFAR-100). It "
            "says nothing of anchors that have no negatives of one of the two kinds."
        )
        yield table(
            [
                "hardening",
                *(f"{GROUPS[n]}: holds" for n in names),
                *(f"{GROUPS[n]}: says nothing" for n in names),
            ],
            [
                [
                    kind,
                    *(_share(repulsion.assumption[n][kind].holds) for n in names),
                    *(percent(repulsion.assumption[n][kind].undefined) for n in names),
                ]
                for kind in last
            ],
        )


def percent(share: float) -> str:
    """A share in per cent, to three digits."""
    if not math.isfinite(share):
        return "–"
    return f"{np.format_float_positional(100 * share, 3, fractional=False, trim='-')} %"


def _share(estimate: Estimate, at: int | None = None) -> str:
    place = () if at is None else at
    value, low, high = (float(v[place]) for v in (estimate.value, estimate.low, estimate.high))
    if not math.isfinite(value):
        return "–"
    return f"{percent(value)} ({percent(low).removesuffix(' %')} to {percent(high)})"


def _number(estimate: Estimate, at: int | None = None, digits: int = 3) -> str:
    place = () if at is None else at
    value, low, high = (float(v[place]) for v in (estimate.value, estimate.low, estimate.high))
    if not math.isfinite(value):
        return "–"
    return f"{value:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def _times(value: float, chance: float) -> str:
    return f"{value / chance:.1f} times" if chance > 0 else "against"


def _ends(curve: Estimate, pairs: NDArray[np.int64]) -> tuple[float, float]:
    """Values of the furthest and of the nearest point that is of some pairs."""
    seen = np.flatnonzero(pairs >= draw.FEW)
    seen = seen if len(seen) else np.flatnonzero(pairs)
    return float(curve.value[seen[-1]]), float(curve.value[seen[0]])
