"""Supervised contrastive terms: samples that share labels attract."""

from collections.abc import Iterator, Sequence
from typing import Literal, cast

import torch
from jaxtyping import Float, Num
from torch import Tensor

from heron.losses import fused, products
from heron.losses.batch import GlobalBatch
from heron.losses.engine import (
    RuleResult,
    blockwise,
    refuse_labels,
    strips,
    unit_and_scaled,
    with_gradients,
    working_dtype,
)
from heron.losses.families import LabelledLoss
from heron.losses.inputs import as_columns
from heron.losses.pairs import OwnRows, Rows, as_slice, is_fused, key_numbers, rows_of
from heron.losses.terms import CLASS_LABELS, Needs, Temperature

Distance = Literal["hamming", "indicator"]


class WeightedSupervised(LabelledLoss):
    r"""HeroCon's weighted supervised loss L_s (KDD 2022, Eq. 7), for multi-label samples.

    For each label a, with positives P(a) and negatives N(a), the mean over ordered pairs (i, j) in
    :math:`P(a)^2` of

    .. math:: \log\big(\sigma_{ij} f_{ij} + \sum_{k \in N(a)} \gamma_{ik} f_{ik}\big)
              - \log(\sigma_{ij} f_{ij})

    averaged over labels; :math:`\sigma_{ij} = 1 - \mathrm{dist}(y_i, y_j) / c`,
    :math:`\gamma_{ik} = \mathrm{dist}(y_i, y_k)`, :math:`f_{ij} = \exp(\cos(s_i, s_j) / \tau)`.
    Several views are concatenated to s.
    """

    needs = Needs(labelled_vectors=("hidden",), labels=CLASS_LABELS)
    missing_views = True
    unknown_labels = True
    weighs_labels = True

    def __init__(
        self,
        num_classes: int | None = None,
        *,
        tau: Temperature = 1.0,
        distance: Distance = "hamming",
        self_pairs: bool = False,
        gather: bool = True,
    ) -> None:
        """Sets the options.

        Args:
            num_classes: number of classes, needed if labels are class numbers.
            tau: temperature, at least 0.003.
            distance: `hamming`, or `indicator`: 0 if all labels agree, else 1 (Section 3.3).
            self_pairs: keep the pairs i = j, as the authors' code does.
            gather: compare the rows of all processes.
        """
        super().__init__(gather=gather)
        self.num_classes = num_classes
        self.tau, self.distance, self.self_pairs = tau, distance, self_pairs

    def columns(self, labels: Tensor) -> Tensor:
        """Returns the labels as columns."""
        return as_columns(labels, self.num_classes)

    def share(self, batch: GlobalBatch) -> Tensor:
        """Returns `weighted_supervised` of this process's anchors."""
        weights = batch.known_weights
        y = batch.targets if batch.unknown is None else batch.targets.nan_to_num(0.0)
        _refuse_other_labels(y)
        s, rows = batch.labelled_vectors["hidden"][0], batch.own_labelled_rows
        return _weighted_supervised(s, y, weights, self.tau, self.distance, self.self_pairs, rows)


def weighted_supervised(
    s: Float[Tensor, "batch dim"],
    y: Num[Tensor, "batch labels"],
    *,
    tau: float = 1.0,
    distance: Distance = "hamming",
    self_pairs: bool = False,
    rows: Rows = slice(None),
    label_weights: Float[Tensor, "batch labels"] | None = None,
) -> Float[Tensor, ""]:
    r"""HeroCon's weighted supervised loss L_s (KDD 2022, Eq. 7): see `WeightedSupervised`.

    A label with no pair adds 0 and is still counted in the mean.

    Where single labels are unknown (NaN), P(a) and N(a) are the samples known to have a and known
    not to have it. With K_i the known labels of i,

    .. math:: dist(y_i, y_k) = \frac{c}{|K_i \cap K_k|}
              \sum_{a \in K_i \cap K_k} 1[y_{ia} \ne y_{ka}]

    so sigma is the share of equal labels among those known of both. Two samples are compared only
    as members of P(a) and N(a) of one label a, so K_i and K_k always have a in common.

    Where labels have weights w, a pair of P(a) counts :math:`w_{ia} w_{ja}` in the mean, a sample
    of N(a) :math:`w_{ka}` in the sum, and each label :math:`w_{ia} w_{ka}` in dist, whose
    :math:`|K_i \cap K_k|` is the sum of these. 0 is the same as an unknown label.

    The inner sum D_ia depends on the anchor and the label alone, so it is one product of a strip
    with 1 - Y. Then only the pairs inside P(a) are visited, label by label: sum_a |P(a)|^2 pairs
    instead of c N^2.

    Args:
        s: concatenated hidden features of the labelled samples of the whole batch.
        y: their labels, 0 or 1, or NaN where unknown; a multi-class label is one-hot.
        tau: temperature, > 0.
        distance: `hamming`, or `indicator`: gamma is 0 where the label vectors agree, else 1, and
            sigma is 1, which makes the multi-class case SupCon's Eq. 6 (Section 3.3).
        self_pairs: keep the pairs i = j, as the authors' code does.
        rows: as in `nt_xent`.
        label_weights: how much each label counts, 0 to 1; None: all count 1.

    Returns:
        The share of the loss that belongs to `rows`: a scalar, which is 0 and still differentiable
        when there is no pair.

    Raises:
        ValueError: tau <= 0, or labels that are not 0 or 1.
    """
    weights = label_weights
    if not ((y == 0) | (y == 1)).all():
        known = ~y.isnan()
        weights = known if weights is None else weights * known
        y = y.nan_to_num(0.0)
        _refuse_other_labels(y)
    return _weighted_supervised(s, y, weights, tau, distance, self_pairs, rows)


