"""Contrastive terms on a GPU without a matrix of logits in memory.

The block-wise engine writes a strip of logits to memory and reads it several times; on a GPU these
passes, not the products, limit the speed. Here a tile of logits never leaves its multiprocessor,
which writes only a number per anchor, or a gradient. Backward computes the tiles again. Every sum
has a fixed order, so two runs agree to the last bit.

`exponential_sums` serves every term with a denominator, `mutual_gradient` those whose rows are each
other's keys, `label_sums` and `pair_losses` HeroCon's L_s, `tagged_pair_losses` the attraction
inside a class; `enabled` says whether to use them, and `trusted` whether one gives right numbers.
"""

from heron.losses.fused.guard import Kernel as Kernel
from heron.losses.fused.guard import check_all as check_all
from heron.losses.fused.guard import distrust as distrust
from heron.losses.fused.guard import reasons as reasons
from heron.losses.fused.guard import trusted as trusted
from heron.losses.fused.labels import label_sums as label_sums
from heron.losses.fused.labels import log_sums as log_sums
from heron.losses.fused.layout import PRECISION as PRECISION
from heron.losses.fused.layout import WIDEST as WIDEST
from heron.losses.fused.layout import WIDEST_SIDE as WIDEST_SIDE
from heron.losses.fused.layout import Precision as Precision
from heron.losses.fused.layout import available as available
from heron.losses.fused.layout import balance as balance
from heron.losses.fused.layout import choose_precision as choose_precision
from heron.losses.fused.layout import enabled as enabled
from heron.losses.fused.layout import headroom as headroom
from heron.losses.fused.layout import set_default_precision as set_default_precision
from heron.losses.fused.pairs import pair_losses as pair_losses
from heron.losses.fused.pairs import tagged_pair_losses as tagged_pair_losses
from heron.losses.fused.sums import exponential_sums as exponential_sums
from heron.losses.fused.sums import mutual_gradient as mutual_gradient
