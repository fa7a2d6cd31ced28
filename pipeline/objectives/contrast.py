"""What the contrastive terms share: sums of exponentials over weighed pairs, in one pass.

A term differs from the next in which pairs count, with what weight, and in what is made of an
anchor's sums. It says the first by vectors of each side (never by a matrix), the second as a plain
differentiable function of the sums; the block loop, the stable exponentials, the gradient of the
logits and the choice between strips and fused kernels are here.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Num
from torch import Tensor

from heron.pipeline.objectives import fused
from heron.pipeline.objectives.engine import Rule, RuleResult, blockwise


@dataclass(frozen=True)
class Pairs:
    """Anchors, keys, and the weight of each of their pairs.

    With l_ik = anchors_i . keys_k (1 / tau is inside the anchors), an anchor's sum of a moment m is

        sum_k w_ik 1[anchor_tag_i != key_tag_k] 1[l_ik >= floor] exp(m l_ik)

    where w_ik = anchor_weight_i . key_weight_k; those of several heads (other vectors for the same
    pairs) are added.

    Attributes:
        anchors: [anchors, dim], one a head, in the working dtype; heads may differ in dim.
        keys: [keys, dim], one a head.
        anchor_tag: whole numbers; a pair whose tags agree is left out.
        key_tag: the same of the keys; None leaves no pair out.
        exclude: the pairs that the tags leave out, as a few key columns an anchor, where they are
            few: strips set those alone and compare no tags.
        anchor_weight: [anchors, width], its product with `key_weight` weighs a pair; not
            differentiated.
        key_weight: [keys, width], or None for weights of 1.
        moments: the exponents' factors m; 0 counts the pairs.
        slopes: d / d logit of e^(m l) is taken as slope * e^(m l); None: the moments themselves.
        floor: pairs with a smaller logit are left out.
    """

    anchors: Sequence[Float[Tensor, "anchors _"]]
    keys: Sequence[Float[Tensor, "keys _"]]
    anchor_tag: Int[Tensor, " anchors"] | None = None
    key_tag: Int[Tensor, " keys"] | None = None
    exclude: Int[Tensor, "anchors excluded"] | None = None
    anchor_weight: Float[Tensor, "anchors width"] | None = None
    key_weight: Float[Tensor, "keys width"] | None = None
    moments: tuple[float, ...] = (1.0,)
    slopes: tuple[float, ...] | None = None
    floor: float = -math.inf


@dataclass(frozen=True)
class Matches:
    """The positive pairs of a strip, for terms that need each of them.

    Attributes:
        anchor: the pair's anchor, as a row of the strip, [pairs].
        key: its key, [pairs].
        logits: of the pairs, differentiable, [pairs].
        rows: the strip, of all anchors.
    """

    anchor: Int[Tensor, " pairs"]
    key: Int[Tensor, " pairs"]
    logits: Float[Tensor, " pairs"]
    rows: slice


MATCH_PART = 8  # lists of pairs take so many numbers where a logit takes one: strips shrink by it

# (sums [rows, moments], the rows of the per-anchor tensors, the positive pairs) -> share of loss
Finish = Callable[[Tensor, Sequence[Tensor], Matches | None], Tensor]
# A strip of anchors -> the pairs (row of the strip, key) that `Finish` is to see.
Match = Callable[[slice], tuple[Tensor, Tensor]]


def contrast(
    pairs: Pairs,
    finish: Finish,
    per_anchor: Sequence[Num[Tensor, "anchors ..."]] = (),
    match: Match | None = None,
) -> Float[Tensor, ""]:
    """Sum a loss of each anchor's sums over all anchors; memory is linear in anchors + keys.

    Args:
        pairs: what is compared.
        finish: the loss of some anchors, a scalar, in plain differentiable torch.
        per_anchor: tensors of floats of which `finish` is given the rows of its anchors.
        match: the positive pairs that `finish` sees one by one; these need one head.

    Returns:
        The loss, differentiable once with respect to the vectors and `per_anchor`.
    """
    width = 0 if pairs.anchor_weight is None else pairs.anchor_weight.shape[1]
    if match is None and width <= fused.WIDEST_SIDE and is_fused(pairs.anchors[0]):
        return finish(fused_sums(pairs), per_anchor, None)
    part = 1 if match is None else MATCH_PART
    return blockwise(_rule(pairs, finish, match), pairs.anchors, pairs.keys, per_anchor, part)


def is_fused(vectors: Tensor) -> bool:
    """Whether terms of these vectors are computed by fused kernels: see `fused.enabled`.

    Wider ones are not: a strip keeps its coefficients for plain products, three in all, where a
    kernel would compute its logits again for each part of a gradient.
    """
    narrow = vectors.shape[1] <= fused.WIDEST
    return narrow and vectors.dtype == torch.float32 and fused.enabled(vectors.device)


def fused_sums(pairs: Pairs) -> Float[Tensor, "anchors moments"]:
    """The sums of `pairs` by fused kernels, differentiable with respect to the vectors."""
    heads = [
        fused.exponential_sums(
            anchors,
            keys,
            moments=pairs.moments,
            floor=pairs.floor,
            anchor_tag=None if pairs.anchor_tag is None else pairs.anchor_tag.int(),
            key_tag=None if pairs.key_tag is None else pairs.key_tag.int(),
            anchor_weight=pairs.anchor_weight,
            key_weight=pairs.key_weight,
        )
        for anchors, keys in zip(pairs.anchors, pairs.keys, strict=True)
    ]
    sums = torch.stack(heads).sum(0)
    if pairs.slopes is None:
        return sums
    # Another slope than the moment's: the value stays, its gradient is scaled.
    parts = [
        sums[:, r].detach()
        + (slope / moment if slope else 0.0) * (sums[:, r] - sums[:, r].detach())
        for r, (moment, slope) in enumerate(zip(pairs.moments, pairs.slopes, strict=True))
    ]
    return torch.stack(parts, 1)


def _rule(pairs: Pairs, finish: Finish, match: Match | None) -> Rule:
    slopes = pairs.slopes or pairs.moments

    def rule(rows: slice, logits: Sequence[Tensor], per_anchor: Sequence[Tensor]) -> RuleResult:
        place, positive = None, None
        if match is not None:
            anchor, key = match(rows)
            place = anchor * logits[0].shape[1] + key  # one flat index: far faster on a CPU
            positive = logits[0].view(-1).index_select(0, place)
        parts = [_summands(pairs, rows, strip) for strip in logits]  # overwrites the logits
        sums = torch.stack([torch.stack([e.sum(1) for e in head], 1) for head in parts]).sum(0)

        leaves = [t.detach().requires_grad_() for t in (sums, *per_anchor)]
        matches = None
        if match is not None and positive is not None:
            leaves.append(positive.requires_grad_())
            matches = Matches(anchor, key, positive, rows)
        with torch.enable_grad():
            loss = finish(leaves[0], leaves[1 : 1 + len(per_anchor)], matches)
            d_sums, *others = torch.autograd.grad(
                loss, leaves, allow_unused=True, materialize_grads=True
            )

        d_logits = [_gradient(head, d_sums, slopes) for head in parts]
        if place is not None:
            d_logits[0].view(-1).scatter_add_(0, place, others.pop())
        return loss.detach(), d_logits, others

    return rule


def _summands(pairs: Pairs, rows: slice, strip: Tensor) -> list[Tensor]:
    """The weighed exponentials of a strip, one tensor a moment; the last in the strip's memory."""
    out = None
    if pairs.exclude is None and pairs.anchor_tag is not None and pairs.key_tag is not None:
        out = pairs.anchor_tag[rows, None] == pairs.key_tag
    if pairs.floor > -math.inf:
        low = strip < pairs.floor
        out = low if out is None else out | low
    weight = None
    if pairs.anchor_weight is not None and pairs.key_weight is not None:
        weight = pairs.anchor_weight[rows] @ pairs.key_weight.T
    summands = [torch.exp(strip * moment) for moment in pairs.moments[:-1]]
    last = strip if pairs.moments[-1] == 1 else strip.mul_(pairs.moments[-1])
    summands.append(last.exp_())
    for part in summands:
        if out is not None:
            part.masked_fill_(out, 0.0)
        if pairs.exclude is not None:
            part.scatter_(1, pairs.exclude[rows], 0.0)
        if weight is not None:
            part.mul_(weight)
    return summands


def _gradient(summands: Sequence[Tensor], d_sums: Tensor, slopes: Sequence[float]) -> Tensor:
    """The gradient of the logits, in the summands' memory."""
    scaled = [
        part.mul_(d_sums[:, r, None] * slope)
        for r, (part, slope) in enumerate(zip(summands, slopes, strict=True))
        if slope != 0
    ]
    total = scaled[0]
    for part in scaled[1:]:
        total.add_(part)
    return total
