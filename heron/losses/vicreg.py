"""VICReg: views agree, columns vary, and columns do not repeat each other; no negatives."""

import itertools
from collections.abc import Sequence
from typing import Annotated

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from heron.losses.barlow_twins import own_columns
from heron.losses.batch import GlobalBatch
from heron.losses.engine import sum_of
from heron.losses.families import ProjectionLoss
from heron.losses.inputs import refuse_one_view
from heron.losses.terms import Needs

EPSILON = 1e-4  # added to variances before the root
Factor = Annotated[float, Field(ge=0)]


class Vicreg(ProjectionLoss):
    r"""VICReg (Bardes, Ponce and LeCun 2022, Eq. 1 to 6), for two views or more.

    With statistics of each column j over the N rows of the whole batch, and D columns,

    .. math:: \lambda\, s + \mu\, v + \nu\, c, \quad
              s = \operatorname{mean}_{u<v} \frac1{ND} \sum_i |z_{iu} - z_{iv}|^2, \quad
              v = \operatorname{mean}_u \frac1D \sum_j \max(0, 1 - \sqrt{\mathrm{var}_j + 10^{-4}}),
              \quad c = 2 \operatorname{mean}_u \frac1D \sum_{j \ne k} \mathrm{cov}_{jk}^2

    as the authors' code has it: s is also divided by D, and with two views v is the mean and c
    the sum of both. Variances and covariances are divided by N - 1.
    """

    needs = Needs(gathered=("projections",), views=2)

    def __init__(
        self,
        *,
        invariance: Factor = 25.0,
        variance: Factor = 25.0,
        covariance: Factor = 1.0,
        gather: bool = True,
    ) -> None:
        r"""Sets the options.

        Args:
            invariance: :math:`\lambda`, the weight of the distance of views.
            variance: :math:`\mu`, the weight of columns that vary too little.
            covariance: :math:`\nu`, the weight of what columns share.
            gather: take statistics of the rows of all processes.
        """
        super().__init__(gather=gather)
        self.factors = {"invariance": invariance, "variance": variance, "covariance": covariance}

    def share(self, batch: GlobalBatch) -> Tensor:
        """Returns `vicreg` of this process's columns."""
        z = batch.projections
        return vicreg(z, **self.factors, columns=own_columns(batch, z[0].shape[1]))


def vicreg(
    z: Sequence[Float[Tensor, "batch dim"]],
    *,
    invariance: float = 25.0,
    variance: float = 25.0,
    covariance: float = 1.0,
    columns: slice = slice(None),
) -> Float[Tensor, ""]:
    """VICReg (Bardes, Ponce and LeCun 2022, Eq. 6): the equation of `Vicreg`.

    Args:
        z: projections, one tensor of shape [batch, dim] a view, of the whole batch.
        invariance: weight of the distance of views, at least 0.
        variance: weight of columns that vary too little, at least 0.
        covariance: weight of what columns share, at least 0.
        columns: those that are summed here; the shares of all columns add up to the loss.

    Returns:
        The share of the loss that belongs to `columns`: a scalar.

    Raises:
        ValueError: fewer than two views.
    """
    refuse_one_view(z, "vicreg")
    rows, width = z[0].shape
    pairs = list(itertools.combinations([x[:, columns] for x in z], 2))
    near = sum_of([(x - y).square().sum() for x, y in pairs]) / (len(pairs) * max(rows, 1))
    narrow, shared = [], []
    for x in z:
        centred = x - x.sum(0) / max(rows, 1)
        products = centred.T @ centred[:, columns] / max(rows - 1, 1)
        own = products[columns].diagonal()
        narrow.append(torch.relu(1 - (own + EPSILON).sqrt()).sum())
        shared.append(products.square().sum() - own.square().sum())
    spread, repeated = sum_of(narrow) / len(z), 2 * sum_of(shared) / len(z)
    return (invariance * near + variance * spread + covariance * repeated) / width
