"""Anchors, keys, and the weighted exponentials of their pairs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from heron.losses import fused
from heron.losses.products import note


@dataclass(frozen=True)
class Pairs:
    """Anchors, keys, and the weight of each of their pairs.

    With l_ik = anchors_i . keys_k (1 / tau is inside the anchors), an anchor's sum of moment m is

        sum_k w_ik 1[anchor_tag_i != key_tag_k] 1[l_ik >= floor] exp(m l_ik)

    where w_ik = anchor_weight_i . key_weight_k. The sums of several heads (other vectors for the
    same pairs) are added.

    Attributes:
        anchors: [anchors, dim] for each head, in the working dtype; heads may differ in dim.
        keys: [keys, dim] for each head.
        anchor_tag: whole numbers; pairs with equal tags are left out.
        key_tag: the tags of the keys; None leaves no pair out.
        exclude: where the tags leave few pairs out, the key columns of these pairs for each anchor:
            strips mask these columns and compare no tags.
        anchor_weight: [anchors, width]; its product with `key_weight` weighs a pair; not
            differentiated.
        key_weight: [keys, width], or None for weights of 1.
        moments: the factors m of the exponents; 0 counts the pairs.
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


def is_fused(vectors: Tensor, *kernels: fused.Kernel) -> bool:
    """Whether fused kernels compute the terms of these vectors: `fused.enabled`, `fused.trusted`.

    Vectors above `fused.WIDEST` take strips, which need three products and keep their coefficients;
    a kernel would compute the logits again for each slice of a gradient. Strips have the same
    precision (see `losses.products`), and are noted where they are computed.
    """
    narrow = vectors.shape[1] <= fused.WIDEST
    possible = narrow and vectors.dtype == torch.float32 and fused.enabled(vectors.device)
    if not possible or not all(fused.trusted(kernel, vectors.device) for kernel in kernels):
        return False
    note(f"fused kernels, {fused.choose_precision(None, vectors)}")
    return True


def summands(pairs: Pairs, rows: slice, strip: Tensor, first: int = 0) -> list[Tensor]:
    """Returns the weighted exponentials of a strip, one tensor per moment.

    The memory of the logits, `strip`, is reused for the last moment. `first` is the strip's first
    key, where earlier keys are left out; it is at most the number of its first anchor, which has
    the same number as a key and is excluded as such.
    """
    masked = None
    if pairs.exclude is None and pairs.anchor_tag is not None and pairs.key_tag is not None:
        masked = pairs.anchor_tag[rows, None] == pairs.key_tag[first:]
    if pairs.floor > -math.inf:
        below = strip < pairs.floor
        masked = below if masked is None else masked | below
    weight = None
    if pairs.anchor_weight is not None and pairs.key_weight is not None:
        weight = pairs.anchor_weight[rows] @ pairs.key_weight[first:].T
    exclude = None
    if pairs.exclude is not None:
        exclude = pairs.exclude[rows]
        if first:  # keys before the strip become the anchor itself
            own_columns = torch.arange(rows.start, rows.stop, device=strip.device)
            exclude = torch.where(exclude < first, own_columns[:, None], exclude) - first
    exponentials = [torch.exp(strip * moment) for moment in pairs.moments[:-1]]
    last = strip if pairs.moments[-1] == 1 else strip.mul_(pairs.moments[-1])
    exponentials.append(last.exp_())
    for values in exponentials:
        if masked is not None:
            values.masked_fill_(masked, 0.0)
        if exclude is not None:
            values.scatter_(1, exclude, 0.0)
        if weight is not None:
            values.mul_(weight)
    return exponentials
