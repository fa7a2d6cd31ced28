"""Terms that correct which negatives are drawn: hard negatives, and debiased ones."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from jaxtyping import Float, Shaped
from pydantic import Field, model_validator
from torch import Tensor

from heron.pipeline.config.sections import Natural
from heron.pipeline.config.terms import KNOWN, Needs, Temperature, Term
from heron.pipeline.objectives import fused
from heron.pipeline.objectives.batch import GlobalBatch
from heron.pipeline.objectives.classes import Classes, class_losses
from heron.pipeline.objectives.contrast import contrast, fused_sums
from heron.pipeline.objectives.engine import class_numbers
from heron.pipeline.objectives.mirroring import Mirroring, everyone, mirrored_sums
from heron.pipeline.objectives.own_positives import own_views, unit_views
from heron.pipeline.objectives.own_positives import positives as augmentations
from heron.pipeline.objectives.pairs import Pairs, is_fused
from heron.pipeline.objectives.present import (
    Present,
    Rows,
    as_slice,
    join_views,
    own_places,
    pair_count,
)
from heron.pipeline.objectives.ring import held_rows, row_count

Hardening = Literal["none", "exp", "threshold"]
Positives = Literal["label", "augmentation"]
Cosine = Annotated[float, Field(ge=-1, le=1)]


class Hard(Term):
    """UCL, H-UCL (`supervised: false`), SCL and H-SCL.

    Attributes:
        supervised: whether labels are used: SCL and H-SCL; without, UCL and H-UCL.
        threshold_start: l at first; the threshold of e^g is e^(l / tau) (H-SCL, Eq. 4).
        threshold_end: l after `threshold_epochs`.
        threshold_epochs: epochs over which l changes.
    """

    supervised: bool = True
    tau: Temperature = 0.5
    hardening: Hardening = "none"
    beta: Annotated[float, Field(ge=0)] = 1.0
    threshold_start: Cosine = -0.3
    threshold_end: Cosine = 0.0
    threshold_epochs: Natural = 200
    positives: Positives = "label"
    detach: bool = False

    needs: ClassVar[Needs] = Needs(vectors=("projections",), views=2)
    rings: ClassVar[bool] = True
    missing_views: ClassVar[bool] = True
    unknown_labels: ClassVar[bool] = True

    @model_validator(mode="after")
    def _labels(self) -> "Hard":
        if not self.supervised and self.positives == "label":
            raise ValueError(
                "positives by label need labels; with supervised: false give "
                "positives: augmentation"
            )
        return self

    def requires(self) -> Needs:
        """Labelled rows, with their labels, where it is supervised."""
        if not self.supervised:
            return self.needs
        compared = ("projections",)
        return Needs(own=compared, labelled_vectors=compared, labels=KNOWN, views=2)

    def exchanged_sums(
        self, shapes: Sequence[Sequence[int]], labels: int, levels: int
    ) -> list[int]:
        """The slopes by an anchor's sums, and their logarithm where a class's pairs are visited."""
        slopes = len(shapes) if self.hardening == "none" else 2 * len(shapes)
        return [slopes] if self.positives == "augmentation" else [slopes, len(shapes)]

    def ring_widths(self, views: int, widths: Mapping[str, int]) -> list[int]:
        """For the sums, for the pairs of a class where they are visited, and for the gradient."""
        return [widths["projections"]] * (2 if self.positives == "augmentation" else 3)

    def loss(self, batch: GlobalBatch, memory: Any) -> Tensor:
        """See `hard`."""
        start, end = self.threshold_start, self.threshold_end
        least = start + min(batch.epoch / self.threshold_epochs, 1.0) * (end - start)
        label, rows, present = None, batch.own_rows, batch.present
        if self.supervised:
            label, rows, present = batch.classes, batch.own_labelled_rows, batch.class_present
        compared = batch.labelled_vectors if self.supervised else batch.vectors
        return hard(
            compared["projections"],
            label,
            tau=self.tau,
            hardening=self.hardening,
            beta=self.beta,
            threshold=math.exp(least / self.tau),
            positives=self.positives,
            detach=self.detach,
            rows=rows,
            present=present,
        )


class Debiased(Term):
    """The debiased contrastive loss."""

    tau: Temperature = 0.5
    tau_plus: Annotated[float, Field(ge=0, lt=1)] = 0.1

    needs: ClassVar[Needs] = Needs(vectors=("projections",), views=2)
    rings: ClassVar[bool] = True

    def exchanged_sums(
        self, shapes: Sequence[Sequence[int]], labels: int, levels: int
    ) -> list[int]:
        """The slope by an anchor's sum."""
        return [len(shapes)]

    def loss(self, batch: GlobalBatch, memory: Any) -> Tensor:
        """See `debiased`."""
        z, rows = batch.vectors["projections"], batch.own_rows
        return debiased(z, tau=self.tau, tau_plus=self.tau_plus, rows=rows)


