"""Supervised contrastive terms: samples that share labels attract."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float, Num
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from heron.pipeline.config.terms import KNOWN, Needs, Temperature, Term
from heron.pipeline.objectives import fused
from heron.pipeline.objectives.batch import GlobalBatch
from heron.pipeline.objectives.engine import RuleResult, blockwise, strips, unit, working_dtype
from heron.pipeline.objectives.pairs import is_fused
from heron.pipeline.objectives.present import OwnRows, Rows, as_slice
from heron.pipeline.objectives.ring import blocks, held_rows, ring_of

Distance = Literal["hamming", "indicator"]


class WeightedSupervised(Term):
    """HeroCon's L_s, Eq. 7."""

    tau: Temperature = 1.0
    distance: Distance = "hamming"
    self_pairs: bool = False

    needs: ClassVar[Needs] = Needs(labelled_vectors=("hidden",), labels=KNOWN)
    rings: ClassVar[bool] = True
    missing_views: ClassVar[bool] = True
    unknown_labels: ClassVar[bool] = True

    def exchanged_sums(
        self, shapes: Sequence[Sequence[int]], labels: int, levels: int
    ) -> list[int]:
        """The sum of each label, and the slope by it."""
        return [2 * labels]

    def ring_widths(self, views: int, widths: Mapping[str, int]) -> list[int]:
        """For D, for the pairs, and for the gradient."""
        return [widths["hidden"]] * 3

    def loss(self, batch: GlobalBatch, memory: Any) -> Tensor:
        """See `weighted_supervised`."""
        return weighted_supervised(
            batch.labelled_vectors["hidden"][0],
            batch.targets,
            tau=self.tau,
            distance=self.distance,
            self_pairs=self.self_pairs,
            rows=batch.own_labelled_rows,
        )


def weighted_supervised(
    s: Float[Tensor, "held dim"],
    y: Num[Tensor, "batch labels"],
    *,
    tau: float = 1.0,
    distance: Distance = "hamming",
    self_pairs: bool = False,
    rows: Rows = slice(None),
) -> Float[Tensor, ""]:
    r"""HeroCon's weighted supervised loss L_s (KDD 2022, Eq. 7).

    For each label a, with positives P(a) and negatives N(a), the mean over ordered pairs
    (i, j) in P(a)^2 of

    .. math:: \log\big(\sigma_{ij} f_{ij} + \sum_{k \in N(a)} \gamma_{ik} f_{ik}\big)
              - \log(\sigma_{ij} f_{ij})

    averaged over the labels; f = exp(cos / tau), sigma_ij = 1 - dist(y_i, y_j) / c,
    gamma_ik = dist(y_i, y_k). A label with no pair adds 0 and is still counted in the mean.

    Where single labels are unknown (NaN), P(a) and N(a) are the samples that are known to have a
    and not to have it, and over the labels K_i that are known of i

    .. math:: dist(y_i, y_k) = \frac{c}{|K_i \cap K_k|}
              \sum_{a \in K_i \cap K_k} 1[y_{ia} \ne y_{ka}]

    so that sigma is the share of equal labels among those known of both. The two have a label in
    common wherever they are compared: the a of P(a) and N(a).

    The inner sum D_ia belongs to the anchor alone, so it is one product of a strip with 1 - Y;
    then only the pairs inside P(a) are visited, label by label: sum_a |P(a)|^2 of them instead of
    c N^2.

    Args:
        s: concatenated hidden features of the labelled samples of the whole batch.
        y: their labels, 0 or 1, NaN where one is unknown; a multi-class label is one-hot.
        tau: temperature, > 0.
        distance: `hamming`, or `indicator`: gamma is 0 where the label vectors agree, else 1, and
            sigma is 1, which makes the multi-class case SupCon's Eq. 6 (Section 3.3).
        self_pairs: keep the pairs i = j, as the authors' code does.
        rows: the samples whose anchors are summed here, as of `nt_xent`; counts are those of the
            whole batch.

    Returns:
        The share of the loss that belongs to `rows`: a scalar, 0 and differentiable when there is
        no pair.

    Raises:
        ValueError: tau <= 0, or labels that are not 0 or 1.
    """
    y, known = _known(y)
    dtype = working_dtype(s.dtype, tau)
    s = unit(s).to(dtype)
    y = y.to(dtype)
    count = y.sum(0)
    pairs = count * (count if self_pairs else count - 1)
    weight = torch.where(pairs > 0, 1 / (y.shape[1] * pairs.clamp(min=1)), 0.0)
    kernels = is_fused(s) and known is None and y.shape[1] <= fused.WIDEST_SIDE
    if kernels and ring_of(rows) is None:
        return _by_kernels(s, y, weight, tau, distance, self_pairs, rows)
    stated = None if known is None else known.to(dtype)
    return _by_strips(s, y, weight, tau, distance, self_pairs, stated, rows)


