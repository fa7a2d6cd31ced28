"""PLNL: guessed labels where the other network is sure, further complementary labels elsewhere."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from heron.pipeline.objectives.complementary import checked, log1m_exp


def plnl(
    views: Sequence[Float[Tensor, "rows classes"]],
    ybar: Float[Tensor, "rows classes"],
    guesses: Int[Tensor, " rows"],
    *,
    total: int,
    guessed: int,
    consistency: float,
) -> Float[Tensor, ""]:
    r"""The loss of one of PLNL's two networks (Li, Li and Jia 2025, as in the authors' code).

    .. math:: -\frac1n \sum_i \sum_{k \in \bar Y_i} \log(1 - p_{ik})
        + \frac{1}{m K} \sum_{i : y_i} \sum_k \mathrm{BCE}(\sigma(f_{ik}), [k = y_i])
        + \frac wn \sum_i \sum_{v > 1} \mathrm{KL}(q_i \,\|\, p^v_i)

    The first is SCL-LOG on the enhanced sets, the second the supervised loss of the m samples whose
    label is guessed. p and f are of the first view, p^v of another, and q is p outside the set,
    normalised, without gradient.

    Args:
        views: logits of this process's samples, one tensor a view, the first the least augmented.
        ybar: their complementary labels with what was added to them, 0 or 1.
        guesses: their guessed classes, -1 where there is none.
        total: samples in the whole batch; 0 gives a loss of 0.
        guessed: those of the whole batch whose label is guessed.
        consistency: w.

    Returns:
        The process's share of the loss.

    Raises:
        ValueError: a set is empty or holds every class, or is not of 0 and 1.
    """
    logits = checked(views[0], ybar)
    log_p = logits.log_softmax(1)
    wrong = -(ybar * log1m_exp(log_p)).sum() / max(total, 1)
    sure = guesses >= 0
    told = F.one_hot(guesses[sure], logits.shape[1]).to(logits)
    right = F.binary_cross_entropy_with_logits(logits[sure], told, reduction="sum")
    q = log_p.detach().masked_fill(ybar == 1, -torch.inf).softmax(1)
    apart = [F.kl_div(view.to(q).log_softmax(1), q, reduction="sum") for view in views[1:]]
    agree = torch.stack([wrong.new_zeros(()), *apart]).sum() / max(total, 1)
    return wrong + right / max(guessed * logits.shape[1], 1) + consistency * agree
