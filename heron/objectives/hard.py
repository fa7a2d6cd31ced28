"""Terms that correct the distribution of negatives: hard negatives, and debiased ones."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from jaxtyping import Float, Shaped
from pydantic import Field, model_validator
from torch import Tensor

from heron.config.sections import Natural
from heron.config.terms import CLASS_LABELS, Needs, Temperature
from heron.objectives import fused
from heron.objectives.batch import GlobalBatch
from heron.objectives.classes import Classes, class_losses
from heron.objectives.contrast import contrast, fused_sums
from heron.objectives.engine import class_numbers
from heron.objectives.mirroring import Mirroring, gather_anchor_values, mirrored_sums
from heron.objectives.own_positives import own_keys, unit_views
from heron.objectives.own_positives import positives as view_positives
from heron.objectives.pairs import Pairs, is_fused
from heron.objectives.present import (
    Present,
    Rows,
    as_slice,
    join_views,
    own_row_positions,
    pair_count,
)
from heron.objectives.term import Term

Hardening = Literal["none", "exp", "threshold"]
Positives = Literal["label", "augmentation"]
Cosine = Annotated[float, Field(ge=-1, le=1)]


class Hard(Term):
    """UCL, H-UCL (`supervised: false`), SCL and H-SCL.

    Attributes:
        supervised: whether labels are used (SCL and H-SCL) or not (UCL and H-UCL).
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
        """Returns the needs: if `supervised`, labelled rows with their labels."""
        if not self.supervised:
            return self.needs
        features = ("projections",)
        return Needs(own=features, labelled_vectors=features, labels=CLASS_LABELS, views=2)

    def loss(self, batch: GlobalBatch, memory: Any) -> Tensor:
        """Computes `hard` at the epoch's threshold."""
        start, end = self.threshold_start, self.threshold_end
        cosine = start + min(batch.epoch / self.threshold_epochs, 1.0) * (end - start)
        label, rows, present = None, batch.own_rows, batch.present
        if self.supervised:
            label, rows, present = batch.classes, batch.own_labelled_rows, batch.class_present
        features = batch.labelled_vectors if self.supervised else batch.vectors
        return hard(
            features["projections"],
            label,
            tau=self.tau,
            hardening=self.hardening,
            beta=self.beta,
            threshold=math.exp(cosine / self.tau),
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

    def loss(self, batch: GlobalBatch, memory: Any) -> Tensor:
        """Computes `debiased`."""
        z, rows = batch.vectors["projections"], batch.own_rows
        return debiased(z, tau=self.tau, tau_plus=self.tau_plus, rows=rows)


def hard(
    z: Sequence[Float[Tensor, "batch dim"]],
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
        label: classes, any whole numbers, [batch]; None makes UCL and H-UCL.
        tau: temperature, > 0.
        hardening: eta: `none` is 1, `exp` is e^(beta g), `threshold` is 1 where e^g >= threshold
            and 0 elsewhere.
        beta: >= 0.
        threshold: of e^g, tau_h of Eq. 4.
        positives: all views of the anchor's class, or the sample's other views only (Lemma 1).
        detach: let no gradient flow through eta.
        rows: as in `nt_xent`.
        present: which views each sample has; no others are anchors, positives, negatives, or in M.

    Raises ValueError if an option or the labels do not fit, or there are fewer than two views.
    """
    if label is None and positives == "label":
        raise ValueError("positives are by label, but there are no labels; expected augmentation")
    power, floor = _eta_power_and_floor(hardening, beta, threshold)
    vectors = unit_views(z, tau / (1 + power), "hard")
    count, batch, own = len(z), len(z[0]), as_slice(rows)
    samples = torch.arange(batch, device=z[0].device)
    tags = samples if label is None else class_numbers(label, batch, "hard")[0]
    mirroring = Mirroring.of(rows, batch, [0], [0], [range(count)], present)
    anchors, keys = join_views(vectors, present, own), join_views(vectors, present)
    anchor_tag = join_views([tags] * count, present, own)
    key_tag = join_views([tags] * count, present)
    exclude = None
    if label is None and present is None:
        exclude = own_keys(samples[own], batch, count).repeat(count, 1)
    sizes, log_m = torch.bincount(key_tag), math.log(max(count * (batch - 1), 1))
    plain = hardening == "none"  # then sum eta is a count, which the classes' sizes give
    pairs = Pairs(
        [anchors / tau],
        [keys],
        anchor_tag=anchor_tag,
        key_tag=key_tag,
        exclude=exclude,
        moments=(1.0,) if plain else (1 + power, power),
        slopes=(1.0, 0.0) if detach and not plain else None,
        floor=floor,
    )
    log_total = partial(_log_total, plain=plain, log_m=log_m)
    constants = [(len(key_tag) - sizes)[anchor_tag].to(keys.dtype)]
    if present is not None:  # log M of each anchor
        log_others = (len(key_tag) - present.sum(1)).clamp(min=1).to(keys.dtype).log()
        constants.append(join_views([log_others] * count, present, own))
    if positives == "label":
        positions = own_row_positions(batch, count, present, own, keys.device)
        mean = 1 / max(int((sizes * (sizes - 1)).sum()), 1)
        log_total = partial(log_total, constants=constants)
        return _over_class_pairs(pairs, log_total, mean, positions, mirroring, rows)
    all_pairs = count * (count - 1) * max(batch, 1)
    mean = 1 / (all_pairs if present is None else pair_count(present, range(count)))
    view_pairs = view_positives(vectors, range(count), tau, own, present)
    return _over_view_pairs(pairs, log_total, mean, constants, view_pairs, mirroring)


def _log_total(sums: Tensor, constants: Sequence[Tensor], plain: bool, log_m: float) -> Tensor:
    """Returns log(M E_q) of anchors from their sums, [anchors], or -inf.

    `constants` are sum eta, used if `plain`, and, where rows lack views, each anchor's log M, which
    is `log_m` otherwise.
    """
    total, weight = (sums[:, 0], constants[0]) if plain else sums.unbind(1)
    has_negative = (weight > 0) & (total > 0)
    safe_total = torch.where(has_negative, total, 1.0)
    ratio = safe_total.log() - torch.where(has_negative, weight, 1.0).log()
    log_count = constants[1] if len(constants) > 1 else log_m
    return torch.where(has_negative, log_count + ratio, -math.inf)


def _over_view_pairs(
    pairs: Pairs,
    log_total: Callable[[Tensor, Sequence[Tensor]], Tensor],
    mean: float,
    constants: Sequence[Tensor],
    view_pairs: Sequence[Tensor],
    mirroring: Mirroring | None,
) -> Tensor:
    """Sums the loss over the pairs of an anchor and another view of its sample, times `mean`."""

    def finish(sums: Tensor, per_anchor: Sequence[Tensor]) -> Tensor:
        positive, *has_positive = per_anchor[len(constants) :]
        loss = _softplus(log_total(sums, per_anchor[: len(constants)])[:, None] - positive)
        return (loss * has_positive[0] if has_positive else loss).sum() * mean

    return contrast(pairs, finish, [*constants, *view_pairs], mirroring=mirroring)


def _over_class_pairs(
    pairs: Pairs,
    log_total: Callable[[Tensor], Tensor],
    mean: float,
    positions: Tensor,
    mirroring: Mirroring | None,
    rows: Rows,
) -> Tensor:
    """Sums the loss over the pairs of a class, times `mean`; anchors lie at `positions` of keys."""
    (anchors,), (keys,), key_tag = pairs.anchors, pairs.keys, pairs.key_tag
    assert key_tag is not None and pairs.anchor_tag is not None
    if is_fused(keys) and mirroring is None:
        total = log_total(fused_sums(pairs))
        tags = pairs.anchor_tag.int(), key_tag.int(), positions.int()
        weight = torch.full_like(total, mean)
        return fused.tagged_pair_losses(anchors, keys, total, *tags, weight)
    total = log_total(mirrored_sums(pairs, mirroring)[0])
    weight, floor = keys.new_full((len(key_tag), 1), mean), keys.new_full((1,), -math.inf)
    classes = Classes([key_tag], weight, positions, soft=True)
    all_totals = gather_anchor_values(mirroring, total)
    return class_losses(anchors, keys, total, floor, classes, rows, all_totals)


def _eta_power_and_floor(
    hardening: Hardening, beta: float, threshold: float
) -> tuple[float, float]:
    """Returns the power of e^g in eta, and the g below which eta is 0."""
    if hardening == "exp":
        if not beta >= 0:
            raise ValueError(f"beta is {beta}; expected at least 0, where 0 hardens nothing")
        return beta, -math.inf
    return 0.0, _log_threshold(threshold) if hardening == "threshold" else -math.inf


def debiased(
    z: Sequence[Float[Tensor, "batch dim"]],
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
        rows: as in `nt_xent`.

    Raises:
        ValueError: fewer than two views, tau <= 0, or tau_plus outside [0, 1).
    """
    vectors = unit_views(z, tau, "debiased")
    count, batch, own = len(z), len(z[0]), as_slice(rows)
    samples = torch.arange(batch, device=z[0].device)
    negatives, mean = count * (batch - 1), 1 / (count * (count - 1) * max(batch, 1))

    def finish(sums: Tensor, per_anchor: Sequence[Tensor]) -> Tensor:
        (positive,) = per_anchor
        negative_sum = debias(sums, positive, negatives, tau, tau_plus)
        return torch.log1p(negative_sum * torch.exp(-positive)).sum() * mean

    pairs = Pairs(
        [torch.cat([view[own] for view in vectors]) / tau],
        [torch.cat(vectors)],
        anchor_tag=samples[own].repeat(count),
        key_tag=samples.repeat(count),
        exclude=own_keys(samples[own], batch, count).repeat(count, 1),
    )
    positive = view_positives(vectors, range(count), tau, own)
    mirroring = Mirroring.of(rows, batch, [0], [0], [range(count)])
    return contrast(pairs, finish, positive, mirroring=mirroring)


def debias(total: Tensor, positive: Tensor, negatives: int, tau: float, tau_plus: float) -> Tensor:
    """Estimates the sum of f over true negatives (Chuang et al. 2020, Eq. 7), clamped below.

    `total` is the sum of f over all `negatives`, `positive` the logit of the positive. Raises
    ValueError for tau_plus outside [0, 1).
    """
    if not 0 <= tau_plus < 1:
        raise ValueError(
            f"tau_plus is {tau_plus}; expected a probability below 1, e.g. 1 / number of classes"
        )
    estimate = (total - negatives * tau_plus * torch.exp(positive)) / (1 - tau_plus)
    return estimate.clamp(min=negatives * math.exp(-1 / tau))


def _log_threshold(threshold: float) -> float:
    if not threshold > 0:
        raise ValueError(f"threshold is {threshold}; expected above 0, since e^g is")
    return math.log(threshold)


def _softplus(x: Tensor) -> Tensor:
    """Returns log(1 + e^x) without torch's cut-off at 20; 0 with gradient 0 at -inf."""
    return torch.logaddexp(x, torch.zeros_like(x))
