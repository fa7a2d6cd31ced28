"""The debiased contrastive loss: the sum over negatives without the share of the anchor's class."""

import math
from collections.abc import Sequence
from typing import Annotated

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from heron.config.terms import Needs, Temperature
from heron.losses.batch import GlobalBatch
from heron.losses.contrast import contrast
from heron.losses.families import ProjectionLoss
from heron.losses.mirroring import Mirroring
from heron.losses.own_positives import own_keys, positives, unit_views
from heron.losses.pairs import Pairs, Rows, as_slice


class Debiased(ProjectionLoss):
    r"""The debiased contrastive loss (Chuang et al. 2020, Eq. 7 and 8).

    `NtXent` with the sum over an anchor's N negatives replaced by

    .. math:: \max\Big(\frac{\sum f^- - N \tau^+ f^+}{1 - \tau^+},\; N e^{-1/\tau}\Big)
    """

    needs = Needs(vectors=("projections",), views=2)

    def __init__(
        self,
        *,
        tau: Temperature = 0.5,
        tau_plus: Annotated[float, Field(ge=0, lt=1)] = 0.1,
        gather: bool = True,
    ) -> None:
        """Sets the options.

        Args:
            tau: temperature, at least 0.003.
            tau_plus: prior probability that a negative has the anchor's class, in [0, 1).
            gather: compare the rows of all processes.
        """
        super().__init__(gather=gather)
        self.tau, self.tau_plus = tau, tau_plus

    def share(self, batch: GlobalBatch) -> Tensor:
        """Returns `debiased` of this process's anchors."""
        z = batch.vectors["projections"]
        return debiased(z, tau=self.tau, tau_plus=self.tau_plus, rows=batch.own_rows)


def debiased(
    z: Sequence[Float[Tensor, "batch dim"]],
    *,
    tau: float = 0.5,
    tau_plus: float = 0.1,
    rows: Rows = slice(None),
) -> Float[Tensor, ""]:
    """Debiased contrastive loss (Chuang et al. 2020, Eq. 7 and 8): the equation of `Debiased`.

    Args:
        z: projections, one tensor of shape [batch, dim] a view, of the whole batch.
        tau: temperature, > 0.
        tau_plus: prior probability that a negative is of the anchor's class, in [0, 1).
        rows: as in `nt_xent`.

    Raises:
        ValueError: fewer than two views, tau <= 0, or tau_plus outside [0, 1).
    """
    vectors = unit_views(z, tau, "debiased")
    count, batch, own = len(z), len(z[0]), as_slice(rows)
    samples = torch.arange(batch, device=z[0].device)
    negatives, mean = count * (batch - 1), 1 / (count * (count - 1) * max(batch, 1))

    def finish(sums: Tensor, per_anchor: Sequence[Tensor]) -> Tensor:
        (positive,) = per_anchor
        negative_sum = debias(sums, positive, negatives, tau, tau_plus)
        return torch.log1p(negative_sum * torch.exp(-positive)).sum() * mean

    pairs = Pairs(
        [torch.cat([view[own] for view in vectors]) / tau],
        [torch.cat(vectors)],
        anchor_tag=samples[own].repeat(count),
        key_tag=samples.repeat(count),
        exclude=own_keys(samples[own], batch, count).repeat(count, 1),
    )
    positive = positives(vectors, range(count), tau, own)
    mirroring = Mirroring.of(rows, batch, [0], [0], [range(count)])
    return contrast(pairs, finish, positive, mirroring=mirroring)


def debias(total: Tensor, positive: Tensor, negatives: int, tau: float, tau_plus: float) -> Tensor:
    """Estimates the sum of f over true negatives (Chuang et al. 2020, Eq. 7), clamped below.

    `total` is the sum of f over all `negatives`, `positive` the logit of the positive. Raises
    ValueError for tau_plus outside [0, 1).
    """
    if not 0 <= tau_plus < 1:
        raise ValueError(
            f"tau_plus must be a probability below 1, e.g. 1 / number of classes, got {tau_plus}"
        )
    estimate = (total - negatives * tau_plus * torch.exp(positive)) / (1 - tau_plus)
    return estimate.clamp(min=negatives * math.exp(-1 / tau))
