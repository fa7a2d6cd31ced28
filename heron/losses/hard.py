"""Terms that correct the distribution of negatives: hard negatives, and debiased ones."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Literal

import torch
from jaxtyping import Float, Shaped
from pydantic import Field
from torch import Tensor

from heron.base.sections import Natural
from heron.losses import fused
from heron.losses.batch import GlobalBatch
from heron.losses.classes import Classes, class_losses
from heron.losses.contrast import contrast, fused_sums
from heron.losses.engine import class_numbers, count_members
from heron.losses.families import ProjectionLoss
from heron.losses.inputs import LossError, RowCounts, Views, as_groups
from heron.losses.loss import Loss
from heron.losses.mirroring import Mirroring, gather_anchor_values, mirrored_sums
from heron.losses.own_positives import positives as view_positives
from heron.losses.own_positives import unit_head
from heron.losses.pairs import (
    Pairs,
    Present,
    Rows,
    as_slice,
    is_fused,
    join_views,
    numbers_of,
    own_row_positions,
    pair_count,
)
from heron.losses.terms import CLASS_LABELS, Needs, Temperature

Hardening = Literal["none", "exp", "threshold"]
Positives = Literal["label", "augmentation"]
Cosine = Annotated[float, Field(ge=-1, le=1)]


class Hard(Loss):
    r"""UCL, H-UCL, SCL and H-SCL: negatives weighted by hardness (H-SCL, Eq. 3 and 4).

    With :math:`g = \cos / \tau` and M views of other samples, the mean over positive pairs of

    .. math:: \log\big(1 + M e^{-g^+} E_q[e^{g^-}]\big), \qquad
              E_q = \frac{\sum \eta\, e^g}{\sum \eta}
    """

    needs = Needs(vectors=("projections",), views=2)
    missing_views = True
    unknown_labels = True

    def __init__(
        self,
        *,
        supervised: bool = True,
        tau: Temperature = 0.5,
        hardening: Hardening = "none",
        beta: Annotated[float, Field(ge=0)] = 1.0,
        threshold_start: Cosine = -0.3,
        threshold_end: Cosine = 0.0,
        threshold_epochs: Natural = 200,
        positives: Positives = "label",
        detach: bool = False,
        gather: bool = True,
    ) -> None:
        r"""Sets the options.

        Args:
            supervised: take negatives of other classes (SCL, H-SCL); False (UCL, H-UCL) uses no
                labels, and requires `positives="augmentation"`.
            tau: temperature, at least 0.003.
            hardening: :math:`\eta`: `none` is 1, `exp` is :math:`e^{\beta g}`, `threshold` is 1
                where :math:`e^g \ge e^{l / \tau}`, else 0.
            beta: :math:`\beta`, at least 0.
            threshold_start: l at first, a cosine.
            threshold_end: l from `threshold_epochs` on; linear in between.
            threshold_epochs: epochs from `threshold_start` to `threshold_end`.
            positives: all views of the anchor's class (`label`), or only the sample's other views.
            detach: stop the gradient through :math:`\eta`.
            gather: compare the rows of all processes.

        Raises:
            LossError: positives are by label, and `supervised` is False.
        """
        super().__init__(gather=gather)
        if not supervised and positives == "label":
            raise ValueError(
                "positives by label need labels; with supervised: false, set positives: "
                "augmentation"
            )
        if supervised:
            features = ("projections",)
            self.needs = Needs(
                own=features, labelled_vectors=features, labels=CLASS_LABELS, views=2
            )
        self.supervised, self.tau, self.hardening, self.beta = supervised, tau, hardening, beta
        self.threshold_start, self.threshold_end = threshold_start, threshold_end
        self.threshold_epochs, self.positives, self.detach = threshold_epochs, positives, detach

    def forward(
        self,
        projections: Views,
        labels: Tensor | None = None,
        *,
        epoch: float | None = None,
        sizes: RowCounts = None,
    ) -> Tensor:
        """Returns the loss over the samples of all processes.

        Args:
            projections: this process's, [batch, views, dim] or a tensor [batch, dim] for each view.
            labels: class numbers [batch] or columns [batch, labels]; None if not `supervised`.
            epoch: the current epoch, which may be fractional; needed for `hardening="threshold"`.
            sizes: numbers of samples of every process, if known; None exchanges them.

        Raises:
            LossError: projections, labels or epoch do not fit the options.
        """
        if (labels is None) == self.supervised:
            raise LossError(
                f"labels are {'missing' if labels is None else 'given'}, but supervised is "
                f"{self.supervised}; pass labels exactly when it is True"
            )
        if epoch is None and self.hardening == "threshold":
            raise LossError(
                "epoch is missing, but the threshold depends on it; pass epoch=..., 0.0 at the "
                "start"
            )
        targets = None if labels is None else as_groups(labels)
        features = {"projections": projections}
        return self.evaluate(features, targets, sizes=sizes, epoch=epoch or 0.0)

    def share(self, batch: GlobalBatch) -> Tensor:
        """Returns `hard` of this process's anchors, at the epoch's threshold."""
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
    """UCL, SCL, H-UCL and H-SCL: negatives tilted towards the anchor, as in `Hard`.

    Both sums are over the admissible negatives: with labels, the views of samples of other classes;
    without, the views of other samples, so that UCL is `nt_xent`. An anchor without an admissible
    negative adds 0.

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
        raise ValueError("positives by label need labels; use augmentation")
    power, floor = _eta_power_and_floor(hardening, beta, threshold)
    scaled, vectors = unit_head(z, tau, "hard", tau / (1 + power))
    count, batch, own = len(z), len(z[0]), as_slice(rows)
    samples = torch.arange(batch, device=z[0].device)
    tags = samples if label is None else class_numbers(label, batch, "hard")
    mirroring = Mirroring.of(rows, batch, [0], [0], [range(count)], present)
    anchors, keys = join_views(scaled, present, own), join_views(vectors, present)
    key_tag = join_views([tags] * count, present)
    anchor_tag = key_tag if len(anchors) == len(keys) else join_views([tags] * count, present, own)
    exclude = None
    if label is None and present is None:
        exclude = numbers_of(batch, count, own, keys.device).own_keys
    sizes, log_m = count_members(key_tag, batch), math.log(max(count * (batch - 1), 1))
    plain = hardening == "none"  # then sum eta is a count, which the classes' sizes give
    pairs = Pairs(
        [anchors],
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
        of_pairs = 1 / (sizes * (sizes - 1)).sum().clamp(min=1).double()
        log_total = partial(log_total, constants=constants)
        return _over_class_pairs(pairs, log_total, of_pairs, positions, mirroring, rows)
    mean = 1 / pair_count(present, batch, count, range(count))
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
        margin = log_total(sums, per_anchor[: len(constants)])[:, None] - positive
        # log(1 + e^x) without torch's cut-off at 20; 0 with gradient 0 at -inf.
        loss = torch.logaddexp(margin, torch.zeros_like(margin))
        return (loss * has_positive[0] if has_positive else loss).sum() * mean

    return contrast(pairs, finish, [*constants, *view_pairs], mirroring=mirroring)


def _over_class_pairs(
    pairs: Pairs,
    log_total: Callable[[Tensor], Tensor],
    mean: Tensor,
    positions: Tensor,
    mirroring: Mirroring | None,
    rows: Rows,
) -> Tensor:
    """Sums the loss over the pairs of a class, times `mean`; anchors lie at `positions` of keys."""
    (anchors,), (keys,), key_tag = pairs.anchors, pairs.keys, pairs.key_tag
    assert key_tag is not None and pairs.anchor_tag is not None
    if mirroring is None and is_fused(keys, "sums", "tags"):
        total = log_total(fused_sums(pairs))
        tags = pairs.anchor_tag.int(), key_tag.int(), positions.int()
        weight = mean.to(total).expand_as(total)
        return fused.tagged_pair_losses(anchors, keys, total, *tags, weight)
    total = log_total(mirrored_sums(pairs, mirroring)[0])
    weight, floor = mean.to(keys).expand(len(key_tag), 1), keys.new_full((1,), -math.inf)
    classes = Classes([key_tag], weight, positions, soft=True)
    all_totals = gather_anchor_values(mirroring, total)
    return class_losses(anchors, keys, total, floor, classes, rows, all_totals)


def _eta_power_and_floor(
    hardening: Hardening, beta: float, threshold: float
) -> tuple[float, float]:
    """Returns the power of e^g in eta, and the g below which eta is 0."""
    if hardening == "exp":
        if not beta >= 0:
            raise ValueError(f"beta must be at least 0, where 0 hardens nothing, got {beta}")
        return beta, -math.inf
    if hardening != "threshold":
        return 0.0, -math.inf
    if not threshold > 0:
        raise ValueError(f"threshold must be above 0, because e^g is, got {threshold}")
    return 0.0, math.log(threshold)


class Debiased(ProjectionLoss):
    r"""The debiased contrastive loss (Chuang et al. 2020, Eq. 7 and 8).

    `NtXent` with the sum over an anchor's N negatives replaced by

    .. math:: \max\Big(\frac{\sum f^- - N \tau^+ f^+}{1 - \tau^+},\; N e^{-1/\tau}\Big)
    """

    needs = Needs(vectors=("projections",), views=2)

    def __init__(
        self,
        *,
        tau: Temperature = 0.5,
        tau_plus: Annotated[float, Field(ge=0, lt=1)] = 0.1,
        gather: bool = True,
    ) -> None:
        """Sets the options.

        Args:
            tau: temperature, at least 0.003.
            tau_plus: prior probability that a negative has the anchor's class, in [0, 1).
            gather: compare the rows of all processes.
        """
        super().__init__(gather=gather)
        self.tau, self.tau_plus = tau, tau_plus

    def share(self, batch: GlobalBatch) -> Tensor:
        """Returns `debiased` of this process's anchors."""
        z = batch.vectors["projections"]
        return debiased(z, tau=self.tau, tau_plus=self.tau_plus, rows=batch.own_rows)


def debiased(
    z: Sequence[Float[Tensor, "batch dim"]],
    *,
    tau: float = 0.5,
    tau_plus: float = 0.1,
    rows: Rows = slice(None),
) -> Float[Tensor, ""]:
    """Debiased contrastive loss (Chuang et al. 2020, Eq. 7 and 8): the equation of `Debiased`.

    Args:
        z: projections, one tensor of shape [batch, dim] a view, of the whole batch.
        tau: temperature, > 0.
        tau_plus: prior probability that a negative is of the anchor's class, in [0, 1).
        rows: as in `nt_xent`.

    Raises:
        ValueError: fewer than two views, tau <= 0, or tau_plus outside [0, 1).
    """
    scaled, vectors = unit_head(z, tau, "debiased")
    count, batch, own = len(z), len(z[0]), as_slice(rows)
    numbers = numbers_of(batch, count, own, z[0].device)
    negatives, mean = count * (batch - 1), 1 / pair_count(None, batch, count, range(count))

    def finish(sums: Tensor, per_anchor: Sequence[Tensor]) -> Tensor:
        (positive,) = per_anchor
        negative_sum = debias(sums, positive, negatives, tau, tau_plus)
        return torch.log1p(negative_sum * torch.exp(-positive)).sum() * mean

    pairs = Pairs(
        [join_views(scaled, None, own)],
        [join_views(vectors, None)],
        numbers.anchors,
        numbers.keys,
        exclude=numbers.own_keys,
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
            f"tau_plus must be a probability below 1, e.g. 1 / number of classes, got {tau_plus}"
        )
    estimate = (total - negatives * tau_plus * torch.exp(positive)) / (1 - tau_plus)
    return estimate.clamp(min=negatives * math.exp(-1 / tau))
