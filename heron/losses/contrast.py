"""The common part of contrastive terms: sums of exponentials over weighted pairs, in one pass.

Terms differ in which pairs count, with what weight, and in the loss that they take of an anchor's
sums. A term describes its pairs by vectors of each side (never by a matrix), and its loss as a
plain differentiable function of the sums. The block loop, the gradient of the logits and the
choice between strips and fused kernels are here.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Num
from torch import Tensor

from heron.losses import fused
from heron.losses.engine import Rule, RuleResult, blockwise
from heron.losses.mirroring import Mirroring, mirrored_sums
from heron.losses.pairs import Pairs, is_fused, summands

# (sums [rows, moments], the rows of the per-anchor tensors) -> share of the loss
Finish = Callable[[Tensor, Sequence[Tensor]], Tensor]


def contrast(
    pairs: Pairs,
    finish: Finish,
    per_anchor: Sequence[Num[Tensor, "anchors ..."]] = (),
    mirroring: Mirroring | None = None,
) -> Float[Tensor, ""]:
    """Sums over all anchors a loss of each anchor's sums, in memory linear in anchors + keys.

    Without `mirroring` the gradient is that of the anchors' share, with respect to every vector.
    With it, for a term whose rows are each other's anchors and keys, it is the whole gradient of
    the anchors' rows alone: see `losses.mirroring`.

    Args:
        pairs: the pairs to compare.
        finish: the loss of some anchors, a scalar, in plain differentiable torch.
        per_anchor: float tensors; `finish` gets their rows of its anchors.
        mirroring: how the pairs mirror each other.

    Returns:
        The loss, differentiable once with respect to the vectors and `per_anchor`.
    """
    if mirroring is not None:
        (sums,) = mirrored_sums(pairs, mirroring)
        return finish(sums, per_anchor)
    width = 0 if pairs.anchor_weight is None else pairs.anchor_weight.shape[1]
    if width <= fused.WIDEST_SIDE and is_fused(pairs.anchors[0], "sums"):
        return finish(fused_sums(pairs), per_anchor)
    return blockwise(_rule(pairs, finish), pairs.anchors, pairs.keys, per_anchor)


def fused_sums(pairs: Pairs) -> Float[Tensor, "anchors moments"]:
    """Computes the sums of `pairs` by fused kernels, differentiable with respect to the vectors."""
    weights = {"anchor_weight": pairs.anchor_weight, "key_weight": pairs.key_weight}
    options = weights | pairs.of_kernels()
    by_head = zip(pairs.anchors, pairs.keys, strict=True)
    heads = [fused.exponential_sums(anchors, keys, **options) for anchors, keys in by_head]
    sums = torch.stack(heads).sum(0)
    if pairs.slopes is None:
        return sums
    # Where a slope differs from its moment the value stays, and its gradient is scaled.
    rescaled = [
        sums[:, r].detach()
        + (slope / moment if slope else 0.0) * (sums[:, r] - sums[:, r].detach())
        for r, (moment, slope) in enumerate(zip(pairs.moments, pairs.slopes, strict=True))
    ]
    return torch.stack(rescaled, 1)


def _rule(pairs: Pairs, finish: Finish) -> Rule:
    slopes = pairs.slopes or pairs.moments

    def rule(rows: slice, logits: Sequence[Tensor], per_anchor: Sequence[Tensor]) -> RuleResult:
        heads = [summands(pairs, rows, strip) for strip in logits]  # overwrites the logits
        sums = torch.stack([torch.stack([e.sum(1) for e in head], 1) for head in heads]).sum(0)
        leaves = [t.detach().requires_grad_() for t in (sums, *per_anchor)]
        with torch.enable_grad():
            loss = finish(leaves[0], leaves[1:])
            d_sums, *d_per_anchor = torch.autograd.grad(
                loss, leaves, allow_unused=True, materialize_grads=True
            )
        return loss.detach(), [_d_logits(head, d_sums, slopes) for head in heads], d_per_anchor

    return rule


def _d_logits(summands: Sequence[Tensor], d_sums: Tensor, slopes: Sequence[float]) -> Tensor:
    """Returns the gradient of the logits, in the summands' memory."""
    scaled = [
        summand.mul_(d_sums[:, r, None] * slope)
        for r, (summand, slope) in enumerate(zip(summands, slopes, strict=True))
        if slope != 0
    ]
    total = scaled[0]
    for summand in scaled[1:]:
        total.add_(summand)
    return total