def hard(
    z: Sequence[Float[Tensor, "held dim"]],
    label: Shaped[Tensor, "..."] | None = None,
    *,
    tau: float = 0.5,
    hardening: Hardening = "none",
    beta: float = 1.0,
    threshold: float = 1.0,
    positives: Positives = "label",
    detach: bool = False,
    rows: Rows = slice(None),
    present: Present = None,
) -> Float[Tensor, ""]:
    r"""UCL, SCL, H-UCL and H-SCL: negatives tilted towards the anchor (H-SCL, Eq. 3 and 4).

    The mean over pairs of an anchor and a positive of

    .. math:: \log\big(1 + M e^{-g^+} E_q[e^{g^-}]\big), \qquad
              E_q = \frac{\sum \eta\, e^g}{\sum \eta}

    with g = cos / tau and both sums over the admissible negatives: with labels, the views of
    samples of other classes; without, the views of other samples. M is the number of views of other
    samples, so that UCL is `nt_xent`. An anchor without an admissible negative adds 0.

    Args:
        z: projections, one tensor of shape [batch, dim] a view, of the whole batch.
        label: classes, any whole numbers, [batch], or label vectors; None makes UCL and H-UCL.
        tau: temperature, > 0.
        hardening: eta: `none` is 1, `exp` is e^(beta g), `threshold` is 1 where e^g >= threshold
            and 0 elsewhere.
        beta: >= 0.
        threshold: of e^g, tau_h of Eq. 4.
        positives: all views of the anchor's class, or the sample's other views only (Lemma 1).
        detach: let no gradient flow through eta.
        rows: see `nt_xent`.
        present: which views each sample has: anchors, positives and negatives are these alone, and
            M is the number of those of other samples.

    Returns the share of the loss that belongs to `rows`: a scalar.

    Raises:
        ValueError: an option or the labels do not fit, or there are fewer than two views.
    """
    if label is None and positives == "label":
        raise ValueError("positives are by label, but there are no labels; expected augmentation")
    power, floor = _eta(hardening, beta, threshold)
    vectors = unit_views(z, tau / (1 + power), "hard")
    count, batch, (here, seen) = len(z), row_count(rows, z[0]), held_rows(rows, present)
    samples = torch.arange(batch, device=z[0].device)
    admit = samples if label is None else class_numbers(label, batch, "hard")[0]
    mirroring = Mirroring.of(rows, batch, [0], [0], [range(count)], present)
    own_slice = as_slice(rows)
    anchors, keys = join_views(vectors, seen, here), join_views(vectors, seen)
    of_anchor = join_views([admit] * count, present, own_slice)
    of_key = join_views([admit] * count, present)
    few = label is None and present is None  # keys that are left out
    sizes, spread = torch.bincount(of_key), math.log(max(count * (batch - 1), 1))
    plain = hardening == "none"  # then sum eta is a count, which the classes' sizes give
    pairs = Pairs(
        [anchors / tau],
        [keys],
        anchor_tag=of_anchor,
        key_tag=of_key,
        exclude=own_views(samples[own_slice], batch, count).repeat(count, 1) if few else None,
        moments=(1.0,) if plain else (1 + power, power),
        slopes=(1.0, 0.0) if detach and not plain else None,
        floor=floor,
    )
    log_total = partial(_log_total, plain=plain, spread=spread)
    known = [(len(of_key) - sizes)[of_anchor].to(keys.dtype)]
    if present is not None:  # the log of M, of each anchor
        others = (len(of_key) - present.sum(1)).clamp(min=1).to(keys.dtype).log()
        known.append(join_views([others] * count, present, own_slice))
    if positives == "label":
        own = own_places(batch, count, present, own_slice, keys.device)
        mean = 1 / max(int((sizes * (sizes - 1)).sum()), 1)
        return _by_label(pairs, partial(log_total, known=known), mean, own, mirroring, rows)
    every = count * (count - 1) * max(batch, 1)
    mean = 1 / (every if present is None else pair_count(present, range(count)))
    views = augmentations(vectors, range(count), tau, here, seen)
    return _by_view(pairs, log_total, mean, known, views, mirroring)


def _log_total(sums: Tensor, known: Sequence[Tensor], plain: bool, spread: float) -> Tensor:
    """log(M E_q) of anchors by their sums, [anchors], or -inf.

    `known` are sum eta where it is `plain`, and, where rows lack views, the anchors' log M, which
    else is `spread`.
    """
    total, weight = (sums[:, 0], known[0]) if plain else sums.unbind(1)
    some = (weight > 0) & (total > 0)
    ratio = torch.where(some, total, 1.0).log() - torch.where(some, weight, 1.0).log()
    return torch.where(some, (known[1] if len(known) > 1 else spread) + ratio, -math.inf)


def _by_view(
    pairs: Pairs,
    log_total: Callable[[Tensor, Sequence[Tensor]], Tensor],
    mean: float,
    known: Sequence[Tensor],
    pairs_of_views: Sequence[Tensor],
    mirroring: Mirroring | None,
) -> Tensor:
    """The sum, times `mean`, over the pairs of an anchor and another view of its sample."""

    def finish(sums: Tensor, per_anchor: Sequence[Tensor]) -> Tensor:
        positive, *there = per_anchor[len(known) :]
        loss = _softplus(log_total(sums, per_anchor[: len(known)])[:, None] - positive)
        return (loss * there[0] if there else loss).sum() * mean

    return contrast(pairs, finish, [*known, *pairs_of_views], mirroring=mirroring)