def _known(y: Tensor) -> tuple[Tensor, Tensor | None]:
    """Labels as 0/1, and which of them are known; None: all."""
    known = None
    if not ((y == 0) | (y == 1)).all():
        known = ~y.isnan()
        y = y.nan_to_num(0.0)
    if not ((y == 0) | (y == 1)).all():
        row = int(((y != 0) & (y != 1)).any(1).nonzero()[0])
        raise ValueError(
            f"weighted_supervised: labels of row {row} are {y[row].tolist()}; expected 0 or 1 for "
            "each label, classes one-hot"
        )
    return y, known


def _by_strips(
    s: Tensor,
    y: Tensor,
    weight: Tensor,
    tau: float,
    distance: Distance,
    self_pairs: bool,
    stated: Tensor | None,
    rows: Rows,
) -> Tensor:
    """L_s a strip of anchors at a time; `stated` are 1 for the labels that are known."""
    own, (here, _) = as_slice(rows), held_rows(rows)
    numbers = torch.arange(len(y), device=y.device)[own]

    def rule(keys: slice, own_too: bool = True) -> _PairRule:
        at = None if self_pairs or not own_too else numbers - (keys.start or 0)
        return _PairRule(y, weight, distance, stated, own, keys, at)

    every = slice(0, len(y))
    whole = rule(every) if ring_of(rows) is None else None
    if not isinstance(rows, OwnRows):
        assert whole is not None
        return blockwise(whole, [s[own] / tau], [s])

    def around() -> Iterator[tuple[_PairRule, Tensor, slice]]:
        if whole is not None:
            yield whole, s.detach(), every
            return
        for block in blocks([s], rows, [[0]]):
            yield rule(block.rows, block.own), block.keys[0], block.rows

    loss: Tensor = _SharedPairs.apply(s[here] / tau, around, y.shape[1], rows)  # type: ignore[no-untyped-call]
    return loss


def _by_kernels(
    s: Tensor,
    y: Tensor,
    weight: Tensor,
    tau: float,
    distance: Distance,
    self_pairs: bool,
    rows: Rows,
) -> Tensor:
    """L_s of unit vectors by fused kernels."""
    own = as_slice(rows)
    number = torch.arange(len(y), dtype=torch.int32, device=y.device)
    number = torch.full_like(number, -1) if self_pairs else number
    anchors, keys = s[own] / tau, s.detach() if isinstance(rows, OwnRows) else s
    sums = fused.label_sums(anchors, keys, y[own], y, distance)
    total = fused.log_sums(sums)
    loss = fused.pair_losses(anchors, keys, total, y[own], y, weight, number[own], distance)
    if not isinstance(rows, OwnRows) or not torch.is_grad_enabled():
        return loss
    # What the anchors of all find for own keys: a gradient, whose value is taken away again.
    (slope,) = torch.autograd.grad(loss, sums, retain_graph=True)
    found, slope = rows.gather(torch.cat([sums.detach(), slope], 1)).chunk(2, 1)
    every, mine, own_y = s.detach() / tau, s[own], y[own]
    number = torch.where((number >= own.start) & (number < own.stop), number - own.start, -1)
    pull = (fused.label_sums(every, mine, y, own_y, distance) * slope).sum()
    total = fused.log_sums(found)
    pull = pull + fused.pair_losses(every, mine, total, y, own_y, weight, number, distance)
    return loss + pull - pull.detach()


