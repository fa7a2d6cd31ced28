"""MIB: views agree on what they share, and the codes of a sample on everything else."""

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from heron.pipeline.objectives.engine import RuleResult, blockwise


def mib(
    critics: Sequence[Float[Tensor, "batch dim"]],
    means: Sequence[Float[Tensor, "rows code"]],
    deviations: Sequence[Float[Tensor, "rows code"]],
    *,
    beta: float = 1.0,
    rows: slice = slice(None),
) -> Float[Tensor, ""]:
    r"""The multi-view information bottleneck (Federici et al. 2020, Section 3.2, L_MIB).

    .. math:: -I(z_1; z_2) + \beta D_{SKL}(p(z_1|v_1) \,\|\, p(z_2|v_2))

    I is the Jensen-Shannon estimate (Hjelm et al. 2019, Eq. 4) with the critic
    C_ij = c_1(z_1i) . c_2(z_2j),

    .. math:: I = -E_i[\log(1 + e^{-C_{ii}})] - E_{i \ne j}[\log(1 + e^{C_{ij}})]

    over all pairs of the batch, where the authors' code has one j for each i. D_SKL is the mean
    over samples of (KL(p_1 || p_2) + KL(p_2 || p_1)) / 2 of diagonal Gaussians, in closed form
    where the code draws. Of more than two views, the mean over their pairs.

    Args:
        critics: c(z) of the whole batch, one tensor a view.
        means: of p(z|v) of this process's rows, one tensor a view.
        deviations: standard deviations, as the means.
        beta: weight of D_SKL, >= 0.
        rows: this process's rows in the batch.

    Returns:
        The share of the loss that belongs to `rows`: a scalar.

    Raises:
        ValueError: fewer than two views.
    """
    if len(critics) < 2:
        raise ValueError(f"mib has {len(critics)} view; expected at least 2")
    couples = list(itertools.combinations(range(len(critics)), 2))
    batch = len(critics[0])
    own = torch.arange(batch, device=critics[0].device)[rows, None]
    parts = []
    for u, v in couples:
        apart = _divergence(means[u], deviations[u], means[v], deviations[v])
        parts.append(_minus_information(critics[u][rows], critics[v], own))
        parts.append(beta * apart / max(batch, 1))
    return torch.stack(parts).sum() / len(couples)


def _minus_information(anchors: Tensor, keys: Tensor, own: Tensor) -> Tensor:
    """The share of some anchors in -I; `own` is an anchor's place among the keys, [anchors, 1]."""
    batch = len(keys)
    of_positive, of_negative = 1 / max(batch, 1), 1 / max(batch * (batch - 1), 1)

    def rule(rows: slice, logits: Sequence[Tensor], _: Sequence[Tensor]) -> RuleResult:
        (strip,) = logits
        positive = strip.gather(1, own[rows])
        loss = F.softplus(-positive).sum() * of_positive
        loss = loss + F.softplus(strip).scatter_(1, own[rows], 0.0).sum() * of_negative
        slope = strip.sigmoid_().mul_(of_negative)
        slope.scatter_(1, own[rows], -of_positive * torch.sigmoid(-positive))
        return loss, [slope], []

    return blockwise(rule, [anchors], [keys])


def _divergence(mean: Tensor, deviation: Tensor, other: Tensor, width: Tensor) -> Tensor:
    """Sum over rows of the mean of KL(p || q) and KL(q || p), whose logarithms cancel."""
    p, q = deviation.square(), width.square()
    shift = (mean - other).square()
    return ((p + shift) / q + (q + shift) / p - 2).sum() / 4