def _by_label(
    pairs: Pairs,
    log_total: Callable[[Tensor], Tensor],
    mean: float,
    own: Tensor,
    mirroring: Mirroring | None,
    rows: Rows,
) -> Tensor:
    """The sum, times `mean`, over the pairs of a class; `own` are the anchors among all keys."""
    (anchors,), (keys,), of_key = pairs.anchors, pairs.keys, pairs.key_tag
    assert of_key is not None and pairs.anchor_tag is not None
    if is_fused(keys) and mirroring is None:
        total = log_total(fused_sums(pairs))
        tags = pairs.anchor_tag.int(), of_key.int(), own.int()
        weight = torch.full_like(total, mean)
        return fused.tagged_pair_losses(anchors, keys, total, *tags, weight)
    total = log_total(mirrored_sums(pairs, mirroring)[0])
    weight, least = keys.new_full((len(of_key), 1), mean), keys.new_full((1,), -math.inf)
    classes = Classes([of_key], weight, own, soft=True)
    told, around = everyone(mirroring, total), None if mirroring is None else mirroring.around
    return class_losses(anchors, keys, total, least, classes, rows, told, around)


def _eta(hardening: Hardening, beta: float, threshold: float) -> tuple[float, float]:
    """Returns the power of e^g in eta, and the g below which eta is 0."""
    if hardening == "exp":
        if not beta >= 0:
            raise ValueError(f"beta is {beta}; expected at least 0, where 0 hardens nothing")
        return beta, -math.inf
    return 0.0, _log(threshold) if hardening == "threshold" else -math.inf


def debiased(
    z: Sequence[Float[Tensor, "held dim"]],
    *,
    tau: float = 0.5,
    tau_plus: float = 0.1,
    rows: Rows = slice(None),
) -> Float[Tensor, ""]:
    r"""Debiased contrastive loss (Chuang et al. 2020, Eq. 7 and 8).

    NT-Xent with the sum over the N negatives of an anchor and positive replaced by

    .. math:: \max\Big(\frac{\sum f^- - N \tau^+ f^+}{1 - \tau^+},\; N e^{-1/\tau}\Big)

    Args:
        z: projections, one tensor of shape [batch, dim] a view, of the whole batch.
        tau: temperature, > 0.
        tau_plus: prior probability that a negative is of the anchor's class, in [0, 1).
        rows: the samples whose anchors are summed here, as of `nt_xent`; counts are those of the
            whole batch.

    Returns:
        The share of the loss that belongs to `rows`: a scalar.

    Raises:
        ValueError: fewer than two views, tau <= 0, or tau_plus outside [0, 1).
    """
    vectors = unit_views(z, tau, "debiased")
    count, batch, (here, _) = len(z), row_count(rows, z[0]), held_rows(rows)
    samples = torch.arange(batch, device=z[0].device)
    negatives, mean = count * (batch - 1), 1 / (count * (count - 1) * max(batch, 1))

    def finish(sums: Tensor, per_anchor: Sequence[Tensor]) -> Tensor:
        (positive,) = per_anchor
        rest = debias(sums, positive, negatives, tau, tau_plus)
        return torch.log1p(rest * torch.exp(-positive)).sum() * mean

    own = as_slice(rows)
    pairs = Pairs(
        [torch.cat([view[here] for view in vectors]) / tau],
        [torch.cat(vectors)],
        anchor_tag=samples[own].repeat(count),
        key_tag=samples.repeat(count),
        exclude=own_views(samples[own], batch, count).repeat(count, 1),
    )
    known = augmentations(vectors, range(count), tau, here)
    return contrast(
        pairs, finish, known, mirroring=Mirroring.of(rows, batch, [0], [0], [range(count)])
    )


def debias(total: Tensor, positive: Tensor, negatives: int, tau: float, tau_plus: float) -> Tensor:
    """The estimated sum of f over true negatives (Chuang et al. 2020, Eq. 7), clamped below.

    Args:
        total: sum of f over all negatives.
        positive: logit of the positive.
        negatives: how many there are.
        tau: temperature.
        tau_plus: prior of the anchor's class.

    Raises:
        ValueError: tau_plus outside [0, 1).
    """
    if not 0 <= tau_plus < 1:
        raise ValueError(
            f"tau_plus is {tau_plus}; expected a probability below 1, e.g. 1 / number of classes"
        )
    estimate = (total - negatives * tau_plus * torch.exp(positive)) / (1 - tau_plus)
    return estimate.clamp(min=negatives * math.exp(-1 / tau))


def _log(threshold: float) -> float:
    if not threshold > 0:
        raise ValueError(f"threshold is {threshold}; expected above 0, since e^g is")
    return math.log(threshold)


def _softplus(x: Tensor) -> Tensor:
    """log(1 + e^x) without torch's cut-off at 20; 0 with gradient 0 at -inf."""
    return torch.logaddexp(x, torch.zeros_like(x))