class _SharedPairs(torch.autograd.Function):
    """L_s of own anchors with the whole gradient of their rows; two passes, as of `mirroring`.

    The first finds each own anchor's D of every label and the loss's slope by it, which all
    processes then tell each other; the second what is owed to the rows as anchors and as keys. A
    loss of pairs needs D whole, so where keys come round D takes a round of its own.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, anchors: Tensor, around: "Around", labels: int, rows: OwnRows
    ) -> Tensor:
        loss = torch.zeros((), dtype=torch.float64, device=anchors.device)
        own = anchors.new_zeros(2, len(anchors), labels)  # D, and the slope by it

        def visits() -> Iterator[tuple[_PairRule, slice, Tensor, Tensor, slice]]:
            for rule, keys, at in around():
                for part in strips(len(anchors), len(keys), anchors.device):
                    yield rule, part, anchors[part] @ keys.T, keys, at

        if rows.ring is not None:
            for rule, part, logits, _, _ in visits():
                own[0, part] += rule.totals(part, logits)
        for rule, part, logits, _, _ in visits():
            total = own[0, part] if rows.ring is not None else None
            share, own[0, part], slope = rule.found(part, logits, total)
            own[1, part] += slope
            loss += share
        gradient = torch.zeros_like(anchors)
        if ctx.needs_input_grad[0]:  # type: ignore[attr-defined]
            everyone = rows.gather(own.transpose(0, 1).contiguous()).unbind(1)
            for rule, part, logits, keys, at in visits():
                slope = rule.owed(part, logits, own[:, part], [x[at] for x in everyone])
                gradient[part].addmm_(slope, keys)
        ctx.save_for_backward(gradient)
        return loss.to(anchors.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return grads[0] * gradient, None, None, None


def _members(y: Tensor) -> tuple[Tensor, ...]:
    """The rows that have each label, by label."""
    labels, rows = y.T.nonzero(as_tuple=True)
    return torch.split(rows, labels.bincount(minlength=y.shape[1]).tolist())


class _PairRule:
    """One strip of L_s and its gradient, written out: autograd would keep c copies of the strip."""

    def __init__(
        self,
        y: Tensor,
        weight: Tensor,
        distance: Distance,
        known: Tensor | None,
        rows: slice,
        keys: slice,
        at: Tensor | None,
    ) -> None:
        """Pairs of the anchors `rows` and some keys; their own lie `at` these, None: nowhere."""
        self.labels = y.shape[1]
        self.distance = distance
        self.at = at
        self.weight = weight.tolist()
        anchor_y, y = y[rows], y[keys]
        self.anchor_negative, self.negative = 1 - anchor_y, 1 - y
        self.members = _members(y)
        self.anchor_y = anchor_y
        # hamming(y_i, y_k) = |y_i| + |y_k| - 2 y_i.y_k, as one product of widened label vectors
        self.key_side = torch.cat([y, y.sum(1, keepdim=True), torch.ones_like(y[:, :1])], 1)
        self.anchor_side = torch.cat(
            [-2 * anchor_y, torch.ones_like(anchor_y[:, :1]), anchor_y.sum(1, keepdim=True)], 1
        )
        self.known = None
        if known is not None:  # the same over the labels that are known of both
            self.known = known[rows], known[keys]
            self.anchor_negative, self.negative = known[rows] - anchor_y, known[keys] - y
            self.key_side = torch.cat([known[keys] - 2 * y, y], 1)
            self.anchor_side = torch.cat([anchor_y, known[rows]], 1)

    def distances(self, rows: slice) -> Tensor:
        """dist(y_i, y_k) of a strip."""
        hamming = self.anchor_side[rows] @ self.key_side.T
        if self.known is not None:
            both = self.known[0][rows] @ self.known[1].T
            hamming.mul_(self.labels).div_(both.clamp_(min=1))
        return hamming if self.distance == "hamming" else hamming.gt_(0.5)

    def __call__(
        self, rows: slice, logits: Sequence[Tensor], per_anchor: Sequence[Tensor]
    ) -> RuleResult:
        repulsion, inverse = self.weighed(rows, logits[0])
        total = repulsion @ self.negative  # D, anchors x labels
        loss, d_total = inverse.new_zeros(()), torch.zeros_like(total)
        attraction = torch.zeros_like(inverse)
        for a, weight, anchors, _, place in self.pairs(rows):
            d = total[:, a].index_select(0, anchors)[:, None]
            pair_inverse = inverse.view(-1).index_select(0, place).view(len(anchors), -1)
            ratio = pair_inverse * d  # x = D / (sigma f)
            loss += ratio.log1p().sum() * weight
            shrink = pair_inverse.mul_(weight).div_(ratio.add_(1))  # d loss / d D
            d_total[:, a].index_copy_(0, anchors, shrink.sum(1))
            attraction.view(-1).scatter_add_(0, place, shrink.mul_(d).view(-1))  # x / (1 + x)
        d_logits = (d_total @ self.negative.T).mul_(repulsion).sub_(attraction)
        return loss, [d_logits], []

    def totals(self, rows: slice, logits: Tensor) -> Tensor:
        """What these keys add to D."""
        return (self.distances(rows) * logits.exp_()) @ self.negative

    def found(
        self, rows: slice, logits: Tensor, total: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The loss of a strip, D, and the loss's slope by D.

        `total` is D where it is no sum over these keys alone.
        """
        repulsion, inverse = self.weighed(rows, logits)
        total = repulsion @ self.negative if total is None else total
        loss, d_total = inverse.new_zeros(()), torch.zeros_like(total)
        for a, weight, anchors, _, place in self.pairs(rows):
            pair_inverse = inverse.view(-1).index_select(0, place).view(len(anchors), -1)
            ratio = pair_inverse * total[:, a].index_select(0, anchors)[:, None]
            loss += ratio.log1p().sum() * weight
            slope = pair_inverse.div_(ratio.add_(1)).sum(1).mul_(weight)
            d_total[:, a].index_copy_(0, anchors, slope)
        return loss, total, d_total

    def owed(self, rows: slice, logits: Tensor, own: Tensor, everyone: Sequence[Tensor]) -> Tensor:
        """The slope by the logits of a strip, of its rows as anchors and as keys of all.

        `own` and `everyone` are D and its slope, of the strip's anchors and of all.
        """
        repulsion, inverse = self.weighed(rows, logits)
        slope = own[1] @ self.negative.T
        slope.addmm_(self.anchor_negative[rows], everyone[1].T).mul_(repulsion)
        for a, weight, anchors, members, place in self.pairs(rows):
            pair_inverse = inverse.view(-1).index_select(0, place).view(len(anchors), -1)
            pulls = torch.zeros_like(pair_inverse)
            for d in (own[0][anchors, a, None], everyone[0][None, members, a]):
                ratio = pair_inverse * d
                pulls.addcdiv_(ratio, ratio + 1, value=-weight)
            slope.view(-1).scatter_add_(0, place, pulls.view(-1))
        return slope

    def weighed(self, rows: slice, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Of a strip gamma f, and 1 / (sigma f), which is 0 of no pair."""
        f = logits.exp_()
        dist = self.distances(rows)
        repulsion = dist * f
        if self.distance == "hamming":
            f.mul_(dist.mul_(-1 / self.labels).add_(1))
        inverse = f.reciprocal_()
        if self.at is not None:
            inverse.scatter_(1, self.at[rows, None], 0.0)  # ratio 0: no loss, no gradient
        return repulsion, inverse

    def pairs(self, rows: slice) -> Iterator[tuple[int, float, Tensor, Tensor, Tensor]]:
        """The pairs inside each P(a): a, its weight, rows of the strip, keys, places in the strip.

        One flat index serves the gather and the scatter: an order of magnitude faster on a CPU than
        indexing with a pair of index vectors.
        """
        here = zip(_members(self.anchor_y[rows]), self.members, self.weight, strict=True)
        for a, (anchors, members, weight) in enumerate(here):
            if weight != 0 and anchors.numel():
                place = (anchors[:, None] * len(self.negative) + members).view(-1)
                yield a, weight, anchors, members, place


Around = Callable[[], Iterator[tuple[_PairRule, Tensor, slice]]]  # rules, keys, their rows
