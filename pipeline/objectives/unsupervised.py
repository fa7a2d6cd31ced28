"""Unsupervised contrastive terms: two views of a sample attract, other samples repel."""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from pipeline.objectives.engine import Rule, RuleResult, blockwise, unit, working_dtype


def weighted_unsupervised(
    z: Sequence[Float[Tensor, "batch dim"]],
    h: Sequence[Float[Tensor, "batch dim"]],
    *,
    tau: float = 1.0,
    anchors: Literal["first", "all"] = "all",
    negatives: Literal["all_views", "cross_view"] = "all_views",
    rows: slice = slice(None),
) -> Float[Tensor, ""]:
    r"""HeroCon's weighted unsupervised loss L_u (KDD 2022, Eq. 5).

    The mean over anchors z_iu and positives z_iv, v != u, of

    .. math:: \log\big(f(z_{iu}, z_{iv}) + \sum_{k \ne i} \sum_j g\, f(z_{iu}, z_{kj})\big)
              - \log f(z_{iu}, z_{iv})

    with f = exp(cos / tau) and the learnt weight of a negative
    g = 1/2 [exp(1 - cos(z_iu, H(z_kj))) + exp(1 - cos(z_kj, H(z_iu)))]: near samples, which may
    well be false negatives, are pushed less. Gradients flow through g.

    With unit vectors z, h and p = z / tau - h, the two halves of g f are e/2 exp(z_i . p_k) and
    e/2 exp(p_i . z_k): two products and two exponentials a pair, where the formula as printed
    takes three of each.

    Args:
        z: projections, one tensor of shape [batch, dim] a view, of the whole batch.
        h: H(z), same shapes.
        tau: temperature, > 0.
        anchors: `all` views are anchors, or the `first` only.
        negatives: `all_views` of the other samples (the paper), or `cross_view`: only the
            positive's view of them, the positive pair weighted by g like the negatives and not
            counted again (the authors' code, up to a constant).
        rows: the samples whose anchors are summed here; the loss is still divided by the count of
            the whole batch, so that the shares of all processes add up to the loss.

    Returns:
        The share of the loss that belongs to `rows`: a scalar.

    Raises:
        ValueError: fewer than two views, or tau <= 0.
    """
    views, batch = len(z), z[0].shape[0]
    if views < 2:
        raise ValueError(
            f"weighted_unsupervised has {views} view; expected at least 2: a single-view data set "
            "needs two augmentations of it"
        )
    dtype = working_dtype(z[0].dtype, tau)
    z = [unit(view).to(dtype) for view in z]
    p = [view / tau - unit(weight).to(dtype) for view, weight in zip(z, h, strict=True)]
    anchor_views = range(1 if anchors == "first" else views)
    samples = torch.arange(batch, device=z[0].device)[rows]
    mean = 1 / (len(anchor_views) * (views - 1) * max(batch, 1))

    def positives(u: int) -> list[int]:
        return [v for v in range(views) if v != u]

    if negatives == "cross_view":
        shares = [
            blockwise(
                _cross_view_rule(mean),
                [z[u][rows], p[u][rows]],
                [p[v], z[v]],
                [(z[u][rows] * z[v][rows]).sum(1) / tau],
            )
            for u in anchor_views
            for v in positives(u)
        ]
        return torch.stack(shares).sum()

    positive = [
        torch.stack([(z[u][rows] * z[v][rows]).sum(1) for v in positives(u)], 1) / tau
        for u in anchor_views
    ]
    own = samples[:, None] + batch * torch.arange(views, device=samples.device)
    return blockwise(
        _all_views_rule(mean),
        [torch.cat([x[u][rows] for u in anchor_views]) for x in (z, p)],
        [torch.cat(list(x)) for x in (p, z)],
        [torch.cat(positive)],
        exclude=own.repeat(len(anchor_views), 1),
    )


def _all_views_rule(mean: float) -> Rule:
    """log1p(D / f+), D = sum of g f: a rule over the heads z.p and p.z."""

    def rule(rows: slice, logits: Sequence[Tensor], per_anchor: Sequence[Tensor]) -> RuleResult:
        (positive,) = per_anchor
        total = _weighted_sum(logits)
        ratio = total[:, None] * torch.exp(-positive)
        loss = torch.log1p(ratio).sum() * mean
        share = ratio / (1 + ratio) * mean
        scale = (torch.exp(-positive) / (1 + ratio)).sum(1) * (mean * math.e / 2)
        return loss, [strip.mul_(scale[:, None]) for strip in logits], [-share]

    return rule


def _cross_view_rule(mean: float) -> Rule:
    """Log D - log f+, D with the positive pair inside."""

    def rule(rows: slice, logits: Sequence[Tensor], per_anchor: Sequence[Tensor]) -> RuleResult:
        (positive,) = per_anchor
        total = _weighted_sum(logits)
        loss = (total.log() - positive).sum() * mean
        scale = mean * math.e / 2 / total
        d_positive = torch.full_like(positive, -mean)
        return loss, [strip.mul_(scale[:, None]) for strip in logits], [d_positive]

    return rule


def _weighted_sum(logits: Sequence[Tensor]) -> Tensor:
    """Exponentiate the heads in place; sum_k g f = e/2 (sum exp(z.p) + sum exp(p.z))."""
    return torch.stack([strip.exp_().sum(1) for strip in logits]).sum(0) * (math.e / 2)
