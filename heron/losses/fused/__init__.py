"""Contrastive terms on a GPU without a matrix of logits in memory.

The block-wise engine writes a strip of logits to memory and reads it several times; on a GPU these
passes, not the products, limit the speed. Here a tile of logits never leaves its multiprocessor,
which writes only a number per anchor, or a gradient. Backward computes the tiles again. Every sum
has a fixed order, so two runs agree to the last bit.

`exponential_sums` serves every term with a denominator, `mutual_operands` those whose rows are each
other's keys, `label_sums` and `pair_losses` HeroCon's L_s, `tagged_pair_losses` the attraction
inside a class; `enabled` says whether to use them, and `trusted` whether one gives right numbers.
"""

from heron.losses.fused.guard import Kernel, check_all, distrust, reasons, trusted
from heron.losses.fused.labels import Sides, label_sums
from heron.losses.fused.layout import (
    PRECISION,
    WIDEST,
    WIDEST_SIDE,
    Precision,
    balance,
    choose_precision,
    headroom,
    set_default_precision,
    unit_gradient,
    unit_rows,
)
from heron.losses.fused.pairs import pair_losses, tagged_pair_losses
from heron.losses.fused.sums import Operands, exponential_sums, mutual_operands
from heron.losses.fused.switch import available, enabled

__all__ = [
    "PRECISION",
    "WIDEST",
    "WIDEST_SIDE",
    "Kernel",
    "Operands",
    "Precision",
    "Sides",
    "available",
    "balance",
    "check_all",
    "choose_precision",
    "distrust",
    "enabled",
    "exponential_sums",
    "headroom",
    "label_sums",
    "mutual_operands",
    "pair_losses",
    "reasons",
    "set_default_precision",
    "tagged_pair_losses",
    "trusted",
    "unit_gradient",
    "unit_rows",
]