def _weighted_supervised(
    s: Tensor,
    y: Tensor,
    weights: Tensor | None,
    tau: float,
    distance: Distance,
    self_pairs: bool,
    rows: Rows,
) -> Tensor:
    """Computes L_s of labels of 0 and 1, 0 for unknown ones, whose weights are 0 or False.

    None: all weights are 1.
    """
    dtype = working_dtype(s.dtype, tau)
    vectors, scaled = (x.flatten(0, 1) for x in unit_and_scaled([s], tau, dtype))
    y = y.to(dtype)
    weighed = False
    if weights is not None and weights.dtype != torch.bool:
        weighed, y = True, y * weights
    count, alone = y.sum(0), cast(Tensor | int, 1)
    if weighed:  # what a sample has in the sum of w_i w_j with itself, over that of w_j
        count = y.sum(0, dtype=torch.float64)  # else little is left of a small weight beside 1
        alone = (y.double().square().sum(0) / count).nan_to_num(0.0)
    pairs = y.shape[1] * count * (count if self_pairs else count - alone)
    weight = pairs.reciprocal_().nan_to_num_(posinf=0.0, neginf=0.0)  # of no pair: 0
    if weighed and not self_pairs:  # rounding may leave something of one sample
        weight.masked_fill_((y > 0).sum(0) < 2, 0.0)
    use_kernels = (
        weights is None and is_fused(vectors, "labels") and y.shape[1] <= fused.WIDEST_SIDE
    )
    if use_kernels:
        return _by_kernels(vectors, scaled, y, weight, distance, self_pairs, rows)
    own = as_slice(rows)
    excluded = None if self_pairs else torch.arange(len(y), device=y.device)[own]
    weights = None if weights is None else weights.to(dtype)
    rule = _PairRule(y, weight, distance, weights, weighed, own, excluded)
    if not isinstance(rows, OwnRows):
        return blockwise(rule, [scaled[own]], [vectors])
    return _shared_pairs(scaled[own], vectors.detach(), rule, rows)


def _refuse_other_labels(y: Tensor) -> None:
    refuse_labels(
        lambda: (y != 0) & (y != 1),
        lambda row: (
            f"weighted_supervised: labels of row {row} must be 0 or 1 for each label, classes "
            f"one-hot, got {y[row].tolist()}"
        ),
    )


