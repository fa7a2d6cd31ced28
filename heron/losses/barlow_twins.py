"""Barlow Twins: the correlations of two views' columns become the identity; no negatives."""

import itertools
from collections.abc import Sequence
from typing import Annotated

from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from heron.losses.batch import GlobalBatch
from heron.losses.engine import sum_of
from heron.losses.families import ProjectionLoss
from heron.losses.inputs import refuse_one_view
from heron.losses.terms import Needs

EPSILON = 1e-5  # added to variances, as batch norm does in the authors' code


class BarlowTwins(ProjectionLoss):
    r"""Barlow Twins (Zbontar et al. 2021, Eq. 1 and 2), for two views or more.

    With z standardised by the mean and the biased variance of each column over the whole batch, and
    :math:`C = z_u^T z_v / N`, the mean over pairs of views u < v of

    .. math:: \sum_i (1 - C_{ii})^2 + \lambda \sum_i \sum_{j \ne i} C_{ij}^2
    """

    needs = Needs(gathered=("projections",), views=2)

    def __init__(
        self, *, redundancy: Annotated[float, Field(ge=0)] = 0.0051, gather: bool = True
    ) -> None:
        r"""Sets the options.

        Args:
            redundancy: :math:`\lambda`, the weight of what columns share; .0051 is the authors'.
            gather: take statistics of the rows of all processes.
        """
        super().__init__(gather=gather)
        self.redundancy = redundancy

    def share(self, batch: GlobalBatch) -> Tensor:
        """Returns `barlow_twins` of this process's columns."""
        z = batch.projections
        columns = own_columns(batch, z[0].shape[1])
        return barlow_twins(z, redundancy=self.redundancy, columns=columns)


def own_columns(batch: GlobalBatch, width: int) -> slice:
    """Returns the columns that this process computes: as many of all as it has of the rows."""
    rows, count = batch.rows, max(batch.num_rows, 1)
    return slice(rows.start * width // count, rows.stop * width // count)


def barlow_twins(
    z: Sequence[Float[Tensor, "batch dim"]],
    *,
    redundancy: float = 0.0051,
    columns: slice = slice(None),
) -> Float[Tensor, ""]:
    """Barlow Twins (Zbontar et al. 2021, Eq. 1 and 2): the equation of `BarlowTwins`.

    Args:
        z: projections, one tensor of shape [batch, dim] a view, of the whole batch.
        redundancy: the weight of the correlations of different columns, at least 0.
        columns: those of the later view whose correlations are summed here; the shares of all
            columns add up to the loss.

    Returns:
        The share of the loss that belongs to `columns`: a scalar.

    Raises:
        ValueError: fewer than two views.
    """
    refuse_one_view(z, "barlow_twins")
    scaled = [standardised(x) for x in z]
    shares = []
    for first, second in itertools.combinations(scaled, 2):
        correlation = first.T @ second[:, columns] / max(len(first), 1)
        own = correlation[columns].diagonal()
        redundant = correlation.square().sum() - own.square().sum()
        shares.append((1 - own).square().sum() + redundancy * redundant)
    return sum_of(shares) / len(shares)


def standardised(x: Float[Tensor, "batch dim"]) -> Float[Tensor, "batch dim"]:
    """Returns columns of mean 0 and biased variance 1, or less where theirs is near 1e-5."""
    rows = max(len(x), 1)
    centred = x - x.sum(0) / rows
    return centred * (centred.square().sum(0) / rows + EPSILON).rsqrt()
