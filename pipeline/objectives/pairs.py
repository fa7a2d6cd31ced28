"""Anchors, keys, and the weighed exponentials of their pairs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from heron.pipeline.objectives import fused


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

    anchors: Sequence[Float[Tensor, "_ _"]]
    keys: Sequence[Float[Tensor, "_ _"]]
    anchor_tag: Int[Tensor, " anchors"] | None = None
    key_tag: Int[Tensor, " keys"] | None = None
    exclude: Int[Tensor, "anchors excluded"] | None = None
    anchor_weight: Float[Tensor, "anchors width"] | None = None
    key_weight: Float[Tensor, "keys width"] | None = None
    moments: tuple[float, ...] = (1.0,)
    slopes: tuple[float, ...] | None = None
    floor: float = -math.inf


def is_fused(vectors: Tensor) -> bool:
    """Whether terms of these vectors are computed by fused kernels: see `fused.enabled`.

    Wider ones are not: a strip keeps its coefficients for plain products, three in all, where a
    kernel would compute its logits again for each part of a gradient.
    """
    narrow = vectors.shape[1] <= fused.WIDEST
    return narrow and vectors.dtype == torch.float32 and fused.enabled(vectors.device)


def summands(pairs: Pairs, rows: slice, strip: Tensor, first: int = 0) -> list[Tensor]:
    """The weighed exponentials of a strip, one tensor a moment; the last in the strip's memory.

    Args:
        pairs: what is compared.
        rows: the strip's anchors.
        strip: their logits.
        first: the strip's first key, where earlier ones are left out; not above its first anchor,
            which is a key of the same number and itself excluded.
    """
    out = None
    if pairs.exclude is None and pairs.anchor_tag is not None and pairs.key_tag is not None:
        out = pairs.anchor_tag[rows, None] == pairs.key_tag[first:]
    if pairs.floor > -math.inf:
        low = strip < pairs.floor
        out = low if out is None else out | low
    weight = None
    if pairs.anchor_weight is not None and pairs.key_weight is not None:
        weight = pairs.anchor_weight[rows] @ pairs.key_weight[first:].T
    exclude = None
    if pairs.exclude is not None:
        exclude = pairs.exclude[rows]
        if first:  # a key that is left out stands for the anchor itself
            number = torch.arange(rows.start, rows.stop, device=strip.device)
            exclude = torch.where(exclude < first, number[:, None], exclude) - first
    found = [torch.exp(strip * moment) for moment in pairs.moments[:-1]]
    last = strip if pairs.moments[-1] == 1 else strip.mul_(pairs.moments[-1])
    found.append(last.exp_())
    for part in found:
        if out is not None:
            part.masked_fill_(out, 0.0)
        if exclude is not None:
            part.scatter_(1, exclude, 0.0)
        if weight is not None:
            part.mul_(weight)
    return found