def _by_kernels(
    vectors: Tensor,
    scaled: Tensor,
    y: Tensor,
    weight: Tensor,
    distance: Distance,
    self_pairs: bool,
    rows: Rows,
) -> Tensor:
    def sums_and_loss(
        a: Tensor, k: Tensor, y: tuple[Tensor, Tensor], number: Tensor, total: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns D, and the loss of the pairs, of the given D if there is one."""
        sides = fused.Sides.of(a, k, *y)
        sums = fused.label_sums(a, k, *y, distance, sides=sides)
        total = sums if total is None else total
        return sums, fused.pair_losses(a, k, total, *y, weight, number, distance, sides=sides)

    own, excluded = as_slice(rows), key_numbers(len(y), y.device)
    if self_pairs:
        excluded = torch.full_like(excluded, -1)
    own_y, anchors = rows_of(y, own), rows_of(scaled, own)
    keys = vectors.detach() if isinstance(rows, OwnRows) else vectors
    sums, loss = sums_and_loss(anchors, keys, (own_y, y), excluded[own])
    if not isinstance(rows, OwnRows) or not torch.is_grad_enabled():
        return loss
    # `as_keys` adds the gradient of own rows as keys of all anchors, but no value.
    (d_sums,) = torch.autograd.grad(loss, sums, retain_graph=True)
    all_sums, d_sums = rows.gather(torch.cat([sums.detach(), d_sums], 1)).chunk(2, 1)
    is_own = (excluded >= own.start) & (excluded < own.stop)
    excluded = torch.where(is_own, excluded - own.start, -1)
    of_keys = scaled.detach(), vectors[own], (y, own_y), excluded, all_sums
    sums, as_keys = sums_and_loss(*of_keys)
    as_keys = as_keys + (sums * d_sums).sum()
    return loss + as_keys - as_keys.detach()


def _shared_pairs(anchors: Tensor, keys: Tensor, rule: "_PairRule", rows: OwnRows) -> Tensor:
    """L_s of own anchors with the full gradient of their rows, in two passes as in `mirroring`.

    The first pass computes D of the own anchors and the gradient with respect to it, which the
    processes gather; the second the gradient of the rows as anchors and as keys.
    """
    with torch.no_grad():
        loss = torch.zeros((), dtype=torch.float64, device=anchors.device)
        own_sums = anchors.new_empty(2, len(anchors), rule.labels)  # D, and d loss / d D
        all_strips = list(strips(len(anchors), len(keys), anchors.device))
        x, y = products.factors(anchors, keys)
        for strip in all_strips:
            logits = products.logits(x[strip], y)
            weighted = rule.weighted(strip, logits)
            share, own_sums[0, strip], own_sums[1, strip] = rule.loss_and_gradient(strip, *weighted)
            loss += share
        gradient = torch.zeros_like(anchors)
        if anchors.requires_grad:
            all_sums = rows.gather(own_sums.transpose(0, 1).contiguous()).unbind(1)
            for strip in all_strips:
                logits = products.logits(x[strip], y)
                d_logits = rule.logit_gradient(strip, logits, own_sums[:, strip], all_sums)
                products.add_product(gradient[strip], products.coefficients(d_logits, y), y)
    return with_gradients(loss.to(anchors.dtype), [anchors], [gradient])


def _members(y: Tensor) -> tuple[Tensor, ...]:
    labels, rows = y.T.nonzero(as_tuple=True)
    return torch.split(rows, labels.bincount(minlength=y.shape[1]).tolist())


class _PairRule:
    """A strip of L_s with its gradient by hand: autograd would keep c copies of the strip."""

    def __init__(
        self,
        y: Tensor,
        weight: Tensor,
        distance: Distance,
        weights: Tensor | None,
        weighed: bool,
        rows: slice,
        excluded: Tensor | None,
    ) -> None:
        """Takes the anchors `rows`, and each one's own column, if it is excluded.

        `y` are the labels times their weights, which are 0 or 1 unless `weighed`.
        """
        self.labels = y.shape[1]
        self.distance = distance
        self.excluded = excluded
        self.weight = weight.tolist()
        anchor_y = y[rows]
        self.anchor_negative, self.negative = 1 - anchor_y, 1 - y
        self.members = _members(y)
        self.anchor_y = anchor_y
        # hamming(y_i, y_k) = |y_i| + |y_k| - 2 y_i.y_k, as one product of widened label vectors
        self.key_side = torch.cat([y, y.sum(1, keepdim=True), torch.ones_like(y[:, :1])], 1)
        self.anchor_side = torch.cat(
            [-2 * anchor_y, torch.ones_like(anchor_y[:, :1]), anchor_y.sum(1, keepdim=True)], 1
        )
        self.known, self.key_y = None, y if weighed else None
        if weights is not None:  # the same over the labels known of both, by their weights
            self.anchor_negative, self.negative = weights[rows] - anchor_y, weights - y
            if distance == "indicator":  # any label that differs counts, whatever its weight
                y, weights = (y > 0).to(y.dtype), (weights > 0).to(y.dtype)
            self.known = weights[rows], weights
            self.key_side = torch.cat([weights - 2 * y, y], 1)
            self.anchor_side = torch.cat([y[rows], weights[rows]], 1)
        self.agreeing: tuple[Tensor, Tensor] | None = None
        if weighed and weights is not None:  # by sums without differences, which lose digits
            lacks = weights - y
            self.key_side = torch.cat([lacks, y], 1)
            has_and_lacks = torch.cat([y, lacks], 1)
            self.anchor_side = has_and_lacks[rows]
            self.agreeing = has_and_lacks[rows], has_and_lacks

    def distances(self, rows: slice) -> Tensor:
        hamming = self.anchor_side[rows] @ self.key_side.T
        if self.known is not None:
            known_of_both = self.known[0][rows] @ self.known[1].T
            tiny = torch.finfo(hamming.dtype).tiny  # of pairs without a common label, at 0
            hamming.mul_(self.labels).div_(known_of_both.clamp_(min=tiny))
        return hamming if self.distance == "hamming" else hamming.gt_(0.5)

    def __call__(
        self, rows: slice, logits: Sequence[Tensor], per_anchor: Sequence[Tensor]
    ) -> RuleResult:
        repulsion, inverse = self.weighted(rows, logits[0])
        attraction = torch.zeros_like(inverse)
        loss, _, d_total = self.loss_and_gradient(rows, repulsion, inverse, attraction)
        d_logits = (d_total @ self.negative.T).mul_(repulsion).sub_(attraction)
        return loss, [d_logits], []

    def loss_and_gradient(
        self, rows: slice, repulsion: Tensor, inverse: Tensor, attraction: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns a strip's loss, D, [anchors, labels], and d loss / d D; adds to `attraction`."""
        total = repulsion @ self.negative
        loss, d_total = inverse.new_zeros(()), torch.zeros_like(total)
        for a, weight, anchors, _, flat_index in self.pairs(rows):
            d = total[:, a].index_select(0, anchors)[:, None]
            pair_inverse = inverse.view(-1).index_select(0, flat_index).view(len(anchors), -1)
            ratio = pair_inverse * d  # x = D / (sigma f)
            if isinstance(weight, Tensor):
                loss += (ratio.log1p() * weight).sum()
            else:
                loss += ratio.log1p().sum() * weight
            d_pairs = pair_inverse.mul_(weight).div_(ratio.add_(1))  # d loss / d D
            d_total[:, a].index_copy_(0, anchors, d_pairs.sum(1))
            if attraction is not None:  # x / (1 + x)
                attraction.view(-1).scatter_add_(0, flat_index, d_pairs.mul_(d).view(-1))
        return loss, total, d_total

    def logit_gradient(
        self, rows: slice, logits: Tensor, anchor_sums: Tensor, key_sums: Sequence[Tensor]
    ) -> Tensor:
        """Returns d loss / d logits of a strip, its rows being both anchors and keys of all rows.

        `anchor_sums` and `key_sums` are D and d loss / d D of the strip's anchors and of its keys.
        """
        repulsion, inverse = self.weighted(rows, logits)
        d_logits = anchor_sums[1] @ self.negative.T
        d_logits.addmm_(self.anchor_negative[rows], key_sums[1].T).mul_(repulsion)
        for a, weight, anchors, members, flat_index in self.pairs(rows):
            pair_inverse = inverse.view(-1).index_select(0, flat_index).view(len(anchors), -1)
            d_pairs = torch.zeros_like(pair_inverse)
            for d in (anchor_sums[0][anchors, a, None], key_sums[0][None, members, a]):
                ratio = pair_inverse * d
                if isinstance(weight, Tensor):
                    d_pairs.sub_(ratio.div_(ratio + 1).mul_(weight))
                else:
                    d_pairs.addcdiv_(ratio, ratio + 1, value=-weight)
            d_logits.view(-1).scatter_add_(0, flat_index, d_pairs.view(-1))
        return d_logits

    def weighted(self, rows: slice, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Returns gamma f of a strip, and 1 / (sigma f), which is 0 for an excluded pair."""
        f = logits.exp_()
        dist = self.distances(rows)
        repulsion = dist * f
        if self.distance == "hamming":
            f.mul_(self.sigma(rows, dist))
        inverse = f.reciprocal_()
        if self.excluded is not None:
            inverse.scatter_(1, self.excluded[rows, None], 0.0)  # ratio 0: no loss, no gradient
        return repulsion, inverse

    def sigma(self, rows: slice, dist: Tensor) -> Tensor:
        """Returns the share of equal labels of a strip, in the memory of its distances or not."""
        if self.agreeing is None or self.known is None:
            return dist.mul_(-1 / self.labels).add_(1)
        of_both = (self.known[0][rows] @ self.known[1].T).clamp_(min=torch.finfo(dist.dtype).tiny)
        return (self.agreeing[0][rows] @ self.agreeing[1].T).div_(of_both)

    def pairs(self, rows: slice) -> Iterator[tuple[int, float | Tensor, Tensor, Tensor, Tensor]]:
        """Yields the pairs inside each P(a): a, their weight, anchors, keys, flat strip indices.

        The weight is one of all pairs or, where labels have weights, of each, [anchors, keys].

        One flat index is ten times faster on a CPU than a pair of index vectors.
        """
        by_label = zip(_members(self.anchor_y[rows]), self.members, self.weight, strict=True)
        for a, (anchors, members, weight) in enumerate(by_label):
            if weight != 0 and anchors.numel():
                flat_index = (anchors[:, None] * len(self.negative) + members).view(-1)
                each: float | Tensor = weight
                if self.key_y is not None:
                    own = self.anchor_y[rows][anchors, a, None]
                    each = own * self.key_y[members, a] * weight
                yield a, each, anchors, members, flat_index
