"""Contrastive terms on a GPU without a matrix of logits in memory.

The block-wise engine writes a strip of logits to memory and reads it several times; on a GPU these
passes, not the products, limit the speed. Here a tile of logits never leaves its multiprocessor,
which writes only a number per anchor, or a gradient. Backward computes the tiles again. Every sum
has a fixed order, so two runs agree to the last bit.

`exponential_sums` serves every term with a denominator, `mutual_gradient` those whose rows are each
other's keys, `label_sums` and `pair_losses` HeroCon's L_s, `tagged_pair_losses` the attraction
inside a class; `enabled` says whether to use them, and `trusted` whether one gives right numbers.
"""

from heron.losses.fused.guard import Kernel, check_all, describe_path, distrust, trusted
from heron.losses.fused.labels import label_sums, log_sums
from heron.losses.fused.layout import (
    WIDEST,
    WIDEST_SIDE,
    Precision,
    choose_precision,
    set_default_precision,
)
from heron.losses.fused.pairs import pair_losses, tagged_pair_losses
from heron.losses.fused.sums import exponential_sums, mutual_gradient
from heron.losses.fused.switch import available, enabled

__all__ = [
    "WIDEST",
    "WIDEST_SIDE",
    "Kernel",
    "Precision",
    "available",
    "check_all",
    "choose_precision",
    "describe_path",
    "distrust",
    "enabled",
    "exponential_sums",
    "label_sums",
    "log_sums",
    "mutual_gradient",
    "pair_losses",
    "set_default_precision",
    "tagged_pair_losses",
    "trusted",
]
